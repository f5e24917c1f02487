/* tiles.c -- see tiles.h. bf16 by AVX512_BF16's dot products of pairs of channels where the processor has them. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=fast")
#endif
#include "tiles.h"

/* Columns k and on of the results, as many as there are. */
CPU_INLINE void finish_as(ddp_dtype dt, const tile_panels *p, int rows, char *const *to, int64_t k, cpu_vec acc[][2]) {
    for (int j = 0; j < 2 && k < p->columns; j++, k += CPU_W) {
        int64_t n = p->columns - k;
        cpu_vec bias = p->bias ? conv_load(cpu_at(dt, p->bias, k), dt, n) : (cpu_vec){0};
        if (n >= CPU_W)
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++) cpu_store(dt, to[i], k, acc[i][j] + bias);
        else
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++) conv_store(cpu_at(dt, to[i], k), dt, n, acc[i][j] + bias);
    }
}
CPU_INLINE void finish(const tile_panels *p, int rows, char *const *to, int64_t k, cpu_vec acc[][2]) {
    if (p->dt == DDP_F32) finish_as(DDP_F32, p, rows, to, k, acc);
    else if (p->dt == DDP_BF16) finish_as(DDP_BF16, p, rows, to, k, acc);
    else finish_as(DDP_F16, p, rows, to, k, acc);
}

/* Rows i0 .. i0 + rows, columns k .. k + CONV_NR, f32. u: this panel. */
CPU_INLINE void tile(const tile_panels *p, const tile_rows *b, int rows, int64_t i0, int64_t k, const float *u) {
    cpu_vec acc[CONV_MR][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) acc[i][0] = acc[i][1] = (cpu_vec){0};
    for (int64_t t = 0; t < b->n_taps; t++) {
        const char *const *row = b->row[t] + i0;
        const float *w = u + b->tap[t] * b->width * CONV_NR;
        const float *x[CONV_MR];
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) x[i] = (const float *)(const void *)row[i];
        for (int64_t c = 0; c < b->width; c++, w += CONV_NR) {
            cpu_vec a0 = *(const cpu_vec *)w, a1 = *(const cpu_vec *)(w + CPU_W);
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++) {
                float v = x[i][c];
                acc[i][0] += v * a0;
                acc[i][1] += v * a1;
            }
        }
    }
    finish(p, rows, b->to + i0, k, acc);
}

static void tiles(const tile_panels *p, const tile_rows *b, int64_t k, const float *u) {
    int64_t i = 0;
    for (; i + CONV_MR <= b->n; i += CONV_MR) tile(p, b, CONV_MR, i, k, u);
    for (; i + 4 <= b->n; i += 4) tile(p, b, 4, i, k, u);
    for (; i < b->n; i++) tile(p, b, 1, i, k, u);
}

#if defined(__AVX512F__)
#include <immintrin.h>
#define WITH_BF16 __attribute__((target("avx512bf16")))

/* The same by pairs of bf16 channels. width is even. */
WITH_BF16 CPU_INLINE void pair_tile(const tile_panels *p, const tile_rows *b, int rows, int64_t i0, int64_t k,
                                    const uint32_t *u) {
    __m512 acc[CONV_MR][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) acc[i][0] = acc[i][1] = _mm512_setzero_ps();
    for (int64_t t = 0; t < b->n_taps; t++) {
        const char *const *row = b->row[t] + i0;
        const uint32_t *w = u + b->tap[t] * b->width / 2 * CONV_NR;
        const uint32_t *x[CONV_MR];
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) x[i] = (const uint32_t *)(const void *)row[i];
        for (int64_t c = 0; c < b->width / 2; c++, w += CONV_NR) {
            __m512bh a0 = (__m512bh)_mm512_loadu_si512(w), a1 = (__m512bh)_mm512_loadu_si512(w + CPU_W);
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++) {
                uint32_t pair;
                memcpy(&pair, x[i] + c, 4);
                __m512bh v = (__m512bh)_mm512_set1_epi32((int)pair);
                acc[i][0] = _mm512_dpbf16_ps(acc[i][0], v, a0);
                acc[i][1] = _mm512_dpbf16_ps(acc[i][1], v, a1);
            }
        }
    }
    finish(p, rows, b->to + i0, k, (cpu_vec(*)[2])(void *)acc);
}

WITH_BF16 static void pair_tiles(const tile_panels *p, const tile_rows *b, int64_t k, const uint32_t *u) {
    int64_t i = 0;
    for (; i + CONV_MR <= b->n; i += CONV_MR) pair_tile(p, b, CONV_MR, i, k, u);
    for (; i + 4 <= b->n; i += 4) pair_tile(p, b, 4, i, k, u);
    for (; i < b->n; i++) pair_tile(p, b, 1, i, k, u);
}
bool cpu_has_pairs(void) { return __builtin_cpu_supports("avx512bf16"); }
#else
bool cpu_has_pairs(void) { return false; }
static void pair_tiles(const tile_panels *p, const tile_rows *b, int64_t k, const uint32_t *u) {
    (void)p, (void)b, (void)k, (void)u;
}
#endif

void cpu_tiles(const tile_panels *p, const tile_rows *rows, int64_t panel) {
    if (p->pairs) pair_tiles(p, rows, panel * CONV_NR, (const uint32_t *)p->u + panel * p->depth / 2 * CONV_NR);
    else tiles(p, rows, panel * CONV_NR, (const float *)p->u + panel * p->depth * CONV_NR);
}

void cpu_pair_rows(const float *panel, int64_t depth, uint32_t *u) {
    const uint32_t *bits = (const uint32_t *)(const void *)panel;
    for (int64_t j = 0; j < depth / 2; j++, bits += 2 * CONV_NR, u += CONV_NR)
        for (int i = 0; i < CONV_NR; i++) u[i] = (bits[i] >> 16) | (bits[CONV_NR + i] & 0xffff0000u);
}
