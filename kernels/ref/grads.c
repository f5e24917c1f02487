/* grads.c -- reference unscaling, clipping and norm of gradients, element by element. */
#include <math.h>

#include "ref.h"

static void scale_all(const ddp_call *c, double by) {
    for (int k = 0; k < c->n_in; k++)
        for (int64_t i = 0; i < c->in[k]->numel; i++) ref_put(c->in[k], i, ref_get(c->in[k], i) * by);
}

static bool any_not_finite(const ddp_call *c) {
    bool found = false;
    for (int k = 0; k < c->n_in; k++)
        for (int64_t i = 0; i < c->in[k]->numel; i++) found |= !isfinite(ref_get(c->in[k], i));
    return found;
}

static double sum_of_squares(const ddp_call *c) {
    double sum = 0;
    for (int k = 0; k < c->n_in; k++)
        for (int64_t i = 0; i < c->in[k]->numel; i++) sum += ref_get(c->in[k], i) * ref_get(c->in[k], i);
    return sum;
}

static int run_grad_unscale(const ddp_call *c) {
    const ddp_grad_unscale__attrs *a = c->attrs;
    bool found = any_not_finite(c);
    scale_all(c, a->inv_scale);
    ref_put(c->out[0], 0, found);
    return 0;
}
DDP_REF_KERNEL(grad_unscale_, run_grad_unscale);

static int run_grad_clip(const ddp_call *c) {
    const ddp_grad_clip__attrs *a = c->attrs;
    ref_put(c->out[0], 0, sqrt(sum_of_squares(c)));
    double by = a->max_norm / (ref_get(c->out[0], 0) + 1e-6);
    if (!(by >= 1) && !isinf(a->max_norm)) scale_all(c, by); /* NaN scales too */
    return 0;
}
DDP_REF_KERNEL(grad_clip_, run_grad_clip);

static int run_grad_norm(const ddp_call *c) {
    const ddp_grad_norm_attrs *a = c->attrs;
    ref_put(c->out[0], 0, sqrt(sum_of_squares(c)) * a->inv_scale);
    ref_put(c->out[1], 0, any_not_finite(c));
    return 0;
}
DDP_REF_KERNEL(grad_norm, run_grad_norm);
