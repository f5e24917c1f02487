/* reduce.h -- how a reduction walks its input, of any layout: shared by sums (reduce.c) and extremes (extremes.c). */
#ifndef DDP_CPU_REDUCE_H
#define DDP_CPU_REDUCE_H

#include "cpu.h"

/* Work of BIG elements or more is cut into PARTS parts, whatever the number of threads. */
enum { PARTS = 16, BIG = 1 << 17 };

/* Dims of one side, innermost first: sorted by stride in x, merged. */
typedef struct side {
    int n;
    int64_t size[DDP_MAX_DIM], in[DDP_MAX_DIM], out[DDP_MAX_DIM]; /* strides in x and y; out 0 of dims that go */
    int64_t count;
} side;
typedef struct plan {
    ddp_dtype d; /* of x; places in x and y are counted in elements */
    const void *x;
    void *y; /* row-major; set by the caller */
    double scale;
    side kept, gone;
} plan;

/* The plan for reducing t, which is not empty, over dims (none: all); y and scale are left to the caller. */
#define cpu_plan_make CPU_LOCAL(plan_make)
DDP_LOCAL void cpu_plan_make(const ddp_tensor *t, const ddp_ints *dims, plan *p);
/* Place in x of the i-th of the dims from `first` on; out: the place in y. */
#define cpu_plan_place CPU_LOCAL(plan_place)
DDP_LOCAL int64_t cpu_plan_place(const side *s, int first, int64_t i, int64_t *out);

#endif
