/* optim.c -- host side of optimizer steps and of what is done to gradients before them: tensors gathered into as few launches as
 * their pointers fit in. */
#include <math.h>
#include <string.h>

#include "cuda.h"

static bool alike(const ddp_tensor *a, const ddp_tensor *b) {
    for (int d = 0; d < a->m.ndim; d++)
        if (a->m.size[d] > 1 && a->m.stride[d] != b->m.stride[d]) return false;
    return true;
}

/* Tensor i of each of k lists of n, of one dtype at a time. What is given to a kernel's own part is at args, its list inside it. */
typedef struct lists {
    const ddp_call *c;
    int k, n;      /* k lists used; n tensors each */
    unsigned none; /* lists that are not there: their pointers stay NULL */
    ddp_dtype dtype;
    void *args;
    list_of_tensors *list;
    int kernel;                     /* of f32; f64's follows it */
    int64_t chunks;                 /* launched so far */
    int (*before)(struct lists *l); /* [OPTIONAL] each launch */
} lists;

static int flush(lists *l) {
    list_of_tensors *t = l->list;
    if (t->n == 0) return 0;
    ddp_grid g = {(unsigned)t->first[t->n], 1, 1, 256, 0};
    int st = l->before ? l->before(l) : 0;
    if (st >= 0) st = ddp__cuda_launch(l->c, l->kernel + (l->dtype == DDP_F64), l->args, g);
    l->chunks += t->first[t->n];
    t->n = 0;
    t->vector = 1;
    return st;
}

static int add(lists *l, int i) {
    list_of_tensors *t = l->list;
    const int64_t numel = l->c->in[i]->numel, chunks = (numel + LIST_CHUNK - 1) / LIST_CHUNK;
    for (int k = 0; k < l->k; k++) {
        t->p[k][t->n] = l->none >> k & 1 ? NULL : ddp__ptr(l->c->in[k * l->n + i]);
        if ((uintptr_t)t->p[k][t->n] % 16) t->vector = 0;
    }
    t->numel[t->n] = numel;
    t->first[t->n + 1] = t->first[t->n] + (int32_t)chunks;
    t->n++;
    return t->n == LIST_MAX ? flush(l) : 0;
}

/* Does tensor i of all lists lie densely and alike? */
static bool in_line(const lists *l, int i) {
    const ddp_tensor *p = l->c->in[i];
    bool fits = ddp__meta_is_dense(&p->m) && p->numel < (int64_t)1 << 40;
    for (int k = 1; k < l->k && fits; k++) fits = l->none >> k & 1 || alike(p, l->c->in[k * l->n + i]);
    return fits;
}

typedef int (*walk_fn)(lists *l, walk_args *w);

/* All tensors: those in line by lists, one dtype after the other; the rest by walks. */
static int each(lists *l, walk_fn walk) {
    int st = 0;
    l->list->vector = 1;
    for (int pass = 0; pass < 2 && st >= 0; pass++) {
        l->dtype = pass ? DDP_F64 : DDP_F32;
        for (int i = 0; i < l->n && st >= 0; i++) {
            if (l->c->in[i]->m.dtype != l->dtype || l->c->in[i]->numel == 0) continue;
            if (in_line(l, i)) {
                st = add(l, i);
                continue;
            }
            ddp_tensor *t[WALK_MAX];
            walk_args w;
            for (int k = 0; k < l->k; k++) t[k] = l->c->in[l->none >> k & 1 ? i : k * l->n + i];
            ddp__cuda_walk(&w, l->k, t);
            st = walk(l, &w);
        }
        if (st >= 0) st = flush(l);
    }
    return st;
}

static int launch_walk(const lists *l, int kernel, const void *args, const walk_args *w) {
    return ddp__cuda_launch(l->c, kernel + (l->dtype == DDP_F64), args, ddp__grid(w->n, 4));
}

/* ---- steps ---- */

static int walk_sgd(lists *l, walk_args *w) {
    sgd_walk_args a = {((sgd_args *)l->args)->by, *w};
    return launch_walk(l, DDP_K_sgd_walk_f32, &a, w);
}
static int run_sgd_step(const ddp_call *c) {
    const ddp_sgd_step_attrs *a = c->attrs;
    sgd_args s = {.by = {.lr = a->lr,
                         .momentum = a->momentum,
                         .remains = 1 - a->dampening,
                         .decay = a->weight_decay,
                         .by = a->by,
                         .nesterov = (int32_t)a->nesterov,
                         .first = (int32_t)a->first,
                         .keep = (int32_t)a->keep,
                         .has_momentum = a->momentum != 0}};
    lists l = {.c = c, .k = 3, .n = c->n_in / 3, .args = &s, .list = &s.list, .kernel = DDP_K_sgd_list_f32};
    if (a->momentum == 0) l.none = 4;
    return each(&l, walk_sgd);
}
DDP_CUDA_KERNEL(sgd_step, NULL, run_sgd_step);

static int walk_adam(lists *l, walk_args *w) {
    adam_walk_args a = {((adam_args *)l->args)->by, *w};
    return launch_walk(l, DDP_K_adam_walk_f32, &a, w);
}
static int run_adam_step(const ddp_call *c) {
    const ddp_adam_step_attrs *a = c->attrs;
    adam_args s = {.by = {.b1 = a->beta1,
                          .b2 = a->beta2,
                          .r1 = 1 - a->beta1,
                          .r2 = 1 - a->beta2,
                          .rate = a->lr / (1 - pow(a->beta1, (double)a->step)),
                          .c2 = 1 / sqrt(1 - pow(a->beta2, (double)a->step)),
                          .eps = a->eps,
                          .shrink = a->decoupled ? 1 - a->lr * a->weight_decay : 1,
                          .l2 = a->decoupled ? 0 : a->weight_decay,
                          .by = a->by,
                          .keep = (int32_t)a->keep}};
    lists l = {.c = c, .k = 4, .n = c->n_in / 4, .args = &s, .list = &s.list, .kernel = DDP_K_adam_list_f32};
    return each(&l, walk_adam);
}
DDP_CUDA_KERNEL(adam_step, NULL, run_adam_step);

/* ---- gradients ---- */

static int walk_scale(lists *l, walk_args *w) {
    gradients_walk_args a = {((gradients_args *)l->args)->by, *w};
    return launch_walk(l, DDP_K_scale_walk_f32, &a, w);
}
static int scale_all(const ddp_call *c, gradients_args *a) {
    lists l = {.c = c, .k = 1, .n = c->n_in, .args = a, .list = &a->list, .kernel = DDP_K_scale_list_f32};
    return each(&l, walk_scale);
}

static int run_grad_unscale(const ddp_call *c) {
    const ddp_gpu *g = ddp__gpu_of(c);
    float *found = (float *)(void *)ddp__ptr(c->out[0]);
    if (!g) return ddp__pending();
    int st = ddp__cuda_check(ddp__cuda.cudaMemsetAsync(found, 0, sizeof *found, g->compute), c->op->name);
    gradients_args a = {.by = {.by = ((const ddp_grad_unscale__attrs *)c->attrs)->inv_scale, .found = found}};
    return st < 0 ? st : scale_all(c, &a);
}
DDP_CUDA_KERNEL(grad_unscale_, NULL, run_grad_unscale);

enum { WALK_BLOCKS = 256 };

/* Blocks of all launches of squares, each with a place for its sum. */
static int64_t blocks_of(const ddp_call *c) {
    lists l = {.c = c, .k = 1, .n = c->n_in};
    int64_t blocks = 0;
    for (int i = 0; i < c->n_in; i++)
        if (c->in[i]->numel) blocks += !in_line(&l, i) ? WALK_BLOCKS : (c->in[i]->numel + LIST_CHUNK - 1) / LIST_CHUNK;
    return blocks;
}

/* Launches put their sums one behind the other. */
static int place_sums(lists *l) {
    gradients_args *a = l->args;
    a->by.sums += 2 * l->chunks;
    l->chunks = 0;
    return 0;
}
static int walk_squares(lists *l, walk_args *w) {
    gradients_args *own = l->args;
    place_sums(l);
    gradients_walk_args a = {own->by, *w};
    l->chunks = WALK_BLOCKS;
    return ddp__cuda_launch(l->c, DDP_K_squares_walk_f32 + (l->dtype == DDP_F64), &a, ddp__grid_rows(WALK_BLOCKS, 256));
}

/* norm = inv_scale times the 2-norm of all; two launches where LIST_MAX tensors are enough. */
static int norm_of(const ddp_call *c, double inv_scale, float *found) {
    const int64_t blocks = blocks_of(c);
    const size_t bytes = (size_t)(blocks + 1) * 2 * sizeof(double);
    double *sums = ddp__cuda_scratch_take(c, bytes);
    if (!sums) return ddp__pending();
    gradients_args a = {.by = {.sums = sums}};
    lists l = {.c = c,
               .k = 1,
               .n = c->n_in,
               .args = &a,
               .list = &a.list,
               .kernel = DDP_K_squares_list_f32,
               .before = place_sums};
    int st = each(&l, walk_squares);
    grad_norm_args n = {.sums = sums,
                        .n = blocks,
                        .norm = ddp__ptr(c->out[0]),
                        .found = found,
                        .inv_scale = inv_scale,
                        .norm_f64 = c->out[0]->m.dtype == DDP_F64};
    if (st >= 0) st = ddp__launch_norm_of_sums(c, &n, (ddp_grid){1, 1, 1, 1024, 0});
    ddp__cuda_scratch_give(c, sums, bytes);
    return st;
}

static int run_grad_norm(const ddp_call *c) {
    return norm_of(c, ((const ddp_grad_norm_attrs *)c->attrs)->inv_scale, (float *)(void *)ddp__ptr(c->out[1]));
}
DDP_CUDA_KERNEL(grad_norm, NULL, run_grad_norm);

/* The norm stays on the GPU: what scales reads it there. */
static int run_grad_clip(const ddp_call *c) {
    const double max_norm = ((const ddp_grad_clip__attrs *)c->attrs)->max_norm;
    int st = norm_of(c, 1, NULL);
    gradients_args a = {
        .by = {.norm = ddp__ptr(c->out[0]), .max_norm = max_norm, .norm_f64 = c->out[0]->m.dtype == DDP_F64}};
    return st < 0 || isinf(max_norm) ? st : scale_all(c, &a);
}
DDP_CUDA_KERNEL(grad_clip_, NULL, run_grad_clip);
