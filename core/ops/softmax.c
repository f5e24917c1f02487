/* softmax.c -- softmax and its logarithm along one dim, and their gradients. */
#include "ops.h"

static int softmax_infer(const ddp_call *c, ddp_meta *out) {
    ddp_dtype d = c->in[0]->m.dtype;
    int st = ddp__need_float(c, 0);
    if (st < 0) return st;
    if (ddp__wrap_dim(c, ((const ddp_softmax_attrs *)c->attrs)->dim, c->in[0]->m.ndim) < 0) return ddp__pending();
    return ddp__out_like(c, 0, d, out);
}

_Static_assert(sizeof(ddp_softmax_attrs) == sizeof(ddp_softmax_grad_attrs) &&
                   sizeof(ddp_log_softmax_attrs) == sizeof(ddp_log_softmax_grad_attrs),
               "the gradients have the attributes of their ops");

static int softmax_grad_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_meta *g = &c->in[0]->m, *y = &c->in[1]->m;
    int st = ddp__need_float(c, 0);
    if (st < 0) return st;
    if (!ddp__meta_same_size(g, y))
        return ddp__op_fail(c, DDP_ESHAPE, "g is %s, y %s", DDP_SHAPE_TEXT(g), DDP_SHAPE_TEXT(y));
    if ((st = ddp__need_dtype(c, 1, g->dtype)) < 0) return st;
    if (ddp__wrap_dim(c, ((const ddp_softmax_grad_attrs *)c->attrs)->dim, g->ndim) < 0) return ddp__pending();
    return ddp__out_like(c, 1, g->dtype, out);
}

/* y (g - sum(g y)) */
static int softmax_grad_chain(ddp_vjp *v, ddp_tensor *const *in, ddp_tensor **out) {
    const ddp_softmax_grad_attrs *a = v->attrs;
    ddp_tensor *g = ddp__widened(in[0]), *y = ddp__widened(in[1]), *gy = ddp_mul(g, y);
    out[0] = ddp__narrowed(ddp_sub(gy, ddp_mul(y, ddp_sum(gy, 1, &a->dim, 1))), v->in_meta[0].dtype);
    return ddp__pending();
}
/* g - e^y sum(g) */
static int log_softmax_grad_chain(ddp_vjp *v, ddp_tensor *const *in, ddp_tensor **out) {
    const ddp_log_softmax_grad_attrs *a = v->attrs;
    ddp_tensor *g = ddp__widened(in[0]), *y = ddp__widened(in[1]);
    out[0] = ddp__narrowed(ddp_sub(g, ddp_mul(ddp_exp(y), ddp_sum(g, 1, &a->dim, 1))), v->in_meta[0].dtype);
    return ddp__pending();
}
static int softmax_grad_vjp(ddp_vjp *v) { return ddp__vjp_by_chain(v, softmax_grad_chain); }
static int log_softmax_grad_vjp(ddp_vjp *v) { return ddp__vjp_by_chain(v, log_softmax_grad_chain); }

/* The gradient in one pass: on a GPU always; the cpu has it for rows along the last dim, of other layouts the simple ops are
 * faster there. */
static bool in_one_pass(const ddp_tensor *y, int64_t dim) {
    return y->m.device != DDP_CPU || (ddp__meta_is_rowmajor(&y->m) && (dim == -1 || dim == y->m.ndim - 1));
}
static ddp_tensor *rows_of(ddp_tensor *g) {
    return g->m.device != DDP_CPU || ddp__meta_is_rowmajor(&g->m) ? g : ddp_clone(g, 0);
}
static int softmax_vjp(ddp_vjp *v) {
    const ddp_softmax_attrs *a = v->attrs;
    ddp_tensor *in[2] = {v->grad_out[0], v->out[0]};
    if (!in_one_pass(in[1], a->dim)) return softmax_grad_chain(v, in, v->grad_in);
    v->grad_in[0] = ddp_softmax_grad(rows_of(in[0]), in[1], (int)a->dim);
    return ddp__pending();
}
static int log_softmax_vjp(ddp_vjp *v) {
    const ddp_log_softmax_attrs *a = v->attrs;
    ddp_tensor *in[2] = {v->grad_out[0], v->out[0]};
    if (!in_one_pass(in[1], a->dim)) return log_softmax_grad_chain(v, in, v->grad_in);
    v->grad_in[0] = ddp_log_softmax_grad(rows_of(in[0]), in[1], (int)a->dim);
    return ddp__pending();
}

static double softmax_flops(const ddp_call *c) { return 5.0 * (double)c->in[0]->numel; }

const ddp_op_rules ddp__softmax_rules = {
    .infer = softmax_infer, .vjp = softmax_vjp, .saves = DDP_SAVE_OUT(0), .flops = softmax_flops};
const ddp_op_rules ddp__log_softmax_rules = {
    .infer = softmax_infer, .vjp = log_softmax_vjp, .saves = DDP_SAVE_OUT(0), .flops = softmax_flops};
#define BOTH_IN (DDP_SAVE_IN(0) | DDP_SAVE_IN(1))
const ddp_op_rules ddp__softmax_grad_rules = {
    .infer = softmax_grad_infer, .vjp = softmax_grad_vjp, .saves = BOTH_IN, .flops = softmax_flops};
const ddp_op_rules ddp__log_softmax_grad_rules = {
    .infer = softmax_grad_infer, .vjp = log_softmax_grad_vjp, .saves = BOTH_IN, .flops = softmax_flops};
