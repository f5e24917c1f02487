/* args.h -- what each own kernel is given: one struct by value, the same for the host's C and for the kernels. Pointers are of the
 * device; sizes and strides count elements. */
#ifndef DDP_CUDA_ARGS_H
#define DDP_CUDA_ARGS_H

#include <stdint.h>

enum { WALK_DIMS = 8, WALK_MAX = 4 };

/* Operands side by side over one shape: operand 0 is the result. Dim 0 is the innermost. Strides are 0 where broadcast. An
 * operand without memory is a number. */
typedef struct walk_args {
    void *p[WALK_MAX];
    double number[WALK_MAX]; /* where p is NULL: the value, */
    int64_t whole[WALK_MAX]; /* and as an integer */
    int64_t n;               /* elements */
    int32_t ndim;            /* 0: all operands with memory lie densely side by side */
    int32_t attr;            /* what the kernel says */
    int64_t size[WALK_DIMS];
    int64_t stride[WALK_MAX][WALK_DIMS];
    double attrs[2]; /* what the kernel says */
} walk_args;

/* ---- matrix products (matmul.cu) ---- */

/* y[..., M, N] = a[..., M, K] b[..., K, N]; of linear maps act(that + bias) + residual, and pre = that + bias. */
enum { PRODUCT_DIMS = 6, PRODUCT_TILE = 64, PRODUCT_DEPTH = 16, PRODUCT_THREADS = 256 };
typedef struct matmul_args {
    const void *a, *b;
    const void *bias, *residual; /* [N]; row-major as y. NULL: none */
    void *y, *pre;               /* pre: row-major as y. NULL: not kept */
    int64_t M, N, K;
    int64_t am, ak, bk, bn, ym, yn, bias_stride;
    int64_t batches;
    int32_t batch_dims, act; /* act as the attribute of linear_act */
    int64_t size[PRODUCT_DIMS];
    int64_t sa[PRODUCT_DIMS], sb[PRODUCT_DIMS], sy[PRODUCT_DIMS]; /* 0 where broadcast */
} matmul_args;

/* Where the matrices of each batch begin: three lists of p.batches pointers, of b, a and y. */
typedef struct product_pointers_args {
    matmul_args p;
    void **out;
    int32_t in_bytes, y_bytes; /* of an element */
} product_pointers_args;

/* Over rows x columns, row-major: pre = z + bias, y = act(pre) + residual. */
typedef struct bias_args {
    const void *z; /* in what the dtype is summed in; may be y or pre where that is the dtype */
    const void *bias, *residual;
    void *pre, *y;
    int64_t rows, columns, bias_stride;
    int32_t act, vector; /* vector: bias dense, all of them aligned and columns a multiple of 16 bytes */
} bias_args;

#endif
