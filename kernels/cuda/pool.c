/* pool.c -- host side of pooling: windows from a call, and whether channels go 16 bytes at a time. */
#include "places.h"

/* Strides of t, in elements; whether packs of V channels can be read through them. */
static bool packs(const ddp_tensor *t, int V, int64_t *stride) {
    bool fits = (uintptr_t)ddp__ptr(t) % 16 == 0 && t->m.size[1] % V == 0 && (t->m.stride[1] == 1 || t->m.size[1] == 1);
    for (int d = 0; d < 4; d++) {
        stride[d] = t->m.stride[d];
        if (d != 1 && t->m.size[d] > 1) fits = fits && stride[d] % V == 0;
    }
    return fits;
}

typedef struct pooling {
    pool_args a;
    ddp_dtype dtype;
    int64_t images, cells; /* of y: images, elements of one */
    int64_t more;          /* elements of one image of x */
} pooling;

/* From x, which is read, to y; the image has size `image`, its windows `windows` (N C H W). */
static pooling pooling_of(const ddp_tensor *x, const ddp_tensor *y, const ddp_tensor *image,
                          const ddp_tensor *windows) {
    const int64_t *size = y->m.size;
    pooling p = {.dtype = y->m.dtype, .images = size[0], .cells = size[1] * size[2] * size[3]};
    int V = 16 / ddp__dtype_bytes[p.dtype];
    p.a.x = ddp__ptr(x);
    p.a.y = ddp__ptr(y);
    p.a.vector = packs(x, V, p.a.xs) && (uintptr_t)p.a.y % 16 == 0;
    p.a.C = (int32_t)size[1];
    p.a.H = (int32_t)image->m.size[2];
    p.a.W = (int32_t)image->m.size[3];
    p.a.Ho = (int32_t)windows->m.size[2];
    p.a.Wo = (int32_t)windows->m.size[3];
    p.a.by_stride[0] = p.a.by_stride[1] = ddp__divider(1);
    p.more = x->m.size[1] * x->m.size[2] * x->m.size[3];
    return p;
}

static void set_windows(pool_args *a, const int64_t *kernel, const int64_t *stride, const int64_t *padding) {
    for (int i = 0; i < 2; i++) {
        a->kernel[i] = (int32_t)kernel[i];
        a->stride[i] = (int32_t)(stride[i] ? stride[i] : kernel[i]);
        a->padding[i] = (int32_t)padding[i];
        if (a->stride[i] > 0) a->by_stride[i] = ddp__divider(a->stride[i]);
    }
}

/* As many images a launch as have fewer than 2^31 elements: one launch but for the largest. */
static int launch(const ddp_call *c, pooling *p, int kernel, bool wide) {
    if (p->images == 0 || p->cells == 0) return 0;
    const int V = p->a.vector ? 16 / ddp__dtype_bytes[p->dtype] : 1;
    const int64_t most = p->cells > p->more ? p->cells : p->more, bytes = ddp__dtype_bytes[p->dtype];
    const int64_t at_once = most ? 0x7fffffff / most : p->images, *size = c->out[0]->m.size;
    p->a.by_c = ddp__divider(p->a.C / V);
    p->a.by_h = ddp__divider(size[2]);
    p->a.by_w = ddp__divider(size[3]);
    for (int64_t n = 0; n < p->images; n += at_once) {
        pool_args a = p->a;
        int64_t m = p->images - n < at_once ? p->images - n : at_once;
        a.x = (const char *)a.x + n * a.xs[0] * bytes;
        a.y = (char *)a.y + n * p->cells * bytes;
        if (a.place) a.place += n * a.ps[0];
        a.n = (uint32_t)(m * p->cells / V);
        ddp_grid g =
            wide ? ddp__grid_rows(a.n / (a.C / V) * ((a.C / V + a.lanes - 1) / a.lanes), 256) : ddp__grid(a.n, 1);
        if (g.x > 4096) g.x = 4096; /* blocks stride over the rest */
        int st = ddp__cuda_launch(c, kernel + (int)p->dtype, &a, g);
        if (st < 0) return st;
    }
    return 0;
}

static const char *too_large(const ddp_tensor *t) {
    return t->m.size[1] * t->m.size[2] * t->m.size[3] < 0x7fffffff ? NULL : "an image of 2^31 elements";
}
static const char *reject(const ddp_call *c) {
    const char *why = too_large(c->in[0]);
    return why ? why : too_large(c->out[0]);
}
/* Windows that cover an image are found by products of their number and its size. */
static const char *reject_adaptive(const ddp_call *c) {
    for (int d = 2; d < 4; d++)
        if ((c->in[0]->m.size[d] + 1) * (c->out[0]->m.size[d] + 1) >= 0x7fffffff) return "2^31 pairs of rows";
    return reject(c);
}

/* ---- max ---- */

static int run_max_pool2d(const ddp_call *c) {
    const ddp_max_pool2d_attrs *a = c->attrs;
    pooling p = pooling_of(c->in[0], c->out[0], c->in[0], c->out[0]);
    set_windows(&p.a, a->kernel, a->stride, a->padding);
    p.a.place = (int64_t *)(void *)ddp__ptr(c->out[1]);
    p.a.ps[0] = p.cells;
    return launch(c, &p, DDP_K_max_pool, false);
}
DDP_CUDA_KERNEL(max_pool2d, reject, run_max_pool2d);

static int run_max_pool2d_grad(const ddp_call *c) {
    const ddp_max_pool2d_grad_attrs *a = c->attrs;
    pooling p = pooling_of(c->in[0], c->out[0], c->out[0], c->in[0]);
    set_windows(&p.a, a->kernel, a->stride, a->padding);
    p.a.anywhere = !a->kernel[0] && !a->kernel[1];
    p.a.place = (int64_t *)(void *)ddp__ptr(c->in[1]);
    if (!packs(c->in[1], 16 / ddp__dtype_bytes[p.dtype], p.a.ps)) p.a.vector = 0;
    return launch(c, &p, DDP_K_max_pool_grad, false);
}
DDP_CUDA_KERNEL(max_pool2d_grad, reject, run_max_pool2d_grad);

/* ---- mean ---- */

/* Large windows of which there are too few for a thread each. */
static int launch_mean(const ddp_call *c, pooling *p, int64_t window) {
    const int V = p->a.vector ? 16 / ddp__dtype_bytes[p->dtype] : 1;
    const int64_t threads = p->images * p->cells / V;
    p->a.lanes = 1;
    while (p->a.xs[1] == 1 && p->a.lanes < 32 && p->a.lanes < p->a.C / V) p->a.lanes *= 2;
    bool wide = window >= 32 && threads < 1 << 17;
    return launch(c, p, wide ? DDP_K_mean_pool_wide : DDP_K_mean_pool, wide);
}

static int run_avg_pool2d(const ddp_call *c) {
    const ddp_avg_pool2d_attrs *a = c->attrs;
    pooling p = pooling_of(c->in[0], c->out[0], c->in[0], c->out[0]);
    set_windows(&p.a, a->kernel, a->stride, a->padding);
    p.a.include = (int32_t)a->count_include_pad;
    return launch_mean(c, &p, a->kernel[0] * a->kernel[1]);
}
DDP_CUDA_KERNEL(avg_pool2d, reject, run_avg_pool2d);

static int run_avg_pool2d_grad(const ddp_call *c) {
    const ddp_avg_pool2d_grad_attrs *a = c->attrs;
    pooling p = pooling_of(c->in[0], c->out[0], c->out[0], c->in[0]);
    set_windows(&p.a, a->kernel, a->stride, a->padding);
    p.a.include = (int32_t)a->count_include_pad;
    return launch(c, &p, DDP_K_mean_pool_grad, false);
}
DDP_CUDA_KERNEL(avg_pool2d_grad, reject, run_avg_pool2d_grad);

static int run_adaptive_avg_pool2d(const ddp_call *c) {
    const int64_t *x = c->in[0]->m.size, *y = c->out[0]->m.size;
    pooling p = pooling_of(c->in[0], c->out[0], c->in[0], c->out[0]);
    p.a.adaptive = 1;
    return launch_mean(c, &p, ((x[2] + y[2] - 1) / y[2]) * ((x[3] + y[3] - 1) / y[3]));
}
DDP_CUDA_KERNEL(adaptive_avg_pool2d, reject_adaptive, run_adaptive_avg_pool2d);

static int run_adaptive_avg_pool2d_grad(const ddp_call *c) {
    pooling p = pooling_of(c->in[0], c->out[0], c->out[0], c->in[0]);
    p.a.adaptive = 1;
    return launch(c, &p, DDP_K_mean_pool_grad, false);
}
DDP_CUDA_KERNEL(adaptive_avg_pool2d_grad, reject_adaptive, run_adaptive_avg_pool2d_grad);
