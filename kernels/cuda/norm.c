/* norm.c -- batch normalisation: how its operands lie, and the blocks that suit them. */
#include <string.h>

#include "lines.h"

/* A dense layout m as [outer, C, inner]. */
static void geometry(batch_norm_args *a, const ddp_meta *m) {
    int64_t numel = ddp__meta_numel(m);
    a->channels = m->size[1];
    a->inner = 1;
    for (int d = 0; d < m->ndim; d++)
        if (d != 1 && (m->size[1] == 1 || m->stride[d] < m->stride[1])) a->inner *= m->size[d];
    a->outer = numel ? numel / (a->channels * a->inner) : 0;
}

static channel_vector vector(const ddp_tensor *t, ddp_dtype wide) {
    if (!t) return (channel_vector){0};
    return (channel_vector){ddp__ptr(t), t->m.stride[0], t->m.dtype == wide};
}

static bool aligned(const void *p) { return (uintptr_t)p % 16 == 0; }

static void choose_runs(batch_norm_args *a, ddp_dtype d) {
    int run = ddp__run_of(d);
    a->packed = (a->inner == 1 ? a->channels : a->inner) % run == 0 && aligned(a->in[0]) && aligned(a->in[1]) &&
                aligned(a->in[2]) && aligned(a->out);
    a->run = a->packed ? run : 1;
}

/* At least `least` steps a thread, and no more than `most` shares. */
static int64_t share_of(int64_t steps, int64_t per_thread, int64_t most, int64_t least) {
    int64_t n = steps / (per_thread * least);
    n = n < most ? n : most;
    return ddp__ceil_div(steps, n > 1 ? n : 1);
}

static ddp_grid sums_grid(batch_norm_args *a) {
    int64_t steps, blocks;
    if (a->inner == 1) {
        int64_t runs = a->channels / a->run;
        a->lanes = ddp__line_columns(runs, a->outer);
        blocks = ddp__ceil_div(runs, a->lanes);
        steps = a->outer;
        a->share = share_of(steps, LINE_THREADS / a->lanes, ddp__ceil_div(FULL_GPU, blocks), 4);
    } else {
        steps = a->outer * (a->inner / a->run);
        a->lanes = ddp__line_lanes(steps);
        blocks = ddp__ceil_div(a->channels, LINE_THREADS / a->lanes);
        a->share = share_of(steps, a->lanes, ddp__ceil_div(FULL_GPU, blocks), 4);
    }
    a->splits = (int32_t)ddp__ceil_div(steps, a->share > 0 ? a->share : 1);
    return (ddp_grid){(unsigned)blocks, (unsigned)a->splits, 1, LINE_THREADS, 0};
}

static ddp_grid apply_grid(batch_norm_args *a) {
    int64_t blocks, most = 4 * FULL_GPU;
    if (a->inner == 1) {
        int64_t runs = a->channels / a->run;
        a->lanes = ddp__line_columns(runs, a->outer);
        blocks = ddp__ceil_div(runs, a->lanes);
        a->share = share_of(a->outer, LINE_THREADS / a->lanes, ddp__ceil_div(most, blocks), 2);
        return (ddp_grid){(unsigned)blocks, (unsigned)ddp__ceil_div(a->outer, a->share), 1, LINE_THREADS, 0};
    }
    a->lanes = ddp__line_lanes(a->inner / a->run);
    blocks = ddp__ceil_div(a->outer * a->channels, LINE_THREADS / a->lanes);
    return (ddp_grid){(unsigned)(blocks < most ? blocks : most), 1, 1, LINE_THREADS, 0};
}

static ddp_grid finish_grid(const batch_norm_args *a) { return ddp__grid(a->channels * 32, 1); }

/* sums, then finish. a->part is given back; what is queued has it still. */
static int sums(const ddp_call *c, batch_norm_args *a, ddp_dtype d, int kernel, int finish) {
    ddp_grid g = sums_grid(a);
    size_t bytes = (size_t)a->channels * (size_t)(a->splits > 0 ? a->splits : 1) * 2 * sizeof(double);
    if (!(a->part = ddp__cuda_scratch_take(c, bytes))) return ddp__pending();
    int st = ddp__cuda_launch(c, kernel + (int)d, a, g);
    if (st == 0) st = ddp__cuda_launch(c, finish + (int)d, a, finish_grid(a));
    ddp__cuda_scratch_give(c, a->part, bytes);
    return st;
}

/* ---- forward ---- */

static int forward(const ddp_call *c, batch_norm_args *a, ddp_dtype d) {
    const ddp_batch_norm_attrs *at = c->attrs;
    ddp_dtype wide = ddp__wide(d);
    a->momentum = at->momentum;
    a->eps = at->eps;
    a->weight = vector(c->in[1], wide);
    a->bias = vector(c->in[2], wide);
    a->mean_out = ddp__ptr(c->out[1]);
    a->rstd_out = ddp__ptr(c->out[2]);
    a->relu = c->op->id == DDP_OP_batch_norm_act;
    a->running = !at->training && c->in[3];
    if (a->running) {
        a->mean = vector(c->in[3], wide);
        a->rstd = vector(c->in[4], wide);
    } else {
        a->mean = vector(c->out[1], wide);
        a->rstd = vector(c->out[2], wide);
        if (at->training && c->in[3]) {
            a->running_mean = ddp__ptr(c->in[3]);
            a->running_var = ddp__ptr(c->in[4]);
            a->running_mean_step = c->in[3]->m.stride[0];
            a->running_var_step = c->in[4]->m.stride[0];
        }
        const void *residual = a->in[1];
        a->in[1] = NULL;
        int st = sums(c, a, d, DDP_K_norm_sums, DDP_K_norm_finish);
        a->in[1] = residual;
        if (st < 0) return st;
    }
    return a->outer ? ddp__launch_norm_apply(c, d, a, apply_grid(a)) : 0;
}

static int run_batch_norm(const ddp_call *c) {
    const ddp_meta *y = &c->out[0]->m;
    ddp_laid x = {0}, residual = {0};
    batch_norm_args a;
    memset(&a, 0, sizeof a);
    geometry(&a, y);
    if (a.channels == 0) return 0;
    int st = ddp__cuda_lay(c, c->in[0], y, &x);
    if (st == 0 && c->n_in > 5) st = ddp__cuda_lay(c, c->in[5], y, &residual);
    if (st == 0) {
        a.in[0] = x.p;
        a.in[1] = residual.p;
        a.out = ddp__ptr(c->out[0]);
        choose_runs(&a, y->dtype);
        st = forward(c, &a, y->dtype);
    }
    ddp__cuda_unlay(c, &x);
    ddp__cuda_unlay(c, &residual);
    return st;
}
DDP_CUDA_KERNEL(batch_norm, ddp__cuda_no_numbers, run_batch_norm);
DDP_CUDA_KERNEL(batch_norm_act, ddp__cuda_no_numbers, run_batch_norm);

/* ---- backward ---- */

static int backward(const ddp_call *c, batch_norm_args *a, ddp_dtype d) {
    ddp_dtype wide = ddp__wide(d);
    size_t bytes = 3 * (size_t)a->channels * ddp__dtype_bytes[wide];
    a->training = ((const ddp_batch_norm_grad_attrs *)c->attrs)->training;
    a->weight = vector(c->in[2], wide);
    a->mean = vector(c->in[3], wide);
    a->rstd = vector(c->in[4], wide);
    a->dweight = ddp__ptr(c->out[1]);
    a->dbias = ddp__ptr(c->out[2]);
    a->sums_wide = c->out[1]->m.dtype == wide;
    if (c->op->id == DDP_OP_batch_norm_act_grad) {
        a->relu = 1;
        a->bias = vector(c->in[5], wide);
    }
    if (!(a->by = ddp__cuda_scratch_take(c, bytes))) return ddp__pending();
    void *masked = a->out;
    int st = sums(c, a, d, DDP_K_norm_grad_sums, DDP_K_norm_grad_finish);
    if (masked) { /* relu's mask is in it */
        a->in[0] = masked;
        a->in[2] = NULL;
    }
    a->out = ddp__ptr(c->out[0]);
    if (st == 0 && a->outer) st = ddp__launch_norm_grad_apply(c, d, a, apply_grid(a));
    ddp__cuda_scratch_give(c, a->by, bytes);
    return st;
}

static int run_batch_norm_grad(const ddp_call *c) {
    bool after_residual = c->op->id == DDP_OP_batch_norm_add_act_grad;
    const ddp_meta *dx = &c->out[0]->m;
    ddp_laid g = {0}, x = {0}, y = {0};
    batch_norm_args a;
    memset(&a, 0, sizeof a);
    geometry(&a, dx);
    if (a.channels == 0) return 0;
    int st = ddp__cuda_lay(c, c->in[0], dx, &g);
    if (st == 0) st = ddp__cuda_lay(c, c->in[1], dx, &x);
    if (st == 0 && after_residual) st = ddp__cuda_lay(c, c->in[5], dx, &y);
    if (st == 0) {
        a.in[0] = g.p;
        a.in[1] = x.p;
        a.in[2] = y.p;
        choose_runs(&a, dx->dtype); /* outputs are new: aligned */
        a.out = after_residual ? ddp__ptr(c->out[3]) : NULL;
        st = backward(c, &a, dx->dtype);
    }
    ddp__cuda_unlay(c, &g);
    ddp__cuda_unlay(c, &x);
    ddp__cuda_unlay(c, &y);
    return st;
}
DDP_CUDA_KERNEL(batch_norm_grad, ddp__cuda_no_numbers, run_batch_norm_grad);
DDP_CUDA_KERNEL(batch_norm_act_grad, ddp__cuda_no_numbers, run_batch_norm_grad);
DDP_CUDA_KERNEL(batch_norm_add_act_grad, ddp__cuda_no_numbers, run_batch_norm_grad);
