/* product.h -- matrix products as their kernels see them, ours and cuBLAS's. */
#ifndef DDP_CUDA_PRODUCT_H
#define DDP_CUDA_PRODUCT_H

#include "cuda.h"

/* The product of matmul's (linear's, linear_act's) operands a and b in c, which may stand for those of the call (a copy of theirs that
 * lies densely). Batch dims that lie evenly are merged, and a batch of a against one b becomes more rows. Bias, act, residual and pre
 * are left out. */
DDP_LOCAL void ddp__product_of(matmul_args *p, const ddp_call *c, const ddp_tensor *a, const ddp_tensor *b);
/* linear_act's second result where it is kept, else NULL. */
DDP_LOCAL ddp_tensor *ddp__product_pre(const ddp_call *c);

/* A copy of t that lies row by row, in scratch; the fields are set by take. */
typedef struct dense_copy {
    ddp_tensor t;
    ddp_storage storage;
    size_t bytes;
} dense_copy;
DDP_LOCAL int ddp__dense_copy_take(const ddp_call *c, dense_copy *d, const ddp_tensor *t);
/* Nothing where take was not called and d is zero. */
DDP_LOCAL void ddp__dense_copy_give(const ddp_call *c, dense_copy *d);

#endif
