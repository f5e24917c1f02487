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

/* ---- reductions (reduce.cu) ---- */

enum { LINE_DIMS = 8 };

/* x as results, and what falls on each of them. Dims innermost first, at least one of each; strides of those that are not
 * there are 0. */
typedef struct reduce_args {
    const void *x;
    void *y;      /* results; of extremes NULL where only positions are wanted */
    int64_t *ids; /* positions of extremes, or NULL */
    void *part;   /* where splits > 1: what each split of a result's elements found, [outs][splits] */
    int64_t outs, ins; /* results; elements of each */
    double count;      /* sums are divided by it */
    int32_t n_kept, n_gone;
    int32_t splits;   /* blocks in y */
    int32_t lanes;    /* rows: threads a result; columns: columns a block */
    int32_t packed;   /* runs may be read as one */
    int32_t smallest; /* of extremes */
    int64_t kept_size[LINE_DIMS], kept_stride[LINE_DIMS], kept_at[LINE_DIMS]; /* strides in x and among the results */
    int64_t gone_size[LINE_DIMS], gone_stride[LINE_DIMS];
} reduce_args;

/* ---- lines along one dim (softmax.cu) ---- */

/* Operands are 0: the result, 1 and 2: in[0], in[1]. Strides and steps in elements. */
typedef struct lines_args {
    const void *in[2];
    void *out;
    int64_t n, lines; /* elements of a line; lines */
    int64_t step[3];  /* from one element of a line to the next */
    int32_t ndim;     /* of the other dims, innermost first */
    int32_t across;   /* lines lie side by side, their elements apart: lanes columns a block; else lanes threads a line */
    int32_t lanes;
    int32_t packed;    /* runs may be read as one */
    int32_t logarithm; /* log softmax */
    int32_t unused;
    int64_t size[LINE_DIMS], stride[3][LINE_DIMS];
} lines_args;

/* ---- cross-entropy (loss.cu) ---- */

/* Lines are the logits of one target. Operands are 0: losses or dlogits, 1: logits, 2: targets, 3: g. */
typedef struct loss_args {
    void *out;
    const void *x;
    const int64_t *target;
    const void *g;   /* NULL: a number, */
    double g_number; /* this one */
    void *part;      /* what each block of many found: the sum of its losses, */
    int64_t *counts; /* how many of its targets are not ignored */
    int64_t *fault;  /* ddp__cuda_fault_word */
    int64_t n, lines; /* classes; targets */
    int64_t step[2];  /* from one class to the next */
    int64_t ignore;
    double smoothing;
    int32_t reduction; /* 0 none, 1 mean, 2 sum */
    int32_t parts;     /* of part and counts; of a gradient 0: nobody has counted */
    int32_t op;        /* for fault_at */
    int32_t ndim;      /* of the other dims, innermost first */
    int32_t across, lanes, packed; /* as lines_args */
    int32_t unused;
    int64_t size[LINE_DIMS], stride[4][LINE_DIMS];
} loss_args;

/* ---- chains of elementwise ops, generated (chain.c) ---- */

/* Operands side by side, as in walk_args: results first. */
enum { CHAIN_OPERANDS = 12 };
typedef struct chain_args {
    void *p[CHAIN_OPERANDS];
    double number[CHAIN_OPERANDS];
    int64_t whole[CHAIN_OPERANDS];
    int64_t n;
    int32_t ndim; /* 0: dense */
    int32_t unused;
    int64_t size[WALK_DIMS];
    int64_t stride[CHAIN_OPERANDS][WALK_DIMS];
} chain_args;

#endif
