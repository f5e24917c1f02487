/* vectors.h -- what extremes and softmax do in vectors: the larger of two, of a run, e to the x. */
#ifndef DDP_CPU_VECTORS_H
#define DDP_CPU_VECTORS_H

#include "cpu.h"

/* lanes: a choice for each lane. takes: v is above best, or NaN where best is not. most: the larger, b where one is NaN. */
#if defined(__AVX512F__)
typedef __mmask16 lanes;
CPU_INLINE lanes equal(cpu_vec a, cpu_vec b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ); }
CPU_INLINE lanes is_nan(cpu_vec a) { return _mm512_cmp_ps_mask((__m512)a, (__m512)a, _CMP_UNORD_Q); }
CPU_INLINE lanes takes(cpu_vec v, cpu_vec best) {
    return _mm512_mask_cmp_ps_mask(equal(best, best), (__m512)v, (__m512)best, _CMP_NLE_UQ);
}
CPU_INLINE cpu_vec most(cpu_vec a, cpu_vec b) { return (cpu_vec)_mm512_max_ps((__m512)a, (__m512)b); }
CPU_INLINE cpu_bits pick(lanes l, cpu_bits a, cpu_bits b) {
    return (cpu_bits)_mm512_mask_mov_epi32((__m512i)b, l, (__m512i)a);
}
CPU_INLINE int bits_of(lanes l) { return l; }
#else
typedef cpu_bits lanes;
CPU_INLINE lanes equal(cpu_vec a, cpu_vec b) { return (lanes)(a == b); }
CPU_INLINE lanes is_nan(cpu_vec a) { return (lanes)(a != a); }
CPU_INLINE lanes takes(cpu_vec v, cpu_vec best) { return ~(lanes)(v <= best) & (lanes)(best == best); }
CPU_INLINE cpu_bits pick(lanes l, cpu_bits a, cpu_bits b) { return cpu_either(l, a, b); }
#if defined(__AVX2__)
CPU_INLINE cpu_vec most(cpu_vec a, cpu_vec b) { return (cpu_vec)_mm256_max_ps((__m256)a, (__m256)b); }
CPU_INLINE int bits_of(lanes l) { return _mm256_movemask_ps((__m256)l); }
#else
CPU_INLINE cpu_vec most(cpu_vec a, cpu_vec b) { return (cpu_vec)_mm_max_ps((__m128)a, (__m128)b); }
CPU_INLINE int bits_of(lanes l) { return _mm_movemask_ps((__m128)l); }
#endif
#endif

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
/* The largest of n >= CPU_W neighbours. The last vector may overlap the one before. */
CPU_INLINE float span_max(ddp_dtype d, const void *x, int64_t i, int64_t n, int32_t flip) {
    cpu_vec b[8];
    int64_t k = 0;
    for (int v = 0; v < 8; v++) b[v] = load(d, x, i, flip);
    for (; k + 8 * CPU_W <= n; k += 8 * CPU_W)
        for (int v = 0; v < 8; v++) b[v] = larger(load(d, x, i + k + v * CPU_W, flip), b[v]);
    for (; k + CPU_W <= n; k += CPU_W) b[0] = larger(load(d, x, i + k, flip), b[0]);
    b[0] = larger(load(d, x, i + n - CPU_W, flip), b[0]);
    for (int v = 0; v < 4; v++) b[v] = larger(b[v + 4], b[v]);
    b[0] = larger(larger(b[3], b[2]), larger(b[1], b[0]));
    cpu_vec all = larger(crossed(b[0], 1), b[0]);
    all = larger(crossed(all, 2), all);
    if (CPU_W > 4) all = larger(crossed(all, 4), all);
    if (CPU_W > 8) all = larger(crossed(all, 8), all);
    return all[0];
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

/* e^x of each lane, x at most 88, within 2 ulp, subnormals too; NaN stays. x = n ln 2 + r with |r| <= ln 2 / 2, e^r by a
 * polynomial of degree 6 fitted at Chebyshev points. */
CPU_INLINE cpu_vec exp_of(cpu_vec x) {
    const cpu_vec round = all_of(0x1.8p23f);
    x = most(all_of(-104), x);
    cpu_vec t = mul_add(x, all_of(0x1.715476p0f), round), n = t - round;
    cpu_vec r = mul_add(n, all_of(-0x1.7f7d1cp-20f), mul_add(n, all_of(-0x1.62e4p-1f), x));
    cpu_vec p = mul_add(mul_add(all_of(0x1.6d4338p-10f), r, all_of(0x1.120b8p-7f)), r, all_of(0x1.5554e8p-5f));
    p = mul_add(mul_add(p, r, all_of(0x1.5554dcp-3f)), r, all_of(0.5f));
    p = mul_add(p, r * r, r + 1);
#if defined(__AVX512F__)
    return (cpu_vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    cpu_bits whole = (cpu_bits)t - 0x4b400000,
             half = whole >> 1; /* 2^n in two factors: it may be below what an exponent holds */
    return p * (cpu_vec)((half + 127) << 23) * (cpu_vec)((whole - half + 127) << 23);
#endif
}

#endif
