/* shape.c -- views, joining, and their gradients. Views share the storage; inference gives strides and offset. */
#include <string.h>

#include "ops.h"

static int as_view(const ddp_call *c, ddp_meta *out) {
    *out = c->in[0]->m;
    return 0;
}

/* ---- view ---------------------------------------------------------------------------------------------------------
 */

/* Runs of old dims that lie one behind the other in memory are matched with runs of new dims of the same product. */
bool ddp__view_fits(const ddp_meta *m, int ndim, const int64_t *size, int64_t *stride) {
    int64_t tmp[DDP_MAX_DIM], numel = ddp__meta_numel(m);
    if (!stride) stride = tmp;
    if (ndim > DDP_MAX_DIM) return false;
    if (numel == 0) {
        ddp_meta r = {.ndim = ndim};
        memcpy(r.size, size, sizeof(int64_t) * (size_t)ndim);
        ddp__meta_rowmajor(&r);
        memcpy(stride, r.stride, sizeof(int64_t) * (size_t)ndim);
        return true;
    }
    int d = m->ndim - 1, e = ndim - 1;
    while (d >= 0 && m->size[d] == 1) d--;
    while (d >= 0 || e >= 0) {
        int64_t base = d >= 0 ? m->stride[d] : 1, run = d >= 0 ? m->size[d] : 1, done = 1;
        int64_t next = base * run;
        d--;
        for (; d >= 0 && (m->size[d] == 1 || m->stride[d] == next); d--) {
            run *= m->size[d];
            if (m->size[d] != 1) next = m->stride[d] * m->size[d];
        }
        while (e >= 0 && (done < run || size[e] == 1)) {
            stride[e] = base * done;
            done *= size[e];
            e--;
        }
        if (done != run) return false;
        if (d < 0 && e >= 0) return false;
    }
    return true;
}

static int view_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_view_attrs *a = c->attrs;
    const ddp_meta *x = &c->in[0]->m;
    int64_t known = 1, size[DDP_MAX_DIM];
    int free_dim = -1;
    if (a->size.n < 0) return ddp__op_fail(c, DDP_EINVAL, "no size given");
    for (int i = 0; i < a->size.n; i++) {
        size[i] = a->size.v[i];
        if (size[i] == -1 && free_dim < 0) free_dim = i;
        else if (size[i] < 0)
            return ddp__op_fail(c, DDP_EINVAL, "size %lld of dim %d; one may be -1", (long long)size[i], i);
        else known *= size[i];
    }
    int64_t numel = c->in[0]->numel;
    if (free_dim >= 0 && (known == 0 || numel % known))
        return ddp__op_fail(c, DDP_ESHAPE, "x %s does not divide into %s", DDP_SHAPE_TEXT(x),
                            ddp__shape_text((int)a->size.n, size, (char[160]){0}, 160));
    if (free_dim >= 0) size[free_dim] = numel / known;
    else if (known != numel)
        return ddp__op_fail(c, DDP_ESHAPE, "x %s has %lld elements, %s has %lld", DDP_SHAPE_TEXT(x), (long long)numel,
                            ddp__shape_text((int)a->size.n, size, (char[160]){0}, 160), (long long)known);
    as_view(c, out);
    out->ndim = (int)a->size.n;
    memcpy(out->size, size, sizeof(int64_t) * (size_t)out->ndim);
    if (!ddp__view_fits(x, out->ndim, size, out->stride))
        return ddp__op_fail(c, DDP_ESHAPE, "x %s as laid out in memory can't be seen as %s without a copy; use reshape",
                            DDP_SHAPE_TEXT(x), DDP_SHAPE_TEXT(out));
    return 0;
}
static int back_to_shape_vjp(ddp_vjp *v) {
    v->grad_in[0] = ddp__reshape(v->grad_out[0], v->in_meta[0].ndim, v->in_meta[0].size);
    return ddp__pending();
}

/* ---- permute, transpose, expand ---- */

static int permute_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_permute_attrs *a = c->attrs;
    const ddp_meta *x = &c->in[0]->m;
    bool seen[DDP_MAX_DIM] = {false};
    if (a->dims.n != x->ndim)
        return ddp__op_fail(c, DDP_EINVAL, "%lld dims for x %s", (long long)a->dims.n, DDP_SHAPE_TEXT(x));
    as_view(c, out);
    for (int i = 0; i < x->ndim; i++) {
        int d = ddp__wrap_dim(c, a->dims.v[i], x->ndim);
        if (d < 0) return ddp__pending();
        if (seen[d]) return ddp__op_fail(c, DDP_EINVAL, "dim %d is named twice", d);
        seen[d] = true;
        out->size[i] = x->size[d];
        out->stride[i] = x->stride[d];
    }
    return 0;
}
static int permute_vjp(ddp_vjp *v) {
    const ddp_permute_attrs *a = v->attrs;
    int64_t inverse[DDP_MAX_DIM];
    int n = v->in_meta[0].ndim;
    for (int i = 0; i < n; i++) inverse[a->dims.v[i] < 0 ? a->dims.v[i] + n : a->dims.v[i]] = i;
    v->grad_in[0] = ddp_permute(v->grad_out[0], n, inverse);
    return ddp__pending();
}

static int transpose_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_transpose_attrs *a = c->attrs;
    const ddp_meta *x = &c->in[0]->m;
    int p = ddp__wrap_dim(c, a->dim0, x->ndim), q = p < 0 ? p : ddp__wrap_dim(c, a->dim1, x->ndim);
    if (q < 0) return ddp__pending();
    as_view(c, out);
    if (x->ndim == 0) return 0;
    out->size[p] = x->size[q];
    out->size[q] = x->size[p];
    out->stride[p] = x->stride[q];
    out->stride[q] = x->stride[p];
    return 0;
}
static int transpose_vjp(ddp_vjp *v) {
    const ddp_transpose_attrs *a = v->attrs;
    v->grad_in[0] = ddp_transpose(v->grad_out[0], a->dim0, a->dim1);
    return ddp__pending();
}

static int expand_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_expand_attrs *a = c->attrs;
    const ddp_meta *x = &c->in[0]->m;
    int extra = (int)a->size.n - x->ndim;
    if (extra < 0) return ddp__op_fail(c, DDP_ESHAPE, "%lld sizes for x %s", (long long)a->size.n, DDP_SHAPE_TEXT(x));
    as_view(c, out);
    out->ndim = (int)a->size.n;
    for (int i = 0; i < out->ndim; i++) {
        int64_t want = a->size.v[i], have = i < extra ? 1 : x->size[i - extra];
        if (want == -1 && i >= extra) want = have;
        if (want < 0 || (have != 1 && have != want))
            return ddp__op_fail(c, DDP_ESHAPE, "x %s does not expand to %s", DDP_SHAPE_TEXT(x),
                                ddp__shape_text(out->ndim, a->size.v, (char[160]){0}, 160));
        out->size[i] = want;
        out->stride[i] = i < extra || (have == 1 && want != 1) ? 0 : x->stride[i - extra];
    }
    return 0;
}
static int expand_vjp(ddp_vjp *v) {
    v->grad_in[0] = ddp__sum_to(v->grad_out[0], &v->in_meta[0]);
    return ddp__pending();
}

/* ---- slice, select ---- */

static int slice_of(const ddp_call *c, const ddp_meta *x, const ddp_slice_attrs *a, ddp_meta *out) {
    int d = ddp__wrap_dim(c, a->dim, x->ndim);
    if (d < 0) return ddp__pending();
    if (x->ndim == 0) return ddp__op_fail(c, DDP_ESHAPE, "x has no dims to slice");
    if (a->step < 1) return ddp__op_fail(c, DDP_EINVAL, "step is %lld, at least 1", (long long)a->step);
    if (a->start < 0 || a->stop < a->start || a->stop > x->size[d])
        return ddp__op_fail(c, DDP_EINVAL, "%lld to %lld of dim %d, which has %lld", (long long)a->start,
                            (long long)a->stop, d, (long long)x->size[d]);
    *out = *x;
    out->size[d] = (a->stop - a->start + a->step - 1) / a->step;
    out->offset += a->start * x->stride[d];
    out->stride[d] = x->stride[d] * a->step;
    return 0;
}

static int slice_infer(const ddp_call *c, ddp_meta *out) { return slice_of(c, &c->in[0]->m, c->attrs, out); }
static int slice_vjp(ddp_vjp *v) {
    const ddp_slice_attrs *a = v->attrs;
    v->grad_in[0] =
        ddp_slice_grad(v->grad_out[0], v->in_meta[0].ndim, v->in_meta[0].size, a->dim, a->start, a->stop, a->step);
    return ddp__pending();
}
static int slice_grad_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_slice_grad_attrs *a = c->attrs;
    ddp_meta part = {0};
    int st = ddp__out_shape(c, c->in[0]->m.dtype, (int)a->x_size.n, a->x_size.v, out);
    ddp_slice_attrs s = {.dim = a->dim, .start = a->start, .stop = a->stop, .step = a->step};
    if (st < 0 || (st = slice_of(c, out, &s, &part)) < 0) return st;
    if (!ddp__meta_same_size(&part, &c->in[0]->m))
        return ddp__op_fail(c, DDP_ESHAPE, "g is %s, the slice %s", DDP_SHAPE_TEXT(&c->in[0]->m),
                            DDP_SHAPE_TEXT(&part));
    return 0;
}
static int slice_grad_vjp(ddp_vjp *v) {
    const ddp_slice_grad_attrs *a = v->attrs;
    v->grad_in[0] = ddp_slice(v->grad_out[0], a->dim, a->start, a->stop, a->step);
    return ddp__pending();
}

static int select_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_select_attrs *a = c->attrs;
    const ddp_meta *x = &c->in[0]->m;
    int d = ddp__wrap_dim(c, a->dim, x->ndim);
    if (d < 0) return ddp__pending();
    if (x->ndim == 0) return ddp__op_fail(c, DDP_ESHAPE, "x has no dims to select from");
    int64_t i = a->index < 0 ? a->index + x->size[d] : a->index;
    if (i < 0 || i >= x->size[d])
        return ddp__op_fail(c, DDP_EINVAL, "index %lld of dim %d, which has %lld", (long long)a->index, d,
                            (long long)x->size[d]);
    as_view(c, out);
    out->offset += i * x->stride[d];
    out->ndim--;
    for (int k = d; k < out->ndim; k++) {
        out->size[k] = x->size[k + 1];
        out->stride[k] = x->stride[k + 1];
    }
    return 0;
}
static int select_vjp(ddp_vjp *v) {
    const ddp_select_attrs *a = v->attrs;
    const ddp_meta *x = &v->in_meta[0];
    int64_t d = a->dim < 0 ? a->dim + x->ndim : a->dim, i = a->index < 0 ? a->index + x->size[d] : a->index;
    v->grad_in[0] = ddp_slice_grad(ddp_unsqueeze(v->grad_out[0], d), x->ndim, x->size, d, i, i + 1, 1);
    return ddp__pending();
}

/* ---- unsqueeze, squeeze ---- */

static int unsqueeze_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_unsqueeze_attrs *a = c->attrs;
    const ddp_meta *x = &c->in[0]->m;
    int d = ddp__wrap_dim(c, a->dim, x->ndim + 1);
    if (d < 0) return ddp__pending();
    if (x->ndim == DDP_MAX_DIM)
        return ddp__op_fail(c, DDP_ESHAPE, "x %s has %d dims, the most there are", DDP_SHAPE_TEXT(x), DDP_MAX_DIM);
    as_view(c, out);
    out->ndim++;
    for (int k = x->ndim; k > d; k--) {
        out->size[k] = x->size[k - 1];
        out->stride[k] = x->stride[k - 1];
    }
    out->size[d] = 1;
    out->stride[d] = d < x->ndim ? x->size[d] * x->stride[d] : 1;
    return 0;
}

static int squeeze_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_squeeze_attrs *a = c->attrs;
    const ddp_meta *x = &c->in[0]->m;
    bool named[DDP_MAX_DIM] = {false};
    for (int64_t i = 0; i < a->dim.n; i++) {
        int d = ddp__wrap_dim(c, a->dim.v[i], x->ndim);
        if (d < 0) return ddp__pending();
        named[d] = true;
    }
    as_view(c, out);
    out->ndim = 0;
    for (int d = 0; d < x->ndim; d++) {
        if (x->size[d] == 1 && (a->dim.n < 0 || named[d])) continue;
        out->size[out->ndim] = x->size[d];
        out->stride[out->ndim++] = x->stride[d];
    }
    return 0;
}

/* ---- joining ---- */

static int cat_infer(const ddp_call *c, ddp_meta *out) {
    if (c->n_in == 0) return ddp__op_fail(c, DDP_EINVAL, "no tensors");
    const ddp_meta *first = &c->in[0]->m;
    int d = ddp__wrap_dim(c, ((const ddp_cat_attrs *)c->attrs)->dim, first->ndim);
    if (d < 0) return ddp__pending();
    if (first->ndim == 0) return ddp__op_fail(c, DDP_ESHAPE, "tensors without dims are stacked, not joined");
    int64_t size[DDP_MAX_DIM];
    memcpy(size, first->size, sizeof size);
    for (int i = 1; i < c->n_in; i++) {
        const ddp_meta *m = &c->in[i]->m;
        if (m->dtype != first->dtype)
            return ddp__op_fail(c, DDP_EDTYPE, "tensor 1 is %s, tensor %d %s", ddp_dtype_name(first->dtype), i + 1,
                                ddp_dtype_name(m->dtype));
        bool fits = m->ndim == first->ndim;
        for (int k = 0; fits && k < m->ndim; k++) fits = k == d || m->size[k] == first->size[k];
        if (!fits)
            return ddp__op_fail(c, DDP_ESHAPE, "tensor 1 is %s, tensor %d %s: only dim %d may differ",
                                DDP_SHAPE_TEXT(first), i + 1, DDP_SHAPE_TEXT(m), d);
        size[d] += m->size[d];
    }
    return ddp__out_shape(c, first->dtype, first->ndim, size, out);
}
static int cat_vjp(ddp_vjp *v) {
    int64_t d = ((const ddp_cat_attrs *)v->attrs)->dim, at = 0;
    if (d < 0) d += v->in_meta[0].ndim;
    for (int i = 0; i < v->n_in; i++) {
        int64_t n = v->in_meta[i].size[d];
        if (v->needs[i]) v->grad_in[i] = ddp_slice(v->grad_out[0], d, at, at + n, 1);
        at += n;
    }
    return ddp__pending();
}

static int stack_infer(const ddp_call *c, ddp_meta *out) {
    if (c->n_in == 0) return ddp__op_fail(c, DDP_EINVAL, "no tensors");
    const ddp_meta *first = &c->in[0]->m;
    int d = ddp__wrap_dim(c, ((const ddp_stack_attrs *)c->attrs)->dim, first->ndim + 1);
    if (d < 0) return ddp__pending();
    int64_t size[DDP_MAX_DIM + 1];
    for (int i = 1; i < c->n_in; i++) {
        const ddp_meta *m = &c->in[i]->m;
        if (m->dtype != first->dtype)
            return ddp__op_fail(c, DDP_EDTYPE, "tensor 1 is %s, tensor %d %s", ddp_dtype_name(first->dtype), i + 1,
                                ddp_dtype_name(m->dtype));
        if (!ddp__meta_same_size(m, first))
            return ddp__op_fail(c, DDP_ESHAPE, "tensor 1 is %s, tensor %d %s", DDP_SHAPE_TEXT(first), i + 1,
                                DDP_SHAPE_TEXT(m));
    }
    for (int k = 0; k <= first->ndim; k++) size[k] = k == d ? c->n_in : first->size[k < d ? k : k - 1];
    return ddp__out_shape(c, first->dtype, first->ndim + 1, size, out);
}
static int stack_vjp(ddp_vjp *v) {
    for (int i = 0; i < v->n_in; i++)
        if (v->needs[i]) v->grad_in[i] = ddp_select(v->grad_out[0], ((const ddp_stack_attrs *)v->attrs)->dim, i);
    return ddp__pending();
}

const ddp_op_rules ddp__view_rules = {.infer = view_infer, .vjp = back_to_shape_vjp};
const ddp_op_rules ddp__permute_rules = {.infer = permute_infer, .vjp = permute_vjp};
const ddp_op_rules ddp__transpose_rules = {.infer = transpose_infer, .vjp = transpose_vjp};
const ddp_op_rules ddp__expand_rules = {.infer = expand_infer, .vjp = expand_vjp};
const ddp_op_rules ddp__slice_rules = {.infer = slice_infer, .vjp = slice_vjp};
const ddp_op_rules ddp__select_rules = {.infer = select_infer, .vjp = select_vjp};
const ddp_op_rules ddp__unsqueeze_rules = {.infer = unsqueeze_infer, .vjp = back_to_shape_vjp};
const ddp_op_rules ddp__squeeze_rules = {.infer = squeeze_infer, .vjp = back_to_shape_vjp};
const ddp_op_rules ddp__slice_grad_rules = {.infer = slice_grad_infer, .vjp = slice_grad_vjp};
const ddp_op_rules ddp__cat_rules = {.infer = cat_infer, .vjp = cat_vjp};
const ddp_op_rules ddp__stack_rules = {.infer = stack_infer, .vjp = stack_vjp};
