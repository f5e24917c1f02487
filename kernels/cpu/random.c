/* random.c -- draws of f32, f16 and bf16 in row-major order: the words of random.h, many blocks side by side, shaped by vector
 * functions. */
#include "../random.h"

#include "cpu.h"

#pragma omp declare simd notinbranch
extern float logf(float);
#pragma omp declare simd notinbranch
extern float cosf(float);
#pragma omp declare simd notinbranch
extern float sinf(float);

enum { BLOCKS = 128, CHUNK = 4 * BLOCKS };

/* w[0..CHUNK) of Philox blocks first, first + 1, ...: ddp__philox, one block a lane. */
static void words(ddp_rng rng, int64_t first, uint32_t *w) {
    uint32_t c0[BLOCKS], c1[BLOCKS], c2[BLOCKS], c3[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) {
        c0[i] = (uint32_t)(uint64_t)(first + i);
        c1[i] = (uint32_t)((uint64_t)(first + i) >> 32);
        c2[i] = (uint32_t)rng.call;
        c3[i] = (uint32_t)(rng.call >> 32);
    }
#pragma omp simd
    for (int i = 0; i < BLOCKS; i++) {
        uint32_t a = c0[i], b = c1[i], c = c2[i], d = c3[i];
        uint32_t k0 = (uint32_t)rng.key, k1 = (uint32_t)(rng.key >> 32);
        for (int round = 0; round < 10; round++) {
            uint64_t p0 = (uint64_t)0xD2511F53u * a, p1 = (uint64_t)0xCD9E8D57u * c;
            a = (uint32_t)(p1 >> 32) ^ b ^ k0;
            c = (uint32_t)(p0 >> 32) ^ d ^ k1;
            b = (uint32_t)p1;
            d = (uint32_t)p0;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        w[4 * i] = a;
        w[4 * i + 1] = b;
        w[4 * i + 2] = c;
        w[4 * i + 3] = d;
    }
}

/* The first `bits` bits, at most 24, of each word as a number in [0, 1). */
static void units(const uint32_t *w, int bits, float *u) {
    const float scale = 1 / (float)(1 << bits);
#pragma omp simd
    for (int i = 0; i < CHUNK; i++) u[i] = (float)(int32_t)(w[i] >> (32 - bits)) * scale;
}
/* As many as a dtype holds: ddp__unit_in. */
static int bits_of(ddp_dtype d) { return d == DDP_BF16 ? 8 : d == DDP_F16 ? 11 : 24; }

/* Sine and cosine in loops of their own: together the compiler makes one scalar call of them. */
static void normals(const float *u, float *v) {
    float radius[CHUNK / 2], angle[CHUNK / 2];
#pragma omp simd
    for (int i = 0; i < CHUNK / 2; i++) {
        radius[i] = sqrtf(-2 * logf(1 - u[2 * i]));
        angle[i] = 6.28318530717958647692f * u[2 * i + 1];
    }
#pragma omp simd
    for (int i = 0; i < CHUNK / 2; i++) v[2 * i] = radius[i] * cosf(angle[i]);
#pragma omp simd
    for (int i = 0; i < CHUNK / 2; i++) v[2 * i + 1] = radius[i] * sinf(angle[i]);
}

/* ---- fills ---- */

static const char *reject(const ddp_call *c) {
    return cpu_f32_or_half(c->out[0]) && ddp__meta_is_rowmajor(&c->out[0]->m) ? NULL
                                                                              : "row-major f32, f16 and bf16 only";
}

typedef struct draws {
    const ddp_call *c;
    bool normal;
    double scale, shift;
    uint32_t below;
} draws;

/* Chunks [lo, hi) of CHUNK elements. */
static void fill_chunks(const void *ctx, int64_t lo, int64_t hi) {
    const draws *d = ctx;
    const ddp_dtype dt = d->c->out[0]->m.dtype;
    char *out = ddp__ptr(d->c->out[0]);
    int64_t numel = d->c->out[0]->numel;
    for (int64_t at = lo * CHUNK; at < hi * CHUNK; at += CHUNK) {
        uint32_t w[CHUNK];
        float u[CHUNK], v[CHUNK], buffer[CHUNK], *y = cpu_target(dt, out, at, buffer);
        int64_t n = numel - at < CHUNK ? numel - at : CHUNK;
        words(d->c->rng, at / 4, w);
        units(w, d->normal ? 24 : bits_of(dt), u);
        if (d->normal) normals(u, v);
        const float *from = d->normal ? v : u;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) y[i] = (float)(from[i] * d->scale + d->shift);
        cpu_narrow(dt, y, out, at, n);
    }
}

static int each_chunk(const ddp_call *c, cpu_body body, const draws *d) {
    int64_t numel = c->out[0]->numel;
    if (numel) cpu_share((numel + CHUNK - 1) / CHUNK, numel, body, d);
    return 0;
}

static int fill(const ddp_call *c, bool normal, double scale, double shift) {
    return each_chunk(c, fill_chunks, &(draws){c, normal, scale, shift, 0});
}

static int run_rand(const ddp_call *c) { return fill(c, false, 1, 0); }
CPU_KERNEL(rand, reject, run_rand);
static int run_randn(const ddp_call *c) { return fill(c, true, 1, 0); }
CPU_KERNEL(randn, reject, run_randn);
static int run_uniform_(const ddp_call *c) {
    const ddp_uniform__attrs *a = c->attrs;
    return fill(c, false, a->hi - a->lo, a->lo);
}
CPU_KERNEL(uniform_, reject, run_uniform_);
static int run_normal_(const ddp_call *c) {
    const ddp_normal__attrs *a = c->attrs;
    return fill(c, true, a->std, a->mean);
}
CPU_KERNEL(normal_, reject, run_normal_);

/* ---- choices ---- */

/* unit < p as whole numbers: words, less their low 8 bits, below this. */
static uint32_t limit(double p) { return (uint32_t)ceil(p * 0x1p24); }

static void bernoulli_chunks(const void *ctx, int64_t lo, int64_t hi) {
    const draws *d = ctx;
    const ddp_dtype dt = d->c->out[0]->m.dtype;
    char *out = ddp__ptr(d->c->out[0]);
    int64_t numel = d->c->out[0]->numel;
    for (int64_t at = lo * CHUNK; at < hi * CHUNK; at += CHUNK) {
        uint32_t w[CHUNK];
        float buffer[CHUNK], *y = cpu_target(dt, out, at, buffer);
        int64_t n = numel - at < CHUNK ? numel - at : CHUNK;
        words(d->c->rng, at / 4, w);
#pragma omp simd
        for (int64_t i = 0; i < n; i++) y[i] = w[i] >> 8 < d->below ? 1.0f : 0.0f;
        cpu_narrow(dt, y, out, at, n);
    }
}

static int run_bernoulli_(const ddp_call *c) {
    return each_chunk(c, bernoulli_chunks,
                      &(draws){c, false, 0, 0, limit(((const ddp_bernoulli__attrs *)c->attrs)->p)});
}
CPU_KERNEL(bernoulli_, reject, run_bernoulli_);

static void dropout_chunks(const void *ctx, int64_t lo, int64_t hi) {
    const draws *d = ctx;
    const float scale = (float)d->scale;
    const ddp_dtype dt = d->c->out[0]->m.dtype;
    char *in = ddp__ptr(d->c->in[0]), *out = ddp__ptr(d->c->out[0]);
    int64_t numel = d->c->out[0]->numel;
    for (int64_t at = lo * CHUNK; at < hi * CHUNK; at += CHUNK) {
        uint32_t w[CHUNK];
        float from[CHUNK], to[CHUNK];
        uint8_t *mask = (uint8_t *)ddp__ptr(d->c->out[1]) + at;
        int64_t n = numel - at < CHUNK ? numel - at : CHUNK;
        const float *x = cpu_source(dt, in, at, from, n);
        float *y = cpu_target(dt, out, at, to);
        words(d->c->rng, at / 4, w);
#pragma omp simd
        for (int64_t i = 0; i < n; i++) {
            bool keep = w[i] >> 8 >= d->below;
            float v = x[i] * scale;
            y[i] = keep ? v : 0.0f;
            mask[i] = keep;
        }
        cpu_narrow(dt, y, out, at, n);
    }
}

static int run_dropout(const ddp_call *c) {
    const double p = ((const ddp_dropout_attrs *)c->attrs)->p;
    return each_chunk(c, dropout_chunks, &(draws){c, false, 1 / (1 - p), 0, limit(p)});
}
static const char *reject_dropout(const ddp_call *c) { /* drawn by logical position */
    return cpu_f32_or_half(c->in[0]) && ddp__meta_is_rowmajor(&c->in[0]->m) ? NULL : "row-major f32, f16 and bf16 only";
}
CPU_KERNEL(dropout, reject_dropout, run_dropout);
