/* matmul.c -- matmul, linear and linear_act by our own kernels: of integers, and of all where cuBLAS is not there. One launch. */
#include <string.h>

#include "product.h"

/* ---- from a call to a product ---- */

static void batch_strides(const ddp_meta *m, int own, int batch_dims, int64_t *stride) {
    for (int i = 0; i < batch_dims; i++) {
        int k = i - (batch_dims - own);
        stride[i] = k >= 0 && m->size[k] != 1 ? m->stride[k] : 0;
    }
}

static void matmul_of(matmul_args *p, const ddp_meta *a, const ddp_meta *b, const ddp_meta *y) {
    bool row = a->ndim == 1, col = b->ndim == 1;
    p->M = row ? 1 : a->size[a->ndim - 2];
    p->K = a->size[a->ndim - 1];
    p->N = col ? 1 : b->size[b->ndim - 1];
    p->am = row ? 0 : a->stride[a->ndim - 2];
    p->ak = a->stride[a->ndim - 1];
    p->bk = col ? b->stride[0] : b->stride[b->ndim - 2];
    p->bn = col ? 0 : b->stride[b->ndim - 1];
    p->batch_dims = y->ndim - !row - !col;
    p->ym = row ? 0 : y->stride[p->batch_dims];
    p->yn = col ? 0 : y->stride[y->ndim - 1];
    batch_strides(a, a->ndim > 2 ? a->ndim - 2 : 0, p->batch_dims, p->sa);
    batch_strides(b, b->ndim > 2 ? b->ndim - 2 : 0, p->batch_dims, p->sb);
}

static void linear_of(matmul_args *p, const ddp_meta *x, const ddp_meta *w, const ddp_meta *y) {
    bool row = x->ndim == 1;
    p->M = row ? 1 : x->size[x->ndim - 2];
    p->K = w->size[1];
    p->N = w->size[0];
    p->am = row ? 0 : x->stride[x->ndim - 2];
    p->ak = x->stride[x->ndim - 1];
    p->bk = w->stride[1];
    p->bn = w->stride[0];
    p->batch_dims = row ? 0 : x->ndim - 2;
    p->ym = row ? 0 : y->stride[y->ndim - 2];
    p->yn = y->stride[y->ndim - 1];
    batch_strides(x, p->batch_dims, p->batch_dims, p->sa);
}

static void drop_dim(matmul_args *p, int d) {
    int after = --p->batch_dims - d;
    int64_t *lists[4] = {p->size, p->sa, p->sb, p->sy};
    for (int i = 0; i < 4; i++) memmove(lists[i] + d, lists[i] + d + 1, (size_t)after * sizeof **lists);
}

/* Dim d and the next one are one where all three walk through both evenly. */
static bool even(const matmul_args *p, int d) {
    int64_t n = p->size[d + 1];
    return p->sa[d] == n * p->sa[d + 1] && p->sb[d] == n * p->sb[d + 1] && p->sy[d] == n * p->sy[d + 1];
}

static void merge_batches(matmul_args *p) {
    for (int d = p->batch_dims - 1; d >= 0; d--)
        if (p->size[d] == 1) drop_dim(p, d);
    for (int d = p->batch_dims - 2; d >= 0; d--) {
        if (!even(p, d)) continue;
        p->size[d + 1] *= p->size[d];
        drop_dim(p, d);
    }
}

/* A batch of a against one b is one tall product where the rows of a and y lie evenly. */
static void merge_rows(matmul_args *p) {
    while (p->batch_dims > 0) {
        int last = p->batch_dims - 1;
        for (int i = 0; i <= last; i++)
            if (p->sb[i] != 0) return;
        if (p->M == 1) {
            p->am = p->sa[last];
            p->ym = p->sy[last];
        } else if (p->sa[last] != p->M * p->am || p->sy[last] != p->M * p->ym) {
            return;
        }
        p->M *= p->size[last];
        drop_dim(p, last);
    }
}

void ddp__product_of(matmul_args *p, const ddp_call *c, const ddp_tensor *a, const ddp_tensor *b) {
    const ddp_tensor *y = c->out[0];
    memset(p, 0, sizeof *p);
    p->a = ddp__ptr(a);
    p->b = ddp__ptr(b);
    p->y = ddp__ptr(y);
    if (c->op->id == DDP_OP_matmul) matmul_of(p, &a->m, &b->m, &y->m);
    else linear_of(p, &a->m, &b->m, &y->m);
    for (int i = 0; i < p->batch_dims; i++) {
        p->size[i] = y->m.size[i];
        p->sy[i] = y->m.stride[i];
    }
    merge_batches(p);
    merge_rows(p);
    p->batches = 1;
    for (int i = 0; i < p->batch_dims; i++) p->batches *= p->size[i];
}

ddp_tensor *ddp__product_pre(const ddp_call *c) {
    ddp_tensor *y = c->out[0], *pre = c->op->id == DDP_OP_linear_act ? c->out[1] : NULL;
    return pre && pre->m.ndim == y->m.ndim && pre->numel == y->numel ? pre : NULL;
}

/* ---- copies that lie row by row ---- */

int ddp__dense_copy_take(const ddp_call *c, dense_copy *d, const ddp_tensor *t) {
    d->bytes = (size_t)t->numel * ddp__dtype_bytes[t->m.dtype];
    d->t.m = t->m;
    ddp__meta_rowmajor(&d->t.m);
    d->t.numel = t->numel;
    d->t.storage = &d->storage;
    d->storage.device = t->m.device;
    d->storage.bytes = d->bytes;
    if (!(d->storage.data = ddp__cuda_scratch_take(c, d->bytes))) return ddp__pending();
    return ddp__cuda_copy(c, &d->t, t);
}

void ddp__dense_copy_give(const ddp_call *c, dense_copy *d) {
    if (d->storage.data) ddp__cuda_scratch_give(c, d->storage.data, d->bytes);
}

/* ---- kernels ---- */

static ddp_grid grid_of(const matmul_args *p) {
    enum { MOST = 1 << 20 };
    int64_t tile = PRODUCT_TILE, n = (p->M + tile - 1) / tile * ((p->N + tile - 1) / tile) * p->batches;
    return ddp__grid_rows(n < MOST ? n : MOST, PRODUCT_THREADS);
}

static int run_matmul(const ddp_call *c) {
    matmul_args p;
    if (c->out[0]->numel == 0) return 0;
    ddp__product_of(&p, c, c->in[0], c->in[1]);
    return ddp__launch_matmul(c, c->in[0]->m.dtype, &p, grid_of(&p));
}
DDP_CUDA_KERNEL(matmul, NULL, run_matmul);

static int run_linear(const ddp_call *c) {
    matmul_args p;
    dense_copy residual = {0};
    const ddp_tensor *bias = c->in[2], *r = c->op->id == DDP_OP_linear_act ? c->in[3] : NULL;
    ddp_tensor *pre = ddp__product_pre(c);
    int st = 0;
    if (c->out[0]->numel == 0) return 0;
    ddp__product_of(&p, c, c->in[0], c->in[1]);
    if (r && !ddp__meta_is_rowmajor(&r->m)) {
        st = ddp__dense_copy_take(c, &residual, r);
        r = &residual.t;
    }
    if (bias) {
        p.bias = ddp__ptr(bias);
        p.bias_stride = bias->m.stride[0];
    }
    if (c->op->id == DDP_OP_linear_act) p.act = (int32_t)((const ddp_linear_act_attrs *)c->attrs)->act;
    if (r) p.residual = ddp__ptr(r);
    if (pre) p.pre = ddp__ptr(pre);
    if (st == 0) st = ddp__launch_linear(c, c->in[0]->m.dtype, &p, grid_of(&p));
    ddp__dense_copy_give(c, &residual);
    return st;
}
DDP_CUDA_KERNEL(linear, NULL, run_linear);
DDP_CUDA_KERNEL(linear_act, NULL, run_linear);
