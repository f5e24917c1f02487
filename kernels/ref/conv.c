/* conv.c -- reference convolutions: seven loops, added in double; and with what follows them. */
#include <math.h>

#include "ref.h"

/* The three ops read and write the same triples (n,k,ho,wo), (n,c,h,w), (k,c,r,s); one walk serves all. */
typedef struct conv {
    const ddp_meta *x, *w, *y;
    const int64_t *stride, *padding, *dilation;
    int64_t groups;
} conv;

typedef void (*visit)(void *ctx, int64_t x, int64_t w, int64_t y);

static void walk(const conv *v, visit fn, void *ctx) {
    int64_t kg = v->w->size[0] / v->groups, cg = v->w->size[1];
    for (int64_t n = 0; n < v->y->size[0]; n++)
        for (int64_t k = 0; k < v->y->size[1]; k++)
            for (int64_t ho = 0; ho < v->y->size[2]; ho++)
                for (int64_t wo = 0; wo < v->y->size[3]; wo++) {
                    int64_t y = n * v->y->stride[0] + k * v->y->stride[1] + ho * v->y->stride[2] + wo * v->y->stride[3];
                    for (int64_t c = 0; c < cg; c++)
                        for (int64_t r = 0; r < v->w->size[2]; r++) {
                            int64_t h = ho * v->stride[0] - v->padding[0] + r * v->dilation[0];
                            if (h < 0 || h >= v->x->size[2]) continue;
                            for (int64_t s = 0; s < v->w->size[3]; s++) {
                                int64_t w = wo * v->stride[1] - v->padding[1] + s * v->dilation[1];
                                if (w < 0 || w >= v->x->size[3]) continue;
                                fn(ctx,
                                   n * v->x->stride[0] + (k / kg * cg + c) * v->x->stride[1] + h * v->x->stride[2] +
                                       w * v->x->stride[3],
                                   k * v->w->stride[0] + c * v->w->stride[1] + r * v->w->stride[2] +
                                       s * v->w->stride[3],
                                   y);
                            }
                        }
                }
}

/* sum[at] += a * b, at one of the three offsets. */
typedef struct sums {
    double *sum;
    const void *a, *b;
    ddp_dtype dtype;
} sums;

static double at(const sums *s, const void *p, int64_t i) { return ddp__load(s->dtype, p, i); }
static void into_y(void *ctx, int64_t x, int64_t w, int64_t y) {
    sums *s = ctx;
    s->sum[y] += at(s, s->a, x) * at(s, s->b, w);
}
static void into_x(void *ctx, int64_t x, int64_t w, int64_t y) {
    sums *s = ctx;
    s->sum[x] += at(s, s->a, y) * at(s, s->b, w);
}
static void into_w(void *ctx, int64_t x, int64_t w, int64_t y) {
    sums *s = ctx;
    s->sum[w] += at(s, s->a, y) * at(s, s->b, x);
}

/* out is dense and its own: offsets below its numel. */
static int run(const ddp_call *c, const conv *v, visit fn, const ddp_tensor *bias) {
    ddp_tensor *out = c->out[0];
    sums s = {ref_sums(c, out->numel), ddp__ptr(c->in[0]), ddp__ptr(c->in[1]), out->m.dtype};
    if (!s.sum) return ddp__pending();
    walk(v, fn, &s);
    for (int64_t i = 0; i < out->numel; i++) {
        int64_t o = ref_at(&out->m, i);
        double b = bias ? ref_get(bias, i / (out->m.size[2] * out->m.size[3]) % out->m.size[1]) : 0;
        ddp__store(out->m.dtype, ddp__ptr(out), o, s.sum[o] + b);
    }
    free(s.sum);
    return 0;
}

static int run_conv2d(const ddp_call *c) {
    const ddp_conv2d_attrs *a = c->attrs;
    conv v = {&c->in[0]->m, &c->in[1]->m, &c->out[0]->m, a->stride, a->padding, a->dilation, a->groups};
    return run(c, &v, into_y, c->in[2]);
}
DDP_REF_KERNEL(conv2d, run_conv2d);

/* What a channel's sums become before the residual is added: sum * scale + shift. */
static void scale_of(const ddp_call *c, int64_t k, double *scale, double *shift) {
    const ddp_conv_bn_act_attrs *a = c->attrs;
    *scale = (c->in[3] ? ref_get(c->in[3], k) : 1) / sqrt(ref_get(c->in[6], k) + a->eps);
    *shift = ((c->in[2] ? ref_get(c->in[2], k) : 0) - ref_get(c->in[5], k)) * *scale;
    if (c->in[4]) *shift += ref_get(c->in[4], k);
}

static int run_conv_bn_act(const ddp_call *c) {
    const ddp_conv_bn_act_attrs *a = c->attrs;
    const ddp_tensor *residual = c->in[7];
    ddp_tensor *y = c->out[0];
    conv v = {&c->in[0]->m, &c->in[1]->m, &y->m, a->stride, a->padding, a->dilation, a->groups};
    sums s = {ref_sums(c, y->numel), ddp__ptr(c->in[0]), ddp__ptr(c->in[1]), y->m.dtype};
    if (!s.sum) return ddp__pending();
    walk(&v, into_y, &s);
    for (int64_t i = 0; i < y->numel; i++) {
        double scale, shift;
        scale_of(c, i / (y->m.size[2] * y->m.size[3]) % y->m.size[1], &scale, &shift);
        double z = s.sum[ref_at(&y->m, i)] * scale + shift + (residual ? ref_get(residual, i) : 0);
        ref_put(y, i, a->relu && z < 0 ? 0 : z);
    }
    free(s.sum);
    return 0;
}
DDP_REF_KERNEL(conv_bn_act, run_conv_bn_act);

static int run_conv2d_grad_input(const ddp_call *c) {
    const ddp_conv2d_grad_input_attrs *a = c->attrs;
    conv v = {&c->out[0]->m, &c->in[1]->m, &c->in[0]->m, a->stride, a->padding, a->dilation, a->groups};
    return run(c, &v, into_x, NULL);
}
DDP_REF_KERNEL(conv2d_grad_input, run_conv2d_grad_input);

static int run_conv2d_grad_weight(const ddp_call *c) {
    const ddp_conv2d_grad_weight_attrs *a = c->attrs;
    conv v = {&c->in[1]->m, &c->out[0]->m, &c->in[0]->m, a->stride, a->padding, a->dilation, a->groups};
    return run(c, &v, into_w, NULL);
}
DDP_REF_KERNEL(conv2d_grad_weight, run_conv2d_grad_weight);
