/* graph.h -- cuDNN's graph API for C: a graph of tensors and operations, the ways cuDNN has to compute it, and its execution.
 *
 * A graph is built by calls that return nothing or the number of a tensor; the first failure stays in it (status and text, with
 * the op's name and cuDNN's own words) and later calls do nothing, so that one look at the end is enough. It owns every
 * descriptor made for it: cg_free gives all of them back, wherever the building stopped. Any thread; a graph belongs to one. */
#ifndef DDP_CUDNN_GRAPH_H
#define DDP_CUDNN_GRAPH_H

#include "../../core/op/op.h"
#include "../cuda/api.h"

enum { CG_MADE = 256, CG_TENSORS = 64, CG_OPS = 40, CG_WHY = 512, CG_NONE = -1 };

typedef cudnnBackendDescriptor_t cg_desc;

typedef struct cg_graph {
    const char *op; /* for messages */
    int status;     /* 0, DDP_ENOSUP where cuDNN does not take the graph, DDP_EDEVICE where a call failed */
    char why[CG_WHY];
    int n_made, n_tensors, n_ops;
    cg_desc made[CG_MADE]; /* all descriptors, in the order of their making */
    cg_desc tensor[CG_TENSORS];
    cg_desc ops[CG_OPS];
    cg_desc graph; /* set by cg_finish */
} cg_graph;

/* A tensor of a graph. Sizes and strides in elements; cuDNN's order of dims is ours: N, C, H, W. */
typedef struct cg_spec {
    int64_t uid; /* what a pointer is given under when it runs, from 1; 0: virtual, exists only inside */
    cudnnDataType_t type;
    int n;
    int64_t size[DDP_MAX_DIM], stride[DDP_MAX_DIM];
    int64_t align;  /* bytes that its pointer is a multiple of; 0: 16 */
    bool by_value;  /* one number, in host memory when it runs */
    bool reordered; /* kept as tensor cores like it (F16x16): probabilities of attention */
} cg_spec;

typedef struct cg_window {
    int64_t stride[2], padding[2], dilation[2];
} cg_window;

typedef enum cg_conv_kind { CG_FORWARD, CG_GRAD_INPUT, CG_GRAD_WEIGHT } cg_conv_kind;

/* ---- building (graph.c) ------------------------------------------------------------------------------------------ */
void cg_start(cg_graph *g, const char *op);
void cg_free(cg_graph *g);
/* A failure of the caller's own, or of a cuDNN call; the first stays. Returns the graph's status. */
int cg_fail(cg_graph *g, int status, const char *fmt, ...) DDP_PRINTF(3, 4);
int cg_check(cg_graph *g, cudnnStatus_t s, const char *what);
/* New and empty, owned by the graph; NULL after a failure. */
cg_desc cg_make(cg_graph *g, cudnnBackendDescriptorType_t type);
/* One attribute; n values at v. The second checks the call by type: all of cuDNN's enums are ints. */
void cg_set(cg_graph *g, cg_desc d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t n,
            const void *v);
void cg_set_enum(cg_graph *g, cg_desc d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int v);
void cg_set_desc(cg_graph *g, cg_desc d, cudnnBackendAttributeName_t name, cg_desc v);
void cg_finalize(cg_graph *g, cg_desc d, const char *what);

cudnnDataType_t cg_type(ddp_dtype d);
int cg_tensor(cg_graph *g, const cg_spec *s);
/* Virtual, of size[n], row-major or channels-last. */
int cg_virtual(cg_graph *g, cudnnDataType_t type, int n, const int64_t *size, bool channels_last);
/* One number of n dims under uid, given by value when it runs. */
int cg_number(cg_graph *g, int64_t uid, cudnnDataType_t type, int n);

/* y = x conv w, dx from dy and w, or dw from x and dy, by kind; x, w and y are the tensors in these roles. */
void cg_conv(cg_graph *g, cg_conv_kind kind, const cg_window *win, cudnnDataType_t compute, int x, int w, int y);
/* y = mode(x), mode(x, b) or, for BINARY_SELECT, t ? x : b; CG_NONE where there is none. */
void cg_pointwise(cg_graph *g, cudnnPointwiseMode_t mode, int x, int b, int t, int y);
/* dx = dy * mode'(x). */
void cg_pointwise_grad(cg_graph *g, cudnnPointwiseMode_t mode, int dy, int x, int dx);
/* y[..., i, ...] = i along axis, of x's shape. */
void cg_index(cg_graph *g, int x, int64_t axis, int y);
/* x reduced to y's shape along the dims where y has size 1. */
void cg_reduce(cg_graph *g, cudnnReduceTensorOp_t how, int x, int y);
/* c = a b over the last two dims, batched over the rest. */
void cg_matmul(cg_graph *g, int a, int b, int c);
/* Sums and sums of squares of x over all but its channels. */
void cg_statistics(cg_graph *g, int x, int sum, int square);
/* The elements of x in the order they lie in memory, seen with y's sizes and strides. */
void cg_reshape(cg_graph *g, int x, int y);
/* The operations become a graph that plans can be made for. Returns the graph's status. */
int cg_finish(cg_graph *g);

/* ---- norms and pooling (graph_norm.c) ---------------------------------------------------------------------------- */
/* Tensors of a normalisation, CG_NONE where there is none: running_*_in are read, running_*_out written. */
typedef struct cg_norm {
    cudnnBackendNormMode_t mode;
    bool training;
    int x, y, scale, bias, eps, momentum;
    int mean, rstd;
    int running_mean_in, running_var_in, running_mean_out, running_var_out;
    int dy, dx, dscale, dbias;
} cg_norm;
void cg_norm_forward(cg_graph *g, const cg_norm *n);
void cg_norm_backward(cg_graph *g, const cg_norm *n);

typedef struct cg_pool {
    cudnnResampleMode_t mode;
    int64_t window[2], stride[2], padding[2];
    int x, y, dy, dx, index; /* of the gradient: dy and dx; index: what a forward maximum wrote, or CG_NONE */
} cg_pool;
void cg_pool_forward(cg_graph *g, const cg_pool *p);
void cg_pool_backward(cg_graph *g, const cg_pool *p);

#endif
