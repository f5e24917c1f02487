/* loss.c -- cross-entropy against class numbers. */
#include "ops.h"

enum { NONE, MEAN, SUM };

/* Every label in 0 .. classes-1 or ignore. Only the cpu has them at hand: on a GPU the kernel sees them, and the host's next wait
 * raises what it saw. */
static int check_labels(const ddp_call *c, const ddp_tensor *target, int64_t classes, int64_t ignore) {
    int64_t idx[DDP_MAX_DIM] = {0}, at = 0;
    if (target->m.device != DDP_CPU) return 0;
    const int64_t *p = (const int64_t *)(const void *)ddp__ptr(target);
    for (int64_t i = 0; i < target->numel; i++) {
        int64_t label = p[at];
        if ((label < 0 || label >= classes) && label != ignore)
            return ddp__op_fail(c, DDP_EINVAL, "label %lld at position %lld of target, expected 0 to %lld",
                                (long long)label, (long long)i, (long long)classes - 1);
        for (int d = target->m.ndim - 1; d >= 0; d--) {
            at += target->m.stride[d];
            if (++idx[d] < target->m.size[d]) break;
            at -= target->m.stride[d] * target->m.size[d];
            idx[d] = 0;
        }
    }
    return 0;
}

static int check(const ddp_call *c, const ddp_tensor *logits, const ddp_tensor *target,
                 const ddp_cross_entropy_attrs *a) {
    const ddp_meta *l = &logits->m, *t = &target->m;
    if (!ddp__is_float(l->dtype))
        return ddp__op_fail(c, DDP_EDTYPE, "logits are %s, expected a floating dtype", ddp_dtype_name(l->dtype));
    if (t->dtype != DDP_I64)
        return ddp__op_fail(c, DDP_EDTYPE, "target is %s, expected i64 class numbers", ddp_dtype_name(t->dtype));
    if (a->reduction < NONE || a->reduction > SUM)
        return ddp__op_fail(c, DDP_EINVAL, "reduction %lld, expected 0 (none), 1 (mean) or 2 (sum)",
                            (long long)a->reduction);
    if (!(a->label_smoothing >= 0 && a->label_smoothing <= 1))
        return ddp__op_fail(c, DDP_EINVAL, "label_smoothing %g, expected 0 to 1", a->label_smoothing);
    bool fits = l->ndim >= 2 && t->ndim == l->ndim - 1;
    for (int d = 0; fits && d < t->ndim; d++) fits = t->size[d] == l->size[d ? d + 1 : 0];
    if (!fits)
        return ddp__op_fail(c, DDP_ESHAPE, "target is %s, logits %s: expected logits [N, C, ...] and target [N, ...]",
                            DDP_SHAPE_TEXT(t), DDP_SHAPE_TEXT(l));
    return check_labels(c, target, l->size[1], a->ignore_index);
}

static int cross_entropy_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_cross_entropy_attrs *a = c->attrs;
    int st = check(c, c->in[0], c->in[1], a);
    if (st < 0) return st;
    return ddp__out_shape(c, c->in[0]->m.dtype, a->reduction == NONE ? c->in[1]->m.ndim : 0, c->in[1]->m.size, out);
}

static int cross_entropy_vjp(ddp_vjp *v) {
    const ddp_cross_entropy_attrs *a = v->attrs;
    if (v->needs[0])
        v->grad_in[0] = ddp_cross_entropy_grad(v->grad_out[0], v->in[0], v->in[1], a->reduction, a->ignore_index,
                                               a->label_smoothing);
    return ddp__pending();
}

_Static_assert(sizeof(ddp_cross_entropy_attrs) == sizeof(ddp_cross_entropy_grad_attrs),
               "the gradient has the loss's attributes");

static int cross_entropy_grad_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_cross_entropy_attrs *a = c->attrs;
    int st = check(c, c->in[1], c->in[2], a);
    if (st < 0) return st;
    if (c->in[0]->m.ndim != (a->reduction == NONE ? c->in[2]->m.ndim : 0))
        return ddp__op_fail(c, DDP_ESHAPE, "g is %s, expected the loss's shape", DDP_SHAPE_TEXT(&c->in[0]->m));
    return ddp__out_like(c, 1, c->in[1]->m.dtype, out);
}

/* dlogits = g (softmax(logits) - q) where not ignored, q = (1 - s) onehot + s/C; for the mean over the count of those.
 * 16-bit logits and g go through f32. */
static int cross_entropy_grad_chain(ddp_vjp *v, ddp_tensor *const *in, ddp_tensor **out) {
    const ddp_cross_entropy_grad_attrs *a = v->attrs;
    const ddp_meta *l = &v->in_meta[1];
    int dtype = (int)ddp__wide(l->dtype);
    ddp_tensor *classes = ddp_arange(0, (double)l->size[1], 1, DDP_I64, l->device);
    int64_t shape[DDP_MAX_DIM], target_shape[DDP_MAX_DIM];
    for (int d = 0; d < l->ndim; d++) {
        shape[d] = d == 1 ? l->size[1] : 1;
        target_shape[d] = d == 1 ? 1 : l->size[d];
    }
    ddp_tensor *target = ddp__reshape(in[2], l->ndim, target_shape);
    ddp_tensor *onehot = ddp_cast(ddp_eq(target, ddp_view(classes, l->ndim, shape)), dtype);
    ddp_tensor *q = ddp_add(ddp_mul(onehot, ddp_scalar_float(1 - a->label_smoothing)),
                            ddp_scalar_float(a->label_smoothing / (double)l->size[1]));
    ddp_tensor *kept = ddp_cast(ddp_ne(target, ddp_scalar((double)a->ignore_index)), dtype);
    ddp_tensor *g = ddp__widened(in[0]);
    if (a->reduction == NONE) g = ddp__reshape(g, l->ndim, target_shape);
    if (a->reduction == MEAN) g = ddp_div(g, ddp_sum(kept, -1, NULL, 0));
    ddp_tensor *d = ddp_sub(ddp_softmax(ddp__widened(in[1]), 1), q);
    out[0] = ddp__narrowed(ddp_mul(ddp_mul(d, kept), g), l->dtype);
    return ddp__pending();
}

static int cross_entropy_grad_vjp(ddp_vjp *v) { return ddp__vjp_by_chain(v, cross_entropy_grad_chain); }

static double loss_flops(const ddp_call *c) { return 8.0 * (double)c->in[c->n_in - 2]->numel; }

#define IN DDP_SAVE_IN
const ddp_op_rules ddp__cross_entropy_rules = {
    .infer = cross_entropy_infer, .vjp = cross_entropy_vjp, .saves = IN(0) | IN(1), .flops = loss_flops};
const ddp_op_rules ddp__cross_entropy_grad_rules = {.infer = cross_entropy_grad_infer,
                                                    .vjp = cross_entropy_grad_vjp,
                                                    .saves = IN(0) | IN(1) | IN(2),
                                                    .flops = loss_flops};
