/* softmax.c -- softmax and its logarithm along one dim. */
#include "ops.h"

static int softmax_infer(const ddp_call *c, ddp_meta *out) {
    ddp_dtype d = c->in[0]->m.dtype;
    int st = ddp__need_float(c, 0);
    if (st < 0) return st;
    if (ddp__wrap_dim(c, ((const ddp_softmax_attrs *)c->attrs)->dim, c->in[0]->m.ndim) < 0) return ddp__pending();
    return ddp__out_like(c, 0, d, out);
}

static int softmax_vjp(ddp_vjp *v) { /* y (g - sum(g y)) */
    const ddp_softmax_attrs *a = v->attrs;
    ddp_tensor *y = ddp__widened(v->out[0]), *gy = ddp_mul(ddp__widened(v->grad_out[0]), y);
    v->grad_in[0] = ddp__narrowed(ddp_sub(gy, ddp_mul(y, ddp_sum(gy, 1, &a->dim, 1))), v->in_meta[0].dtype);
    return ddp__pending();
}

static int log_softmax_vjp(ddp_vjp *v) { /* g - e^y sum(g) */
    const ddp_log_softmax_attrs *a = v->attrs;
    ddp_tensor *g = ddp__widened(v->grad_out[0]), *y = ddp__widened(v->out[0]);
    v->grad_in[0] = ddp__narrowed(ddp_sub(g, ddp_mul(ddp_exp(y), ddp_sum(g, 1, &a->dim, 1))), v->in_meta[0].dtype);
    return ddp__pending();
}

static double softmax_flops(const ddp_call *c) { return 5.0 * (double)c->in[0]->numel; }

const ddp_op_rules ddp__softmax_rules = {
    .infer = softmax_infer, .vjp = softmax_vjp, .saves = DDP_SAVE_OUT(0), .flops = softmax_flops};
const ddp_op_rules ddp__log_softmax_rules = {
    .infer = softmax_infer, .vjp = log_softmax_vjp, .saves = DDP_SAVE_OUT(0), .flops = softmax_flops};
