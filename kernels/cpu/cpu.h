/* cpu.h -- what the vectorised kernels share. Every file but list.c is compiled once for each of x86-64-v2, v3 and v4, with
 * DDP_CPU_ISA naming it; symbols carry that name. The loops are plain C that the compiler vectorises. */
#ifndef DDP_CPU_H
#define DDP_CPU_H

#include "../../core/op/op.h"

#define CPU_CAT_(a, b) a##_##b
#define CPU_CAT(a, b) CPU_CAT_(a, b)
#define CPU_TEXT_(x) #x
#define CPU_TEXT(x) CPU_TEXT_(x)

/* The list of one op in this instruction set. */
#define CPU_KERNEL(op, reject, run)                                                                             \
    const ddp_kernel CPU_CAT(ddp__cpu_##op, DDP_CPU_ISA)[] = {{#op ".cpu." CPU_TEXT(DDP_CPU_ISA), reject, run}, \
                                                              {NULL, NULL, NULL}}

/* Threads worth starting for n elements: one below what a wake-up costs. */
static inline int cpu_threads(int64_t n) { return n < 65536 ? 1 : ddp_num_threads(); }

/* Two tensors of one dtype-independent layout: same sizes, same strides. */
static inline bool cpu_alike(const ddp_tensor *a, const ddp_tensor *b) {
    if (a->m.ndim != b->m.ndim) return false;
    for (int d = 0; d < a->m.ndim; d++)
        if (a->m.size[d] != b->m.size[d] || (a->m.stride[d] != b->m.stride[d] && a->m.size[d] != 1)) return false;
    return true;
}

static inline float *cpu_f32(const ddp_tensor *t) { return (float *)(void *)ddp__ptr(t); }

/* [N, C, ...] as rows of C in memory: [N, C] row-major, or 4-D channels-last. */
static inline bool cpu_rows_of_channels(const ddp_tensor *t) {
    return t->m.ndim == 2 ? ddp__meta_is_rowmajor(&t->m) : ddp__meta_is_channels_last(&t->m);
}

#endif
