/* shm_common.h -- worlds of processes that share an engine, for test_shm*.c. */
#ifndef SHM_COMMON_H
#define SHM_COMMON_H

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/engine.h"
#include "tensor/tensor.h"

enum { MAX_P = 4, DONE = 77 };

/* What the processes of a world and the test share. */
typedef struct world {
    int size, port;
    double timeout;
    uint64_t hash[MAX_P];
    char why[MAX_P][600];
    char said[MAX_P][900]; /* an engine's error text, for the case to look at */
    int status[MAX_P];
    double seconds[MAX_P];
} world;

static world *w;
static int rank_;
static ddp_store *store_;
static ddp_comm *comm_;
static const ddp_engine *E = &ddp__engine_shm;
static int failures;

#define FAIL(...) (snprintf(w->why[rank_], sizeof w->why[rank_], __VA_ARGS__), _exit(1))
#define CHECK(x) ((x) ? (void)0 : (void)FAIL("line %d: %s", __LINE__, #x))

static void store_open(void) {
    store_ = ddp__store_connect("127.0.0.1", w->port, "test", ddp__now() + 10);
    if (!store_) FAIL("no store");
}

static int join_as(int rank, int size) {
    ddp_boot b = {.rank = rank,
                  .size = size,
                  .local_rank = rank,
                  .local_size = size,
                  .store = store_,
                  .prefix = "t",
                  .timeout = w->timeout,
                  .cores = ddp__cores()};
    return E->init(&comm_, &b);
}

static void join(void) {
    store_open();
    const char *text;
    if (join_as(rank_, w->size) != 0) {
        ddp_error_take(&text);
        FAIL("init: %s", text);
    }
}

/* Keeps the pending error for the case, and clears it. */
static __attribute__((unused)) int say(int status) {
    const char *text;
    int pending = ddp_error_take(&text);
    w->status[rank_] = status;
    snprintf(w->said[rank_], sizeof w->said[rank_], "%s", text);
    CHECK(pending == (status < 0 ? status : 0));
    return status;
}

/* Runs fn in `size` processes; true when all ended as DONE or `killed` (the rank that is expected not to). */
static bool run(int size, double timeout, void (*fn)(void), int killed) {
    memset(w, 0, sizeof *w);
    w->size = size;
    w->timeout = timeout;
    w->port = 0;
    int fd = ddp__store_listen("127.0.0.1", &w->port);
    pid_t pids[MAX_P];
    fflush(stdout);
    for (int r = 0; r < size; r++) {
        pid_t pid = fork();
        if (pid == 0) {
            rank_ = r;
            close(fd);
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            alarm(120);
            fn();
            _exit(DONE);
        }
        pids[r] = pid;
    }
    ddp_store_server *s = ddp__store_serve(fd, "test");
    bool ok = true;
    /* The killed one is looked at last: it stays a zombie while the others wait for it. */
    for (int pass = 0; pass < 2; pass++)
        for (int r = 0; r < size; r++) {
            if ((r == killed) != (pass == 1)) continue;
            int st;
            waitpid(pids[r], &st, 0);
            if (r == killed || (WIFEXITED(st) && WEXITSTATUS(st) == DONE)) continue;
            ok = false;
            if (!w->why[r][0]) snprintf(w->why[r], sizeof w->why[r], "ended with status 0x%x", st);
        }
    ddp__store_server_free(s);
    return ok;
}

static void verdict(const char *name, bool ok, const char *why) {
    if (ok) {
        printf("ok %s %s\n", E->name, name);
    } else {
        printf("not ok %s %s: %s", E->name, name, why);
        for (int r = 0; r < w->size; r++)
            if (w->why[r][0] || w->said[r][0]) printf(" [rank %d: %s%s]", r, w->why[r], w->said[r]);
        printf("\n");
        failures++;
    }
    fflush(stdout);
}

static __attribute__((unused)) void simple(const char *name, int size, void (*fn)(void)) {
    verdict(name, run(size, 20, fn, -1), "failed");
}

/* ---- calls ---- */

static ddp_coll coll(ddp_coll_kind kind, const void *in, void *buf, int64_t n, ddp_dtype d, const char *name) {
    ddp_coll c = {.in = in, .buf = buf, .count = n, .dtype = d, .weight = 1, .deadline_s = w->timeout};
    c.sig.kind = (int32_t)kind;
    c.sig.dtype = (int32_t)d;
    c.sig.count = n;
    snprintf(c.sig.name, sizeof c.sig.name, "%s", name);
    snprintf(c.sig.where, sizeof c.sig.where, "train.lua:%d", 10 + rank_);
    return c;
}

static int try_post(ddp_coll *c, ddp_req **r) {
    *r = NULL;
    c->sig.reduce = c->reduce;
    c->sig.root = c->root;
    return E->post(comm_, c, r);
}

static __attribute__((unused)) ddp_req *post(ddp_coll *c) {
    ddp_req *r;
    const char *text;
    if (try_post(c, &r) == 0) return r;
    ddp_error_take(&text);
    FAIL("post: %s", text);
    return NULL;
}

static int call(ddp_coll *c) {
    ddp_req *r;
    int st = try_post(c, &r);
    if (st < 0) return st;
    st = E->wait(r);
    if (st == 0) c->weight_sum = E->weight_sum(r);
    E->req_free(r);
    return st;
}

static __attribute__((unused)) void must(ddp_coll *c) {
    if (call(c) == 0) return;
    const char *text;
    ddp_error_take(&text);
    FAIL("%s", text);
}

static __attribute__((unused)) void barrier(void) {
    ddp_coll c = coll(DDP_COLL_BARRIER, NULL, NULL, 0, DDP_U8, "");
    must(&c);
}

static bool shm_test_begin(void) {
    w = mmap(NULL, sizeof *w, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return w != MAP_FAILED;
}

/* A thread of rank 1 that ends the job, twice. */
static inline void *abort_later(void *arg) {
    usleep(200000);
    E->abort(comm_, "worker 3: out of memory");
    E->abort(comm_, "a second reason");
    CHECK(E->health(comm_) == DDP_EPEER);
    ddp_error_take(NULL);
    return arg;
}

#endif
