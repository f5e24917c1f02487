/* grads.c -- unscaling, clipping and the norm of gradients: one pass over memory each. */
#include <float.h>
#include <math.h>

#include "cpu.h"

/* Parts of a tensor are added up apart and their sums in order, so that the number of threads changes nothing. */
enum { BLOCK = 1024, MOST_PARTS = 64, PART = 65536 };

static const char *reject_grads(const ddp_call *c) {
    for (int i = 0; i < c->n_in; i++) {
        ddp_dtype d = c->in[i]->m.dtype;
        if ((d != DDP_F32 && d != DDP_F64) || !cpu_dense(c->in[i])) return "dense f32 or f64 only";
    }
    return NULL;
}

typedef struct scaling {
    void *g;
    double by;
    atomic_int *found; /* set when an element was not finite */
} scaling;

static void scale_f32(const void *ctx, int64_t lo, int64_t hi) {
    const scaling *s = ctx;
    float *g = s->g, by = (float)s->by;
    int bad = 0;
#pragma omp simd reduction(| : bad)
    for (int64_t i = lo; i < hi; i++) {
        bad |= !(fabsf(g[i]) <= FLT_MAX);
        g[i] *= by;
    }
    if (bad) atomic_store_explicit(s->found, 1, memory_order_relaxed);
}

static void scale_f64(const void *ctx, int64_t lo, int64_t hi) {
    const scaling *s = ctx;
    double *g = s->g, by = s->by;
    int bad = 0;
#pragma omp simd reduction(| : bad)
    for (int64_t i = lo; i < hi; i++) {
        bad |= !(fabs(g[i]) <= DBL_MAX);
        g[i] *= by;
    }
    if (bad) atomic_store_explicit(s->found, 1, memory_order_relaxed);
}

/* Returns whether an element was not finite before. */
static bool scale_all(const ddp_call *c, double by) {
    atomic_int found = 0;
    for (int i = 0; i < c->n_in; i++) {
        ddp_tensor *t = c->in[i];
        scaling s = {ddp__ptr(t), by, &found};
        cpu_share(t->numel, t->numel, t->m.dtype == DDP_F32 ? scale_f32 : scale_f64, &s);
    }
    return atomic_load_explicit(&found, memory_order_relaxed);
}

static int run_grad_unscale(const ddp_call *c) {
    const ddp_grad_unscale__attrs *a = c->attrs;
    *cpu_f32(c->out[0]) = scale_all(c, a->inv_scale) ? 1 : 0;
    return 0;
}
CPU_KERNEL(grad_unscale_, reject_grads, run_grad_unscale);

typedef struct squares {
    const ddp_tensor *t;
    int64_t part;
    double *sum; /* of each part */
} squares;

static double block_f32(const float *x, int64_t n) {
    float s = 0;
#pragma omp simd reduction(+ : s)
    for (int64_t i = 0; i < n; i++) s += x[i] * x[i];
    if (s <= FLT_MAX) return s;
    double wide = 0; /* squares of large elements, or one that is not finite */
    for (int64_t i = 0; i < n; i++) wide += (double)x[i] * x[i];
    return wide;
}

static double block_f64(const double *x, int64_t n) {
    double s = 0;
#pragma omp simd reduction(+ : s)
    for (int64_t i = 0; i < n; i++) s += x[i] * x[i];
    return s;
}

static void square_parts(const void *ctx, int64_t lo, int64_t hi) {
    const squares *s = ctx;
    for (int64_t p = lo; p < hi; p++) {
        int64_t end = (p + 1) * s->part < s->t->numel ? (p + 1) * s->part : s->t->numel;
        s->sum[p] = 0;
        for (int64_t at = p * s->part; at < end; at += BLOCK) {
            int64_t n = end - at < BLOCK ? end - at : BLOCK;
            if (s->t->m.dtype == DDP_F32) s->sum[p] += block_f32(cpu_f32(s->t) + at, n);
            else s->sum[p] += block_f64((const double *)(const void *)ddp__ptr(s->t) + at, n);
        }
    }
}

static double sum_of_squares(const ddp_tensor *t) {
    double sum[MOST_PARTS], total = 0;
    int64_t part = (t->numel + MOST_PARTS - 1) / MOST_PARTS;
    part = part < PART ? PART : (part + BLOCK - 1) / BLOCK * BLOCK;
    int64_t parts = (t->numel + part - 1) / part;
    squares s = {t, part, sum};
    cpu_share(parts, t->numel, square_parts, &s);
    for (int64_t p = 0; p < parts; p++) total += sum[p];
    return total;
}

static double sum_of_all(const ddp_call *c) {
    double sum = 0;
    for (int i = 0; i < c->n_in; i++) sum += sum_of_squares(c->in[i]);
    return sum;
}

static int run_grad_clip(const ddp_call *c) {
    const ddp_grad_clip__attrs *a = c->attrs;
    double sum = sum_of_all(c);
    ddp_tensor *norm = c->out[0];
    ddp__store(norm->m.dtype, ddp__ptr(norm), 0, sqrt(sum));
    double by = a->max_norm / (ddp__load(norm->m.dtype, ddp__ptr(norm), 0) + 1e-6);
    if (!(by >= 1) && !isinf(a->max_norm)) scale_all(c, by); /* NaN scales too */
    return 0;
}
CPU_KERNEL(grad_clip_, reject_grads, run_grad_clip);

/* Looks again where the sum of squares was not finite: those of f64 may overflow by themselves. */
static bool any_not_finite(const ddp_call *c) {
    for (int k = 0; k < c->n_in; k++)
        for (int64_t i = 0; i < c->in[k]->numel; i++)
            if (!isfinite(ddp__load(c->in[k]->m.dtype, ddp__ptr(c->in[k]), i))) return true;
    return false;
}

static int run_grad_norm(const ddp_call *c) {
    const ddp_grad_norm_attrs *a = c->attrs;
    double sum = sum_of_all(c);
    ddp__store(c->out[0]->m.dtype, ddp__ptr(c->out[0]), 0, sqrt(sum) * a->inv_scale);
    *cpu_f32(c->out[1]) = !isfinite(sum) && any_not_finite(c) ? 1 : 0;
    return 0;
}
CPU_KERNEL(grad_norm, reject_grads, run_grad_norm);
