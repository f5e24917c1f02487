/* conv.c -- 2-D convolution and its two gradients, which are one another's gradients too. */
#include <string.h>

#include "ops.h"

/* The attributes all three share. */
typedef struct window {
    const int64_t *stride, *padding, *dilation;
    int64_t groups;
} window;

/* From `least` on, and so small that sums of products with sizes do not overflow. */
static int check_step(const ddp_call *c, const char *name, int64_t v, int least) {
    if (v < least) return ddp__op_fail(c, DDP_EINVAL, "%s is %lld, at least %d", name, (long long)v, least);
    if (v > INT32_MAX) return ddp__op_fail(c, DDP_EINVAL, "%s is %lld, at most %d", name, (long long)v, INT32_MAX);
    return 0;
}

static int check_window(const ddp_call *c, const window *w) {
    int st;
    for (int i = 0; i < 2; i++)
        if ((st = check_step(c, "stride", w->stride[i], 1)) < 0 ||
            (st = check_step(c, "padding", w->padding[i], 0)) < 0 ||
            (st = check_step(c, "dilation", w->dilation[i], 1)) < 0)
            return st;
    if (w->groups < 1) return ddp__op_fail(c, DDP_EINVAL, "groups is %lld, at least 1", (long long)w->groups);
    return 0;
}

/* x [N,C,H,W] and w [K,C/groups,R,S] fit; y gets [N,K,Ho,Wo]. */
static int check_shapes(const ddp_call *c, const int64_t *x, const int64_t *w, const window *win, int64_t *y) {
    char sx[80], sw[80];
    ddp__shape_text(4, x, sx, sizeof sx);
    ddp__shape_text(4, w, sw, sizeof sw);
    if (x[1] != w[1] * win->groups) {
        if (win->groups == 1)
            return ddp__op_fail(c, DDP_ESHAPE, "w is %s, x %s has %lld channel%s", sw, sx, (long long)x[1],
                                x[1] == 1 ? "" : "s");
        return ddp__op_fail(c, DDP_ESHAPE, "w is %s in %lld groups, x %s has %lld channels", sw, (long long)win->groups,
                            sx, (long long)x[1]);
    }
    if (w[0] % win->groups)
        return ddp__op_fail(c, DDP_ESHAPE, "w is %s: %lld outputs in %lld groups", sw, (long long)w[0],
                            (long long)win->groups);
    y[0] = x[0];
    y[1] = w[0];
    for (int i = 0; i < 2; i++) {
        if (w[2 + i] < 1) return ddp__op_fail(c, DDP_ESHAPE, "w is %s: an empty window", sw);
        y[2 + i] = ddp__window_out(x[2 + i], w[2 + i], win->stride[i], win->padding[i], win->dilation[i]);
        if (y[2 + i] < 1) return ddp__op_fail(c, DDP_ESHAPE, "w is %s: the window exceeds the padded x %s", sw, sx);
    }
    return 0;
}

/* in[0] and in[1] are [., ., ., .] of one floating dtype. */
static int check_dtypes(const ddp_call *c) {
    int st = ddp__need_float(c, 0);
    if (st < 0 || (st = ddp__need_dtype(c, 1, c->in[0]->m.dtype)) < 0) return st;
    if ((st = ddp__need_ndim(c, 0, 4)) < 0) return st;
    return ddp__need_ndim(c, 1, 4);
}

static int out_channels_last(const ddp_call *c, const int64_t *size, ddp_meta *out) {
    int st = ddp__out_shape(c, c->in[0]->m.dtype, 4, size, out);
    if (st == 0) ddp__meta_channels_last(out);
    return st;
}

#define WINDOW(a) \
    { (a)->stride, (a)->padding, (a)->dilation, (a)->groups }

int ddp__conv2d_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_conv2d_attrs *a = c->attrs;
    window win = WINDOW(a);
    int64_t y[4];
    int st;
    if ((st = check_dtypes(c)) < 0 || (st = check_window(c, &win)) < 0) return st;
    if ((st = check_shapes(c, c->in[0]->m.size, c->in[1]->m.size, &win, y)) < 0) return st;
    return out_channels_last(c, y, out);
}

static int conv2d_infer(const ddp_call *c, ddp_meta *out) {
    int st = ddp__conv2d_infer(c, out);
    if (st < 0) return st;
    if (c->in[2] && (c->in[2]->m.ndim != 1 || c->in[2]->m.size[0] != out->size[1]))
        return ddp__op_fail(c, DDP_ESHAPE, "bias is %s, w %s: expected [%lld]", DDP_SHAPE_TEXT(&c->in[2]->m),
                            DDP_SHAPE_TEXT(&c->in[1]->m), (long long)out->size[1]);
    return ddp__need_dtype(c, 2, out->dtype);
}

static int need_4(const ddp_call *c, const char *name, const ddp_ints *v) {
    if (v->n != 4) return ddp__op_fail(c, DDP_ESHAPE, "%s has %lld sizes, expected 4", name, (long long)v->n);
    for (int i = 0; i < 4; i++)
        if (v->v[i] < 0) return ddp__op_fail(c, DDP_ESHAPE, "%s has a negative size", name);
    return 0;
}

static int same_4(const ddp_call *c, const char *name, const int64_t *got, const int64_t *want) {
    if (memcmp(got, want, 4 * sizeof *got) == 0) return 0;
    char g[80], w[80];
    return ddp__op_fail(c, DDP_ESHAPE, "%s is %s, expected %s", name, ddp__shape_text(4, got, g, sizeof g),
                        ddp__shape_text(4, want, w, sizeof w));
}

static int conv2d_grad_input_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_conv2d_grad_input_attrs *a = c->attrs;
    window win = WINDOW(a);
    int64_t y[4];
    int st;
    if ((st = check_dtypes(c)) < 0 || (st = check_window(c, &win)) < 0 || (st = need_4(c, "x_size", &a->x_size)) < 0)
        return st;
    if ((st = check_shapes(c, a->x_size.v, c->in[1]->m.size, &win, y)) < 0) return st;
    if ((st = same_4(c, "g", c->in[0]->m.size, y)) < 0) return st;
    return out_channels_last(c, a->x_size.v, out);
}

static int conv2d_grad_weight_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_conv2d_grad_weight_attrs *a = c->attrs;
    window win = WINDOW(a);
    int64_t y[4];
    int st;
    if ((st = check_dtypes(c)) < 0 || (st = check_window(c, &win)) < 0 || (st = need_4(c, "w_size", &a->w_size)) < 0)
        return st;
    if ((st = check_shapes(c, c->in[1]->m.size, a->w_size.v, &win, y)) < 0) return st;
    if ((st = same_4(c, "g", c->in[0]->m.size, y)) < 0) return st;
    return ddp__out_shape(c, c->in[0]->m.dtype, 4, a->w_size.v, out);
}

/* ---- gradients ---- */

static int conv2d_vjp(ddp_vjp *v) {
    const ddp_conv2d_attrs *a = v->attrs;
    ddp_tensor *g = v->grad_out[0];
    if (v->needs[0])
        v->grad_in[0] =
            ddp_conv2d_grad_input(g, v->in[1], 4, v->in_meta[0].size, a->stride, a->padding, a->dilation, a->groups);
    if (v->needs[1])
        v->grad_in[1] =
            ddp_conv2d_grad_weight(g, v->in[0], 4, v->in_meta[1].size, a->stride, a->padding, a->dilation, a->groups);
    if (v->needs[2]) v->grad_in[2] = ddp_sum(g, 3, (int64_t[]){0, 2, 3}, 0);
    return ddp__pending();
}

/* dx is linear in g and w: gg of dx gives back a convolution. */
static int conv2d_grad_input_vjp(ddp_vjp *v) {
    const ddp_conv2d_grad_input_attrs *a = v->attrs;
    ddp_tensor *gg = v->grad_out[0];
    if (v->needs[0]) v->grad_in[0] = ddp_conv2d(gg, v->in[1], NULL, a->stride, a->padding, a->dilation, a->groups);
    if (v->needs[1])
        v->grad_in[1] =
            ddp_conv2d_grad_weight(v->in[0], gg, 4, v->in_meta[1].size, a->stride, a->padding, a->dilation, a->groups);
    return ddp__pending();
}

static int conv2d_grad_weight_vjp(ddp_vjp *v) {
    const ddp_conv2d_grad_weight_attrs *a = v->attrs;
    ddp_tensor *gg = v->grad_out[0];
    if (v->needs[0]) v->grad_in[0] = ddp_conv2d(v->in[1], gg, NULL, a->stride, a->padding, a->dilation, a->groups);
    if (v->needs[1])
        v->grad_in[1] =
            ddp_conv2d_grad_input(v->in[0], gg, 4, v->in_meta[1].size, a->stride, a->padding, a->dilation, a->groups);
    return ddp__pending();
}

/* ---- cost: 2 N K C/groups R S Ho Wo, for all three ---- */

static double conv_flops(const int64_t *y, const int64_t *w) {
    return 2.0 * (double)y[0] * (double)y[1] * (double)y[2] * (double)y[3] * (double)w[1] * (double)w[2] * (double)w[3];
}
double ddp__conv2d_flops(const ddp_call *c) { return conv_flops(c->out[0]->m.size, c->in[1]->m.size); }
static double conv2d_grad_input_flops(const ddp_call *c) { return conv_flops(c->in[0]->m.size, c->in[1]->m.size); }
static double conv2d_grad_weight_flops(const ddp_call *c) { return conv_flops(c->in[0]->m.size, c->out[0]->m.size); }

#define BOTH (DDP_SAVE_IN(0) | DDP_SAVE_IN(1))
const ddp_op_rules ddp__conv2d_rules = {
    .infer = conv2d_infer, .vjp = conv2d_vjp, .saves = BOTH, .flops = ddp__conv2d_flops};
const ddp_op_rules ddp__conv2d_grad_input_rules = {
    .infer = conv2d_grad_input_infer, .vjp = conv2d_grad_input_vjp, .saves = BOTH, .flops = conv2d_grad_input_flops};
const ddp_op_rules ddp__conv2d_grad_weight_rules = {
    .infer = conv2d_grad_weight_infer, .vjp = conv2d_grad_weight_vjp, .saves = BOTH, .flops = conv2d_grad_weight_flops};
