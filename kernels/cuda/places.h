/* places.h -- host side of positions over a shape: dims merged where they can be, and division without dividing. */
#ifndef DDP_CUDA_PLACES_H
#define DDP_CUDA_PLACES_H

#include "cuda.h"

/* For n from 1 to 2^31 (Granlund & Montgomery 1994, for dividends below 2^31). */
static inline divider ddp__divider(int64_t n) {
    divider d = {(uint32_t)n, 0, 0};
    while (((int64_t)1 << d.shift) < n) d.shift++;
    d.times = (uint32_t)(((uint64_t)1 << 32) * (((uint64_t)1 << d.shift) - (uint64_t)n) / (uint64_t)n + 1);
    return d;
}

/* After n and sizes changed. */
static inline void ddp__places_divide(places *p) {
    p->below_2_31 = p->n < 0x7fffffff;
    for (int d = 0; d < p->ndim && p->below_2_31 && p->n > 0; d++) p->by[d] = ddp__divider(p->size[d]);
}

/* Logical dims (outermost first) of k tensors with these strides, those of size 1 dropped, neighbours merged; but dim `keep` (-1:
 * none) stays as it is. Returns where it went, or -1. */
static inline int ddp__places(places *p, int ndim, const int64_t *size, int k, const int64_t *const *stride, int keep) {
    *p = (places){.n = 1};
    int kept = -1;
    for (int d = ndim - 1; d >= 0; d--) {
        int top = p->ndim - 1;
        p->n *= size[d];
        if (size[d] == 1 && d != keep) continue;
        bool fits = top >= 0 && d != keep && top != kept;
        for (int t = 0; t < k && fits; t++) fits = stride[t][d] == p->stride[t][top] * p->size[top];
        if (fits) {
            p->size[top] *= size[d];
            continue;
        }
        p->size[++top] = size[d];
        for (int t = 0; t < k; t++) p->stride[t][top] = stride[t][d];
        p->ndim++;
        if (d == keep) kept = top;
    }
    ddp__places_divide(p);
    return kept;
}

/* The largest of 16, 8, 4, 2, 1 bytes that divides all of `all`, but no less than `least`. */
static inline int64_t ddp__unit(uint64_t all, int64_t least) {
    int64_t unit = 16;
    while (unit > least && all % (uint64_t)unit) unit /= 2;
    return unit;
}
/* Which of five kernels, name_1 to name_16, is of this unit. */
static inline int ddp__unit_kernel(int64_t unit) { return __builtin_ctzll((uint64_t)unit); }

#endif
