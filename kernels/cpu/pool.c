/* pool.c -- pooling of channels-last f32: windows are walked cell by cell, each cell a run of channels. */
#include <math.h>
#include <string.h>

#include "cpu.h"

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* A window: its real cells, and what its sum is divided by. */
typedef struct window {
    int64_t h0, h1, w0, w1;
    float divisor;
} window;

/* How windows follow from the place (ho, wo); kernel[0] == 0: adaptive. */
typedef struct grid {
    int64_t N, C, H, W, Ho, Wo; /* of x and of y */
    int64_t kernel[2], stride[2], padding[2];
    bool include;
} grid;

static window window_at(const grid *g, int64_t ho, int64_t wo) {
    window v;
    if (!g->kernel[0]) {
        v = (window){ho * g->H / g->Ho, ((ho + 1) * g->H + g->Ho - 1) / g->Ho, wo * g->W / g->Wo,
                     ((wo + 1) * g->W + g->Wo - 1) / g->Wo, 0};
        v.divisor = (float)((v.h1 - v.h0) * (v.w1 - v.w0));
        return v;
    }
    int64_t h0 = ho * g->stride[0] - g->padding[0], w0 = wo * g->stride[1] - g->padding[1];
    int64_t h1 = least(h0 + g->kernel[0], g->H + g->padding[0]), w1 = least(w0 + g->kernel[1], g->W + g->padding[1]);
    v = (window){most(h0, 0), least(h1, g->H), most(w0, 0), least(w1, g->W), 0};
    v.divisor = (float)(g->include ? (h1 - h0) * (w1 - w0) : (v.h1 - v.h0) * (v.w1 - v.w0));
    return v;
}

static grid grid_of(const ddp_meta *x, const ddp_meta *y, const int64_t *kernel, const int64_t *stride,
                    const int64_t *padding) {
    grid g = {x->size[0], x->size[1], x->size[2], x->size[3], y->size[2], y->size[3], {0}, {0}, {0}, false};
    for (int i = 0; i < 2 && kernel; i++) {
        g.kernel[i] = kernel[i];
        g.stride[i] = stride[i] ? stride[i] : kernel[i];
        g.padding[i] = padding[i];
    }
    return g;
}

static const char *reject(const ddp_call *c) {
    for (int i = 0; i < c->n_in; i++)
        if (!ddp__meta_is_channels_last(&c->in[i]->m)) return "not channels-last";
    if (!ddp__meta_is_channels_last(&c->out[0]->m)) return "a result that is not channels-last";
    return c->in[0]->m.dtype == DDP_F32 && c->in[0]->numel && c->out[0]->numel ? NULL : "f32 that is not empty only";
}

/* ---- the largest ---- */

enum { LANES = 256 };

/* One window, up to LANES channels: y and places. */
static void max_window(const grid *g, window v, const float *x, int64_t lanes, float *y, int64_t *ids) {
    float best[LANES];
    int32_t at[LANES];
    for (int64_t k = 0; k < lanes; k++) {
        best[k] = x[(v.h0 * g->W + v.w0) * g->C + k];
        at[k] = (int32_t)(v.h0 * g->W + v.w0);
    }
    for (int64_t h = v.h0; h < v.h1; h++)
        for (int64_t w = v.w0; w < v.w1; w++) {
            const float *cell = x + (h * g->W + w) * g->C;
            const int32_t here = (int32_t)(h * g->W + w);
#pragma omp simd
            for (int64_t k = 0; k < lanes; k++) {
                int take = (best[k] == best[k]) & !(cell[k] <= best[k]); /* larger, or the first NaN */
                best[k] = take ? cell[k] : best[k];
                at[k] = take ? here : at[k];
            }
        }
    memcpy(y, best, (size_t)lanes * sizeof *y);
#pragma omp simd
    for (int64_t k = 0; k < lanes; k++) ids[k] = at[k];
}

static const char *reject_max(const ddp_call *c) {
    if (!ddp__meta_is_channels_last(&c->out[1]->m)) return "a result that is not channels-last";
    return c->in[0]->m.size[2] * c->in[0]->m.size[3] > INT32_MAX ? "an image of more than 2^31 cells" : reject(c);
}

typedef struct job {
    const ddp_call *c;
    grid g;
} job;

/* Rows [lo, hi) of windows, of all images. */
static void max_rows(const void *ctx, int64_t lo, int64_t hi) {
    const job *j = ctx;
    const grid *g = &j->g;
    for (int64_t r = lo; r < hi; r++) {
        const float *image = cpu_f32(j->c->in[0]) + r / g->Ho * g->H * g->W * g->C;
        for (int64_t wo = 0; wo < g->Wo; wo++) {
            window v = window_at(g, r % g->Ho, wo);
            int64_t at = (r * g->Wo + wo) * g->C;
            float *y = cpu_f32(j->c->out[0]) + at;
            int64_t *ids = (int64_t *)(void *)ddp__ptr(j->c->out[1]) + at;
            for (int64_t k = 0; k < g->C; k += LANES)
                max_window(g, v, image + k, least(LANES, g->C - k), y + k, ids + k);
        }
    }
}

static int run_max_pool2d(const ddp_call *c) {
    const ddp_max_pool2d_attrs *a = c->attrs;
    job j = {c, grid_of(&c->in[0]->m, &c->out[0]->m, a->kernel, a->stride, a->padding)};
    cpu_share(j.g.N * j.g.Ho, c->in[0]->numel, max_rows, &j);
    return 0;
}
CPU_KERNEL(max_pool2d, reject_max, run_max_pool2d);

/* Images [lo, hi). */
static void max_grads(const void *ctx, int64_t lo, int64_t hi) {
    const job *j = ctx;
    const grid *g = &j->g;
    const float *from = cpu_f32(j->c->in[0]);
    const int64_t *ids = (const int64_t *)(const void *)ddp__ptr(j->c->in[1]), area = g->H * g->W;
    for (int64_t n = lo; n < hi; n++) {
        float *image = cpu_f32(j->c->out[0]) + n * area * g->C;
        memset(image, 0, (size_t)(area * g->C) * sizeof *image);
        for (int64_t i = 0; i < g->Ho * g->Wo; i++) {
            int64_t at = (n * g->Ho * g->Wo + i) * g->C;
            for (int64_t k = 0; k < g->C; k++)
                if (ids[at + k] >= 0 && ids[at + k] < area) image[ids[at + k] * g->C + k] += from[at + k];
        }
    }
}

static int run_max_pool2d_grad(const ddp_call *c) {
    job j = {c, grid_of(&c->out[0]->m, &c->in[0]->m, NULL, NULL, NULL)};
    cpu_share(j.g.N, c->out[0]->numel, max_grads, &j);
    return 0;
}
CPU_KERNEL(max_pool2d_grad, reject, run_max_pool2d_grad);

/* ---- means ---- */

/* The mean of a window, up to LANES channels. */
static void mean_window(const grid *g, window v, const float *x, int64_t lanes, float *y) {
    float line[LANES], sum[LANES] = {0};
    for (int64_t h = v.h0; h < v.h1; h++) { /* line by line: large windows lose no digits */
        const float *cell = x + (h * g->W + v.w0) * g->C;
        memcpy(line, cell, (size_t)lanes * sizeof *line);
        for (int64_t w = v.w0 + 1; w < v.w1; w++) {
            cell += g->C;
#pragma omp simd
            for (int64_t k = 0; k < lanes; k++) line[k] += cell[k];
        }
#pragma omp simd
        for (int64_t k = 0; k < lanes; k++) sum[k] += line[k];
    }
#pragma omp simd
    for (int64_t k = 0; k < lanes; k++) y[k] = sum[k] / v.divisor;
}

static void mean_rows(const void *ctx, int64_t lo, int64_t hi) {
    const job *j = ctx;
    const grid *g = &j->g;
    for (int64_t r = lo; r < hi; r++) {
        const float *image = cpu_f32(j->c->in[0]) + r / g->Ho * g->H * g->W * g->C;
        float *y = cpu_f32(j->c->out[0]) + r * g->Wo * g->C;
        for (int64_t wo = 0; wo < g->Wo; wo++, y += g->C)
            for (int64_t k = 0; k < g->C; k += LANES)
                mean_window(g, window_at(g, r % g->Ho, wo), image + k, least(LANES, g->C - k), y + k);
    }
}

static int averages(const ddp_call *c, grid g) {
    job j = {c, g};
    cpu_share(g.N * g.Ho, c->in[0]->numel, mean_rows, &j);
    return 0;
}

/* Images [lo, hi). */
static void spread_images(const void *ctx, int64_t lo, int64_t hi) {
    const job *j = ctx;
    const grid *g = &j->g;
    for (int64_t n = lo; n < hi; n++) {
        float *image = cpu_f32(j->c->out[0]) + n * g->H * g->W * g->C;
        const float *from = cpu_f32(j->c->in[0]) + n * g->Ho * g->Wo * g->C;
        memset(image, 0, (size_t)(g->H * g->W * g->C) * sizeof *image);
        for (int64_t i = 0; i < g->Ho * g->Wo; i++, from += g->C) {
            window v = window_at(g, i / g->Wo, i % g->Wo);
            for (int64_t h = v.h0; h < v.h1; h++)
                for (int64_t w = v.w0; w < v.w1; w++) {
                    float *cell = image + (h * g->W + w) * g->C;
#pragma omp simd
                    for (int64_t k = 0; k < g->C; k++) cell[k] += from[k] / v.divisor;
                }
        }
    }
}

static int spread(const ddp_call *c, grid g) {
    job j = {c, g};
    cpu_share(g.N, c->out[0]->numel, spread_images, &j);
    return 0;
}

static int run_avg_pool2d(const ddp_call *c) {
    const ddp_avg_pool2d_attrs *a = c->attrs;
    grid g = grid_of(&c->in[0]->m, &c->out[0]->m, a->kernel, a->stride, a->padding);
    g.include = a->count_include_pad;
    return averages(c, g);
}
CPU_KERNEL(avg_pool2d, reject, run_avg_pool2d);

static int run_avg_pool2d_grad(const ddp_call *c) {
    const ddp_avg_pool2d_grad_attrs *a = c->attrs;
    grid g = grid_of(&c->out[0]->m, &c->in[0]->m, a->kernel, a->stride, a->padding);
    g.include = a->count_include_pad;
    return spread(c, g);
}
CPU_KERNEL(avg_pool2d_grad, reject, run_avg_pool2d_grad);

static int run_adaptive_avg_pool2d(const ddp_call *c) {
    return averages(c, grid_of(&c->in[0]->m, &c->out[0]->m, NULL, NULL, NULL));
}
CPU_KERNEL(adaptive_avg_pool2d, reject, run_adaptive_avg_pool2d);

static int run_adaptive_avg_pool2d_grad(const ddp_call *c) {
    return spread(c, grid_of(&c->out[0]->m, &c->in[0]->m, NULL, NULL, NULL));
}
CPU_KERNEL(adaptive_avg_pool2d_grad, reject, run_adaptive_avg_pool2d_grad);
