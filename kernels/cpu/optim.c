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

/* Gradients are multiplied by `by` as they are read, and written back so where they are kept. */
typedef enum use { AS_THEY_ARE, TIMES_BY, KEPT } use;
#define USE(a) ((a)->keep ? KEPT : (a)->by == 1 ? AS_THEY_ARE : TIMES_BY)

typedef struct sgd {
    float *p, *buf, *g;
    float lr, momentum, remains, decay, by;
    bool nesterov;
} sgd;

CPU_INLINE void sgd_plain(const sgd s, int64_t lo, int64_t hi, use how) {
#pragma omp simd
    for (int64_t i = lo; i < hi; i++) {
        float g = how == AS_THEY_ARE ? s.g[i] : s.by * s.g[i];
        if (how == KEPT) s.g[i] = g;
        s.p[i] -= s.lr * (g + s.decay * s.p[i]);
    }
}

CPU_INLINE void sgd_first(const sgd s, int64_t lo, int64_t hi, use how) {
#pragma omp simd
    for (int64_t i = lo; i < hi; i++) {
        float g = how == AS_THEY_ARE ? s.g[i] : s.by * s.g[i], d = g + s.decay * s.p[i];
        if (how == KEPT) s.g[i] = g;
        s.buf[i] = d;
        s.p[i] -= s.lr * (s.nesterov ? d + s.momentum * d : d);
    }
}

CPU_INLINE void sgd_momentum(const sgd s, int64_t lo, int64_t hi, use how) {
#pragma omp simd
    for (int64_t i = lo; i < hi; i++) {
        float g = how == AS_THEY_ARE ? s.g[i] : s.by * s.g[i], d = g + s.decay * s.p[i];
        float b = s.momentum * s.buf[i] + s.remains * d;
        if (how == KEPT) s.g[i] = g;
        s.buf[i] = b;
        s.p[i] -= s.lr * (s.nesterov ? d + s.momentum * b : b);
    }
}

/* Each loop as cpu_share wants it, by use. */
#define BODY(T, loop, how) \
    static void loop##_##how(const void *ctx, int64_t lo, int64_t hi) { loop(*(const T *)ctx, lo, hi, how); }
#define BODIES(T, loop)        \
    BODY(T, loop, AS_THEY_ARE) \
    BODY(T, loop, TIMES_BY)    \
    BODY(T, loop, KEPT)        \
    static const cpu_body loop##_body[] = {loop##_AS_THEY_ARE, loop##_TIMES_BY, loop##_KEPT};
BODIES(sgd, sgd_plain)
BODIES(sgd, sgd_first)
BODIES(sgd, sgd_momentum)

static const char *reject_sgd(const ddp_call *c) { return reject_lists(c, 3); }
static int run_sgd_step(const ddp_call *c) {
    const ddp_sgd_step_attrs *a = c->attrs;
    int n = c->n_in / 3;
    sgd s = {.lr = (float)a->lr,
             .momentum = (float)a->momentum,
             .remains = (float)(1 - a->dampening),
             .decay = (float)a->weight_decay,
             .by = (float)a->by,
             .nesterov = a->nesterov};
    cpu_body body = (a->momentum == 0 ? sgd_plain_body : a->first ? sgd_first_body : sgd_momentum_body)[USE(a)];
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
    float *p, *m, *v, *g;
    float b1, b2, r1, r2, rate, c2, eps, shrink, l2, by;
} adam;

CPU_INLINE void adam_range(const adam s, int64_t lo, int64_t hi, use how) {
#pragma omp simd
    for (int64_t i = lo; i < hi; i++) {
        float own = how == AS_THEY_ARE ? s.g[i] : s.by * s.g[i], x = s.p[i] * s.shrink, g = own + s.l2 * s.p[i];
        if (how == KEPT) s.g[i] = own;
        float m = s.b1 * s.m[i] + s.r1 * g, v = s.b2 * s.v[i] + s.r2 * g * g;
        s.m[i] = m;
        s.v[i] = v;
        s.p[i] = x - s.rate * m / (sqrtf(v) * s.c2 + s.eps);
    }
}
BODIES(adam, adam_range)

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
              .l2 = a->decoupled ? 0 : (float)a->weight_decay,
              .by = (float)a->by};
    for (int k = 0; k < n; k++) {
        s.p = cpu_f32(c->in[k]);
        s.g = cpu_f32(c->in[n + k]);
        s.m = cpu_f32(c->in[2 * n + k]);
        s.v = cpu_f32(c->in[3 * n + k]);
        cpu_share(c->in[k]->numel, c->in[k]->numel, adam_range_body[USE(a)], &s);
    }
    return 0;
}
CPU_KERNEL(adam_step, reject_adam, run_adam_step);
