/* loss.c -- cross-entropy of f32, f16 or bf16 logits whose classes lie together: [N, C], or [N, C, H, W] channels-last as
 * N*H*W rows of C. */
#include <math.h>
#include <string.h>

#include "../../core/mem/mem.h"
#include "cpu.h"

static const char *reject(const ddp_call *c) {
    const ddp_tensor *x = c->in[c->n_in - 2], *target = c->in[c->n_in - 1];
    if (!cpu_f32_or_half(x) || !cpu_f32_or_half(c->in[0])) return "f32, f16 and bf16 only";
    if ((x->m.ndim != 2 && x->m.ndim != 4) || !cpu_rows_of_channels(x)) return "classes that lie apart";
    if (!ddp__meta_is_rowmajor(&target->m)) return "a strided target";
    if (c->n_in == 3 && (!ddp__meta_is_rowmajor(&c->in[0]->m) || !cpu_rows_of_channels(c->out[0])))
        return "a strided g";
    return NULL;
}

static const int64_t *labels_of(const ddp_tensor *t) { return (const int64_t *)(const void *)ddp__ptr(t); }

/* log of the sum of e^x over the n elements from place i. */
static double log_sum(ddp_dtype d, const void *x, int64_t i, int64_t n) {
    float top = cpu_row_max(d, x, i, n);
    return (double)top + log(cpu_row_exp(d, x, i, top, NULL, n));
}

static int64_t count_kept(const int64_t *label, int64_t n, int64_t ignore) {
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++) kept += label[i] != ignore;
    return kept;
}

/* A fixed number of rows at a time, so that the total does not depend on the threads. */
enum { ROWS = 64, CHUNK = 4096 };

/* The loss of rows [lo, hi); each goes into y where it is given. */
static double row_losses(const ddp_call *c, int64_t lo, int64_t hi, void *y) {
    const ddp_cross_entropy_attrs *a = c->attrs;
    const int64_t *label = labels_of(c->in[1]), C = c->in[0]->m.size[1];
    const void *x = ddp__ptr(c->in[0]);
    const ddp_dtype d = c->in[0]->m.dtype;
    double total = 0, s = a->label_smoothing;
    for (int64_t i = lo; i < hi; i++) {
        double loss = 0;
        cpu_fetch(d, x, (i + 1) * C, i + 1 < hi ? C : 0);
        if (label[i] != a->ignore_index) {
            double lse = log_sum(d, x, i * C, C);
            double all = s > 0 ? (double)C * lse - cpu_row_sum(d, x, i * C, 1, C) : 0;
            loss = (1 - s) * (lse - cpu_get(d, x, i * C + label[i])) + (s > 0 ? s * all / (double)C : 0);
        }
        if (y) cpu_put(d, y, i, (float)loss);
        total += loss;
    }
    return total;
}

/* Groups [lo, hi) of ROWS rows; their sums go into part. */
typedef struct losses {
    const ddp_call *c;
    void *y;
    double *part;
} losses;

static void group_losses(const void *ctx, int64_t lo, int64_t hi) {
    const losses *l = ctx;
    int64_t N = l->c->in[1]->numel;
    for (int64_t g = lo; g < hi; g++)
        l->part[g] = row_losses(l->c, g * ROWS, (g + 1) * ROWS < N ? (g + 1) * ROWS : N, l->y);
}

static int run_cross_entropy(const ddp_call *c) {
    const ddp_cross_entropy_attrs *a = c->attrs;
    int64_t N = c->in[1]->numel, groups = (N + ROWS - 1) / ROWS;
    char *y = ddp__ptr(c->out[0]);
    double few[64], total = 0;
    size_t bytes = (size_t)groups * sizeof(double);
    losses l = {c, a->reduction == 0 ? y : NULL, groups <= 64 ? few : ddp__scratch_take(bytes)};
    if (!l.part) return ddp__pending();
    if (groups) cpu_share(groups, c->in[0]->numel, group_losses, &l);
    for (int64_t g = 0; g < groups; g++) total += l.part[g];
    if (l.part != few) ddp__scratch_give(l.part, bytes);
    if (a->reduction == 1) total /= (double)count_kept(labels_of(c->in[1]), N, a->ignore_index);
    if (a->reduction != 0) cpu_put(c->in[0]->m.dtype, y, 0, (float)total);
    return 0;
}
CPU_KERNEL(cross_entropy, reject, run_cross_entropy);

static void grad_rows(const void *ctx, int64_t lo, int64_t hi) {
    const ddp_call *c = ctx;
    const ddp_cross_entropy_grad_attrs *a = c->attrs;
    const ddp_tensor *g = c->in[0], *x = c->in[1];
    const ddp_dtype dt = x->m.dtype;
    const int64_t *label = labels_of(c->in[2]), N = c->in[2]->numel, C = x->m.size[1];
    const int64_t g_step = a->reduction == 0, step = dt == DDP_F32 ? C : CHUNK;
    const float s = (float)a->label_smoothing, spread = s / (float)C;
    const double scale = a->reduction == 1 ? 1 / (double)count_kept(label, N, a->ignore_index) : 1;
    float buffer[CHUNK];
    for (int64_t i = lo; i < hi; i++) {
        char *out = ddp__ptr(c->out[0]);
        cpu_fetch(dt, ddp__ptr(x), (i + 1) * C, i + 1 < hi ? C : 0);
        cpu_fetch(dt, out, i * C, C);
        if (label[i] == a->ignore_index) {
            memset(cpu_at(dt, out, i * C), 0, (size_t)C * ddp__dtype_bytes[dt]);
            continue;
        }
        float f = (float)(scale * cpu_get(g->m.dtype, ddp__ptr(g), i * g_step)),
              top = cpu_row_max(dt, ddp__ptr(x), i * C, C);
        float *whole = dt == DDP_F32 ? cpu_f32(c->out[0]) + i * C : C <= CHUNK ? buffer : NULL; /* as in softmax.c */
        float part = (float)(1 / cpu_row_exp(dt, ddp__ptr(x), i * C, top, whole, C));
        for (int64_t k = 0; k < C; k += step) {
            int64_t m = C - k < step ? C - k : step, at = label[i] - k;
            float *d = cpu_target(dt, out, i * C + k, buffer);
            if (!whole) cpu_row_exp(dt, ddp__ptr(x), i * C + k, top, d, m);
            float own = at >= 0 && at < m ? f * (d[at] * part - spread - (1 - s)) : 0;
#pragma omp simd
            for (int64_t j = 0; j < m; j++) d[j] = f * (d[j] * part - spread);
            if (at >= 0 && at < m) d[at] = own;
            cpu_narrow(dt, d, out, i * C + k, m);
        }
    }
}

static int run_cross_entropy_grad(const ddp_call *c) {
    if (c->in[1]->numel) cpu_share(c->in[2]->numel, c->in[1]->numel, grad_rows, c);
    return 0;
}
CPU_KERNEL(cross_entropy_grad, reject, run_cross_entropy_grad);
