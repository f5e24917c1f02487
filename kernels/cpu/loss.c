/* loss.c -- cross-entropy of f32, f16 or bf16 logits whose classes lie together: [N, C], or [N, C, H, W] channels-last as
 * N*H*W rows of C. */
#include <math.h>
#include <string.h>

#include "../../core/mem/mem.h"
#include "soft.h"

static const char *reject(const ddp_call *c) {
    const ddp_tensor *x = c->in[c->n_in - 2], *target = c->in[c->n_in - 1];
    if (!cpu_f32_or_half(x) || !cpu_f32_or_half(c->in[0])) return "f32, f16 and bf16 only";
    if ((x->m.ndim != 2 && x->m.ndim != 4) || !cpu_rows_of_channels(x)) return "classes that lie apart";
    if (!ddp__meta_is_rowmajor(&target->m)) return "a strided target";
    if (c->n_in == 3 && (!ddp__meta_is_rowmajor(&c->in[0]->m) || !cpu_rows_of_channels(c->out[0])))
        return "a strided g";
    return NULL;
}

static const int64_t *labels_of(const ddp_tensor *t) { return (const int64_t *)(const void *)ddp__ptr(t); }

static int64_t count_kept(const int64_t *label, int64_t n, int64_t ignore) {
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++) kept += label[i] != ignore;
    return kept;
}

/* A fixed number of rows at a time, so that the total does not depend on the threads. */
enum { ROWS = 64, CHUNK = 4096 };

/* Rows of one label each. */
typedef struct labelled {
    const int64_t *label;
    int64_t ignore;
    double smoothing, *total; /* total: what the losses are added to */
    const void *g;            /* of the gradient: of one row where g_step is 1, else of all */
    ddp_dtype g_dtype;
    int64_t g_step;
    double scale; /* of g */
} labelled;

CPU_INLINE int64_t next_kept(const void *ctx, int64_t row, int64_t end) {
    const labelled *l = ctx;
    while (row < end && l->label[row] == l->ignore) row++;
    return row;
}

/* A row's loss goes into the total, and into y where that is given. */
CPU_INLINE void add_loss(ddp_dtype d, const soft *s, const void *ctx, const soft_row *r) {
    const labelled *l = ctx;
    int64_t C = s->n, at = r->row * C;
    double lse = (double)r->top + log(r->sum), part = l->smoothing;
    double all = part > 0 ? (double)C * lse - cpu_row_sum(d, s->x, at, 1, C) : 0;
    double loss = (1 - part) * (lse - cpu_get(d, s->x, at + l->label[r->row]));
    if (part > 0) loss += part * all / (double)C;
    if (s->y) cpu_put(d, s->y, r->row, (float)loss);
    *l->total += loss;
}

/* Groups [lo, hi) of ROWS rows; their sums go into part. */
typedef struct losses {
    const ddp_call *c;
    void *y;
    double *part;
} losses;

static void group_losses(const void *ctx, int64_t lo, int64_t hi) {
    const losses *l = ctx;
    const ddp_tensor *x = l->c->in[0];
    const ddp_cross_entropy_attrs *a = l->c->attrs;
    labelled rows = {.label = labels_of(l->c->in[1]), .ignore = a->ignore_index, .smoothing = a->label_smoothing};
    soft s = {.d = x->m.dtype, .n = x->m.size[1], .x = ddp__ptr(x), .y = l->y};
    int64_t N = l->c->in[1]->numel;
    for (int64_t g = lo; g < hi; g++) {
        int64_t end = (g + 1) * ROWS < N ? (g + 1) * ROWS : N;
        for (int64_t i = g * ROWS; l->y && i < end; i++)
            if (rows.label[i] == rows.ignore) cpu_put(s.d, l->y, i, 0);
        rows.total = &l->part[g];
        l->part[g] = 0;
        soft_rows(s, false, g * ROWS, end, next_kept, add_loss, &rows);
    }
}

static int run_cross_entropy(const ddp_call *c) {
    const ddp_cross_entropy_attrs *a = c->attrs;
    int64_t N = c->in[1]->numel, groups = (N + ROWS - 1) / ROWS;
    char *y = ddp__ptr(c->out[0]);
    double few[64], total = 0;
    size_t bytes = (size_t)groups * sizeof(double);
    losses l = {c, a->reduction == 0 ? y : NULL, groups <= 64 ? few : ddp__scratch_take(bytes)};
    if (!l.part) return ddp__pending();
    if (groups) cpu_share(groups, c->in[0]->numel, group_losses, &l);
    for (int64_t g = 0; g < groups; g++) total += l.part[g];
    if (l.part != few) ddp__scratch_give(l.part, bytes);
    if (a->reduction == 1) total /= (double)count_kept(labels_of(c->in[1]), N, a->ignore_index);
    if (a->reduction != 0) cpu_put(c->in[0]->m.dtype, y, 0, (float)total);
    return 0;
}
CPU_KERNEL(cross_entropy, reject, run_cross_entropy);

/* m <= CPU_W classes from place k of a row: f (share - spread). */
CPU_INLINE void put_slope(ddp_dtype d, const soft *s, const soft_row *r, int64_t k, int64_t m, float share,
                          float spread, float f) {
    cpu_vec v = mul_add(soft_e(d, s, r, k, m), all_of(share), all_of(-spread)) * f;
    store_some(d, s->y, r->row * s->n + k, m, v);
}
CPU_INLINE void put_slopes(ddp_dtype d, const soft *s, const void *ctx, const soft_row *r) {
    const labelled *l = ctx;
    const int64_t C = s->n, own = l->label[r->row];
    const float part = (float)l->smoothing, spread = part / (float)C, share = (float)(1 / r->sum);
    const float f = (float)(l->scale * cpu_get(l->g_dtype, l->g, r->row * l->g_step));
    const float e = r->e ? r->e[own] : exp_of(all_of(cpu_get(d, s->x, r->row * C + own) - r->top))[0];
    int64_t k = 0;
    for (; k + CPU_W <= C; k += CPU_W) put_slope(d, s, r, k, CPU_W, share, spread, f);
    if (k < C) put_slope(d, s, r, k, C - k, share, spread, f);
    cpu_put(d, s->y, r->row * C + own, f * (e * share - spread - (1 - part)));
}

static void grad_rows(const void *ctx, int64_t lo, int64_t hi) {
    const ddp_call *c = ctx;
    const ddp_cross_entropy_grad_attrs *a = c->attrs;
    const ddp_tensor *g = c->in[0], *x = c->in[1];
    labelled rows = {.label = labels_of(c->in[2]), .ignore = a->ignore_index, .smoothing = a->label_smoothing};
    soft s = {.d = x->m.dtype, .n = x->m.size[1], .x = ddp__ptr(x), .y = ddp__ptr(c->out[0])};
    float buffer[2 * CHUNK]; /* as in softmax.c */
    rows.g = ddp__ptr(g);
    rows.g_dtype = g->m.dtype;
    rows.g_step = a->reduction == 0;
    rows.scale = a->reduction == 1 ? 1 / (double)count_kept(rows.label, c->in[2]->numel, rows.ignore) : 1;
    if (s.d == DDP_F32) s.e = s.y;
    else if (s.n <= CHUNK) s.e = buffer;
    s.in_turn = s.d != DDP_F32;
    for (int64_t i = lo; i < hi; i++)
        if (rows.label[i] == rows.ignore) memset(cpu_at(s.d, s.y, i * s.n), 0, (size_t)s.n * ddp__dtype_bytes[s.d]);
    soft_rows(s, true, lo, hi, next_kept, put_slopes, &rows);
}

static int run_cross_entropy_grad(const ddp_call *c) {
    if (c->in[1]->numel) cpu_share(c->in[2]->numel, c->in[1]->numel, grad_rows, c);
    return 0;
}
CPU_KERNEL(cross_entropy_grad, reject, run_cross_entropy_grad);
