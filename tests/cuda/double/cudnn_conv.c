/* cudnn_conv.c -- convolutions: one product of a row of channels a tap. */
#include "cudnn_double.h"

#include <stdlib.h>
#include <string.h>

/* The innermost loops, also for processors that have more. */
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__)
#define WIDE __attribute__((target_clones("default", "arch=x86-64-v3")))
#else
#define WIDE
#endif

/* Sizes of one convolution; memory is N, H, W, C of all tensors (w: K, R, S, C/groups), in the numbers that sums are made in. */
typedef struct shape {
    int64_t n, c, h, w, k, r, s, ho, wo, groups;
    int64_t stride[2], padding[2], dilation[2];
} shape;

enum { FORWARD, GRAD_INPUT, GRAD_WEIGHT };

/* For tap (r, s) of output (ho, wo): the pixel of x, or -1 outside. */
static inline int64_t pixel(const shape *v, int64_t ho, int64_t wo, int64_t r, int64_t s) {
    int64_t h = ho * v->stride[0] - v->padding[0] + r * v->dilation[0],
            w = wo * v->stride[1] - v->padding[1] + s * v->dilation[1];
    return h < 0 || h >= v->h || w < 0 || w >= v->w ? -1 : h * v->w + w;
}

/* All three convolutions are sums of rows, so w is turned: [R, S, groups, C/g, K/g] for the forward and the gradient of w,
 * [R, S, groups, K/g, C/g] for the gradient of x. Where element i of w [K, R, S, C/g] lies then: */
static int64_t turned(const shape *v, int kind, int64_t i) {
    int64_t cg = v->c / v->groups, kg = v->k / v->groups, c = i % cg, tap = i / cg % (v->r * v->s),
            k = i / cg / (v->r * v->s);
    int64_t block = (tap * v->groups + k / kg) * cg * kg;
    return block + (kind == GRAD_INPUT ? k % kg * cg + c : c * kg + k % kg);
}

#define T float
#define NAME(name) name##_f32
#include "cudnn_conv_loops.h"
#define T double
#define NAME(name) name##_f64
#include "cudnn_conv_loops.h"

/* ---- from the graph ------------------------------------------------------------------------------------------------------------ */

static const struct {
    int type, x, w, y, window, alpha, beta;
} by_kind[] = {
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA},
};

static double number(const node *op, int name, double otherwise) {
    const attribute *a = node_get(op, name);
    if (!a || !a->n) return otherwise;
    return a->type == CUDNN_TYPE_DOUBLE ? *(double *)a->value : (double)*(float *)a->value;
}

static bool pair(const node *n, int name, int64_t *v) {
    const attribute *a = node_get(n, name);
    if (!a || a->n != 2) return false;
    memcpy(v, a->value, 2 * sizeof *v);
    return true;
}

static const char *shape_of(shape *v, const node *win, const value *x, const value *w, const value *y) {
    int64_t post[2], in[2] = {x->size[2], x->size[3]};
    if (!pair(win, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, v->stride) ||
        !pair(win, CUDNN_ATTR_CONVOLUTION_DILATIONS, v->dilation) ||
        !pair(win, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, v->padding) ||
        !pair(win, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, post))
        return "a convolution without a 2-D window";
    if (node_enum(win, CUDNN_ATTR_CONVOLUTION_CONV_MODE, -1) != CUDNN_CROSS_CORRELATION)
        return "a convolution that flips its window";
    *v = (shape){.n = x->size[0],
                 .c = x->size[1],
                 .h = in[0],
                 .w = in[1],
                 .k = w->size[0],
                 .r = w->size[2],
                 .s = w->size[3],
                 .ho = y->size[2],
                 .wo = y->size[3],
                 .stride = {v->stride[0], v->stride[1]},
                 .padding = {v->padding[0], v->padding[1]},
                 .dilation = {v->dilation[0], v->dilation[1]}};
    if (w->size[1] < 1 || v->c % w->size[1]) return "channels that are no multiple of the window's";
    v->groups = v->c / w->size[1];
    if (v->k % v->groups || y->size[0] != v->n || y->size[1] != v->k) return "a convolution of shapes that do not fit";
    for (int i = 0; i < 2; i++)
        if ((in[i] + v->padding[i] + post[i] - v->dilation[i] * (w->size[2 + i] - 1) - 1) / v->stride[i] + 1 !=
            y->size[2 + i])
            return "a convolution whose result has another size";
    return NULL;
}

const char *run_convolution(const operands *o) {
    int kind = FORWARD;
    while (by_kind[kind].type != o->op->type) kind++;
    value *x = o->find(o->ctx, o->op, by_kind[kind].x), *w = o->find(o->ctx, o->op, by_kind[kind].w),
          *y = o->find(o->ctx, o->op, by_kind[kind].y);
    const node *win = node_child(o->op, by_kind[kind].window);
    shape v = {0};
    if (!x || !w || !y || x->nd != 4 || w->nd != 4 || y->nd != 4) return "a convolution without its tensors";
    const char *why = shape_of(&v, win, x, w, y);
    if (why) return why;
    if (number(o->op, by_kind[kind].alpha, 1) != 1 || number(o->op, by_kind[kind].beta, 0) != 0)
        return "a convolution with alpha or beta";
    if (node_enum(win, CUDNN_ATTR_CONVOLUTION_COMP_TYPE, -1) == CUDNN_DATA_DOUBLE) run_f64(&v, kind, x->v, w->v, y->v);
    else run_f32(&v, kind, x->v, w->v, y->v);
    return NULL;
}
