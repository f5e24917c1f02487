/* index.c -- picking by position, and adding back: each is the other's gradient. */
#include <string.h>

#include "ops.h"

/* Every id in 0 .. n-1; reads the ids, which the cpu has at hand. On a device the kernel notes one out of range, and the host's next
 * wait raises it. */
static int check_ids(const ddp_call *c, int64_t n) {
    const ddp_tensor *ids = c->in[1];
    int64_t idx[DDP_MAX_DIM] = {0}, at = 0;
    if (ids->m.device != DDP_CPU) return 0;
    const int64_t *p = (const int64_t *)(const void *)ddp__ptr(ids);
    for (int64_t i = 0; i < ids->numel; i++) {
        if (p[at] < 0 || p[at] >= n)
            return ddp__op_fail(c, DDP_EINVAL, "id %lld at position %lld, expected 0 to %lld", (long long)p[at],
                                (long long)i, (long long)n - 1);
        for (int d = ids->m.ndim - 1; d >= 0; d--) {
            at += ids->m.stride[d];
            if (++idx[d] < ids->m.size[d]) break;
            at -= ids->m.stride[d] * ids->m.size[d];
            idx[d] = 0;
        }
    }
    return 0;
}

static int index_dim(const ddp_call *c, int64_t dim, int ndim) {
    if (ndim == 0) {
        ddp__op_fail(c, DDP_ESHAPE, "x has no dims to index");
        return -1;
    }
    return ddp__need_dtype(c, 1, DDP_I64) < 0 ? -1 : ddp__wrap_dim(c, dim, ndim);
}

/* ---- index_select --------------------------------------------------------------------------------------------------
 */

static int index_select_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_meta *x = &c->in[0]->m;
    int d = index_dim(c, ((const ddp_index_select_attrs *)c->attrs)->dim, x->ndim), st;
    if (d < 0) return ddp__pending();
    if ((st = ddp__need_ndim(c, 1, 1)) < 0 || (st = check_ids(c, x->size[d])) < 0) return st;
    int64_t size[DDP_MAX_DIM];
    memcpy(size, x->size, sizeof size);
    size[d] = c->in[1]->m.size[0];
    return ddp__out_shape(c, x->dtype, x->ndim, size, out);
}
static int index_select_vjp(ddp_vjp *v) {
    int64_t dim = ((const ddp_index_select_attrs *)v->attrs)->dim;
    if (v->needs[0])
        v->grad_in[0] = ddp_index_select_grad(v->grad_out[0], v->in[1], v->in_meta[0].ndim, v->in_meta[0].size, dim);
    return ddp__pending();
}
static int index_select_grad_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_index_select_grad_attrs *a = c->attrs;
    int st, d = index_dim(c, a->dim, (int)a->x_size.n);
    if (d < 0) return ddp__pending();
    if ((st = ddp__need_ndim(c, 1, 1)) < 0 || (st = check_ids(c, a->x_size.v[d])) < 0) return st;
    ddp_meta want = {.ndim = (int)a->x_size.n};
    memcpy(want.size, a->x_size.v, sizeof want.size);
    want.size[d] = c->in[1]->m.size[0];
    if (!ddp__meta_same_size(&want, &c->in[0]->m))
        return ddp__op_fail(c, DDP_ESHAPE, "g is %s, expected %s", DDP_SHAPE_TEXT(&c->in[0]->m), DDP_SHAPE_TEXT(&want));
    return ddp__out_shape(c, c->in[0]->m.dtype, (int)a->x_size.n, a->x_size.v, out);
}
static int index_select_grad_vjp(ddp_vjp *v) {
    if (v->needs[0])
        v->grad_in[0] =
            ddp_index_select(v->grad_out[0], v->in[1], ((const ddp_index_select_grad_attrs *)v->attrs)->dim);
    return ddp__pending();
}

/* ---- gather ---- */

/* ids may be shorter than x along the other dims, never longer. */
static int gather_shapes(const ddp_call *c, int dim, int ndim, const int64_t *x) {
    const ddp_meta *ids = &c->in[1]->m;
    bool fits = ids->ndim == ndim;
    for (int d = 0; fits && d < ndim; d++) fits = d == dim || ids->size[d] <= x[d];
    if (!fits)
        return ddp__op_fail(c, DDP_ESHAPE, "ids are %s, x %s", DDP_SHAPE_TEXT(ids),
                            ddp__shape_text(ndim, x, (char[160]){0}, 160));
    return check_ids(c, x[dim]);
}

static int gather_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_meta *x = &c->in[0]->m;
    int st, d = index_dim(c, ((const ddp_gather_attrs *)c->attrs)->dim, x->ndim);
    if (d < 0) return ddp__pending();
    if ((st = gather_shapes(c, d, x->ndim, x->size)) < 0) return st;
    return ddp__out_shape(c, x->dtype, x->ndim, c->in[1]->m.size, out);
}
static int gather_vjp(ddp_vjp *v) {
    int64_t dim = ((const ddp_gather_attrs *)v->attrs)->dim;
    if (v->needs[0])
        v->grad_in[0] = ddp_gather_grad(v->grad_out[0], v->in[1], v->in_meta[0].ndim, v->in_meta[0].size, dim);
    return ddp__pending();
}
static int gather_grad_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_gather_grad_attrs *a = c->attrs;
    int st, d = index_dim(c, a->dim, (int)a->x_size.n);
    if (d < 0) return ddp__pending();
    if ((st = gather_shapes(c, d, (int)a->x_size.n, a->x_size.v)) < 0) return st;
    if (!ddp__meta_same_size(&c->in[0]->m, &c->in[1]->m))
        return ddp__op_fail(c, DDP_ESHAPE, "g is %s, ids %s", DDP_SHAPE_TEXT(&c->in[0]->m),
                            DDP_SHAPE_TEXT(&c->in[1]->m));
    return ddp__out_shape(c, c->in[0]->m.dtype, (int)a->x_size.n, a->x_size.v, out);
}
static int gather_grad_vjp(ddp_vjp *v) {
    if (v->needs[0])
        v->grad_in[0] = ddp_gather(v->grad_out[0], v->in[1], ((const ddp_gather_grad_attrs *)v->attrs)->dim);
    return ddp__pending();
}

/* ---- embedding: index_select of rows by ids of any shape ---- */

static int embedding_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_meta *w = &c->in[0]->m, *ids = &c->in[1]->m;
    int64_t size[DDP_MAX_DIM + 1];
    int st;
    if ((st = ddp__need_ndim(c, 0, 2)) < 0 || (st = ddp__need_dtype(c, 1, DDP_I64)) < 0) return st;
    if ((st = check_ids(c, w->size[0])) < 0) return st;
    memcpy(size, ids->size, sizeof ids->size);
    size[ids->ndim] = w->size[1];
    return ddp__out_shape(c, w->dtype, ids->ndim + 1, size, out);
}
static int embedding_vjp(ddp_vjp *v) {
    if (v->needs[0]) v->grad_in[0] = ddp_embedding_grad(v->grad_out[0], v->in[1], v->in_meta[0].size[0]);
    return ddp__pending();
}
static int embedding_grad_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_meta *g = &c->in[0]->m, *ids = &c->in[1]->m;
    int64_t rows = ((const ddp_embedding_grad_attrs *)c->attrs)->rows;
    int st = ddp__need_dtype(c, 1, DDP_I64);
    if (st < 0 || (st = check_ids(c, rows)) < 0) return st;
    bool fits = g->ndim == ids->ndim + 1;
    for (int d = 0; fits && d < ids->ndim; d++) fits = g->size[d] == ids->size[d];
    if (!fits) return ddp__op_fail(c, DDP_ESHAPE, "g is %s, ids %s", DDP_SHAPE_TEXT(g), DDP_SHAPE_TEXT(ids));
    return ddp__out_shape(c, g->dtype, 2, (int64_t[]){rows, g->size[ids->ndim]}, out);
}
static int embedding_grad_vjp(ddp_vjp *v) {
    if (v->needs[0]) v->grad_in[0] = ddp_embedding(v->grad_out[0], v->in[1]);
    return ddp__pending();
}

#define IDS DDP_SAVE_IN(1)
const ddp_op_rules ddp__index_select_rules = {.infer = index_select_infer, .vjp = index_select_vjp, .saves = IDS};
const ddp_op_rules ddp__index_select_grad_rules = {
    .infer = index_select_grad_infer, .vjp = index_select_grad_vjp, .saves = IDS};
const ddp_op_rules ddp__gather_rules = {.infer = gather_infer, .vjp = gather_vjp, .saves = IDS};
const ddp_op_rules ddp__gather_grad_rules = {.infer = gather_grad_infer, .vjp = gather_grad_vjp, .saves = IDS};
const ddp_op_rules ddp__embedding_rules = {.infer = embedding_infer, .vjp = embedding_vjp, .saves = IDS};
const ddp_op_rules ddp__embedding_grad_rules = {.infer = embedding_grad_infer, .vjp = embedding_grad_vjp, .saves = IDS};
