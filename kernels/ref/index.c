/* index.c -- reference picking by position and adding back. */
#include <string.h>

#include "ref.h"

/* Logical position in x of the element that position i of a tensor shaped like `small` names, its dim `dim` replaced by
 * `at`. */
static int64_t picked(const ddp_meta *x, const ddp_meta *small, int dim, int64_t i, int64_t at) {
    int64_t o = 0, step = 1;
    for (int d = small->ndim - 1; d >= 0; d--) {
        o += (d == dim ? at : i % small->size[d]) * step;
        i /= small->size[d];
        step *= x->size[d];
    }
    return o;
}

static int64_t id_at(const ddp_tensor *ids, int64_t i) {
    return ((const int64_t *)(const void *)ddp__ptr(ids))[ref_at(&ids->m, i)];
}

/* Position along dim of logical position i. */
static int64_t along(const ddp_meta *m, int dim, int64_t i) {
    for (int d = m->ndim - 1; d > dim; d--) i /= m->size[d];
    return i % m->size[dim];
}

/* y = x at ids; whole slices (ids 1-D) or element by element. */
static int take(const ddp_call *c, int64_t dim, bool slices) {
    const ddp_tensor *x = c->in[0], *ids = c->in[1];
    ddp_tensor *y = c->out[0];
    int d = (int)(dim < 0 ? dim + x->m.ndim : dim);
    size_t bytes = ddp__dtype_bytes[x->m.dtype];
    for (int64_t i = 0; i < y->numel; i++) {
        int64_t id = id_at(ids, slices ? along(&y->m, d, i) : i);
        memcpy(ddp__ptr(y) + (size_t)ref_at(&y->m, i) * bytes,
               ddp__ptr(x) + (size_t)ref_at(&x->m, picked(&x->m, &y->m, d, i, id)) * bytes, bytes);
    }
    return 0;
}

static int add_back(const ddp_call *c, int64_t dim, bool slices) {
    const ddp_tensor *g = c->in[0], *ids = c->in[1];
    ddp_tensor *dx = c->out[0];
    int d = (int)(dim < 0 ? dim + dx->m.ndim : dim);
    double *sums = ref_sums(c, dx->numel);
    if (!sums) return ddp__pending();
    for (int64_t i = 0; i < g->numel; i++)
        sums[picked(&dx->m, &g->m, d, i, id_at(ids, slices ? along(&g->m, d, i) : i))] += ref_get(g, i);
    ref_put_sums(dx, sums);
    return 0;
}

static int run_index_select(const ddp_call *c) {
    return take(c, ((const ddp_index_select_attrs *)c->attrs)->dim, true);
}
DDP_REF_KERNEL(index_select, run_index_select);
static int run_gather(const ddp_call *c) { return take(c, ((const ddp_gather_attrs *)c->attrs)->dim, false); }
DDP_REF_KERNEL(gather, run_gather);
static int run_index_select_grad(const ddp_call *c) {
    return add_back(c, ((const ddp_index_select_grad_attrs *)c->attrs)->dim, true);
}
DDP_REF_KERNEL(index_select_grad, run_index_select_grad);
static int run_gather_grad(const ddp_call *c) {
    return add_back(c, ((const ddp_gather_grad_attrs *)c->attrs)->dim, false);
}
DDP_REF_KERNEL(gather_grad, run_gather_grad);

static int run_embedding(const ddp_call *c) {
    const ddp_tensor *w = c->in[0], *y = c->out[0];
    int64_t E = w->m.size[1];
    size_t bytes = ddp__dtype_bytes[w->m.dtype];
    for (int64_t i = 0; i < y->numel; i++) {
        int64_t from = id_at(c->in[1], i / E) * w->m.stride[0] + i % E * w->m.stride[1];
        memcpy(ddp__ptr(y) + (size_t)ref_at(&y->m, i) * bytes, ddp__ptr(w) + (size_t)from * bytes, bytes);
    }
    return 0;
}
DDP_REF_KERNEL(embedding, run_embedding);

static int run_embedding_grad(const ddp_call *c) {
    const ddp_tensor *g = c->in[0], *dw = c->out[0];
    int64_t E = dw->m.size[1];
    double *sums = ref_sums(c, dw->numel);
    if (!sums) return ddp__pending();
    for (int64_t i = 0; i < g->numel; i++) sums[id_at(c->in[1], i / E) * E + i % E] += ref_get(g, i);
    ref_put_sums(dw, sums);
    return 0;
}
DDP_REF_KERNEL(embedding_grad, run_embedding_grad);
