/* grads.c -- reference unscaling and clipping of gradients, element by element. */
#include <math.h>

#include "ref.h"

static void scale_all(const ddp_call *c, double by) {
    for (int k = 0; k < c->n_in; k++)
        for (int64_t i = 0; i < c->in[k]->numel; i++) ref_put(c->in[k], i, ref_get(c->in[k], i) * by);
}

static int run_grad_unscale(const ddp_call *c) {
    const ddp_grad_unscale__attrs *a = c->attrs;
    bool found = false;
    for (int k = 0; k < c->n_in; k++)
        for (int64_t i = 0; i < c->in[k]->numel; i++) found |= !isfinite(ref_get(c->in[k], i));
    scale_all(c, a->inv_scale);
    ref_put(c->out[0], 0, found);
    return 0;
}
DDP_REF_KERNEL(grad_unscale_, run_grad_unscale);

static int run_grad_clip(const ddp_call *c) {
    const ddp_grad_clip__attrs *a = c->attrs;
    double sum = 0;
    for (int k = 0; k < c->n_in; k++)
        for (int64_t i = 0; i < c->in[k]->numel; i++) sum += ref_get(c->in[k], i) * ref_get(c->in[k], i);
    ref_put(c->out[0], 0, sqrt(sum));
    double by = a->max_norm / (ref_get(c->out[0], 0) + 1e-6);
    if (!(by >= 1) && !isinf(a->max_norm)) scale_all(c, by); /* NaN scales too */
    return 0;
}
DDP_REF_KERNEL(grad_clip_, run_grad_clip);
