/* call.c -- the one call path: every op of every front end comes through run_call. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "op_build.h"

ddp_call_slots ddp__slots;
_Thread_local int ddp__autocast = DDP_AUTOCAST_OFF;
_Thread_local ddp_op_where ddp__op_where;

enum { SMALL = 8 }; /* inputs kept on the stack */

int ddp__ints_set(const char *op, const char *attr, ddp_ints *out, int n, const int64_t *v) {
    if (ddp__pending()) return ddp__pending();
    if (n > DDP_MAX_DIM) return ddp__fail(DDP_EINVAL, "%s: %s has %d values, at most %d", op, attr, n, DDP_MAX_DIM);
    if (n > 0 && !v) return ddp__fail(DDP_ENULL, "%s: %s is NULL", op, attr);
    out->n = n;
    for (int i = 0; i < n; i++) out->v[i] = v[i];
    return 0;
}

ddp_tensor **ddp__join_lists(int k, int n, ddp_tensor *const *const *lists) {
    if (ddp__pending()) return NULL;
    ddp_tensor **all = malloc(((size_t)k * (size_t)(n > 0 ? n : 0) + 1) * sizeof *all);
    if (!all) {
        ddp__fail(DDP_ENOMEM, "out of memory for a list of %d tensors", n);
        return NULL;
    }
    for (int i = 0; i < k; i++)
        for (int j = 0; j < n; j++) all[i * n + j] = lists[i][j];
    return all;
}

/* Numbers go with every device, and in arithmetic so do 0-dim tensors of the CPU: kernels take their value. */
static bool goes_anywhere(const ddp_op_def *op, const ddp_tensor *t) {
    if (t->is_number) return true;
    bool arithmetic = (op->flags & (DDP_OPF_PROMOTE | DDP_OPF_FLOAT)) || op->id == DDP_OP_where;
    return arithmetic && t->m.ndim == 0 && t->m.device == DDP_CPU;
}

/* The required ones are there, on one device. */
static int check_inputs(const ddp_op_def *op, int n_in, ddp_tensor *const *in) {
    int device = -1, first = 0;
    for (int i = 0; i < n_in; i++) {
        int k = op->lists ? 0 : i;
        if (!in[i]) {
            if (!op->lists && (op->optional >> k) & 1) continue;
            return ddp__op_fail_(op->name, DDP_ENULL, "%s is missing",
                                 op->lists ? "a tensor of the list" : op->in_names[k]);
        }
        if (goes_anywhere(op, in[i])) continue;
        if (device >= 0 && in[i]->m.device != device)
            return ddp__op_fail_(op->name, DDP_EDEVICE, "%s is on %s, %s on %s: move one with :to()",
                                 op->in_names[op->lists ? 0 : first], DDP_DEVICE_TEXT(device), op->in_names[k],
                                 DDP_DEVICE_TEXT(in[i]->m.device));
        if (device < 0) first = i;
        device = in[i]->m.device;
    }
    return 0;
}

/* ---- promotion --------------------------------------------------------------------------------------------------- */

/* PyTorch's rule: tensors with dims decide; then 0-dim ones, then numbers, each only where of a higher kind. */
static ddp_dtype common_dtype(int n_in, ddp_tensor *const *in) {
    int best[3] = {-1, -1, -1};
    for (int i = 0; i < n_in; i++) {
        int rank = in[i]->is_number ? 2 : in[i]->m.ndim == 0 ? 1 : 0;
        ddp_dtype d = in[i]->m.dtype;
        if (rank == 2 && d == DDP_F64) d = DDP_F32; /* a literal is no wish for doubles */
        best[rank] = best[rank] < 0 ? (int)d : (int)ddp__promote((ddp_dtype)best[rank], d);
    }
    int result = best[0];
    for (int r = 1; r < 3; r++) {
        if (best[r] < 0) continue;
        if (result < 0) result = best[r];
        else {
            int kind_a = ddp__is_float((ddp_dtype)result) ? 2 : result == DDP_BOOL ? 0 : 1;
            int kind_b = ddp__is_float((ddp_dtype)best[r]) ? 2 : best[r] == DDP_BOOL ? 0 : 1;
            if (kind_b > kind_a) result = best[r];
        }
    }
    return (ddp_dtype)result;
}

static ddp_tensor *cast_number(const ddp_tensor *x, ddp_dtype to) {
    ddp_meta m = {.dtype = to, .device = x->m.device};
    ddp_tensor *t = ddp__tensor_new(&m);
    if (!t) return NULL;
    ddp__store(to, ddp__ptr(t), 0, ddp__load(x->m.dtype, ddp__ptr(x), 0));
    t->is_number = true; /* it stays in the host's memory: a kernel of a device takes its value */
    return t;
}

/* Casts in[i] where its dtype is not `to`; owned[i] is what must be released afterwards. A number beside 16-bit floats
 * becomes f32, in which they are computed: x * 0.1 is rounded once. where only copies: there it becomes `to`. */
static int cast_inputs(const ddp_op_def *op, int n_in, ddp_tensor **in, ddp_tensor **owned, ddp_dtype to, int first) {
    ddp_dtype number = op->id == DDP_OP_where ? to : ddp__wide(to);
    for (int i = first; i < n_in; i++) {
        if (in[i]->m.dtype == (in[i]->is_number ? number : to)) continue;
        ddp_tensor *t = in[i]->is_number ? cast_number(in[i], number) : ddp_keep(ddp_cast(in[i], (int)to));
        if (!t) return ddp__pending();
        ddp__drop(owned[i]); /* of autocast */
        owned[i] = in[i] = t;
    }
    return 0;
}

static int promote(const ddp_op_def *op, int n_in, ddp_tensor **in, ddp_tensor **owned, bool in_place) {
    int first = op->id == DDP_OP_where ? 1 : 0;
    bool same = true, number = false;
    for (int i = first; i < n_in; i++) {
        same &= in[i]->m.dtype == in[first]->m.dtype;
        number |= in[i]->is_number;
    }
    ddp_dtype to = same && !number ? in[first]->m.dtype : common_dtype(n_in - first, in + first);
    if ((op->flags & DDP_OPF_FLOAT) && !ddp__is_float(to)) to = DDP_F32;
    if (in_place) {
        ddp_dtype own = in[0]->m.dtype;
        bool wider = ddp__is_float(to) && !ddp__is_float(own);
        if (wider || (own == DDP_BOOL && to != DDP_BOOL))
            return ddp__op_fail_(op->name, DDP_EDTYPE, "a result of %s does not fit in place into %s",
                                 ddp_dtype_name(to), ddp_dtype_name(own));
        return cast_inputs(op, n_in, in, owned, own, 1);
    }
    return cast_inputs(op, n_in, in, owned, to, first);
}

/* ---- outputs ------------------------------------------------------------------------------------------------------- */

static int make_outputs(ddp_call *c, const ddp_meta *meta) {
    for (int i = 0; i < c->op->n_out; i++) {
        if (c->op->flags & DDP_OPF_VIEW) {
            c->out[i] = ddp__tensor_over(c->in[0]->storage, &meta[i]);
        } else {
            c->out[i] = ddp__tensor_new(&meta[i]);
            if (c->out[i] && c->out[i]->storage->big) ddp__big_made(c->out[i], c->op->name);
        }
        if (!c->out[i]) return ddp__pending();
    }
    return 0;
}

static int compute(ddp_call *c) {
    if (c->op->flags & DDP_OPF_VIEW) return 0;
    if (c->op->flags & DDP_OPF_RANDOM) c->rng = ddp__rng_next((c->op->flags & DDP_OPF_PER_RANK) != 0);
    if ((c->op->flags & DDP_OPF_COLLECTIVE) && ddp__slots.collective) return ddp__slots.collective(c);
    const ddp_kernel *k = ddp__pick_kernel(c);
    if (!k) return ddp__pending();
    if (__builtin_expect(atomic_load_explicit(&ddp__profile_on, memory_order_relaxed), 0))
        return ddp__profile_run(k, c);
    return k->run(c);
}

static void count_writes(const ddp_call *c, bool in_place) {
    if (in_place) ddp_mark_written(c->out[0]);
    if (!(c->op->flags & DDP_OPF_WRITES)) return;
    for (int i = 0; i < c->n_in; i++)
        if (c->in[i] && c->op->rules->writes(c, i)) ddp_mark_written(c->in[i]);
}

static int check_in_place_target(const ddp_call *c, const ddp_meta *meta) {
    ddp_tensor *x = c->in[0];
    if (!ddp__meta_same_size(&meta[0], &x->m))
        return ddp__op_fail(c, DDP_ESHAPE, "a result of %s does not fit in place into %s", DDP_SHAPE_TEXT(&meta[0]),
                            DDP_SHAPE_TEXT(&x->m));
    if (meta[0].dtype != x->m.dtype)
        return ddp__op_fail(c, DDP_EDTYPE, "a result of %s does not fit in place into %s",
                            ddp_dtype_name(meta[0].dtype), ddp_dtype_name(x->m.dtype));
    for (int i = 0; i < x->m.ndim; i++)
        if (x->m.stride[i] == 0 && x->m.size[i] > 1)
            return ddp__op_fail(c, DDP_EINVAL, "in place on an expanded tensor, whose elements share memory");
    return ddp__slots.check_in_place ? ddp__slots.check_in_place(c->op, x, c->n_in, c->in) : 0;
}

/* An input that overlaps the target in memory but not element by element would be read after it was written. */
static int copy_overlapping(ddp_call *c, ddp_tensor **in, ddp_tensor **owned) {
    for (int i = 1; i < c->n_in; i++) {
        if (!in[i] || in[i]->storage != in[0]->storage) continue;
        bool same = in[i]->m.offset == in[0]->m.offset && ddp__meta_same_size(&in[i]->m, &in[0]->m) &&
                    memcmp(in[i]->m.stride, in[0]->m.stride, sizeof(int64_t) * (size_t)in[0]->m.ndim) == 0;
        if (same) continue;
        ddp_tensor *copy = ddp_keep(ddp_clone(in[i], 0));
        if (!copy) return ddp__pending();
        ddp__drop(owned[i]);
        owned[i] = in[i] = copy;
    }
    return 0;
}

/* Beside tensors of a device, 0-dim tensors of the CPU become numbers of their dtype. */
static int make_numbers(const ddp_op_def *op, int n_in, ddp_tensor **in, ddp_tensor **owned) {
    bool elsewhere = false;
    for (int i = 0; i < n_in; i++) elsewhere |= in[i] && in[i]->m.device != DDP_CPU;
    for (int i = 0; elsewhere && i < n_in; i++) {
        if (!in[i] || in[i]->is_number || !goes_anywhere(op, in[i])) continue;
        ddp_tensor *t = cast_number(in[i], in[i]->m.dtype);
        if (!t) return ddp__pending();
        ddp__drop(owned[i]);
        owned[i] = in[i] = t;
    }
    return 0;
}

/* copy_ alone takes a source of another device. */
static int bring_source(int n_in, ddp_tensor **in, ddp_tensor **owned) {
    if (n_in < 2 || !in[0] || !in[1] || in[1]->is_number || in[0]->m.device == in[1]->m.device) return 0;
    ddp_tensor *here = ddp_keep(ddp_to_device(in[1], in[0]->m.device));
    if (!here) return ddp__pending();
    owned[1] = in[1] = here;
    return 0;
}

/* in and owned are scratch of n_in entries. */
static int run_call(ddp_call *c, ddp_tensor **in, ddp_tensor **owned, bool in_place) {
    const ddp_op_def *op = c->op;
    ddp_meta meta[DDP_MAX_OUT];
    int st = op->id == DDP_OP_copy_ ? bring_source(c->n_in, in, owned) : 0;
    if (st == 0) st = check_inputs(op, c->n_in, in);
    if (st < 0) return st;
    if (ddp__autocast != DDP_AUTOCAST_OFF && (op->flags & DDP_OPF_AMP) && !in_place &&
        (st = ddp__slots.cast(op, c->n_in, in, owned)) < 0)
        return st;
    if ((op->flags & (DDP_OPF_PROMOTE | DDP_OPF_FLOAT) || op->id == DDP_OP_where) &&
        (st = promote(op, c->n_in, in, owned, in_place)) < 0)
        return st;
    if ((op->flags & (DDP_OPF_PROMOTE | DDP_OPF_FLOAT) || op->id == DDP_OP_where) &&
        (st = make_numbers(op, c->n_in, in, owned)) < 0)
        return st;
    memset(meta, 0, sizeof meta[0] * (size_t)op->n_out);
    if (in_place && !op->lists && (st = copy_overlapping(c, in, owned)) < 0) return st;
    if ((st = op->rules->infer(c, meta)) < 0) return st;
    if (in_place && !op->lists && (st = check_in_place_target(c, meta)) < 0) return st;
    if (ddp__slots.capture && (st = ddp__slots.capture(c, meta)) < 0) return st;
    if (in_place) c->out[0] = ddp_retain(in[0]);
    else if ((st = make_outputs(c, meta)) < 0) return st;
    if ((st = compute(c)) < 0) return st;
    count_writes(c, in_place);
    if (ddp__slots.check && (st = ddp__slots.check(c)) < 0) return st;
    if (!(op->flags & DDP_OPF_NO_GRAD) && ddp__slots.record) st = ddp__slots.record(c, in_place);
    return st;
}

static int call(const ddp_op_def *op, const void *attrs, int n_in, ddp_tensor *const *given, ddp_tensor **out,
                bool in_place) {
    int st = ddp__pending();
    if (st) return st;
    ddp_tensor *small[2 * SMALL];
    ddp_tensor **in = n_in <= SMALL ? small : malloc(2 * (size_t)n_in * sizeof *in);
    if (!in) return ddp__op_fail_(op->name, DDP_ENOMEM, "out of memory");
    ddp_tensor **owned = in + n_in;
    for (int i = 0; i < n_in; i++) in[i] = given[i];
    if (n_in) memset(owned, 0, (size_t)n_in * sizeof *owned);
    ddp_call c = {.op = op, .attrs = attrs, .n_in = n_in, .in = in};
    st = run_call(&c, in, owned, in_place);
    for (int i = 0; i < n_in; i++)
        if (owned[i]) ddp__drop(owned[i]);
    for (int i = 0; i < op->n_out; i++) {
        if (st < 0 || in_place) ddp__drop(c.out[i]);
        else if (!(out[i] = ddp__scope_own(c.out[i]))) st = ddp__pending();
    }
    if (in != small) free(in);
    return st;
}

int ddp__call(const ddp_op_def *op, const void *attrs, int n_in, ddp_tensor *const *in, ddp_tensor **out) {
    return call(op, attrs, n_in, in, out, false);
}

int ddp__call_in_place(const ddp_op_def *op, const void *attrs, int n_in, ddp_tensor *const *in) {
    return call(op, attrs, n_in, in, NULL, true);
}
