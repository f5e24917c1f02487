/* matmul.h -- one matrix product, as matmul.c hands it to the loops of its dtype. */
#ifndef DDP_CPU_MATMUL_H
#define DDP_CPU_MATMUL_H

#include "cpu.h"

/* y[M, N] = act(a[M, K] b[K, N] + bias[N]) + residual, all of dt (f32, f16 or bf16); strides in elements; y row-major with row
 * stride ys. */
typedef struct gemm {
    ddp_dtype dt;
    int64_t M, N, K;
    const void *a, *b, *bias;
    int64_t am, ak, bk, bn, bias_stride;
    void *y;
    int64_t ys;
    /* cpu_half_gemm's alone: */
    int act;              /* DDP_ACT_* */
    const void *residual; /* laid out as y, or y itself; or NULL */
    void *pre;            /* laid out as y: gets what act is applied to; or NULL */
} gemm;

/* 16-bit operands, and with amx f32 in two parts (matmul_half.c): summed in f32, rounded once. A status. */
#define cpu_half_gemm CPU_LOCAL(half_gemm)
DDP_LOCAL int cpu_half_gemm(const gemm *g, bool amx);
/* The same by AMX as a sum of outer products (outer.c), where columns of a and rows of b lie together: a gradient of weights. */
#define cpu_outer_gemm CPU_LOCAL(outer_gemm)
DDP_LOCAL int cpu_outer_gemm(const gemm *g);
/* What linear, and linear_act, multiply; without what is cpu_half_gemm's alone. */
#define cpu_linear_of CPU_LOCAL(linear_of)
DDP_LOCAL gemm cpu_linear_of(const ddp_call *c);
/* Why linear's kernel does not take c; NULL: it does. */
#define cpu_reject_linear CPU_LOCAL(reject_linear)
DDP_LOCAL const char *cpu_reject_linear(const ddp_call *c);

#endif
