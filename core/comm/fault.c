/* fault.c -- faults put in on purpose (fault.h). */
#include "fault.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../base/progress.h"

enum { ANY = -1, AT_INIT = 100, AT_STEP };

typedef enum action { KILL, STOP, SEGV, ABORT, EXIT, THROW, DELAY, SKIP, FLIP } action;
static const char *const actions[] = {"kill", "stop", "segv", "abort", "exit", "throw", "delay", "skip", "flip"};
static const char *const places[] = {"all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier"};
static const char ACTIONS[] = "kill, stop, segv, abort, exit:STATUS, throw, delay:MS, skip or flip";
static const char PLACES[] = "all_reduce, broadcast, all_gather, reduce_scatter, barrier, init or step";
static const char WORDS[] = "rank, node, step, call, restart, at and do";

static struct {
    bool set, done; /* there is one for this rank; it has happened */
    int64_t step, call;
    int at; /* ddp_coll_kind, AT_INIT, AT_STEP, ANY */
    action what;
    double value;  /* of exit, delay */
    int64_t calls; /* that have come to `at`, in step `calls_step` */
    int64_t calls_step;
} f;

/* ---- reading ---- */

static int bad(const char *word, const char *value, const char *expected) {
    return ddp__fail(DDP_EINVAL, "init: DDP_FAULT: %s is \"%s\", expected %s", word, value, expected);
}

static int number(const char *word, const char *value, int64_t least, int64_t *out) {
    char *end;
    errno = 0;
    *out = strtoll(value, &end, 10);
    if (*value && !*end && !errno && *out >= least) return 0;
    return bad(word, value, least ? "a whole number from 1" : "a whole number from 0");
}

static int find(const char *const *names, size_t n, const char *name) {
    for (size_t i = 0; i < n; i++)
        if (strcmp(names[i], name) == 0) return (int)i;
    return -1;
}

static int read_place(const char *value) {
    int k = find(places, sizeof places / sizeof *places, value);
    f.at = strcmp(value, "init") == 0 ? AT_INIT : strcmp(value, "step") == 0 ? AT_STEP : k;
    return f.at < 0 ? bad("at", value, PLACES) : 0;
}

static int read_action(char *value) {
    char *colon = strchr(value, ':'), *end = NULL;
    if (colon) *colon = 0;
    int k = find(actions, sizeof actions / sizeof *actions, value);
    if (colon) *colon = ':';
    bool wants_value = k == EXIT || k == DELAY;
    if (k < 0 || wants_value != (colon != NULL)) return bad("do", value, ACTIONS);
    if (colon) {
        f.value = strtod(colon + 1, &end);
        if (end == colon + 1 || *end || !(f.value >= 0 && f.value < 1e9)) return bad("do", value, ACTIONS);
    }
    f.what = (action)k;
    return 0;
}

/* One word of `name=value`; a status. */
static int read_word(char *word, int64_t *rank, int64_t *node, int64_t *restart, bool *acts) {
    char *value = strchr(word, '=');
    if (!value) return bad("a word", word, "NAME=VALUE, like do=kill");
    *value++ = 0;
    if (strcmp(word, "rank") == 0) return number(word, value, 0, rank);
    if (strcmp(word, "node") == 0) return number(word, value, 0, node);
    if (strcmp(word, "restart") == 0) return number(word, value, 0, restart);
    if (strcmp(word, "step") == 0) return number(word, value, 1, &f.step);
    if (strcmp(word, "call") == 0) return number(word, value, 1, &f.call);
    if (strcmp(word, "at") == 0) return read_place(value);
    if (strcmp(word, "do") != 0) return bad("a word", word, WORDS);
    *acts = true;
    return read_action(value);
}

static void step_ended(int64_t steps);

int ddp__fault_read(int rank, int node) {
    const char *env = getenv("DDP_FAULT"), *k = getenv("DDP_RESTART");
    char text[512], *rest = text;
    int64_t wanted_rank = ANY, wanted_node = ANY, restart = 0;
    bool acts = false;
    memset(&f, 0, sizeof f);
    f.at = ANY;
    if (!env || !*env || strncmp(env, "delay:", 6) == 0) return 0;
    if (strlen(env) >= sizeof text) return bad("it", env, "less than 512 characters");
    snprintf(text, sizeof text, "%s", env);
    for (char *word; (word = strtok_r(rest, " ,", &rest));) {
        int st = read_word(word, &wanted_rank, &wanted_node, &restart, &acts);
        if (st < 0) return st;
    }
    if (!acts) return bad("it", env, "a word do=, like do=kill");
    bool collective = f.at != AT_INIT && f.at != AT_STEP;
    if (!collective && (f.what == SKIP || f.what == FLIP))
        return bad("do", actions[f.what], "a collective as its place");
    f.set = (wanted_rank == ANY || wanted_rank == rank) && (wanted_node == ANY || wanted_node == node) &&
            restart == (k ? atoi(k) : 0);
    if (f.set && f.at == AT_STEP) ddp__step_ended = step_ended;
    return 0;
}

/* ---- happening ---- */

static void sleep_ms(double ms) {
    struct timespec t = {(time_t)(ms / 1000), (long)((ms - 1000 * (double)(time_t)(ms / 1000)) * 1e6)};
    while (nanosleep(&t, &t) != 0 && errno == EINTR) {
    }
}

/* What befalls the process itself; else a status. */
static int befall(const char *where) {
    f.done = f.what != DELAY || f.step || f.call;
    if (f.what != DELAY) fprintf(stderr, "DDP_FAULT: %s at %s\n", actions[f.what], where);
    switch (f.what) {
        case KILL: return raise(SIGKILL);
        case STOP: return raise(SIGSTOP);
        case SEGV: signal(SIGSEGV, SIG_DFL); return raise(SIGSEGV);
        case ABORT: abort();
        case EXIT: exit((int)f.value);
        case DELAY: sleep_ms(f.value); return 0;
        case THROW: return ddp__fail(DDP_ESTATE, "%s: thrown by DDP_FAULT", where);
        case SKIP:
        case FLIP: return 0;
    }
    return 0;
}

static void step_ended(int64_t steps) {
    if (f.done || (f.step && steps != f.step)) return;
    befall("the step's end"); /* an error stays pending: the step's next call ends with it */
}

int ddp__fault_at_init(void) { return f.set && f.at == AT_INIT && !f.done ? befall("init") : 0; }

int ddp__fault_at_collective(const ddp_signature *sig, ddp_fault_do *out) {
    if (!f.set || f.done || f.at == AT_INIT || f.at == AT_STEP) return 0;
    int64_t step = ddp_stats_steps() + 1;
    if ((f.step && step != f.step) || (f.at != ANY && sig->kind != f.at)) return 0;
    if (f.step && f.calls_step != step) f.calls = 0;
    f.calls_step = step;
    if (f.call && ++f.calls != f.call) return 0;
    char where[300];
    int st = befall(ddp__signature_text(sig, where, sizeof where));
    if (f.what == SKIP) *out = DDP_FAULT_SKIP;
    if (f.what == FLIP) *out = DDP_FAULT_FLIP;
    return st;
}

/* Bit 23 of a word that is not 0: twice or half of an f32. */
void ddp__fault_flip(void *p, size_t n) {
    unsigned char *bytes = p;
    size_t words = n / 4, at = words / 2;
    uint32_t word = 0;
    for (size_t tries = 0; tries < words; tries++, at = (at + 1) % words) {
        memcpy(&word, bytes + 4 * at, 4);
        if (word) break;
    }
    word ^= 1u << 23;
    if (words) memcpy(bytes + 4 * at, &word, 4);
    else if (n) bytes[0] ^= 1;
}
