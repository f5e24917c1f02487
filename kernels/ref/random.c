/* random.c -- reference draws: random.h, element by element. */
#include "../random.h"

#include "ref.h"

typedef double (*draw)(const ddp_call *c, int64_t i);

static double uniform(const ddp_call *c, int64_t i) {
    if (c->out[0]->m.dtype == DDP_F64) {
        double u[2];
        ddp__draw_f64(c->rng, i / 2, u);
        return u[i % 2];
    }
    float u[4];
    ddp__draw_f32(c->rng, i / 4, u);
    return ddp__unit_in(c->out[0]->m.dtype, u[i % 4]);
}

static double normal(const ddp_call *c, int64_t i) {
    if (c->out[0]->m.dtype == DDP_F64) {
        double n[2];
        ddp__normal_f64(c->rng, i / 2, n);
        return n[i % 2];
    }
    float n[4];
    ddp__normal_f32(c->rng, i / 4, n);
    return n[i % 4];
}

static int fill(const ddp_call *c, draw d, double scale, double shift) {
    for (int64_t i = 0; i < c->out[0]->numel; i++) ref_put(c->out[0], i, d(c, i) * scale + shift);
    return 0;
}

static int run_rand(const ddp_call *c) { return fill(c, uniform, 1, 0); }
DDP_REF_KERNEL(rand, run_rand);
static int run_randn(const ddp_call *c) { return fill(c, normal, 1, 0); }
DDP_REF_KERNEL(randn, run_randn);

static int run_uniform_(const ddp_call *c) {
    const ddp_uniform__attrs *a = c->attrs;
    return fill(c, uniform, a->hi - a->lo, a->lo);
}
DDP_REF_KERNEL(uniform_, run_uniform_);

static int run_normal_(const ddp_call *c) {
    const ddp_normal__attrs *a = c->attrs;
    return fill(c, normal, a->std, a->mean);
}
DDP_REF_KERNEL(normal_, run_normal_);

static float unit(const ddp_call *c, int64_t i) { /* by f32's rule whatever the dtype */
    float u[4];
    ddp__draw_f32(c->rng, i / 4, u);
    return u[i % 4];
}

static int run_bernoulli_(const ddp_call *c) {
    double p = ((const ddp_bernoulli__attrs *)c->attrs)->p;
    for (int64_t i = 0; i < c->out[0]->numel; i++) ref_put(c->out[0], i, unit(c, i) < p);
    return 0;
}
DDP_REF_KERNEL(bernoulli_, run_bernoulli_);

static int run_dropout(const ddp_call *c) {
    double p = ((const ddp_dropout_attrs *)c->attrs)->p;
    for (int64_t i = 0; i < c->out[0]->numel; i++) {
        bool keep = unit(c, i) >= p;
        ref_put(c->out[0], i, keep ? ref_get(c->in[0], i) / (1 - p) : 0);
        ref_put(c->out[1], i, keep);
    }
    return 0;
}
DDP_REF_KERNEL(dropout, run_dropout);

static int run_dropout_grad(const ddp_call *c) {
    const double scale = 1 / (1 - ((const ddp_dropout_grad_attrs *)c->attrs)->p);
    for (int64_t i = 0; i < c->out[0]->numel; i++)
        ref_put(c->out[0], i, ref_get(c->in[0], i) * (ref_get(c->in[1], i) != 0 ? scale : 0));
    return 0;
}
DDP_REF_KERNEL(dropout_grad, run_dropout_grad);

static int run_randint(const ddp_call *c) {
    const ddp_randint_attrs *a = c->attrs;
    ddp_tensor *y = c->out[0];
    for (int64_t i = 0; i < y->numel; i++) {
        int64_t v = (int64_t)((uint64_t)a->lo + ddp__draw_below(c->rng, i, (uint64_t)a->hi - (uint64_t)a->lo));
        if (y->m.dtype == DDP_I64) ((int64_t *)(void *)ddp__ptr(y))[ref_at(&y->m, i)] = v;
        else ref_put(y, i, (double)v);
    }
    return 0;
}
DDP_REF_KERNEL(randint, run_randint);

static int run_randperm(const ddp_call *c) { /* Fisher-Yates */
    int64_t *p = (int64_t *)(void *)ddp__ptr(c->out[0]), n = c->out[0]->numel;
    for (int64_t i = 0; i < n; i++) p[i] = i;
    for (int64_t i = n - 1; i > 0; i--) {
        int64_t j = (int64_t)ddp__draw_below(c->rng, i, (uint64_t)i + 1), t = p[i];
        p[i] = p[j];
        p[j] = t;
    }
    return 0;
}
DDP_REF_KERNEL(randperm, run_randperm);
