/* matmul.c -- reference matrix products: one element at a time, floats added in double. */
#include <math.h>

#include "ref.h"

/* sum over k of a[ai + k*as] * b[bi + k*bs], of floats. */
static double sum_of_products(const ddp_tensor *a, int64_t ai, int64_t as, const ddp_tensor *b, int64_t bi, int64_t bs,
                              int64_t k) {
    const void *p = ddp__ptr(a), *q = ddp__ptr(b);
    double s = 0;
    if (a->m.dtype == DDP_F32) {
        for (int64_t i = 0; i < k; i++) s += (double)((const float *)p)[ai + i * as] * ((const float *)q)[bi + i * bs];
    } else if (a->m.dtype == DDP_F64) {
        for (int64_t i = 0; i < k; i++) s += ((const double *)p)[ai + i * as] * ((const double *)q)[bi + i * bs];
    } else {
        for (int64_t i = 0; i < k; i++)
            s += ddp__load(a->m.dtype, p, ai + i * as) * ddp__load(a->m.dtype, q, bi + i * bs);
    }
    return s;
}

/* The same of any dtype, stored at y[yi], plus bias. */
static void dot(const ddp_tensor *a, int64_t ai, int64_t as, const ddp_tensor *b, int64_t bi, int64_t bs, int64_t k,
                ddp_tensor *y, int64_t yi, double bias) {
    const void *p = ddp__ptr(a), *q = ddp__ptr(b);
    if (ddp__is_float(a->m.dtype)) {
        ddp__store(y->m.dtype, ddp__ptr(y), yi, bias + sum_of_products(a, ai, as, b, bi, bs, k));
    } else if (a->m.dtype == DDP_I64) {
        uint64_t s = 0;
        for (int64_t i = 0; i < k; i++)
            s += (uint64_t)((const int64_t *)p)[ai + i * as] * (uint64_t)((const int64_t *)q)[bi + i * bs];
        ((int64_t *)(void *)ddp__ptr(y))[yi] = (int64_t)s;
    } else { /* the narrow integers wrap to their own width */
        uint32_t s = 0;
        for (int64_t i = 0; i < k; i++)
            s += (uint32_t)(int32_t)ddp__load(a->m.dtype, p, ai + i * as) *
                 (uint32_t)(int32_t)ddp__load(b->m.dtype, q, bi + i * bs);
        if (y->m.dtype == DDP_I32) ((int32_t *)(void *)ddp__ptr(y))[yi] = (int32_t)s;
        else ((uint8_t *)ddp__ptr(y))[yi] = (uint8_t)s;
    }
}

static int run_matmul(const ddp_call *c) {
    const ddp_tensor *a = c->in[0], *b = c->in[1];
    ddp_tensor *y = c->out[0];
    bool row = a->m.ndim == 1, col = b->m.ndim == 1;
    int64_t M = row ? 1 : a->m.size[a->m.ndim - 2], K = a->m.size[a->m.ndim - 1],
            N = col ? 1 : b->m.size[b->m.ndim - 1];
    int64_t am = row ? 0 : a->m.stride[a->m.ndim - 2], ak = a->m.stride[a->m.ndim - 1];
    int64_t bk = col ? b->m.stride[0] : b->m.stride[b->m.ndim - 2], bn = col ? 0 : b->m.stride[b->m.ndim - 1];
    int batch_dims = y->m.ndim - !row - !col;
    int64_t ym = row ? 0 : y->m.stride[batch_dims], yn = col ? 0 : y->m.stride[y->m.ndim - 1], batches = 1;
    for (int d = 0; d < batch_dims; d++) batches *= y->m.size[d];
    for (int64_t t = 0; t < batches; t++) {
        int64_t ai = 0, bi = 0, yi = 0, left = t;
        for (int d = batch_dims - 1; d >= 0; d--) {
            int64_t i = left % y->m.size[d];
            left /= y->m.size[d];
            int da = d - (batch_dims - (a->m.ndim - 2)), db = d - (batch_dims - (b->m.ndim - 2));
            if (da >= 0 && a->m.ndim > 2 && a->m.size[da] != 1) ai += i * a->m.stride[da];
            if (db >= 0 && b->m.ndim > 2 && b->m.size[db] != 1) bi += i * b->m.stride[db];
            yi += i * y->m.stride[d];
        }
        for (int64_t m = 0; m < M; m++)
            for (int64_t n = 0; n < N; n++) dot(a, ai + m * am, ak, b, bi + n * bn, bk, K, y, yi + m * ym + n * yn, 0);
    }
    return 0;
}
DDP_REF_KERNEL(matmul, run_matmul);

static int run_linear(const ddp_call *c) {
    const ddp_tensor *x = c->in[0], *w = c->in[1], *b = c->in[2];
    ddp_tensor *y = c->out[0];
    int last = x->m.ndim - 1;
    int64_t K = w->m.size[1], N = w->m.size[0], rows = N ? y->numel / N : 0;
    ddp_meta mx = x->m, my = y->m; /* without the last dim: offsets of rows */
    mx.ndim = my.ndim = last;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t n = 0; n < N; n++)
            dot(x, ref_at(&mx, r), x->m.stride[last], w, n * w->m.stride[0], w->m.stride[1], K, y,
                ref_at(&my, r) + n * y->m.stride[last], b ? ref_get(b, n) : 0);
    return 0;
}
DDP_REF_KERNEL(linear, run_linear);

static double activated(int64_t act, double z) {
    if (act == DDP_ACT_RELU) return z < 0 ? 0 : z;
    if (act == DDP_ACT_GELU) return z * .5 * (1 + erf(z * 0.70710678118654752440));
    if (act == DDP_ACT_GELU_TANH) return .5 * z * (1 + tanh(0.79788456080286535588 * z * (1 + 0.044715 * z * z)));
    return z;
}

static int run_linear_act(const ddp_call *c) {
    const ddp_linear_act_attrs *a = c->attrs;
    const ddp_tensor *x = c->in[0], *w = c->in[1], *b = c->in[2], *residual = c->in[3];
    ddp_tensor *y = c->out[0], *pre = c->out[1];
    int last = x->m.ndim - 1;
    int64_t K = w->m.size[1], N = w->m.size[0];
    bool keeps = a->save && pre->m.ndim == y->m.ndim && pre->numel == y->numel;
    ddp_meta mx = x->m; /* without the last dim: offsets of rows */
    mx.ndim = last;
    for (int64_t i = 0; i < y->numel; i++) {
        int64_t n = i % N;
        double z = sum_of_products(x, ref_at(&mx, i / N), x->m.stride[last], w, n * w->m.stride[0], w->m.stride[1], K);
        if (b) z += ref_get(b, n);
        if (keeps) ref_put(pre, i, z);
        ref_put(y, i, activated(a->act, z) + (residual ? ref_get(residual, i) : 0));
    }
    return 0;
}
DDP_REF_KERNEL(linear_act, run_linear_act);

/* The slope of the activation where it was at `from`. */
static double slope(int64_t act, double from) {
    if (act == DDP_ACT_RELU) return from > 0;
    if (act == DDP_ACT_GELU)
        return .5 * (1 + erf(from * 0.70710678118654752440)) + from * 0.39894228040143267794 * exp(-.5 * from * from);
    double k = 0.79788456080286535588, t = tanh(k * from * (1 + 0.044715 * from * from));
    return .5 * (1 + t + from * (1 - t * t) * k * (1 + 0.134145 * from * from));
}

static int run_linear_act_grad(const ddp_call *c) {
    const ddp_linear_act_grad_attrs *a = c->attrs;
    ddp_tensor *dz = c->out[0];
    int64_t N = c->out[1]->numel;
    double *sums = ref_sums(c, N);
    if (!sums) return ddp__pending();
    for (int64_t i = 0; i < dz->numel; i++) {
        double g = ref_get(c->in[0], i), s = slope(a->act, ref_get(c->in[1], i));
        double d = a->act == DDP_ACT_RELU ? (s > 0 ? g : 0) : g * s;
        ref_put(dz, i, d);
        sums[i % N] += d;
    }
    ref_put_sums(c->out[1], sums);
    return 0;
}
DDP_REF_KERNEL(linear_act_grad, run_linear_act_grad);
