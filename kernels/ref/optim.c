/* optim.c -- reference optimizer steps, element by element. */
#include <math.h>

#include "ref.h"

static int run_sgd_step(const ddp_call *c) {
    const ddp_sgd_step_attrs *a = c->attrs;
    int n = c->n_in / 3;
    for (int k = 0; k < n; k++) {
        ddp_tensor *p = c->in[k], *g = c->in[n + k], *buf = c->in[2 * n + k];
        for (int64_t i = 0; i < p->numel; i++) {
            double own = a->by * ref_get(g, i), d = own + a->weight_decay * ref_get(p, i);
            if (a->keep) ref_put(g, i, own);
            if (a->momentum != 0) {
                double b = a->first ? d : a->momentum * ref_get(buf, i) + (1 - a->dampening) * d;
                ref_put(buf, i, b);
                d = a->nesterov ? d + a->momentum * b : b;
            }
            ref_put(p, i, ref_get(p, i) - a->lr * d);
        }
    }
    return 0;
}
DDP_REF_KERNEL(sgd_step, run_sgd_step);

static int run_adam_step(const ddp_call *c) {
    const ddp_adam_step_attrs *a = c->attrs;
    int n = c->n_in / 4;
    double c1 = 1 - pow(a->beta1, (double)a->step), c2 = sqrt(1 - pow(a->beta2, (double)a->step));
    for (int k = 0; k < n; k++) {
        ddp_tensor *p = c->in[k], *gt = c->in[n + k], *mt = c->in[2 * n + k], *vt = c->in[3 * n + k];
        for (int64_t i = 0; i < p->numel; i++) {
            double x = ref_get(p, i), g = a->by * ref_get(gt, i);
            if (a->keep) ref_put(gt, i, g);
            if (a->decoupled) x -= a->lr * a->weight_decay * x;
            else g += a->weight_decay * x;
            double m = a->beta1 * ref_get(mt, i) + (1 - a->beta1) * g,
                   v = a->beta2 * ref_get(vt, i) + (1 - a->beta2) * g * g;
            ref_put(mt, i, m);
            ref_put(vt, i, v);
            ref_put(p, i, x - a->lr / c1 * m / (sqrt(v) / c2 + a->eps));
        }
    }
    return 0;
}
DDP_REF_KERNEL(adam_step, run_adam_step);
