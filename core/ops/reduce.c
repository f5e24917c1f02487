/* reduce.c -- sums, means, extremes: shapes and gradients. */
#include "ops.h"

/* Which dims go; a status. */
static int reduced(const ddp_call *c, const ddp_ints *dims, bool *gone) {
    int ndim = c->in[0]->m.ndim;
    for (int d = 0; d < ndim; d++) gone[d] = dims->n <= 0;
    for (int64_t i = 0; i < dims->n; i++) {
        int d = ddp__wrap_dim(c, dims->v[i], ndim);
        if (d < 0) return ddp__pending();
        if (ndim == 0) continue;
        if (gone[d]) return ddp__op_fail(c, DDP_EINVAL, "dim %d is named twice", d);
        gone[d] = true;
    }
    return 0;
}

static int infer_reduced(const ddp_call *c, const ddp_ints *dims, bool keepdim, ddp_dtype dtype, ddp_meta *out) {
    bool gone[DDP_MAX_DIM];
    int64_t size[DDP_MAX_DIM];
    int n = 0, st = reduced(c, dims, gone);
    if (st < 0) return st;
    for (int d = 0; d < c->in[0]->m.ndim; d++) {
        if (gone[d] && !keepdim) continue;
        size[n++] = gone[d] ? 1 : c->in[0]->m.size[d];
    }
    return ddp__out_shape(c, dtype, n, size, out);
}

static int sum_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_sum_attrs *a = c->attrs;
    ddp_dtype d = c->in[0]->m.dtype;
    return infer_reduced(c, &a->dim, a->keepdim, ddp__is_float(d) ? d : DDP_I64, out);
}

static int mean_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_mean_attrs *a = c->attrs;
    int st = ddp__need_float(c, 0);
    return st < 0 ? st : infer_reduced(c, &a->dim, a->keepdim, c->in[0]->m.dtype, out);
}

static int amax_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_amax_attrs *a = c->attrs;
    int st = infer_reduced(c, &a->dim, a->keepdim, c->in[0]->m.dtype, out);
    if (st == 0 && c->in[0]->numel == 0 && ddp__meta_numel(out) > 0)
        return ddp__op_fail(c, DDP_ESHAPE, "x %s has nothing to compare", DDP_SHAPE_TEXT(&c->in[0]->m));
    return st;
}

/* A reduced tensor t seen with the dims that went as size 1, then broadcast to the input's shape. */
static ddp_tensor *spread(ddp_tensor *t, const ddp_meta *in, const ddp_ints *dims) {
    int64_t size[DDP_MAX_DIM];
    if (!t) return NULL;
    for (int d = 0; d < in->ndim; d++) size[d] = dims->n <= 0 ? 1 : in->size[d];
    for (int64_t i = 0; i < dims->n && in->ndim; i++) size[dims->v[i] < 0 ? dims->v[i] + in->ndim : dims->v[i]] = 1;
    return ddp_expand(ddp__reshape(t, in->ndim, size), in->ndim, in->size);
}

static int sum_vjp(ddp_vjp *v) {
    const ddp_sum_attrs *a = v->attrs;
    if (ddp__is_float(v->in_meta[0].dtype)) v->grad_in[0] = spread(v->grad_out[0], &v->in_meta[0], &a->dim);
    return ddp__pending();
}

static int mean_vjp(ddp_vjp *v) {
    const ddp_mean_attrs *a = v->attrs;
    double n = (double)ddp__meta_numel(&v->in_meta[0]) / (double)ddp__meta_numel(&v->out_meta[0]);
    v->grad_in[0] = spread(ddp_mul(v->grad_out[0], ddp_scalar_float(1 / n)), &v->in_meta[0], &a->dim);
    return ddp__pending();
}

static int amax_vjp(ddp_vjp *v) { /* shared equally among the largest */
    const ddp_amax_attrs *a = v->attrs;
    ddp_tensor *hit = ddp_cast(ddp_eq(v->in[0], spread(v->out[0], &v->in_meta[0], &a->dim)), (int)v->in_meta[0].dtype);
    ddp_tensor *count = ddp_sum(hit, (int)a->dim.n, a->dim.v, 0);
    ddp_tensor *g = ddp_div(ddp__reshape(v->grad_out[0], ddp_ndim(count), count ? count->m.size : NULL), count);
    v->grad_in[0] = ddp_mul(hit, spread(g, &v->in_meta[0], &a->dim));
    return ddp__pending();
}

static int max_dim_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_max_dim_attrs *a = c->attrs;
    ddp_ints one = {1, {a->dim}};
    int d = ddp__wrap_dim(c, a->dim, c->in[0]->m.ndim);
    if (d < 0) return ddp__pending();
    if (c->in[0]->m.ndim && c->in[0]->m.size[d] == 0)
        return ddp__op_fail(c, DDP_ESHAPE, "dim %d of x %s is empty", d, DDP_SHAPE_TEXT(&c->in[0]->m));
    int st = infer_reduced(c, &one, a->keepdim, c->in[0]->m.dtype, &out[0]);
    return st < 0 ? st : infer_reduced(c, &one, a->keepdim, DDP_I64, &out[1]);
}

static int max_dim_vjp(ddp_vjp *v) {
    const ddp_max_dim_attrs *a = v->attrs;
    const ddp_meta *in = &v->in_meta[0];
    if (!v->grad_out[0]) return 0;
    if (in->ndim == 0) {
        v->grad_in[0] = v->grad_out[0];
        return 0;
    }
    int64_t size[DDP_MAX_DIM];
    int dim = (int)(a->dim < 0 ? a->dim + in->ndim : a->dim);
    for (int d = 0; d < in->ndim; d++) size[d] = d == dim ? 1 : in->size[d];
    ddp_tensor *g = ddp__reshape(v->grad_out[0], in->ndim, size), *ids = ddp__reshape(v->out[1], in->ndim, size);
    v->grad_in[0] = ddp_gather_grad(g, ids, in->ndim, in->size, dim);
    return ddp__pending();
}

static int argmax_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_argmax_attrs *a = c->attrs;
    ddp_ints dims = {a->flat ? -1 : 1, {a->dim}};
    int d = ddp__wrap_dim(c, a->flat ? 0 : a->dim, c->in[0]->m.ndim);
    if (d < 0) return ddp__pending();
    if (a->flat ? c->in[0]->numel == 0 : c->in[0]->m.ndim && c->in[0]->m.size[d] == 0)
        return ddp__op_fail(c, DDP_ESHAPE, "x %s has nothing to compare", DDP_SHAPE_TEXT(&c->in[0]->m));
    return infer_reduced(c, &dims, a->keepdim, DDP_I64, out);
}

static double input_elements(const ddp_call *c) { return (double)c->in[0]->numel; }

const ddp_op_rules ddp__sum_rules = {.infer = sum_infer, .vjp = sum_vjp, .flops = input_elements};
const ddp_op_rules ddp__mean_rules = {.infer = mean_infer, .vjp = mean_vjp, .flops = input_elements};
const ddp_op_rules ddp__amax_rules = {
    .infer = amax_infer, .vjp = amax_vjp, .saves = DDP_SAVE_IN(0) | DDP_SAVE_OUT(0), .flops = input_elements};
const ddp_op_rules ddp__amin_rules = {
    .infer = amax_infer, .vjp = amax_vjp, .saves = DDP_SAVE_IN(0) | DDP_SAVE_OUT(0), .flops = input_elements};
const ddp_op_rules ddp__max_dim_rules = {
    .infer = max_dim_infer, .vjp = max_dim_vjp, .saves = DDP_SAVE_OUT(1), .flops = input_elements};
const ddp_op_rules ddp__argmax_rules = {.infer = argmax_infer, .flops = input_elements};
