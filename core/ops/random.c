/* random.c -- random fills and dropout. What is drawn: kernels/random.h. */
#include "ops.h"

static int need_float(const ddp_call *c, int64_t dtype) {
    if (dtype >= 0 && dtype < DDP_DTYPES && ddp__is_float((ddp_dtype)dtype)) return 0;
    return ddp__op_fail(c, DDP_EDTYPE, "draws floating dtypes, not %s", ddp_dtype_name((int)dtype));
}

static int rand_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_rand_attrs *a = c->attrs;
    int st = need_float(c, a->dtype);
    return st < 0 ? st : ddp__new_tensor(c, a->dtype, a->device, (int)(a->size.n < 0 ? 0 : a->size.n), a->size.v, out);
}

static int randint_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_randint_attrs *a = c->attrs;
    if (a->lo >= a->hi)
        return ddp__op_fail(c, DDP_EINVAL, "lo %lld is not below hi %lld", (long long)a->lo, (long long)a->hi);
    return ddp__new_tensor(c, a->dtype, a->device, (int)(a->size.n < 0 ? 0 : a->size.n), a->size.v, out);
}

static int randperm_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_randperm_attrs *a = c->attrs;
    return ddp__new_tensor(c, DDP_I64, a->device, 1, &a->n, out);
}

static int fill_infer(const ddp_call *c, ddp_meta *out) {
    int st = need_float(c, c->in[0]->m.dtype);
    *out = c->in[0]->m;
    return st;
}

static int bernoulli_infer(const ddp_call *c, ddp_meta *out) {
    double p = ((const ddp_bernoulli__attrs *)c->attrs)->p;
    if (!(p >= 0 && p <= 1)) return ddp__op_fail(c, DDP_EINVAL, "p is %g, expected 0 to 1", p);
    *out = c->in[0]->m;
    return 0;
}

static int dropout_infer(const ddp_call *c, ddp_meta *out) {
    double p = ((const ddp_dropout_attrs *)c->attrs)->p;
    if (!(p >= 0 && p < 1)) return ddp__op_fail(c, DDP_EINVAL, "p is %g, expected 0 <= p < 1", p);
    int st = need_float(c, c->in[0]->m.dtype);
    if (st < 0 || (st = ddp__out_like(c, 0, c->in[0]->m.dtype, &out[0])) < 0) return st;
    return ddp__out_like(c, 0, DDP_BOOL, &out[1]);
}

static int dropout_vjp(ddp_vjp *v) {
    double p = ((const ddp_dropout_attrs *)v->attrs)->p;
    if (v->grad_out[0]) v->grad_in[0] = ddp_dropout_grad(v->grad_out[0], v->out[1], p);
    return ddp__pending();
}

static int dropout_grad_infer(const ddp_call *c, ddp_meta *out) {
    double p = ((const ddp_dropout_grad_attrs *)c->attrs)->p;
    const ddp_meta *g = &c->in[0]->m, *mask = &c->in[1]->m;
    if (!(p >= 0 && p < 1)) return ddp__op_fail(c, DDP_EINVAL, "p is %g, expected 0 <= p < 1", p);
    int st = ddp__need_float(c, 0);
    if (st < 0 || (st = ddp__need_dtype(c, 1, DDP_BOOL)) < 0) return st;
    if (!ddp__meta_same_size(g, mask))
        return ddp__op_fail(c, DDP_ESHAPE, "g is %s, mask %s", DDP_SHAPE_TEXT(g), DDP_SHAPE_TEXT(mask));
    return ddp__out_like(c, 0, g->dtype, out);
}

static int dropout_grad_vjp(ddp_vjp *v) {
    double p = ((const ddp_dropout_grad_attrs *)v->attrs)->p;
    if (v->needs[0]) v->grad_in[0] = ddp_dropout_grad(v->grad_out[0], v->in[1], p);
    return ddp__pending();
}

const ddp_op_rules ddp__rand_rules = {.infer = rand_infer};
const ddp_op_rules ddp__randn_rules = {.infer = rand_infer};
const ddp_op_rules ddp__randint_rules = {.infer = randint_infer};
const ddp_op_rules ddp__randperm_rules = {.infer = randperm_infer};
const ddp_op_rules ddp__uniform__rules = {.infer = fill_infer};
const ddp_op_rules ddp__normal__rules = {.infer = fill_infer};
const ddp_op_rules ddp__bernoulli__rules = {.infer = bernoulli_infer};
const ddp_op_rules ddp__dropout_rules = {.infer = dropout_infer, .vjp = dropout_vjp, .saves = DDP_SAVE_OUT(1)};
const ddp_op_rules ddp__dropout_grad_rules = {
    .infer = dropout_grad_infer, .vjp = dropout_grad_vjp, .saves = DDP_SAVE_IN(1)};
