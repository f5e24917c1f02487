/* pool.h -- windows of pooling over channels-last images [N, C, H, W], shared by pool.c and pool_max.c. */
#ifndef DDP_CPU_POOL_H
#define DDP_CPU_POOL_H

#include "../../core/mem/mem.h"
#include "cpu.h"

CPU_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
CPU_INLINE int64_t greatest(int64_t a, int64_t b) { return a > b ? a : b; }

/* Windows that touch a row (or column) of x: lo .. hi of the rows (columns) of y; none: hi < lo. */
typedef struct cover {
    int32_t lo, hi;
} cover;

/* How windows follow from the place in y; kernel[0] == 0: adaptive. [0] rows, [1] columns. */
typedef struct grid {
    int64_t N, C, x[2], y[2]; /* sizes of x and of y */
    int64_t kernel[2], stride[2], padding[2];
    bool include;    /* padding counts in a mean's divisor */
    cover *cover[2]; /* of gradients: [x[i]] each */
    float *count[2]; /* of gradients: [y[i]] each, span.count */
} grid;

/* Rows (i = 0) or columns (1) of x that window `at` spans, and how many its mean counts. */
typedef struct span {
    int64_t lo, hi, count;
} span;
static inline span span_of(const grid *g, int i, int64_t at) {
    const int64_t X = g->x[i];
    if (!g->kernel[0]) {
        int64_t lo = at * X / g->y[i], hi = ((at + 1) * X + g->y[i] - 1) / g->y[i];
        return (span){lo, hi, hi - lo};
    }
    int64_t lo = at * g->stride[i] - g->padding[i], hi = least(lo + g->kernel[i], X + g->padding[i]);
    span s = {greatest(lo, 0), least(hi, X), hi - lo};
    if (!g->include) s.count = s.hi - s.lo;
    return s;
}

static inline grid grid_of(const ddp_meta *x, const ddp_meta *y, const int64_t *kernel, const int64_t *stride,
                           const int64_t *padding) {
    grid g = {.N = x->size[0], .C = x->size[1]};
    for (int i = 0; i < 2; i++) {
        g.x[i] = x->size[2 + i];
        g.y[i] = y->size[2 + i];
        if (!kernel) continue;
        g.kernel[i] = kernel[i];
        g.stride[i] = stride[i] ? stride[i] : kernel[i];
        g.padding[i] = padding[i];
    }
    return g;
}

/* What gradients look up: in scratch, for grid_give. A status. */
static inline size_t grid_bytes(const grid *g) {
    return (size_t)(g->x[0] + g->x[1]) * sizeof(cover) + (size_t)(g->y[0] + g->y[1]) * sizeof(float);
}
static inline int grid_take(grid *g) {
    cover *room = ddp__scratch_take(grid_bytes(g));
    if (!room) return ddp__pending();
    float *counts = (float *)(void *)(room + g->x[0] + g->x[1]);
    for (int i = 0; i < 2; room += g->x[i], counts += g->y[i++]) {
        int32_t lo = 0, hi = -1;
        g->cover[i] = room;
        g->count[i] = counts;
        for (int64_t at = 0; at < g->y[i]; at++) counts[at] = (float)span_of(g, i, at).count;
        for (int64_t at = 0; at < g->x[i]; at++) { /* both ends of a window only grow along y */
            while (lo < g->y[i] && span_of(g, i, lo).hi <= at) lo++;
            while (hi + 1 < g->y[i] && span_of(g, i, hi + 1).lo <= at) hi++;
            room[at] = (cover){lo, hi};
        }
    }
    return 0;
}
static inline void grid_give(const grid *g) { ddp__scratch_give(g->cover[0], grid_bytes(g)); }

/* Brings near the cells of x that the window below this one reads first. */
CPU_INLINE void fetch_below(const grid *g, ddp_dtype d, const void *p, int64_t image, span h, span w) {
    const int64_t rows = g->kernel[0] ? g->stride[0] : h.hi - h.lo, columns = g->kernel[0] ? g->stride[1] : w.hi - w.lo;
    for (int64_t r = 0; r < rows; r++) cpu_fetch(d, p, image + ((h.hi + r) * g->x[1] + w.lo) * g->C, columns * g->C);
}

static inline const char *pool_reject(const ddp_call *c) {
    for (int i = 0; i < c->n_in; i++)
        if (!ddp__meta_is_channels_last(&c->in[i]->m)) return "not channels-last";
    if (!ddp__meta_is_channels_last(&c->out[0]->m)) return "a result that is not channels-last";
    if (!cpu_f32_or_half(c->in[0])) return "f32, f16 and bf16 only";
    for (int i = 2; i < 4; i++)
        if (c->in[0]->m.size[i] > INT32_MAX || c->out[0]->m.size[i] > INT32_MAX) return "2^31 rows or columns";
    return c->in[0]->numel && c->out[0]->numel ? NULL : "an empty tensor";
}

#endif
