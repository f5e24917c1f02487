/* layer_norm.c -- layer normalisation: rows in the logical order of x, and the threads that suit them. */
#include <string.h>

#include "lines.h"

enum { PARTS = FULL_GPU / 2 }; /* blocks that add up dweight and dbias */

static int64_t row_length(const ddp_meta *x, int64_t dims) {
    int64_t n = 1;
    for (int d = x->ndim - (int)dims; d < x->ndim; d++) n *= x->size[d];
    return n;
}

static void rows_of(layer_norm_args *a, const ddp_tensor *x, int64_t dims) {
    a->n = row_length(&x->m, dims);
    a->rows = x->numel / a->n;
}

static bool aligned(const void *p, size_t bytes) { return (uintptr_t)p % bytes == 0; }

/* A vector's runs are read as one too: of two loads where it is wider than x. */
static bool vector_fits(const channel_vector *v) { return aligned(v->p, 32); }

static void choose_threads(layer_norm_args *a, ddp_dtype d) {
    int run = ddp__run_of(d);
    a->packed = a->n % run == 0 && aligned(a->in[0], 16) && aligned(a->in[1], 16) && aligned(a->out, 16) &&
                vector_fits(&a->weight) && vector_fits(&a->bias);
    a->lanes = ddp__line_lanes(a->n / (a->packed ? run : 1));
}

/* Does a row stay on its threads, VALUES of 4 bytes each (by_rows in held.cuh)? */
static bool held(const layer_norm_args *a, ddp_dtype d, int values) {
    int wide = ddp__dtype_bytes[ddp__wide(d)], run = ddp__run_of(d);
    return a->n <= (int64_t)a->lanes * (a->packed ? values * 4 / wide / run * run : 8 * 4 / wide);
}

static ddp_grid rows_grid(const layer_norm_args *a, int64_t most) {
    int64_t blocks = ddp__ceil_div(a->rows, LINE_THREADS / a->lanes);
    return (ddp_grid){(unsigned)(blocks < most ? blocks : most), 1, 1, LINE_THREADS, 0};
}

static int lay_vector(const ddp_call *c, ddp_tensor *t, ddp_dtype wide, ddp_laid *laid, channel_vector *v) {
    int st = ddp__cuda_lay_rows(c, t, laid);
    *v = (channel_vector){laid->p, 1, t && t->m.dtype == wide};
    return st;
}

static int run_layer_norm(const ddp_call *c) {
    const ddp_layer_norm_attrs *at = c->attrs;
    ddp_dtype d = c->in[0]->m.dtype, wide = ddp__wide(d);
    ddp_laid x = {0}, w = {0}, b = {0};
    layer_norm_args a;
    memset(&a, 0, sizeof a);
    rows_of(&a, c->in[0], at->dims);
    int st = ddp__cuda_lay_rows(c, c->in[0], &x);
    if (st == 0) st = lay_vector(c, c->in[1], wide, &w, &a.weight);
    if (st == 0) st = lay_vector(c, c->in[2], wide, &b, &a.bias);
    if (st == 0) {
        a.in[0] = x.p;
        a.out = ddp__ptr(c->out[0]);
        a.mean = ddp__ptr(c->out[1]);
        a.rstd = ddp__ptr(c->out[2]);
        a.eps = at->eps;
        choose_threads(&a, d);
        st = ddp__launch_layer_norm(c, d, &a, rows_grid(&a, 4 * FULL_GPU));
    }
    ddp__cuda_unlay(c, &x);
    ddp__cuda_unlay(c, &w);
    ddp__cuda_unlay(c, &b);
    return st;
}
DDP_CUDA_KERNEL(layer_norm, ddp__cuda_no_numbers, run_layer_norm);

/* ---- gradients ---- */

/* dx, and dweight and dbias in a.parts parts: with dx where rows are held, else column by column. */
static int sums(const ddp_call *c, layer_norm_args *a, ddp_dtype d) {
    bool both = held(a, d, 8);
    ddp_grid g = rows_grid(a, both ? PARTS : 4 * FULL_GPU), columns = {0};
    int lanes = a->lanes;
    a->parts = (int32_t)g.x;
    if (!both) {
        int64_t runs = a->n / (a->packed ? ddp__run_of(d) : 1), x, splits;
        a->lanes = ddp__line_columns(runs, a->rows);
        x = ddp__ceil_div(runs, a->lanes);
        splits = ddp__ceil_div(FULL_GPU, x);
        if (splits > a->rows) splits = a->rows;
        a->share = ddp__ceil_div(a->rows, splits > 0 ? splits : 1);
        a->parts = (int32_t)(a->share ? ddp__ceil_div(a->rows, a->share) : 0);
        columns = (ddp_grid){(unsigned)x, (unsigned)a->parts, 1, LINE_THREADS, 0};
    }
    size_t bytes = (size_t)a->parts * 2 * (size_t)a->n * ddp__dtype_bytes[ddp__wide(d)];
    if (!(a->part = ddp__cuda_scratch_take(c, bytes ? bytes : 1))) return ddp__pending();
    int st = both ? 0 : ddp__launch_layer_norm_columns(c, d, a, columns);
    a->lanes = lanes;
    if (st == 0) st = ddp__launch_layer_norm_grad(c, d, a, g);
    ddp_grid finish = {(unsigned)ddp__ceil_div(2 * a->n, 8), 1, 1, LINE_THREADS, 0};
    if (st == 0) st = ddp__launch_layer_norm_finish(c, d, a, finish);
    ddp__cuda_scratch_give(c, a->part, bytes ? bytes : 1);
    return st;
}

static int run_layer_norm_grad(const ddp_call *c) {
    enum { G, X, W, MEAN, RSTD };
    ddp_dtype d = c->in[X]->m.dtype, wide = ddp__wide(d);
    ddp_laid laid[5] = {{0}};
    layer_norm_args a;
    memset(&a, 0, sizeof a);
    rows_of(&a, c->in[X], ((const ddp_layer_norm_grad_attrs *)c->attrs)->dims);
    int st = 0;
    for (int i = 0; st == 0 && i < 5; i++) st = ddp__cuda_lay_rows(c, c->in[i], &laid[i]);
    if (st == 0) {
        a.in[0] = laid[G].p;
        a.in[1] = laid[X].p;
        a.weight = (channel_vector){laid[W].p, 1, c->in[W] && c->in[W]->m.dtype == wide};
        a.mean = laid[MEAN].p;
        a.rstd = laid[RSTD].p;
        a.out = ddp__ptr(c->out[0]);
        a.dweight = ddp__ptr(c->out[1]);
        a.dbias = ddp__ptr(c->out[2]);
        a.sums_wide = c->out[1]->m.dtype == wide;
        choose_threads(&a, d);
        st = sums(c, &a, d);
    }
    for (int i = 0; i < 5; i++) ddp__cuda_unlay(c, &laid[i]);
    return st;
}
DDP_CUDA_KERNEL(layer_norm_grad, ddp__cuda_no_numbers, run_layer_norm_grad);
