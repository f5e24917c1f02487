/* optim.c -- optimizer steps: one pass over each parameter with its gradient and state. */
#include <math.h>

#include "cpu.h"

static const char *reject_lists(const ddp_call *c, int lists) {
    int n = c->n_in / lists;
    for (int i = 0; i < n; i++) {
        if (c->in[i]->m.dtype != DDP_F32 || !ddp__meta_is_dense(&c->in[i]->m)) return "dense f32 only";
        for (int k = 1; k < lists; k++)
            if (c->in[k * n + i]->numel && !cpu_alike(c->in[i], c->in[k * n + i])) return "lists laid out differently";
    }
    return NULL;
}

static const char *reject_sgd(const ddp_call *c) { return reject_lists(c, 3); }
static int run_sgd_step(const ddp_call *c) {
    const ddp_sgd_step_attrs *a = c->attrs;
    const float lr = (float)a->lr, momentum = (float)a->momentum, keep = (float)(1 - a->dampening),
                decay = (float)a->weight_decay;
    int n = c->n_in / 3;
    for (int k = 0; k < n; k++) {
        int64_t size = c->in[k]->numel;
        float *p = cpu_f32(c->in[k]), *buf = cpu_f32(c->in[2 * n + k]);
        const float *g = cpu_f32(c->in[n + k]);
        int threads = cpu_threads(size);
        bool first = a->first, nesterov = a->nesterov;
        if (a->momentum == 0) {
#pragma omp parallel for simd schedule(static) num_threads(threads) if (threads > 1)
            for (int64_t i = 0; i < size; i++) p[i] -= lr * (g[i] + decay * p[i]);
            continue;
        }
#pragma omp parallel for simd schedule(static) num_threads(threads) if (threads > 1)
        for (int64_t i = 0; i < size; i++) {
            float d = g[i] + decay * p[i];
            float b = first ? d : momentum * buf[i] + keep * d;
            buf[i] = b;
            p[i] -= lr * (nesterov ? d + momentum * b : b);
        }
    }
    return 0;
}
CPU_KERNEL(sgd_step, reject_sgd, run_sgd_step);

static const char *reject_adam(const ddp_call *c) { return reject_lists(c, 4); }
static int run_adam_step(const ddp_call *c) {
    const ddp_adam_step_attrs *a = c->attrs;
    const float b1 = (float)a->beta1, b2 = (float)a->beta2, eps = (float)a->eps, decay = (float)a->weight_decay;
    const float r1 = (float)(1 - a->beta1), r2 = (float)(1 - a->beta2); /* rounded once: 1 - b1 in f32 loses digits */
    const float rate = (float)(a->lr / (1 - pow(a->beta1, (double)a->step))),
                c2 = (float)(1 / sqrt(1 - pow(a->beta2, (double)a->step)));
    const float shrink = a->decoupled ? (float)(1 - a->lr * a->weight_decay) : 1, l2 = a->decoupled ? 0 : decay;
    int n = c->n_in / 4;
    for (int k = 0; k < n; k++) {
        int64_t size = c->in[k]->numel;
        float *p = cpu_f32(c->in[k]), *m = cpu_f32(c->in[2 * n + k]), *v = cpu_f32(c->in[3 * n + k]);
        const float *grad = cpu_f32(c->in[n + k]);
        int threads = cpu_threads(size);
#pragma omp parallel for simd schedule(static) num_threads(threads) if (threads > 1)
        for (int64_t i = 0; i < size; i++) {
            float x = p[i] * shrink, g = grad[i] + l2 * p[i];
            m[i] = b1 * m[i] + r1 * g;
            v[i] = b2 * v[i] + r2 * g * g;
            p[i] = x - rate * m[i] / (sqrtf(v[i]) * c2 + eps);
        }
    }
    return 0;
}
CPU_KERNEL(adam_step, reject_adam, run_adam_step);
