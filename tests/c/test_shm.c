/* link: @B/obj/core/comm/shm.o @B/obj/core/comm/shm_run.o @B/obj/core/comm/shm_coll.o @B/obj/core/comm/shm_reduce.o @B/obj/core/comm/signature.o @B/obj/core/comm/store.o @B/obj/core/base/error.o @B/obj/core/base/threads.o @B/obj/core/base/phase.o @B/obj/core/base/log.o @B/obj/core/tensor/dtype.o */
/* test_shm.c -- the shared-memory engine between processes: results, bits, and every way to end badly.
 * `test_shm bench` prints times of two ranks in place of testing. */
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <dirent.h>
#include <unistd.h>

#include "comm/engine.h"
#include "tensor/tensor.h"

enum { MAX_P = 4, DONE = 77 };

/* What the processes of a world and the test share. */
typedef struct world {
    int      size, port;
    double   timeout;
    uint64_t hash[MAX_P];
    char     why[MAX_P][600];
    char     said[MAX_P][900]; /* an engine's error text, for the case to look at */
    int      status[MAX_P];
    double   seconds[MAX_P];
} world;

static world     *w;
static int        rank_;
static ddp_store *store_;
static ddp_comm  *comm_;
static const ddp_engine *const E = &ddp__engine_shm;
static int failures;

#define FAIL(...) (snprintf(w->why[rank_], sizeof w->why[rank_], __VA_ARGS__), _exit(1))
#define CHECK(x) ((x) ? (void)0 : (void)FAIL("line %d: %s", __LINE__, #x))

static void store_open(void) {
    store_ = ddp__store_connect("127.0.0.1", w->port, ddp__now() + 10);
    if (!store_) FAIL("no store");
}

static int join_as(int rank, int size) {
    ddp_boot b = {.rank = rank, .size = size, .local_rank = rank, .local_size = size, .store = store_, .prefix = "t", .timeout = w->timeout, .cores = ddp__cores()};
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
static int say(int status) {
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
    int   fd = ddp__store_listen(false, &w->port);
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
    ddp_store_server *s = ddp__store_serve(fd);
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
        printf("ok shm %s\n", name);
    } else {
        printf("not ok shm %s: %s", name, why);
        for (int r = 0; r < w->size; r++)
            if (w->why[r][0] || w->said[r][0]) printf(" [rank %d: %s%s]", r, w->why[r], w->said[r]);
        printf("\n");
        failures++;
    }
    fflush(stdout);
}

static void simple(const char *name, int size, void (*fn)(void)) { verdict(name, run(size, 20, fn, -1), "failed"); }

/* ---- calls ------------------------------------------------------------------------------------------------------------ */

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

static ddp_req *post(ddp_coll *c) {
    ddp_req    *r;
    const char *text;
    if (try_post(c, &r) == 0) return r;
    ddp_error_take(&text);
    FAIL("post: %s", text);
    return NULL;
}

static int call(ddp_coll *c) {
    ddp_req *r;
    int      st = try_post(c, &r);
    if (st < 0) return st;
    st = E->wait(r);
    if (st == 0) c->weight_sum = E->weight_sum(r);
    E->req_free(r);
    return st;
}

static void must(ddp_coll *c) {
    if (call(c) == 0) return;
    const char *text;
    ddp_error_take(&text);
    FAIL("%s", text);
}

static void barrier(void) {
    ddp_coll c = coll(DDP_COLL_BARRIER, NULL, NULL, 0, DDP_U8, "");
    must(&c);
}

/* ---- values --------------------------------------------------------------------------------------------------------------- */

/* Element i of a rank: fractions for floats, so that order and rounding show; small numbers for the rest. */
static double value(ddp_dtype d, int rank, int64_t i) {
    uint32_t h = (uint32_t)(i * 2654435761u) ^ (uint32_t)(rank * 40503u + 977u);
    h ^= h >> 15;
    h *= 2246822519u;
    h ^= h >> 13;
    if (d == DDP_BOOL) return h % 3 == 0;
    if (ddp__is_float(d)) return (double)(h % 20011) / 4999 - 2;
    return h % 50;
}

static void put(ddp_dtype d, void *p, int64_t i, double v) { /* what is put can be read back exactly */
    switch (d) {
        case DDP_F32: ((float *)p)[i] = (float)v; break;
        case DDP_F64: ((double *)p)[i] = v; break;
        case DDP_F16: ((uint16_t *)p)[i] = ddp__f32_to_f16((float)v); break;
        case DDP_BF16: ((uint16_t *)p)[i] = ddp__f32_to_bf16((float)v); break;
        case DDP_I64: ((int64_t *)p)[i] = (int64_t)v; break;
        case DDP_I32: ((int32_t *)p)[i] = (int32_t)v; break;
        default: ((uint8_t *)p)[i] = (uint8_t)v; break;
    }
}

static double get(ddp_dtype d, const void *p, int64_t i) {
    switch (d) {
        case DDP_F32: return ((const float *)p)[i];
        case DDP_F64: return ((const double *)p)[i];
        case DDP_F16: return ddp__f16_to_f32(((const uint16_t *)p)[i]);
        case DDP_BF16: return ddp__bf16_to_f32(((const uint16_t *)p)[i]);
        case DDP_I64: return (double)((const int64_t *)p)[i];
        case DDP_I32: return ((const int32_t *)p)[i];
        default: return ((const uint8_t *)p)[i];
    }
}

static double rounded(ddp_dtype d, double v) {
    double x;
    put(d, &x, 0, v);
    return get(d, &x, 0);
}

/* The expected element, from the numbers as they were put. */
static double expected(ddp_dtype d, int op, int size, int64_t i) {
    double a = rounded(d, value(d, 0, i));
    for (int r = 1; r < size; r++) {
        double b = rounded(d, value(d, r, i));
        a = op == DDP_MIN ? fmin(a, b) : op == DDP_MAX ? fmax(a, b) : d == DDP_BOOL ? fmax(a, b) : a + b;
    }
    return op == DDP_MEAN ? a / size : a;
}

static double tolerance(ddp_dtype d) {
    static const double t[DDP_DTYPES] = {2e-6, 1e-14, 4e-3, 4e-2};
    return t[d];
}

static void mix_hash(const void *p, size_t n) {
    uint64_t h = w->hash[rank_] + 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++) h = (h ^ ((const uint8_t *)p)[i]) * 0x100000001b3u;
    w->hash[rank_] = h;
}

/* ---- C13 ----------------------------------------------------------------------------------------------------------------- */

static enum { PRIVATE, BUCKET, MIXED } place;

static void one_length(void *buf, ddp_dtype d, int op, int64_t n) {
    size_t bytes = (size_t)n * ddp__dtype_bytes[d];
    char  *end = (char *)buf + bytes;
    memset(end, 0x5a, 64);
    for (int64_t i = 0; i < n; i++) put(d, buf, i, value(d, rank_, i));
    ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, buf, n, d, "");
    c.reduce = op;
    must(&c);
    if (c.weight_sum != w->size) FAIL("weight_sum %g of %d ranks", c.weight_sum, w->size);
    for (int64_t i = 0; i < n; i++) {
        double got = get(d, buf, i), want = expected(d, op, w->size, i);
        if (!(fabs(got - want) <= tolerance(d))) FAIL("%s op %d, %lld elements: [%lld] is %.9g, not %.9g", ddp_dtype_name(d), op, (long long)n, (long long)i, got, want);
    }
    for (int i = 0; i < 64; i++)
        if (end[i] != 0x5a) FAIL("wrote past the end of %lld %s", (long long)n, ddp_dtype_name(d));
    mix_hash(buf, bytes);
}

static void lengths(void) {
    static const int64_t more[] = {127, 511, 1023, 1025, 4097, 65536, 100003, 262147, 700001};
    join();
    void *bucket, *own = malloc((size_t)800000 * 8);
    CHECK(E->alloc(comm_, (size_t)800000 * 8, &bucket) == 0);
    bool  shared = place == BUCKET || (place == MIXED && rank_ == 0);
    char *buf = shared ? bucket : own;
    for (int d = 0; d < DDP_DTYPES; d++)
        for (int op = DDP_SUM; op <= DDP_MAX; op++) {
            if (op == DDP_MEAN && !ddp__is_float(d)) continue;
            for (int64_t n = 0; n <= 70; n++) one_length(buf, d, op, n);
            for (size_t k = 0; k < sizeof more / sizeof *more; k++)
                if (more[k] < 100000 || op == DDP_SUM || d == DDP_F32) one_length(buf + 64, d, op, more[k]);
            one_length(buf + ddp__dtype_bytes[d], d, op, 5001); /* not on a cache line */
        }
    barrier();
    E->dealloc(comm_, bucket);
    E->destroy(comm_, 1);
}

static void test_lengths(void) {
    static const char *const names[] = {"private", "bucket", "mixed"};
    for (int p = 1; p <= MAX_P; p++)
        for (place = PRIVATE; place <= MIXED; place++) {
            char name[96];
            snprintf(name, sizeof name, "C13 every length, dtype and op: %d ranks, %s memory", p, names[place]);
            bool ok = run(p, 60, lengths, -1), same = true;
            for (int r = 1; r < p; r++) same &= w->hash[r] == w->hash[0];
            verdict(name, ok && same, same ? "wrong" : "ranks hold different bits");
        }
}

/* ---- weights, other kinds, many at once --------------------------------------------------------------------------------------- */

static void weighted(float *x, int64_t n, int op, const double *weight, const char *what) {
    double sum = 0, want = 0;
    for (int r = 0; r < w->size; r++) {
        sum += weight[r];
        want += op == DDP_MEAN ? weight[r] * (r + 1) : weight[r] != 0 ? r + 1 : 0;
    }
    if (op == DDP_MEAN) want = sum != 0 ? want / sum : 0;
    for (int64_t i = 0; i < n; i++) x[i] = weight[rank_] == 0 ? NAN : (float)(rank_ + 1);
    ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, x, n, DDP_F32, "w");
    c.reduce = op;
    c.weight = weight[rank_];
    must(&c);
    for (int64_t i = 0; i < n; i++)
        if (!(fabs(x[i] - want) < 1e-6)) FAIL("%s of %lld: [%lld] is %g, not %g", what, (long long)n, (long long)i, x[i], want);
    CHECK(c.weight_sum == sum);
}

static void weights(void) {
    static const int64_t sizes[] = {1, 70, 5003, 200001};
    static const double  some[] = {12, 4, 1, .5}, none[] = {0, 0, 0, 0}, last[] = {0, 2, 2, 2}, ones[] = {1, 0, 1, 1};
    join();
    void *bucket, *own = malloc(200001 * 4);
    CHECK(E->alloc(comm_, 200001 * 4, &bucket) == 0);
    for (int k = 0; k < 8; k++) {
        float  *x = k % 2 ? bucket : own;
        int64_t n = sizes[k / 2];
        weighted(x, n, DDP_MEAN, some, "12/4 mean");
        weighted(x, n, DDP_MEAN, none, "mean of none");
        weighted(x, n, DDP_MEAN, last, "mean without rank 0");
        weighted(x, n, DDP_SUM, ones, "sum without rank 1");
        weighted(x, n, DDP_SUM, none, "sum of none");
    }
    E->destroy(comm_, 1);
}

static void kinds(void) {
    static const int64_t sizes[] = {0, 1, 3, 257, 1024, 70001, 300007};
    join();
    int size = w->size;
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        int64_t  n = sizes[k];
        int32_t *x = malloc((size_t)(n * size + 1) * 4), *y = malloc((size_t)(n * size + 1) * 4);
        for (int root = 0; root < size; root++) {
            for (int64_t i = 0; i < n; i++) x[i] = (int32_t)(i * 7 + rank_);
            ddp_coll c = coll(DDP_COLL_BROADCAST, NULL, x, n, DDP_I32, "");
            c.root = root;
            must(&c);
            for (int64_t i = 0; i < n; i++) CHECK(x[i] == (int32_t)(i * 7 + root));
        }
        for (int64_t i = 0; i < n; i++) x[i] = (int32_t)(i * 5 + rank_);
        ddp_coll c = coll(DDP_COLL_ALL_GATHER, x, y, n, DDP_I32, "");
        must(&c);
        for (int64_t i = 0; i < n * size; i++) CHECK(y[i] == (int32_t)(i % n * 5 + i / n));
        for (int64_t i = 0; i < n * size; i++) x[i] = (int32_t)(i * 3 + rank_);
        c = coll(DDP_COLL_REDUCE_SCATTER, x, y, n, DDP_I32, "");
        must(&c);
        for (int64_t i = 0; i < n; i++) CHECK(y[i] == (int32_t)((rank_ * n + i) * 3 * size + size * (size - 1) / 2));
        barrier();
        free(x);
        free(y);
    }
    ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, &size, 1, DDP_I32, "");
    c.reduce = c.sig.reduce = DDP_MEAN;
    ddp_req *r;
    CHECK(say(E->post(comm_, &c, &r)) == DDP_EDTYPE);
    w->said[rank_][0] = 0;
    barrier(); /* a refused call harms nobody */
    E->destroy(comm_, 1);
}

static void many(void) {
    enum { N = 300, LEN = 3000 };
    static ddp_req *req[N];
    join();
    void *mem;
    CHECK(E->alloc(comm_, (size_t)N * LEN * 4, &mem) == 0);
    float *own = malloc((size_t)N * LEN * 4), *twice = calloc(LEN, 4);
    for (int i = 0; i < LEN; i++) twice[i] = 1;
    if (rank_ == w->size - 1) usleep(50000);
    for (int k = 0; k < N; k++) {
        float   *x = (k % 2 ? (float *)mem : own) + k * LEN;
        int64_t  n = k % 5 == 0 ? 7 : LEN;
        for (int64_t i = 0; i < n; i++) x[i] = (float)(k + i + rank_);
        ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, k % 50 == 49 ? twice : x, k % 50 == 49 ? LEN : n, DDP_F32, "many");
        double begin = ddp__now();
        req[k] = post(&c);
        if (ddp__now() - begin > .04) FAIL("post %d took %.3f s", k, ddp__now() - begin);
        if (k % 7 == 0) CHECK(E->test(req[k]) >= 0);
    }
    for (int k = N - 1; k >= 0; k--) {
        CHECK(E->wait(req[k]) == 0);
        if (k == N - 1)
            for (int j = 0; j < N; j++) CHECK(E->test(req[j]) == 1); /* in order: the last is done, so all are */
    }
    float all = (float)w->size, power = powf(all, N / 50);
    for (int k = 0; k < N; k++) {
        float *x = (k % 2 ? (float *)mem : own) + k * LEN;
        for (int i = 0; i < (k % 5 == 0 ? 7 : LEN) && k % 50 != 49; i++) CHECK(x[i] == all * (float)(k + i) + all * (all - 1) / 2);
        E->req_free(req[k]);
    }
    for (int i = 0; i < LEN; i++) CHECK(twice[i] == power);
    E->destroy(comm_, 1);
}

/* ---- ends ------------------------------------------------------------------------------------------------------------------- */

static bool said(int rank, int status, const char *const *parts) {
    if (w->status[rank] != status) return false;
    for (; *parts; parts++)
        if (!strstr(w->said[rank], *parts)) return false;
    return true;
}
#define SAID(rank, st, ...) said(rank, st, (const char *const[]){__VA_ARGS__, NULL})

static float data_[200000];

static void mismatch(void) {
    join();
    barrier();
    barrier();
    ddp_coll c = rank_ == 1 ? coll(DDP_COLL_BROADCAST, NULL, data_, 10, DDP_F32, "") : coll(DDP_COLL_ALL_REDUCE, NULL, data_, 4096, DDP_F32, "loss");
    say(call(&c));
    ddp_req *r; /* dead from now on */
    CHECK(E->post(comm_, &c, &r) == DDP_EMISMATCH && E->health(comm_) == DDP_EMISMATCH);
    ddp_error_take(NULL);
    E->destroy(comm_, 0);
}

static int differ; /* which field */
static void fields(void) {
    join();
    bool     me = rank_ == 1;
    ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, data_, differ == 0 && me ? 11 : 10, differ == 1 && me ? DDP_I32 : DDP_F32, differ == 2 && me ? "b" : "a");
    c.reduce = differ == 3 && me ? DDP_MAX : DDP_SUM;
    c.root = differ == 4 && me;
    say(call(&c));
    E->destroy(comm_, 0);
}

/* Ranks 0 and 1 differ; rank 2 never comes, and they need not wait for it. */
static void mismatch_early(void) {
    join();
    if (rank_ == 2) {
        sleep(3);
        return;
    }
    ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, data_, rank_ ? 50000 : 40000, DDP_F32, "");
    double   begin = ddp__now();
    say(call(&c));
    w->seconds[rank_] = ddp__now() - begin;
}

static void test_mismatch(void) {
    bool ok = run(2, 10, mismatch, -1);
    for (int r = 0; r < 2; r++) ok &= SAID(r, DDP_EMISMATCH, "rank 0 calls all_reduce #3 sum (f32 x 4096, loss, train.lua:10)", "rank 1 calls broadcast #3 from 0 (f32 x 10, train.lua:11)");
    verdict("C3 a mismatch names both calls on both ranks", ok, "texts");
    ok = run(3, 10, mismatch, -1);
    for (int r = 0; r < 3; r++) ok &= SAID(r, DDP_EMISMATCH, "broadcast #3 from 0 (f32 x 10, train.lua:11)");
    verdict("C3 every one of three ranks finds the mismatch", ok, "texts");
    ok = true;
    for (differ = 0; differ < 5 && ok; differ++) ok = run(2, 10, fields, -1) && w->status[0] == DDP_EMISMATCH && w->status[1] == DDP_EMISMATCH;
    verdict("C3 count, dtype, name, reduction and root are compared", ok, "a field is not");
    ok = run(3, 10, mismatch_early, -1);
    for (int r = 0; r < 2; r++) ok &= w->status[r] == DDP_EMISMATCH && w->seconds[r] < 1;
    verdict("C3 two ranks differ while the third has not come", ok, "late");
}

static void stalled(void) {
    join();
    barrier();
    if (rank_ == 1) {
        sleep(4);
        ddp_coll late = coll(DDP_COLL_ALL_REDUCE, NULL, data_, 4096, DDP_F32, "bucket 3");
        double   begin = ddp__now();
        say(call(&late)); /* the others have given up */
        w->seconds[1] = ddp__now() - begin;
        return;
    }
    usleep(rank_ * 100000);
    ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, data_, 4096, DDP_F32, "bucket 3");
    double   begin = ddp__now();
    say(call(&c));
    w->seconds[rank_] = ddp__now() - begin;
    E->destroy(comm_, 0);
    sleep(4); /* the process lives on */
}

static void test_timeout(void) {
    bool ok = run(3, 1.5, stalled, -1);
    for (int r = 0; r < 3; r += 2) ok &= w->seconds[r] >= 1.5 && w->seconds[r] < 2.5 && SAID(r, DDP_ETIMEOUT, "rank 1 has not reached all_reduce #2 sum (f32 x 4096, bucket 3, train.lua:1");
    verdict("C1 C2 a wait ends between T and T + 1 s and names the missing", ok, "text or time");
    verdict("C1 who comes after the others gave up is told at once", w->seconds[1] < .5 && SAID(1, DDP_EPEER, "rank 0"), "not");
}

static void dies(void) {
    join();
    barrier();
    if (rank_ == 1) {
        usleep(200000);
        kill(getpid(), SIGKILL);
    }
    ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, data_, 100000, DDP_F32, "");
    double   begin = ddp__now();
    say(call(&c));
    w->seconds[rank_] = ddp__now() - begin;
}

static void leaves(void) {
    join();
    if (rank_ == 1) {
        usleep(200000);
        E->destroy(comm_, 1);
        sleep(1);
        return;
    }
    ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, data_, 100, DDP_F32, "");
    double   begin = ddp__now();
    say(call(&c));
    w->seconds[rank_] = ddp__now() - begin;
}

static void *abort_later(void *arg) {
    usleep(200000);
    E->abort(comm_, "worker 3: out of memory");
    E->abort(comm_, "a second reason");
    CHECK(E->health(comm_) == DDP_EPEER);
    ddp_error_take(NULL);
    return arg;
}

static void aborted(void) {
    pthread_t t;
    join();
    barrier();
    if (rank_ == 1) CHECK(pthread_create(&t, NULL, abort_later, NULL) == 0);
    double begin = ddp__now();
    if (rank_ == 2) sleep(1);
    ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, data_, 100, DDP_F32, "");
    ddp_req *r = NULL;
    int      st = E->post(comm_, &c, &r);
    if (st == 0) st = E->wait(r);
    say(st);
    w->seconds[rank_] = ddp__now() - begin;
    if (rank_ == 1) pthread_join(t, NULL);
    E->req_free(r);
    E->destroy(comm_, 0);
}

static void test_faults(void) {
    bool ok = run(3, 30, dies, 1);
    for (int r = 0; r < 3; r += 2) ok &= w->seconds[r] < 1 && SAID(r, DDP_EPEER, "peer: rank 1", "all_reduce #2");
    verdict("a killed peer is noticed and named", ok, "text or time");
    ok = run(2, 30, leaves, -1) && w->seconds[0] < .4 && SAID(0, DDP_EPEER, "peer: rank 1 left while rank 0 waits in all_reduce #1");
    verdict("a peer that left is named at once", ok, "text or time");
    ok = run(3, 30, aborted, -1);
    for (int r = 0; r < 3; r++) ok &= w->seconds[r] < 1.2 && SAID(r, DDP_EPEER, "peer: rank 1: worker 3: out of memory");
    verdict("an abort from any thread ends all ranks with its reason", ok, "text or time");
}

/* ---- joining ------------------------------------------------------------------------------------------------------------------- */

static void one_missing(void) {
    store_open();
    if (rank_ == 2) return;
    double begin = ddp__now();
    say(join_as(rank_, 3));
    w->seconds[rank_] = ddp__now() - begin;
}
static void twice(void) {
    store_open();
    if (rank_ == 2) usleep(200000);
    say(join_as(rank_ == 2 ? 1 : rank_, 2));
}
static void two_worlds(void) {
    store_open();
    say(join_as(rank_, 2 + rank_));
}
static void no_proc(void) {
    if (geteuid() == 0) CHECK(setresgid(65534, 65534, 65534) == 0 && setresuid(65534, 65534, 65534) == 0);
    prctl(PR_SET_DUMPABLE, 0);
    lengths();
}

static int entries(const char *path) {
    DIR *d = opendir(path);
    int  n = 0;
    while (d && readdir(d)) n++;
    if (d) closedir(d);
    return n;
}

/* Segments come and go: no descriptor stays. */
static void segments(void) {
    join();
    int fds = entries("/proc/self/fd");
    for (int k = 0; k < 50; k++) {
        void *p;
        CHECK(E->alloc(comm_, 100000, &p) == 0);
        for (int i = 0; i < 100000; i++) CHECK(((char *)p)[i] == 0);
        ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, p, 25000, DDP_F32, "");
        for (int i = 0; i < 25000; i++) ((float *)p)[i] = 1;
        must(&c);
        CHECK(((float *)p)[24999] == (float)w->size);
        E->dealloc(comm_, p);
    }
    CHECK(entries("/proc/self/fd") == fds);
    E->destroy(comm_, 1);
}

/* The last one to leave is not kept by the first; requests may outlive the communicator. */
static void leave_early(void) {
    join();
    ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, data_, 100, DDP_F32, "");
    ddp_req *r = NULL;
    if (rank_ == 0) {
        r = post(&c);
        E->destroy(comm_, 1);
        CHECK(E->test(r) < 0);
        ddp_error_take(NULL);
        CHECK(E->wait(r) < 0);
        ddp_error_take(NULL);
        E->req_free(r);
    } else {
        usleep(100000);
        CHECK(call(&c) == DDP_EPEER);
        E->destroy(comm_, 0);
    }
}

static void delayed(void) {
    setenv("DDP_FAULT", "delay:20", 1);
    join();
    for (int k = 0; k < 3; k++) {
        ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, data_, k == 0 ? 1 : 150000, DDP_F32, "");
        barrier();
        double begin = ddp__now();
        ddp_req *r = post(&c);
        if (ddp__now() - begin > .015) FAIL("post slept");
        CHECK(E->wait(r) == 0);
        double took = ddp__now() - begin;
        if (took < .019 || took > .03) FAIL("%.4f s", took);
        E->req_free(r);
    }
    E->destroy(comm_, 1);
}

static void test_joining(void) {
    bool ok = run(3, 1, one_missing, 2);
    for (int r = 0; r < 2; r++) ok &= w->seconds[r] >= 1 && w->seconds[r] < 2 && SAID(r, DDP_ETIMEOUT, "missing: rank 2 of 3");
    verdict("C1 a rank that never joins is named", ok, "text or time");
    verdict("two processes of one rank are told", run(3, 5, twice, -1) && SAID(2, DDP_EMISMATCH, "two processes", "rank 1") && w->status[0] == 0 && w->status[1] == 0, "not");
    ok = run(2, 2, two_worlds, -1);
    verdict("worlds of different sizes are told", ok && SAID(0, DDP_EMISMATCH, "rank 1 is in a world of 3", "of 2") && w->status[1] < 0, "not");
    place = BUCKET;
    int left = entries("/dev/shm");
    simple("without the right to look into rank 0's /proc", 3, no_proc);
    verdict("nothing is left in /dev/shm", entries("/dev/shm") == left, "a name is");
    for (int p = 2; p <= 3; p++) simple("segments come and go", p, segments);
    simple("leaving with requests outstanding", 2, leave_early);
    simple("C14 a delay of 20 ms takes 20 ms, and not in post", 2, delayed);
}

/* ---- times ------------------------------------------------------------------------------------------------------------------------ */

static int by_value(const void *a, const void *b) { return *(const double *)a < *(const double *)b ? -1 : *(const double *)a > *(const double *)b; }

static void bench(void) {
    static const size_t bytes[] = {4, 4096, 65536, 1 << 20, 25 << 20, 100 << 20};
    static double       t[4000];
    join();
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(rank_ % ddp__cores(), &one);
    sched_setaffinity(0, sizeof one, &one);
    void *bucket, *own = aligned_alloc(2 << 20, 100 << 20);
    madvise(own, 100 << 20, MADV_HUGEPAGE);
    CHECK(E->alloc(comm_, 100 << 20, &bucket) == 0);
    for (int where = 0; where < 2; where++)
        for (int k = 0; k < 6; k++) {
            int iters = bytes[k] > 2 << 20 ? 30 : bytes[k] > 65536 ? 500 : 4000;
            for (int i = 0; i < iters; i++) {
                float *x = where ? own : bucket;
                for (size_t j = 0; j < bytes[k] / 4; j++) x[j] = (float)(j & 3);
                ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, x, (int64_t)bytes[k] / 4, DDP_F32, "");
                barrier();
                double begin = ddp__now();
                must(&c);
                t[i] = ddp__now() - begin;
            }
            qsort(t, (size_t)iters, sizeof *t, by_value);
            if (rank_ == 0) printf("%d ranks  %-7s %10zu B  median %10.2f us  min %10.2f us\n", w->size, where ? "private" : "bucket", bytes[k], t[iters / 2] * 1e6, t[0] * 1e6);
        }
    fflush(stdout);
    barrier();
}

int main(int argc, char **argv) {
    w = mmap(NULL, sizeof *w, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (w == MAP_FAILED) return 2;
    if (argc > 1 && strcmp(argv[1], "bench") == 0) {
        bool ok = run(argc > 2 ? atoi(argv[2]) : 2, 60, bench, -1);
        if (!ok) printf("%s %s\n", w->why[0], w->why[1]);
        return !ok;
    }
    test_lengths();
    for (int p = 1; p <= MAX_P; p++) {
        simple("C12 weights", p, weights);
        simple("broadcast, all_gather, reduce_scatter, barrier", p, kinds);
        simple("300 requests at once, in order", p, many);
    }
    test_mismatch();
    test_timeout();
    test_faults();
    test_joining();
    return failures != 0;
}
