/* vectors.h -- what extremes, sums and softmax do in vectors: the larger of two, of a run, the sum of lanes, e to the x, ends of
 * rows. */
#ifndef DDP_CPU_VECTORS_H
#define DDP_CPU_VECTORS_H

#include "cpu.h"

/* lanes: a choice for each lane. takes: v is above best, or NaN where best is not; above: NaN is neither above nor below.
 * most: the larger, b where one is NaN. */
#if defined(__AVX512F__)
typedef __mmask16 lanes;
CPU_INLINE lanes equal(cpu_vec a, cpu_vec b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ); }
CPU_INLINE lanes above(cpu_vec a, cpu_vec b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ); }
CPU_INLINE lanes one_is_nan(cpu_vec a, cpu_vec b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q); }
CPU_INLINE lanes takes(cpu_vec v, cpu_vec best) {
    return _mm512_mask_cmp_ps_mask(equal(best, best), (__m512)v, (__m512)best, _CMP_NLE_UQ);
}
CPU_INLINE cpu_vec most(cpu_vec a, cpu_vec b) { return (cpu_vec)_mm512_max_ps((__m512)a, (__m512)b); }
CPU_INLINE cpu_bits pick(lanes l, cpu_bits a, cpu_bits b) {
    return (cpu_bits)_mm512_mask_mov_epi32((__m512i)b, l, (__m512i)a);
}
CPU_INLINE int bits_of(lanes l) { return l; }
CPU_INLINE lanes either(lanes a, lanes b) { return _kor_mask16(a, b); } /* in its own registers, not by way of others */
CPU_INLINE cpu_bits fewest(cpu_bits a, cpu_bits b) { return (cpu_bits)_mm512_min_epi32((__m512i)a, (__m512i)b); }
#else
typedef cpu_bits lanes;
CPU_INLINE lanes equal(cpu_vec a, cpu_vec b) { return (lanes)(a == b); }
CPU_INLINE lanes above(cpu_vec a, cpu_vec b) { return (lanes)(a > b); }
CPU_INLINE lanes takes(cpu_vec v, cpu_vec best) { return ~(lanes)(v <= best) & (lanes)(best == best); }
CPU_INLINE cpu_bits pick(lanes l, cpu_bits a, cpu_bits b) { return cpu_either(l, a, b); }
CPU_INLINE lanes either(lanes a, lanes b) { return a | b; }
#if defined(__AVX2__)
CPU_INLINE lanes one_is_nan(cpu_vec a, cpu_vec b) { return (lanes)_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_UNORD_Q); }
CPU_INLINE cpu_vec most(cpu_vec a, cpu_vec b) { return (cpu_vec)_mm256_max_ps((__m256)a, (__m256)b); }
CPU_INLINE int bits_of(lanes l) { return _mm256_movemask_ps((__m256)l); }
CPU_INLINE cpu_bits fewest(cpu_bits a, cpu_bits b) { return (cpu_bits)_mm256_min_epi32((__m256i)a, (__m256i)b); }
#else
CPU_INLINE lanes one_is_nan(cpu_vec a, cpu_vec b) { return (lanes)_mm_cmpunord_ps((__m128)a, (__m128)b); }
CPU_INLINE cpu_vec most(cpu_vec a, cpu_vec b) { return (cpu_vec)_mm_max_ps((__m128)a, (__m128)b); }
CPU_INLINE int bits_of(lanes l) { return _mm_movemask_ps((__m128)l); }
CPU_INLINE cpu_bits fewest(cpu_bits a, cpu_bits b) { return (cpu_bits)_mm_min_epi32((__m128i)a, (__m128i)b); }
#endif
#endif
CPU_INLINE lanes is_nan(cpu_vec a) { return one_is_nan(a, a); }

CPU_INLINE cpu_vec load(ddp_dtype d, const void *x, int64_t i, int32_t flip) {
    return (cpu_vec)((cpu_bits)cpu_load(d, x, i) ^ flip);
}
CPU_INLINE cpu_vec larger(cpu_vec x, cpu_vec best) {
    return (cpu_vec)pick(is_nan(x), (cpu_bits)x, (cpu_bits)most(x, best));
}
/* Lane i of v in lane i ^ step. */
CPU_INLINE cpu_vec crossed(cpu_vec v, int step) {
    static const int32_t lane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return __builtin_shuffle(v, (cpu_bits)cpu_load(DDP_F32, lane, 0) ^ step);
}
/* The sum of lanes. */
CPU_INLINE float lanes_sum(cpu_vec v) {
    v += crossed(v, 1);
    v += crossed(v, 2);
    if (CPU_W > 4) v += crossed(v, 4);
    if (CPU_W > 8) v += crossed(v, 8);
    return v[0];
}
/* The largest of lanes, none of them NaN, and the least of numbers. */
CPU_INLINE float lanes_most(cpu_vec v) {
    v = most(crossed(v, 1), v);
    v = most(crossed(v, 2), v);
    if (CPU_W > 4) v = most(crossed(v, 4), v);
    if (CPU_W > 8) v = most(crossed(v, 8), v);
    return v[0];
}
CPU_INLINE int32_t lanes_fewest(cpu_bits v) {
    v = fewest((cpu_bits)crossed((cpu_vec)v, 1), v);
    v = fewest((cpu_bits)crossed((cpu_vec)v, 2), v);
    if (CPU_W > 4) v = fewest((cpu_bits)crossed((cpu_vec)v, 4), v);
    if (CPU_W > 8) v = fewest((cpu_bits)crossed((cpu_vec)v, 8), v);
    return v[0];
}
/* a b + c, rounded once where the processor can. */
CPU_INLINE cpu_vec mul_add(cpu_vec a, cpu_vec b, cpu_vec c) {
#if defined(__AVX512F__)
    return (cpu_vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (cpu_vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
/* A vector of one number. */
CPU_INLINE cpu_vec all_of(float v) { return (cpu_vec){0} + v; }

/* n <= CPU_W elements from place i in the first lanes, `rest` in the others; memory beyond them is not touched. */
CPU_INLINE cpu_vec load_some(ddp_dtype d, const void *x, int64_t i, int64_t n, float rest) {
    if (n == CPU_W) return cpu_load(d, x, i);
#if defined(__AVX512F__)
    __mmask16 here = (__mmask16)((1u << n) - 1);
    if (d == DDP_F32) return (cpu_vec)_mm512_mask_loadu_ps((__m512)all_of(rest), here, (const float *)x + i);
    cpu_halves h = (cpu_halves)_mm256_maskz_loadu_epi16(here, (const uint16_t *)x + i);
    cpu_vec v = d == DDP_BF16 ? cpu_from_bf16(h) : cpu_from_f16(h);
    return (cpu_vec)pick(here, (cpu_bits)v, (cpu_bits)all_of(rest));
#else
    cpu_vec v = all_of(rest);
    for (int64_t k = 0; k < n; k++) v[k] = cpu_get(d, x, i + k);
    return v;
#endif
}
/* The first n <= CPU_W lanes of v to place i and on. */
CPU_INLINE void store_some(ddp_dtype d, void *y, int64_t i, int64_t n, cpu_vec v) {
    if (n == CPU_W) {
        cpu_store(d, y, i, v);
        return;
    }
#if defined(__AVX512F__)
    __mmask16 here = (__mmask16)((1u << n) - 1);
    if (d == DDP_F32) _mm512_mask_storeu_ps((float *)y + i, here, (__m512)v);
    else if (d == DDP_BF16) _mm256_mask_storeu_epi16((uint16_t *)y + i, here, (__m256i)cpu_to_bf16(v));
    else _mm256_mask_storeu_epi16((uint16_t *)y + i, here, (__m256i)cpu_to_f16(v));
#else
    for (int64_t k = 0; k < n; k++) cpu_put(d, y, i + k, v[k]);
#endif
}

typedef uint32_t cpu_words __attribute__((vector_size(CPU_W * 4), may_alias)); /* cpu_bits whose sums wrap around */

/* e^x of each lane, x at most 88, 0 where that is below 2^-126; NaN stays. x = k ln 2 / P + r, |r| <= ln 2 / 2P: 2^(k / P)
 * by a table of its fractions, with k's whole part added to the exponent; e^r by a polynomial whose largest error is least. */
#if defined(__AVX2__)
/* The bits of 2^(j / P), P = CPU_W, less what j adds to them when k is shifted to the exponent. */
#if defined(__AVX512F__)
enum { EXP_PARTS = 16, EXP_SHIFT = 19 };
static const int32_t exp_fractions[] = {0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532,
                                        0x3f75fed7, 0x3f75583f, 0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c,
                                        0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d};
CPU_INLINE cpu_bits exp_fraction(cpu_bits k) {
    return (cpu_bits)_mm512_permutexvar_epi32((__m512i)k, (__m512i)cpu_load(DDP_F32, exp_fractions, 0));
}
#else
enum { EXP_PARTS = 8, EXP_SHIFT = 20 };
static const int32_t exp_fractions[] = {0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7,
                                        0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7};
CPU_INLINE cpu_bits exp_fraction(cpu_bits k) {
    return (cpu_bits)_mm256_permutevar8x32_epi32((__m256i)cpu_load(DDP_F32, exp_fractions, 0), (__m256i)k);
}
#endif
/* x - k ln 2 / P. */
CPU_INLINE cpu_vec exp_near(cpu_vec x, cpu_vec k) { return mul_add(k, all_of(-0x1.62e43p-1f / EXP_PARTS), x); }
/* e^r for |r| <= ln 2 / 2P. */
CPU_INLINE void exp_rest(int V, const cpu_vec *r, cpu_vec *p) {
    const cpu_vec c3 = all_of(EXP_PARTS == 16 ? 0x1.55559ap-3f : 0x1.555658p-3f), one = all_of(1);
    const cpu_vec c2 = all_of(EXP_PARTS == 16 ? 0x1.00022p-1f : 0x1.000878p-1f);
    for (int v = 0; v < V; v++) p[v] = mul_add(c3, r[v], c2);
    for (int v = 0; v < V; v++) p[v] = mul_add(p[v], r[v], one);
    for (int v = 0; v < V; v++) p[v] = mul_add(p[v], r[v], one);
}
#else
enum { EXP_PARTS = 1, EXP_SHIFT = 23 };
CPU_INLINE cpu_bits exp_fraction(cpu_bits k) { return (k & 0) + (127 << 23); }
CPU_INLINE cpu_vec exp_near(cpu_vec x, cpu_vec k) { /* in two steps: the product of the first is exact */
    return mul_add(k, all_of(-0x1.7f7d1cp-20f), mul_add(k, all_of(-0x1.62e4p-1f), x));
}
CPU_INLINE void exp_rest(int V, const cpu_vec *r, cpu_vec *p) {
    for (int v = 0; v < V; v++) {
        p[v] = mul_add(mul_add(all_of(0x1.6d4338p-10f), r[v], all_of(0x1.120b8p-7f)), r[v], all_of(0x1.5554e8p-5f));
        p[v] = mul_add(mul_add(p[v], r[v], all_of(0x1.5554dcp-3f)), r[v], all_of(0.5f));
        p[v] = mul_add(p[v], r[v] * r[v], r[v] + 1);
    }
}
#endif
/* Of V <= 4 vectors, step by step beside each other: the processor looks only so many instructions ahead. */
CPU_INLINE void exp_all(int V, cpu_vec *x) {
    const cpu_vec round = all_of(0x1.8p23f), least = round - 126 * EXP_PARTS;
    cpu_vec t[4], p[4];
    for (int v = 0; v < V; v++) t[v] = mul_add(x[v], all_of(EXP_PARTS * 0x1.715476p0f), round);
    for (int v = 0; v < V; v++) x[v] = exp_near(x[v], t[v] - round);
    exp_rest(V, x, p);
    for (int v = 0; v < V; v++) /* wraps around where the result is thrown away or NaN */
        x[v] = (cpu_vec)((cpu_words)exp_fraction((cpu_bits)t[v]) + ((cpu_words)t[v] << EXP_SHIFT));
#if defined(__AVX512F__)
    for (int v = 0; v < V; v++) {
        __mmask16 some = _mm512_cmp_ps_mask((__m512)t[v], (__m512)least, _CMP_NLT_UQ);
        x[v] = (cpu_vec)_mm512_maskz_mul_ps(some, (__m512)p[v], (__m512)x[v]);
    }
#else
    for (int v = 0; v < V; v++) x[v] = (cpu_vec)(~(cpu_bits)(t[v] < least) & (cpu_bits)(p[v] * x[v]));
#endif
}
CPU_INLINE cpu_vec exp_of(cpu_vec x) {
    exp_all(1, &x);
    return x;
}

#endif
