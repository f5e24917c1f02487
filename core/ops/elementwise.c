/* elementwise.c -- arithmetic, comparison and scalar functions: shapes, dtypes, gradients. */
#include <math.h>

#include "ops.h"

/* ---- inference ---- */

/* Beside a 16-bit tensor a number is f32: the tensor says what the result is. */
static int infer_binary(const ddp_call *c, ddp_meta *out) {
    ddp_dtype a = c->in[0]->m.dtype, b = c->in[1]->m.dtype;
    return ddp__out_broadcast(c, 2, ddp__is_half(b) ? b : a, out);
}

static int infer_number(const ddp_call *c, ddp_meta *out) { /* no arithmetic on bools */
    if (c->in[0]->m.dtype == DDP_BOOL)
        return ddp__op_fail(c, DDP_EDTYPE, "not defined for bool; cast to another dtype");
    return infer_binary(c, out);
}
static int infer_compare(const ddp_call *c, ddp_meta *out) { return ddp__out_broadcast(c, 2, DDP_BOOL, out); }
static int infer_unary(const ddp_call *c, ddp_meta *out) { return ddp__out_like(c, 0, c->in[0]->m.dtype, out); }
static int infer_unary_number(const ddp_call *c, ddp_meta *out) {
    if (c->in[0]->m.dtype == DDP_BOOL)
        return ddp__op_fail(c, DDP_EDTYPE, "not defined for bool; cast to another dtype");
    return infer_unary(c, out);
}

/* ---- gradients: g reduced to the shape of input i where it was broadcast ---- */

static void give(ddp_vjp *v, int i, ddp_tensor *g) { v->grad_in[i] = ddp__sum_to(g, &v->in_meta[i]); }

static int add_vjp(ddp_vjp *v) {
    for (int i = 0; i < 2; i++)
        if (v->needs[i]) give(v, i, v->grad_out[0]);
    return ddp__pending();
}

static int sub_vjp(ddp_vjp *v) {
    if (v->needs[0]) give(v, 0, v->grad_out[0]);
    if (v->needs[1]) give(v, 1, ddp_neg(v->grad_out[0]));
    return ddp__pending();
}

static int mul_vjp(ddp_vjp *v) {
    if (v->needs[0]) give(v, 0, ddp_mul(v->grad_out[0], v->in[1]));
    if (v->needs[1]) give(v, 1, ddp_mul(v->grad_out[0], v->in[0]));
    return ddp__pending();
}

static int div_vjp(ddp_vjp *v) { /* d(a/b) = da/b - a/b^2 db */
    ddp_tensor *g = v->grad_out[0], *a = v->in[0], *b = v->in[1];
    if (v->needs[0]) give(v, 0, ddp_div(g, b));
    if (v->needs[1]) give(v, 1, ddp_neg(ddp_mul(g, ddp_div(ddp_div(a, b), b))));
    return ddp__pending();
}

static int pow_vjp(ddp_vjp *v) { /* d(a^b) = b a^(b-1) da + a^b log(a) db; b = 0 gives no 0 * inf at a = 0 */
    ddp_tensor *g = v->grad_out[0], *a = v->in[0], *b = v->in[1];
    if (v->needs[0]) {
        ddp_tensor *d = ddp_mul(b, ddp_pow(a, ddp_sub(b, ddp_scalar(1))));
        give(v, 0, ddp_mul(g, ddp_where(ddp_eq(b, ddp_scalar(0)), ddp_scalar(0), d)));
    }
    if (v->needs[1]) {
        ddp_tensor *d = ddp_mul(ddp_pow(a, b), ddp_log(a));
        give(v, 1, ddp_mul(g, ddp_where(ddp_gt(a, ddp_scalar(0)), d, ddp_scalar(0))));
    }
    return ddp__pending();
}

static int extreme_vjp(ddp_vjp *v, bool max) { /* the winner takes it; equal ones half each */
    ddp_tensor *g = v->grad_out[0], *a = v->in[0], *b = v->in[1];
    ddp_tensor *half = ddp_mul(ddp_cast(ddp_eq(a, b), (int)g->m.dtype), ddp_scalar_float(.5));
    ddp_tensor *wins = ddp_cast(max ? ddp_gt(a, b) : ddp_lt(a, b), g ? (int)g->m.dtype : 0);
    ddp_tensor *loses = ddp_cast(max ? ddp_lt(a, b) : ddp_gt(a, b), g ? (int)g->m.dtype : 0);
    if (v->needs[0]) give(v, 0, ddp_mul(g, ddp_add(wins, half)));
    if (v->needs[1]) give(v, 1, ddp_mul(g, ddp_add(loses, half)));
    return ddp__pending();
}
static int maximum_vjp(ddp_vjp *v) { return extreme_vjp(v, true); }
static int minimum_vjp(ddp_vjp *v) { return extreme_vjp(v, false); }

static int neg_vjp(ddp_vjp *v) {
    v->grad_in[0] = ddp_neg(v->grad_out[0]);
    return ddp__pending();
}
static int abs_vjp(ddp_vjp *v) {
    v->grad_in[0] = ddp_mul(v->grad_out[0], ddp_sign(v->in[0]));
    return ddp__pending();
}
static int sign_vjp(ddp_vjp *v) {
    v->grad_in[0] = ddp_mul(v->grad_out[0], ddp_scalar(0));
    return ddp__pending();
}
static int exp_vjp(ddp_vjp *v) {
    v->grad_in[0] = ddp_mul(v->grad_out[0], v->out[0]);
    return ddp__pending();
}
static int log_vjp(ddp_vjp *v) {
    v->grad_in[0] = ddp_div(v->grad_out[0], v->in[0]);
    return ddp__pending();
}
static int sqrt_vjp(ddp_vjp *v) { /* g / (2 sqrt x) */
    v->grad_in[0] = ddp_div(ddp_mul(v->grad_out[0], ddp_scalar_float(.5)), v->out[0]);
    return ddp__pending();
}
static int tanh_vjp(ddp_vjp *v) { /* g (1 - y)(1 + y): 1 - y^2 would cancel */
    ddp_tensor *y = v->out[0], *d = ddp_mul(ddp_sub(ddp_scalar(1), y), ddp_add(y, ddp_scalar(1)));
    v->grad_in[0] = ddp_mul(v->grad_out[0], d);
    return ddp__pending();
}
static int sigmoid_vjp(ddp_vjp *v) { /* g y (1 - y) */
    ddp_tensor *y = v->out[0];
    v->grad_in[0] = ddp_mul(v->grad_out[0], ddp_mul(y, ddp_sub(ddp_scalar(1), y)));
    return ddp__pending();
}
static int relu_vjp(ddp_vjp *v) {
    v->grad_in[0] = ddp_relu_grad(v->grad_out[0], v->out[0]);
    return ddp__pending();
}

static int relu_grad_infer(const ddp_call *c, ddp_meta *out) {
    if (!ddp__meta_same_size(&c->in[0]->m, &c->in[1]->m))
        return ddp__op_fail(c, DDP_ESHAPE, "g is %s, y %s", DDP_SHAPE_TEXT(&c->in[0]->m), DDP_SHAPE_TEXT(&c->in[1]->m));
    if (c->in[0]->m.dtype != c->in[1]->m.dtype) return ddp__op_fail(c, DDP_EDTYPE, "g and y differ");
    return infer_binary(c, out);
}
static int relu_grad_vjp(ddp_vjp *v) {
    if (v->needs[0]) v->grad_in[0] = ddp_relu_grad(v->grad_out[0], v->in[1]);
    return ddp__pending();
}

static int gelu_vjp(ddp_vjp *v) {
    v->grad_in[0] = ddp_gelu_grad(v->grad_out[0], v->in[0], (int)((const ddp_gelu_attrs *)v->attrs)->tanh);
    return ddp__pending();
}
static int gelu_grad_infer(const ddp_call *c, ddp_meta *out) {
    int st = ddp__need_float(c, 0);
    if (st < 0) return st;
    if (!ddp__meta_same_size(&c->in[0]->m, &c->in[1]->m))
        return ddp__op_fail(c, DDP_ESHAPE, "g is %s, x %s", DDP_SHAPE_TEXT(&c->in[0]->m), DDP_SHAPE_TEXT(&c->in[1]->m));
    st = ddp__need_dtype(c, 1, c->in[0]->m.dtype);
    return st < 0 ? st : infer_binary(c, out);
}
/* The slope with tanh: (1 + t)/2 + x/2 (1 - t^2) u' where t = tanh(u), u = k (x + c x^3). */
static int gelu_grad_chain(ddp_vjp *v, ddp_tensor *const *in, ddp_tensor **out) {
    const double k = 0.79788456080286535588, c = 0.044715;
    ddp_tensor *g = ddp__widened(in[0]), *x = ddp__widened(in[1]), *one = ddp_scalar(1), *half = ddp_scalar_float(.5);
    ddp_tensor *square = ddp_mul(x, x), *cubic = ddp_add(ddp_mul(square, ddp_scalar_float(c)), one);
    ddp_tensor *t = ddp_tanh(ddp_mul(ddp_mul(x, cubic), ddp_scalar_float(k)));
    ddp_tensor *du = ddp_mul(ddp_add(ddp_mul(square, ddp_scalar_float(3 * c)), one), ddp_scalar_float(k));
    ddp_tensor *bend = ddp_mul(ddp_mul(ddp_mul(x, half), ddp_sub(one, ddp_mul(t, t))), du);
    out[0] = ddp__narrowed(ddp_mul(g, ddp_add(ddp_mul(ddp_add(t, one), half), bend)), v->in_meta[0].dtype);
    return ddp__pending();
}
/* The exact slope is F(x) + x f(x), f the normal density and F its integral; its own slope (2 - x^2) f(x). */
static int gelu_grad_vjp(ddp_vjp *v) {
    if (((const ddp_gelu_grad_attrs *)v->attrs)->tanh) return ddp__vjp_by_chain(v, gelu_grad_chain);
    ddp_tensor *gg = v->grad_out[0];
    if (v->needs[0]) v->grad_in[0] = ddp_gelu_grad(gg, v->in[1], 0);
    if (!v->needs[1]) return ddp__pending();
    ddp_tensor *x = ddp__widened(v->in[1]), *square = ddp_mul(x, x);
    ddp_tensor *density =
        ddp_mul(ddp_exp(ddp_mul(square, ddp_scalar_float(-.5))), ddp_scalar_float(0.39894228040143267794));
    ddp_tensor *d = ddp_mul(density, ddp_sub(ddp_scalar(2), square));
    ddp_tensor *both = ddp_mul(ddp__widened(gg), ddp__widened(v->in[0]));
    v->grad_in[1] = ddp__narrowed(ddp_mul(both, d), v->in_meta[1].dtype);
    return ddp__pending();
}
static int silu_vjp(ddp_vjp *v) { /* g s (1 + x (1 - s)), s = sigmoid(x) */
    ddp_tensor *g = ddp__widened(v->grad_out[0]), *x = ddp__widened(v->in[0]), *s = ddp_sigmoid(x),
               *one = ddp_scalar(1);
    ddp_tensor *slope = ddp_mul(s, ddp_add(ddp_mul(x, ddp_sub(one, s)), one));
    v->grad_in[0] = ddp__narrowed(ddp_mul(g, slope), v->in_meta[0].dtype);
    return ddp__pending();
}

static int clamp_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_clamp_attrs *a = c->attrs;
    if (isnan(a->min) || isnan(a->max)) return ddp__op_fail(c, DDP_EINVAL, "a bound is NaN");
    return infer_unary_number(c, out);
}
static int clamp_vjp(ddp_vjp *v) {
    const ddp_clamp_attrs *a = v->attrs;
    ddp_tensor *in = ddp_mul(ddp_ge(v->in[0], ddp_scalar_float(a->min)), ddp_le(v->in[0], ddp_scalar_float(a->max)));
    v->grad_in[0] = ddp_mul(v->grad_out[0], in);
    return ddp__pending();
}

/* ---- where, casts, copies ---- */

static int where_infer(const ddp_call *c, ddp_meta *out) {
    int st = ddp__need_dtype(c, 0, DDP_BOOL);
    return st < 0 ? st : ddp__out_broadcast(c, 3, c->in[1]->m.dtype, out);
}
static int where_vjp(ddp_vjp *v) {
    ddp_tensor *zero = ddp_scalar(0), *g = v->grad_out[0];
    if (v->needs[1]) give(v, 1, ddp_where(v->in[0], g, zero));
    if (v->needs[2]) give(v, 2, ddp_where(v->in[0], zero, g));
    return ddp__pending();
}

static int cast_infer(const ddp_call *c, ddp_meta *out) {
    int64_t d = ((const ddp_cast_attrs *)c->attrs)->dtype;
    if (d < 0 || d >= DDP_DTYPES) return ddp__op_fail(c, DDP_EDTYPE, "no dtype %lld", (long long)d);
    return ddp__out_like(c, 0, (ddp_dtype)d, out);
}
static int cast_vjp(ddp_vjp *v) {
    if (ddp__is_float(v->in_meta[0].dtype)) v->grad_in[0] = ddp_cast(v->grad_out[0], (int)v->in_meta[0].dtype);
    return ddp__pending();
}

static int clone_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_clone_attrs *a = c->attrs;
    if (a->keep) return ddp__out_like(c, 0, c->in[0]->m.dtype, out);
    return ddp__out_shape(c, c->in[0]->m.dtype, c->in[0]->m.ndim, c->in[0]->m.size, out);
}
static int same_vjp(ddp_vjp *v) {
    v->grad_in[0] = v->grad_out[0];
    return 0;
}

static int copy__infer(const ddp_call *c, ddp_meta *out) {
    int st = ddp__out_broadcast(c, 2, c->in[0]->m.dtype, out);
    if (st < 0) return st;
    if (!ddp__meta_same_size(out, &c->in[0]->m))
        return ddp__op_fail(c, DDP_ESHAPE, "src %s does not broadcast to dst %s", DDP_SHAPE_TEXT(&c->in[1]->m),
                            DDP_SHAPE_TEXT(&c->in[0]->m));
    return 0;
}
static int copy__vjp(ddp_vjp *v) { /* dst's old values are gone: nothing flows to them */
    if (v->needs[1]) give(v, 1, ddp_cast(v->grad_out[0], (int)v->in_meta[1].dtype));
    return ddp__pending();
}
static int fill__vjp(ddp_vjp *v) {
    (void)v;
    return 0;
}

#define IN DDP_SAVE_IN
#define OUT DDP_SAVE_OUT
const ddp_op_rules ddp__add_rules = {.infer = infer_binary, .vjp = add_vjp};
const ddp_op_rules ddp__sub_rules = {.infer = infer_number, .vjp = sub_vjp};
const ddp_op_rules ddp__mul_rules = {.infer = infer_binary, .vjp = mul_vjp, .saves = IN(0) | IN(1)};
const ddp_op_rules ddp__div_rules = {.infer = infer_binary, .vjp = div_vjp, .saves = IN(0) | IN(1)};
const ddp_op_rules ddp__pow_rules = {.infer = infer_number, .vjp = pow_vjp, .saves = IN(0) | IN(1)};
const ddp_op_rules ddp__maximum_rules = {.infer = infer_binary, .vjp = maximum_vjp, .saves = IN(0) | IN(1)};
const ddp_op_rules ddp__minimum_rules = {.infer = infer_binary, .vjp = minimum_vjp, .saves = IN(0) | IN(1)};
const ddp_op_rules ddp__eq_rules = {.infer = infer_compare};
const ddp_op_rules ddp__ne_rules = {.infer = infer_compare};
const ddp_op_rules ddp__lt_rules = {.infer = infer_compare};
const ddp_op_rules ddp__le_rules = {.infer = infer_compare};
const ddp_op_rules ddp__gt_rules = {.infer = infer_compare};
const ddp_op_rules ddp__ge_rules = {.infer = infer_compare};
const ddp_op_rules ddp__where_rules = {.infer = where_infer, .vjp = where_vjp, .saves = IN(0)};
const ddp_op_rules ddp__neg_rules = {.infer = infer_unary_number, .vjp = neg_vjp};
const ddp_op_rules ddp__abs_rules = {.infer = infer_unary_number, .vjp = abs_vjp, .saves = IN(0)};
const ddp_op_rules ddp__sign_rules = {.infer = infer_unary_number, .vjp = sign_vjp};
const ddp_op_rules ddp__exp_rules = {.infer = infer_unary, .vjp = exp_vjp, .saves = OUT(0)};
const ddp_op_rules ddp__log_rules = {.infer = infer_unary, .vjp = log_vjp, .saves = IN(0)};
const ddp_op_rules ddp__sqrt_rules = {.infer = infer_unary, .vjp = sqrt_vjp, .saves = OUT(0)};
const ddp_op_rules ddp__tanh_rules = {.infer = infer_unary, .vjp = tanh_vjp, .saves = OUT(0)};
const ddp_op_rules ddp__sigmoid_rules = {.infer = infer_unary, .vjp = sigmoid_vjp, .saves = OUT(0)};
const ddp_op_rules ddp__relu_rules = {.infer = infer_unary_number, .vjp = relu_vjp, .saves = OUT(0)};
const ddp_op_rules ddp__relu_grad_rules = {.infer = relu_grad_infer, .vjp = relu_grad_vjp, .saves = IN(1)};
const ddp_op_rules ddp__clamp_rules = {.infer = clamp_infer, .vjp = clamp_vjp, .saves = IN(0)};
const ddp_op_rules ddp__cast_rules = {.infer = cast_infer, .vjp = cast_vjp};
const ddp_op_rules ddp__clone_rules = {.infer = clone_infer, .vjp = same_vjp};
const ddp_op_rules ddp__copy__rules = {.infer = copy__infer, .vjp = copy__vjp};
const ddp_op_rules ddp__fill__rules = {.infer = infer_unary, .vjp = fill__vjp};
const ddp_op_rules ddp__gelu_rules = {.infer = infer_unary, .vjp = gelu_vjp, .saves = IN(0)};
const ddp_op_rules ddp__gelu_grad_rules = {.infer = gelu_grad_infer, .vjp = gelu_grad_vjp, .saves = IN(0) | IN(1)};
const ddp_op_rules ddp__silu_rules = {.infer = infer_unary, .vjp = silu_vjp, .saves = IN(0)};
