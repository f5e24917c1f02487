/* softmax.c -- softmax, its logarithm and their gradients: lines along a dim, and the threads that suit them. */
#include <string.h>

#include "lines.h"

/* The lines along dim of operands of one shape: out, in[0..n). */
static void lines_of(lines_args *a, int n, ddp_tensor *const *t, int64_t dim) {
    ddp_tensor line[3], *shaped[3] = {NULL};
    const ddp_meta *m = &t[0]->m;
    int d = m->ndim ? (int)(dim < 0 ? dim + m->ndim : dim) : 0;
    a->n = m->ndim ? m->size[d] : 1;
    for (int k = 0; k < n; k++) { /* without dim they are walked as one */
        line[k] = *t[k];
        a->step[k] = m->ndim ? t[k]->m.stride[d] : 1;
        if (a->n == 1) a->step[k] = 1;
        if (m->ndim) line[k].m.size[d] = 1;
        line[k].numel = a->n ? t[k]->numel / a->n : 0;
        shaped[k] = &line[k];
    }
    ddp_iter it;
    ddp__iter_init(&it, n, shaped);
    a->lines = it.numel;
    a->ndim = it.ndim;
    for (int e = 0; e < it.ndim; e++) {
        a->size[e] = it.size[e];
        for (int k = 0; k < n; k++) a->stride[k][e] = it.stride[k][e];
    }
    a->out = it.ptr[0];
    for (int k = 1; k < n; k++) a->in[k - 1] = it.ptr[k];
}

/* Runs of all operands may be read as one. */
static bool packed(const lines_args *a, int n, int run, size_t bytes) {
    const void *p[3] = {a->out, a->in[0], a->in[1]};
    if (a->n % run != 0) return false;
    for (int k = 0; k < n; k++) {
        if (a->step[k] != 1 || (uintptr_t)p[k] % ((size_t)run * bytes) != 0) return false;
        for (int d = 0; d < a->ndim; d++)
            if (a->stride[k][d] % run != 0) return false;
    }
    return true;
}

/* Threads go along lines where their elements are closer than lines are. */
static ddp_grid grid_of(lines_args *a, int n, ddp_dtype d) {
    int run = ddp__run_of(d);
    int64_t most = 4 * FULL_GPU;
    a->across = a->ndim > 0 && a->stride[1][0] < a->step[1];
    a->packed = packed(a, n, run, ddp__dtype_bytes[d]);
    if (a->across) a->lanes = ddp__line_columns(a->lines, a->n);
    else a->lanes = ddp__line_lanes(a->n / (a->packed ? run : 1));
    int64_t blocks = ddp__ceil_div(a->lines, a->across ? a->lanes : LINE_THREADS / a->lanes);
    return (ddp_grid){(unsigned)(blocks < most ? blocks : most), 1, 1, LINE_THREADS, 0};
}

static int run(const ddp_call *c, int kernel, int64_t dim, bool logarithm) {
    ddp_tensor *t[3] = {c->out[0], c->in[0], c->n_in > 1 ? c->in[1] : NULL};
    ddp_dtype d = c->in[0]->m.dtype;
    lines_args a;
    memset(&a, 0, sizeof a);
    lines_of(&a, 1 + c->n_in, t, dim);
    a.logarithm = logarithm;
    if (a.n == 0 || a.lines == 0) return 0;
    return ddp__cuda_launch(c, kernel + (int)d, &a, grid_of(&a, 1 + c->n_in, d));
}

#define ENTRY(op, kernel, logarithm)                                                         \
    static int run_##op(const ddp_call *c) {                                                 \
        return run(c, DDP_K_##kernel, ((const ddp_##op##_attrs *)c->attrs)->dim, logarithm); \
    }                                                                                        \
    DDP_CUDA_KERNEL(op, ddp__cuda_no_numbers, run_##op)
ENTRY(softmax, softmax, false);
ENTRY(log_softmax, softmax, true);
ENTRY(softmax_grad, softmax_grad, false);
ENTRY(log_softmax_grad, softmax_grad, true);
