/* random.c -- draws of f32, f16 and bf16 in row-major order: the words of random.h, many blocks side by side, shaped by vector
 * functions. */
#include "../random.h"

#include <string.h>

#include "vectors.h"

#pragma omp declare simd notinbranch
extern float logf(float);
#pragma omp declare simd notinbranch
extern float cosf(float);
#pragma omp declare simd notinbranch
extern float sinf(float);

enum { BLOCKS = 128, CHUNK = 4 * BLOCKS };

/* Words of the generator in the lower halves of 64-bit lanes, one block a lane: there a product of 32 by 32 bits is one
 * instruction. What upper halves hold is never read. */
enum { LANES = CPU_W / 2, BESIDE = 4, GROUP = 4 * BESIDE * LANES, ROUNDS = 10 };
typedef uint64_t wide __attribute__((vector_size(LANES * 8), aligned(4), may_alias));
#if defined(__AVX512F__)
CPU_INLINE wide product(wide a, wide b) { return (wide)_mm512_mul_epu32((__m512i)a, (__m512i)b); }
CPU_INLINE wide turned(wide a) { return (wide)_mm512_shuffle_epi32((__m512i)a, _MM_PERM_CDAB); }
static const wide COUNT = {0, 1, 2, 3, 4, 5, 6, 7}, FIRST = {0, 8, 1, 9, 2, 10, 3, 11},
                  LAST = {4, 12, 5, 13, 6, 14, 7, 15};
#elif defined(__AVX2__)
CPU_INLINE wide product(wide a, wide b) { return (wide)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
CPU_INLINE wide turned(wide a) { return (wide)_mm256_shuffle_epi32((__m256i)a, 0xb1); }
static const wide COUNT = {0, 1, 2, 3}, FIRST = {0, 4, 1, 5}, LAST = {2, 6, 3, 7};
#else
CPU_INLINE wide product(wide a, wide b) { return (wide)_mm_mul_epu32((__m128i)a, (__m128i)b); }
CPU_INLINE wide turned(wide a) { return (wide)_mm_shuffle_epi32((__m128i)a, 0xb1); } /* halves exchanged */
static const wide COUNT = {0, 1}, FIRST = {0, 2}, LAST = {1, 3};
#endif

static const uint64_t M0 = 0xD2511F53u, M1 = 0xCD9E8D57u;
/* The keys of each round, in every lane. */
typedef struct keys {
    wide k0[ROUNDS], k1[ROUNDS];
    uint64_t call;
} keys;

static void make_keys(ddp_rng rng, keys *k) {
    uint32_t k0 = (uint32_t)rng.key, k1 = (uint32_t)(rng.key >> 32);
    for (int round = 0; round < ROUNDS; round++) {
        k->k0[round] = (wide){0} + k0;
        k->k1[round] = (wide){0} + k1;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    k->call = rng.call;
}

/* The words a b c d of LANES blocks after the last round, from those before it: of the first block, then of the next. */
CPU_INLINE void last_round(const keys *k, wide a, wide b, wide c, wide d, uint32_t *w) {
    wide ab = turned(product(c, (wide){0} + M1)) ^ ((b & 0xffffffff) ^ k->k0[ROUNDS - 1]);
    wide cd = turned(product(a, (wide){0} + M0)) ^ ((d & 0xffffffff) ^ k->k1[ROUNDS - 1]);
    *(wide *)(void *)w = __builtin_shuffle(ab, cd, FIRST);
    *(wide *)(void *)(w + 2 * LANES) = __builtin_shuffle(ab, cd, LAST);
}

/* What the first two rounds add to all blocks of a chunk: only the counter's lowest word differs between them, so that half of
 * the words are the same. */
typedef struct start {
    wide c1, a2, c2, d2;
} start;

static inline start make_start(const keys *k, int64_t first) {
    const uint64_t p1 = (k->call & 0xffffffff) * M1;
    const uint64_t p0 = ((p1 >> 32 ^ (uint64_t)first >> 32 ^ k->k0[0][0]) & 0xffffffff) * M0;
    return (start){(wide){0} + (k->call >> 32 ^ k->k1[0][0]), (wide){0} + (p1 ^ k->k0[1][0]),
                   (wide){0} + (p0 >> 32 ^ k->k1[1][0]), (wide){0} + p0};
}

/* w[0..GROUP) of Philox blocks first, first + 1, ...: ddp__philox, BESIDE vectors at a time; s of the chunk they are in. */
CPU_INLINE void some_words(const keys *k, const start *s, int64_t first, uint32_t *w) {
    const wide m0 = (wide){0} + M0, m1 = (wide){0} + M1;
    wide a[BESIDE], b[BESIDE], c[BESIDE], d[BESIDE];
    for (int i = 0; i < BESIDE; i++) { /* two rounds */
        wide p0 = product(COUNT + (uint64_t)(first + i * LANES), m0), p1 = product(p0 >> 32 ^ s->c1, m1);
        a[i] = p1 >> 32 ^ s->a2;
        b[i] = p1;
        c[i] = p0 ^ s->c2;
        d[i] = s->d2;
    }
    for (int round = 2; round < ROUNDS - 1; round++) {
        for (int i = 0; i < BESIDE; i++) {
            wide p0 = product(a[i], m0), p1 = product(c[i], m1);
            a[i] = p1 >> 32 ^ b[i] ^ k->k0[round];
            c[i] = p0 >> 32 ^ d[i] ^ k->k1[round];
            b[i] = p1;
            d[i] = p0;
        }
    }
    for (int i = 0; i < BESIDE; i++) last_round(k, a[i], b[i], c[i], d[i], w + 4 * i * LANES);
}
/* w[0..CHUNK) from block `first`, a multiple of BLOCKS. */
static void words(const keys *k, int64_t first, uint32_t *w) {
    const start s = make_start(k, first);
    for (int64_t at = 0; at < CHUNK; at += GROUP) some_words(k, &s, first + at / 4, w + at);
}

/* The first `bits` bits, at most 24, of each word as a number in [0, 1). */
static void units(const uint32_t *w, int bits, float *u) {
    const float scale = 1 / (float)(1 << bits);
#pragma omp simd
    for (int i = 0; i < CHUNK; i++) u[i] = (float)(int32_t)(w[i] >> (32 - bits)) * scale;
}
/* As many as a dtype holds: ddp__unit_in. */
static int unit_bits(ddp_dtype d) { return d == DDP_BF16 ? 8 : d == DDP_F16 ? 11 : 24; }

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
    keys k;
    make_keys(d->c->rng, &k);
    for (int64_t at = lo * CHUNK; at < hi * CHUNK; at += CHUNK) {
        uint32_t w[CHUNK];
        float u[CHUNK], v[CHUNK], buffer[CHUNK], *y = cpu_target(dt, out, at, buffer);
        int64_t n = numel - at < CHUNK ? numel - at : CHUNK;
        words(&k, at / 4, w);
        units(w, d->normal ? 24 : unit_bits(dt), u);
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
    keys k;
    make_keys(d->c->rng, &k);
    for (int64_t at = lo * CHUNK; at < hi * CHUNK; at += CHUNK) {
        uint32_t w[CHUNK];
        float buffer[CHUNK], *y = cpu_target(dt, out, at, buffer);
        int64_t n = numel - at < CHUNK ? numel - at : CHUNK;
        words(&k, at / 4, w);
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

/* Bytes from what is read and written to what is brought near. */
enum { AHEAD = 4096 };

/* Of m <= CPU_W elements from place i: those whose words are at least `limit`, times scale; 0 for the others. */
CPU_INLINE void drop(ddp_dtype d, const void *x, void *y, uint8_t *mask, int64_t i, int64_t m, const uint32_t *w,
                     uint32_t limit, float scale) {
    cpu_vec v = load_some(d, x, i, m, 0) * scale;
#if defined(__AVX512F__)
    __mmask16 keep = _mm512_cmpge_epu32_mask(_mm512_loadu_si512(w), _mm512_set1_epi32((int32_t)limit));
    store_some(d, y, i, m, (cpu_vec)_mm512_maskz_mov_ps(keep, (__m512)v));
    __m128i bytes = _mm_maskz_mov_epi8(keep, _mm_set1_epi8(1));
    if (m == CPU_W) _mm_storeu_si128((__m128i *)(void *)(mask + i), bytes);
    else _mm_mask_storeu_epi8(mask + i, (__mmask16)((1u << m) - 1), bytes);
#else
    const cpu_bits low = (cpu_bits){0} + INT32_MIN; /* unsigned numbers compared as signed */
    cpu_bits keep = (cpu_bits)(((cpu_bits)cpu_load(DDP_F32, w, 0) ^ low) >= (((cpu_bits){0} + (int32_t)limit) ^ low));
    store_some(d, y, i, m, (cpu_vec)(keep & (cpu_bits)v));
#if defined(__AVX2__)
    __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)keep), _mm256_extracti128_si256((__m256i)keep, 1));
#else
    __m128i packed = _mm_packs_epi32((__m128i)keep, (__m128i)keep);
#endif
    uint64_t bytes = (uint64_t)_mm_cvtsi128_si64(_mm_packs_epi16(packed, packed)) & 0x0101010101010101u;
    memcpy(mask + i, &bytes, (size_t)m);
#endif
}
/* n <= CHUNK elements from place at, a multiple of CHUNK. A group's words are drawn while the memory of the one before moves. */
CPU_INLINE void drop_chunk(ddp_dtype d, const keys *k, const void *x, void *y, uint8_t *mask, int64_t at, int64_t n,
                           uint32_t limit, float scale) {
    const start s = make_start(k, at / 4);
    for (int64_t g = 0; g < n; g += GROUP) {
        uint32_t w[GROUP];
        int64_t i = 0, m = n - g < GROUP ? n - g : GROUP;
        some_words(k, &s, (at + g) / 4, w);
        __builtin_prefetch(mask + at + g + AHEAD);
        if (GROUP > 64) __builtin_prefetch(mask + at + g + 64 + AHEAD);
        for (; i + CPU_W <= m; i += CPU_W) {
            __builtin_prefetch(cpu_at(d, x, at + g + i) + AHEAD);
            __builtin_prefetch(cpu_at(d, y, at + g + i) + AHEAD);
            drop(d, x, y, mask, at + g + i, CPU_W, w + i, limit, scale);
        }
        if (i < m) drop(d, x, y, mask, at + g + i, m - i, w + i, limit, scale);
    }
}
static void dropout_chunks(const void *ctx, int64_t lo, int64_t hi) {
    const draws *d = ctx;
    const float scale = (float)d->scale;
    const uint32_t limit = d->below << 8;
    const void *x = ddp__ptr(d->c->in[0]);
    void *y = ddp__ptr(d->c->out[0]);
    uint8_t *mask = (uint8_t *)ddp__ptr(d->c->out[1]);
    int64_t numel = d->c->out[0]->numel;
    keys k;
    make_keys(d->c->rng, &k);
    for (int64_t at = lo * CHUNK; at < hi * CHUNK; at += CHUNK) {
        int64_t n = numel - at < CHUNK ? numel - at : CHUNK;
        switch (d->c->out[0]->m.dtype) {
            case DDP_BF16: drop_chunk(DDP_BF16, &k, x, y, mask, at, n, limit, scale); break;
            case DDP_F16: drop_chunk(DDP_F16, &k, x, y, mask, at, n, limit, scale); break;
            default: drop_chunk(DDP_F32, &k, x, y, mask, at, n, limit, scale);
        }
    }
}

static int run_dropout(const ddp_call *c) {
    const double p = ((const ddp_dropout_attrs *)c->attrs)->p;
    return each_chunk(c, dropout_chunks, &(draws){c, false, 1 / (1 - p), 0, limit(p)});
}
static const char *reject_dropout(const ddp_call *c) { /* drawn by logical position */
    if (((const ddp_dropout_attrs *)c->attrs)->p > 1 - 0x1p-24) return "p within 2^-24 of 1"; /* limit() is 2^24 */
    return cpu_f32_or_half(c->in[0]) && ddp__meta_is_rowmajor(&c->in[0]->m) ? NULL : "row-major f32, f16 and bf16 only";
}
CPU_KERNEL(dropout, reject_dropout, run_dropout);

#define LOOP_DROPPED(name, T)                                                                     \
    static void name(const void *ctx, char *const *p, int64_t n) {                                \
        const T scale = (T) * (const double *)ctx;                                                \
        T *dx = (T *)(void *)p[0];                                                                \
        const T *g = (const T *)(void *)p[1];                                                     \
        const uint8_t *mask = (const uint8_t *)p[2];                                              \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) dx[i] = g[i] * (mask[i] ? scale : 0); \
    }
LOOP_DROPPED(dropped_f32, float)
LOOP_DROPPED(dropped_f64, double)

static int run_dropout_grad(const ddp_call *c) {
    const double scale = 1 / (1 - ((const ddp_dropout_grad_attrs *)c->attrs)->p);
    ddp_tensor *t[3] = {c->out[0], c->in[0], c->in[1]};
    cpu_map_f32(3, t, c->in[0]->m.dtype == DDP_F64 ? dropped_f64 : dropped_f32, &scale);
    return 0;
}
CPU_KERNEL(dropout_grad, NULL, run_dropout_grad);
