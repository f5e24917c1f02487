/* softmax.c -- softmax, its logarithm and their gradients along the last dim of row-major f32, f16 and bf16. */
#include <math.h>

#include "soft.h"

static const char *reject(const ddp_call *c) {
    const ddp_tensor *x = c->in[0];
    int64_t dim = ((const ddp_softmax_attrs *)c->attrs)->dim; /* log_softmax has the same */
    if (!cpu_f32_or_half(x) || x->m.ndim < 1 || x->numel == 0) return "f32, f16 or bf16 that is not empty only";
    if (dim != -1 && dim != x->m.ndim - 1) return "not the last dim";
    return ddp__meta_is_rowmajor(&x->m) ? NULL : "x is not row-major";
}

_Static_assert(sizeof(ddp_softmax_attrs) == sizeof(ddp_log_softmax_attrs) &&
                   sizeof(ddp_softmax_attrs) == sizeof(ddp_softmax_grad_attrs) &&
                   sizeof(ddp_softmax_attrs) == sizeof(ddp_log_softmax_grad_attrs),
               "one reject for all");

enum { CHUNK = 4096 };

/* m <= CPU_W elements of a row from place k. */
CPU_INLINE void put_share(ddp_dtype d, const soft *s, const soft_row *r, int64_t k, int64_t m, float scale) {
    store_some(d, s->y, r->row * s->n + k, m, soft_e(d, s, r, k, m) * scale);
}
CPU_INLINE void put_shares(ddp_dtype d, const soft *s, const void *ctx, const soft_row *r) {
    (void)ctx;
    const float scale = (float)(1 / r->sum);
    int64_t k = 0;
    for (; k + CPU_W <= s->n; k += CPU_W) put_share(d, s, r, k, CPU_W, scale);
    if (k < s->n) put_share(d, s, r, k, s->n - k, scale);
}
/* The exponentials wait for their sum in y; those of 16-bit rows in a buffer, those of long ones are computed again. */
static void softmax_rows(const void *ctx, int64_t lo, int64_t hi) {
    soft s = *(const soft *)ctx;
    float buffer[2 * CHUNK];
    if (s.d == DDP_F32) s.e = s.y;
    else if (s.n <= CHUNK) s.e = buffer;
    s.in_turn = s.d != DDP_F32;
    soft_rows(s, true, lo, hi, soft_all, put_shares, NULL);
}

CPU_INLINE void put_logarithm(ddp_dtype d, const soft *s, const soft_row *r, int64_t k, int64_t m, float log_sum) {
    int64_t at = r->row * s->n + k;
    store_some(d, s->y, at, m, load_some(d, s->x, at, m, 0) - r->top - log_sum);
}
CPU_INLINE void put_logarithms(ddp_dtype d, const soft *s, const void *ctx, const soft_row *r) {
    (void)ctx;
    const float log_sum = (float)log(r->sum);
    int64_t k = 0;
    for (; k + CPU_W <= s->n; k += CPU_W) put_logarithm(d, s, r, k, CPU_W, log_sum);
    if (k < s->n) put_logarithm(d, s, r, k, s->n - k, log_sum);
}
static void log_softmax_rows(const void *ctx, int64_t lo, int64_t hi) {
    soft_rows(*(const soft *)ctx, true, lo, hi, soft_all, put_logarithms, NULL);
}

static int each_row(const ddp_call *c, cpu_body body) {
    const ddp_tensor *x = c->in[0];
    soft s = {.d = x->m.dtype, .n = x->m.size[x->m.ndim - 1], .x = ddp__ptr(x), .y = ddp__ptr(c->out[0])};
    cpu_share(x->numel / s.n, x->numel, body, &s);
    return 0;
}

static int run_softmax(const ddp_call *c) { return each_row(c, softmax_rows); }
CPU_KERNEL(softmax, reject, run_softmax);
static int run_log_softmax(const ddp_call *c) { return each_row(c, log_softmax_rows); }
CPU_KERNEL(log_softmax, reject, run_log_softmax);

/* ---- gradients: y (g - sum(g y)), and of the logarithm g - e^y sum(g) ---- */

typedef struct slopes {
    ddp_dtype d;
    const void *g, *y;
    void *dx;
    int64_t n;
    bool logarithm;
} slopes;

/* m <= CPU_W terms of the sum. */
CPU_INLINE cpu_vec slope_term(const slopes *s, int64_t i, int64_t m) {
    cpu_vec g = load_some(s->d, s->g, i, m, 0);
    if (s->logarithm) return g;
    return g * load_some(s->d, s->y, i, m, 0);
}
CPU_INLINE double slope_sum(const slopes *s, int64_t at) {
    enum { BLOCK = 1024 };
    double total = 0;
    for (int64_t k = 0; k < s->n;) {
        cpu_vec sum[4] = {{0}};
        int64_t end = s->n - k < BLOCK ? s->n : k + BLOCK;
        for (; k + 4 * CPU_W <= end; k += 4 * CPU_W)
            for (int v = 0; v < 4; v++) sum[v] += slope_term(s, at + k + v * CPU_W, CPU_W);
        for (; k < end; k += CPU_W) sum[0] += slope_term(s, at + k, end - k < CPU_W ? end - k : CPU_W);
        total += lanes_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
    return total;
}
CPU_INLINE void put_gradient(const slopes *s, int64_t i, int64_t m, float sum) {
    cpu_vec g = load_some(s->d, s->g, i, m, 0), y = load_some(s->d, s->y, i, m, 0);
    if (s->logarithm) store_some(s->d, s->dx, i, m, g - exp_of(y) * sum);
    else store_some(s->d, s->dx, i, m, y * (g - sum));
}
/* While a row is written what comes AHEAD is brought near. */
CPU_INLINE void slope_rows(slopes s, int64_t lo, int64_t hi) {
    for (int64_t at = lo * s.n; at < hi * s.n; at += s.n) {
        float sum = (float)slope_sum(&s, at);
        int64_t k = 0;
        for (; k + CPU_W <= s.n; k += CPU_W) {
            __builtin_prefetch(cpu_at(s.d, s.g, at + k) + AHEAD);
            __builtin_prefetch(cpu_at(s.d, s.y, at + k) + AHEAD);
            __builtin_prefetch(cpu_at(s.d, s.dx, at + k) + AHEAD);
            put_gradient(&s, at + k, CPU_W, sum);
        }
        if (k < s.n) put_gradient(&s, at + k, s.n - k, sum);
    }
}
CPU_INLINE void slope_rows_of(ddp_dtype d, bool logarithm, const slopes *s, int64_t lo, int64_t hi) {
    slope_rows((slopes){d, s->g, s->y, s->dx, s->n, logarithm}, lo, hi);
}
CPU_INLINE void slope_rows_by(bool logarithm, const slopes *s, int64_t lo, int64_t hi) {
    if (s->d == DDP_BF16) slope_rows_of(DDP_BF16, logarithm, s, lo, hi);
    else if (s->d == DDP_F16) slope_rows_of(DDP_F16, logarithm, s, lo, hi);
    else slope_rows_of(DDP_F32, logarithm, s, lo, hi);
}
static void softmax_slopes(const void *ctx, int64_t lo, int64_t hi) { slope_rows_by(false, ctx, lo, hi); }
static void log_softmax_slopes(const void *ctx, int64_t lo, int64_t hi) { slope_rows_by(true, ctx, lo, hi); }

static const char *reject_grad(const ddp_call *c) {
    return ddp__meta_is_rowmajor(&c->in[1]->m) ? reject(c) : "y is not row-major";
}
static int slopes_of_rows(const ddp_call *c, cpu_body body) {
    const ddp_tensor *y = c->in[1];
    slopes s = {y->m.dtype, ddp__ptr(c->in[0]), ddp__ptr(y), ddp__ptr(c->out[0]), y->m.size[y->m.ndim - 1], false};
    cpu_share(y->numel / s.n, y->numel, body, &s);
    return 0;
}
static int run_softmax_grad(const ddp_call *c) { return slopes_of_rows(c, softmax_slopes); }
CPU_KERNEL(softmax_grad, reject_grad, run_softmax_grad);
static int run_log_softmax_grad(const ddp_call *c) { return slopes_of_rows(c, log_softmax_slopes); }
CPU_KERNEL(log_softmax_grad, reject_grad, run_log_softmax_grad);
