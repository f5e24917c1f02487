/* norm.c -- batch and layer normalisation. */
#include "ops.h"

static bool is_grad(const ddp_call *c) {
    return c->op->id == DDP_OP_batch_norm_grad || c->op->id == DDP_OP_batch_norm_act_grad ||
           c->op->id == DDP_OP_batch_norm_add_act_grad;
}

int ddp__need_channels(const ddp_call *c, int i, int of, int64_t channels, bool own) {
    const ddp_tensor *t = c->in[i];
    if (!t) return 0;
    if (t->m.ndim != 1 || t->m.size[0] != channels)
        return ddp__op_fail(c, DDP_ESHAPE, "%s is %s, expected [%lld] for %s %s", c->op->in_names[i],
                            DDP_SHAPE_TEXT(&t->m), (long long)channels, c->op->in_names[of],
                            DDP_SHAPE_TEXT(&c->in[of]->m));
    if (own && t->m.dtype == c->in[0]->m.dtype) return 0;
    return ddp__need_dtype(c, i, ddp__wide(c->in[0]->m.dtype));
}

/* The same as x has them. */
static int need_channel(const ddp_call *c, int i, int64_t channels, bool own) {
    return ddp__need_channels(c, i, is_grad(c) ? 1 : 0, channels, own);
}

int ddp__need_eps(const ddp_call *c, double eps) {
    return eps >= 0 ? 0 : ddp__op_fail(c, DDP_EINVAL, "eps is %g, at least 0", eps);
}

static int batch_norm_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_batch_norm_attrs *a = c->attrs;
    const ddp_meta *x = &c->in[0]->m;
    int st = ddp__need_float(c, 0);
    if (st < 0) return st;
    if (x->ndim < 2) return ddp__op_fail(c, DDP_ESHAPE, "x is %s, expected [N, C, ...]", DDP_SHAPE_TEXT(x));
    for (int i = 1; i < 5; i++)
        if ((st = need_channel(c, i, x->size[1], i < 3)) < 0) return st;
    if (!c->in[3] != !c->in[4]) return ddp__op_fail(c, DDP_EINVAL, "running_mean and running_var come together");
    int64_t per_channel = x->size[1] ? c->in[0]->numel / x->size[1] : 0;
    if (a->training && per_channel == 1)
        return ddp__op_fail(c, DDP_ESHAPE, "x is %s: one value a channel has no variance to train on",
                            DDP_SHAPE_TEXT(x));
    if ((st = ddp__need_eps(c, a->eps)) < 0) return st;
    if ((st = ddp__out_like(c, 0, x->dtype, &out[0])) < 0) return st;
    for (int i = 1; i < 3; i++)
        if ((st = ddp__out_shape(c, ddp__wide(x->dtype), 1, &x->size[1], &out[i])) < 0) return st;
    return 0;
}

static bool batch_norm_writes(const ddp_call *c, int i) {
    return (i == 3 || i == 4) && ((const ddp_batch_norm_attrs *)c->attrs)->training;
}

static int batch_norm_vjp(ddp_vjp *v) {
    const ddp_batch_norm_attrs *a = v->attrs;
    bool batch_stats = a->training || v->in_meta[3].ndim < 0;
    ddp_tensor *dx, *dw, *db;
    if (!v->grad_out[0]) return 0;
    if (ddp_batch_norm_grad(v->grad_out[0], v->in[0], v->in[1], v->out[1], v->out[2], batch_stats, &dx, &dw, &db) < 0)
        return ddp__pending();
    if (v->needs[0]) v->grad_in[0] = dx;
    if (v->needs[1]) v->grad_in[1] = dw;
    if (v->needs[2]) v->grad_in[2] = ddp__narrowed(db, v->in_meta[2].dtype);
    return 0;
}

static int batch_norm_grad_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_meta *x = &c->in[1]->m;
    int st = ddp__need_float(c, 0);
    if (st < 0) return st;
    if (!ddp__meta_same_size(&c->in[0]->m, x))
        return ddp__op_fail(c, DDP_ESHAPE, "g is %s, x %s", DDP_SHAPE_TEXT(&c->in[0]->m), DDP_SHAPE_TEXT(x));
    if (x->ndim < 2) return ddp__op_fail(c, DDP_ESHAPE, "x is %s, expected [N, C, ...]", DDP_SHAPE_TEXT(x));
    if ((st = ddp__need_dtype(c, 1, c->in[0]->m.dtype)) < 0) return st;
    for (int i = 2; i < 5; i++)
        if ((st = need_channel(c, i, x->size[1], i == 2)) < 0) return st;
    if ((st = ddp__out_like(c, 1, x->dtype, &out[0])) < 0) return st;
    ddp_dtype sums = c->in[2] ? c->in[2]->m.dtype : ddp__wide(x->dtype);
    for (int i = 1; i < 3; i++)
        if ((st = ddp__out_shape(c, sums, 1, &x->size[1], &out[i])) < 0) return st;
    return 0;
}

/* The gradient in simple ops. Batch statistics are computed from x again, so that they are differentiated too; eps
 * comes back as what rstd was made with: 1/rstd^2 - var. 16-bit inputs go through f32. */
static int batch_norm_grad_chain(ddp_vjp *v, ddp_tensor *const *in, ddp_tensor **out) {
    bool training = ((const ddp_batch_norm_grad_attrs *)v->attrs)->training;
    const ddp_meta *m = &v->in_meta[1];
    ddp_tensor *g = ddp__widened(in[0]), *x = ddp__widened(in[1]), *w = ddp__widened(in[2]);
    int64_t dims[DDP_MAX_DIM], shape[DDP_MAX_DIM];
    int n = 0;
    for (int d = 0; d < m->ndim; d++) {
        shape[d] = d == 1 ? m->size[1] : 1;
        if (d != 1) dims[n++] = d;
    }
    ddp_tensor *mean = ddp_view(in[3], m->ndim, shape), *rstd = ddp_view(in[4], m->ndim, shape);
    if (training) {
        mean = ddp_mean(x, n, dims, 1);
        ddp_tensor *centred = ddp_sub(x, mean), *var = ddp_mean(ddp_mul(centred, centred), n, dims, 1);
        ddp_tensor *eps = ddp_detach(ddp_sub(ddp_div(ddp_scalar(1), ddp_mul(rstd, rstd)), var));
        rstd = ddp_div(ddp_scalar(1), ddp_sqrt(ddp_add(var, eps)));
    }
    ddp_tensor *xhat = ddp_mul(ddp_sub(x, mean), rstd), *gx = ddp_mul(g, xhat);
    ddp_tensor *scale = w ? ddp_mul(rstd, ddp_view(w, m->ndim, shape)) : rstd;
    ddp_tensor *inner = g;
    if (training) inner = ddp_sub(ddp_sub(g, ddp_mean(g, n, dims, 1)), ddp_mul(xhat, ddp_mean(gx, n, dims, 1)));
    out[0] = ddp__narrowed(ddp_mul(scale, inner), m->dtype);
    out[1] = ddp__narrowed(ddp_sum(gx, n, dims, 0), v->out_meta[1].dtype);
    out[2] = ddp__narrowed(ddp_sum(g, n, dims, 0), v->out_meta[2].dtype);
    return ddp__pending();
}

static int batch_norm_grad_vjp(ddp_vjp *v) { return ddp__vjp_by_chain(v, batch_norm_grad_chain); }

/* ---- with relu, and a residual ------------------------------------------------------------------------------------ */

_Static_assert(sizeof(ddp_batch_norm_act_attrs) == sizeof(ddp_batch_norm_attrs), "the same attributes");
_Static_assert(sizeof(ddp_batch_norm_add_act_grad_attrs) == sizeof(ddp_batch_norm_grad_attrs), "the same attributes");
_Static_assert(sizeof(ddp_batch_norm_act_grad_attrs) == sizeof(ddp_batch_norm_grad_attrs), "the same attributes");

static int batch_norm_act_infer(const ddp_call *c, ddp_meta *out) {
    int st = batch_norm_infer(c, out);
    if (st < 0 || !c->in[5]) return st;
    if (!ddp__meta_same_size(&c->in[5]->m, &c->in[0]->m))
        return ddp__op_fail(c, DDP_ESHAPE, "residual is %s, x %s", DDP_SHAPE_TEXT(&c->in[5]->m),
                            DDP_SHAPE_TEXT(&c->in[0]->m));
    return ddp__need_dtype(c, 5, c->in[0]->m.dtype);
}

static int batch_norm_act_vjp(ddp_vjp *v) {
    const ddp_batch_norm_act_attrs *a = v->attrs;
    bool batch_stats = a->training || v->in_meta[3].ndim < 0, residual = v->in_meta[5].ndim >= 0;
    ddp_tensor *g = v->grad_out[0], *dx, *dw, *db, *dresidual = NULL;
    int st;
    if (!g) return 0;
    if (residual) {
        st = ddp_batch_norm_add_act_grad(g, v->in[0], v->in[1], v->out[1], v->out[2], v->out[0], batch_stats, &dx, &dw,
                                         &db, &dresidual);
    } else {
        st = ddp_batch_norm_act_grad(g, v->in[0], v->in[1], v->out[1], v->out[2], v->in[2], batch_stats, &dx, &dw, &db);
    }
    if (st < 0) return st;
    if (v->needs[0]) v->grad_in[0] = dx;
    if (v->needs[1]) v->grad_in[1] = dw;
    if (v->needs[2]) v->grad_in[2] = ddp__narrowed(db, v->in_meta[2].dtype);
    if (residual && v->needs[5]) v->grad_in[5] = dresidual;
    return 0;
}

static int batch_norm_act_grad_infer(const ddp_call *c, ddp_meta *out) {
    int st = batch_norm_grad_infer(c, out);
    return st < 0 ? st : need_channel(c, 5, c->in[1]->m.size[1], true);
}

/* What relu let pass is a constant mask on g; then batch_norm_grad's chain. */
static int batch_norm_act_grad_chain(ddp_vjp *v, ddp_tensor *const *in, ddp_tensor **out) {
    const ddp_meta *m = &v->in_meta[1];
    int64_t shape[DDP_MAX_DIM];
    for (int d = 0; d < m->ndim; d++) shape[d] = d == 1 ? m->size[1] : 1;
    ddp_tensor *x = ddp_detach(ddp__widened(in[1])), *w = ddp__widened(in[2]), *b = ddp__widened(in[5]);
    ddp_tensor *z = ddp_mul(ddp_sub(x, ddp_view(in[3], m->ndim, shape)), ddp_view(in[4], m->ndim, shape));
    if (w) z = ddp_mul(z, ddp_view(ddp_detach(w), m->ndim, shape));
    if (b) z = ddp_add(z, ddp_view(ddp_detach(b), m->ndim, shape));
    ddp_tensor *masked[6] = {NULL, in[1], in[2], in[3], in[4], in[5]};
    masked[0] = ddp_where(ddp_gt(z, ddp_scalar(0)), in[0], ddp_scalar(0));
    return batch_norm_grad_chain(v, masked, out);
}

static int batch_norm_act_grad_vjp(ddp_vjp *v) { return ddp__vjp_by_chain(v, batch_norm_act_grad_chain); }

static int batch_norm_add_act_grad_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_meta *x = &c->in[1]->m;
    int st = batch_norm_grad_infer(c, out);
    if (st < 0) return st;
    if (!ddp__meta_same_size(&c->in[5]->m, x))
        return ddp__op_fail(c, DDP_ESHAPE, "y is %s, x %s", DDP_SHAPE_TEXT(&c->in[5]->m), DDP_SHAPE_TEXT(x));
    if ((st = ddp__need_dtype(c, 5, x->dtype)) < 0) return st;
    return ddp__out_like(c, 1, x->dtype, &out[3]);
}

/* What relu let pass is g times a constant mask, and dresidual itself. */
static int batch_norm_add_act_grad_chain(ddp_vjp *v, ddp_tensor *const *in, ddp_tensor **out) {
    ddp_tensor *masked[5] = {NULL, in[1], in[2], in[3], in[4]};
    masked[0] = ddp_where(ddp_gt(ddp_detach(in[5]), ddp_scalar(0)), in[0], ddp_scalar(0));
    out[3] = masked[0];
    return batch_norm_grad_chain(v, masked, out);
}

static int batch_norm_add_act_grad_vjp(ddp_vjp *v) { return ddp__vjp_by_chain(v, batch_norm_add_act_grad_chain); }

static double norm_flops(const ddp_call *c) { return 8.0 * (double)c->in[0]->numel; }

#define IN DDP_SAVE_IN
const ddp_op_rules ddp__batch_norm_rules = {.infer = batch_norm_infer,
                                            .vjp = batch_norm_vjp,
                                            .saves = IN(0) | IN(1) | DDP_SAVE_OUT(1) | DDP_SAVE_OUT(2),
                                            .const_out = 6,
                                            .flops = norm_flops,
                                            .writes = batch_norm_writes};
const ddp_op_rules ddp__batch_norm_grad_rules = {.infer = batch_norm_grad_infer,
                                                 .vjp = batch_norm_grad_vjp,
                                                 .saves = IN(0) | IN(1) | IN(2) | IN(3) | IN(4),
                                                 .flops = norm_flops};
const ddp_op_rules ddp__batch_norm_act_rules = {.infer = batch_norm_act_infer,
                                                .vjp = batch_norm_act_vjp,
                                                .saves = IN(0) | IN(1) | IN(2) | DDP_SAVE_OUT(0) | DDP_SAVE_OUT(1) |
                                                         DDP_SAVE_OUT(2),
                                                .const_out = 6,
                                                .flops = norm_flops,
                                                .writes = batch_norm_writes};
const ddp_op_rules ddp__batch_norm_act_grad_rules = {.infer = batch_norm_act_grad_infer,
                                                     .vjp = batch_norm_act_grad_vjp,
                                                     .saves = IN(0) | IN(1) | IN(2) | IN(3) | IN(4) | IN(5),
                                                     .flops = norm_flops};
const ddp_op_rules ddp__batch_norm_add_act_grad_rules = {.infer = batch_norm_add_act_grad_infer,
                                                         .vjp = batch_norm_add_act_grad_vjp,
                                                         .saves = IN(0) | IN(1) | IN(2) | IN(3) | IN(4) | IN(5),
                                                         .flops = norm_flops};

/* ---- layer_norm: x is [lead..., tail...], tail the last `dims` dims ---- */

/* in[i] has the sizes of x from dim lo to hi. */
static int need_part(const ddp_call *c, int i, const ddp_meta *x, int lo, int hi) {
    if (!c->in[i]) return 0;
    const ddp_meta *t = &c->in[i]->m;
    bool fits = t->ndim == hi - lo;
    for (int d = lo; fits && d < hi; d++) fits = t->size[d - lo] == x->size[d];
    if (fits) return 0;
    return ddp__op_fail(c, DDP_ESHAPE, "%s is %s, expected %s for x %s", c->op->in_names[i], DDP_SHAPE_TEXT(t),
                        ddp__shape_text(hi - lo, x->size + lo, (char[160]){0}, 160), DDP_SHAPE_TEXT(x));
}

static int check_layer(const ddp_call *c, const ddp_meta *x, int64_t dims) {
    int st = ddp__need_float(c, 0);
    if (st < 0) return st;
    if (dims < 1 || dims > x->ndim)
        return ddp__op_fail(c, DDP_EINVAL, "dims is %lld, expected 1 to %d for x %s", (long long)dims, x->ndim,
                            DDP_SHAPE_TEXT(x));
    for (int d = x->ndim - (int)dims; d < x->ndim; d++)
        if (x->size[d] == 0) return ddp__op_fail(c, DDP_ESHAPE, "x is %s: nothing to normalise", DDP_SHAPE_TEXT(x));
    return 0;
}

/* Of x's dtype, or of the statistics'. */
static int need_vector(const ddp_call *c, int i, ddp_dtype own) {
    return !c->in[i] || c->in[i]->m.dtype == own ? 0 : ddp__need_dtype(c, i, ddp__wide(own));
}

static int layer_norm_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_layer_norm_attrs *a = c->attrs;
    const ddp_meta *x = &c->in[0]->m;
    int st = check_layer(c, x, a->dims), lead = x->ndim - (int)a->dims;
    if (st < 0) return st;
    if ((st = ddp__need_eps(c, a->eps)) < 0) return st;
    for (int i = 1; i < 3; i++)
        if ((st = need_part(c, i, x, lead, x->ndim)) < 0 || (st = need_vector(c, i, x->dtype)) < 0) return st;
    if ((st = ddp__out_shape(c, x->dtype, x->ndim, x->size, &out[0])) < 0) return st;
    for (int i = 1; i < 3; i++)
        if ((st = ddp__out_shape(c, ddp__wide(x->dtype), lead, x->size, &out[i])) < 0) return st;
    return 0;
}

static int layer_norm_vjp(ddp_vjp *v) {
    ddp_tensor *dx, *dw, *db;
    int64_t dims = ((const ddp_layer_norm_attrs *)v->attrs)->dims;
    if (!v->grad_out[0]) return 0;
    if (ddp_layer_norm_grad(v->grad_out[0], v->in[0], v->in[1], v->out[1], v->out[2], dims, &dx, &dw, &db) < 0)
        return ddp__pending();
    if (v->needs[0]) v->grad_in[0] = dx;
    if (v->needs[1]) v->grad_in[1] = dw;
    if (v->needs[2]) v->grad_in[2] = ddp__narrowed(db, v->in_meta[2].dtype);
    return ddp__pending();
}

static int layer_norm_grad_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_meta *x = &c->in[1]->m;
    int64_t dims = ((const ddp_layer_norm_grad_attrs *)c->attrs)->dims;
    int st = check_layer(c, x, dims), lead = x->ndim - (int)dims;
    if (st < 0) return st;
    if (!ddp__meta_same_size(&c->in[0]->m, x))
        return ddp__op_fail(c, DDP_ESHAPE, "g is %s, x %s", DDP_SHAPE_TEXT(&c->in[0]->m), DDP_SHAPE_TEXT(x));
    if ((st = ddp__need_dtype(c, 1, c->in[0]->m.dtype)) < 0) return st;
    if ((st = need_part(c, 2, x, lead, x->ndim)) < 0 || (st = need_vector(c, 2, x->dtype)) < 0) return st;
    for (int i = 3; i < 5; i++)
        if ((st = need_part(c, i, x, 0, lead)) < 0 || (st = ddp__need_dtype(c, i, ddp__wide(x->dtype))) < 0) return st;
    if ((st = ddp__out_shape(c, x->dtype, x->ndim, x->size, &out[0])) < 0) return st;
    ddp_dtype sums = c->in[2] ? c->in[2]->m.dtype : ddp__wide(x->dtype);
    for (int i = 1; i < 3; i++)
        if ((st = ddp__out_shape(c, sums, (int)dims, x->size + lead, &out[i])) < 0) return st;
    return 0;
}

/* As batch_norm_grad_chain, over the last dims. */
static int layer_norm_grad_chain(ddp_vjp *v, ddp_tensor *const *in, ddp_tensor **out) {
    const ddp_meta *m = &v->in_meta[1];
    int n = (int)((const ddp_layer_norm_grad_attrs *)v->attrs)->dims, lead = m->ndim - n;
    ddp_tensor *g = ddp__widened(in[0]), *x = ddp__widened(in[1]), *w = ddp__widened(in[2]);
    int64_t dims[DDP_MAX_DIM], leads[DDP_MAX_DIM], shape[DDP_MAX_DIM];
    for (int d = 0; d < m->ndim; d++) {
        shape[d] = d < lead ? m->size[d] : 1;
        if (d < lead) leads[d] = d;
        else dims[d - lead] = d;
    }
    ddp_tensor *saved = ddp_view(in[4], m->ndim, shape), *centred = ddp_sub(x, ddp_mean(x, n, dims, 1));
    ddp_tensor *var = ddp_mean(ddp_mul(centred, centred), n, dims, 1);
    ddp_tensor *eps = ddp_detach(ddp_sub(ddp_div(ddp_scalar(1), ddp_mul(saved, saved)), var));
    ddp_tensor *rstd = ddp_div(ddp_scalar(1), ddp_sqrt(ddp_add(var, eps)));
    ddp_tensor *xhat = ddp_mul(centred, rstd), *gx = ddp_mul(g, xhat), *gw = w ? ddp_mul(g, w) : g;
    ddp_tensor *along = ddp_mul(xhat, ddp_mean(ddp_mul(gw, xhat), n, dims, 1));
    ddp_tensor *dx = ddp_mul(rstd, ddp_sub(ddp_sub(gw, ddp_mean(gw, n, dims, 1)), along));
    out[0] = ddp__narrowed(dx, m->dtype);
    out[1] = ddp__narrowed(lead ? ddp_sum(gx, lead, leads, 0) : gx, v->out_meta[1].dtype);
    out[2] = ddp__narrowed(lead ? ddp_sum(g, lead, leads, 0) : g, v->out_meta[2].dtype);
    return ddp__pending();
}

static int layer_norm_grad_vjp(ddp_vjp *v) { return ddp__vjp_by_chain(v, layer_norm_grad_chain); }

const ddp_op_rules ddp__layer_norm_rules = {.infer = layer_norm_infer,
                                            .vjp = layer_norm_vjp,
                                            .saves = IN(0) | IN(1) | DDP_SAVE_OUT(1) | DDP_SAVE_OUT(2),
                                            .const_out = 6,
                                            .flops = norm_flops};
const ddp_op_rules ddp__layer_norm_grad_rules = {.infer = layer_norm_grad_infer,
                                                 .vjp = layer_norm_grad_vjp,
                                                 .saves = IN(0) | IN(1) | IN(2) | IN(3) | IN(4),
                                                 .flops = norm_flops};
