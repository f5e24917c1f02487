/* ref.h -- what reference kernels share. They are plain loops over logical positions: every dtype of the op, any stride. */
#ifndef DDP_REF_H
#define DDP_REF_H

#include <stdlib.h>

#include "../../core/op/op.h"

/* The list of one op: this kernel, then the end. */
#define DDP_REF_KERNEL(op, run)          \
    const ddp_kernel ddp__ref_##op[] = { \
        {"" #op ".ref", NULL, run},      \
        {NULL, NULL, NULL},              \
    }

/* Element offset of logical position i (row-major) of a tensor. */
static inline int64_t ref_at(const ddp_meta *m, int64_t i) {
    int64_t at = 0;
    for (int d = m->ndim - 1; d >= 0; d--) {
        at += i % m->size[d] * m->stride[d];
        i /= m->size[d];
    }
    return at;
}

/* The value at logical position i as a double, and its store. i64 beyond 2^53 loses bits: integer ops have loops of their own. */
static inline double ref_get(const ddp_tensor *t, int64_t i) {
    return ddp__load(t->m.dtype, ddp__ptr(t), ref_at(&t->m, i));
}
static inline void ref_put(const ddp_tensor *t, int64_t i, double v) {
    ddp__store(t->m.dtype, ddp__ptr(t), ref_at(&t->m, i), v);
}

/* Sums in double, one for each of n positions, all 0: what is added up is rounded once. NULL with the error set. */
static inline double *ref_sums(const ddp_call *c, int64_t n) {
    double *sums = calloc((size_t)n + 1, sizeof *sums);
    if (!sums) ddp__op_fail(c, DDP_ENOMEM, "out of memory");
    return sums;
}
/* Puts them at t's logical positions, and frees them. */
static inline void ref_put_sums(const ddp_tensor *t, double *sums) {
    for (int64_t i = 0; i < t->numel; i++) ref_put(t, i, sums[i]);
    free(sums);
}

#endif
