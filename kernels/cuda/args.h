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

#endif
