/* pool.c -- reference pooling over [N, C, H, W]. */
#include <math.h>

#include "ref.h"

static int64_t at4(const int64_t *size, int64_t n, int64_t c, int64_t h, int64_t w) {
    return ((n * size[1] + c) * size[2] + h) * size[3] + w;
}

#define EACH_PLANE(size)                    \
    for (int64_t n = 0; n < (size)[0]; n++) \
        for (int64_t ch = 0; ch < (size)[1]; ch++)
#define EACH_CELL(size)                        \
    for (int64_t ho = 0; ho < (size)[2]; ho++) \
        for (int64_t wo = 0; wo < (size)[3]; wo++)

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static int run_max_pool2d(const ddp_call *c) {
    const ddp_max_pool2d_attrs *a = c->attrs;
    const ddp_tensor *x = c->in[0];
    const int64_t *xs = x->m.size, *ys = c->out[0]->m.size;
    int64_t sh = a->stride[0] ? a->stride[0] : a->kernel[0], sw = a->stride[1] ? a->stride[1] : a->kernel[1];
    EACH_PLANE(ys) EACH_CELL(ys) {
        int64_t h0 = ho * sh - a->padding[0], w0 = wo * sw - a->padding[1], best = -1;
        double value = -INFINITY;
        for (int64_t h = most(h0, 0); h < least(h0 + a->kernel[0], xs[2]); h++)
            for (int64_t w = most(w0, 0); w < least(w0 + a->kernel[1], xs[3]); w++) {
                double v = ref_get(x, at4(xs, n, ch, h, w));
                if (best >= 0 && !(v > value || (isnan(v) && !isnan(value)))) continue;
                value = v;
                best = h * xs[3] + w;
            }
        ref_put(c->out[0], at4(ys, n, ch, ho, wo), value);
        ref_put(c->out[1], at4(ys, n, ch, ho, wo), (double)best);
    }
    return 0;
}
DDP_REF_KERNEL(max_pool2d, run_max_pool2d);

static int run_max_pool2d_grad(const ddp_call *c) {
    ddp_tensor *dx = c->out[0];
    const int64_t *gs = c->in[0]->m.size, *xs = dx->m.size;
    double *sums = ref_sums(c, dx->numel);
    if (!sums) return ddp__pending();
    EACH_PLANE(gs) EACH_CELL(gs) {
        int64_t i = at4(gs, n, ch, ho, wo), place = (int64_t)ref_get(c->in[1], i);
        if (place >= 0 && place < xs[2] * xs[3])
            sums[at4(xs, n, ch, place / xs[3], place % xs[3])] += ref_get(c->in[0], i);
    }
    ref_put_sums(dx, sums);
    return 0;
}
DDP_REF_KERNEL(max_pool2d_grad, run_max_pool2d_grad);

/* An average window: its real elements, and what its sum is divided by. */
typedef struct window {
    int64_t h0, h1, w0, w1;
    double divisor;
} window;

static window avg_window(const int64_t *xs, const int64_t *kernel, const int64_t *stride, const int64_t *padding,
                         bool include, int64_t ho, int64_t wo) {
    int64_t sh = stride[0] ? stride[0] : kernel[0], sw = stride[1] ? stride[1] : kernel[1];
    int64_t h0 = ho * sh - padding[0], w0 = wo * sw - padding[1];
    int64_t h1 = least(h0 + kernel[0], xs[2] + padding[0]), w1 = least(w0 + kernel[1], xs[3] + padding[1]);
    window v = {most(h0, 0), least(h1, xs[2]), most(w0, 0), least(w1, xs[3]), 0};
    v.divisor = include ? (double)((h1 - h0) * (w1 - w0)) : (double)((v.h1 - v.h0) * (v.w1 - v.w0));
    return v;
}

static double window_mean(const ddp_tensor *x, int64_t n, int64_t ch, window v) {
    double s = 0;
    for (int64_t h = v.h0; h < v.h1; h++)
        for (int64_t w = v.w0; w < v.w1; w++) s += ref_get(x, at4(x->m.size, n, ch, h, w));
    return s / v.divisor;
}

static void window_spread(double *sums, const int64_t *size, int64_t n, int64_t ch, window v, double g) {
    for (int64_t h = v.h0; h < v.h1; h++)
        for (int64_t w = v.w0; w < v.w1; w++) sums[at4(size, n, ch, h, w)] += g / v.divisor;
}

static int run_avg_pool2d(const ddp_call *c) {
    const ddp_avg_pool2d_attrs *a = c->attrs;
    const int64_t *ys = c->out[0]->m.size;
    EACH_PLANE(ys)
    EACH_CELL(ys)
    ref_put(c->out[0], at4(ys, n, ch, ho, wo),
            window_mean(c->in[0], n, ch,
                        avg_window(c->in[0]->m.size, a->kernel, a->stride, a->padding, a->count_include_pad, ho, wo)));
    return 0;
}
DDP_REF_KERNEL(avg_pool2d, run_avg_pool2d);

static int run_avg_pool2d_grad(const ddp_call *c) {
    const ddp_avg_pool2d_grad_attrs *a = c->attrs;
    const int64_t *gs = c->in[0]->m.size;
    double *sums = ref_sums(c, c->out[0]->numel);
    if (!sums) return ddp__pending();
    EACH_PLANE(gs)
    EACH_CELL(gs)
    window_spread(sums, c->out[0]->m.size, n, ch,
                  avg_window(c->out[0]->m.size, a->kernel, a->stride, a->padding, a->count_include_pad, ho, wo),
                  ref_get(c->in[0], at4(gs, n, ch, ho, wo)));
    ref_put_sums(c->out[0], sums);
    return 0;
}
DDP_REF_KERNEL(avg_pool2d_grad, run_avg_pool2d_grad);

static window adaptive_window(const int64_t *xs, const int64_t *ys, int64_t ho, int64_t wo) {
    window v = {ho * xs[2] / ys[2], ((ho + 1) * xs[2] + ys[2] - 1) / ys[2], wo * xs[3] / ys[3],
                ((wo + 1) * xs[3] + ys[3] - 1) / ys[3], 0};
    v.divisor = (double)((v.h1 - v.h0) * (v.w1 - v.w0));
    return v;
}

static int run_adaptive_avg_pool2d(const ddp_call *c) {
    const int64_t *ys = c->out[0]->m.size;
    EACH_PLANE(ys)
    EACH_CELL(ys)
    ref_put(c->out[0], at4(ys, n, ch, ho, wo),
            window_mean(c->in[0], n, ch, adaptive_window(c->in[0]->m.size, ys, ho, wo)));
    return 0;
}
DDP_REF_KERNEL(adaptive_avg_pool2d, run_adaptive_avg_pool2d);

static int run_adaptive_avg_pool2d_grad(const ddp_call *c) {
    const int64_t *gs = c->in[0]->m.size;
    double *sums = ref_sums(c, c->out[0]->numel);
    if (!sums) return ddp__pending();
    EACH_PLANE(gs)
    EACH_CELL(gs)
    window_spread(sums, c->out[0]->m.size, n, ch, adaptive_window(c->out[0]->m.size, gs, ho, wo),
                  ref_get(c->in[0], at4(gs, n, ch, ho, wo)));
    ref_put_sums(c->out[0], sums);
    return 0;
}
DDP_REF_KERNEL(adaptive_avg_pool2d_grad, run_adaptive_avg_pool2d_grad);
