/* softmax.c -- reference softmax and log softmax along one dim. */
#include <math.h>

#include "ref.h"

static int run(const ddp_call *c, int64_t dim, bool logarithm) {
    const ddp_tensor *x = c->in[0];
    int d = x->m.ndim ? (int)(dim < 0 ? dim + x->m.ndim : dim) : 0;
    int64_t n = x->m.ndim ? x->m.size[d] : 1, inner = 1;
    for (int k = d + 1; k < x->m.ndim; k++) inner *= x->m.size[k];
    int64_t lines = n ? x->numel / n : 0;
    for (int64_t l = 0; l < lines; l++) {
        int64_t first = l / inner * inner * n + l % inner;
        double top = -INFINITY, sum = 0;
        for (int64_t i = 0; i < n; i++) {
            double v = ref_get(x, first + i * inner);
            if (v > top || isnan(v)) top = v;
        }
        for (int64_t i = 0; i < n; i++) sum += exp(ref_get(x, first + i * inner) - top);
        for (int64_t i = 0; i < n; i++) {
            double v = ref_get(x, first + i * inner) - top;
            ref_put(c->out[0], first + i * inner, logarithm ? v - log(sum) : exp(v) / sum);
        }
    }
    return 0;
}

static int run_softmax(const ddp_call *c) { return run(c, ((const ddp_softmax_attrs *)c->attrs)->dim, false); }
DDP_REF_KERNEL(softmax, run_softmax);
static int run_log_softmax(const ddp_call *c) { return run(c, ((const ddp_log_softmax_attrs *)c->attrs)->dim, true); }
DDP_REF_KERNEL(log_softmax, run_log_softmax);

static int run_grad(const ddp_call *c, int64_t dim, bool logarithm) {
    const ddp_tensor *g = c->in[0], *y = c->in[1];
    int d = y->m.ndim ? (int)(dim < 0 ? dim + y->m.ndim : dim) : 0;
    int64_t n = y->m.ndim ? y->m.size[d] : 1, inner = 1;
    for (int k = d + 1; k < y->m.ndim; k++) inner *= y->m.size[k];
    int64_t lines = n ? y->numel / n : 0;
    for (int64_t l = 0; l < lines; l++) {
        int64_t first = l / inner * inner * n + l % inner;
        double sum = 0;
        for (int64_t i = 0; i < n; i++)
            sum += ref_get(g, first + i * inner) * (logarithm ? 1 : ref_get(y, first + i * inner));
        for (int64_t i = 0; i < n; i++) {
            double v = ref_get(y, first + i * inner), of = ref_get(g, first + i * inner);
            ref_put(c->out[0], first + i * inner, logarithm ? of - exp(v) * sum : v * (of - sum));
        }
    }
    return 0;
}

static int run_softmax_grad(const ddp_call *c) {
    return run_grad(c, ((const ddp_softmax_grad_attrs *)c->attrs)->dim, false);
}
DDP_REF_KERNEL(softmax_grad, run_softmax_grad);
static int run_log_softmax_grad(const ddp_call *c) {
    return run_grad(c, ((const ddp_log_softmax_grad_attrs *)c->attrs)->dim, true);
}
DDP_REF_KERNEL(log_softmax_grad, run_log_softmax_grad);
