/* loss.c -- cross-entropy of row-major f32 logits [N, C]. */
#include <math.h>

#include "cpu.h"

static const char *reject(const ddp_call *c) {
    const ddp_tensor *x = c->in[c->n_in - 2], *target = c->in[c->n_in - 1];
    if (x->m.dtype != DDP_F32 || x->m.ndim != 2 || !ddp__meta_is_rowmajor(&x->m)) return "row-major f32 [N, C] only";
    if (!ddp__meta_is_rowmajor(&target->m)) return "a strided target";
    return NULL;
}

static const int64_t *labels_of(const ddp_tensor *t) { return (const int64_t *)(const void *)ddp__ptr(t); }

/* log of the sum of e^x over a row. */
static float log_sum(const float *x, int64_t n) {
    float top = -INFINITY, sum = 0;
    for (int64_t k = 0; k < n; k++) top = x[k] > top || x[k] != x[k] ? x[k] : top;
    for (int64_t k = 0; k < n; k++) sum += expf(x[k] - top);
    return top + logf(sum);
}

static int64_t count_kept(const int64_t *label, int64_t n, int64_t ignore) {
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++) kept += label[i] != ignore;
    return kept;
}

static int run_cross_entropy(const ddp_call *c) {
    const ddp_cross_entropy_attrs *a = c->attrs;
    const float *x = cpu_f32(c->in[0]);
    const int64_t *label = labels_of(c->in[1]);
    int64_t N = c->in[0]->m.size[0], C = c->in[0]->m.size[1];
    float *y = cpu_f32(c->out[0]);
    double total = 0, s = a->label_smoothing;
    for (int64_t i = 0; i < N; i++, x += C) {
        double loss = 0, all = 0;
        if (label[i] != a->ignore_index) {
            float lse = log_sum(x, C);
            for (int64_t k = 0; s > 0 && k < C; k++) all += lse - x[k];
            loss = (1 - s) * (lse - x[label[i]]) + (s > 0 ? s * all / (double)C : 0);
        }
        if (a->reduction == 0) y[i] = (float)loss;
        total += loss;
    }
    if (a->reduction != 0)
        *y = (float)(a->reduction == 1 ? total / (double)count_kept(label, N, a->ignore_index) : total);
    return 0;
}
CPU_KERNEL(cross_entropy, reject, run_cross_entropy);

static int run_cross_entropy_grad(const ddp_call *c) {
    const ddp_cross_entropy_grad_attrs *a = c->attrs;
    const float *g = cpu_f32(c->in[0]), *x = cpu_f32(c->in[1]);
    const int64_t *label = labels_of(c->in[2]), N = c->in[1]->m.size[0], C = c->in[1]->m.size[1],
                  step = a->reduction == 0 ? c->in[0]->m.stride[0] : 0;
    float *d = cpu_f32(c->out[0]), s = (float)a->label_smoothing,
          scale = a->reduction == 1 ? (float)(1 / (double)count_kept(label, N, a->ignore_index)) : 1;
    for (int64_t i = 0; i < N; i++, x += C, d += C) {
        bool kept = label[i] != a->ignore_index;
        float lse = kept ? log_sum(x, C) : 0, f = kept ? scale * g[i * step] : 0;
        for (int64_t k = 0; k < C; k++) d[k] = kept ? f * (expf(x[k] - lse) - s / (float)C) : 0;
        if (kept) d[label[i]] -= f * (1 - s);
    }
    return 0;
}
CPU_KERNEL(cross_entropy_grad, reject, run_cross_entropy_grad);
