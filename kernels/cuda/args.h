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
/* ---- batch normalisation (norm.cu) ---- */

/* A vector of channels: NULL where there is none; wide: of what the operands' dtype is computed in, else of that dtype. */
typedef struct channel_vector {
    const void *p;
    int64_t step;
    int64_t wide;
} channel_vector;

/* Operands are laid out alike: [outer, channels, inner]. inner 1: channels lie side by side. */
typedef struct batch_norm_args {
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
} batch_norm_args;

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
/* ---- places (places.h, places.cuh) ---- */

/* Division of numbers below 2^31 by one that is known at launch, by a product and a shift. */
typedef struct divider {
    uint32_t by, times, shift;
} divider;

/* Positions over a shape, in its logical order, and where each lies in up to 3 tensors. Dim 0 is the innermost. */
typedef struct places {
    int64_t n; /* positions */
    int32_t ndim;
    int32_t below_2_31; /* n is: by may be used */
    int64_t size[WALK_DIMS];
    divider by[WALK_DIMS];
    int64_t stride[3][WALK_DIMS];
} places;

/* ---- pooling (pool.cu) ---- */

/* Windows over images. A thread owns one pack of y: channels of one place. y is channels-last. */
typedef struct pool_args {
    const void *x; /* what is read: images forward, the gradient of their windows backward */
    void *y;
    int64_t *place; /* of maxima, h*W + w: written forward (channels-last), read backward */
    int64_t xs[4];  /* strides of x: N C H W */
    int64_t ps[4];  /* of place, where it is read */
    int32_t C, H, W, Ho, Wo;
    int32_t kernel[2], stride[2], padding[2];
    int32_t adaptive; /* windows cover the image evenly: the three above say nothing */
    int32_t include;  /* padding counts in a mean */
    int32_t anywhere; /* places backward may lie in any window */
    int32_t vector;   /* 16 bytes of channels at a time */
    int32_t lanes;    /* of wide means: threads side by side over channels, a power of 2 */
    uint32_t n;       /* packs of y */
    divider by_c, by_w, by_h, by_stride[2];
} pool_args;

/* ---- picking and adding back (index.cu) ---- */

/* y, row-major, is x at ids; in units of 1 to 16 bytes. stride[0] x, without the picked dim; stride[1] ids. */
typedef struct take_args {
    const void *x;
    void *y;
    const int64_t *ids;
    int64_t step, limit; /* units of x from one id to the next; ids are below limit */
    int64_t *fault;
    int64_t op;
    places at;
} take_args;

/* Rows of g brought into the order of where they go, those of one place in their own order: a radix sort of (key, value), 8 bits a
 * pass, stable. A block owns SORT_TILE pairs. */
enum { SORT_THREADS = 256, SORT_TILE = 2048, SORT_DIGITS = 256 };
typedef struct sort_args {
    const uint32_t *keys; /* [n], of a pass */
    const int64_t *values;
    uint32_t *keys_out;
    int64_t *values_out;
    uint32_t *counts; /* [tiles][SORT_DIGITS] */
    int64_t n;
    int32_t shift;
    /* Of the first: keys are made of ids. stride[0] ids, stride[1] g, stride[2] where it goes, beside step an id. */
    const int64_t *ids;
    int64_t step, limit;
    int64_t *fault;
    int64_t op;
    places at;
} sort_args;

/* Sorted rows added up: of each chunk of pairs at once, then what spans chunks. */
typedef struct add_rows_args {
    const void *g;
    void *dx;
    void *
        partial; /* [chunks][2][columns], in what sums are kept in: of a place begun before the chunk, of one that goes on after */
    const uint32_t *keys;
    const int64_t *values; /* where in g the row begins */
    int64_t n, chunk, chunks;
    int64_t row;    /* elements of dx from one key to the next */
    int32_t vector; /* columns are packs of 16 bytes */
    int32_t unused;
    places columns; /* stride[0] g, stride[1] dx */
} add_rows_args;

/* Few ids a column: each element of g looks along them for its like. stride[0] g, stride[1] ids, stride[2] dx without the dim. */
typedef struct add_few_args {
    const void *g;
    void *dx;
    const int64_t *ids;
    int64_t count, g_step, id_step, dx_step, limit; /* along the dim */
    int64_t *fault;
    int64_t op;
    places at; /* columns */
} add_few_args;

/* y = 0 but at start, start + every, ... before stop along one dim, where it is x. stride[0] of x (0 along that dim); y is row-major. */
typedef struct lay_args {
    const void *x;
    void *y;
    int64_t start, stop, every, step; /* step: of x along the dim */
    int32_t dim, unused;              /* of at, -1: y is x */
    places at;
} lay_args;

/* Pieces of rows side by side, in units of 1 to 16 bytes. */
enum { JOIN_MAX = 64 };
typedef struct join_args {
    char *y;
    int64_t y_row; /* units from one row of y to the next */
    struct {
        const void *x;
        int64_t x_row, n; /* units: from row to row, altogether */
        int64_t to;       /* the first in y's row */
        int64_t piece;    /* units of one row */
    } in[JOIN_MAX];
} join_args;

/* ---- draws (random.cu) ---- */

/* Draws by logical position (kernels/random.h). ndim 0 of at: y, x and mask lie in row-major order; else positions go in y's order of
 * memory: stride[0] the logical position, stride[1] y and mask, stride[2] x. */
typedef struct draw_args {
    void *y;
    const void *x;       /* of dropout */
    unsigned char *mask; /* of dropout */
    uint64_t key, call;
    double scale, shift;
    uint64_t below; /* bernoulli, dropout: a word's upper 24 bits below this; randint: how many numbers */
    int64_t lo;
    int32_t normal, unused;
    places at;
} draw_args;

/* y[i] of arange: start + i step; of eye: 1 where row is column. */
typedef struct count_args {
    void *y;
    int64_t n, columns;
    double start, step;
} count_args;

/* ---- many tensors in one launch (optim.cu) ---- */

/* Up to LIST_MAX tensors of k lists that lie alike and densely, cut into chunks of LIST_CHUNK elements, a block each. */
enum { LIST_MAX = 64, LIST_LISTS = 4, LIST_CHUNK = 4096 };
typedef struct list_of_tensors {
    void *p[LIST_LISTS][LIST_MAX];
    int64_t numel[LIST_MAX];
    int32_t first[LIST_MAX + 1]; /* chunk of each, and the end */
    int32_t n;
    int32_t vector; /* all on 16 bytes */
    int32_t unused;
} list_of_tensors;

typedef struct sgd_numbers {
    double lr, momentum, remains, decay, by;
    int32_t nesterov, first, keep, has_momentum;
} sgd_numbers;
typedef struct sgd_args { /* lists: parameters, gradients, buffers */
    sgd_numbers by;
    list_of_tensors list;
} sgd_args;
typedef struct sgd_walk_args {
    sgd_numbers by;
    walk_args walk;
} sgd_walk_args;

typedef struct adam_numbers {
    double b1, b2, r1, r2, rate, c2, eps, shrink, l2, by;
    int32_t keep, unused;
} adam_numbers;
typedef struct adam_args { /* lists: parameters, gradients, ms, vs */
    adam_numbers by;
    list_of_tensors list;
} adam_args;
typedef struct adam_walk_args {
    adam_numbers by;
    walk_args walk;
} adam_walk_args;

/* Gradients: their squares, or times a number. */
typedef struct gradient_numbers {
    double *sums;     /* [blocks][2] of squares, and 1 where an element is not finite */
    float *found;     /* of scaling: 1 where an element was not finite; may be NULL */
    const void *norm; /* of clipping: scales by min(1, max_norm / (norm + 1e-6)); NULL: by `by` */
    double by, max_norm;
    int32_t norm_f64, unused;
} gradient_numbers;
typedef struct gradients_args {
    gradient_numbers by;
    list_of_tensors list;
} gradients_args;
typedef struct gradients_walk_args {
    gradient_numbers by;
    walk_args walk;
} gradients_walk_args;

/* The sums of all blocks: inv_scale times the root of them, and whether one is not finite. */
typedef struct grad_norm_args {
    const double *sums; /* [n][2] */
    int64_t n;
    void *norm;
    float *found; /* may be NULL */
    double inv_scale;
    int32_t norm_f64, unused;
} grad_norm_args;

/* ---- activations beside products (act.cu) ---- */

/* dz = g times the slope of act at `from`, and its sums over rows: of `parts` parts first. Row-major [rows][columns]. */
typedef struct act_grad_args {
    const void *g, *from;
    void *dz, *dbias;
    void *sums;                  /* [parts][columns], in what sums are kept in */
    int64_t rows, columns, part; /* rows of a part */
    int64_t parts;
    int32_t act, vector;
} act_grad_args;

/* ---- looking for NaN (check.cu) ---- */

/* count[0] NaN and count[1] infinities among the elements of operand 0, added to what is there. */
typedef struct census_args {
    uint64_t *count;
    walk_args walk;
} census_args;
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
