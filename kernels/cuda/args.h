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

/* A vector of channels of any floating dtype (ddp_dtype); p NULL: none. */
typedef struct fold_vector {
    const void *p;
    int64_t stride;
    int64_t dtype;
} fold_vector;

/* Batch norm by running statistics as scale and shift, [channels] of the kernel's dtype:
 * scale = weight / sqrt(var + eps), shift = (conv_bias - mean) * scale + bias. */
typedef struct fold_args {
    fold_vector conv_bias, weight, bias, mean, var;
    int64_t channels;
    double eps;
    void *scale, *shift;
} fold_args;

/* out[k][r][s][c] = w[k][c][r][s] * scale[k]. */
typedef struct fold_weight_args {
    const float *w, *scale;
    float *out;
    int64_t size[4], stride[4]; /* of w: k, c, r, s */
} fold_weight_args;

/* y = act(y * scale + shift + residual), channels innermost; scale and shift of the dtype that sums are made in. */
typedef struct fold_apply_args {
    void *y;
    const void *residual, *scale, *shift; /* residual: NULL or lying as y does */
    int64_t n, channels;
    int64_t relu;
} fold_apply_args;

#endif
