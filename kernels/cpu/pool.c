/* pool.c -- means of windows of channels-last f32, f16 and bf16, and their gradient. Vectors of channels are added up in
 * registers; a cell of dx adds what the windows over it give, so that each is written once. */
#include <string.h>

#include "pool.h"

enum { FEW = 8 };

typedef struct job {
    const char *in;
    char *out;
    ddp_dtype d;
    grid g;
} job;

/* ---- forward ---- */

/* V vectors of channels of one window, from place x on. Line by line: large windows lose no digits. */
CPU_INLINE void mean_window(const job *j, ddp_dtype d, span h, span w, int64_t x, int64_t y, const int V) {
    const int64_t C = j->g.C, row = j->g.x[1] * C;
    const float by = 1 / (float)(h.count * w.count);
    cpu_vec sum[4] = {{0}};
    for (int64_t r = h.lo; r < h.hi; r++) {
        cpu_vec line[4] = {{0}};
        const int64_t end = x + r * row + w.hi * C;
        for (int64_t at = x + r * row + w.lo * C; at < end; at += C)
            for (int v = 0; v < V; v++) line[v] += cpu_load(d, j->in, at + v * CPU_W);
        for (int v = 0; v < V; v++) sum[v] += line[v];
    }
    for (int v = 0; v < V; v++) cpu_store(d, j->out, y + v * CPU_W, sum[v] * by);
}

/* The same for fewer channels than a vector has. */
static void mean_few(const job *j, span h, span w, int64_t x, int64_t y) {
    const int64_t C = j->g.C, row = j->g.x[1] * C;
    for (int64_t k = 0; k < C; k++) {
        float sum = 0;
        for (int64_t r = h.lo; r < h.hi; r++) {
            float line = 0;
            for (int64_t c = w.lo; c < w.hi; c++) line += cpu_get(j->d, j->in, x + r * row + c * C + k);
            sum += line;
        }
        cpu_put(j->d, j->out, y + k, sum * (1 / (float)(h.count * w.count)));
    }
}

/* Rows [lo, hi) of windows, of all images. */
CPU_INLINE void mean_rows(const job *j, ddp_dtype d, int64_t lo, int64_t hi) {
    const grid *g = &j->g;
    for (int64_t r = lo; r < hi; r++) {
        const span h = span_of(g, 0, r % g->y[0]);
        const int64_t x = r / g->y[0] * g->x[0] * g->x[1] * g->C;
        for (int64_t wo = 0; wo < g->y[1]; wo++) {
            const span w = span_of(g, 1, wo);
            if (w.hi - w.lo < FEW)
                fetch_below(g, d, j->in, x, h, w); /* lines of larger ones are long enough by themselves */
            int64_t y = (r * g->y[1] + wo) * g->C, k = 0;
            for (; k + 4 * CPU_W <= g->C; k += 4 * CPU_W) mean_window(j, d, h, w, x + k, y + k, 4);
            for (; k + CPU_W <= g->C; k += CPU_W) mean_window(j, d, h, w, x + k, y + k, 1);
            if (g->C < CPU_W) mean_few(j, h, w, x, y);
            else if (k < g->C) mean_window(j, d, h, w, x + g->C - CPU_W, y + g->C - CPU_W, 1);
        }
    }
}
static void mean_any(const void *ctx, int64_t lo, int64_t hi) {
    const job j = *(const job *)ctx; /* a copy: nothing that is written can be part of it */
    if (j.d == DDP_BF16) mean_rows(&j, DDP_BF16, lo, hi);
    else if (j.d == DDP_F16) mean_rows(&j, DDP_F16, lo, hi);
    else mean_rows(&j, DDP_F32, lo, hi);
}

static int averages(const ddp_call *c, grid g) {
    job j = {ddp__ptr(c->in[0]), ddp__ptr(c->out[0]), c->in[0]->m.dtype, g};
    cpu_share(g.N * g.y[0], c->in[0]->numel, mean_any, &j);
    return 0;
}

/* ---- backward ---- */

/* V vectors of one cell of dx: H x W windows are over it, from h and w on, the gradient of the first at place y. */
CPU_INLINE void spread_vectors(const job *j, ddp_dtype d, int64_t h, int64_t w, int64_t y, int64_t x, const int64_t H,
                               const int64_t W, const int V) {
    const grid *g = &j->g;
    cpu_vec sum[4] = {{0}};
    for (int64_t r = 0; r < H; r++)
        for (int64_t c = 0; c < W; c++) {
            const float by = 1 / (g->count[0][h + r] * g->count[1][w + c]);
            const int64_t at = y + (r * g->y[1] + c) * g->C;
            for (int v = 0; v < V; v++) sum[v] += cpu_load(d, j->in, at + v * CPU_W) * by;
        }
    for (int v = 0; v < V; v++) cpu_store(d, j->out, x + v * CPU_W, sum[v]);
}
/* All channels, a vector at least; H and W are constants where this is inlined. */
CPU_INLINE void spread_cell(const job *j, ddp_dtype d, int64_t h, int64_t w, int64_t y, int64_t x, int64_t H,
                            int64_t W) {
    const int64_t C = j->g.C;
    int64_t k = 0;
    for (; k + 4 * CPU_W <= C; k += 4 * CPU_W) spread_vectors(j, d, h, w, y + k, x + k, H, W, 4);
    for (; k + CPU_W <= C; k += CPU_W) spread_vectors(j, d, h, w, y + k, x + k, H, W, 1);
    if (k < C) spread_vectors(j, d, h, w, y + C - CPU_W, x + C - CPU_W, H, W, 1);
}
/* One channel of it. */
static void spread_one(const job *j, cover h, cover w, int64_t y, int64_t x) {
    const grid *g = &j->g;
    float sum = 0;
    for (int64_t ho = h.lo; ho <= h.hi; ho++)
        for (int64_t wo = w.lo; wo <= w.hi; wo++)
            sum += cpu_get(j->d, j->in, y + (ho * g->y[1] + wo) * g->C) * (1 / (g->count[0][ho] * g->count[1][wo]));
    cpu_put(j->d, j->out, x, sum);
}

static bool same(cover a, cover b) { return a.lo == b.lo && a.hi == b.hi; }

/* A row of an image of dx: cells under the same windows are copies of the first. */
CPU_INLINE void spread_row(const job *j, ddp_dtype d, cover h, int64_t image, int64_t x) {
    const grid *g = &j->g;
    const int64_t C = g->C, H = h.hi - h.lo + 1;
    for (int64_t w = 0, m; w < g->x[1]; w += m, x += m * C) {
        const cover c = g->cover[1][w];
        const int64_t W = c.hi - c.lo + 1, y = image + (h.lo * g->y[1] + c.lo) * C;
        for (m = 1; w + m < g->x[1] && same(g->cover[1][w + m], c);) m++;
        if (C < CPU_W)
            for (int64_t k = 0; k < C; k++) spread_one(j, h, c, image + k, x + k);
        else if (H == 1 && W == 1) spread_cell(j, d, h.lo, c.lo, y, x, 1, 1);
        else if (H == 1 && W == 2) spread_cell(j, d, h.lo, c.lo, y, x, 1, 2);
        else if (H == 2 && W == 1) spread_cell(j, d, h.lo, c.lo, y, x, 2, 1);
        else if (H == 2 && W == 2) spread_cell(j, d, h.lo, c.lo, y, x, 2, 2);
        else spread_cell(j, d, h.lo, c.lo, y, x, H, W);
        for (int64_t have = 1; have < m; have *= 2)
            memcpy(cpu_at(d, j->out, x + have * C), cpu_at(d, j->out, x),
                   (size_t)(least(have, m - have) * C) * ddp__dtype_bytes[d]);
    }
}

/* Rows [lo, hi) of dx, of all images. */
static void spread_rows(const void *ctx, int64_t lo, int64_t hi) {
    const job *j = ctx;
    const grid *g = &j->g;
    const int64_t row = g->x[1] * g->C;
    for (int64_t r = lo; r < hi; r++) {
        const int64_t n = r / g->x[0], at = r % g->x[0], y = n * g->y[0] * g->y[1] * g->C;
        const cover h = g->cover[0][at];
        if (r > lo && at > 0 && same(h, g->cover[0][at - 1]))
            memcpy(cpu_at(j->d, j->out, r * row), cpu_at(j->d, j->out, (r - 1) * row),
                   (size_t)row * ddp__dtype_bytes[j->d]);
        else if (j->d == DDP_BF16) spread_row(j, DDP_BF16, h, y, r * row);
        else if (j->d == DDP_F16) spread_row(j, DDP_F16, h, y, r * row);
        else spread_row(j, DDP_F32, h, y, r * row);
    }
}

static int spread(const ddp_call *c, grid g) {
    int st = grid_take(&g);
    if (st < 0) return st;
    job j = {ddp__ptr(c->in[0]), ddp__ptr(c->out[0]), c->in[0]->m.dtype, g};
    cpu_share(g.N * g.x[0], c->out[0]->numel, spread_rows, &j);
    grid_give(&g);
    return 0;
}

/* ---- kernels ---- */

static int run_avg_pool2d(const ddp_call *c) {
    const ddp_avg_pool2d_attrs *a = c->attrs;
    grid g = grid_of(&c->in[0]->m, &c->out[0]->m, a->kernel, a->stride, a->padding);
    g.include = a->count_include_pad;
    return averages(c, g);
}
CPU_KERNEL(avg_pool2d, pool_reject, run_avg_pool2d);

static int run_avg_pool2d_grad(const ddp_call *c) {
    const ddp_avg_pool2d_grad_attrs *a = c->attrs;
    grid g = grid_of(&c->out[0]->m, &c->in[0]->m, a->kernel, a->stride, a->padding);
    g.include = a->count_include_pad;
    return spread(c, g);
}
CPU_KERNEL(avg_pool2d_grad, pool_reject, run_avg_pool2d_grad);

static int run_adaptive_avg_pool2d(const ddp_call *c) {
    return averages(c, grid_of(&c->in[0]->m, &c->out[0]->m, NULL, NULL, NULL));
}
CPU_KERNEL(adaptive_avg_pool2d, pool_reject, run_adaptive_avg_pool2d);

static int run_adaptive_avg_pool2d_grad(const ddp_call *c) {
    return spread(c, grid_of(&c->out[0]->m, &c->in[0]->m, NULL, NULL, NULL));
}
CPU_KERNEL(adaptive_avg_pool2d_grad, pool_reject, run_adaptive_avg_pool2d_grad);
