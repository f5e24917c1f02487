/* reduce.c -- sums, means, extremes: how the dims of x split into results and what falls on them, and which kernel that suits. */
#include <string.h>

#include "lines.h"

/* ---- dims ---- */

/* Dims innermost first: sizes, strides in x, strides among the results. */
typedef struct dims {
    int n;
    int64_t size[LINE_DIMS], stride[LINE_DIMS], at[LINE_DIMS];
} dims;

static void push(dims *d, int64_t size, int64_t stride, int64_t at) {
    if (size == 1) return;
    d->size[d->n] = size;
    d->stride[d->n] = stride;
    d->at[d->n++] = at;
}

static void swap(int64_t *v, int i) {
    int64_t t = v[i];
    v[i] = v[i - 1];
    v[i - 1] = t;
}

/* The smallest stride in x innermost, where the order is free. */
static void sort(dims *d) {
    for (int a = 1; a < d->n; a++)
        for (int b = a; b > 0 && d->stride[b] < d->stride[b - 1]; b--) {
            swap(d->size, b);
            swap(d->stride, b);
            swap(d->at, b);
        }
}

/* Neighbours that are one dim in x and among the results become one; none at all become one of size 1. */
static void merge(dims *d) {
    int n = 0;
    for (int k = 0; k < d->n; k++) {
        if (n > 0 && d->stride[k] == d->size[n - 1] * d->stride[n - 1] && d->at[k] == d->size[n - 1] * d->at[n - 1]) {
            d->size[n - 1] *= d->size[k];
            continue;
        }
        d->size[n] = d->size[k];
        d->stride[n] = d->stride[k];
        d->at[n++] = d->at[k];
    }
    for (d->n = n ? n : 1; n < LINE_DIMS; n++) {
        d->size[n] = 1;
        d->stride[n] = d->at[n] = 0;
    }
}

/* in_order: positions count in x's logical order. */
static void split(const ddp_meta *x, int64_t n_dims, const int64_t *which, bool in_order, dims *kept, dims *gone) {
    bool goes[DDP_MAX_DIM] = {false};
    int64_t at = 1;
    for (int d = 0; d < x->ndim; d++) goes[d] = n_dims <= 0;
    for (int64_t i = 0; i < n_dims && x->ndim; i++) goes[which[i] < 0 ? which[i] + x->ndim : which[i]] = true;
    kept->n = gone->n = 0;
    for (int d = x->ndim - 1; d >= 0; d--) {
        if (goes[d]) push(gone, x->size[d], x->stride[d], 0);
        else push(kept, x->size[d], x->stride[d], at);
        if (!goes[d]) at *= x->size[d];
    }
    sort(kept);
    if (!in_order) sort(gone);
    merge(kept);
    merge(gone);
}

static int64_t product(const dims *d) {
    int64_t n = 1;
    for (int k = 0; k < d->n; k++) n *= d->size[k];
    return n;
}

/* ---- the choice ---- */

typedef struct kernels {
    int rows, columns, finish; /* of f32 */
    int park;                  /* bytes of a partial result */
} kernels;

/* Do all dims but the innermost of `runs` step over whole runs? */
static bool strides_fit(const dims *d, int run, bool innermost_too) {
    for (int k = innermost_too ? 0 : 1; k < d->n; k++)
        if (d->stride[k] % run != 0) return false;
    return true;
}

/* Elements side by side in runs: of `inner`, whose innermost dim they are, stepping over `other`. */
static bool packed(const void *x, const dims *inner, const dims *other, int run, size_t bytes) {
    return inner->stride[0] == 1 && inner->size[0] % run == 0 && (uintptr_t)x % ((size_t)run * bytes) == 0 &&
           strides_fit(inner, run, false) && strides_fit(other, run, true);
}

/* Blocks that share a result's elements, where `blocks` alone do not fill the GPU: each is left with `least` steps. */
static int splits_of(int64_t blocks, int64_t steps, int64_t least) {
    int64_t want = ddp__ceil_div(FULL_GPU, blocks > 0 ? blocks : 1), most = steps / least;
    want = want < most ? want : most;
    return want < 1 ? 1 : want > 1024 ? 1024 : (int)want;
}

/* A result's elements lie side by side, or at least closer to each other than results do; or both are so few that a block of columns
 * would have nothing for most of its threads. */
static bool suits_rows(const dims *kept, const dims *gone) {
    enum { FEW = 64 };
    if (gone->size[0] == 1) return false;
    if (kept->size[0] == 1 || gone->stride[0] <= kept->stride[0]) return true;
    return kept->n > 1 && product(gone) * kept->size[0] <= FEW;
}

static ddp_grid rows_grid(reduce_args *a, int run) {
    int64_t runs = a->ins / (a->packed ? run : 1), blocks;
    a->lanes = ddp__line_lanes(runs);
    blocks = ddp__ceil_div(a->outs, LINE_THREADS / a->lanes);
    a->splits = a->lanes < LINE_THREADS ? 1 : splits_of(blocks, runs / LINE_THREADS, 4);
    return (ddp_grid){(unsigned)(blocks < 65535 ? blocks : 65535), (unsigned)a->splits, 1, LINE_THREADS, 0};
}

static ddp_grid columns_grid(reduce_args *a, int run) {
    int64_t runs = a->kept_size[0] / (a->packed ? run : 1), outer = a->outs / a->kept_size[0];
    a->lanes = ddp__line_columns(runs, a->ins);
    int64_t x = ddp__ceil_div(runs, a->lanes), z = outer < 65535 ? outer : 65535;
    a->splits = splits_of(x * z, a->ins / (LINE_THREADS / a->lanes), 4);
    return (ddp_grid){(unsigned)x, (unsigned)a->splits, (unsigned)z, LINE_THREADS, 0};
}

static int reduce(const ddp_call *c, reduce_args *a, const kernels *k, const dims *kept, const dims *gone) {
    ddp_dtype d = c->in[0]->m.dtype;
    int run = ddp__run_of(d), bytes = ddp__dtype_bytes[d];
    bool by_rows = suits_rows(kept, gone);
    a->x = ddp__ptr(c->in[0]);
    a->n_kept = kept->n;
    a->n_gone = gone->n;
    memcpy(a->kept_size, kept->size, sizeof a->kept_size);
    memcpy(a->kept_stride, kept->stride, sizeof a->kept_stride);
    memcpy(a->kept_at, kept->at, sizeof a->kept_at);
    memcpy(a->gone_size, gone->size, sizeof a->gone_size);
    memcpy(a->gone_stride, gone->stride, sizeof a->gone_stride);
    a->outs = product(kept);
    a->ins = product(gone);
    if (a->outs == 0) return 0;
    a->packed = by_rows ? packed(a->x, gone, kept, run, (size_t)bytes) : packed(a->x, kept, gone, run, (size_t)bytes);
    ddp_grid g = by_rows ? rows_grid(a, run) : columns_grid(a, run);
    int kernel = (by_rows ? k->rows : k->columns) + (int)d;
    if (a->splits == 1) return ddp__cuda_launch(c, kernel, a, g);
    size_t parts = (size_t)a->outs * (size_t)a->splits * (size_t)k->park;
    if (!(a->part = ddp__cuda_scratch_take(c, parts))) return ddp__pending();
    int st = ddp__cuda_launch(c, kernel, a, g);
    if (st == 0) st = ddp__cuda_launch(c, k->finish + (int)d, a, ddp__grid(a->outs * 32, 1));
    ddp__cuda_scratch_give(c, a->part, parts);
    return st;
}

/* ---- ops ---- */

static int sum(const ddp_call *c, const ddp_ints *which, bool mean) {
    static const kernels of_sum = {DDP_K_sum_rows, DDP_K_sum_columns, DDP_K_sum_finish, 8};
    reduce_args a = {.y = ddp__ptr(c->out[0])};
    dims kept, gone;
    split(&c->in[0]->m, which->n, which->v, false, &kept, &gone);
    a.count = mean ? (double)product(&gone) : 1;
    return reduce(c, &a, &of_sum, &kept, &gone);
}

static int run_sum(const ddp_call *c) { return sum(c, &((const ddp_sum_attrs *)c->attrs)->dim, false); }
DDP_CUDA_KERNEL(sum, ddp__cuda_no_numbers, run_sum);
static int run_mean(const ddp_call *c) { return sum(c, &((const ddp_mean_attrs *)c->attrs)->dim, true); }
DDP_CUDA_KERNEL(mean, ddp__cuda_no_numbers, run_mean);

/* Values (y), positions (ids) of extremes, or both. */
static int extremes(const ddp_call *c, int64_t n_dims, const int64_t *which, bool smallest, ddp_tensor *y,
                    ddp_tensor *ids) {
    static const kernels of_extremes = {DDP_K_extreme_rows, DDP_K_extreme_columns, DDP_K_extreme_finish, 16};
    reduce_args a = {.y = y ? ddp__ptr(y) : NULL, .smallest = smallest};
    if (ids) a.ids = (int64_t *)(void *)ddp__ptr(ids);
    dims kept, gone;
    split(&c->in[0]->m, n_dims, which, ids != NULL, &kept, &gone);
    return reduce(c, &a, &of_extremes, &kept, &gone);
}

static int run_amax(const ddp_call *c) {
    const ddp_amax_attrs *a = c->attrs;
    return extremes(c, a->dim.n, a->dim.v, false, c->out[0], NULL);
}
DDP_CUDA_KERNEL(amax, ddp__cuda_no_numbers, run_amax);
static int run_amin(const ddp_call *c) {
    const ddp_amin_attrs *a = c->attrs;
    return extremes(c, a->dim.n, a->dim.v, true, c->out[0], NULL);
}
DDP_CUDA_KERNEL(amin, ddp__cuda_no_numbers, run_amin);
static int run_max_dim(const ddp_call *c) {
    return extremes(c, 1, &((const ddp_max_dim_attrs *)c->attrs)->dim, false, c->out[0], c->out[1]);
}
DDP_CUDA_KERNEL(max_dim, ddp__cuda_no_numbers, run_max_dim);
static int run_argmax(const ddp_call *c) {
    const ddp_argmax_attrs *a = c->attrs;
    return extremes(c, a->flat ? -1 : 1, &a->dim, false, NULL, c->out[0]);
}
DDP_CUDA_KERNEL(argmax, ddp__cuda_no_numbers, run_argmax);
