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

/* Threads worth starting for n elements: one below what a wake-up costs, and on threads told to stay alone. */
static inline int cpu_threads(int64_t n) {
    if (n < 65536) return 1;
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
/* dst = src, of one dtype; src broadcasts. */
#define cpu_copy CPU_LOCAL(copy)
DDP_LOCAL void cpu_copy(ddp_tensor *dst, ddp_tensor *src);
/* to[j * to_stride + i] = from[i * from_stride + j] for 8 x 8 floats. */
#define cpu_transpose8 CPU_LOCAL(transpose8)
DDP_LOCAL void cpu_transpose8(const float *from, int64_t from_stride, float *to, int64_t to_stride);

/* ---- rows of floats (rows.c) ---- */
/* The largest of x[0..n), NaN if there is one, -inf of nothing. */
#define cpu_row_max CPU_LOCAL(row_max)
DDP_LOCAL float cpu_row_max(const float *x, int64_t n);
/* y[i] = e^(x[i] - shift); returns their sum. y may be x, or NULL: only the sum. */
#define cpu_row_exp CPU_LOCAL(row_exp)
DDP_LOCAL double cpu_row_exp(const float *x, float shift, float *y, int64_t n);
#define cpu_row_sum CPU_LOCAL(row_sum)
DDP_LOCAL double cpu_row_sum(const float *x, int64_t stride, int64_t n);

#endif
