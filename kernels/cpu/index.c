/* index.c -- slices by number along a dim (rows of an embedding: dim 0), and their gradients added up. Rows lie anywhere, so
 * those of the next numbers are brought near. */
#include <string.h>

#include "../../core/mem/mem.h"
#include "cpu.h"

enum { AHEAD = 6, COLUMNS = 64, FETCH = 256 };

/* x as [outer, rows, E], what is picked as [outer, n, E], both row-major. */
typedef struct picking {
    const int64_t *ids; /* [n] */
    int64_t outer, n, rows, E;
    ddp_dtype d;
    const char *from;
    char *to;
    float *sums; /* of gradients: [outer, rows, E], where `to` is, or in scratch */
} picking;

static picking of_dim(const ddp_call *c, const ddp_meta *x, int dim) {
    picking p = {(const int64_t *)(const void *)ddp__ptr(c->in[1]),
                 1,
                 c->in[1]->numel,
                 x->size[dim],
                 1,
                 x->dtype,
                 ddp__ptr(c->in[0]),
                 ddp__ptr(c->out[0]),
                 NULL};
    for (int d = 0; d < dim; d++) p.outer *= x->size[d];
    for (int d = dim + 1; d < x->ndim; d++) p.E *= x->size[d];
    return p;
}

static const char *reject(const ddp_call *c) {
    return ddp__meta_is_rowmajor(&c->in[0]->m) && ddp__meta_is_rowmajor(&c->in[1]->m) ? NULL : "not row-major";
}

/* ---- picked ---- */

/* Picked rows [lo, hi) of all outer * n. */
static void take_rows(const void *ctx, int64_t lo, int64_t hi) {
    const picking p = *(const picking *)ctx;
    const int64_t bytes = p.E * ddp__dtype_bytes[p.d];
    for (int64_t u = lo; u < hi; u++) {
        const int64_t o = u / p.n, i = u % p.n;
        const char *slices = p.from + o * p.rows * bytes;
        if (i + AHEAD < p.n)
            for (int64_t k = 0; k < bytes && k < 4 * FETCH; k += 64)
                __builtin_prefetch(slices + p.ids[i + AHEAD] * bytes + k);
        memcpy(p.to + u * bytes, slices + p.ids[i] * bytes, (size_t)bytes);
    }
}

/* Single elements, T the type of their bits. */
#define TAKE(T)                                                          \
    static void take_##T(const void *ctx, int64_t lo, int64_t hi) {      \
        const picking *p = ctx;                                          \
        const T *from = (const T *)(const void *)p->from + lo * p->rows; \
        T *to = (T *)(void *)p->to + lo * p->n;                          \
        for (int64_t o = lo; o < hi; o++, from += p->rows, to += p->n)   \
            for (int64_t i = 0; i < p->n; i++) to[i] = from[p->ids[i]];  \
    }
TAKE(uint8_t)
TAKE(uint16_t)
TAKE(uint32_t)
TAKE(uint64_t)

static int take(const picking *p) {
    const int bytes = ddp__dtype_bytes[p->d];
    const int64_t all = p->outer * p->n;
    if (p->E == 1 && p->outer > 1)
        cpu_share(p->outer, all,
                  bytes == 4   ? take_uint32_t
                  : bytes == 8 ? take_uint64_t
                  : bytes == 2 ? take_uint16_t
                               : take_uint8_t,
                  p);
    else if (all * p->E > 0) cpu_share(all, all * p->E, take_rows, p);
    return 0;
}

static int run_embedding(const ddp_call *c) {
    picking p = of_dim(c, &c->in[0]->m, 0);
    return take(&p);
}
CPU_KERNEL(embedding, reject, run_embedding);

static int run_index_select(const ddp_call *c) {
    const int64_t dim = ((const ddp_index_select_attrs *)c->attrs)->dim;
    picking p = of_dim(c, &c->in[0]->m, (int)(dim < 0 ? dim + c->in[0]->m.ndim : dim));
    return take(&p);
}
CPU_KERNEL(index_select, reject, run_index_select);

/* ---- added up: in the order of the numbers, whatever the threads ---- */

static const char *reject_grad(const ddp_call *c) {
    return cpu_f32_or_half(c->in[0]) ? reject(c) : "f32, f16 and bf16 only";
}

/* to[0..m) += g[i..i+m). */
CPU_INLINE void add_row(ddp_dtype d, float *to, const void *g, int64_t i, int64_t m) {
    int64_t k = 0;
    for (; k + CPU_W <= m; k += CPU_W) cpu_store(DDP_F32, to, k, cpu_load(DDP_F32, to, k) + cpu_load(d, g, i + k));
    for (; k < m; k++) to[k] += cpu_get(d, g, i + k);
}
CPU_INLINE void add_rows(const picking *p, ddp_dtype d, int64_t o, int64_t first, int64_t m) {
    float *sums = p->sums + o * p->rows * p->E + first;
    for (int64_t v = 0; v < p->rows; v++) memset(sums + v * p->E, 0, (size_t)m * sizeof *sums);
    for (int64_t i = 0; i < p->n; i++) {
        if (i + AHEAD < p->n) cpu_fetch(DDP_F32, sums, p->ids[i + AHEAD] * p->E, m < FETCH ? m : FETCH);
        add_row(d, sums + p->ids[i] * p->E, p->from, (o * p->n + i) * p->E + first, m);
    }
    if (d == DDP_F32) return;
    for (int64_t v = 0; v < p->rows; v++) {
        const int64_t at = v * p->E;
        cpu_narrow(d, sums + at, p->to, o * p->rows * p->E + first + at, m);
    }
}

/* Pieces [lo, hi) of COLUMNS columns of all slices; those of one slice in one go. */
static void add_pieces(const void *ctx, int64_t lo, int64_t hi) {
    const picking p = *(const picking *)ctx;
    const int64_t pieces = (p.E + COLUMNS - 1) / COLUMNS;
    for (int64_t u = lo, n; u < hi; u += n) {
        const int64_t at = u % pieces, first = at * COLUMNS;
        n = hi - u < pieces - at ? hi - u : pieces - at;
        const int64_t m = (at + n) * COLUMNS < p.E ? n * COLUMNS : p.E - first;
        if (p.d == DDP_BF16) add_rows(&p, DDP_BF16, u / pieces, first, m);
        else if (p.d == DDP_F16) add_rows(&p, DDP_F16, u / pieces, first, m);
        else add_rows(&p, DDP_F32, u / pieces, first, m);
    }
}

/* 16-bit gradients are added up in f32 and rounded once. */
static int add_up(picking *p, int64_t numel) {
    const size_t bytes = (size_t)numel * sizeof(float);
    const bool half = ddp__is_half(p->d);
    if (numel == 0) return 0;
    p->sums = half ? ddp__scratch_take(bytes) : (float *)(void *)p->to;
    if (!p->sums) return ddp__pending();
    cpu_share(p->outer * ((p->E + COLUMNS - 1) / COLUMNS), numel + p->outer * p->n * p->E, add_pieces, p);
    if (half) ddp__scratch_give(p->sums, bytes);
    return 0;
}

static int run_embedding_grad(const ddp_call *c) {
    picking p = of_dim(c, &c->out[0]->m, 0);
    return add_up(&p, c->out[0]->numel);
}
CPU_KERNEL(embedding_grad, reject_grad, run_embedding_grad);

static int run_index_select_grad(const ddp_call *c) {
    const int64_t dim = ((const ddp_index_select_grad_attrs *)c->attrs)->dim;
    picking p = of_dim(c, &c->out[0]->m, (int)(dim < 0 ? dim + c->out[0]->m.ndim : dim));
    return add_up(&p, c->out[0]->numel);
}
CPU_KERNEL(index_select_grad, reject_grad, run_index_select_grad);
