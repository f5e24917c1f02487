/* The argument structs of the emulator's test kernels, as kernels/cuda/args.h. */
#ifndef DDP_TEST_ARGS_H
#define DDP_TEST_ARGS_H
#include <stdint.h>

typedef struct scale_args { /* y[i] = a * x[i] + b */
    const float *x;
    float *y;
    float a, b;
    int64_t n;
} scale_args;

typedef struct reduce_args { /* rows of cols numbers, one block a row */
    const float *x;
    float *y;
    int32_t rows, cols;
} reduce_args;

typedef struct gemm_args { /* c[m,n] = a[m,k] b[k,n] in row-major order, blocks of 16 x 16 threads */
    const float *a, *b;
    float *c;
    int32_t m, n, k;
} gemm_args;

typedef struct ints_args {
    int32_t *out;
    int64_t *wide;
    float *sum;
    int32_t n;
} ints_args;

#endif
