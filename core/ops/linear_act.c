/* linear_act.c -- a linear map with what follows it: activation, residual. */
#include "ops.h"

static bool has_slope_from_pre(int64_t act, bool residual) {
    return act == DDP_ACT_GELU || act == DDP_ACT_GELU_TANH || (act == DDP_ACT_RELU && residual);
}

static int linear_act_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_linear_act_attrs *a = c->attrs;
    int st = ddp__linear_infer(c, &out[0]);
    if (st < 0) return st;
    if (a->act < DDP_ACT_NONE || a->act > DDP_ACT_GELU_TANH)
        return ddp__op_fail(c, DDP_EINVAL, "act is %lld, expected 0 to 3", (long long)a->act);
    if ((st = ddp__need_residual(c, 3, &out[0])) < 0) return st;
    if (!a->save || !has_slope_from_pre(a->act, c->in[3]))
        return ddp__out_shape(c, out[0].dtype, 1, (int64_t[]){0}, &out[1]);
    out[1] = out[0];
    return 0;
}

static double linear_act_flops(const ddp_call *c) {
    return 2.0 * (double)c->out[0]->numel * (double)c->in[1]->m.size[1];
}

static unsigned linear_act_saves(const ddp_call *c) {
    const ddp_linear_act_attrs *a = c->attrs;
    unsigned products = DDP_SAVE_IN(0) | DDP_SAVE_IN(1);
    if (a->act == DDP_ACT_NONE) return products;
    if (!has_slope_from_pre(a->act, c->in[3])) return products | DDP_SAVE_OUT(0);
    return products | (a->save ? DDP_SAVE_OUT(1) : DDP_SAVE_IN(2));
}

/* [..., n] as [rows, n]. */
static ddp_tensor *as_rows(ddp_tensor *t) {
    return ddp_ndim(t) == 2 ? t : ddp__reshape(t, 2, (int64_t[]){-1, ddp_size(t, -1)});
}

/* The gradient of x w^T + bias, and of bias where it came along. Nothing where none flows. */
static int gradient_of_sums(ddp_vjp *v, ddp_tensor **dz, ddp_tensor **dbias) {
    const ddp_linear_act_attrs *a = v->attrs;
    ddp_tensor *g = v->grad_out[0], *g_pre = v->out_meta[1].ndim == v->out_meta[0].ndim ? v->grad_out[1] : NULL;
    *dz = g;
    if (g && a->act != DDP_ACT_NONE) {
        ddp_tensor *from = v->out[0];
        if (has_slope_from_pre(a->act, v->in_meta[3].ndim >= 0))
            from = a->save ? v->out[1] : ddp_linear(v->in[0], v->in[1], v->in[2]);
        if (ddp_linear_act_grad(g, from, a->act, dz, dbias) < 0) return ddp__pending();
    }
    if (!g_pre || v->out_meta[1].size[0] != v->out_meta[0].size[0]) return 0;
    *dz = *dz ? ddp_add(*dz, g_pre) : g_pre;
    *dbias = NULL;
    return ddp__pending();
}

static int linear_act_vjp(ddp_vjp *v) {
    ddp_tensor *dz = NULL, *dbias = NULL;
    if (v->needs[3]) v->grad_in[3] = v->grad_out[0];
    int st = gradient_of_sums(v, &dz, &dbias);
    if (st < 0 || !dz) return st;
    if (v->needs[0]) v->grad_in[0] = ddp_matmul(dz, v->in[1]);
    if (v->needs[1]) v->grad_in[1] = ddp_matmul(ddp_transpose(as_rows(dz), 0, 1), as_rows(v->in[0]));
    if (v->needs[2]) v->grad_in[2] = dbias ? dbias : ddp_sum(as_rows(dz), 1, (int64_t[]){0}, 0);
    return ddp__pending();
}

static int linear_act_grad_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_linear_act_grad_attrs *a = c->attrs;
    const ddp_meta *g = &c->in[0]->m;
    int st = ddp__need_float(c, 0);
    if (st < 0) return st;
    if (!ddp__meta_same_size(g, &c->in[1]->m) || g->ndim == 0)
        return ddp__op_fail(c, DDP_ESHAPE, "g is %s, from %s: expected two of [..., N]", DDP_SHAPE_TEXT(g),
                            DDP_SHAPE_TEXT(&c->in[1]->m));
    if ((st = ddp__need_dtype(c, 1, g->dtype)) < 0) return st;
    if (a->act < DDP_ACT_RELU || a->act > DDP_ACT_GELU_TANH)
        return ddp__op_fail(c, DDP_EINVAL, "act is %lld, expected 1 to 3", (long long)a->act);
    if ((st = ddp__out_shape(c, g->dtype, g->ndim, g->size, &out[0])) < 0) return st;
    return ddp__out_shape(c, g->dtype, 1, &g->size[g->ndim - 1], &out[1]);
}

static int linear_act_grad_chain(ddp_vjp *v, ddp_tensor *const *in, ddp_tensor **out) {
    int64_t act = ((const ddp_linear_act_grad_attrs *)v->attrs)->act;
    out[0] = act == DDP_ACT_RELU ? ddp_relu_grad(in[0], in[1]) : ddp_gelu_grad(in[0], in[1], act == DDP_ACT_GELU_TANH);
    if (out[0]) out[1] = ddp_sum(as_rows(out[0]), 1, (int64_t[]){0}, 0);
    return ddp__pending();
}
static int linear_act_grad_vjp(ddp_vjp *v) { return ddp__vjp_by_chain(v, linear_act_grad_chain); }

const ddp_op_rules ddp__linear_act_rules = {
    .infer = linear_act_infer, .vjp = linear_act_vjp, .saves_of = linear_act_saves, .flops = linear_act_flops};
const ddp_op_rules ddp__linear_act_grad_rules = {
    .infer = linear_act_grad_infer, .vjp = linear_act_grad_vjp, .saves = DDP_SAVE_IN(0) | DDP_SAVE_IN(1)};
