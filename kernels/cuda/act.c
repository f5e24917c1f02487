/* act.c -- host side of linear_act's gradient: rows cut into parts, so that there are blocks enough. */
#include "cuda.h"

enum {
    ACROSS = 32,
    DOWN = 8,
    ENOUGH = 1024,
    MOST = 256
}; /* blocks that fill a GPU; parts, whose sums one thread adds up */

/* *rows: t row-major, which is itself, or a copy in scratch, *owned of *bytes. A status. */
static int rows_of(const ddp_call *c, const ddp_tensor *t, const void **rows, void **owned, size_t *bytes) {
    *rows = ddp__ptr(t);
    if (ddp__meta_is_rowmajor(&t->m)) return 0;
    *bytes = (size_t)t->numel * ddp__dtype_bytes[t->m.dtype];
    if (!(*rows = *owned = ddp__cuda_scratch_take(c, *bytes))) return ddp__pending();
    ddp_storage s = {.device = t->m.device, .bytes = *bytes, .data = *owned};
    ddp_tensor copy = {.m = t->m, .numel = t->numel, .storage = &s};
    ddp__meta_rowmajor(&copy.m); /* from the start of its storage */
    return ddp__cuda_copy(c, &copy, t);
}

/* Parts and sums are in a already. */
static int launch(const ddp_call *c, act_grad_args *a, int64_t packs) {
    const ddp_dtype d = c->out[0]->m.dtype;
    ddp_grid g = {(unsigned)((packs + ACROSS - 1) / ACROSS), (unsigned)a->parts, 1, ACROSS * DOWN, 0};
    int st = ddp__launch_act_grad(c, d, a, g);
    return st < 0 || a->parts == 1 ? st : ddp__launch_act_grad_sums(c, d, a, ddp__grid(a->columns, 1));
}

static int with_sums(const ddp_call *c, act_grad_args *a) {
    const ddp_dtype d = c->out[0]->m.dtype;
    const int V = 16 / ddp__dtype_bytes[d];
    a->vector = a->columns % V == 0 &&
                ((uintptr_t)a->g | (uintptr_t)a->from | (uintptr_t)a->dz | (uintptr_t)a->dbias) % 16 == 0;
    const int64_t packs = a->columns / (a->vector ? V : 1), across = (packs + ACROSS - 1) / ACROSS;
    const int64_t rows = (a->rows + DOWN - 1) / DOWN; /* of a block's 8 strips */
    a->parts = ENOUGH / across < 1 ? 1 : ENOUGH / across;
    if (a->parts > MOST) a->parts = MOST;
    if (a->parts > rows / 4) a->parts = rows / 4 ? rows / 4 : 1;
    a->part = (a->rows + a->parts - 1) / a->parts;
    a->parts = a->rows ? (a->rows + a->part - 1) / a->part : 1;
    if (a->parts == 1) return launch(c, a, packs);
    const size_t bytes = (size_t)(a->parts * a->columns) * ddp__dtype_bytes[ddp__wide(d)];
    if (!(a->sums = ddp__cuda_scratch_take(c, bytes))) return ddp__pending();
    int st = launch(c, a, packs);
    ddp__cuda_scratch_give(c, a->sums, bytes);
    return st;
}

static int run_linear_act_grad(const ddp_call *c) {
    void *owned[2] = {NULL, NULL};
    size_t bytes[2] = {0, 0};
    act_grad_args a = {.dz = ddp__ptr(c->out[0]),
                       .dbias = ddp__ptr(c->out[1]),
                       .columns = c->out[1]->numel,
                       .act = (int32_t)((const ddp_linear_act_grad_attrs *)c->attrs)->act};
    if (a.columns == 0) return 0;
    a.rows = c->out[0]->numel / a.columns;
    int st = rows_of(c, c->in[0], &a.g, &owned[0], &bytes[0]);
    if (st >= 0) st = rows_of(c, c->in[1], &a.from, &owned[1], &bytes[1]);
    if (st >= 0) st = with_sums(c, &a);
    for (int i = 0; i < 2; i++)
        if (owned[i]) ddp__cuda_scratch_give(c, owned[i], bytes[i]);
    return st;
}
DDP_CUDA_KERNEL(linear_act_grad, NULL, run_linear_act_grad);
