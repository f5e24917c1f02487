/* optim.c -- optimizer objects for C: parameters, state, and the step ops.
 *
 * Unscaling and clipping multiply every gradient by one factor before the step. The step does it as it reads them, so that no
 * pass over memory is spent on it; whether the gradients are written too depends on who may look at them. One whose handle
 * was never given out can only be read through its leaf: the leaf notes the factor, and the first who asks for the gradient
 * makes it so (ddp__grad_settle). Others are written by the step's own pass. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "tape.h"

typedef enum kind { SGD, ADAM } kind;

struct ddp_optim {
    kind kind;
    int n;
    ddp_tensor **params;   /* owned */
    ddp_tensor **state[2]; /* momentum buffer; or first and second moment; owned, NULL before the first step */
    int64_t *steps;        /* of each parameter */
    ddp_sgd_opts sgd;
    ddp_adam_opts adam;
    ddp_tensor **list; /* scratch of 4 n */
};

static ddp_optim *optim_new(kind k, ddp_tensor *const *params, int n) {
    if (ddp__pending()) return NULL;
    ddp_optim *o = calloc(1, sizeof *o);
    if (o) {
        size_t m = (size_t)n + 1;
        o->params = calloc(m, sizeof *o->params);
        o->state[0] = calloc(m, sizeof *o->params);
        o->state[1] = calloc(m, sizeof *o->params);
        o->steps = calloc(m, sizeof *o->steps);
        o->list = calloc(4 * m, sizeof *o->list);
    }
    if (!o || !o->params || !o->state[0] || !o->state[1] || !o->steps || !o->list) {
        ddp_optim_free(o);
        ddp__fail(DDP_ENOMEM, "optim: out of memory");
        return NULL;
    }
    o->kind = k;
    for (int i = 0; i < n; i++) {
        if (!params[i]) {
            ddp__fail(DDP_ENULL, "optim: parameter %d is missing", i + 1);
            ddp_optim_free(o);
            return NULL;
        }
        o->params[o->n++] = ddp_retain(params[i]);
    }
    return o;
}

int ddp_optim_sgd(ddp_tensor *const *params, int n, const ddp_sgd_opts *opts, ddp_optim **out) {
    ddp_optim *o = optim_new(SGD, params, n);
    if (!o) return ddp__pending();
    if (opts) o->sgd = *opts;
    *out = o;
    return 0;
}

int ddp_optim_adam(ddp_tensor *const *params, int n, const ddp_adam_opts *opts, ddp_optim **out) {
    ddp_optim *o = optim_new(ADAM, params, n);
    if (!o) return ddp__pending();
    if (opts) o->adam = *opts;
    ddp_adam_opts *a = &o->adam;
    if (a->lr == 0) a->lr = 1e-3;
    if (a->beta1 == 0) a->beta1 = .9;
    if (a->beta2 == 0) a->beta2 = .999;
    if (a->eps == 0) a->eps = 1e-8;
    *out = o;
    return 0;
}

static int make_state(ddp_optim *o, int k, int i, bool empty) {
    if (o->state[k][i]) return 0;
    ddp_tensor *p = o->params[i];
    if (empty) o->state[k][i] = ddp_keep(ddp_empty(1, (int64_t[]){0}, (int)p->m.dtype, p->m.device));
    else {
        o->state[k][i] = ddp_keep(ddp_clone(p, 1));
        if (o->state[k][i]) ddp_fill_(o->state[k][i], 0);
    }
    return ddp__pending();
}

/* ---- factors of gradients ---- */

/* grads[0..n) times by, in place. */
static int scale_now(int n, ddp_tensor *const *grads, double by) {
    if (n == 0 || by == 1) return 0;
    ddp_tensor *found = ddp_keep(ddp_grad_unscale_(n, grads, by));
    ddp__drop(found);
    return ddp__pending();
}

int ddp__grad_settle(ddp_tensor *leaf) {
    if (!leaf->leaf || !leaf->leaf->is_late) return 0;
    leaf->leaf->is_late = false;
    return leaf->grad ? scale_now(1, &leaf->grad, leaf->leaf->late) : 0;
}

/* May somebody read leaf.grad without asking the leaf? A handle or a view of it is out there. */
static bool in_sight(const ddp_tensor *leaf) {
    const ddp_tensor *g = leaf->grad;
    if (g->shown || g->node) return true;
    return !(leaf->leaf && leaf->leaf->bucket_slot) && (g->refs > 1 || g->storage->refs > 1);
}

static int be_late(ddp_tensor *leaf, double by) {
    ddp_leaf_info *l = ddp__leaf_info(leaf);
    if (!l) return ddp__pending();
    l->is_late = true;
    l->late = by;
    return 0;
}

/* The gradients of params, as they should be, into list; returns how many, or an error. */
static int list_grads(const ddp_optim *o, ddp_tensor **list) {
    int n = 0;
    for (int i = 0; i < o->n; i++) {
        if (!o->params[i]->grad) continue;
        int st = ddp__grad_settle(o->params[i]);
        if (st < 0) return st;
        list[n++] = o->params[i]->grad;
    }
    return n;
}

int ddp_optim_scale_grads(ddp_optim *o, double by) {
    if (ddp__pending()) return ddp__pending();
    if (!o) return ddp__fail(DDP_ENULL, "optim: none");
    int st = list_grads(o, o->list), n = 0;
    for (int i = 0; i < o->n && st >= 0; i++) {
        if (!o->params[i]->grad) continue;
        if (in_sight(o->params[i])) o->list[n++] = o->params[i]->grad;
        else st = be_late(o->params[i], by);
    }
    return st < 0 ? st : scale_now(n, o->list, by);
}

int ddp_optim_count_grads(const ddp_optim *o) {
    int n = 0;
    for (int i = 0; o && i < o->n; i++) n += o->params[i]->grad != NULL;
    return n;
}

int ddp_optim_grad_norm(ddp_optim *const *o, int n, double inv_scale, ddp_tensor **norm, ddp_tensor **found) {
    if (ddp__pending()) return ddp__pending();
    size_t room = 1;
    for (int k = 0; k < n; k++) room += (size_t)o[k]->n;
    ddp_tensor **list = calloc(room, sizeof *list);
    if (!list) return ddp__fail(DDP_ENOMEM, "optim: out of memory");
    int all = 0, st = 0;
    for (int k = 0; k < n && st >= 0; k++) all += st = list_grads(o[k], list + all);
    if (st >= 0 && all > 0) st = ddp_grad_norm(all, list, inv_scale, norm, found);
    else if (st >= 0) {
        int device = n && o[0]->n ? o[0]->params[0]->m.device : DDP_CPU;
        *norm = ddp_full(0, NULL, 0, DDP_F32, device);
        *found = ddp_full(0, NULL, 0, DDP_F32, device);
        st = ddp__pending();
    }
    free(list);
    return st;
}

/* ---- steps ---- */

/* Of parameter i. */
typedef struct step_kind {
    int64_t step;
    bool keep; /* the step writes the gradient back */
} step_kind;
static bool is_of_kind(const ddp_optim *o, int i, step_kind kind, double by) {
    const ddp_tensor *p = o->params[i];
    return p->grad && o->steps[i] == kind.step && (by != 1 && in_sight(p)) == kind.keep;
}

/* Parameters of one kind go together: all of them, but for those whose gradient was missing before. */
static int step_group(ddp_optim *o, step_kind kind, double by, bool *done) {
    int n = 0, st = 0, lists = o->kind == SGD ? 3 : 4;
    for (int pass = 0; pass < 2 && st == 0; pass++) { /* count, then lay out list behind list */
        int k = 0;
        for (int i = 0; i < o->n && st == 0; i++) {
            if (done[i] || !is_of_kind(o, i, kind, by)) continue;
            if (pass == 1) {
                st = make_state(o, 0, i, o->kind == SGD && o->sgd.momentum == 0);
                if (st == 0 && o->kind == ADAM) st = make_state(o, 1, i, false);
                o->list[k] = o->params[i];
                o->list[n + k] = o->params[i]->grad;
                o->list[2 * n + k] = o->state[0][i];
                if (lists == 4) o->list[3 * n + k] = o->state[1][i];
            }
            k++;
        }
        n = k;
    }
    if (st < 0 || n == 0) return st;
    ddp_tensor **l = o->list;
    if (o->kind == SGD)
        st = ddp_sgd_step(n, l, l + n, l + 2 * n, o->sgd.lr, o->sgd.momentum, o->sgd.dampening, o->sgd.weight_decay,
                          o->sgd.nesterov, kind.step == 0, by, kind.keep);
    else
        st = ddp_adam_step(n, l, l + n, l + 2 * n, l + 3 * n, o->adam.lr, o->adam.beta1, o->adam.beta2, o->adam.eps,
                           o->adam.weight_decay, o->adam.decoupled, kind.step + 1, by, kind.keep);
    for (int i = 0; i < o->n && st == 0; i++) {
        if (done[i] || !is_of_kind(o, i, kind, by)) continue;
        done[i] = true;
        if (by != 1 && !kind.keep) st = be_late(o->params[i], by);
    }
    return st;
}

/* A factor below the normal numbers of f32 would lose digits: gradients that big take a part of it first. */
static int part_of_small(ddp_optim *o, int n_grads, double *by) {
    if (*by == 0 || !(fabs(*by) < FLT_MIN)) return 0;
    *by *= 0x1p64;
    return scale_now(n_grads, o->list, 0x1p-64);
}

int ddp_optim_apply(ddp_optim *o) { return ddp_optim_apply_scaled(o, 1); }

int ddp_optim_apply_scaled(ddp_optim *o, double by) {
    if (ddp__pending()) return ddp__pending();
    if (!o) return ddp__fail(DDP_ENULL, "optim: none");
    bool *done = calloc((size_t)o->n + 1, sizeof *done);
    if (!done) return ddp__fail(DDP_ENOMEM, "optim: out of memory");
    ddp_phase phase = ddp__phase_enter(DDP_PHASE_OPTIMIZER);
    int mode = ddp_set_grad_mode(0), st = list_grads(o, o->list);
    if (st >= 0) st = part_of_small(o, st, &by);
    for (int i = 0; i < o->n && st == 0; i++) {
        if (done[i] || !o->params[i]->grad) continue;
        st = step_group(o, (step_kind){o->steps[i], by != 1 && in_sight(o->params[i])}, by, done);
    }
    for (int i = 0; i < o->n; i++) o->steps[i] += done[i];
    ddp_set_grad_mode(mode);
    ddp__phase_enter(phase);
    free(done);
    return st;
}

int ddp_optim_step(ddp_optim *o) {
    int st = ddp_optim_apply(o);
    if (st == 0) ddp_stats_step();
    return st;
}

int ddp_optim_zero_grad(ddp_optim *o) {
    if (ddp__pending()) return ddp__pending();
    if (!o) return ddp__fail(DDP_ENULL, "optim: none");
    for (int i = 0; i < o->n; i++) ddp_tensor_set_grad(o->params[i], NULL);
    return ddp__pending();
}

int ddp_optim_set_lr(ddp_optim *o, double lr) {
    if (ddp__pending()) return ddp__pending();
    if (!o) return ddp__fail(DDP_ENULL, "optim: none");
    o->sgd.lr = o->adam.lr = lr;
    return 0;
}

/* ---- state, for saving and loading ---- */

static bool has_state(const ddp_optim *o, int k, int i) {
    return o && i >= 0 && i < o->n && k >= 0 && k < (o->kind == SGD ? 1 : 2);
}

ddp_tensor *ddp_optim_state(const ddp_optim *o, int k, int i) {
    if (!has_state(o, k, i) || (o->kind == SGD && o->sgd.momentum == 0)) return NULL;
    return ddp_retain(o->state[k][i]);
}

int ddp_optim_set_state(ddp_optim *o, int k, int i, ddp_tensor *t) {
    if (ddp__pending()) return ddp__pending();
    if (!has_state(o, k, i)) return ddp__fail(DDP_EINVAL, "optim: no state %d of parameter %d", k, i + 1);
    if (!t) return ddp__fail(DDP_ENULL, "optim: no tensor");
    if (!ddp__meta_same_size(&t->m, &o->params[i]->m))
        return ddp__fail(DDP_ESHAPE, "optim: the state of parameter %d is %s, the parameter %s", i + 1,
                         DDP_SHAPE_TEXT(&t->m), DDP_SHAPE_TEXT(&o->params[i]->m));
    int mode = ddp_set_grad_mode(0), st = make_state(o, k, i, false);
    if (st == 0) st = ddp_copy_(o->state[k][i], t);
    ddp_set_grad_mode(mode);
    return st;
}

int64_t ddp_optim_steps(const ddp_optim *o, int i) { return o && i >= 0 && i < o->n ? o->steps[i] : 0; }

int ddp_optim_set_steps(ddp_optim *o, int i, int64_t steps) {
    if (ddp__pending()) return ddp__pending();
    if (!o || i < 0 || i >= o->n || steps < 0)
        return ddp__fail(DDP_EINVAL, "optim: %lld steps of parameter %d", (long long)steps, i + 1);
    o->steps[i] = steps;
    return 0;
}

void ddp_optim_free(ddp_optim *o) {
    if (!o) return;
    for (int i = 0; i < o->n; i++) {
        ddp__drop(o->params[i]);
        ddp__drop(o->state[0][i]);
        ddp__drop(o->state[1][i]);
    }
    free(o->params);
    free(o->state[0]);
    free(o->state[1]);
    free(o->steps);
    free(o->list);
    free(o);
}
