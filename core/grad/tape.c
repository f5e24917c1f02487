/* tape.c -- recording: nodes, edges, saved tensors, and the rules of writing in place inside a graph. */
#include "tape.h"

#include <stdlib.h>
#include <string.h>

_Thread_local bool ddp__grad_on = true;
static atomic_uint_fast64_t next_seq = 1;
ddp_grad_slots ddp__grad_slots;

int ddp_set_grad_mode(int on) {
    int before = ddp__grad_on;
    ddp__grad_on = on != 0;
    return before;
}

int ddp_grad_mode(void) { return ddp__grad_on; }

/* ---- nodes ------------------------------------------------------------------------------------------------------ */

static ddp_node *node_new(ddp_node_kind kind, int n_in, int n_out, size_t attr_size) {
    /* One block: node, edges, metas, saved, versions, attributes. */
    size_t n = (size_t)n_in + (size_t)n_out;
    size_t bytes = sizeof(ddp_node) + (size_t)n_in * sizeof(ddp_edge) +
                   n * (sizeof(ddp_meta) + sizeof(ddp_tensor *) + sizeof(uint64_t)) + attr_size;
    ddp_node *node = malloc(bytes);
    if (!node) {
        ddp__fail(DDP_ENOMEM, "tape: out of memory");
        return NULL;
    }
    memset(node, 0, sizeof *node);
    node->refs = 1;
    node->kind = kind;
    node->seq = atomic_fetch_add_explicit(&next_seq, 1, memory_order_relaxed);
    node->n_in = n_in;
    node->n_out = n_out;
    node->module = ddp__op_where.module;
    node->edges = (ddp_edge *)(node + 1);
    node->meta = (ddp_meta *)(node->edges + n_in);
    node->saved = (ddp_tensor **)(node->meta + n);
    node->version = (uint64_t *)(node->saved + n);
    node->attrs = node->version + n;
    memset(node->edges, 0, (size_t)n_in * sizeof *node->edges);
    memset(node->saved, 0, n * sizeof *node->saved);
    return node;
}

void ddp__node_free_saved(ddp_node *n) {
    for (int i = 0; i < n->n_in + n->n_out; i++) {
        ddp__drop(n->saved[i]);
        n->saved[i] = NULL;
    }
    n->freed = true;
}

/* Long chains are taken apart in a loop: a release that recursed along them would eat the stack. */
void ddp__node_release(ddp_node *n) {
    static _Thread_local ddp_node **pending;
    static _Thread_local int n_pending, room;
    static _Thread_local bool busy;
    if (!n || atomic_fetch_sub_explicit(&n->refs, 1, memory_order_acq_rel) != 1) return;
    if (n_pending == room) {
        int more = room ? 2 * room : 64;
        ddp_node **p = realloc(pending, (size_t)more * sizeof *p);
        if (!p) return; /* leaks one graph when memory is gone, rather than crash */
        pending = p;
        room = more;
    }
    pending[n_pending++] = n;
    if (busy) return;
    busy = true;
    while (n_pending > 0) {
        ddp_node *m = pending[--n_pending];
        ddp__node_free_saved(m);
        for (int i = 0; i < m->n_in; i++) {
            ddp__node_release(m->edges[i].node);
            ddp__drop(m->edges[i].leaf);
        }
        ddp__segment_forget(m);
        if (m->kind == DDP_NODE_HOST) ddp__host_dead(m->host_id);
        for (int i = 0; i < m->n_hooks; i++) ddp__host_dead(m->hooks[i].id);
        free(m->hooks);
        free(m);
    }
    free(pending);
    pending = NULL;
    room = 0;
    busy = false;
}

static void drop_history(ddp_tensor *t) {
    ddp__node_release(t->node);
    t->node = NULL;
    if (t->leaf) {
        for (int i = 0; i < t->leaf->n_hooks; i++) ddp__host_dead(t->leaf->hooks[i].id);
        for (int i = 0; i < t->leaf->n_after; i++) ddp__host_dead(t->leaf->after[i].id);
        free(t->leaf->hooks);
        free(t->leaf->after);
        free(t->leaf);
        t->leaf = NULL;
    }
}

ddp_leaf_info *ddp__leaf_info(ddp_tensor *t) {
    if (!t->leaf) {
        t->leaf = calloc(1, sizeof *t->leaf);
        if (!t->leaf) ddp__fail(DDP_ENOMEM, "tape: out of memory");
    }
    return t->leaf;
}

ddp_tensor *ddp__alias(const ddp_tensor *t) { return ddp__tensor_over(t->storage, &t->m); }

ddp_tensor *ddp_detach(ddp_tensor *t) {
    if (ddp__pending()) return NULL;
    if (!t) {
        ddp__fail(DDP_ENULL, "detach: no tensor");
        return NULL;
    }
    ddp_tensor *d = ddp__alias(t);
    if (d) d->is_view = t->is_view;
    return ddp__scope_own(d);
}

/* ---- recording ----------------------------------------------------------------------------------------------------
 */

static void point_edge(ddp_edge *e, ddp_tensor *t) {
    if (t->node) {
        e->node = t->node;
        e->out = t->node_out;
        atomic_fetch_add_explicit(&t->node->refs, 1, memory_order_relaxed);
    } else if (t->requires_grad) {
        e->leaf = ddp_retain(t);
    }
}

static void set_node(ddp_tensor *t, ddp_node *n, int out) {
    atomic_fetch_add_explicit(&n->refs, 1, memory_order_relaxed);
    ddp__node_release(t->node);
    t->node = n;
    t->node_out = out;
}

static void save(ddp_node *n, int k, ddp_tensor *t) {
    n->saved[k] = t;
    n->version[k] = t ? atomic_load_explicit(&t->storage->version, memory_order_relaxed) : 0;
}

static bool wants_record(int n_in, ddp_tensor *const *in) {
    if (!ddp__grad_on) return false;
    for (int i = 0; i < n_in; i++)
        if (ddp__wants_grad(in[i])) return true;
    return false;
}

static int record(const ddp_call *c, bool in_place) {
    if (c->op->flags & DDP_OPF_VIEW) c->out[0]->is_view = true;
    if (!wants_record(c->n_in, c->in)) return 0;
    const ddp_op_rules *rules = c->op->rules;
    unsigned saves = rules->saves_of ? rules->saves_of(c) : rules->saves;
    bool any = false;
    for (int i = 0; i < c->op->n_out; i++) any |= ddp__is_float(c->out[i]->m.dtype) && !((rules->const_out >> i) & 1);
    if (!any) return 0;
    ddp_node *n = node_new(DDP_NODE_OP, c->n_in, c->op->n_out, c->op->attr_size);
    if (!n) return ddp__pending();
    n->op = c->op;
    memcpy(n->attrs, c->attrs ? c->attrs : "", c->op->attr_size);
    bool keeps = ddp__segment_keeps();
    for (int i = 0; i < c->n_in; i++) {
        if (!c->in[i]) {
            n->meta[i].ndim = -1;
            continue;
        }
        n->meta[i] = c->in[i]->m;
        if (ddp__is_float(c->in[i]->m.dtype)) point_edge(&n->edges[i], c->in[i]);
        bool keep = c->op->lists ? (saves & DDP_SAVE_ALL_IN) : i < 15 && (saves & DDP_SAVE_IN(i));
        keep &= keeps;
        /* In place the old value of in[0] is gone: what is noted is the version before the write, so backward refuses.
         */
        if (keep) save(n, i, ddp_retain(c->in[i]));
        if (keep && in_place && i == 0) n->version[i]--;
    }
    for (int i = 0; i < c->op->n_out; i++) {
        n->meta[c->n_in + i] = c->out[i]->m;
        if (keeps && (saves & DDP_SAVE_OUT(i))) save(n, c->n_in + i, ddp__alias(c->out[i]));
        if (!ddp__is_float(c->out[i]->m.dtype) || ((rules->const_out >> i) & 1)) continue;
        set_node(c->out[i], n, i);
    }
    if (c->op->flags & DDP_OPF_VIEW) c->out[0]->storage->graph_views = true;
    ddp__segment_add(n);
    ddp__node_release(n);
    return ddp__pending();
}

static int check_in_place(const ddp_op_def *op, ddp_tensor *target, int n_in, ddp_tensor *const *in) {
    if (!ddp__grad_on) return 0;
    if (target->requires_grad && !target->node)
        return ddp__fail(DDP_ESTATE, "%s in place: a leaf that needs a gradient; do it inside no_grad", op->name);
    if ((op->flags & DDP_OPF_NO_GRAD) && !target->node) return 0;
    if (!wants_record(n_in, in)) return 0;
    if (target->is_view || target->storage->graph_views)
        return ddp__fail(DDP_ESTATE,
                         "%s in place: a view, or the base of a view, inside a graph; use %s, which makes a new tensor",
                         op->name, op->name);
    return 0;
}

int ddp_record_host(int64_t id, int n_in, ddp_tensor *const *in, int n_out, ddp_tensor *const *out) {
    if (ddp__pending()) return ddp__pending();
    for (int i = 0; i < n_out; i++)
        if (!out[i] || out[i]->node)
            return ddp__fail(DDP_ESTATE, "func: output %d %s", i + 1, out[i] ? "has history already" : "is missing");
    if (!wants_record(n_in, in)) return 0;
    ddp_node *n = node_new(DDP_NODE_HOST, n_in, n_out, 0);
    if (!n) return ddp__pending();
    n->host_id = id;
    for (int i = 0; i < n_in; i++) {
        n->meta[i].ndim = -1;
        if (!in[i]) continue;
        n->meta[i] = in[i]->m;
        if (ddp__is_float(in[i]->m.dtype)) point_edge(&n->edges[i], in[i]);
    }
    for (int i = 0; i < n_out; i++) {
        n->meta[n_in + i] = out[i]->m;
        if (ddp__is_float(out[i]->m.dtype)) set_node(out[i], n, i);
    }
    ddp__segment_add(n);
    ddp__node_release(n);
    return ddp__pending();
}

__attribute__((constructor)) static void fill_slots(void) {
    ddp__slots.record = record;
    ddp__slots.check_in_place = check_in_place;
    ddp__slots.wants_record = wants_record;
    ddp__tensor_drop_history = drop_history;
}

/* ---- leaves ---- */

int ddp_set_requires_grad(ddp_tensor *t, int on) {
    if (ddp__pending()) return ddp__pending();
    if (!t) return ddp__fail(DDP_ENULL, "requires_grad: no tensor");
    if (on && !ddp__is_float(t->m.dtype))
        return ddp__fail(DDP_EDTYPE, "requires_grad: %s has no gradient; floating dtypes do",
                         ddp_dtype_name(t->m.dtype));
    if (t->node) return on ? 0 : ddp__fail(DDP_ESTATE, "requires_grad: a result of %s; detach it", ddp_grad_op(t));
    t->requires_grad = on != 0;
    return 0;
}

int ddp_requires_grad(const ddp_tensor *t) { return ddp__wants_grad(t); }
int ddp_is_leaf(const ddp_tensor *t) { return t && !t->node; }
const char *ddp_grad_op(const ddp_tensor *t) {
    if (!t || !t->node) return NULL;
    return t->node->kind == DDP_NODE_HOST ? "a host function" : t->node->op->name;
}

ddp_tensor *ddp_tensor_grad(const ddp_tensor *t) {
    if (!t || !t->grad) return NULL;
    if (t->leaf && t->leaf->is_late) { /* an accessor: an error that is pending stays, and does not hinder it */
        ddp_saved_error e;
        ddp__error_save(&e);
        int st = ddp__grad_settle((ddp_tensor *)(uintptr_t)t);
        if (st == 0) ddp__error_restore(&e);
        if (st < 0) return NULL;
    }
    t->grad->shown = true;
    return ddp_retain(t->grad);
}

int ddp_tensor_set_grad(ddp_tensor *t, ddp_tensor *grad) {
    if (ddp__pending()) return ddp__pending();
    if (!t) return ddp__fail(DDP_ENULL, "grad: no tensor");
    if (grad && !ddp__meta_same_size(&grad->m, &t->m))
        return ddp__fail(DDP_ESHAPE, "grad: is %s, its tensor %s", DDP_SHAPE_TEXT(&grad->m), DDP_SHAPE_TEXT(&t->m));
    if (grad && grad->m.dtype != t->m.dtype)
        return ddp__fail(DDP_EDTYPE, "grad: is %s, its tensor %s", ddp_dtype_name(grad->m.dtype),
                         ddp_dtype_name(t->m.dtype));
    if (t->leaf && t->leaf->bucket_slot && ddp__grad_slots.set_grad) return ddp__grad_slots.set_grad(t, grad);
    ddp_tensor *old = t->grad;
    t->grad = ddp_retain(grad);
    if (grad) grad->shown = true;
    ddp__grad_forget(t);
    ddp__drop(old);
    return 0;
}

/* ---- hooks ---- */

static int hook_add(ddp_hook **list, int *n, int64_t id, int out) {
    ddp_hook *h = realloc(*list, ((size_t)*n + 1) * sizeof *h);
    if (!h) return ddp__fail(DDP_ENOMEM, "hook: out of memory");
    h[*n] = (ddp_hook){id, out};
    *list = h;
    ++*n;
    return 0;
}

int ddp_tensor_add_hook(ddp_tensor *t, int64_t id, int after) {
    if (ddp__pending()) return ddp__pending();
    if (!ddp__wants_grad(t)) return ddp__fail(DDP_ESTATE, "hook: the tensor needs no gradient");
    if (t->node) {
        if (after) return ddp__fail(DDP_ESTATE, "hook: only leaves accumulate gradients");
        return hook_add(&t->node->hooks, &t->node->n_hooks, id, t->node_out);
    }
    ddp_leaf_info *l = ddp__leaf_info(t);
    if (!l) return ddp__pending();
    return after ? hook_add(&l->after, &l->n_after, id, 0) : hook_add(&l->hooks, &l->n_hooks, id, 0);
}

static void hook_remove(ddp_hook *list, int *n, int64_t id) {
    for (int i = 0; i < *n; i++) {
        if (list[i].id != id) continue;
        memmove(&list[i], &list[i + 1], (size_t)(*n - i - 1) * sizeof *list);
        --*n;
        return;
    }
}

int ddp_tensor_remove_hook(ddp_tensor *t, int64_t id) {
    if (!t) return 0;
    if (t->node) hook_remove(t->node->hooks, &t->node->n_hooks, id);
    if (t->leaf) {
        hook_remove(t->leaf->hooks, &t->leaf->n_hooks, id);
        hook_remove(t->leaf->after, &t->leaf->n_after, id);
    }
    return 0;
}
