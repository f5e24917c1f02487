/* pool.c -- pooling of channels-last f32, f16 and bf16: windows are walked cell by cell, each cell a run of channels. */
#include <math.h>
#include <string.h>

#include "../../core/mem/mem.h"
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
    if (!cpu_f32_or_half(c->in[0])) return "f32, f16 and bf16 only";
    return c->in[0]->numel && c->out[0]->numel ? NULL : "an empty tensor";
}

/* ---- the largest ---- */

enum { LANES = 256, SCRATCH = 1 << 18 };

/* One window, up to LANES channels from place x on: places and the largest. */
static void max_window(const grid *g, window v, ddp_dtype d, const void *p, int64_t x, int64_t lanes, float *best,
                       int64_t *ids) {
    float buffer[LANES];
    int32_t at[LANES];
    cpu_widen(d, p, x + (v.h0 * g->W + v.w0) * g->C, best, lanes);
    for (int64_t k = 0; k < lanes; k++) at[k] = (int32_t)(v.h0 * g->W + v.w0);
    for (int64_t h = v.h0; h < v.h1; h++)
        for (int64_t w = v.w0; w < v.w1; w++) {
            const float *cell = cpu_source(d, p, x + (h * g->W + w) * g->C, buffer, lanes);
            const int32_t here = (int32_t)(h * g->W + w);
#pragma omp simd
            for (int64_t k = 0; k < lanes; k++) {
                int take = (best[k] == best[k]) & !(cell[k] <= best[k]); /* larger, or the first NaN */
                best[k] = take ? cell[k] : best[k];
                at[k] = take ? here : at[k];
            }
        }
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
    float *images; /* of gradients: f32 of dx from image `first` on */
    int64_t first;
} job;

/* Rows [lo, hi) of windows, of all images. */
static void max_rows(const void *ctx, int64_t lo, int64_t hi) {
    const job *j = ctx;
    const grid *g = &j->g;
    const ddp_dtype d = j->c->in[0]->m.dtype;
    float best[LANES];
    for (int64_t r = lo; r < hi; r++) {
        int64_t image = r / g->Ho * g->H * g->W * g->C;
        for (int64_t wo = 0; wo < g->Wo; wo++) {
            window v = window_at(g, r % g->Ho, wo);
            int64_t at = (r * g->Wo + wo) * g->C, *ids = (int64_t *)(void *)ddp__ptr(j->c->out[1]) + at;
            for (int64_t k = 0; k < g->C; k += LANES) {
                int64_t lanes = least(LANES, g->C - k);
                max_window(g, v, d, ddp__ptr(j->c->in[0]), image + k, lanes, best, ids + k);
                cpu_narrow(d, best, ddp__ptr(j->c->out[0]), at + k, lanes);
            }
        }
    }
}

static int run_max_pool2d(const ddp_call *c) {
    const ddp_max_pool2d_attrs *a = c->attrs;
    job j = {c, grid_of(&c->in[0]->m, &c->out[0]->m, a->kernel, a->stride, a->padding), NULL, 0};
    cpu_share(j.g.N * j.g.Ho, c->in[0]->numel, max_rows, &j);
    return 0;
}
CPU_KERNEL(max_pool2d, reject_max, run_max_pool2d);

/* body(j, lo, hi) over all images of dx, which it fills as f32: f32 where they lie, 16-bit ones, so that what is added up
 * is rounded once, some at a time in scratch. A status. */
static int each_image(job *j, cpu_body body) {
    ddp_tensor *dx = j->c->out[0];
    const int64_t N = j->g.N, image = j->g.H * j->g.W * j->g.C;
    if (dx->m.dtype == DDP_F32) {
        j->images = cpu_f32(dx);
        cpu_share(N, dx->numel, body, j);
        return 0;
    }
    int64_t group = least(N, SCRATCH / image + 8);
    size_t bytes = (size_t)(group * image) * sizeof(float);
    if (!(j->images = ddp__scratch_take(bytes))) return ddp__pending();
    for (j->first = 0; j->first < N; j->first += group) {
        int64_t n = least(group, N - j->first);
        cpu_share(n, n * image, body, j);
    }
    ddp__scratch_give(j->images, bytes);
    return 0;
}

/* Images first + [lo, hi). */
static void max_grads(const void *ctx, int64_t lo, int64_t hi) {
    const job *j = ctx;
    const grid *g = &j->g;
    const ddp_dtype d = j->c->in[0]->m.dtype;
    const int64_t *ids = (const int64_t *)(const void *)ddp__ptr(j->c->in[1]), area = g->H * g->W;
    float buffer[LANES];
    for (int64_t n = lo; n < hi; n++) {
        float *image = j->images + n * area * g->C;
        memset(image, 0, (size_t)(area * g->C) * sizeof *image);
        for (int64_t i = 0; i < g->Ho * g->Wo * g->C; i += g->C)
            for (int64_t k = 0; k < g->C; k += LANES) {
                int64_t lanes = least(LANES, g->C - k), at = (n + j->first) * g->Ho * g->Wo * g->C + i + k;
                const float *from = cpu_source(d, ddp__ptr(j->c->in[0]), at, buffer, lanes);
                for (int64_t l = 0; l < lanes; l++)
                    if (ids[at + l] >= 0 && ids[at + l] < area) image[ids[at + l] * g->C + k + l] += from[l];
            }
        cpu_narrow(d, image, ddp__ptr(j->c->out[0]), (n + j->first) * area * g->C, area * g->C);
    }
}

static int run_max_pool2d_grad(const ddp_call *c) {
    job j = {c, grid_of(&c->out[0]->m, &c->in[0]->m, NULL, NULL, NULL), NULL, 0};
    return each_image(&j, max_grads);
}
CPU_KERNEL(max_pool2d_grad, reject, run_max_pool2d_grad);

/* ---- means ---- */

/* The mean of a window, up to LANES channels from place x on. */
static void mean_window(const grid *g, window v, ddp_dtype d, const void *p, int64_t x, int64_t lanes, float *y) {
    float line[LANES], sum[LANES] = {0}, buffer[LANES];
    for (int64_t h = v.h0; h < v.h1; h++) { /* line by line: large windows lose no digits */
        cpu_widen(d, p, x + (h * g->W + v.w0) * g->C, line, lanes);
        for (int64_t w = v.w0 + 1; w < v.w1; w++) {
            const float *cell = cpu_source(d, p, x + (h * g->W + w) * g->C, buffer, lanes);
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
    const ddp_dtype d = j->c->in[0]->m.dtype;
    char *out = ddp__ptr(j->c->out[0]);
    float buffer[LANES];
    for (int64_t r = lo; r < hi; r++) {
        int64_t image = r / g->Ho * g->H * g->W * g->C, at = r * g->Wo * g->C;
        for (int64_t wo = 0; wo < g->Wo; wo++, at += g->C)
            for (int64_t k = 0; k < g->C; k += LANES) {
                int64_t lanes = least(LANES, g->C - k);
                float *y = cpu_target(d, out, at + k, buffer);
                mean_window(g, window_at(g, r % g->Ho, wo), d, ddp__ptr(j->c->in[0]), image + k, lanes, y);
                cpu_narrow(d, y, out, at + k, lanes);
            }
    }
}

static int averages(const ddp_call *c, grid g) {
    job j = {c, g, NULL, 0};
    cpu_share(g.N * g.Ho, c->in[0]->numel, mean_rows, &j);
    return 0;
}

/* Images first + [lo, hi). */
static void spread_images(const void *ctx, int64_t lo, int64_t hi) {
    const job *j = ctx;
    const grid *g = &j->g;
    const ddp_dtype d = j->c->in[0]->m.dtype;
    float buffer[LANES];
    for (int64_t n = lo; n < hi; n++) {
        float *image = j->images + n * g->H * g->W * g->C;
        int64_t at = (n + j->first) * g->Ho * g->Wo * g->C;
        memset(image, 0, (size_t)(g->H * g->W * g->C) * sizeof *image);
        for (int64_t i = 0; i < g->Ho * g->Wo; i++, at += g->C) {
            window v = window_at(g, i / g->Wo, i % g->Wo);
            for (int64_t k = 0; k < g->C; k += LANES) {
                int64_t lanes = least(LANES, g->C - k);
                const float *from = cpu_source(d, ddp__ptr(j->c->in[0]), at + k, buffer, lanes);
                for (int64_t h = v.h0; h < v.h1; h++)
                    for (int64_t w = v.w0; w < v.w1; w++) {
                        float *cell = image + (h * g->W + w) * g->C + k;
#pragma omp simd
                        for (int64_t l = 0; l < lanes; l++) cell[l] += from[l] / v.divisor;
                    }
            }
        }
        cpu_narrow(d, image, ddp__ptr(j->c->out[0]), (n + j->first) * g->H * g->W * g->C, g->H * g->W * g->C);
    }
}

static int spread(const ddp_call *c, grid g) {
    job j = {c, g, NULL, 0};
    return each_image(&j, spread_images);
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
