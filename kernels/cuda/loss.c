/* loss.c -- cross-entropy and its gradient: lines along the classes, and the threads that suit them. */
#include <string.h>

#include "lines.h"

/* t [N, C, ...] without its classes, as its targets are: over[k] of it. */
static void without_classes(const ddp_tensor *t, ddp_tensor *over) {
    *over = *t;
    over->m.ndim = t->m.ndim - 1;
    over->numel = t->m.size[1] ? t->numel / t->m.size[1] : 0;
    for (int d = 1; d < over->m.ndim; d++) {
        over->m.size[d] = t->m.size[d + 1];
        over->m.stride[d] = t->m.stride[d + 1];
    }
}

/* out: losses (NULL: one for all) or dlogits; g: of each line, or NULL. */
static void lines_of(loss_args *a, ddp_tensor *x, ddp_tensor *target, ddp_tensor *out, ddp_tensor *g) {
    ddp_tensor lines_x, lines_out, *t[4] = {&lines_x, target};
    int at[4] = {1, 2}, n = 2; /* which operand of the kernel each is */
    without_classes(x, &lines_x);
    a->n = x->m.size[1];
    a->step[1] = a->n == 1 ? 1 : x->m.stride[1];
    if (out) {
        at[n] = 0;
        t[n++] = out;
        if (out->m.ndim == x->m.ndim) {
            without_classes(out, &lines_out);
            t[n - 1] = &lines_out;
            a->step[0] = a->n == 1 ? 1 : out->m.stride[1];
        }
    }
    if (g) {
        at[n] = 3;
        t[n++] = g;
    }
    ddp_iter it;
    ddp__iter_init(&it, n, t);
    a->lines = it.numel;
    a->ndim = it.ndim;
    for (int d = 0; d < it.ndim; d++) {
        a->size[d] = it.size[d];
        for (int k = 0; k < n; k++) a->stride[at[k]][d] = it.stride[k][d];
    }
}

/* Runs of the logits, and where they are written of dlogits, may be read as one. */
static bool packed(const loss_args *a, bool grad, int run, size_t bytes) {
    if (a->n % run != 0) return false;
    for (int k = grad ? 0 : 1; k < 2; k++) {
        if (a->step[k] != 1 || (uintptr_t)(k ? a->x : a->out) % ((size_t)run * bytes) != 0) return false;
        for (int d = 0; d < a->ndim; d++)
            if (a->stride[k][d] % run != 0) return false;
    }
    return true;
}

static ddp_grid grid_of(loss_args *a, bool grad, ddp_dtype d, int64_t most) {
    int run = ddp__run_of(d);
    a->across = a->ndim > 0 && a->stride[1][0] < a->step[1];
    a->packed = packed(a, grad, run, ddp__dtype_bytes[d]);
    if (a->across) a->lanes = ddp__line_columns(a->lines, a->n);
    else a->lanes = ddp__line_lanes(a->n / (a->packed ? run : 1));
    int64_t blocks = ddp__ceil_div(a->lines, a->across ? a->lanes : LINE_THREADS / a->lanes);
    return (ddp_grid){(unsigned)(blocks < most ? blocks : most), 1, 1, LINE_THREADS, 0};
}

static void attributes(loss_args *a, const ddp_call *c) {
    const ddp_cross_entropy_attrs *at = c->attrs; /* the gradient has the same */
    a->ignore = at->ignore_index;
    a->smoothing = at->label_smoothing;
    a->reduction = (int32_t)at->reduction;
    a->op = c->op->id;
}

/* Room for what `parts` blocks find. */
static int take_parts(const ddp_call *c, loss_args *a, int parts) {
    a->parts = parts;
    a->part = ddp__cuda_scratch_take(c, (size_t)parts * 16);
    a->counts = (int64_t *)a->part + parts;
    return a->part ? 0 : ddp__pending();
}

static int run_cross_entropy(const ddp_call *c) {
    ddp_tensor *x = c->in[0], *target = c->in[1], *y = c->out[0];
    ddp_dtype d = x->m.dtype;
    loss_args a;
    memset(&a, 0, sizeof a);
    attributes(&a, c);
    a.out = ddp__ptr(y);
    a.x = ddp__ptr(x);
    a.target = (const int64_t *)(const void *)ddp__ptr(target);
    lines_of(&a, x, target, a.reduction == 0 ? y : NULL, NULL);
    if (y->numel == 0) return 0;
    if (!(a.fault = ddp__cuda_fault_word(c))) return ddp__pending();
    ddp_grid g = grid_of(&a, false, d, 2 * FULL_GPU);
    if (g.x <= 4) g.x = 1; /* without a second launch */
    if (a.reduction == 0 || g.x == 1) return ddp__launch_cross_entropy(c, d, &a, g);
    int st = take_parts(c, &a, (int)g.x);
    if (st < 0) return st;
    st = ddp__launch_cross_entropy(c, d, &a, g);
    if (st == 0) st = ddp__launch_cross_entropy_total(c, d, &a, (ddp_grid){1, 1, 1, LINE_THREADS, 0});
    ddp__cuda_scratch_give(c, a.part, (size_t)a.parts * 16);
    return st;
}
DDP_CUDA_KERNEL(cross_entropy, ddp__cuda_no_numbers, run_cross_entropy);

static const char *reject_grad(const ddp_call *c) {
    return c->in[1]->is_number || c->in[2]->is_number ? "a number" : NULL;
}

static int run_cross_entropy_grad(const ddp_call *c) {
    enum { COUNTED_BY_ALL = 4096 }; /* targets that every block counts for itself */
    ddp_tensor *g = c->in[0], *x = c->in[1], *target = c->in[2];
    ddp_dtype d = x->m.dtype;
    loss_args a;
    memset(&a, 0, sizeof a);
    attributes(&a, c);
    a.out = ddp__ptr(c->out[0]);
    a.x = ddp__ptr(x);
    a.target = (const int64_t *)(const void *)ddp__ptr(target);
    if (g->is_number) a.g_number = ddp__load(g->m.dtype, ddp__ptr(g), 0);
    else a.g = ddp__ptr(g);
    lines_of(&a, x, target, c->out[0], a.reduction == 0 && a.g ? g : NULL);
    if (x->numel == 0) return 0;
    if (!(a.fault = ddp__cuda_fault_word(c))) return ddp__pending();
    ddp_grid grid = grid_of(&a, true, d, 4 * FULL_GPU);
    if (a.reduction != 1 || a.lines <= COUNTED_BY_ALL) return ddp__launch_cross_entropy_grad(c, d, &a, grid);
    int st = take_parts(c, &a, LINE_THREADS);
    if (st < 0) return st;
    st = ddp__launch_count_targets(c, &a, (ddp_grid){LINE_THREADS, 1, 1, LINE_THREADS, 0});
    if (st == 0) st = ddp__launch_cross_entropy_grad(c, d, &a, grid);
    ddp__cuda_scratch_give(c, a.part, (size_t)a.parts * 16);
    return st;
}
DDP_CUDA_KERNEL(cross_entropy_grad, reject_grad, run_cross_entropy_grad);
