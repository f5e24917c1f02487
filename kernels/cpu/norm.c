/* norm.c -- batch normalisation of f32 rows of channels ([N, C], or 4-D channels-last): one pass over memory for the sums,
 * one for the result, forward and backward. Sums are taken about the first row, in f32 over short blocks of rows and in
 * double over those, so that a large mean costs no digits. Rows are cut into a fixed number of parts, whatever the threads. */
#include <math.h>
#include <string.h>

#include "../../core/mem/mem.h"
#include "cpu.h"

enum { PARTS = 16, BLOCK = 32 };

static int64_t channels_of(const ddp_tensor *x) { return x->m.size[1]; }

static const char *reject_rows(const ddp_tensor *x) {
    if (x->m.dtype != DDP_F32 || x->numel == 0) return "f32 that is not empty only";
    if ((x->m.ndim != 2 && x->m.ndim != 4) || !cpu_rows_of_channels(x)) return "not rows of channels";
    return NULL;
}

static bool unit(const ddp_tensor *t) { return !t || t->m.size[0] == 1 || t->m.stride[0] == 1; }

static const char *reject_batch_norm(const ddp_call *c) {
    for (int i = 1; i < c->n_in; i++)
        if (!unit(c->in[i])) return "a strided vector of channels";
    return reject_rows(c->in[0]);
}

static const char *reject_batch_norm_grad(const ddp_call *c) {
    for (int i = 2; i < c->n_in; i++)
        if (!unit(c->in[i])) return "a strided vector of channels";
    if (!cpu_alike(c->in[0], c->in[1])) return "g is laid out otherwise";
    return reject_rows(c->in[1]);
}

/* Adds rows [lo, hi) of two products a channel to s1, s2 [C]:  s1 += u, s2 += u*v with
 * forward:  u = v = x - m;   backward:  u = g, v = x - m. blocks: 2C floats of scratch. */
static void sums(const float *g, const float *x, const float *m, int64_t C, int64_t lo, int64_t hi, double *s1,
                 double *s2, float *block) {
    float *b1 = block, *b2 = block + C;
    for (int64_t at = lo; at < hi; at += BLOCK) {
        int64_t end = at + BLOCK < hi ? at + BLOCK : hi;
        memset(block, 0, 2 * (size_t)C * sizeof *block);
        for (int64_t r = at; r < end; r++) {
            const float *xr = x + r * C, *gr = g ? g + r * C : NULL;
            if (gr) {
#pragma omp simd
                for (int64_t k = 0; k < C; k++) {
                    b1[k] += gr[k];
                    b2[k] += gr[k] * (xr[k] - m[k]);
                }
            } else {
#pragma omp simd
                for (int64_t k = 0; k < C; k++) {
                    float d = xr[k] - m[k];
                    b1[k] += d;
                    b2[k] += d * d;
                }
            }
        }
        for (int64_t k = 0; k < C; k++) {
            s1[k] += b1[k];
            s2[k] += b2[k];
        }
    }
}

/* All rows: totals into total[0..2C). A status. */
static int total_sums(const float *g, const float *x, const float *m, int64_t C, int64_t rows, double *total) {
    size_t doubles = 2 * (size_t)C * PARTS * sizeof(double), floats = 2 * (size_t)C * PARTS * sizeof(float);
    char *scratch = ddp__mem_alloc(doubles + floats);
    int threads = cpu_threads(rows * C);
    int64_t step = (rows + PARTS - 1) / PARTS;
    if (!scratch) return ddp__pending();
    double *part = (double *)(void *)scratch;
    float *block = (float *)(void *)(scratch + doubles);
    memset(part, 0, doubles);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int p = 0; p < PARTS; p++) {
        int64_t lo = p * step, hi = lo + step < rows ? lo + step : rows;
        if (lo < hi) sums(g, x, m, C, lo, hi, part + 2 * C * p, part + 2 * C * p + C, block + 2 * C * p);
    }
    for (int64_t k = 0; k < 2 * C; k++) {
        total[k] = 0;
        for (int p = 0; p < PARTS; p++) total[k] += part[2 * C * p + k];
    }
    ddp__mem_free(scratch, doubles + floats);
    return 0;
}

/* Batch mean and variance, and the running ones moved towards them. */
static int batch_statistics(const ddp_call *c, int64_t rows, double *total, float *mean, double *var) {
    const ddp_batch_norm_attrs *a = c->attrs;
    const float *x = cpu_f32(c->in[0]);
    int64_t C = channels_of(c->in[0]);
    int st = total_sums(NULL, x, x, C, rows, total); /* about the first row */
    if (st < 0) return st;
    for (int64_t k = 0; k < C; k++) {
        double d = total[k] / (double)rows;
        mean[k] = (float)(x[k] + d);
        var[k] = total[C + k] / (double)rows - d * d;
        if (var[k] < 0) var[k] = 0;
        if (!a->training || !c->in[3]) continue;
        float *rm = cpu_f32(c->in[3]), *rv = cpu_f32(c->in[4]);
        rm[k] = (float)((1 - a->momentum) * rm[k] + a->momentum * (x[k] + d));
        rv[k] = (float)((1 - a->momentum) * rv[k] + a->momentum * var[k] * (double)rows / (double)(rows - 1));
    }
    return 0;
}

static int run_batch_norm(const ddp_call *c) {
    const ddp_batch_norm_attrs *a = c->attrs;
    int64_t C = channels_of(c->in[0]), rows = c->in[0]->numel / C;
    size_t bytes = (size_t)C * (3 * sizeof(double) + 2 * sizeof(float));
    char *scratch = ddp__mem_alloc(bytes);
    if (!scratch) return ddp__pending();
    double *total = (double *)(void *)scratch, *var = total + 2 * C;
    float *scale = (float *)(void *)(var + C), *shift = scale + C;
    float *mean = cpu_f32(c->out[1]), *rstd = cpu_f32(c->out[2]), *y = cpu_f32(c->out[0]);
    const float *x = cpu_f32(c->in[0]), *w = c->in[1] ? cpu_f32(c->in[1]) : NULL,
                *b = c->in[2] ? cpu_f32(c->in[2]) : NULL;
    int st = 0, threads = cpu_threads(rows * C);
    if (a->training || !c->in[3]) st = batch_statistics(c, rows, total, mean, var);
    else
        for (int64_t k = 0; k < C; k++) {
            mean[k] = cpu_f32(c->in[3])[k];
            var[k] = cpu_f32(c->in[4])[k];
        }
    for (int64_t k = 0; k < C; k++) {
        double r = 1 / sqrt(var[k] + a->eps);
        rstd[k] = (float)r;
        scale[k] = (float)(w ? r * w[k] : r);
        shift[k] = b ? b[k] : 0;
    }
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; r++) {
        const float *xr = x + r * C;
        float *yr = y + r * C;
#pragma omp simd
        for (int64_t k = 0; k < C; k++) yr[k] = (xr[k] - mean[k]) * scale[k] + shift[k];
    }
    ddp__mem_free(scratch, bytes);
    return st;
}
CPU_KERNEL(batch_norm, reject_batch_norm, run_batch_norm);

/* dx = w rstd (g - mean(g) - xhat mean(g xhat)), which is p g + q (x - mean) + s a channel; in eval mode w rstd g. */
static int run_batch_norm_grad(const ddp_call *c) {
    bool training = ((const ddp_batch_norm_grad_attrs *)c->attrs)->training;
    int64_t C = channels_of(c->in[1]), rows = c->in[1]->numel / C;
    size_t bytes = (size_t)C * (2 * sizeof(double) + 3 * sizeof(float));
    char *scratch = ddp__mem_alloc(bytes);
    if (!scratch) return ddp__pending();
    double *total = (double *)(void *)scratch;
    float *p = (float *)(void *)(total + 2 * C), *q = p + C, *s = q + C;
    const float *g = cpu_f32(c->in[0]), *x = cpu_f32(c->in[1]), *w = c->in[2] ? cpu_f32(c->in[2]) : NULL;
    const float *mean = cpu_f32(c->in[3]), *rstd = cpu_f32(c->in[4]);
    float *dx = cpu_f32(c->out[0]), *dw = cpu_f32(c->out[1]), *db = cpu_f32(c->out[2]);
    int st = total_sums(g, x, mean, C, rows, total), threads = cpu_threads(rows * C);
    for (int64_t k = 0; st == 0 && k < C; k++) {
        double scale = rstd[k] * (w ? w[k] : 1.0), gx = total[C + k] * rstd[k];
        dw[k] = (float)gx;
        db[k] = (float)total[k];
        p[k] = (float)scale;
        q[k] = training ? (float)(-scale * rstd[k] * gx / (double)rows) : 0;
        s[k] = training ? (float)(-scale * total[k] / (double)rows) : 0;
    }
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; r++) {
        const float *gr = g + r * C, *xr = x + r * C;
        float *dr = dx + r * C;
#pragma omp simd
        for (int64_t k = 0; k < C; k++) dr[k] = gr[k] * p[k] + (xr[k] - mean[k]) * q[k] + s[k];
    }
    ddp__mem_free(scratch, bytes);
    return st;
}
CPU_KERNEL(batch_norm_grad, reject_batch_norm_grad, run_batch_norm_grad);
