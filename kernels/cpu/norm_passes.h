/* norm_passes.h -- the two passes over memory that batch normalisation of rows of channels is made of, forward and backward:
 * sums for each channel, then the result. f32, f16 or bf16; arithmetic in f32, sums of blocks of rows in double. Rows are
 * cut into a fixed number of parts, whatever the threads. */
#ifndef DDP_CPU_NORM_PASSES_H
#define DDP_CPU_NORM_PASSES_H

#include "cpu.h"

typedef struct norm_rows {
    ddp_dtype d;
    int64_t rows, C;
    const void *x; /* [rows, C], as g, y, residual, masked and out */
    const void *g; /* backward: the gradient of the result; NULL forward */
    const void *y; /* the result of relu, where its mask is read from it; else NULL */
    void *masked;  /* with y: g where relu let pass, which the sums pass writes */
    const void *residual;
    void *out;
    bool relu; /* forward: y = relu(..); backward without y: g counts where (x - mean) scale + shift is positive */
    /* [C] each: mean is subtracted from x first; scale and shift as above, or NULL */
    const float *mean, *scale, *shift;
    /* [C] each. Forward: out = (x - mean) q + s (+ residual); backward: out = g p + (x - mean) q + s */
    const float *p, *q, *s;
} norm_rows;

/* total[0..C) and total[C..2C): forward the sums of x - mean and of its square, backward of g and of g (x - mean).
 * A status. */
#define cpu_norm_sums CPU_LOCAL(norm_sums)
DDP_LOCAL int cpu_norm_sums(const norm_rows *n, double *total);
#define cpu_norm_result CPU_LOCAL(norm_result)
DDP_LOCAL void cpu_norm_result(const norm_rows *n);

#endif
