/* cpu.h -- what the vectorised kernels share. Every file but list.c is compiled once for each of x86-64-v2, v3 and
 * v4, with DDP_CPU_ISA naming it; symbols carry that name. The loops are plain C that the compiler vectorises. */
#ifndef DDP_CPU_H
#define DDP_CPU_H

/* Choices between computed values become vector instructions; NaN, infinities and rounding keep their meaning. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-math-errno", "no-trapping-math")
#endif
/* Square roots that leave errno alone, so that they become vector instructions too. */
extern float sqrtf(float) __attribute__((const));
extern double sqrt(double) __attribute__((const));

#include <immintrin.h>
#include <omp.h>

#include "../../core/op/op.h"

#define CPU_CAT_(a, b) a##_##b
#define CPU_CAT(a, b) CPU_CAT_(a, b)
#define CPU_TEXT_(x) #x
#define CPU_TEXT(x) CPU_TEXT_(x)
#define CPU_LOCAL(name) CPU_CAT(ddp__cpu_##name, DDP_CPU_ISA)

/* The list of one op in this instruction set. */
#define CPU_KERNEL(op, reject, run)                                                                             \
    const ddp_kernel CPU_CAT(ddp__cpu_##op, DDP_CPU_ISA)[] = {{#op ".cpu." CPU_TEXT(DDP_CPU_ISA), reject, run}, \
                                                              {NULL, NULL, NULL}}

/* A vector register of floats. */
#if defined(__AVX512F__)
enum { CPU_W = 16 };
#elif defined(__AVX2__)
enum { CPU_W = 8 };
#else
enum { CPU_W = 4 };
#endif
typedef float cpu_vec __attribute__((vector_size(CPU_W * 4), aligned(4), may_alias));

/* ---- f16 and bf16: loops compute in f32; what they load is widened, what they store rounded to nearest even --------- */

typedef int32_t cpu_bits __attribute__((vector_size(CPU_W * 4), may_alias));
typedef uint16_t cpu_halves __attribute__((vector_size(CPU_W * 2), aligned(2), may_alias));
#define CPU_INLINE static inline __attribute__((always_inline))

/* cond ? a : b, where a lane of cond is all ones or 0. */
CPU_INLINE cpu_bits cpu_either(cpu_bits cond, cpu_bits a, cpu_bits b) {
#if defined(__AVX512F__)
    return (cond & a) | (~cond & b); /* one instruction */
#elif defined(__AVX2__)
    return (cpu_bits)_mm256_blendv_epi8((__m256i)b, (__m256i)a, (__m256i)cond);
#else
    return (cpu_bits)_mm_blendv_epi8((__m128i)b, (__m128i)a, (__m128i)cond);
#endif
}
/* The upper halves of lanes, below. */
CPU_INLINE cpu_bits cpu_upper(cpu_bits u) {
    typedef uint32_t lanes __attribute__((vector_size(CPU_W * 4)));
    return (cpu_bits)((lanes)u >> 16);
}
/* Lanes from 0 to 65535 as 16 bits each. */
CPU_INLINE cpu_halves cpu_pack(cpu_bits u) {
#if defined(__AVX512F__)
    return __builtin_convertvector(u, cpu_halves);
#elif defined(__AVX2__)
    return (cpu_halves)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)u), _mm256_extracti128_si256((__m256i)u, 1));
#else
    typedef uint16_t twice __attribute__((vector_size(16)));
    twice both = (twice)_mm_packus_epi32((__m128i)u, (__m128i)u);
    return __builtin_shufflevector(both, both, 0, 1, 2, 3);
#endif
}

CPU_INLINE cpu_vec cpu_from_bf16(cpu_halves h) {
#if defined(__AVX512F__)
    return (cpu_vec)((cpu_bits)_mm512_cvtepu16_epi32((__m256i)h) << 16);
#elif defined(__AVX2__)
    return (cpu_vec)((cpu_bits)_mm256_cvtepu16_epi32((__m128i)h) << 16);
#else
    return (cpu_vec)(__builtin_convertvector(h, cpu_bits) << 16);
#endif
}
CPU_INLINE cpu_halves cpu_to_bf16(cpu_vec v) {
    cpu_bits u = (cpu_bits)v, odd = cpu_upper(u) & 1;
    return cpu_pack(cpu_upper(cpu_either((cpu_bits)(v != v), u | 0x400000, u + (odd + 0x7fff))));
}

#if defined(__AVX512F__)
CPU_INLINE cpu_vec cpu_from_f16(cpu_halves h) { return (cpu_vec)_mm512_cvtph_ps((__m256i)h); }
CPU_INLINE cpu_halves cpu_to_f16(cpu_vec v) {
    return (cpu_halves)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__F16C__)
CPU_INLINE cpu_vec cpu_from_f16(cpu_halves h) { return (cpu_vec)_mm256_cvtph_ps((__m128i)h); }
CPU_INLINE cpu_halves cpu_to_f16(cpu_vec v) {
    return (cpu_halves)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
}
#else
/* ddp__f16_to_f32 and ddp__f32_to_f16, a lane each: the exponent moved, subnormals by a product or a sum. */
CPU_INLINE cpu_vec cpu_from_f16(cpu_halves h) {
    cpu_bits u = __builtin_convertvector(h, cpu_bits), sign = (u & 0x8000) << 16, abs = (u & 0x7fff) << 13;
    cpu_bits huge = abs >= 0x7c00 << 13, f = (cpu_bits)((cpu_vec)abs * 0x1p112f);
    return (cpu_vec)(sign | cpu_either(huge, abs | 0x7f800000, f));
}
CPU_INLINE cpu_halves cpu_to_f16(cpu_vec v) {
    cpu_bits u = (cpu_bits)v, sign = u >> 16 & 0x8000, abs = u & 0x7fffffff;
    cpu_bits normal = (abs - 0x38000000 + 0xfff + (abs >> 13 & 1)) >> 13;
    cpu_bits small = (cpu_bits)((cpu_vec)abs + 0.5f) - 0x3f000000;
    cpu_bits h = cpu_either(abs < 0x38800000, small, normal);
    h = cpu_either(abs >= 0x477ff000, (cpu_bits){0} + 0x7c00, h);
    h = cpu_either(abs > 0x7f800000, (cpu_bits){0} + 0x7e00, h);
    return cpu_pack(sign | h);
}
#endif

/* CPU_W floats of place i of p and on, p of dtype d: f32, f16 or bf16, a constant where this is inlined. */
CPU_INLINE cpu_vec cpu_load(ddp_dtype d, const void *p, int64_t i) {
    if (d == DDP_BF16) return cpu_from_bf16(*(const cpu_halves *)(const void *)((const uint16_t *)p + i));
    if (d == DDP_F16) return cpu_from_f16(*(const cpu_halves *)(const void *)((const uint16_t *)p + i));
    return *(const cpu_vec *)(const void *)((const float *)p + i);
}
CPU_INLINE void cpu_store(ddp_dtype d, void *p, int64_t i, cpu_vec v) {
    if (d == DDP_BF16) *(cpu_halves *)(void *)((uint16_t *)p + i) = cpu_to_bf16(v);
    else if (d == DDP_F16) *(cpu_halves *)(void *)((uint16_t *)p + i) = cpu_to_f16(v);
    else *(cpu_vec *)(void *)((float *)p + i) = v;
}
/* One of them. */
static inline float cpu_get(ddp_dtype d, const void *p, int64_t i) {
    if (d == DDP_BF16) return ddp__bf16_to_f32(((const uint16_t *)p)[i]);
    return d == DDP_F16 ? ddp__f16_to_f32(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}
static inline void cpu_put(ddp_dtype d, void *p, int64_t i, float v) {
    if (d == DDP_BF16) ((uint16_t *)p)[i] = ddp__f32_to_bf16(v);
    else if (d == DDP_F16) ((uint16_t *)p)[i] = ddp__f32_to_f16(v);
    else ((float *)p)[i] = v;
}
static inline bool cpu_f32_or_half(const ddp_tensor *t) { return ddp__wide(t->m.dtype) == DDP_F32; }
/* Place i of p. */
static inline char *cpu_at(ddp_dtype d, const void *p, int64_t i) {
    return (char *)(uintptr_t)p + i * ddp__dtype_bytes[d];
}

/* Brings places i .. i+n of p near, 16 KB at most: for loops that compute longer than the processor looks ahead. */
static inline void cpu_fetch(ddp_dtype d, const void *p, int64_t i, int64_t n) {
    int64_t bytes = n * ddp__dtype_bytes[d];
    const char *from = cpu_at(d, p, i);
    for (int64_t k = 0; k < bytes && k < 1 << 14; k += 64) __builtin_prefetch(from + k);
}

/* to[0..n) = places i .. i+n of p, of dtype d (half.c). */
#define cpu_widen CPU_LOCAL(widen)
DDP_LOCAL void cpu_widen(ddp_dtype d, const void *p, int64_t i, float *to, int64_t n);
/* The other way. Nothing where `from` is that place: what cpu_target gave for f32. */
#define cpu_narrow CPU_LOCAL(narrow)
DDP_LOCAL void cpu_narrow(ddp_dtype d, const float *from, void *p, int64_t i, int64_t n);
/* Places i .. i+n of p as floats: where they lie, or widened into buffer. */
static inline const float *cpu_source(ddp_dtype d, const void *p, int64_t i, float *buffer, int64_t n) {
    if (d == DDP_F32) return (const float *)p + i;
    cpu_widen(d, p, i, buffer, n);
    return buffer;
}
/* Where to write floats that are to become place i of p and on: there, or buffer; then cpu_narrow. */
static inline float *cpu_target(ddp_dtype d, void *p, int64_t i, float *buffer) {
    return d == DDP_F32 ? (float *)p + i : buffer;
}

/* Threads worth starting for n elements: one below what a wake-up costs, and on threads told to stay alone. */
enum { CPU_WORTH = 1 << 19 };
static inline int cpu_threads(int64_t n) {
    if (n < CPU_WORTH) return 1;
    int most = omp_get_max_threads(), want = ddp_num_threads();
    return want < most ? want : most;
}

/* Two tensors of one dtype-independent layout: same sizes, same strides. */
static inline bool cpu_alike(const ddp_tensor *a, const ddp_tensor *b) {
    if (a->m.ndim != b->m.ndim) return false;
    for (int d = 0; d < a->m.ndim; d++)
        if (a->m.size[d] != b->m.size[d] || (a->m.stride[d] != b->m.stride[d] && a->m.size[d] != 1)) return false;
    return true;
}

/* No gaps and no overlaps; the usual order of dims is seen at once. */
static inline bool cpu_dense(const ddp_tensor *t) {
    int64_t s = 1;
    for (int d = t->m.ndim - 1; d >= 0; s *= t->m.size[d--])
        if (t->m.size[d] != 1 && t->m.stride[d] != s) return ddp__meta_is_dense(&t->m);
    return true;
}

static inline float *cpu_f32(const ddp_tensor *t) { return (float *)(void *)ddp__ptr(t); }

/* [N, C, ...] as rows of C in memory: [N, C] row-major, or 4-D channels-last. */
static inline bool cpu_rows_of_channels(const ddp_tensor *t) {
    return t->m.ndim == 2 ? ddp__meta_is_rowmajor(&t->m) : ddp__meta_is_channels_last(&t->m);
}

/* body(ctx, lo, hi) for ranges that make up 0..n, by one thread or, where `work` elements are worth it, by several. */
typedef void (*cpu_body)(const void *ctx, int64_t lo, int64_t hi);
#define cpu_share CPU_LOCAL(share)
DDP_LOCAL void cpu_share(int64_t n, int64_t work, cpu_body body, const void *ctx);

/* ---- elementwise walks (map.c) ---- */
enum { CPU_MAP_MAX = 4, CPU_CHUNK = 1024 };
/* n elements of each operand, side by side in memory; p[0] is written and may be another one. */
typedef void (*cpu_loop)(const void *ctx, char *const *p, int64_t n);
/* Runs loop over t[0] (written) and t[1..k), which broadcast to it: any strides, elements of up to 8 bytes. The pieces
 * that loop sees do not depend on the number of threads. */
#define cpu_map CPU_LOCAL(map)
DDP_LOCAL void cpu_map(int k, ddp_tensor *const *t, cpu_loop loop, const void *ctx);
/* The same; f16 and bf16 operands come to loop, and go from it, as f32. */
#define cpu_map_f32 CPU_LOCAL(map_f32)
DDP_LOCAL void cpu_map_f32(int k, ddp_tensor *const *t, cpu_loop loop, const void *ctx);
/* ddp__iter_run by one thread or several: whole inner runs each. */
#define cpu_walk CPU_LOCAL(walk)
DDP_LOCAL void cpu_walk(const ddp_iter *it, ddp_run_fn fn, void *ctx);

/* ---- copies (copy.c, turn.c) ---- */
/* dst = src, of one dtype; src broadcasts. */
#define cpu_copy CPU_LOCAL(copy)
DDP_LOCAL void cpu_copy(ddp_tensor *dst, ddp_tensor *src);
/* Row i of `to`, element j = row j of `from`, element i, for i < m and j < n: elements of 1, 2, 4 or 8 bytes, rows ts and fs
 * bytes apart. stream: past the caches, where lines of `to` are written whole; the caller ends with cpu_streamed. */
#define cpu_turn CPU_LOCAL(turn)
DDP_LOCAL void cpu_turn(int bytes, char *to, int64_t ts, const char *from, int64_t fs, int64_t m, int64_t n,
                        bool stream);
static inline void cpu_streamed(void) { _mm_sfence(); }
/* to[j * to_stride + i] = from[i * from_stride + j] for 8 x 8 floats. */
#define cpu_transpose8 CPU_LOCAL(transpose8)
DDP_LOCAL void cpu_transpose8(const float *from, int64_t from_stride, float *to, int64_t to_stride);

/* ---- rows (rows.c): n elements from place i of x, of dtype d: f32, f16 or bf16 ---- */
/* The largest, NaN if there is one, -inf of nothing. */
#define cpu_row_max CPU_LOCAL(row_max)
DDP_LOCAL float cpu_row_max(ddp_dtype d, const void *x, int64_t i, int64_t n);
/* y[k] = e^(x[i + k] - shift); returns their sum. y may lie where x does, or be NULL: only the sum. */
#define cpu_row_exp CPU_LOCAL(row_exp)
DDP_LOCAL double cpu_row_exp(ddp_dtype d, const void *x, int64_t i, float shift, float *y, int64_t n);
/* The sum of n elements `stride` apart. */
#define cpu_row_sum CPU_LOCAL(row_sum)
DDP_LOCAL double cpu_row_sum(ddp_dtype d, const void *x, int64_t i, int64_t stride, int64_t n);

#endif
