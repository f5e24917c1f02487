/* softmax.c -- softmax and its logarithm along the last dim of row-major f32. */
#include <math.h>

#include "cpu.h"

static const char *reject(const ddp_call *c) {
    const ddp_tensor *x = c->in[0];
    int64_t dim = ((const ddp_softmax_attrs *)c->attrs)->dim; /* log_softmax has the same */
    if (x->m.dtype != DDP_F32 || x->m.ndim < 1 || x->numel == 0) return "f32 that is not empty only";
    if (dim != -1 && dim != x->m.ndim - 1) return "not the last dim";
    return ddp__meta_is_rowmajor(&x->m) ? NULL : "x is not row-major";
}

_Static_assert(sizeof(ddp_softmax_attrs) == sizeof(ddp_log_softmax_attrs), "one reject for both");

typedef struct rows {
    const float *x;
    float *y;
    int64_t n;
} rows;

static void softmax_rows(const void *ctx, int64_t lo, int64_t hi) {
    const rows *r = ctx;
    for (int64_t i = lo; i < hi; i++) {
        const float *x = r->x + i * r->n;
        float *y = r->y + i * r->n, scale = (float)(1 / cpu_row_exp(x, cpu_row_max(x, r->n), y, r->n));
#pragma omp simd
        for (int64_t k = 0; k < r->n; k++) y[k] *= scale;
    }
}

static void log_softmax_rows(const void *ctx, int64_t lo, int64_t hi) {
    const rows *r = ctx;
    for (int64_t i = lo; i < hi; i++) {
        const float *x = r->x + i * r->n;
        float *y = r->y + i * r->n, top = cpu_row_max(x, r->n), log_sum = (float)log(cpu_row_exp(x, top, NULL, r->n));
#pragma omp simd
        for (int64_t k = 0; k < r->n; k++) y[k] = x[k] - top - log_sum;
    }
}

static int each_row(const ddp_call *c, cpu_body body) {
    rows r = {cpu_f32(c->in[0]), cpu_f32(c->out[0]), c->in[0]->m.size[c->in[0]->m.ndim - 1]};
    cpu_share(c->in[0]->numel / r.n, c->in[0]->numel, body, &r);
    return 0;
}

static int run_softmax(const ddp_call *c) { return each_row(c, softmax_rows); }
CPU_KERNEL(softmax, reject, run_softmax);
static int run_log_softmax(const ddp_call *c) { return each_row(c, log_softmax_rows); }
CPU_KERNEL(log_softmax, reject, run_log_softmax);
