/* softmax.c -- softmax and its logarithm along one dim. */
#include "ops.h"

static int softmax_infer(const ddp_call *c, ddp_meta *out) {
    ddp_dtype d = c->in[0]->m.dtype;
    int st = ddp__need_float(c, 0);
    if (st < 0) return st;
    if (d != DDP_F32 && d != DDP_F64)
        return ddp__op_fail(c, DDP_EDTYPE, "not defined for %s yet; cast to f32", ddp_dtype_name(d));
    if (ddp__wrap_dim(c, ((const ddp_softmax_attrs *)c->attrs)->dim, c->in[0]->m.ndim) < 0) return ddp__pending();
    return ddp__out_like(c, 0, d, out);
}

static int softmax_vjp(ddp_vjp *v) { /* y (g - sum(g y)) */
    const ddp_softmax_attrs *a = v->attrs;
    ddp_tensor *gy = ddp_mul(v->grad_out[0], v->out[0]);
    v->grad_in[0] = ddp_sub(gy, ddp_mul(v->out[0], ddp_sum(gy, 1, &a->dim, 1)));
    return ddp__pending();
}

static int log_softmax_vjp(ddp_vjp *v) { /* g - e^y sum(g) */
    const ddp_log_softmax_attrs *a = v->attrs;
    ddp_tensor *g = v->grad_out[0];
    v->grad_in[0] = ddp_sub(g, ddp_mul(ddp_exp(v->out[0]), ddp_sum(g, 1, &a->dim, 1)));
    return ddp__pending();
}

static double softmax_flops(const ddp_call *c) { return 5.0 * (double)c->in[0]->numel; }

const ddp_op_rules ddp__softmax_rules = {
    .infer = softmax_infer, .vjp = softmax_vjp, .saves = DDP_SAVE_OUT(0), .flops = softmax_flops};
const ddp_op_rules ddp__log_softmax_rules = {
    .infer = softmax_infer, .vjp = log_softmax_vjp, .saves = DDP_SAVE_OUT(0), .flops = softmax_flops};
