/* soft.h -- the walk of softmax and cross-entropy over rows of n numbers, f32 or widened from 16 bits. A row that fits L1 is
 * read from memory once: while its exponentials are computed the next row is read for its largest, and what is left to do
 * with the row before waits until then, so that nothing waits for a sum or a largest to come out of a register's lanes. */
#ifndef DDP_CPU_SOFT_H
#define DDP_CPU_SOFT_H

#include "vectors.h"

/* Bytes from what is read, or will be written, to what is brought near: two rows of a thousand f32. */
enum { AHEAD = 8192 };

typedef struct soft {
    ddp_dtype d;
    int64_t n;
    const void *x;
    void *y;
    float *e; /* where exponentials wait: of all rows, or of two in turn; NULL: they are not kept */
    bool in_turn;
} soft;

/* A row whose largest (NaN left out) and sum of e^(x - top) are known; NaN in the row makes sum NaN. */
typedef struct soft_row {
    int64_t row;
    float top;
    double sum;
    const float *e;
} soft_row;
/* What is left to do with a row. */
typedef void (*soft_done)(ddp_dtype d, const soft *s, const void *ctx, const soft_row *r);
/* The first row from `row` on that is wanted. */
typedef int64_t (*soft_next)(const void *ctx, int64_t row, int64_t end);

/* The largest of n elements from place i that are not NaN. */
CPU_INLINE float soft_top(ddp_dtype d, const void *x, int64_t i, int64_t n) {
    cpu_vec top[4];
    int64_t k = 0;
    for (int v = 0; v < 4; v++) top[v] = all_of(-__builtin_inff());
    for (; k + 4 * CPU_W <= n; k += 4 * CPU_W)
        for (int v = 0; v < 4; v++) top[v] = most(cpu_load(d, x, i + k + v * CPU_W), top[v]);
    for (; k + CPU_W <= n; k += CPU_W) top[0] = most(cpu_load(d, x, i + k), top[0]);
    if (k < n) top[1] = most(load_some(d, x, i + k, n - k, -__builtin_inff()), top[1]);
    return lanes_most(most(most(top[0], top[1]), most(top[2], top[3])));
}

/* The exponentials of V vectors from place i, into e where they are kept; from place j, the largest. */
CPU_INLINE void soft_span(ddp_dtype d, const void *x, int64_t i, int64_t j, float top, bool keep, float *e, int V,
                          cpu_vec *sum, cpu_vec *next, const void *y) {
    cpu_vec u[4];
    for (int v = 0; v < V; v++) u[v] = cpu_load(d, x, i + v * CPU_W) - top;
    exp_all(V, u);
    for (int v = 0; v < V; v++) {
        __builtin_prefetch(cpu_at(d, x, j + v * CPU_W) + AHEAD);
        if (y) __builtin_prefetch(cpu_at(d, y, i + v * CPU_W) + AHEAD);
        next[v] = most(cpu_load(d, x, j + v * CPU_W), next[v]);
        if (keep) cpu_store(DDP_F32, e, v * CPU_W, u[v]);
        sum[v] += u[v];
    }
}
/* Of n elements from place i the sum of e^(x - top), in f32 over blocks, in double over those; each into e where they are
 * kept. next: the largest of n from place j. */
CPU_INLINE double soft_sum(ddp_dtype d, const void *x, int64_t n, int64_t i, float top, bool keep, float *e, int64_t j,
                           float *next, const void *y) {
    enum { BLOCK = 1024 };
    cpu_vec largest[4];
    int64_t k = 0;
    double total = 0;
    for (int v = 0; v < 4; v++) largest[v] = all_of(-__builtin_inff());
    do {
        cpu_vec sum[4] = {{0}};
        int64_t end = n - k < BLOCK ? n : k + BLOCK;
        for (; k + 4 * CPU_W <= end; k += 4 * CPU_W)
            soft_span(d, x, i + k, j + k, top, keep, keep ? e + k : NULL, 4, sum, largest, y);
        for (; k + CPU_W <= end; k += CPU_W)
            soft_span(d, x, i + k, j + k, top, keep, keep ? e + k : NULL, 1, sum, largest, y);
        if (k < end) {
            cpu_vec u = exp_of(load_some(d, x, i + k, end - k, -__builtin_inff()) - top);
            if (keep) store_some(DDP_F32, e, k, end - k, u);
            sum[1] += u;
            largest[1] = most(load_some(d, x, j + k, end - k, -__builtin_inff()), largest[1]);
            k = end;
        }
        total += lanes_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
    } while (k < n);
    *next = lanes_most(most(most(largest[0], largest[1]), most(largest[2], largest[3])));
    return total;
}

/* The exponentials of m <= CPU_W elements from place k of a row: as they wait, or computed again. */
CPU_INLINE cpu_vec soft_e(ddp_dtype d, const soft *s, const soft_row *r, int64_t k, int64_t m) {
    if (r->e) return load_some(DDP_F32, r->e, k, m, 0);
    return exp_of(load_some(d, s->x, r->row * s->n + k, m, 0) - r->top);
}
CPU_INLINE int64_t soft_all(const void *ctx, int64_t row, int64_t end) {
    (void)ctx, (void)end;
    return row;
}

/* done() for each row of [lo, hi) that is wanted, in order. d: s->d, a constant where this is inlined. */
CPU_INLINE void soft_rows_of(ddp_dtype d, const soft *s, const void *y, int64_t lo, int64_t hi, soft_next wanted,
                             soft_done done, const void *ctx) {
    soft_row held = {.row = -1};
    bool turn = false;
    int64_t row = wanted(ctx, lo, hi), n = s->n;
    if (row >= hi) return;
    for (float top = soft_top(d, s->x, row * n, n), next_top; row < hi; top = next_top) {
        int64_t next = wanted(ctx, row + 1, hi), from = row * n, look = (next < hi ? next : row) * n;
        float *e = s->e ? s->e + (s->in_turn ? turn : row) * n : NULL;
        double sum = e ? soft_sum(d, s->x, n, from, top, true, e, look, &next_top, y)
                       : soft_sum(d, s->x, n, from, top, false, NULL, look, &next_top, y);
        if (held.row >= 0) done(d, s, ctx, &held);
        held = (soft_row){row, top, sum, e};
        row = next;
        turn = !turn;
    }
    done(d, s, ctx, &held);
}
CPU_INLINE void soft_rows(soft s, bool writes, int64_t lo, int64_t hi, soft_next wanted, soft_done done,
                          const void *ctx) {
    if (s.d == DDP_BF16) soft_rows_of(DDP_BF16, &s, writes ? s.y : NULL, lo, hi, wanted, done, ctx);
    else if (s.d == DDP_F16) soft_rows_of(DDP_F16, &s, writes ? s.y : NULL, lo, hi, wanted, done, ctx);
    else soft_rows_of(DDP_F32, &s, writes ? s.y : NULL, lo, hi, wanted, done, ctx);
}

#endif
