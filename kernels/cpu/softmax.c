/* softmax.c -- softmax and its logarithm along the last dim of row-major f32, f16 and bf16. */
#include <math.h>

#include "soft.h"

static const char *reject(const ddp_call *c) {
    const ddp_tensor *x = c->in[0];
    int64_t dim = ((const ddp_softmax_attrs *)c->attrs)->dim; /* log_softmax has the same */
    if (!cpu_f32_or_half(x) || x->m.ndim < 1 || x->numel == 0) return "f32, f16 or bf16 that is not empty only";
    if (dim != -1 && dim != x->m.ndim - 1) return "not the last dim";
    return ddp__meta_is_rowmajor(&x->m) ? NULL : "x is not row-major";
}

_Static_assert(sizeof(ddp_softmax_attrs) == sizeof(ddp_log_softmax_attrs), "one reject for both");

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
