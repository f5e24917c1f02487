/* shared.c -- what gradient rules of several families use. */
#include <stdlib.h>
#include <string.h>

#include "ops.h"

ddp_tensor *ddp__reshape(ddp_tensor *x, int ndim, const int64_t *size) {
    if (!x) return NULL;
    if (ddp__view_fits(&x->m, ndim, size, NULL)) return ddp_view(x, ndim, size);
    ddp_tensor *copy = ddp_clone(x, 0);
    ddp_tensor *y = ddp_view(copy, ndim, size);
    if (copy && !ddp__in_scope()) ddp_release(copy);
    return y;
}

ddp_tensor *ddp__sum_to(ddp_tensor *g, const ddp_meta *m) {
    if (!g || ddp__meta_same_size(&g->m, m)) return g;
    int64_t dims[DDP_MAX_DIM];
    int n = 0, extra = g->m.ndim - m->ndim;
    for (int d = 0; d < g->m.ndim; d++)
        if (d < extra || (m->size[d - extra] == 1 && g->m.size[d] != 1)) dims[n++] = d;
    ddp_tensor *s = n ? ddp_sum(g, n, dims, 1) : g;
    return s && s->m.ndim != m->ndim ? ddp__reshape(s, m->ndim, m->size) : s;
}

ddp_tensor *ddp__narrowed(ddp_tensor *x, ddp_dtype dtype) {
    return !x || x->m.dtype == dtype ? x : ddp_cast(x, (int)dtype);
}
ddp_tensor *ddp__widened(ddp_tensor *x) { return x ? ddp__narrowed(x, ddp__wide(x->m.dtype)) : NULL; }

int ddp__need_residual(const ddp_call *c, int i, const ddp_meta *y) {
    if (!c->in[i]) return 0;
    if (!ddp__meta_same_size(&c->in[i]->m, y))
        return ddp__op_fail(c, DDP_ESHAPE, "residual is %s, the result %s", DDP_SHAPE_TEXT(&c->in[i]->m),
                            DDP_SHAPE_TEXT(y));
    return ddp__need_dtype(c, i, y->dtype);
}

int ddp__vjp_by_chain(ddp_vjp *v, ddp_chain_fn chain) {
    ddp_tensor *in[16] = {0}, *out[DDP_MAX_OUT] = {0}, *wanted[16], *grads[16] = {0}, *outs[DDP_MAX_OUT],
               *gouts[DDP_MAX_OUT];
    int index[16], n_wanted = 0, n_outs = 0;
    int mode = ddp_set_grad_mode(1);
    for (int i = 0; i < v->n_in; i++) {
        in[i] = v->in[i];
        if (!in[i] || !v->needs[i]) continue;
        /* With a graph wanted the inputs keep their history; an alias of each stands for "this use of it". */
        in[i] = mode ? ddp_view(v->in[i], v->in[i]->m.ndim, v->in[i]->m.size) : ddp_detach(v->in[i]);
        if (mode && !in[i]) break;
        if (!mode) ddp_set_requires_grad(in[i], 1);
        wanted[n_wanted] = in[i];
        index[n_wanted++] = i;
    }
    int st = ddp__pending() ? ddp__pending() : chain(v, in, out);
    for (int i = 0; st == 0 && i < v->n_out; i++) {
        if (!v->grad_out[i] || !out[i]) continue;
        outs[n_outs] = out[i];
        gouts[n_outs++] = v->grad_out[i];
    }
    if (st == 0 && n_outs && n_wanted)
        st = ddp_grad(n_outs, outs, gouts, n_wanted, wanted, mode ? DDP_CREATE_GRAPH : 0, 1, grads);
    for (int i = 0; i < n_wanted; i++) v->grad_in[index[i]] = ddp__scope_own(grads[i]);
    ddp_set_grad_mode(mode);
    return st;
}
