/* layer_norm.c -- layer normalisation and its gradient on rows that lie together, f32 or 16-bit: a row is widened once
 * for each pass over it, in pieces that stay near. */
#include <math.h>
#include <string.h>

#include "../../core/mem/mem.h"
#include "cpu.h"

enum { PARTS = 16, CHUNK = 2048, BLOCK = 512 };

static const char *reject(const ddp_call *c) {
    for (int i = 0; i < c->n_in; i++)
        if (c->in[i] && !ddp__meta_is_rowmajor(&c->in[i]->m)) return "not row-major";
    if (!cpu_f32_or_half(c->in[0]) || c->in[0]->numel == 0) return "f32, f16 or bf16 that is not empty only";
    return NULL;
}

/* rows of n elements: y from x; backward dx from g and x. */
typedef struct layer {
    ddp_dtype d;
    const void *g, *x;
    void *y;
    int64_t rows, n;
    const float *w, *b; /* [n] or NULL */
    float *mean, *rstd; /* [rows] */
    double eps;
    double *sums; /* backward: [PARTS][2][n], dweight and dbias of the parts' rows */
} layer;

static int64_t piece(const layer *l, int64_t k) { return l->n - k < CHUNK ? l->n - k : CHUNK; }

/* ---- forward ---- */

/* The sum of (x - mean)^2 over m floats, in f32 over blocks. */
static double squares(const float *x, float mean, int64_t m) {
    double sum = 0;
    for (int64_t at = 0; at < m; at += BLOCK) {
        int64_t n = m - at < BLOCK ? m - at : BLOCK;
        float s = 0;
#pragma omp simd reduction(+ : s)
        for (int64_t k = 0; k < n; k++) s += (x[at + k] - mean) * (x[at + k] - mean);
        sum += s;
    }
    return sum;
}

static void normalise(const layer *l, const float *x, int64_t k, float mean, float rstd, float *y, int64_t m) {
    const float *w = l->w ? l->w + k : NULL, *b = l->b ? l->b + k : NULL;
    if (w && b) {
#pragma omp simd
        for (int64_t j = 0; j < m; j++) y[j] = (x[j] - mean) * rstd * w[j] + b[j];
    } else
        for (int64_t j = 0; j < m; j++) y[j] = (x[j] - mean) * rstd * (w ? w[j] : 1) + (b ? b[j] : 0);
}

static void forward_rows(const void *ctx, int64_t lo, int64_t hi) {
    const layer *l = ctx;
    float from[CHUNK], to[CHUNK];
    for (int64_t r = lo; r < hi; r++) {
        int64_t at = r * l->n;
        double var = 0;
        float mean = (float)(cpu_row_sum(l->d, l->x, at, 1, l->n) / (double)l->n);
        for (int64_t k = 0; k < l->n; k += CHUNK)
            var += squares(cpu_source(l->d, l->x, at + k, from, piece(l, k)), mean, piece(l, k));
        float rstd = (float)(1 / sqrt(var / (double)l->n + l->eps));
        l->mean[r] = mean;
        l->rstd[r] = rstd;
        for (int64_t k = 0; k < l->n; k += CHUNK) {
            int64_t m = piece(l, k);
            float *y = cpu_target(l->d, l->y, at + k, to);
            normalise(l, cpu_source(l->d, l->x, at + k, from, m), k, mean, rstd, y, m);
            cpu_narrow(l->d, y, l->y, at + k, m);
        }
    }
}

/* t as floats: where they lie, or in scratch. NULL gives NULL. */
static const float *vector(const ddp_tensor *t, float *scratch) {
    return t ? cpu_source(t->m.dtype, ddp__ptr(t), 0, scratch, t->numel) : NULL;
}

static int run_layer_norm(const ddp_call *c) {
    const ddp_tensor *x = c->in[0];
    const double eps = ((const ddp_layer_norm_attrs *)c->attrs)->eps;
    int64_t rows = c->out[1]->numel, n = x->numel / rows;
    size_t bytes = 2 * (size_t)n * sizeof(float);
    float *scratch = ddp__scratch_take(bytes);
    if (!scratch) return ddp__pending();
    layer l = {.d = x->m.dtype, .x = ddp__ptr(x), .y = ddp__ptr(c->out[0]), .rows = rows, .n = n, .eps = eps};
    l.w = vector(c->in[1], scratch);
    l.b = vector(c->in[2], scratch + n);
    l.mean = cpu_f32(c->out[1]);
    l.rstd = cpu_f32(c->out[2]);
    cpu_share(rows, x->numel, forward_rows, &l);
    ddp__scratch_give(scratch, bytes);
    return 0;
}
CPU_KERNEL(layer_norm, reject, run_layer_norm);

/* ---- backward: dx = rstd (g w - mean(g w) - xhat mean(g w xhat)), dweight = sum of g xhat, dbias = sum of g ---- */

/* m elements of one row from its k-th: sums[0] += g w, sums[1] += g w xhat, dw and db += theirs. */
static void grad_sums(const float *g, const float *x, const float *w, float mean, float rstd, int64_t m, double *dw,
                      double *db, double *sums) {
    for (int64_t at = 0; at < m; at += BLOCK) {
        int64_t hi = m - at < BLOCK ? m : at + BLOCK;
        float a = 0, b = 0;
#pragma omp simd reduction(+ : a, b)
        for (int64_t k = at; k < hi; k++) {
            float xhat = (x[k] - mean) * rstd, u = w ? g[k] * w[k] : g[k];
            a += u;
            b += u * xhat;
            dw[k] += g[k] * xhat;
            db[k] += g[k];
        }
        sums[0] += a;
        sums[1] += b;
    }
}

static void backward_row(const layer *l, int64_t r, double *dw, double *db) {
    float gs[CHUNK], xs[CHUNK], to[CHUNK], mean = l->mean[r], rstd = l->rstd[r];
    int64_t at = r * l->n;
    double sums[2] = {0};
    for (int64_t k = 0; k < l->n; k += CHUNK) {
        int64_t m = piece(l, k);
        grad_sums(cpu_source(l->d, l->g, at + k, gs, m), cpu_source(l->d, l->x, at + k, xs, m), l->w ? l->w + k : NULL,
                  mean, rstd, m, dw + k, db + k, sums);
    }
    const float all = (float)(sums[0] / (double)l->n), along = (float)(sums[1] / (double)l->n);
    for (int64_t k = 0; k < l->n; k += CHUNK) {
        int64_t m = piece(l, k);
        const float *g = cpu_source(l->d, l->g, at + k, gs, m), *x = cpu_source(l->d, l->x, at + k, xs, m);
        const float *w = l->w ? l->w + k : NULL;
        float *y = cpu_target(l->d, l->y, at + k, to);
#pragma omp simd
        for (int64_t j = 0; j < m; j++) y[j] = rstd * ((w ? g[j] * w[j] : g[j]) - all - (x[j] - mean) * rstd * along);
        cpu_narrow(l->d, y, l->y, at + k, m);
    }
}

/* Parts [lo, hi) of the rows: as many whatever the threads. */
static void backward_parts(const void *ctx, int64_t lo, int64_t hi) {
    const layer *l = ctx;
    for (int64_t p = lo; p < hi; p++) {
        double *dw = l->sums + 2 * p * l->n;
        memset(dw, 0, 2 * (size_t)l->n * sizeof *dw);
        for (int64_t r = l->rows * p / PARTS; r < l->rows * (p + 1) / PARTS; r++) backward_row(l, r, dw, dw + l->n);
    }
}

static int run_layer_norm_grad(const ddp_call *c) {
    const ddp_tensor *x = c->in[1];
    int64_t rows = c->in[3]->numel, n = x->numel / rows;
    size_t doubles = 2 * PARTS * (size_t)n, bytes = doubles * sizeof(double) + (size_t)n * sizeof(float);
    double *sums = ddp__scratch_take(bytes);
    if (!sums) return ddp__pending();
    layer l = {.d = x->m.dtype, .x = ddp__ptr(x), .y = ddp__ptr(c->out[0]), .rows = rows, .n = n, .sums = sums};
    l.g = ddp__ptr(c->in[0]);
    l.w = vector(c->in[2], (float *)(void *)(sums + doubles));
    l.mean = cpu_f32(c->in[3]);
    l.rstd = cpu_f32(c->in[4]);
    cpu_share(PARTS, x->numel, backward_parts, &l);
    for (int o = 0; o < 2; o++)
        for (int64_t k = 0; k < n; k++) {
            double sum = 0;
            for (int p = 0; p < PARTS; p++) sum += sums[(2 * p + o) * n + k];
            cpu_put(c->out[1 + o]->m.dtype, ddp__ptr(c->out[1 + o]), k, (float)sum);
        }
    ddp__scratch_give(sums, bytes);
    return 0;
}
CPU_KERNEL(layer_norm_grad, reject, run_layer_norm_grad);
