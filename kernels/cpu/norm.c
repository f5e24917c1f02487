/* norm.c -- batch normalisation of rows of channels ([N, C], or 4-D channels-last), f32 or 16-bit: one pass over memory for the
 * sums, one for the result, forward and backward. Sums are taken about the first row, in f32 over short blocks of
 * rows and in double over those, so that a large mean costs no digits. Rows are cut into a fixed number of parts,
 * whatever the threads. */
#include <math.h>
#include <string.h>

#include "../../core/mem/mem.h"
#include "cpu.h"

enum { PARTS = 16, BLOCK = 64, SPAN = 64, NEAR = 8192, CHUNK = 2048 };

static int64_t channels_of(const ddp_tensor *x) { return x->m.size[1]; }

static const char *reject_rows(const ddp_tensor *x) {
    if (!cpu_f32_or_half(x) || x->numel == 0) return "f32, f16 or bf16 that is not empty only";
    if ((x->m.ndim != 2 && x->m.ndim != 4) || !cpu_rows_of_channels(x)) return "not rows of channels";
    return NULL;
}

static bool unit(const ddp_tensor *t) { return !t || t->m.size[0] == 1 || t->m.stride[0] == 1; }

static const char *reject_batch_norm(const ddp_call *c) {
    for (int i = 1; i < 5; i++)
        if (!unit(c->in[i])) return "a strided vector of channels";
    if (c->n_in > 5 && c->in[5] && !cpu_alike(c->in[5], c->in[0])) return "the residual is laid out otherwise";
    return reject_rows(c->in[0]);
}

static const char *reject_batch_norm_grad(const ddp_call *c) {
    for (int i = 2; i < c->n_in; i++)
        if (!unit(c->in[i])) return "a strided vector of channels";
    if (!cpu_alike(c->in[0], c->in[1])) return "g is laid out otherwise";
    return reject_rows(c->in[1]);
}

/* ---- sums ---- */

/* Few channels are seen as more, several rows side by side, so that loops over channels are long. */
static int64_t fold_of(int64_t C, int64_t rows) {
    int64_t f = C >= SPAN ? 1 : SPAN / C;
    return f < rows ? f : 1;
}

/* Rows that are summed: x and, backward, g (else NULL), of dtype d, about m. With a relu g counts only where
 * (x - m) scale + shift is positive. */
typedef struct summed {
    ddp_dtype d;
    const void *g, *x;
    const float *m;             /* [C] */
    const float *scale, *shift; /* [C], or NULL: no relu */
} summed;

/* Over rows [lo, hi) of C elements from channel k on, V vectors wide:
 * forward  s1 += x - m, s2 += (x - m)^2;   backward (g given)  s1 += g, s2 += g (x - m). */
CPU_INLINE void span(ddp_dtype dt, bool relu, const summed *in, int64_t C, int64_t k, int64_t lo, int64_t hi, int V,
                     float *s1, float *s2) {
    const void *g = in->g, *x = in->x;
    cpu_vec a[4], b[4], mean[4], scale[4], shift[4];
    for (int v = 0; v < V; v++) {
        a[v] = b[v] = (cpu_vec){0};
        mean[v] = cpu_load(DDP_F32, in->m, k + v * CPU_W);
        if (!relu) continue;
        scale[v] = cpu_load(DDP_F32, in->scale, k + v * CPU_W);
        shift[v] = cpu_load(DDP_F32, in->shift, k + v * CPU_W);
    }
    for (int64_t r = lo; r < hi; r++)
        for (int v = 0; v < V; v++) {
            cpu_vec d = cpu_load(dt, x, r * C + k + v * CPU_W) - mean[v];
            cpu_vec u = g ? cpu_load(dt, g, r * C + k + v * CPU_W) : d;
            if (relu) u = (cpu_vec)((cpu_bits)(d * scale[v] + shift[v] > 0) & (cpu_bits)u);
            a[v] += u;
            b[v] += u * d;
        }
    for (int v = 0; v < V; v++) {
        cpu_store(DDP_F32, s1, k + v * CPU_W, a[v]);
        cpu_store(DDP_F32, s2, k + v * CPU_W, b[v]);
    }
}

/* s1[0..C), s2[0..C) of rows [lo, hi); dt, relu, and whether there is a g, are constants where this is inlined. */
CPU_INLINE void block_sums_of(ddp_dtype dt, bool relu, bool back, const summed *in, int64_t C, int64_t lo, int64_t hi,
                              float *s1, float *s2) {
    const summed r = {dt, back ? in->g : NULL, in->x, in->m, in->scale, in->shift};
    int64_t k = 0;
    for (; k + 4 * CPU_W <= C; k += 4 * CPU_W) span(dt, relu, &r, C, k, lo, hi, 4, s1, s2);
    for (; k + CPU_W <= C; k += CPU_W) span(dt, relu, &r, C, k, lo, hi, 1, s1, s2);
    for (; k < C; k++) {
        float a = 0, b = 0;
        for (int64_t i = lo; i < hi; i++) {
            float d = cpu_get(dt, r.x, i * C + k) - r.m[k], u = back ? cpu_get(dt, r.g, i * C + k) : d;
            if (relu && !(d * r.scale[k] + r.shift[k] > 0)) u = 0;
            a += u;
            b += u * d;
        }
        s1[k] = a;
        s2[k] = b;
    }
}
static void block_sums(const summed *r, int64_t C, int64_t lo, int64_t hi, float *s1, float *s2) {
#define SUMS_OF(dt)                                                      \
    if (r->scale) block_sums_of(dt, true, true, r, C, lo, hi, s1, s2);   \
    else if (r->g) block_sums_of(dt, false, true, r, C, lo, hi, s1, s2); \
    else block_sums_of(dt, false, false, r, C, lo, hi, s1, s2)
    if (r->d == DDP_BF16) {
        SUMS_OF(DDP_BF16);
    } else if (r->d == DDP_F16) {
        SUMS_OF(DDP_F16);
    } else {
        SUMS_OF(DDP_F32);
    }
}

/* Rows [lo, hi) in blocks that stay near: s1, s2 [C] +=. block: 2C floats. */
static void sums(const summed *r, int64_t C, int64_t lo, int64_t hi, double *s1, double *s2, float *block) {
    int64_t step = NEAR / C < 8 ? 8 : NEAR / C > BLOCK ? BLOCK : NEAR / C;
    for (int64_t at = lo; at < hi; at += step) {
        block_sums(r, C, at, at + step < hi ? at + step : hi, block, block + C);
#pragma omp simd
        for (int64_t k = 0; k < C; k++) {
            s1[k] += block[k];
            s2[k] += block[C + k];
        }
    }
}

/* to[0..fold * C) = from[0..C) again and again. */
static void tiled(const float *from, int64_t C, int64_t fold, float *to) {
    for (int64_t f = 0; f < fold; f++) memcpy(to + f * C, from, (size_t)C * sizeof *to);
}

/* All n rows: totals into total[0..2C). A status. */
static int total_sums(summed r, int64_t C, int64_t n, double *total) {
    int64_t fold = fold_of(C, n), W = fold * C, tall = n / fold; /* tall rows of W, and rest rows of C */
    int parts = n * C < 65536 ? 1 : PARTS, threads = cpu_threads(n * C);
    size_t doubles = 2 * (size_t)W * (size_t)parts, floats = 2 * (size_t)W * (size_t)parts + 3 * (size_t)W;
    size_t bytes = doubles * sizeof(double) + floats * sizeof(float);
    double *part = ddp__scratch_take(bytes);
    if (!part) return ddp__pending();
    float *block = (float *)(void *)(part + doubles), *mean = block + floats - 3 * W;
    memset(part, 0, doubles * sizeof *part);
    tiled(r.m, C, fold, mean);
    summed wide = {r.d, r.g, r.x, mean, NULL, NULL};
    if (r.scale) {
        tiled(r.scale, C, fold, mean + W);
        tiled(r.shift, C, fold, mean + 2 * W);
        wide.scale = mean + W;
        wide.shift = mean + 2 * W;
    }
    if (parts == 1) sums(&wide, W, 0, tall, part, part + W, block);
    else {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (int p = 0; p < PARTS; p++)
            sums(&wide, W, tall * p / PARTS, tall * (p + 1) / PARTS, part + 2 * W * p, part + 2 * W * p + W,
                 block + 2 * W * p);
    }
    if (tall * fold < n) sums(&r, C, tall * fold, n, part, part + W, block);
    memset(total, 0, 2 * (size_t)C * sizeof *total);
    for (int64_t s = 0; s < 2 * parts * fold; s++) { /* s counts runs of C */
        double *to = total + (s / fold % 2 ? C : 0);
        for (int64_t k = 0; k < C; k++) to[k] += part[s * C + k];
    }
    ddp__scratch_give(part, bytes);
    return 0;
}

/* ---- the second pass: y = (x - mean) q + s (+ residual, relu), or with g: p g + (x - mean) q + s, g only where relu
 * let (x - mean) scale + shift pass ---- */

enum { VECTORS = 6 };
typedef struct affine {
    ddp_dtype d;
    bool relu;
    const void *g, *x, *residual; /* g, residual: NULL where there is none */
    void *y;
    const float *v[VECTORS]; /* [C] each, NULL where not needed: mean, q, s, p, scale, shift */
} affine;

/* n rows of C floats, side by side. The flags are constants where this is inlined. */
CPU_INLINE void affine_loop(const affine *f, bool relu, bool add, const float *g, const float *x, const float *z,
                            float *y, int64_t C, int64_t n) {
    const float *mean = f->v[0], *q = f->v[1], *s = f->v[2], *p = f->v[3], *scale = f->v[4], *shift = f->v[5];
    for (int64_t r = 0; r < n; r++, x += C, y += C) {
        if (g) {
#pragma omp simd
            for (int64_t k = 0; k < C; k++) {
                float d = x[k] - mean[k], u = g[k];
                if (relu) u = d * scale[k] + shift[k] > 0 ? u : 0;
                y[k] = u * p[k] + d * q[k] + s[k];
            }
            g += C;
        } else {
#pragma omp simd
            for (int64_t k = 0; k < C; k++) {
                float v = (x[k] - mean[k]) * q[k] + s[k];
                if (add) v += z[k];
                if (relu) v = v < 0 ? 0 : v;
                y[k] = v;
            }
            if (add) z += C;
        }
    }
}
static void affine_floats(const affine *f, const float *g, const float *x, const float *z, float *y, int64_t C,
                          int64_t n) {
    if (g && f->relu) affine_loop(f, true, false, g, x, NULL, y, C, n);
    else if (g) affine_loop(f, false, false, g, x, NULL, y, C, n);
    else if (z) affine_loop(f, true, true, NULL, x, z, y, C, n);
    else if (f->relu) affine_loop(f, true, false, NULL, x, NULL, y, C, n);
    else affine_loop(f, false, false, NULL, x, NULL, y, C, n);
}

/* Rows [lo, hi): f32 as they lie, 16-bit in chunks of whole rows, or of pieces of one row. */
static void affine_rows(const affine *f, int64_t C, int64_t lo, int64_t hi) {
    float gs[CHUNK], xs[CHUNK], zs[CHUNK], ys[CHUNK];
    bool direct = f->d == DDP_F32;
    int64_t width = direct || C <= CHUNK ? C : CHUNK, step = direct ? hi - lo : C <= CHUNK ? CHUNK / C : 1;
    for (int64_t r = lo; r < hi; r += step)
        for (int64_t k = 0; k < C; k += width) {
            int64_t w = C - k < width ? C - k : width, n = hi - r < step ? hi - r : step, at = r * C + k;
            affine part = {.d = f->d, .relu = f->relu};
            for (int i = 0; i < VECTORS; i++) part.v[i] = f->v[i] ? f->v[i] + k : NULL;
            float *y = cpu_target(f->d, f->y, at, ys);
            affine_floats(&part, f->g ? cpu_source(f->d, f->g, at, gs, n * w) : NULL,
                          cpu_source(f->d, f->x, at, xs, n * w),
                          f->residual ? cpu_source(f->d, f->residual, at, zs, n * w) : NULL, y, w, n);
            cpu_narrow(f->d, y, f->y, at, n * w);
        }
}

static int affine_pass(affine f, int64_t C, int64_t rows) {
    int64_t fold = fold_of(C, rows), W = fold * C, tall = rows / fold;
    int threads = cpu_threads(rows * C);
    float wide[VECTORS][2 * SPAN]; /* W < 2 * SPAN where rows are folded */
    affine narrow = f;
    for (int i = 0; fold > 1 && i < VECTORS; i++) {
        if (!f.v[i]) continue;
        tiled(f.v[i], C, fold, wide[i]);
        f.v[i] = wide[i];
    }
    if (threads <= 1) affine_rows(&f, W, 0, tall);
    else {
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int p = 0; p < PARTS; p++) affine_rows(&f, W, tall * p / PARTS, tall * (p + 1) / PARTS);
    }
    affine_rows(&narrow, C, tall * fold, rows);
    return 0;
}

/* ---- kernels ---- */

/* A vector of C channels as floats: where they lie, or in scratch; all `absent` where there is none. */
static const float *channels(const ddp_tensor *t, int64_t C, float absent, float *scratch) {
    if (t) return cpu_source(t->m.dtype, ddp__ptr(t), 0, scratch, C);
    for (int64_t k = 0; k < C; k++) scratch[k] = absent;
    return scratch;
}

/* Batch mean and variance, and the running ones moved towards them. */
static int batch_statistics(const ddp_call *c, int64_t rows, double *total, float *mean, double *var) {
    const ddp_batch_norm_attrs *a = c->attrs;
    const ddp_dtype dt = c->in[0]->m.dtype;
    const void *x = ddp__ptr(c->in[0]);
    int64_t C = channels_of(c->in[0]);
    cpu_widen(dt, x, 0, mean, C); /* about the first row, as far as it is finite */
    for (int64_t k = 0; k < C; k++)
        if (!isfinite(mean[k])) mean[k] = 0;
    int st = total_sums((summed){dt, NULL, x, mean, NULL, NULL}, C, rows, total);
    if (st < 0) return st;
    for (int64_t k = 0; k < C; k++) {
        double d = total[k] / (double)rows, first = mean[k];
        mean[k] = (float)(first + d);
        var[k] = total[C + k] / (double)rows - d * d;
        if (var[k] < 0) var[k] = 0;
        if (!a->training || !c->in[3]) continue;
        float *rm = cpu_f32(c->in[3]), *rv = cpu_f32(c->in[4]);
        rm[k] = (float)((1 - a->momentum) * rm[k] + a->momentum * (first + d));
        rv[k] = (float)((1 - a->momentum) * rv[k] + a->momentum * var[k] * (double)rows / (double)(rows - 1));
    }
    return 0;
}

static int run_batch_norm(const ddp_call *c) {
    const ddp_batch_norm_attrs *a = c->attrs;
    int64_t C = channels_of(c->in[0]), rows = c->in[0]->numel / C;
    size_t bytes = (size_t)C * (3 * sizeof(double) + 3 * sizeof(float));
    char *scratch = ddp__scratch_take(bytes);
    if (!scratch) return ddp__pending();
    double *total = (double *)(void *)scratch, *var = total + 2 * C;
    float *scale = (float *)(void *)(var + C), *mean = cpu_f32(c->out[1]), *rstd = cpu_f32(c->out[2]);
    const float *w = channels(c->in[1], C, 1, scale + C), *shift = channels(c->in[2], C, 0, scale + 2 * C);
    bool act = c->op->id == DDP_OP_batch_norm_act;
    int st = 0;
    if (a->training || !c->in[3]) st = batch_statistics(c, rows, total, mean, var);
    else
        for (int64_t k = 0; k < C; k++) {
            mean[k] = cpu_f32(c->in[3])[k];
            var[k] = cpu_f32(c->in[4])[k];
        }
    for (int64_t k = 0; st == 0 && k < C; k++) {
        double r = 1 / sqrt(var[k] + a->eps);
        rstd[k] = (float)r;
        scale[k] = act ? rstd[k] * w[k] : (float)(r * w[k]); /* relu's mask is found again from rstd */
    }
    if (st == 0)
        st = affine_pass((affine){.d = c->in[0]->m.dtype,
                                  .relu = act,
                                  .x = ddp__ptr(c->in[0]),
                                  .residual = act && c->in[5] ? ddp__ptr(c->in[5]) : NULL,
                                  .y = ddp__ptr(c->out[0]),
                                  .v = {mean, scale, shift}},
                         C, rows);
    ddp__scratch_give(scratch, bytes);
    return st;
}
CPU_KERNEL(batch_norm, reject_batch_norm, run_batch_norm);
CPU_KERNEL(batch_norm_act, reject_batch_norm, run_batch_norm);

/* dx = w rstd (g - mean(g) - xhat mean(g xhat)), which is p g + q (x - mean) + s a channel; in eval mode w rstd g. */
static int run_batch_norm_grad(const ddp_call *c) {
    bool training = ((const ddp_batch_norm_grad_attrs *)c->attrs)->training;
    int64_t C = channels_of(c->in[1]), rows = c->in[1]->numel / C;
    size_t bytes = (size_t)C * (2 * sizeof(double) + 8 * sizeof(float));
    char *scratch = ddp__scratch_take(bytes);
    if (!scratch) return ddp__pending();
    double *total = (double *)(void *)scratch;
    float *p = (float *)(void *)(total + 2 * C), *q = p + C, *s = q + C;
    const void *g = ddp__ptr(c->in[0]), *x = ddp__ptr(c->in[1]);
    const float *mean = cpu_f32(c->in[3]), *rstd = cpu_f32(c->in[4]);
    const ddp_dtype dt = c->in[1]->m.dtype, dt_w = c->out[1]->m.dtype;
    const float *w = channels(c->in[2], C, 1, s + C);
    float *dw = cpu_target(dt_w, ddp__ptr(c->out[1]), 0, s + 2 * C);
    float *db = cpu_target(dt_w, ddp__ptr(c->out[2]), 0, s + 3 * C);
    bool act = c->op->id == DDP_OP_batch_norm_act_grad;
    float *scale = s + 4 * C;
    const float *shift = act ? channels(c->in[5], C, 0, s + 5 * C) : NULL;
    for (int64_t k = 0; act && k < C; k++) scale[k] = rstd[k] * w[k]; /* as forward had it */
    int st = total_sums((summed){dt, g, x, mean, act ? scale : NULL, shift}, C, rows, total);
    for (int64_t k = 0; st == 0 && k < C; k++) {
        double wr = rstd[k] * (double)w[k], gx = total[C + k] * rstd[k];
        dw[k] = (float)gx;
        db[k] = (float)total[k];
        p[k] = (float)wr;
        q[k] = training ? (float)(-wr * rstd[k] * gx / (double)rows) : 0;
        s[k] = training ? (float)(-wr * total[k] / (double)rows) : 0;
    }
    cpu_narrow(dt_w, dw, ddp__ptr(c->out[1]), 0, C);
    cpu_narrow(dt_w, db, ddp__ptr(c->out[2]), 0, C);
    if (st == 0)
        st = affine_pass((affine){.d = dt,
                                  .relu = act,
                                  .g = g,
                                  .x = x,
                                  .y = ddp__ptr(c->out[0]),
                                  .v = {mean, q, s, p, act ? scale : NULL, shift}},
                         C, rows);
    ddp__scratch_give(scratch, bytes);
    return st;
}
CPU_KERNEL(batch_norm_grad, reject_batch_norm_grad, run_batch_norm_grad);
CPU_KERNEL(batch_norm_act_grad, reject_batch_norm_grad, run_batch_norm_grad);
