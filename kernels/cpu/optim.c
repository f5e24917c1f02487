/* optim.c -- optimizer steps: one pass over each parameter with its gradient and state. */
#include <math.h>

#include "cpu.h"

static const char *reject_lists(const ddp_call *c, int lists) {
    int n = c->n_in / lists;
    for (int i = 0; i < n; i++) {
        if (c->in[i]->m.dtype != DDP_F32 || !cpu_dense(c->in[i])) return "dense f32 only";
        for (int k = 1; k < lists; k++)
            if (c->in[k * n + i]->numel && !cpu_alike(c->in[i], c->in[k * n + i])) return "lists laid out differently";
    }
    return NULL;
}

typedef struct sgd {
    float *p, *buf;
    const float *g;
    float lr, momentum, keep, decay;
    bool nesterov;
} sgd;

static void sgd_plain(const void *ctx, int64_t lo, int64_t hi) {
    const sgd s = *(const sgd *)ctx;
#pragma omp simd
    for (int64_t i = lo; i < hi; i++) s.p[i] -= s.lr * (s.g[i] + s.decay * s.p[i]);
}

static void sgd_first(const void *ctx, int64_t lo, int64_t hi) {
    const sgd s = *(const sgd *)ctx;
#pragma omp simd
    for (int64_t i = lo; i < hi; i++) {
        float d = s.g[i] + s.decay * s.p[i];
        s.buf[i] = d;
        s.p[i] -= s.lr * (s.nesterov ? d + s.momentum * d : d);
    }
}

static void sgd_momentum(const void *ctx, int64_t lo, int64_t hi) {
    const sgd s = *(const sgd *)ctx;
#pragma omp simd
    for (int64_t i = lo; i < hi; i++) {
        float d = s.g[i] + s.decay * s.p[i];
        float b = s.momentum * s.buf[i] + s.keep * d;
        s.buf[i] = b;
        s.p[i] -= s.lr * (s.nesterov ? d + s.momentum * b : b);
    }
}

static const char *reject_sgd(const ddp_call *c) { return reject_lists(c, 3); }
static int run_sgd_step(const ddp_call *c) {
    const ddp_sgd_step_attrs *a = c->attrs;
    int n = c->n_in / 3;
    sgd s = {.lr = (float)a->lr,
             .momentum = (float)a->momentum,
             .keep = (float)(1 - a->dampening),
             .decay = (float)a->weight_decay,
             .nesterov = a->nesterov};
    cpu_body body = a->momentum == 0 ? sgd_plain : a->first ? sgd_first : sgd_momentum;
    for (int k = 0; k < n; k++) {
        s.p = cpu_f32(c->in[k]);
        s.g = cpu_f32(c->in[n + k]);
        s.buf = cpu_f32(c->in[2 * n + k]);
        cpu_share(c->in[k]->numel, c->in[k]->numel, body, &s);
    }
    return 0;
}
CPU_KERNEL(sgd_step, reject_sgd, run_sgd_step);

typedef struct adam {
    float *p, *m, *v;
    const float *g;
    float b1, b2, r1, r2, rate, c2, eps, shrink, l2;
} adam;

static void adam_range(const void *ctx, int64_t lo, int64_t hi) {
    const adam s = *(const adam *)ctx;
#pragma omp simd
    for (int64_t i = lo; i < hi; i++) {
        float x = s.p[i] * s.shrink, g = s.g[i] + s.l2 * s.p[i];
        float m = s.b1 * s.m[i] + s.r1 * g, v = s.b2 * s.v[i] + s.r2 * g * g;
        s.m[i] = m;
        s.v[i] = v;
        s.p[i] = x - s.rate * m / (sqrtf(v) * s.c2 + s.eps);
    }
}

static const char *reject_adam(const ddp_call *c) { return reject_lists(c, 4); }
static int run_adam_step(const ddp_call *c) {
    const ddp_adam_step_attrs *a = c->attrs;
    int n = c->n_in / 4;
    adam s = {.b1 = (float)a->beta1,
              .b2 = (float)a->beta2,
              .r1 = (float)(1 - a->beta1), /* rounded once: 1 - b1 in f32 loses digits */
              .r2 = (float)(1 - a->beta2),
              .rate = (float)(a->lr / (1 - pow(a->beta1, (double)a->step))),
              .c2 = (float)(1 / sqrt(1 - pow(a->beta2, (double)a->step))),
              .eps = (float)a->eps,
              .shrink = a->decoupled ? (float)(1 - a->lr * a->weight_decay) : 1,
              .l2 = a->decoupled ? 0 : (float)a->weight_decay};
    for (int k = 0; k < n; k++) {
        s.p = cpu_f32(c->in[k]);
        s.g = cpu_f32(c->in[n + k]);
        s.m = cpu_f32(c->in[2 * n + k]);
        s.v = cpu_f32(c->in[3 * n + k]);
        cpu_share(c->in[k]->numel, c->in[k]->numel, adam_range, &s);
    }
    return 0;
}
CPU_KERNEL(adam_step, reject_adam, run_adam_step);
