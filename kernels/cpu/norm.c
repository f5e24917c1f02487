/* norm.c -- batch normalisation of rows of channels ([N, C], or 4-D channels-last), f32 or 16-bit, with relu and a residual
 * too: norm_passes.c's sums and result, forward and backward. Forward sums are taken about the first row, so that a large mean
 * costs no digits. */
#include <math.h>
#include <string.h>

#include "../../core/mem/mem.h"
#include "norm_passes.h"

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
        if (c->op->id != DDP_OP_batch_norm_add_act_grad || i < 5)
            if (!unit(c->in[i])) return "a strided vector of channels";
    if (!cpu_alike(c->in[0], c->in[1])) return "g is laid out otherwise";
    return reject_rows(c->in[1]);
}

static const char *reject_batch_norm_add_act_grad(const ddp_call *c) {
    if (!cpu_alike(c->in[5], c->in[1])) return "y is laid out otherwise";
    return reject_batch_norm_grad(c);
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
    int st = cpu_norm_sums(&(norm_rows){.d = dt, .rows = rows, .C = C, .x = x, .mean = mean}, total);
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
        cpu_norm_result(&(norm_rows){.d = c->in[0]->m.dtype,
                                     .rows = rows,
                                     .C = C,
                                     .x = ddp__ptr(c->in[0]),
                                     .relu = act,
                                     .residual = act && c->in[5] ? ddp__ptr(c->in[5]) : NULL,
                                     .out = ddp__ptr(c->out[0]),
                                     .mean = mean,
                                     .q = scale,
                                     .s = shift});
    ddp__scratch_give(scratch, bytes);
    return st;
}
CPU_KERNEL(batch_norm, reject_batch_norm, run_batch_norm);
CPU_KERNEL(batch_norm_act, reject_batch_norm, run_batch_norm);

/* The rows of a gradient: g, x and, where relu came after a residual, its result and where to keep what it let pass. */
static norm_rows rows_of_grad(const ddp_call *c) {
    const ddp_tensor *x = c->in[1];
    norm_rows n = {
        .d = x->m.dtype, .C = channels_of(x), .g = ddp__ptr(c->in[0]), .x = ddp__ptr(x), .mean = cpu_f32(c->in[3])};
    n.rows = x->numel / n.C;
    n.relu = c->op->id == DDP_OP_batch_norm_act_grad;
    if (c->op->id != DDP_OP_batch_norm_add_act_grad) return n;
    n.y = ddp__ptr(c->in[5]);
    n.masked = ddp__ptr(c->out[3]);
    return n;
}

/* dx = w rstd (g - mean(g) - xhat mean(g xhat)), which is p g + q (x - mean) + s a channel; in eval mode w rstd g. */
static int run_batch_norm_grad(const ddp_call *c) {
    bool training = ((const ddp_batch_norm_grad_attrs *)c->attrs)->training;
    norm_rows n = rows_of_grad(c);
    int64_t C = n.C;
    size_t bytes = (size_t)C * (2 * sizeof(double) + 8 * sizeof(float));
    char *scratch = ddp__scratch_take(bytes);
    if (!scratch) return ddp__pending();
    double *total = (double *)(void *)scratch;
    float *p = (float *)(void *)(total + 2 * C), *q = p + C, *s = q + C, *scale = s + C;
    const ddp_dtype dt_w = c->out[1]->m.dtype;
    const float *rstd = cpu_f32(c->in[4]), *w = channels(c->in[2], C, 1, scale + C);
    float *dw = cpu_target(dt_w, ddp__ptr(c->out[1]), 0, s + 3 * C);
    float *db = cpu_target(dt_w, ddp__ptr(c->out[2]), 0, s + 4 * C);
    if (n.relu) {
        n.shift = channels(c->in[5], C, 0, s + 5 * C);
        for (int64_t k = 0; k < C; k++) scale[k] = rstd[k] * w[k]; /* as forward had it */
        n.scale = scale;
    }
    int st = cpu_norm_sums(&n, total);
    for (int64_t k = 0; st == 0 && k < C; k++) {
        double wr = rstd[k] * (double)w[k], gx = total[C + k] * rstd[k];
        dw[k] = (float)gx;
        db[k] = (float)total[k];
        p[k] = (float)wr;
        q[k] = training ? (float)(-wr * rstd[k] * gx / (double)n.rows) : 0;
        s[k] = training ? (float)(-wr * total[k] / (double)n.rows) : 0;
    }
    cpu_narrow(dt_w, dw, ddp__ptr(c->out[1]), 0, C);
    cpu_narrow(dt_w, db, ddp__ptr(c->out[2]), 0, C);
    if (n.y) { /* its mask is in what it let pass */
        n.g = n.masked;
        n.y = NULL;
    }
    n.out = ddp__ptr(c->out[0]);
    n.p = p;
    n.q = q;
    n.s = s;
    if (st == 0) cpu_norm_result(&n);
    ddp__scratch_give(scratch, bytes);
    return st;
}
CPU_KERNEL(batch_norm_grad, reject_batch_norm_grad, run_batch_norm_grad);
CPU_KERNEL(batch_norm_act_grad, reject_batch_norm_grad, run_batch_norm_grad);
CPU_KERNEL(batch_norm_add_act_grad, reject_batch_norm_add_act_grad, run_batch_norm_grad);
