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

/* Words of the generator in the lower halves of 64-bit lanes, one block a lane: there a product of 32 by 32 bits is one
 * instruction. What upper halves hold is never read. */
enum { LANES = CPU_W / 2, BESIDE = 4 };
typedef uint64_t lanes __attribute__((vector_size(LANES * 8), aligned(4), may_alias));
#if defined(__AVX512F__)
CPU_INLINE lanes product(lanes a, lanes b) { return (lanes)_mm512_mul_epu32((__m512i)a, (__m512i)b); }
static const lanes COUNT = {0, 1, 2, 3, 4, 5, 6, 7}, FIRST = {0, 8, 1, 9, 2, 10, 3, 11},
                   LAST = {4, 12, 5, 13, 6, 14, 7, 15};
#elif defined(__AVX2__)
CPU_INLINE lanes product(lanes a, lanes b) { return (lanes)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
static const lanes COUNT = {0, 1, 2, 3}, FIRST = {0, 4, 1, 5}, LAST = {2, 6, 3, 7};
#else
CPU_INLINE lanes product(lanes a, lanes b) { return (lanes)_mm_mul_epu32((__m128i)a, (__m128i)b); }
static const lanes COUNT = {0, 1}, FIRST = {0, 2}, LAST = {1, 3};
#endif

/* The words of LANES blocks, a b c d of the first, then of the next. */
CPU_INLINE void lay(lanes a, lanes b, lanes c, lanes d, uint32_t *w) {
    lanes ab = (a & 0xffffffff) | b << 32, cd = (c & 0xffffffff) | d << 32;
    *(lanes *)(void *)w = __builtin_shuffle(ab, cd, FIRST);
    *(lanes *)(void *)(w + 2 * LANES) = __builtin_shuffle(ab, cd, LAST);
}

/* w[0..CHUNK) of Philox blocks first, first + 1, ...: ddp__philox, BESIDE vectors at a time. */
static void words(ddp_rng rng, int64_t first, uint32_t *w) {
    const lanes m0 = (lanes){0} + 0xD2511F53u, m1 = (lanes){0} + 0xCD9E8D57u;
    for (int64_t at = 0; at < BLOCKS; at += BESIDE * LANES) {
        lanes a[BESIDE], b[BESIDE], c[BESIDE], d[BESIDE];
        for (int i = 0; i < BESIDE; i++) {
            a[i] = COUNT + (uint64_t)(first + at + i * LANES);
            b[i] = a[i] >> 32;
            c[i] = (lanes){0} + rng.call;
            d[i] = c[i] >> 32;
        }
        uint32_t k0 = (uint32_t)rng.key, k1 = (uint32_t)(rng.key >> 32);
        for (int round = 0; round < 10; round++) {
            for (int i = 0; i < BESIDE; i++) {
                lanes p0 = product(a[i], m0), p1 = product(c[i], m1);
                a[i] = p1 >> 32 ^ b[i] ^ k0;
                c[i] = p0 >> 32 ^ d[i] ^ k1;
                b[i] = p1;
                d[i] = p0;
            }
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        for (int i = 0; i < BESIDE; i++) lay(a[i], b[i], c[i], d[i], w + 4 * (at + i * LANES));
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
        float *y = cpu_target(dt, out, at, to);
        cpu_fetch(dt, in, at, n);
        cpu_fetch(dt, out, at, n);
        words(d->c->rng, at / 4, w);
        const float *x = cpu_source(dt, in, at, from, n);
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
