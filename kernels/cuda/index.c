/* index.c -- host side of picking by ids and adding back, of joining and of laying into zeros. */
#include <string.h>

#include "places.h"

static int wrapped(int64_t dim, int ndim) { return (int)(dim < 0 ? dim + ndim : dim); }

static int zeros(const ddp_call *c, const ddp_tensor *t) {
    const ddp_gpu *g = ddp__gpu_of(c);
    size_t bytes = (size_t)t->numel * ddp__dtype_bytes[t->m.dtype];
    if (!g) return ddp__pending();
    if (bytes == 0) return 0;
    return ddp__cuda_check(ddp__cuda.cudaMemsetAsync(ddp__ptr(t), 0, bytes, g->compute), c->op->name);
}

/* Units of `unit` bytes instead of elements of `bytes`: of the innermost dim and all strides of tensor 0. */
static void widen_units(places *p, int64_t unit, int64_t bytes) {
    int64_t k = unit / bytes;
    if (k == 1) return;
    p->n /= k;
    p->size[0] /= k;
    for (int d = 1; d < p->ndim; d++) p->stride[0][d] /= k;
    ddp__places_divide(p);
}

/* Bits that are set where an address or a step of tensor 0, in bytes, does not divide by as much. */
static uint64_t all_steps(const places *p, int64_t bytes) {
    uint64_t all = (uint64_t)(p->size[0] * bytes);
    for (int d = 1; d < p->ndim; d++) all |= (uint64_t)(p->stride[0][d] * bytes);
    return all;
}

/* ---- picking ---- */

/* y, row-major of size[ndim], from x: xs and is are the strides of x (0 where ids say) and of ids. */
static int take(const ddp_call *c, int ndim, const int64_t *size, const int64_t *xs, const int64_t *is, int64_t step,
                int64_t limit) {
    const ddp_tensor *x = c->in[0], *y = c->out[0];
    const int64_t bytes = ddp__dtype_bytes[x->m.dtype];
    if (y->numel == 0) return 0;
    take_args a = {.x = ddp__ptr(x),
                   .y = ddp__ptr(y),
                   .ids = (const int64_t *)(const void *)ddp__ptr(c->in[1]),
                   .limit = limit,
                   .fault = ddp__cuda_fault_word(c),
                   .op = c->op->id};
    if (!a.fault) return ddp__pending();
    ddp__places(&a.at, ndim, size, 2, (const int64_t *const[]){xs, is}, -1);
    int64_t unit = bytes;
    if (a.at.ndim && a.at.stride[0][0] == 1 && a.at.stride[1][0] == 0)
        unit = ddp__unit(all_steps(&a.at, bytes) | (uint64_t)(step * bytes) | (uintptr_t)a.x | (uintptr_t)a.y, bytes);
    widen_units(&a.at, unit, bytes);
    a.step = step * bytes / unit;
    return ddp__cuda_launch(c, DDP_K_take_1 + ddp__unit_kernel(unit), &a, ddp__grid(a.at.n, 4));
}

static int run_index_select(const ddp_call *c) {
    const ddp_meta *x = &c->in[0]->m;
    int dim = wrapped(((const ddp_index_select_attrs *)c->attrs)->dim, x->ndim);
    int64_t xs[DDP_MAX_DIM], is[DDP_MAX_DIM] = {0};
    memcpy(xs, x->stride, sizeof xs);
    xs[dim] = 0;
    is[dim] = c->in[1]->m.stride[0];
    return take(c, x->ndim, c->out[0]->m.size, xs, is, x->stride[dim], x->size[dim]);
}
DDP_CUDA_KERNEL(index_select, NULL, run_index_select);

static int run_gather(const ddp_call *c) {
    const ddp_meta *x = &c->in[0]->m;
    int dim = wrapped(((const ddp_gather_attrs *)c->attrs)->dim, x->ndim);
    int64_t xs[DDP_MAX_DIM];
    memcpy(xs, x->stride, sizeof xs);
    xs[dim] = 0;
    return take(c, x->ndim, c->out[0]->m.size, xs, c->in[1]->m.stride, x->stride[dim], x->size[dim]);
}
DDP_CUDA_KERNEL(gather, NULL, run_gather);

static int run_embedding(const ddp_call *c) {
    const ddp_meta *w = &c->in[0]->m, *ids = &c->in[1]->m;
    int64_t xs[DDP_MAX_DIM] = {0}, is[DDP_MAX_DIM] = {0};
    memcpy(is, ids->stride, sizeof is);
    xs[ids->ndim] = w->stride[1];
    is[ids->ndim] = 0;
    return take(c, ids->ndim + 1, c->out[0]->m.size, xs, is, w->stride[0], w->size[0]);
}
DDP_CUDA_KERNEL(embedding, NULL, run_embedding);

/* ---- adding back ---- */

static const char *reject_sums(const ddp_call *c) {
    if (c->in[0]->m.dtype == DDP_BOOL) return "sums of bool";
    return c->in[1]->numel < 0x7fffffff && c->out[0]->numel < 0x7fffffff ? NULL : "2^31 elements";
}

/* Scratch of a sort: pairs twice, counts. */
typedef struct sorted {
    char *memory;
    size_t bytes;
    uint32_t *keys[2], *counts;
    int64_t *values[2];
} sorted;

static int take_scratch(const ddp_call *c, sorted *s, int64_t n, int64_t tiles) {
    size_t values = ((size_t)n * sizeof(int64_t) + 255) / 256 * 256, keys = values / 2;
    s->bytes = 2 * (keys + values) + (size_t)tiles * SORT_DIGITS * sizeof(uint32_t);
    s->memory = ddp__cuda_scratch_take(c, s->bytes);
    if (!s->memory) return ddp__pending();
    for (int i = 0; i < 2; i++) {
        s->values[i] = (int64_t *)(void *)(s->memory + (size_t)i * values);
        s->keys[i] = (uint32_t *)(void *)(s->memory + 2 * values + (size_t)i * keys);
    }
    s->counts = (uint32_t *)(void *)(s->memory + 2 * (values + keys));
    return 0;
}

/* Sorts by keys below `limit`; two launches for each 8 bits of them. Which of the two halves of s they end in, or a status. a has what
 * keys are made of. */
static int sort(const ddp_call *c, sort_args *a, const sorted *s, int64_t limit) {
    const ddp_grid g = {(unsigned)((a->n + SORT_TILE - 1) / SORT_TILE), 1, 1, SORT_THREADS, 0};
    a->counts = s->counts;
    a->keys_out = s->keys[0];
    a->values_out = s->values[0];
    int st = ddp__launch_sort_keys(c, a, g), half = 0;
    for (a->shift = 0; st >= 0; half = 1 - half) {
        a->keys = s->keys[half];
        a->values = s->values[half];
        a->keys_out = s->keys[1 - half];
        a->values_out = s->values[1 - half];
        if (a->shift > 0) st = ddp__launch_sort_count(c, a, g);
        if (st >= 0) st = ddp__launch_sort_pass(c, a, g);
        a->shift += 8;
        if (a->shift >= 32 || (limit - 1) >> a->shift == 0) break;
    }
    return st < 0 ? st : 1 - half;
}

/* Whether packs of 16 bytes of columns can be read and written; then columns are made so. */
static bool pack_columns(add_rows_args *a, const sort_args *keys, int64_t bytes) {
    const int64_t V = 16 / bytes;
    places *p = &a->columns;
    bool fits = p->ndim > 0 && p->stride[0][0] == 1 && p->stride[1][0] == 1 && p->size[0] % V == 0 && a->row % V == 0 &&
                ((uintptr_t)a->g | (uintptr_t)a->dx) % 16 == 0;
    for (int d = 1; d < p->ndim; d++) fits = fits && p->stride[0][d] % V == 0 && p->stride[1][d] % V == 0;
    for (int d = 0; d < keys->at.ndim; d++) fits = fits && keys->at.stride[1][d] % V == 0;
    if (!fits) return false;
    p->n /= V;
    p->size[0] /= V;
    p->stride[0][0] = p->stride[1][0] = V;
    ddp__places_divide(p);
    return true;
}

/* dx = 0, and rows of g added at their keys: places of `keys`, below limit, times a->row. Launches: zeros, two a pass of the sort, one
 * or two for the sums. */
static int add_back(const ddp_call *c, sort_args *keys, add_rows_args *a, int64_t limit) {
    const ddp_dtype dtype = c->out[0]->m.dtype;
    const int64_t n = keys->at.n, bytes = ddp__dtype_bytes[dtype], tiles = (n + SORT_TILE - 1) / SORT_TILE;
    int st = zeros(c, c->out[0]);
    if (st < 0 || n == 0 || c->out[0]->numel == 0 || a->columns.n == 0) return st;
    keys->n = n;
    keys->ids = (const int64_t *)(const void *)ddp__ptr(c->in[1]);
    keys->op = c->op->id;
    if (!(keys->fault = ddp__cuda_fault_word(c))) return ddp__pending();
    a->g = ddp__ptr(c->in[0]);
    a->dx = ddp__ptr(c->out[0]);
    a->n = n;
    a->vector = pack_columns(a, keys, bytes);
    a->chunk = n < 1 << 16 ? 32 : 128;
    if (a->columns.n * n / a->chunk < 1 << 16) a->chunk = 8; /* few sums: more threads of shorter ones */
    a->chunks = (n + a->chunk - 1) / a->chunk;
    sorted s = {0};
    if ((st = take_scratch(c, &s, n, tiles)) < 0) return st;
    size_t wide = ddp__dtype_bytes[ddp__wide(dtype)] * (size_t)(a->vector ? 16 / bytes : 1);
    size_t partial = 2 * (size_t)(a->chunks * a->columns.n) * wide;
    a->partial = ddp__cuda_scratch_take(c, partial);
    if (!a->partial) st = ddp__pending();
    if (st >= 0) st = sort(c, keys, &s, limit);
    if (st >= 0) {
        a->keys = s.keys[st];
        a->values = s.values[st];
        st = ddp__launch_add_rows(c, dtype, a, ddp__grid(a->chunks * a->columns.n, 1));
    }
    if (st >= 0 && a->chunks > 1)
        st = ddp__launch_add_rows_rest(c, dtype, a, ddp__grid((a->chunks - 1) * a->columns.n, 1));
    ddp__cuda_scratch_give(c, a->partial, partial);
    ddp__cuda_scratch_give(c, s.memory, s.bytes);
    return st;
}

static int run_index_select_grad(const ddp_call *c) {
    const ddp_meta *g = &c->in[0]->m, *dx = &c->out[0]->m;
    int dim = wrapped(((const ddp_index_select_grad_attrs *)c->attrs)->dim, dx->ndim);
    sort_args keys = {.step = 1, .limit = dx->size[dim]};
    add_rows_args a = {.row = dx->stride[dim]};
    int64_t none = 0, size[DDP_MAX_DIM];
    ddp__places(&keys.at, 1, &g->size[dim], 3, (const int64_t *const[]){c->in[1]->m.stride, &g->stride[dim], &none},
                -1);
    memcpy(size, dx->size, sizeof size);
    size[dim] = 1;
    ddp__places(&a.columns, dx->ndim, size, 2, (const int64_t *const[]){g->stride, dx->stride}, -1);
    return add_back(c, &keys, &a, dx->size[dim]);
}
DDP_CUDA_KERNEL(index_select_grad, reject_sums, run_index_select_grad);

static int run_embedding_grad(const ddp_call *c) {
    const ddp_meta *g = &c->in[0]->m, *ids = &c->in[1]->m, *dw = &c->out[0]->m;
    sort_args keys = {.step = 1, .limit = dw->size[0]};
    add_rows_args a = {.row = dw->size[1]};
    const int64_t none[DDP_MAX_DIM] = {0}, one = 1;
    ddp__places(&keys.at, ids->ndim, ids->size, 3, (const int64_t *const[]){ids->stride, g->stride, none}, -1);
    ddp__places(&a.columns, 1, &dw->size[1], 2, (const int64_t *const[]){&g->stride[ids->ndim], &one}, -1);
    return add_back(c, &keys, &a, dw->size[0]);
}
DDP_CUDA_KERNEL(embedding_grad, reject_sums, run_embedding_grad);

/* Up to so many ids a column are compared with each other instead of being sorted. */
enum { FEW = 64 };

static int gather_few(const ddp_call *c, int dim) {
    const ddp_meta *g = &c->in[0]->m, *ids = &c->in[1]->m, *dx = &c->out[0]->m;
    add_few_args a = {.g = ddp__ptr(c->in[0]),
                      .dx = ddp__ptr(c->out[0]),
                      .ids = (const int64_t *)(const void *)ddp__ptr(c->in[1]),
                      .count = ids->size[dim],
                      .g_step = g->stride[dim],
                      .id_step = ids->stride[dim],
                      .dx_step = dx->stride[dim],
                      .limit = dx->size[dim],
                      .fault = ddp__cuda_fault_word(c),
                      .op = c->op->id};
    int st = a.fault ? zeros(c, c->out[0]) : ddp__pending();
    if (st < 0 || c->in[1]->numel == 0) return st;
    int64_t size[DDP_MAX_DIM];
    memcpy(size, ids->size, sizeof size);
    size[dim] = 1;
    ddp__places(&a.at, ids->ndim, size, 3, (const int64_t *const[]){g->stride, ids->stride, dx->stride}, -1);
    return ddp__launch_add_few(c, dx->dtype, &a, ddp__grid(a.at.n * a.count, 1));
}

static int run_gather_grad(const ddp_call *c) {
    const ddp_meta *g = &c->in[0]->m, *ids = &c->in[1]->m, *dx = &c->out[0]->m;
    int dim = wrapped(((const ddp_gather_grad_attrs *)c->attrs)->dim, dx->ndim);
    if (ids->size[dim] <= FEW) return gather_few(c, dim);
    sort_args keys = {.step = dx->stride[dim], .limit = dx->size[dim]};
    add_rows_args a = {.row = 1};
    int64_t to[DDP_MAX_DIM];
    memcpy(to, dx->stride, sizeof to);
    to[dim] = 0;
    ddp__places(&keys.at, ids->ndim, ids->size, 3, (const int64_t *const[]){ids->stride, g->stride, to}, -1);
    ddp__places(&a.columns, 0, NULL, 2, (const int64_t *const[]){to, to}, -1);
    return add_back(c, &keys, &a, c->out[0]->numel);
}
DDP_CUDA_KERNEL(gather_grad, reject_sums, run_gather_grad);

/* ---- laying into zeros ---- */

static int run_slice_grad(const ddp_call *c) {
    const ddp_slice_grad_attrs *at = c->attrs;
    const ddp_tensor *g = c->in[0];
    const ddp_meta *dx = &c->out[0]->m;
    const int64_t bytes = ddp__dtype_bytes[dx->dtype];
    int dim = wrapped(at->dim, dx->ndim);
    if (g->numel == 0 || c->out[0]->numel == 0) return zeros(c, c->out[0]);
    lay_args a = {.x = ddp__ptr(g), .y = ddp__ptr(c->out[0]), .start = at->start, .stop = at->stop, .every = at->step};
    int64_t gs[DDP_MAX_DIM];
    memcpy(gs, g->m.stride, sizeof gs);
    gs[dim] = 0;
    a.dim = ddp__places(&a.at, dx->ndim, dx->size, 1, (const int64_t *const[]){gs}, dim);
    int64_t step = g->m.size[dim] > 1 ? g->m.stride[dim] : 0, unit = bytes;
    if (a.dim > 0 && a.at.stride[0][0] == 1)
        unit = ddp__unit(all_steps(&a.at, bytes) | (uint64_t)(step * bytes) | (uintptr_t)a.x | (uintptr_t)a.y, bytes);
    widen_units(&a.at, unit, bytes);
    a.step = step * bytes / unit;
    return ddp__cuda_launch(c, DDP_K_lay_1 + ddp__unit_kernel(unit), &a, ddp__grid(a.at.n, 4));
}
static const char *reject_lay(const ddp_call *c) {
    const ddp_slice_grad_attrs *at = c->attrs;
    return at->stop < 0x7fffffff && at->step < 0x7fffffff ? NULL : "a slice to 2^31";
}
DDP_CUDA_KERNEL(slice_grad, reject_lay, run_slice_grad);

/* ---- joining ---- */

/* y as [rows][width] elements: of each input `own[i]` of a width. */
typedef struct joining {
    int64_t rows, width;
    int dim; /* of inputs: where pieces end */
} joining;

/* Elements from row to row of t, seen as [rows][the dims from dim on]; -1: it is not laid out so. */
static int64_t row_stride(const ddp_tensor *t, int dim) {
    places p;
    int64_t one = 1;
    for (int d = dim; d < t->m.ndim; d++) one *= t->m.size[d];
    ddp__places(&p, t->m.ndim - dim, t->m.size + dim, 1, (const int64_t *const[]){t->m.stride + dim}, -1);
    if (p.ndim > 1 || (p.ndim == 1 && p.stride[0][0] != 1)) return -1;
    ddp__places(&p, dim, t->m.size, 1, (const int64_t *const[]){t->m.stride}, -1);
    return p.ndim > 1 ? -1 : p.ndim ? p.stride[0][0] : one;
}

/* One that has another layout: a strided copy into its part of y. */
static int copy_part(const ddp_call *c, int i, bool stacked, int dim, int64_t at) {
    ddp_tensor part = *c->out[0];
    ddp_meta *m = &part.m;
    m->offset += at * m->stride[dim];
    part.numel = c->in[i]->numel;
    if (!stacked) {
        m->size[dim] = c->in[i]->m.size[dim];
        return ddp__cuda_copy(c, &part, c->in[i]);
    }
    m->ndim--;
    for (int k = dim; k < m->ndim; k++) {
        m->size[k] = m->size[k + 1];
        m->stride[k] = m->stride[k + 1];
    }
    return ddp__cuda_copy(c, &part, c->in[i]);
}

/* Those of a->in[0..n) at once, whose sizes are still in elements. */
static int launch_join(const ddp_call *c, join_args *a, int n, int64_t bytes) {
    uint64_t all = (uintptr_t)a->y | (uint64_t)(a->y_row * bytes);
    int64_t most = 0;
    for (int i = 0; i < n; i++)
        all |= (uintptr_t)a->in[i].x | (uint64_t)((a->in[i].x_row | a->in[i].to | a->in[i].piece) * bytes);
    const int64_t unit = ddp__unit(all, bytes), k = unit / bytes;
    a->y_row /= k;
    for (int i = 0; i < n; i++) {
        a->in[i].x_row /= k;
        a->in[i].n /= k;
        a->in[i].to /= k;
        a->in[i].piece /= k;
        if (a->in[i].n > most) most = a->in[i].n;
    }
    ddp_grid g = ddp__grid(most, 4);
    g.y = (unsigned)n;
    int st = ddp__cuda_launch(c, DDP_K_join_1 + ddp__unit_kernel(unit), a, g);
    a->y_row *= k;
    return st;
}

static int join(const ddp_call *c, int64_t given, bool stacked) {
    const ddp_meta *y = &c->out[0]->m;
    const int64_t bytes = ddp__dtype_bytes[y->dtype];
    const int dim = wrapped(given, y->ndim);
    int64_t inner = 1, at = 0;
    int n = 0, st = 0;
    for (int d = dim + 1; d < y->ndim; d++) inner *= y->size[d];
    join_args a = {.y = ddp__ptr(c->out[0]), .y_row = y->size[dim] * inner};
    for (int i = 0; i < c->n_in && st >= 0; i++) {
        const ddp_tensor *x = c->in[i];
        const int64_t own = stacked ? 1 : x->m.size[dim], row = x->numel ? row_stride(x, dim) : 0;
        if (row < 0) st = copy_part(c, i, stacked, dim, at);
        else if (x->numel) {
            a.in[n].x = ddp__ptr(x);
            a.in[n].x_row = row;
            a.in[n].n = x->numel;
            a.in[n].to = at * inner;
            a.in[n++].piece = own * inner;
        }
        at += own;
        if (n < JOIN_MAX || st < 0) continue;
        st = launch_join(c, &a, n, bytes);
        n = 0;
    }
    return st < 0 || n == 0 ? st : launch_join(c, &a, n, bytes);
}

static int run_cat(const ddp_call *c) { return join(c, ((const ddp_cat_attrs *)c->attrs)->dim, false); }
DDP_CUDA_KERNEL(cat, NULL, run_cat);
static int run_stack(const ddp_call *c) { return join(c, ((const ddp_stack_attrs *)c->attrs)->dim, true); }
DDP_CUDA_KERNEL(stack, NULL, run_stack);
