/* random.c -- host side of draws, dropout, and numbers in order. */
#include <math.h>
#include <stdlib.h>

#include "../random.h"
#include "places.h"

/* y's dims in its order of memory, outermost first, with the logical position; x beside it where there is one. */
static void in_memory_order(places *p, const ddp_meta *y, const ddp_meta *x) {
    int order[DDP_MAX_DIM];
    int64_t logical[DDP_MAX_DIM], size[DDP_MAX_DIM], stride[3][DDP_MAX_DIM] = {0}, step = 1;
    for (int d = y->ndim - 1; d >= 0; d--) {
        logical[d] = step;
        step *= y->size[d];
        order[d] = d;
    }
    for (int a = 1; a < y->ndim; a++)
        for (int b = a; b > 0 && y->stride[order[b]] > y->stride[order[b - 1]]; b--) {
            int t = order[b];
            order[b] = order[b - 1];
            order[b - 1] = t;
        }
    for (int d = 0; d < y->ndim; d++) {
        size[d] = y->size[order[d]];
        stride[0][d] = logical[order[d]];
        stride[1][d] = y->stride[order[d]];
        if (x) stride[2][d] = x->stride[order[d]];
    }
    ddp__places(p, y->ndim, size, 3, (const int64_t *const[]){stride[0], stride[1], stride[2]}, -1);
}

/* Where y, x and mask go, in row-major order where they all lie so. */
static draw_args draw_of(const ddp_call *c, const ddp_tensor *x, const ddp_tensor *mask) {
    const ddp_tensor *y = c->out[0];
    draw_args a = {.y = ddp__ptr(y), .key = c->rng.key, .call = c->rng.call, .scale = 1};
    bool rows = ddp__meta_is_rowmajor(&y->m) && (uintptr_t)a.y % 16 == 0;
    if (x) {
        a.x = ddp__ptr(x);
        a.mask = (unsigned char *)ddp__ptr(mask);
        rows = rows && ddp__meta_is_rowmajor(&x->m) && ((uintptr_t)a.x | (uintptr_t)a.mask) % 16 == 0;
    }
    if (rows) a.at.n = y->numel;
    else in_memory_order(&a.at, &y->m, x ? &x->m : NULL);
    return a;
}

static ddp_grid grid_of(const draw_args *a, ddp_dtype d) {
    return ddp__grid(a->at.n, a->at.ndim ? 1 : 16 / ddp__dtype_bytes[d]);
}

/* ---- draws ---- */

static int draw(const ddp_call *c, bool normal, double scale, double shift) {
    draw_args a = draw_of(c, NULL, NULL);
    ddp_dtype d = c->out[0]->m.dtype;
    a.normal = normal;
    a.scale = scale;
    a.shift = shift;
    return ddp__launch_draw(c, d, &a, grid_of(&a, d));
}

static int run_rand(const ddp_call *c) { return draw(c, false, 1, 0); }
DDP_CUDA_KERNEL(rand, NULL, run_rand);
static int run_randn(const ddp_call *c) { return draw(c, true, 1, 0); }
DDP_CUDA_KERNEL(randn, NULL, run_randn);
static int run_uniform_(const ddp_call *c) {
    const ddp_uniform__attrs *a = c->attrs;
    return draw(c, false, a->hi - a->lo, a->lo);
}
DDP_CUDA_KERNEL(uniform_, NULL, run_uniform_);
static int run_normal_(const ddp_call *c) {
    const ddp_normal__attrs *a = c->attrs;
    return draw(c, true, a->std, a->mean);
}
DDP_CUDA_KERNEL(normal_, NULL, run_normal_);

/* unit < p as whole numbers: 24 bits of a word below this. */
static uint64_t limit(double p) { return (uint64_t)ceil(p * 0x1p24); }

static int run_bernoulli_(const ddp_call *c) {
    draw_args a = draw_of(c, NULL, NULL);
    a.below = limit(((const ddp_bernoulli__attrs *)c->attrs)->p);
    return ddp__launch_draw_choice(c, c->out[0]->m.dtype, &a, grid_of(&a, c->out[0]->m.dtype));
}
DDP_CUDA_KERNEL(bernoulli_, NULL, run_bernoulli_);

static int run_randint(const ddp_call *c) {
    const ddp_randint_attrs *at = c->attrs;
    draw_args a = draw_of(c, NULL, NULL);
    a.lo = at->lo;
    a.below = (uint64_t)at->hi - (uint64_t)at->lo;
    return ddp__launch_draw_whole(c, c->out[0]->m.dtype, &a, ddp__grid(a.at.n, 1));
}
DDP_CUDA_KERNEL(randint, NULL, run_randint);

/* Each exchange depends on all before it (Fisher-Yates), so the host does them: only the draws decide, no data of the GPU. */
static int run_randperm(const ddp_call *c) {
    const ddp_tensor *y = c->out[0];
    int64_t n = y->numel, *p = malloc((size_t)(n + 1) * sizeof *p);
    if (!p) return ddp__op_fail(c, DDP_ENOMEM, "out of memory for %lld numbers", (long long)n);
    for (int64_t i = 0; i < n; i++) p[i] = i;
    for (int64_t i = n - 1; i > 0; i--) {
        int64_t j = (int64_t)ddp__draw_below(c->rng, i, (uint64_t)i + 1), t = p[i];
        p[i] = p[j];
        p[j] = t;
    }
    const ddp_gpu *g = ddp__gpu_of(c);
    int st = g ? 0 : ddp__pending();
    if (g && n)
        st = ddp__cuda_check(
            ddp__cuda.cudaMemcpyAsync(ddp__ptr(y), p, (size_t)n * sizeof *p, cudaMemcpyHostToDevice, g->compute),
            c->op->name);
    free(p); /* it was read: it is not pinned */
    return st;
}
DDP_CUDA_KERNEL(randperm, NULL, run_randperm);

/* ---- dropout ---- */

static int run_dropout(const ddp_call *c) {
    const double p = ((const ddp_dropout_attrs *)c->attrs)->p;
    draw_args a = draw_of(c, c->in[0], c->out[1]);
    ddp_dtype d = c->out[0]->m.dtype;
    a.scale = 1 / (1 - p);
    a.below = limit(p);
    return ddp__launch_dropout(c, d, &a, grid_of(&a, d));
}
DDP_CUDA_KERNEL(dropout, NULL, run_dropout);

static int run_dropout_grad(const ddp_call *c) {
    walk_args a;
    ddp_dtype d = c->out[0]->m.dtype;
    ddp__cuda_walk(&a, 3, (ddp_tensor *[]){c->out[0], c->in[0], c->in[1]});
    a.attrs[0] = 1 / (1 - ((const ddp_dropout_grad_attrs *)c->attrs)->p);
    return ddp__launch_dropout_grad(c, d, &a, ddp__grid(a.n, a.ndim ? 4 : 16 / ddp__dtype_bytes[d]));
}
DDP_CUDA_KERNEL(dropout_grad, NULL, run_dropout_grad);

/* ---- numbers in order ---- */

static int run_arange(const ddp_call *c) {
    const ddp_arange_attrs *at = c->attrs;
    count_args a = {.y = ddp__ptr(c->out[0]), .n = c->out[0]->numel, .start = at->start, .step = at->step};
    return ddp__launch_arange(c, c->out[0]->m.dtype, &a, ddp__grid(a.n, 1));
}
DDP_CUDA_KERNEL(arange, NULL, run_arange);

static int run_eye(const ddp_call *c) {
    count_args a = {.y = ddp__ptr(c->out[0]), .n = c->out[0]->numel, .columns = c->out[0]->m.size[1]};
    return ddp__launch_eye(c, c->out[0]->m.dtype, &a, ddp__grid(a.n, 1));
}
DDP_CUDA_KERNEL(eye, NULL, run_eye);
