/* matmul.c -- matrix products: shapes and gradients. */
#include "ops.h"

/* ---- matmul ------------------------------------------------------------------------------------------------------ */

static int matmul_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_meta *a = &c->in[0]->m, *b = &c->in[1]->m;
    if (a->dtype != b->dtype)
        return ddp__op_fail(c, DDP_EDTYPE, "a is %s, b %s", ddp_dtype_name(a->dtype), ddp_dtype_name(b->dtype));
    if (a->dtype == DDP_BOOL) return ddp__op_fail(c, DDP_EDTYPE, "not defined for bool; cast to another dtype");
    if (a->ndim == 0 || b->ndim == 0)
        return ddp__op_fail(c, DDP_ESHAPE, "a is %s, b %s: at least 1 dim each", DDP_SHAPE_TEXT(a), DDP_SHAPE_TEXT(b));
    int64_t ka = a->size[a->ndim - 1], kb = b->ndim > 1 ? b->size[b->ndim - 2] : b->size[0];
    if (ka != kb)
        return ddp__op_fail(c, DDP_ESHAPE, "a is %s, b %s: inner sizes %lld and %lld differ", DDP_SHAPE_TEXT(a),
                            DDP_SHAPE_TEXT(b), (long long)ka, (long long)kb);
    int64_t size[DDP_MAX_DIM + 2];
    int na = a->ndim > 2 ? a->ndim - 2 : 0, nb = b->ndim > 2 ? b->ndim - 2 : 0, n = na > nb ? na : nb;
    for (int i = 0; i < n; i++) {
        int64_t sa = i - (n - na) >= 0 ? a->size[i - (n - na)] : 1, sb = i - (n - nb) >= 0 ? b->size[i - (n - nb)] : 1;
        if (sa != sb && sa != 1 && sb != 1)
            return ddp__op_fail(c, DDP_ESHAPE, "a is %s, b %s: batch dims do not broadcast", DDP_SHAPE_TEXT(a),
                                DDP_SHAPE_TEXT(b));
        size[i] = sa == 1 ? sb : sa;
    }
    if (a->ndim > 1) size[n++] = a->size[a->ndim - 2];
    if (b->ndim > 1) size[n++] = b->size[b->ndim - 1];
    return ddp__out_shape(c, a->dtype, n, size, out);
}

static double matmul_flops(const ddp_call *c) {
    const ddp_tensor *a = c->in[0];
    return 2.0 * (double)c->out[0]->numel * (double)a->m.size[a->m.ndim - 1];
}

static ddp_tensor *swap_last(ddp_tensor *x) { return ddp_transpose(x, -2, -1); }

static int matmul_vjp(ddp_vjp *v) {
    ddp_tensor *g = v->grad_out[0], *a = v->in[0], *b = v->in[1];
    const ddp_meta *ma = &v->in_meta[0], *mb = &v->in_meta[1];
    if (mb->ndim == 1) { /* as columns */
        g = ddp_unsqueeze(g, -1);
        b = v->needs[0] ? ddp_unsqueeze(b, -1) : NULL;
    }
    if (ma->ndim == 1) { /* as a row */
        g = ddp_unsqueeze(g, mb->ndim == 1 ? -2 : -2);
        a = v->needs[1] ? ddp_unsqueeze(a, 0) : NULL;
    }
    if (v->needs[0]) {
        ddp_tensor *d = ddp_matmul(g, swap_last(b));
        if (ma->ndim == 1 && d)
            d = ddp__reshape(ddp__sum_to(d, &(ddp_meta){.ndim = 2, .size = {1, ma->size[0]}}), 1, ma->size);
        v->grad_in[0] = ddp__sum_to(d, ma);
    }
    if (v->needs[1]) {
        ddp_tensor *d;
        if (mb->ndim <= 2 && ddp_ndim(a) > 2) { /* one product over all rows */
            d = ddp_matmul(swap_last(ddp__reshape(a, 2, (int64_t[]){-1, ddp_size(a, -1)})),
                           ddp__reshape(g, 2, (int64_t[]){-1, ddp_size(g, -1)}));
        } else {
            d = ddp_matmul(swap_last(a), g);
        }
        if (mb->ndim == 1 && d)
            d = ddp__reshape(ddp__sum_to(d, &(ddp_meta){.ndim = 2, .size = {mb->size[0], 1}}), 1, mb->size);
        v->grad_in[1] = ddp__sum_to(d, mb);
    }
    return ddp__pending();
}

/* ---- linear -------------------------------------------------------------------------------------------------------- */

int ddp__linear_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_meta *x = &c->in[0]->m, *w = &c->in[1]->m, *b = c->in[2] ? &c->in[2]->m : NULL;
    int st;
    if ((st = ddp__need_float(c, 0)) < 0 || (st = ddp__need_ndim(c, 1, 2)) < 0) return st;
    if ((st = ddp__need_dtype(c, 1, x->dtype)) < 0 || (st = ddp__need_dtype(c, 2, x->dtype)) < 0) return st;
    if (x->ndim == 0 || x->size[x->ndim - 1] != w->size[1])
        return ddp__op_fail(c, DDP_ESHAPE, "w is %s, x %s: the last size of x must be %lld", DDP_SHAPE_TEXT(w),
                            DDP_SHAPE_TEXT(x), (long long)w->size[1]);
    if (b && (b->ndim != 1 || b->size[0] != w->size[0]))
        return ddp__op_fail(c, DDP_ESHAPE, "bias is %s, w %s: expected [%lld]", DDP_SHAPE_TEXT(b), DDP_SHAPE_TEXT(w),
                            (long long)w->size[0]);
    int64_t size[DDP_MAX_DIM];
    for (int i = 0; i < x->ndim; i++) size[i] = x->size[i];
    size[x->ndim - 1] = w->size[0];
    return ddp__out_shape(c, x->dtype, x->ndim, size, out);
}

static double linear_flops(const ddp_call *c) { return 2.0 * (double)c->out[0]->numel * (double)c->in[1]->m.size[1]; }

static int linear_vjp(ddp_vjp *v) {
    ddp_tensor *g = v->grad_out[0];
    if (v->needs[0]) v->grad_in[0] = ddp_matmul(g, v->in[1]);
    if (!v->needs[1] && !v->needs[2]) return ddp__pending();
    ddp_tensor *rows = ddp_ndim(g) == 2 ? g : ddp__reshape(g, 2, (int64_t[]){-1, ddp_size(g, -1)});
    if (v->needs[1]) {
        ddp_tensor *x =
            ddp_ndim(v->in[0]) == 2 ? v->in[0] : ddp__reshape(v->in[0], 2, (int64_t[]){-1, ddp_size(v->in[0], -1)});
        v->grad_in[1] = ddp_matmul(swap_last(rows), x);
    }
    if (v->needs[2]) v->grad_in[2] = ddp_sum(rows, 1, (int64_t[]){0}, 0);
    return ddp__pending();
}

const ddp_op_rules ddp__matmul_rules = {
    .infer = matmul_infer, .vjp = matmul_vjp, .saves = DDP_SAVE_IN(0) | DDP_SAVE_IN(1), .flops = matmul_flops};
const ddp_op_rules ddp__linear_rules = {
    .infer = ddp__linear_infer, .vjp = linear_vjp, .saves = DDP_SAVE_IN(0) | DDP_SAVE_IN(1), .flops = linear_flops};
