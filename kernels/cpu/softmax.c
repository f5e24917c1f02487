/* softmax.c -- softmax and its logarithm along the last dim of row-major f32, f16 and bf16. */
#include <math.h>

#include "cpu.h"

static const char *reject(const ddp_call *c) {
    const ddp_tensor *x = c->in[0];
    int64_t dim = ((const ddp_softmax_attrs *)c->attrs)->dim; /* log_softmax has the same */
    if (!cpu_f32_or_half(x) || x->m.ndim < 1 || x->numel == 0) return "f32, f16 or bf16 that is not empty only";
    if (dim != -1 && dim != x->m.ndim - 1) return "not the last dim";
    return ddp__meta_is_rowmajor(&x->m) ? NULL : "x is not row-major";
}

_Static_assert(sizeof(ddp_softmax_attrs) == sizeof(ddp_log_softmax_attrs), "one reject for both");

enum { CHUNK = 4096 };

typedef struct rows {
    ddp_dtype d;
    const void *x;
    void *y;
    int64_t n, step; /* step: elements at a time; a whole row of f32 */
} rows;

static int64_t piece(const rows *r, int64_t k) { return r->n - k < r->step ? r->n - k : r->step; }

/* The exponentials wait for their sum in y; those of 16-bit rows in buffer, those of long ones are computed again. */
static void softmax_rows(const void *ctx, int64_t lo, int64_t hi) {
    const rows *r = ctx;
    float buffer[CHUNK];
    for (int64_t row = lo * r->n; row < hi * r->n; row += r->n) {
        cpu_fetch(r->d, r->x, row + r->n, row + r->n < hi * r->n ? r->n : 0);
        cpu_fetch(r->d, r->y, row, r->n);
        float *whole = r->d == DDP_F32 ? (float *)r->y + row
                       : r->n <= CHUNK ? buffer
                                       : NULL,
              top = cpu_row_max(r->d, r->x, row, r->n);
        float scale = (float)(1 / cpu_row_exp(r->d, r->x, row, top, whole, r->n));
        for (int64_t k = 0; k < r->n; k += r->step) {
            int64_t m = piece(r, k);
            float *y = cpu_target(r->d, r->y, row + k, buffer);
            if (!whole) cpu_row_exp(r->d, r->x, row + k, top, y, m);
#pragma omp simd
            for (int64_t j = 0; j < m; j++) y[j] *= scale;
            cpu_narrow(r->d, y, r->y, row + k, m);
        }
    }
}

static void log_softmax_rows(const void *ctx, int64_t lo, int64_t hi) {
    const rows *r = ctx;
    float from[CHUNK], to[CHUNK];
    for (int64_t row = lo * r->n; row < hi * r->n; row += r->n) {
        cpu_fetch(r->d, r->x, row + r->n, row + r->n < hi * r->n ? r->n : 0);
        cpu_fetch(r->d, r->y, row, r->n);
        float top = cpu_row_max(r->d, r->x, row, r->n);
        float log_sum = (float)log(cpu_row_exp(r->d, r->x, row, top, NULL, r->n));
        for (int64_t k = 0; k < r->n; k += r->step) {
            int64_t m = piece(r, k);
            const float *x = cpu_source(r->d, r->x, row + k, from, m);
            float *y = cpu_target(r->d, r->y, row + k, to);
#pragma omp simd
            for (int64_t j = 0; j < m; j++) y[j] = x[j] - top - log_sum;
            cpu_narrow(r->d, y, r->y, row + k, m);
        }
    }
}

static int each_row(const ddp_call *c, cpu_body body) {
    const ddp_tensor *x = c->in[0];
    rows r = {x->m.dtype, ddp__ptr(x), ddp__ptr(c->out[0]), x->m.size[x->m.ndim - 1], CHUNK};
    if (r.d == DDP_F32) r.step = r.n;
    cpu_share(x->numel / r.n, x->numel, body, &r);
    return 0;
}

static int run_softmax(const ddp_call *c) { return each_row(c, softmax_rows); }
CPU_KERNEL(softmax, reject, run_softmax);
static int run_log_softmax(const ddp_call *c) { return each_row(c, log_softmax_rows); }
CPU_KERNEL(log_softmax, reject, run_log_softmax);
