/* conv_graph.c -- convolutions as graphs. */
#include "conv.h"

#include <string.h>

/* ---- layouts ----------------------------------------------------------------------------------------------------- */

/* Would m be dense with its dims in this order, from the innermost, if strides of sizes 1 did not count? Then out gets the
 * strides of that order. */
static bool lies_as(const ddp_meta *m, const int *order, int64_t *out) {
    int64_t step = 1, s[4];
    for (int k = 0; k < 4; k++) {
        int i = order[k];
        if (m->size[i] != 1 && m->stride[i] != step) return false;
        s[i] = step;
        step *= m->size[i];
    }
    memcpy(out, s, sizeof s);
    return true;
}

void conv_strides(const ddp_meta *m, int64_t *stride) {
    static const int channels_last[4] = {1, 3, 2, 0}, rows[4] = {3, 2, 1, 0};
    memcpy(stride, m->stride, 4 * sizeof *stride);
    if (!lies_as(m, channels_last, stride)) lies_as(m, rows, stride);
}

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

static int tensor(cg_graph *g, int64_t uid, int64_t dtype, const int64_t *size, const int64_t *stride, int64_t align) {
    cg_spec s = {.uid = uid, .type = cg_type((ddp_dtype)dtype), .n = 4, .align = align};
    memcpy(s.size, size, 4 * sizeof *size);
    memcpy(s.stride, stride, 4 * sizeof *stride);
    return cg_tensor(g, &s);
}

/* A number a channel, [1,K,1,1]. */
static int vector(cg_graph *g, int64_t uid, int64_t dtype, int64_t k) {
    const int64_t size[4] = {1, k, 1, 1}, stride[4] = {k, 1, k, k};
    return tensor(g, uid, dtype, size, stride, (int64_t)ddp__dtype_bytes[dtype]);
}

/* Where the next step's result goes: y, after the last, else a tensor that exists only inside, as wide as sums are. */
static int next(cg_graph *g, const conv *v, int *left) {
    if (--*left == 0) return tensor(g, CONV_Y, v->dtype, v->y, v->y_stride, v->align[2]);
    return cg_virtual(g, cg_type(ddp__wide((ddp_dtype)v->dtype)), 4, v->y, v->y_stride[1] == 1);
}

static int add_residual(cg_graph *g, const conv *v, int from, int *left) {
    int r = tensor(g, CONV_RESIDUAL, v->dtype, v->y, v->r_stride, v->align[3]), to = next(g, v, left);
    cg_pointwise(g, CUDNN_POINTWISE_ADD, from, r, CG_NONE, to);
    return to;
}

static int with_vector(cg_graph *g, const conv *v, cudnnPointwiseMode_t mode, int64_t uid, int64_t dtype, int from,
                       int *left) {
    int b = vector(g, uid, dtype, v->w[0]), to = next(g, v, left);
    cg_pointwise(g, mode, from, b, CG_NONE, to);
    return to;
}

/* ---- the graph --------------------------------------------------------------------------------------------------- */

/* Residual before bias where nothing is scaled: the order that cuDNN's ready-made engines know. */
static void steps_after(cg_graph *g, const conv *v, int from, int left) {
    int64_t wide = ddp__wide((ddp_dtype)v->dtype);
    int at = from;
    if (v->after == CONV_NORMED) at = with_vector(g, v, CUDNN_POINTWISE_MUL, CONV_SCALE, wide, at, &left);
    else if (v->residual) at = add_residual(g, v, at, &left);
    at = with_vector(g, v, CUDNN_POINTWISE_ADD, CONV_BIAS, v->vector, at, &left);
    if (v->after == CONV_NORMED && v->residual) at = add_residual(g, v, at, &left);
    if (v->relu) cg_pointwise(g, CUDNN_POINTWISE_RELU_FWD, at, CG_NONE, CG_NONE, next(g, v, &left));
}

int conv_graph(cg_graph *g, const conv *v) {
    cg_window win;
    int64_t wide = ddp__wide((ddp_dtype)v->dtype);
    memcpy(win.stride, v->stride, sizeof win.stride);
    memcpy(win.padding, v->padding, sizeof win.padding);
    memcpy(win.dilation, v->dilation, sizeof win.dilation);
    int left = 1; /* steps that write something */
    if (v->after == CONV_BIASED || v->after == CONV_NORMED)
        left += 1 + (v->after == CONV_NORMED) + (v->residual != 0) + (v->relu != 0);
    int x = tensor(g, CONV_X, v->dtype, v->x, v->x_stride, v->align[0]);
    int w = tensor(g, CONV_W, v->dtype, v->w, v->w_stride, v->align[1]);
    int y = next(g, v, &left);
    cg_conv(g, (cg_conv_kind)v->kind, &win, cg_type((ddp_dtype)wide), x, w, y);
    if (v->after == CONV_STATISTICS)
        cg_statistics(g, y, vector(g, CONV_SUM, wide, v->w[0]), vector(g, CONV_SQUARE, wide, v->w[0]));
    else if (v->after != CONV_PLAIN) steps_after(g, v, y, left);
    return g->status;
}
