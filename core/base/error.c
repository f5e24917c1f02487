/* error.c -- the sticky error of a thread. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base.h"

enum { TEXT_MAX = 2048 };

typedef struct error_state {
    int status;
    char *text;  /* TEXT_MAX bytes, made at the first failure */
    char *taken; /* what error_take last gave out */
} error_state;

static _Thread_local error_state state;

/* Frees a thread's texts when it ends; a key because _Thread_local has no destructors in C. */
#include <pthread.h>
static pthread_key_t text_key;
static pthread_once_t text_once = PTHREAD_ONCE_INIT;
static void make_key(void) { pthread_key_create(&text_key, free); }

static bool make_texts(void) {
    if (state.text) return true;
    pthread_once(&text_once, make_key);
    char *both = malloc(2 * TEXT_MAX);
    if (!both) return false;
    both[0] = both[TEXT_MAX] = 0;
    state.text = both;
    state.taken = both + TEXT_MAX;
    pthread_setspecific(text_key, both);
    return true;
}

int ddp__fail(int status, const char *fmt, ...) {
    if (state.status) return state.status;
    state.status = status;
    if (make_texts()) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(state.text, TEXT_MAX, fmt, ap);
        va_end(ap);
    }
    return status;
}

/* ---- forks ---- */

static bool forked;
static void in_child(void) { forked = true; }
static void watch_forks(void) { pthread_atfork(NULL, NULL, in_child); }

void ddp__forbid_fork(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
}

bool ddp__forked(void) { return forked; }

int ddp__pending(void) {
    if (forked)
        ddp__fail(DDP_ESTATE,
                  "this process is a fork of one that had started ddp, whose threads and place in the job it has "
                  "not; fork before the first call, or start a program (io.popen, os.execute)");
    return state.status;
}
int ddp_error_peek(void) { return ddp__pending(); }

int ddp_error_set(int status, const char *text) {
    if (status >= 0) status = DDP_EINVAL;
    return ddp__fail(status, "%s", text ? text : "");
}

int ddp_error_take(const char **text) {
    int status = state.status;
    state.status = 0;
    if (text) *text = "";
    if (!status) return 0;
    if (state.text) {
        memcpy(state.taken, state.text, TEXT_MAX);
        if (text) *text = state.taken;
    } else if (text) {
        *text = "out of memory";
    }
    return status;
}

void ddp__error_save(ddp_saved_error *e) {
    e->status = state.status;
    e->text = state.status && state.text ? strdup(state.text) : NULL;
    state.status = 0;
}

void ddp__error_restore(ddp_saved_error *e) {
    state.status = e->status;
    if (e->text) snprintf(state.text, TEXT_MAX, "%s", e->text);
    free(e->text);
    e->text = NULL;
}

const char *ddp_status_name(int status) {
    static const char *const names[] = {"ok",      "value", "shape",    "dtype", "device",        "memory", "io",
                                        "timeout", "peer",  "mismatch", "state", "not supported", "null"};
    int i = -status;
    return i >= 0 && i < (int)(sizeof names / sizeof *names) ? names[i] : "unknown";
}

int ddp_abi_version(void) { return DDP_ABI; }
