/* reduce.c -- f32 sums and means where what stays and what goes are each one run in memory: all of a dense tensor, rows
 * into channels (bias gradients), the last dims. Added in f32 over short blocks, then in double. */
#include <string.h>

#include "cpu.h"

enum { BLOCK = 64, MAX_KEPT = 4096 };

/* The input as kept x gone with one stride each. */
typedef struct plan {
    int64_t kept, kept_stride, gone, gone_stride;
} plan;

/* Dims of one side merged, sorted by stride; false when they leave gaps. */
static bool merge(const ddp_meta *x, const bool *gone, bool which, int64_t *size, int64_t *stride) {
    bool used[DDP_MAX_DIM] = {false};
    *size = 1;
    *stride = 0;
    for (;;) {
        int pick = -1;
        for (int d = 0; d < x->ndim; d++)
            if (gone[d] == which && !used[d] && x->size[d] != 1 && (pick < 0 || x->stride[d] < x->stride[pick]))
                pick = d;
        if (pick < 0) return true;
        if (*size == 1) *stride = x->stride[pick];
        else if (x->stride[pick] != *stride * *size) return false;
        used[pick] = true;
        *size *= x->size[pick];
    }
}

static bool make_plan(const ddp_call *c, plan *p) {
    const ddp_sum_attrs *a = c->attrs; /* mean has the same */
    const ddp_meta *x = &c->in[0]->m;
    bool gone[DDP_MAX_DIM];
    for (int d = 0; d < x->ndim; d++) gone[d] = a->dim.n <= 0;
    for (int64_t i = 0; i < a->dim.n && x->ndim; i++)
        gone[a->dim.v[i] < 0 ? a->dim.v[i] + x->ndim : a->dim.v[i]] = true;
    if (!merge(x, gone, false, &p->kept, &p->kept_stride) || !merge(x, gone, true, &p->gone, &p->gone_stride))
        return false;
    int kept_dims = 0; /* the result is row-major: several kept dims must be in that order */
    for (int d = 0; d < x->ndim; d++) kept_dims += !gone[d] && x->size[d] != 1;
    return kept_dims <= 1;
}

_Static_assert(sizeof(ddp_sum_attrs) == sizeof(ddp_mean_attrs), "mean has the attributes of sum");

static const char *reject(const ddp_call *c) {
    plan p;
    if (c->in[0]->m.dtype != DDP_F32 || c->in[0]->numel == 0) return "f32 that is not empty only";
    if (!make_plan(c, &p)) return "more than two runs in memory";
    if (p.kept > 1 && p.kept_stride == 1 && p.kept > MAX_KEPT) return "too many results at once";
    if (p.gone > 1 && p.gone_stride != 1 && !(p.kept > 1 && p.kept_stride == 1)) return "no unit stride";
    return NULL;
}

static double line_sum(const float *x, int64_t n) {
    double total = 0;
    for (int64_t at = 0; at < n; at += 1024) {
        int64_t m = n - at < 1024 ? n - at : 1024;
        float s = 0;
#pragma omp simd reduction(+ : s)
        for (int64_t i = 0; i < m; i++) s += x[at + i];
        total += s;
    }
    return total;
}

/* Rows of `kept` neighbours, added up. */
static void row_sums(const float *x, const plan *p, float *y, double scale) {
    double total[MAX_KEPT];
    float block[MAX_KEPT];
    memset(total, 0, sizeof *total * (size_t)p->kept);
    for (int64_t at = 0; at < p->gone; at += BLOCK) {
        int64_t m = p->gone - at < BLOCK ? p->gone - at : BLOCK;
        memset(block, 0, sizeof *block * (size_t)p->kept);
        for (int64_t r = 0; r < m; r++) {
            const float *row = x + (at + r) * p->gone_stride;
#pragma omp simd
            for (int64_t k = 0; k < p->kept; k++) block[k] += row[k];
        }
        for (int64_t k = 0; k < p->kept; k++) total[k] += block[k];
    }
    for (int64_t k = 0; k < p->kept; k++) y[k] = (float)(total[k] * scale);
}

static int reduce(const ddp_call *c, bool mean) {
    plan p;
    make_plan(c, &p);
    const float *x = cpu_f32(c->in[0]);
    float *y = cpu_f32(c->out[0]);
    double scale = mean ? 1 / (double)p.gone : 1;
    if (p.kept > 1 && p.kept_stride == 1) row_sums(x, &p, y, scale);
    else
        for (int64_t k = 0; k < p.kept; k++) y[k] = (float)(line_sum(x + k * p.kept_stride, p.gone) * scale);
    return 0;
}

static int run_sum(const ddp_call *c) { return reduce(c, false); }
CPU_KERNEL(sum, reject, run_sum);
static int run_mean(const ddp_call *c) { return reduce(c, true); }
CPU_KERNEL(mean, reject, run_mean);
