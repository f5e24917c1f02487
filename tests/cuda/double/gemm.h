/* gemm.h -- the products behind the double of cuBLAS: column-major matrices, as BLAS has them. */
#ifndef DDP_DOUBLE_GEMM_H
#define DDP_DOUBLE_GEMM_H

#include "double.h"
#include <library_types.h>

/* c[m,n] = alpha op(a)[m,k] op(b)[k,n] + beta c, sums in float (double for CUDA_R_64F) in the order of k. */
typedef struct product {
    int64_t m, n, k, lda, ldb, ldc;
    bool turn_a, turn_b; /* transposed */
    bool tf32;           /* f32 operands are rounded to TF32 */
    cudaDataType_t type_a, type_b, type_c;
    double alpha, beta;
    const void *a, *b;
    void *c;
} product;

void multiply(const product *p);
size_t type_bytes(cudaDataType_t type);

#endif
