/* loss.c -- reference cross-entropy over [N, C, rest]. */
#include <math.h>

#include "ref.h"

typedef struct rows { /* [N, C, rest] as N*rest rows of C */
    int64_t classes, rest, n;
} rows;

static rows rows_of(const ddp_tensor *logits) {
    rows r = {logits->m.size[1], 1, 0};
    for (int d = 2; d < logits->m.ndim; d++) r.rest *= logits->m.size[d];
    r.n = logits->m.size[0] * r.rest;
    return r;
}

static int64_t place(const rows *r, int64_t row, int64_t k) {
    return (row / r->rest * r->classes + k) * r->rest + row % r->rest;
}

/* log of the sum of e^x over a row. */
static double log_sum(const ddp_tensor *x, const rows *r, int64_t row) {
    double top = -INFINITY, sum = 0;
    for (int64_t k = 0; k < r->classes; k++) {
        double v = ref_get(x, place(r, row, k));
        if (v > top || isnan(v)) top = v;
    }
    for (int64_t k = 0; k < r->classes; k++) sum += exp(ref_get(x, place(r, row, k)) - top);
    return top + log(sum);
}

static int64_t count_kept(const ddp_tensor *target, int64_t ignore) {
    int64_t n = 0;
    for (int64_t i = 0; i < target->numel; i++) n += (int64_t)ref_get(target, i) != ignore;
    return n;
}

static int run_cross_entropy(const ddp_call *c) {
    const ddp_cross_entropy_attrs *a = c->attrs;
    const ddp_tensor *x = c->in[0], *target = c->in[1];
    rows r = rows_of(x);
    double total = 0, s = a->label_smoothing;
    for (int64_t row = 0; row < r.n; row++) {
        int64_t label = (int64_t)ref_get(target, row);
        double loss = 0;
        if (label != a->ignore_index) {
            double lse = log_sum(x, &r, row), all = 0;
            for (int64_t k = 0; s > 0 && k < r.classes; k++) all += lse - ref_get(x, place(&r, row, k));
            loss = (1 - s) * (lse - ref_get(x, place(&r, row, label))) + (s > 0 ? s * all / (double)r.classes : 0);
        }
        if (a->reduction == 0) ref_put(c->out[0], row, loss);
        total += loss;
    }
    if (a->reduction == 1) total /= (double)count_kept(target, a->ignore_index);
    if (a->reduction != 0) ref_put(c->out[0], 0, total);
    return 0;
}
DDP_REF_KERNEL(cross_entropy, run_cross_entropy);

static int run_cross_entropy_grad(const ddp_call *c) {
    const ddp_cross_entropy_grad_attrs *a = c->attrs;
    const ddp_tensor *g = c->in[0], *x = c->in[1], *target = c->in[2];
    rows r = rows_of(x);
    double s = a->label_smoothing, scale = a->reduction == 1 ? 1 / (double)count_kept(target, a->ignore_index) : 1;
    for (int64_t row = 0; row < r.n; row++) {
        int64_t label = (int64_t)ref_get(target, row);
        bool kept = label != a->ignore_index;
        double lse = kept ? log_sum(x, &r, row) : 0, factor = scale * ref_get(g, a->reduction == 0 ? row : 0);
        for (int64_t k = 0; k < r.classes; k++) {
            double q = (k == label ? 1 - s : 0) + s / (double)r.classes;
            ref_put(c->out[0], place(&r, row, k), kept ? factor * (exp(ref_get(x, place(&r, row, k)) - lse) - q) : 0);
        }
    }
    return 0;
}
DDP_REF_KERNEL(cross_entropy_grad, run_cross_entropy_grad);
