/* norm.c -- reference batch normalisation, channel by channel, with relu and a residual too; and layer normalisation, row by row. */
#include <math.h>

#include "ref.h"

/* Logical position of element j of channel ch in [N, C, rest]. */
static int64_t place(const ddp_meta *m, int64_t rest, int64_t ch, int64_t j) {
    return (j / rest * m->size[1] + ch) * rest + j % rest;
}

static int64_t rest_of(const ddp_meta *m) {
    int64_t r = 1;
    for (int d = 2; d < m->ndim; d++) r *= m->size[d];
    return r;
}

static int run_batch_norm(const ddp_call *c) {
    const ddp_batch_norm_attrs *a = c->attrs;
    const ddp_tensor *x = c->in[0], *w = c->in[1], *b = c->in[2];
    int64_t channels = x->m.size[1], rest = rest_of(&x->m), n = channels ? x->numel / channels : 0;
    bool batch = a->training || !c->in[3];
    for (int64_t ch = 0; ch < channels; ch++) {
        double mean = 0, var = 0, rstd;
        if (batch) {
            for (int64_t j = 0; j < n; j++) mean += ref_get(x, place(&x->m, rest, ch, j));
            mean /= (double)n;
            for (int64_t j = 0; j < n; j++) {
                double d = ref_get(x, place(&x->m, rest, ch, j)) - mean;
                var += d * d;
            }
            var /= (double)n;
        } else {
            mean = ref_get(c->in[3], ch);
            var = ref_get(c->in[4], ch);
        }
        rstd = 1 / sqrt(var + a->eps);
        if (a->training && c->in[3]) {
            ref_put(c->in[3], ch, (1 - a->momentum) * ref_get(c->in[3], ch) + a->momentum * mean);
            ref_put(c->in[4], ch,
                    (1 - a->momentum) * ref_get(c->in[4], ch) + a->momentum * var * (double)n / (double)(n - 1));
        }
        ref_put(c->out[1], ch, mean);
        ref_put(c->out[2], ch, rstd);
        double scale = rstd * (w ? ref_get(w, ch) : 1), shift = b ? ref_get(b, ch) : 0;
        for (int64_t j = 0; j < n; j++) {
            int64_t i = place(&x->m, rest, ch, j);
            double y = (ref_get(x, i) - mean) * scale + shift;
            if (c->op->id == DDP_OP_batch_norm_act) {
                if (c->in[5]) y += ref_get(c->in[5], i);
                y = y < 0 ? 0 : y;
            }
            ref_put(c->out[0], i, y);
        }
    }
    return 0;
}
DDP_REF_KERNEL(batch_norm, run_batch_norm);
DDP_REF_KERNEL(batch_norm_act, run_batch_norm);

/* g where relu let x pass. */
static double passed(const ddp_call *c, int64_t ch, int64_t i) {
    double g = ref_get(c->in[0], i);
    if (c->op->id == DDP_OP_batch_norm_add_act_grad) return ref_get(c->in[5], i) > 0 ? g : 0;
    if (c->op->id != DDP_OP_batch_norm_act_grad) return g;
    double scale = ref_get(c->in[4], ch) * (c->in[2] ? ref_get(c->in[2], ch) : 1);
    double z = (ref_get(c->in[1], i) - ref_get(c->in[3], ch)) * scale + (c->in[5] ? ref_get(c->in[5], ch) : 0);
    return z > 0 ? g : 0;
}

static int run_batch_norm_grad(const ddp_call *c) {
    bool training = ((const ddp_batch_norm_grad_attrs *)c->attrs)->training;
    const ddp_tensor *x = c->in[1], *w = c->in[2];
    int64_t channels = x->m.size[1], rest = rest_of(&x->m), n = channels ? x->numel / channels : 0;
    for (int64_t ch = 0; ch < channels; ch++) {
        double mean = ref_get(c->in[3], ch), rstd = ref_get(c->in[4], ch), sum_g = 0, sum_gx = 0;
        for (int64_t j = 0; j < n; j++) {
            int64_t i = place(&x->m, rest, ch, j);
            sum_g += passed(c, ch, i);
            sum_gx += passed(c, ch, i) * (ref_get(x, i) - mean) * rstd;
        }
        double scale = rstd * (w ? ref_get(w, ch) : 1), mg = training ? sum_g / (double)n : 0,
               mgx = training ? sum_gx / (double)n : 0;
        for (int64_t j = 0; j < n; j++) {
            int64_t i = place(&x->m, rest, ch, j);
            ref_put(c->out[0], i, scale * (passed(c, ch, i) - mg - (ref_get(x, i) - mean) * rstd * mgx));
            if (c->op->id == DDP_OP_batch_norm_add_act_grad) ref_put(c->out[3], i, passed(c, ch, i));
        }
        ref_put(c->out[1], ch, sum_gx);
        ref_put(c->out[2], ch, sum_g);
    }
    return 0;
}
DDP_REF_KERNEL(batch_norm_grad, run_batch_norm_grad);
DDP_REF_KERNEL(batch_norm_act_grad, run_batch_norm_grad);
DDP_REF_KERNEL(batch_norm_add_act_grad, run_batch_norm_grad);

/* ---- layer_norm: rows of n elements in logical order ---- */

static int64_t row_length(const ddp_meta *x, int64_t dims) {
    int64_t n = 1;
    for (int d = x->ndim - (int)dims; d < x->ndim; d++) n *= x->size[d];
    return n;
}

static int run_layer_norm(const ddp_call *c) {
    const ddp_layer_norm_attrs *a = c->attrs;
    const ddp_tensor *x = c->in[0], *w = c->in[1], *b = c->in[2];
    int64_t n = row_length(&x->m, a->dims);
    for (int64_t row = 0; row * n < x->numel; row++) {
        double mean = 0, var = 0;
        for (int64_t k = 0; k < n; k++) mean += ref_get(x, row * n + k) / (double)n;
        for (int64_t k = 0; k < n; k++) {
            double d = ref_get(x, row * n + k) - mean;
            var += d * d / (double)n;
        }
        double rstd = 1 / sqrt(var + a->eps);
        ref_put(c->out[1], row, mean);
        ref_put(c->out[2], row, rstd);
        for (int64_t k = 0; k < n; k++)
            ref_put(c->out[0], row * n + k,
                    (ref_get(x, row * n + k) - mean) * rstd * (w ? ref_get(w, k) : 1) + (b ? ref_get(b, k) : 0));
    }
    return 0;
}
DDP_REF_KERNEL(layer_norm, run_layer_norm);

static int run_layer_norm_grad(const ddp_call *c) {
    const ddp_tensor *g = c->in[0], *x = c->in[1], *w = c->in[2];
    int64_t n = row_length(&x->m, ((const ddp_layer_norm_grad_attrs *)c->attrs)->dims);
    double *dw = ref_sums(c, n), *db = ref_sums(c, n);
    if (!dw || !db) {
        free(dw);
        free(db);
        return ddp__pending();
    }
    for (int64_t row = 0; row * n < x->numel; row++) {
        double mean = ref_get(c->in[3], row), rstd = ref_get(c->in[4], row), sum = 0, along = 0;
        for (int64_t k = 0; k < n; k++) {
            double d = ref_get(g, row * n + k), xhat = (ref_get(x, row * n + k) - mean) * rstd;
            dw[k] += d * xhat;
            db[k] += d;
            if (w) d *= ref_get(w, k);
            sum += d / (double)n;
            along += d * xhat / (double)n;
        }
        for (int64_t k = 0; k < n; k++) {
            double d = ref_get(g, row * n + k) * (w ? ref_get(w, k) : 1);
            double xhat = (ref_get(x, row * n + k) - mean) * rstd;
            ref_put(c->out[0], row * n + k, rstd * (d - sum - xhat * along));
        }
    }
    ref_put_sums(c->out[1], dw);
    ref_put_sums(c->out[2], db);
    return 0;
}
DDP_REF_KERNEL(layer_norm_grad, run_layer_norm_grad);
