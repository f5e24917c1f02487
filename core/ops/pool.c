/* pool.c -- max, average and adaptive pooling over the last two dims of [N, C, H, W]. */
#include "ops.h"

static int check_input(const ddp_call *c) {
    int st = ddp__need_float(c, 0);
    return st < 0 ? st : ddp__need_ndim(c, 0, 4);
}

/* y from the sizes of x; stride 0 means kernel. */
static int pooled(const ddp_call *c, const int64_t *x, const int64_t *kernel, const int64_t *stride,
                  const int64_t *padding, int64_t *y) {
    y[0] = x[0];
    y[1] = x[1];
    for (int i = 0; i < 2; i++) {
        int64_t s = stride[i] ? stride[i] : kernel[i];
        if (kernel[i] < 1 || s < 1)
            return ddp__op_fail(c, DDP_EINVAL, "kernel %lld, stride %lld: at least 1", (long long)kernel[i],
                                (long long)s);
        if (padding[i] < 0 || padding[i] > kernel[i] / 2)
            return ddp__op_fail(c, DDP_EINVAL, "padding %lld, at most half the kernel %lld", (long long)padding[i],
                                (long long)kernel[i]);
        y[2 + i] = ddp__window_out(x[2 + i], kernel[i], s, padding[i], 1);
        if (y[2 + i] < 1)
            return ddp__op_fail(c, DDP_ESHAPE, "the window exceeds the padded x %s",
                                ddp__shape_text(4, x, (char[80]){0}, 80));
    }
    return 0;
}

static int channels_last(const ddp_call *c, ddp_dtype dtype, const int64_t *size, ddp_meta *out) {
    int st = ddp__out_shape(c, dtype, 4, size, out);
    if (st == 0) ddp__meta_channels_last(out);
    return st;
}

static int x_size_4(const ddp_call *c, const ddp_ints *s) {
    return s->n == 4 ? 0 : ddp__op_fail(c, DDP_ESHAPE, "x_size has %lld sizes, expected 4", (long long)s->n);
}

static int want_g(const ddp_call *c, const int64_t *y) {
    for (int i = 0; i < 4; i++)
        if (c->in[0]->m.size[i] != y[i])
            return ddp__op_fail(c, DDP_ESHAPE, "g is %s, expected %s", DDP_SHAPE_TEXT(&c->in[0]->m),
                                ddp__shape_text(4, y, (char[80]){0}, 80));
    return 0;
}

/* ---- max ---- */

static int max_pool2d_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_max_pool2d_attrs *a = c->attrs;
    int64_t y[4];
    int st;
    if ((st = check_input(c)) < 0 || (st = pooled(c, c->in[0]->m.size, a->kernel, a->stride, a->padding, y)) < 0)
        return st;
    if ((st = channels_last(c, c->in[0]->m.dtype, y, &out[0])) < 0) return st;
    return channels_last(c, DDP_I64, y, &out[1]);
}
static int max_pool2d_vjp(ddp_vjp *v) {
    const ddp_max_pool2d_attrs *a = v->attrs;
    if (v->grad_out[0])
        v->grad_in[0] =
            ddp_max_pool2d_grad(v->grad_out[0], v->out[1], 4, v->in_meta[0].size, a->kernel, a->stride, a->padding);
    return ddp__pending();
}

static int max_pool2d_grad_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_max_pool2d_grad_attrs *a = c->attrs;
    int st;
    if ((st = check_input(c)) < 0 || (st = ddp__need_dtype(c, 1, DDP_I64)) < 0 || (st = x_size_4(c, &a->x_size)) < 0)
        return st;
    if (!ddp__meta_same_size(&c->in[0]->m, &c->in[1]->m))
        return ddp__op_fail(c, DDP_ESHAPE, "g is %s, indices %s", DDP_SHAPE_TEXT(&c->in[0]->m),
                            DDP_SHAPE_TEXT(&c->in[1]->m));
    if (a->x_size.v[0] != c->in[0]->m.size[0] || a->x_size.v[1] != c->in[0]->m.size[1])
        return ddp__op_fail(c, DDP_ESHAPE, "g is %s, x_size %s", DDP_SHAPE_TEXT(&c->in[0]->m),
                            ddp__shape_text(4, a->x_size.v, (char[80]){0}, 80));
    int64_t y[4];
    if ((a->kernel[0] || a->kernel[1]) &&
        ((st = pooled(c, a->x_size.v, a->kernel, a->stride, a->padding, y)) < 0 || (st = want_g(c, y)) < 0))
        return st;
    return channels_last(c, c->in[0]->m.dtype, a->x_size.v, out);
}
static int max_pool2d_grad_vjp(ddp_vjp *v) { /* gg picked at the places */
    const ddp_max_pool2d_grad_attrs *a = v->attrs;
    const int64_t *x = a->x_size.v, *y = v->in_meta[0].size;
    ddp_tensor *flat = ddp__reshape(v->grad_out[0], 3, (int64_t[]){x[0], x[1], x[2] * x[3]});
    ddp_tensor *ids = ddp__reshape(v->in[1], 3, (int64_t[]){y[0], y[1], y[2] * y[3]});
    v->grad_in[0] = ddp__reshape(ddp_gather(flat, ids, 2), 4, y);
    return ddp__pending();
}

/* ---- average ---- */

static int avg_pool2d_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_avg_pool2d_attrs *a = c->attrs;
    int64_t y[4];
    int st;
    if ((st = check_input(c)) < 0 || (st = pooled(c, c->in[0]->m.size, a->kernel, a->stride, a->padding, y)) < 0)
        return st;
    return channels_last(c, c->in[0]->m.dtype, y, out);
}
static int avg_pool2d_vjp(ddp_vjp *v) {
    const ddp_avg_pool2d_attrs *a = v->attrs;
    v->grad_in[0] = ddp_avg_pool2d_grad(v->grad_out[0], 4, v->in_meta[0].size, a->kernel, a->stride, a->padding,
                                        (int)a->count_include_pad);
    return ddp__pending();
}
static int avg_pool2d_grad_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_avg_pool2d_grad_attrs *a = c->attrs;
    int64_t y[4];
    int st;
    if ((st = check_input(c)) < 0 || (st = x_size_4(c, &a->x_size)) < 0) return st;
    if ((st = pooled(c, a->x_size.v, a->kernel, a->stride, a->padding, y)) < 0 || (st = want_g(c, y)) < 0) return st;
    return channels_last(c, c->in[0]->m.dtype, a->x_size.v, out);
}
static int avg_pool2d_grad_vjp(ddp_vjp *v) {
    const ddp_avg_pool2d_grad_attrs *a = v->attrs;
    v->grad_in[0] = ddp_avg_pool2d(v->grad_out[0], a->kernel, a->stride, a->padding, (int)a->count_include_pad);
    return ddp__pending();
}

/* ---- adaptive average ---- */

static int adaptive_avg_pool2d_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_adaptive_avg_pool2d_attrs *a = c->attrs;
    const int64_t *x = c->in[0]->m.size;
    int st = check_input(c);
    if (st < 0) return st;
    if (a->size[0] < 1 || a->size[1] < 1)
        return ddp__op_fail(c, DDP_EINVAL, "size %lldx%lld, at least 1", (long long)a->size[0], (long long)a->size[1]);
    if (x[2] < 1 || x[3] < 1)
        return ddp__op_fail(c, DDP_ESHAPE, "x is %s: nothing to average", DDP_SHAPE_TEXT(&c->in[0]->m));
    return channels_last(c, c->in[0]->m.dtype, (int64_t[]){x[0], x[1], a->size[0], a->size[1]}, out);
}
static int adaptive_avg_pool2d_vjp(ddp_vjp *v) {
    v->grad_in[0] = ddp_adaptive_avg_pool2d_grad(v->grad_out[0], 4, v->in_meta[0].size);
    return ddp__pending();
}
static int adaptive_avg_pool2d_grad_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_adaptive_avg_pool2d_grad_attrs *a = c->attrs;
    const int64_t *g = c->in[0]->m.size;
    int st;
    if ((st = check_input(c)) < 0 || (st = x_size_4(c, &a->x_size)) < 0) return st;
    if ((st = want_g(c, (int64_t[]){a->x_size.v[0], a->x_size.v[1], g[2], g[3]})) < 0) return st;
    return channels_last(c, c->in[0]->m.dtype, a->x_size.v, out);
}
static int adaptive_avg_pool2d_grad_vjp(ddp_vjp *v) {
    v->grad_in[0] = ddp_adaptive_avg_pool2d(v->grad_out[0], &v->in_meta[0].size[2]);
    return ddp__pending();
}

static double in_elements(const ddp_call *c) { return (double)c->in[0]->numel; }

const ddp_op_rules ddp__max_pool2d_rules = {
    .infer = max_pool2d_infer, .vjp = max_pool2d_vjp, .saves = DDP_SAVE_OUT(1), .flops = in_elements};
const ddp_op_rules ddp__max_pool2d_grad_rules = {
    .infer = max_pool2d_grad_infer, .vjp = max_pool2d_grad_vjp, .saves = DDP_SAVE_IN(1)};
const ddp_op_rules ddp__avg_pool2d_rules = {.infer = avg_pool2d_infer, .vjp = avg_pool2d_vjp, .flops = in_elements};
const ddp_op_rules ddp__avg_pool2d_grad_rules = {.infer = avg_pool2d_grad_infer, .vjp = avg_pool2d_grad_vjp};
const ddp_op_rules ddp__adaptive_avg_pool2d_rules = {
    .infer = adaptive_avg_pool2d_infer, .vjp = adaptive_avg_pool2d_vjp, .flops = in_elements};
const ddp_op_rules ddp__adaptive_avg_pool2d_grad_rules = {.infer = adaptive_avg_pool2d_grad_infer,
                                                          .vjp = adaptive_avg_pool2d_grad_vjp};
