/* conv.h -- a convolution with what follows it, as a graph of cuDNN's. */
#ifndef DDP_CUDNN_CONV_H
#define DDP_CUDNN_CONV_H

#include "graph.h"

/* Under which uids a run gets its tensors. */
enum { CONV_X = 1, CONV_W, CONV_Y, CONV_BIAS, CONV_SCALE, CONV_RESIDUAL, CONV_SUM, CONV_SQUARE };

/* What is done with x conv w before it becomes y. */
typedef enum conv_after {
    CONV_PLAIN,     /* nothing; of gradients always */
    CONV_BIASED,    /* + residual + bias [K], then relu where asked for */
    CONV_NORMED,    /* * scale [K] + bias [K] + residual, then relu where asked for */
    CONV_STATISTICS /* y as it is, and its channels' sums and sums of squares [K] */
} conv_after;

/* All that a graph depends on, and nothing else: also a cache's key, word by word. */
typedef struct conv {
    int64_t kind, dtype, after, residual, relu, vector; /* vector: ddp_dtype of bias */
    int64_t groups;
    int64_t x[4], w[4], y[4]; /* sizes: [N,C,H,W], [K,C/groups,R,S], [N,K,Ho,Wo] */
    int64_t x_stride[4], w_stride[4], y_stride[4], r_stride[4];
    int64_t align[4]; /* bytes, of x, w, y, residual */
    int64_t stride[2], padding[2], dilation[2];
} conv;

/* Strides of m in v's terms: a dim of size 1 has none of its own, so it gets the one that makes the layout plain to cuDNN. */
void conv_strides(const ddp_meta *m, int64_t *stride);
/* Operations of v in g; a status. cg_finish is the caller's. */
int conv_graph(cg_graph *g, const conv *v);
int conv_build(cg_graph *g, const void *v); /* the same, as a plan_build */

/* ---- calls (conv.c) ------------------------------------------------------------------------------------------------ */
typedef struct plan_key plan_key; /* plan.h */
/* The tensors in their roles, whichever of them is the result. */
typedef struct conv_roles {
    ddp_tensor *x, *w, *y, *bias, *residual;
} conv_roles;
conv_roles conv_of_call(const ddp_call *c, conv *v);
void conv_key(const ddp_call *c, const conv *v, plan_key *k);
/* How v sees t: what a copy of it would be where it is copied. */
void conv_look(const ddp_tensor *t, int64_t *size, int64_t *stride, int64_t *align);
bool conv_takes_layout(const ddp_meta *m);

/* A tensor of the call's own, on the caller's stack; {0} before use. */
typedef struct conv_temp {
    ddp_tensor t;
    ddp_storage s;
    size_t bytes;
} conv_temp;
/* t where cuDNN takes it as it lies, else a channels-last copy that `to` holds; NULL with the error set. */
ddp_tensor *conv_dense(const ddp_call *c, ddp_tensor *t, conv_temp *to);
ddp_tensor *conv_channels_last(const ddp_call *c, ddp_tensor *t, conv_temp *to); /* the copy, in any case */
/* Scratch of `bytes`, held by `to`; NULL with the error set. */
void *conv_scratch(const ddp_call *c, size_t bytes, conv_temp *to);
void conv_give(const ddp_call *c, conv_temp *t);

#endif
