/* engine_cases.h -- what every engine must compute, and to the same bits: lengths, dtypes, weights, kinds, many at once. */
#ifndef ENGINE_CASES_H
#define ENGINE_CASES_H

#include <math.h>

#include "shm_common.h"

/* ---- values ---- */

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

/* ---- C13 ---- */

static enum { PRIVATE, BUCKET, MIXED } place;

static void one_length(void *buf, ddp_dtype d, int op, int64_t n) {
    size_t bytes = (size_t)n * ddp__dtype_bytes[d];
    char *end = (char *)buf + bytes;
    memset(end, 0x5a, 64);
    for (int64_t i = 0; i < n; i++) put(d, buf, i, value(d, rank_, i));
    ddp_coll c = coll(DDP_COLL_ALL_REDUCE, NULL, buf, n, d, "");
    c.reduce = op;
    must(&c);
    if (c.weight_sum != w->size) FAIL("weight_sum %g of %d ranks", c.weight_sum, w->size);
    for (int64_t i = 0; i < n; i++) {
        double got = get(d, buf, i), want = expected(d, op, w->size, i);
        if (!(fabs(got - want) <= tolerance(d)))
            FAIL("%s op %d, %lld elements: [%lld] is %.9g, not %.9g", ddp_dtype_name(d), op, (long long)n, (long long)i,
                 got, want);
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
    bool shared = place == BUCKET || (place == MIXED && rank_ == 0);
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

/* ---- weights, other kinds, many at once ---- */

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
        if (!(fabs(x[i] - want) < 1e-6))
            FAIL("%s of %lld: [%lld] is %g, not %g", what, (long long)n, (long long)i, x[i], want);
    CHECK(c.weight_sum == sum);
}

static void weights(void) {
    static const int64_t sizes[] = {1, 70, 5003, 200001};
    static const double some[] = {12, 4, 1, .5}, none[] = {0, 0, 0, 0}, last[] = {0, 2, 2, 2}, ones[] = {1, 0, 1, 1};
    join();
    void *bucket, *own = malloc(200001 * 4);
    CHECK(E->alloc(comm_, 200001 * 4, &bucket) == 0);
    for (int k = 0; k < 8; k++) {
        float *x = k % 2 ? bucket : own;
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
        int64_t n = sizes[k];
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
        float *x = (k % 2 ? (float *)mem : own) + k * LEN;
        int64_t n = k % 5 == 0 ? 7 : LEN;
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
        for (int i = 0; i < (k % 5 == 0 ? 7 : LEN) && k % 50 != 49; i++)
            CHECK(x[i] == all * (float)(k + i) + all * (all - 1) / 2);
        E->req_free(req[k]);
    }
    for (int i = 0; i < LEN; i++) CHECK(twice[i] == power);
    E->destroy(comm_, 1);
}

static void test_cases(void) {
    test_lengths();
    for (int p = 1; p <= MAX_P; p++) {
        simple("C12 weights", p, weights);
        simple("broadcast, all_gather, reduce_scatter, barrier", p, kinds);
        simple("300 requests at once, in order", p, many);
    }
}

#endif
