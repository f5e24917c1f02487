/* log.c -- log lines and the clock. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base.h"

static void (*hook)(void *ctx, int level, const char *text);
static void *hook_ctx;

void ddp_set_log_hook(void (*h)(void *ctx, int level, const char *text), void *ctx) {
    hook = h;
    hook_ctx = ctx;
}

void ddp__log(int level, const char *fmt, ...) {
    if (level == DDP_LOG_DEBUG) {
        static int on = -1;
        if (on < 0) on = getenv("DDP_DEBUG") != NULL;
        if (!on) return;
    }
    char text[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (hook) hook(hook_ctx, level, text);
    else fprintf(stderr, "ddp: %s\n", text);
}

void ddp_log_line(int level, const char *text) { ddp__log(level, "%s", text); }

double ddp__now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
