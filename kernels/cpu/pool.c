/* pool.c -- pooling of channels-last f32 images: the largest of each window, and the mean over a whole image, which ends
 * most networks; with their gradients. The inner loops run over channels. */
#include <string.h>

#include "cpu.h"

/* ---- max ---- */

static const char *reject_max(const ddp_call *c) {
    if (c->out[0]->m.dtype != DDP_F32 || c->in[0]->numel == 0) return "f32 that is not empty only";
    return ddp__meta_is_channels_last(&c->in[0]->m) ? NULL : "x is not channels-last";
}

/* One window's largest values y and places at, for all channels; NaN wins and the first of equals stays. */
static void window_max(const float *x, const int64_t *size, int64_t h0, int64_t h1, int64_t w0, int64_t w1, float *y,
                       int64_t *at) {
    int64_t C = size[1];
    for (int64_t k = 0; k < C; k++) {
        y[k] = x[(h0 * size[3] + w0) * C + k];
        at[k] = h0 * size[3] + w0;
    }
    for (int64_t h = h0; h < h1; h++)
        for (int64_t w = w0; w < w1; w++) {
            int64_t place = h * size[3] + w;
            const float *v = x + place * C;
            for (int64_t k = 0; k < C; k++) {
                bool better = v[k] > y[k] || (v[k] != v[k] && y[k] == y[k]);
                y[k] = better ? v[k] : y[k];
                at[k] = better ? place : at[k];
            }
        }
}

static int run_max_pool2d(const ddp_call *c) {
    const ddp_max_pool2d_attrs *a = c->attrs;
    const int64_t *xs = c->in[0]->m.size, *ys = c->out[0]->m.size, C = xs[1];
    int64_t sh = a->stride[0] ? a->stride[0] : a->kernel[0], sw = a->stride[1] ? a->stride[1] : a->kernel[1];
    float *y = cpu_f32(c->out[0]);
    int64_t *at = (int64_t *)(void *)ddp__ptr(c->out[1]);
    int threads = cpu_threads(c->in[0]->numel);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < ys[0] * ys[2]; row++) {
        int64_t n = row / ys[2], h = row % ys[2] * sh - a->padding[0];
        int64_t h0 = h > 0 ? h : 0, h1 = h + a->kernel[0] < xs[2] ? h + a->kernel[0] : xs[2];
        const float *x = cpu_f32(c->in[0]) + n * xs[2] * xs[3] * C;
        for (int64_t wo = 0; wo < ys[3]; wo++) {
            int64_t w = wo * sw - a->padding[1], o = (row * ys[3] + wo) * C;
            int64_t w0 = w > 0 ? w : 0, w1 = w + a->kernel[1] < xs[3] ? w + a->kernel[1] : xs[3];
            window_max(x, xs, h0, h1, w0, w1, y + o, at + o);
        }
    }
    return 0;
}
CPU_KERNEL(max_pool2d, reject_max, run_max_pool2d);

static const char *reject_max_grad(const ddp_call *c) {
    if (c->in[0]->m.dtype != DDP_F32 || c->in[0]->numel == 0) return "f32 that is not empty only";
    bool fits = ddp__meta_is_channels_last(&c->in[0]->m) && ddp__meta_is_channels_last(&c->in[1]->m);
    return fits ? NULL : "g or indices are not channels-last";
}

static int run_max_pool2d_grad(const ddp_call *c) {
    const int64_t *xs = c->out[0]->m.size, *gs = c->in[0]->m.size, C = xs[1], area = xs[2] * xs[3];
    const float *g = cpu_f32(c->in[0]);
    const int64_t *at = (const int64_t *)(const void *)ddp__ptr(c->in[1]);
    float *dx = cpu_f32(c->out[0]);
    memset(dx, 0, (size_t)c->out[0]->numel * sizeof *dx);
    for (int64_t n = 0; n < gs[0]; n++, dx += area * C)
        for (int64_t i = 0; i < gs[2] * gs[3]; i++, g += C, at += C)
            for (int64_t k = 0; k < C; k++)
                if (at[k] >= 0 && at[k] < area) dx[at[k] * C + k] += g[k];
    return 0;
}
CPU_KERNEL(max_pool2d_grad, reject_max_grad, run_max_pool2d_grad);

/* ---- the mean of a whole image ---- */

static const char *reject_mean(const ddp_call *c) {
    if (c->out[0]->m.dtype != DDP_F32 || c->in[0]->numel == 0) return "f32 that is not empty only";
    if (c->out[0]->m.size[2] != 1 || c->out[0]->m.size[3] != 1) return "more than one window an image";
    return ddp__meta_is_channels_last(&c->in[0]->m) ? NULL : "x is not channels-last";
}

static int run_adaptive_avg_pool2d(const ddp_call *c) {
    int64_t N = c->in[0]->m.size[0], C = c->in[0]->m.size[1], area = c->in[0]->m.size[2] * c->in[0]->m.size[3];
    const float *x = cpu_f32(c->in[0]);
    float *y = cpu_f32(c->out[0]), scale = 1.0f / (float)area;
    for (int64_t n = 0; n < N; n++, y += C) {
        for (int64_t k = 0; k < C; k++) y[k] = 0;
        for (int64_t i = 0; i < area; i++, x += C)
#pragma omp simd
            for (int64_t k = 0; k < C; k++) y[k] += x[k];
        for (int64_t k = 0; k < C; k++) y[k] *= scale;
    }
    return 0;
}
CPU_KERNEL(adaptive_avg_pool2d, reject_mean, run_adaptive_avg_pool2d);

static const char *reject_mean_grad(const ddp_call *c) {
    const ddp_meta *g = &c->in[0]->m;
    if (g->dtype != DDP_F32 || c->out[0]->numel == 0) return "f32 that is not empty only";
    if (g->size[2] != 1 || g->size[3] != 1) return "more than one window an image";
    return ddp__meta_is_channels_last(g) ? NULL : "g is not channels-last";
}

static int run_adaptive_avg_pool2d_grad(const ddp_call *c) {
    const ddp_meta *dx = &c->out[0]->m;
    int64_t N = dx->size[0], C = dx->size[1], area = dx->size[2] * dx->size[3];
    const float *g = cpu_f32(c->in[0]);
    float *d = cpu_f32(c->out[0]), scale = 1.0f / (float)area;
    for (int64_t n = 0; n < N; n++, g += C)
        for (int64_t i = 0; i < area; i++, d += C)
#pragma omp simd
            for (int64_t k = 0; k < C; k++) d[k] = g[k] * scale;
    return 0;
}
CPU_KERNEL(adaptive_avg_pool2d_grad, reject_mean_grad, run_adaptive_avg_pool2d_grad);
