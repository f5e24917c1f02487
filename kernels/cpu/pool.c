/* pool.c -- the mean over a whole channels-last image, which ends most networks, and its gradient. */
#include "cpu.h"

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
