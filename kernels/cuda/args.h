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

/* ---- reductions (reduce.cu) ---- */

enum { LINE_DIMS = 8 };

/* x as results, and what falls on each of them. Dims innermost first, at least one of each; strides of those that are not
 * there are 0. */
typedef struct reduce_args {
    const void *x;
    void *y;           /* results; of extremes NULL where only positions are wanted */
    int64_t *ids;      /* positions of extremes, or NULL */
    void *part;        /* where splits > 1: what each split of a result's elements found, [outs][splits] */
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
    int32_t across; /* lines lie side by side, their elements apart: lanes columns a block; else lanes threads a line */
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
    const void *g;    /* NULL: a number, */
    double g_number;  /* this one */
    void *part;       /* what each block of many found: the sum of its losses, */
    int64_t *counts;  /* how many of its targets are not ignored */
    int64_t *fault;   /* ddp__cuda_fault_word */
    int64_t n, lines; /* classes; targets */
    int64_t step[2];  /* from one class to the next */
    int64_t ignore;
    double smoothing;
    int32_t reduction;             /* 0 none, 1 mean, 2 sum */
    int32_t parts;                 /* of part and counts; of a gradient 0: nobody has counted */
    int32_t op;                    /* for fault_at */
    int32_t ndim;                  /* of the other dims, innermost first */
    int32_t across, lanes, packed; /* as lines_args */
    int32_t unused;
    int64_t size[LINE_DIMS], stride[4][LINE_DIMS];
} loss_args;

/* ---- batch normalisation (norm.cu) ---- */

/* A vector of channels: NULL where there is none; wide: of what the operands' dtype is computed in, else of that dtype. */
typedef struct channel_vector {
    const void *p;
    int64_t step;
    int64_t wide;
} channel_vector;

/* Operands are laid out alike: [outer, channels, inner]. inner 1: channels lie side by side. */
typedef struct norm_args {
    const void *in[3]; /* forward: x, residual; backward: g, x, y; NULL where absent */
    void *out;         /* y; what relu let pass of g; dx */
    int64_t outer, channels, inner;
    int64_t share;                           /* sums: of a block: rows where inner is 1, else runs of a channel */
    channel_vector weight, bias, mean, rstd; /* rstd where running is set: a variance */
    void *mean_out, *rstd_out;               /* [channels], wide */
    void *running_mean, *running_var;        /* wide; NULL: not kept */
    int64_t running_mean_step, running_var_step;
    double *part;          /* [channels][splits][2]: what each share found */
    void *by;              /* [3][channels], wide: coefficients of dx */
    void *dweight, *dbias; /* [channels] */
    double momentum, eps;
    int32_t splits, lanes, packed;
    int32_t run;       /* elements that are read as one */
    int32_t relu;      /* forward: y is; backward: it was, and its mask is found again from x */
    int32_t running;   /* forward by running statistics */
    int32_t training;  /* backward: statistics were the batch's */
    int32_t sums_wide; /* dweight, dbias are */
} norm_args;

/* ---- layer normalisation (layer_norm.cu) ---- */

/* Rows of n elements side by side; vectors too (their step is 1). */
typedef struct layer_norm_args {
    const void *in[2]; /* x; backward: g, x */
    void *out;         /* y; dx */
    int64_t rows, n;
    int64_t share; /* rows of a block, where columns are added up apart from dx */
    channel_vector weight, bias;
    void *mean, *rstd;     /* [rows], wide; forward writes them */
    void *part;            /* [parts][2][n], wide: sums of g xhat and of g */
    void *dweight, *dbias; /* [n] */
    double eps;
    int32_t parts, lanes, packed;
    int32_t sums_wide; /* dweight, dbias are */
} layer_norm_args;

#endif
