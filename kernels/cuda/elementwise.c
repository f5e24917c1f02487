/* elementwise.c -- elementwise ops and copies: operands side by side, then the kernel of their dtype. */
#include <string.h>

#include "cuda.h"

/* Operands with memory all lie densely in the result's order, each where 16 bytes may be read at once. */
static bool dense(const ddp_iter *it, const walk_args *a) {
    if (it->ndim > 1) return false;
    for (int k = 0; k < it->n; k++) {
        if (!a->p[k]) continue;
        if ((it->ndim == 1 && it->stride[k][0] != 1) || (uintptr_t)a->p[k] % 16 != 0) return false;
    }
    return true;
}

void ddp__cuda_walk(walk_args *a, int n, ddp_tensor *const *t) {
    ddp_iter it;
    ddp_tensor *shaped[WALK_MAX] = {t[0]};
    memset(a, 0, sizeof *a);
    for (int k = 1; k < n; k++) shaped[k] = t[k]->is_number ? t[0] : t[k]; /* a number's strides are never used */
    ddp__iter_init(&it, n, shaped);
    a->n = it.numel;
    for (int k = 0; k < n; k++) {
        if (t[k]->is_number && k) {
            a->number[k] = ddp__load(t[k]->m.dtype, ddp__ptr(t[k]), 0);
            a->whole[k] = t[k]->m.dtype == DDP_I64 ? *(const int64_t *)(const void *)ddp__ptr(t[k])
                          : a->number[k] >= -0x1p63 && a->number[k] < 0x1p63 ? (int64_t)a->number[k]
                                                                             : 0;
        } else {
            a->p[k] = it.ptr[k];
        }
    }
    if (dense(&it, a)) return;
    a->ndim = it.ndim ? it.ndim : 1;
    a->size[0] = 1;
    for (int d = 0; d < it.ndim; d++) {
        a->size[d] = it.size[d];
        for (int k = 0; k < n; k++) a->stride[k][d] = a->p[k] ? it.stride[k][d] : 0;
    }
}

static ddp_grid grid_of(const walk_args *a, ddp_dtype d) {
    return ddp__grid(a->n, a->ndim ? 4 : 16 / ddp__dtype_bytes[d]);
}

/* The dtype that a kernel of these operands is named by: the first input with memory; numbers alone are computed in their own. */
static ddp_dtype dtype_of(const ddp_call *c) {
    for (int i = 0; i < c->n_in; i++)
        if (!c->in[i]->is_number) return c->in[i]->m.dtype;
    return c->in[0]->m.dtype;
}

static int run_walk(const ddp_call *c, int kernel) {
    ddp_tensor *t[3] = {c->out[0], c->in[0], c->n_in > 1 ? c->in[1] : NULL};
    walk_args a;
    ddp__cuda_walk(&a, 1 + c->n_in, t);
    ddp_dtype d = dtype_of(c);
    return ddp__cuda_launch(c, kernel + (int)d, &a, grid_of(&a, d));
}

#define ENTRY(op)                                                              \
    static int run_##op(const ddp_call *c) { return run_walk(c, DDP_K_##op); } \
    DDP_CUDA_KERNEL(op, NULL, run_##op);
#define DDP_BINARY(op, expr) ENTRY(op)
#define DDP_BINARY_FLOAT(op, expr) ENTRY(op)
#define DDP_COMPARE(op, expr) ENTRY(op)
#define DDP_UNARY(op, expr) ENTRY(op)
#define DDP_UNARY_FLOAT(op, expr) ENTRY(op)
#include "../elementwise.def"

static int run_gelu(const ddp_call *c) {
    return run_walk(c, ((const ddp_gelu_attrs *)c->attrs)->tanh ? DDP_K_gelu_tanh : DDP_K_gelu_exact);
}
DDP_CUDA_KERNEL(gelu, NULL, run_gelu);
static int run_gelu_grad(const ddp_call *c) {
    return run_walk(c, ((const ddp_gelu_grad_attrs *)c->attrs)->tanh ? DDP_K_gelu_grad_tanh : DDP_K_gelu_grad_exact);
}
DDP_CUDA_KERNEL(gelu_grad, NULL, run_gelu_grad);

static int run_clamp(const ddp_call *c) {
    const ddp_clamp_attrs *at = c->attrs;
    ddp_tensor *t[2] = {c->out[0], c->in[0]};
    walk_args a;
    ddp__cuda_walk(&a, 2, t);
    a.attrs[0] = at->min;
    a.attrs[1] = at->max;
    return ddp__launch_clamp(c, t[1]->m.dtype, &a, grid_of(&a, t[1]->m.dtype));
}
DDP_CUDA_KERNEL(clamp, NULL, run_clamp);

/* ---- copies ---- */

int ddp__cuda_copy(const ddp_call *c, ddp_tensor *dst, const ddp_tensor *src) {
    ddp_tensor *t[2] = {dst, (ddp_tensor *)(uintptr_t)src};
    walk_args a;
    ddp__cuda_walk(&a, 2, t);
    a.attr = (int32_t)src->m.dtype;
    ddp_grid g = grid_of(&a, src->m.dtype);
    if (dst->m.dtype != src->m.dtype || src->is_number) return ddp__launch_cast(c, dst->m.dtype, &a, g);
    switch (ddp__dtype_bytes[dst->m.dtype]) {
        case 1: return ddp__launch_copy_1(c, &a, g);
        case 2: return ddp__launch_copy_2(c, &a, g);
        case 4: return ddp__launch_copy_4(c, &a, g);
        default: return ddp__launch_copy_8(c, &a, g);
    }
}

static int run_cast(const ddp_call *c) { return ddp__cuda_copy(c, c->out[0], c->in[0]); }
DDP_CUDA_KERNEL(cast, NULL, run_cast);
DDP_CUDA_KERNEL(clone, NULL, run_cast);
static int run_copy_(const ddp_call *c) { return ddp__cuda_copy(c, c->out[0], c->in[1]); }
DDP_CUDA_KERNEL(copy_, NULL, run_copy_);

static int fill(const ddp_call *c, double value) {
    walk_args a;
    ddp__cuda_walk(&a, 1, c->out);
    a.attrs[0] = value;
    return ddp__launch_fill(c, c->out[0]->m.dtype, &a, grid_of(&a, c->out[0]->m.dtype));
}
static int run_fill_(const ddp_call *c) { return fill(c, ((const ddp_fill__attrs *)c->attrs)->value); }
DDP_CUDA_KERNEL(fill_, NULL, run_fill_);
static int run_full(const ddp_call *c) { return fill(c, ((const ddp_full_attrs *)c->attrs)->value); }
DDP_CUDA_KERNEL(full, NULL, run_full);

static int run_where(const ddp_call *c) {
    ddp_tensor *t[4] = {c->out[0], c->in[0], c->in[1], c->in[2]};
    walk_args a;
    ddp__cuda_walk(&a, 4, t);
    return ddp__launch_where(c, c->out[0]->m.dtype, &a, ddp__grid(a.n, 4));
}
DDP_CUDA_KERNEL(where, NULL, run_where);
