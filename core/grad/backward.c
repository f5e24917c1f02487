/* backward.c -- gradients flow back. A backward first collects what it will pass, sorted by the order of recording;
 * walking that list from its end meets every node after all that used its results, so no counting is needed for nodes.
 * It is resumable: where the host must act it stops, and goes on when called again. */
#include <stdlib.h>
#include <string.h>

#include "tape.h"

typedef struct visit {  /* a node on the way */
    ddp_node *node;     /* owned */
    ddp_tensor **grads; /* [n_out] summed so far; owned; NULL until the first comes */
    bool needed;
} visit;

typedef struct leaf_visit {
    ddp_tensor *leaf; /* owned */
    ddp_tensor *grad; /* summed so far; owned */
    int waiting;      /* uses that have not given yet */
} leaf_visit;

typedef enum step { STEP_NODE, STEP_HOOKS, STEP_VJP, STEP_LEAVES, STEP_END, STEP_AFTER, STEP_DONE } step;

struct ddp_backward_state {
    int flags;
    ddp_reduction *round; /* of reducers; NULL: nothing is reduced */
    visit *nodes;         /* by seq, ascending */
    int n_nodes, room_nodes;
    leaf_visit *leaves; /* by id, ascending */
    int n_leaves, room_leaves;
    int n_inputs; /* of ddp_grad */
    ddp_tensor **inputs, **input_grads;
    step step;
    int at;                /* node being worked on */
    int hook;              /* next hook of it, or of the leaf */
    int ready_leaf;        /* leaf in STEP_LEAVES; after: in STEP_AFTER */
    int edge;              /* edge being given in STEP_LEAVES */
    ddp_tensor **in_grads; /* [n_in] of the node, owned */
    bool capturing;        /* inputs are given: leaves are left alone */
    int64_t ran_again;     /* the host function last asked to run a segment again */
    int64_t host_id;       /* what the host runs now; host_n gradients, results into host_out */
    int host_n, host_n_out;
    ddp_tensor **host_in, **host_out;
};

static uint64_t next_stamp = 1;

/* ---- collecting ---------------------------------------------------------------------------------------------------
 */

static void *grow(void *v, int n, int *room, size_t size) {
    if (n < *room) return v;
    int more = *room ? 2 * *room : 64;
    void *p = realloc(v, (size_t)more * size);
    if (!p) {
        ddp__fail(DDP_ENOMEM, "backward: out of memory");
        return NULL;
    }
    *room = more;
    return p;
}

static int add_node(ddp_backward_state *s, ddp_node *n, uint64_t stamp) {
    if (n->stamp == stamp) return 0;
    visit *v = grow(s->nodes, s->n_nodes, &s->room_nodes, sizeof *v);
    if (!v) return ddp__pending();
    n->stamp = stamp;
    atomic_fetch_add(&n->refs, 1);
    s->nodes = v;
    s->nodes[s->n_nodes++] = (visit){n, NULL, false};
    return 0;
}

static int add_leaf(ddp_backward_state *s, ddp_tensor *leaf, uint64_t stamp) {
    ddp_leaf_info *info = ddp__leaf_info(leaf);
    if (!info) return ddp__pending();
    if (info->stamp == stamp) return 0;
    leaf_visit *l = grow(s->leaves, s->n_leaves, &s->room_leaves, sizeof *l);
    if (!l) return ddp__pending();
    info->stamp = stamp;
    s->leaves = l;
    s->leaves[s->n_leaves++] = (leaf_visit){ddp_retain(leaf), NULL, 0};
    return 0;
}

static int by_seq(const void *a, const void *b) {
    uint64_t x = ((const visit *)a)->node->seq, y = ((const visit *)b)->node->seq;
    return (x > y) - (x < y);
}
static int by_id(const void *a, const void *b) {
    uint64_t x = ((const leaf_visit *)a)->leaf->id, y = ((const leaf_visit *)b)->leaf->id;
    return (x > y) - (x < y);
}

static visit *find_node(const ddp_backward_state *s, const ddp_node *n) {
    int lo = 0, hi = s->n_nodes - 1;
    while (lo <= hi) {
        int mid = (lo + hi) / 2;
        if (s->nodes[mid].node == n) return &s->nodes[mid];
        if (s->nodes[mid].node->seq < n->seq) lo = mid + 1;
        else hi = mid - 1;
    }
    return NULL;
}

static leaf_visit *find_leaf(const ddp_backward_state *s, const ddp_tensor *t) {
    int lo = 0, hi = s->n_leaves - 1;
    while (lo <= hi) {
        int mid = (lo + hi) / 2;
        if (s->leaves[mid].leaf == t) return &s->leaves[mid];
        if (s->leaves[mid].leaf->id < t->id) lo = mid + 1;
        else hi = mid - 1;
    }
    return NULL;
}

static bool is_input(const ddp_backward_state *s, const ddp_node *n, const ddp_tensor *leaf) {
    for (int i = 0; i < s->n_inputs; i++)
        if (n ? s->inputs[i]->node == n : s->inputs[i] == leaf) return true;
    return false;
}

/* Reducers hear which parameters this backward reaches. */
static int tell_reducers(ddp_backward_state *s, double weight) {
    int64_t number = 0;
    int st = 0;
    for (int i = 0; i < s->n_leaves && st == 0 && !s->capturing; i++) {
        ddp_tensor *leaf = s->leaves[i].leaf;
        if (leaf->leaf->bucket_slot) st = ddp__grad_slots.take_part(&s->round, &number, leaf, weight);
    }
    return st;
}

/* Every node behind the outputs, then which of them lie on the way to something wanted. */
static int collect(ddp_backward_state *s, int n, ddp_tensor *const *outputs) {
    uint64_t stamp = next_stamp++;
    for (int i = 0; i < n; i++) {
        if (outputs[i]->node && add_node(s, outputs[i]->node, stamp) < 0) return ddp__pending();
        if (!outputs[i]->node && outputs[i]->requires_grad && add_leaf(s, outputs[i], stamp) < 0) return ddp__pending();
    }
    for (int i = 0; i < s->n_nodes; i++) {
        ddp_node *node = s->nodes[i].node;
        for (int k = 0; k < node->n_in; k++) {
            ddp_edge *e = &node->edges[k];
            if (e->node && add_node(s, e->node, stamp) < 0) return ddp__pending();
            if (e->leaf && add_leaf(s, e->leaf, stamp) < 0) return ddp__pending();
        }
    }
    if (s->n_nodes) qsort(s->nodes, (size_t)s->n_nodes, sizeof *s->nodes, by_seq);
    if (s->n_leaves) qsort(s->leaves, (size_t)s->n_leaves, sizeof *s->leaves, by_id);
    for (int i = 0; i < s->n_nodes; i++) {
        ddp_node *node = s->nodes[i].node;
        bool needed = !s->capturing || is_input(s, node, NULL);
        for (int k = 0; k < node->n_in; k++) {
            ddp_edge *e = &node->edges[k];
            if (s->capturing && e->node) needed |= find_node(s, e->node)->needed;
            if (s->capturing && e->leaf) needed |= is_input(s, NULL, e->leaf);
        }
        s->nodes[i].needed = needed;
        for (int k = 0; needed && k < node->n_in; k++)
            if (node->edges[k].leaf) find_leaf(s, node->edges[k].leaf)->waiting++;
    }
    return 0;
}

/* ---- summing ---- */

/* *sum += g; takes no reference of g. */
static int add_to(const ddp_backward_state *s, ddp_tensor **sum, ddp_tensor *g) {
    return ddp__grad_add(sum, g, s->flags & DDP_CREATE_GRAPH);
}

static int give_node(ddp_backward_state *s, visit *v, int out, ddp_tensor *g) {
    if (!v->grads) {
        v->grads = calloc((size_t)v->node->n_out, sizeof *v->grads);
        if (!v->grads) return ddp__fail(DDP_ENOMEM, "backward: out of memory");
    }
    return add_to(s, &v->grads[out], g);
}

/* A leaf's gradient is whole: it becomes, or is added to, leaf.grad. */
static int settle_leaf(ddp_backward_state *s, leaf_visit *l) {
    if (!l->grad || s->capturing) return 0;
    int st = ddp__grad_accumulate(l->leaf, l->grad, s->flags & DDP_CREATE_GRAPH);
    ddp__drop(l->grad);
    l->grad = NULL;
    return st;
}

/* ---- asking the host ---- */

static int ask_host(ddp_backward_state *s, int64_t id, int n, ddp_tensor **in, int n_out, ddp_tensor **out) {
    s->host_id = id;
    s->host_n = n;
    s->host_in = in;
    s->host_n_out = n_out;
    s->host_out = out;
    return 1;
}

int64_t ddp_backward_host_id(const ddp_backward_state *s) { return s->host_id; }
int ddp_backward_host_n(const ddp_backward_state *s) { return s->host_n; }
ddp_tensor *ddp_backward_host_grad(const ddp_backward_state *s, int i) {
    return s->host_in && i >= 0 && i < s->host_n ? s->host_in[i] : NULL;
}

int ddp_segment_again(ddp_backward_state *s) {
    if (ddp__pending()) return ddp__pending();
    if (!s || s->at < 0) return ddp__fail(DDP_ESTATE, "checkpoint: no backward asks for it");
    return ddp__segment_again();
}

int ddp_segment_filled(ddp_backward_state *s, int ok) { return ddp__segment_filled(s->nodes[s->at].node, ok != 0); }

int ddp_backward_host_result(ddp_backward_state *s, int i, ddp_tensor *grad) {
    if (ddp__pending()) return ddp__pending();
    if (!s->host_out || i < 0 || i >= s->host_n_out)
        return ddp__fail(DDP_EINVAL, "backward: result %d of %d", i + 1, s->host_n_out);
    ddp_tensor *old = s->host_out[i];
    s->host_out[i] = ddp_retain(grad);
    ddp__drop(old);
    return 0;
}

/* ---- one node ---- */

static int check_saved(const ddp_node *n) {
    if (n->freed)
        return ddp__fail(DDP_ESTATE,
                         "backward: the graph of %s was used up by an earlier backward; pass retain_graph there",
                         n->kind == DDP_NODE_OP ? n->op->name : "a host function");
    for (int i = 0; i < n->n_in + n->n_out; i++) {
        const ddp_tensor *t = n->saved[i];
        if (!t || t->storage->version == n->version[i]) continue;
        bool out = i >= n->n_in;
        return ddp__fail(DDP_ESTATE,
                         "backward: %s saved its %s %s, which was changed in place since (version %llu, saved at %llu)",
                         n->op->name, out ? "result" : "input",
                         out            ? ""
                         : n->op->lists ? ""
                                        : n->op->in_names[i],
                         (unsigned long long)t->storage->version, (unsigned long long)n->version[i]);
    }
    return 0;
}

/* Runs the gradient rule; results into s->in_grads. */
static int run_vjp(ddp_backward_state *s, visit *v) {
    ddp_node *n = v->node;
    int st = check_saved(n), total = n->n_in + n->n_out;
    if (st < 0) return st;
    ddp__op_where = (ddp_op_where){n->module, n->op->name};
    ddp_tensor *small[32], **values = total <= 32 ? small : malloc((size_t)total * sizeof *values);
    bool needs_small[32], *needs = n->n_in <= 32 ? needs_small : malloc((size_t)n->n_in);
    if (!values || !needs) {
        st = ddp__fail(DDP_ENOMEM, "backward: out of memory");
        goto done;
    }
    memcpy(values, n->saved, (size_t)total * sizeof *values);
    for (int i = 0; i < n->n_in; i++) {
        const ddp_edge *e = &n->edges[i];
        needs[i] = e->leaf || (e->node && find_node(s, e->node)->needed);
    }
    ddp_scope_begin();
    bool attach = s->flags & DDP_CREATE_GRAPH; /* saved results take part in the second graph */
    for (int i = 0; attach && i < n->n_out; i++) {
        if (!n->saved[n->n_in + i] || !ddp__is_float(n->meta[n->n_in + i].dtype) ||
            ((n->op->rules->const_out >> i) & 1))
            continue;
        ddp_tensor *t = ddp__scope_own(ddp__alias(n->saved[n->n_in + i]));
        if (!t) break;
        atomic_fetch_add(&n->refs, 1);
        t->node = n;
        t->node_out = i;
        values[n->n_in + i] = t;
    }
    ddp_vjp call = {.op = n->op,
                    .attrs = n->attrs,
                    .n_in = n->n_in,
                    .n_out = n->n_out,
                    .in = values,
                    .out = values + n->n_in,
                    .in_meta = n->meta,
                    .out_meta = n->meta + n->n_in,
                    .grad_out = v->grads,
                    .needs = needs,
                    .grad_in = s->in_grads};
    st = ddp__pending() ? ddp__pending() : n->op->rules->vjp(&call);
    for (int i = 0; i < n->n_in; i++) {
        if (st < 0) s->in_grads[i] = NULL;
        ddp_retain(s->in_grads[i]);
    }
    ddp_scope_end();
done:
    if (values != small) free(values);
    if (needs != needs_small) free(needs);
    return st;
}

static int capture_grads(ddp_backward_state *s, const visit *v) {
    for (int i = 0; i < s->n_inputs; i++)
        if (s->inputs[i]->node == v->node && v->grads[s->inputs[i]->node_out])
            s->input_grads[i] = ddp_retain(v->grads[s->inputs[i]->node_out]);
    return 0;
}

static void drop_node(ddp_backward_state *s, visit *v) {
    for (int i = 0; v->grads && i < v->node->n_out; i++) ddp__drop(v->grads[i]);
    free(v->grads);
    v->grads = NULL;
    if (s->in_grads) {
        for (int i = 0; i < v->node->n_in; i++) ddp__drop(s->in_grads[i]);
        free(s->in_grads);
        s->in_grads = NULL;
    }
    if (!(s->flags & (DDP_RETAIN_GRAPH | DDP_CREATE_GRAPH)) && v->needed) ddp__node_free_saved(v->node);
}

/* Gives the node's gradients on, edge by edge; stops (1) for a leaf's hook. */
static int give_edges(ddp_backward_state *s) {
    visit *v = &s->nodes[s->at];
    for (; s->edge < v->node->n_in; s->edge++) {
        ddp_edge *e = &v->node->edges[s->edge];
        ddp_tensor *g = s->in_grads ? s->in_grads[s->edge] : NULL;
        int st = 0;
        if (e->node && g && find_node(s, e->node)->needed) st = give_node(s, find_node(s, e->node), e->out, g);
        if (e->leaf) {
            leaf_visit *l = find_leaf(s, e->leaf);
            if (s->hook == 0) {
                if (g && (st = add_to(s, &l->grad, g)) < 0) return st;
                /* Let go before the leaf settles, so that it may keep the bytes. */
                if (g) ddp__drop(g), s->in_grads[s->edge] = NULL;
                l->waiting--;
            }
            if (l->waiting == 0) {
                if (l->grad && s->hook < l->leaf->leaf->n_hooks)
                    return ask_host(s, l->leaf->leaf->hooks[s->hook++].id, 1, &l->grad, 1, &l->grad);
                st = settle_leaf(s, l);
            }
            s->hook = 0;
        }
        if (st < 0) return st;
        if (g && !e->leaf) {
            ddp__drop(g);
            s->in_grads[s->edge] = NULL;
        }
    }
    return 0;
}

/* ---- the walk ---- */

static int begin_node(ddp_backward_state *s) {
    int64_t id = 0;
    int asked = s->round ? ddp__grad_slots.ask(s->round, &id) : 0;
    if (asked != 0) return asked == 1 ? ask_host(s, id, 0, NULL, 0, NULL) : asked;
    while (s->at >= 0 && (!s->nodes[s->at].grads || !s->nodes[s->at].needed)) {
        /* Nothing came: its leaves wait for nothing from here. */
        visit *v = &s->nodes[s->at];
        if (v->needed) break;
        drop_node(s, v);
        s->at--;
    }
    if (s->at < 0) {
        s->step = STEP_END;
        return 0;
    }
    s->hook = 0;
    s->edge = 0;
    s->step = s->nodes[s->at].grads ? STEP_HOOKS : STEP_LEAVES;
    return 0;
}

static int run_hooks(ddp_backward_state *s) {
    visit *v = &s->nodes[s->at];
    while (s->hook < v->node->n_hooks) {
        ddp_hook *h = &v->node->hooks[s->hook++];
        if (v->grads[h->out]) return ask_host(s, h->id, 1, &v->grads[h->out], 1, &v->grads[h->out]);
    }
    s->hook = 0;
    s->step = STEP_VJP;
    return 0;
}

static int differentiate(ddp_backward_state *s) {
    visit *v = &s->nodes[s->at];
    int64_t missing = ddp__segment_missing(v->node);
    if (missing && missing == s->ran_again)
        return ddp__fail(DDP_ESTATE, "backward: through a checkpoint whose function has not returned yet");
    if (missing) return ask_host(s, s->ran_again = missing, 0, NULL, 0, NULL);
    if (s->capturing) capture_grads(s, v);
    s->in_grads = calloc((size_t)v->node->n_in + 1, sizeof *s->in_grads);
    if (!s->in_grads) return ddp__fail(DDP_ENOMEM, "backward: out of memory");
    s->step = STEP_LEAVES;
    if (v->node->kind == DDP_NODE_HOST && check_saved(v->node) < 0) return ddp__pending();
    if (v->node->kind == DDP_NODE_HOST)
        return ask_host(s, v->node->host_id, v->node->n_out, v->grads, v->node->n_in, s->in_grads);
    return run_vjp(s, v);
}

/* After all: hooks that want the final gradient. */
static int run_after(ddp_backward_state *s) {
    for (; s->ready_leaf < s->n_leaves; s->ready_leaf++, s->hook = 0) {
        ddp_tensor *leaf = s->leaves[s->ready_leaf].leaf;
        if (!s->capturing && leaf->grad && s->hook < leaf->leaf->n_after) {
            leaf->grad->shown = true;
            return ask_host(s, leaf->leaf->after[s->hook++].id, 1, &leaf->grad, 0, NULL);
        }
    }
    s->step = STEP_DONE;
    return 0;
}

static int end_walk(ddp_backward_state *s) {
    int64_t id = 0;
    int st = s->round ? ddp__grad_slots.backward_end(s->round, &id) : 0;
    if (st != 0) return st == 1 ? ask_host(s, id, 0, NULL, 0, NULL) : st;
    s->step = STEP_AFTER;
    s->ready_leaf = 0;
    s->hook = 0;
    for (int i = 0; i < s->n_inputs; i++) {
        leaf_visit *l = s->inputs[i]->node ? NULL : find_leaf(s, s->inputs[i]);
        if (l && l->grad) s->input_grads[i] = ddp_retain(l->grad);
    }
    return 0;
}

static int walk(ddp_backward_state *s) {
    for (;;) {
        int st = 0;
        switch (s->step) {
            case STEP_NODE: st = begin_node(s); break;
            case STEP_HOOKS: st = run_hooks(s); break;
            case STEP_VJP: st = differentiate(s); break;
            case STEP_LEAVES:
                st = give_edges(s);
                if (st != 0) break;
                drop_node(s, &s->nodes[s->at--]);
                s->step = STEP_NODE;
                break;
            case STEP_END: st = end_walk(s); break;
            case STEP_AFTER: st = run_after(s); break;
            case STEP_DONE: return 0;
        }
        if (st != 0) return st;
    }
}

int ddp_backward_next(ddp_backward_state *s) {
    if (ddp__pending()) return ddp__pending();
    if (!s) return ddp__fail(DDP_ENULL, "backward: no state");
    bool mode = ddp__grad_on;
    int autocast = ddp__autocast; /* gradients are computed in the dtypes recorded */
    ddp_phase phase = ddp__phase_enter(DDP_PHASE_BACKWARD);
    ddp__autocast = DDP_AUTOCAST_OFF;
    ddp_op_where where = ddp__op_where;
    ddp__grad_on = (s->flags & DDP_CREATE_GRAPH) != 0;
    ddp_scope_push_barrier(); /* what the walk makes is its own */
    int st = walk(s);
    ddp_scope_pop_barrier();
    ddp__grad_on = mode;
    ddp__autocast = autocast;
    ddp__op_where = where;
    ddp__phase_enter(phase);
    return st;
}

/* ---- begin and end ---- */

/* The gradient to start from: given, or 1 for a single element. */
static int seed(ddp_backward_state *s, ddp_tensor *out, ddp_tensor *given) {
    ddp_tensor *g = given;
    if (g && (!ddp__meta_same_size(&g->m, &out->m) || g->m.dtype != out->m.dtype))
        return ddp__fail(DDP_ESHAPE, "backward: the gradient is %s %s, its tensor %s %s", ddp_dtype_name(g->m.dtype),
                         DDP_SHAPE_TEXT(&g->m), ddp_dtype_name(out->m.dtype), DDP_SHAPE_TEXT(&out->m));
    if (!g && out->numel != 1)
        return ddp__fail(DDP_ESHAPE, "backward: from %s; give a gradient, or take the mean or sum first",
                         DDP_SHAPE_TEXT(&out->m));
    if (!g) g = ddp_keep(ddp_full(out->m.ndim, out->m.size, 1, (int)out->m.dtype, out->m.device));
    if (!g) return ddp__pending();
    int st = 0;
    if (out->node) st = give_node(s, find_node(s, out->node), out->node_out, g);
    else st = add_to(s, &find_leaf(s, out)->grad, g);
    if (!given) ddp__drop(g);
    /* An output that is itself a leaf has no node to give it on. */
    if (st == 0 && !out->node && find_leaf(s, out)->waiting == 0) st = settle_leaf(s, find_leaf(s, out));
    return st;
}

ddp_backward_state *ddp_backward_begin(int n, ddp_tensor *const *outputs, ddp_tensor *const *grads, int n_inputs,
                                       ddp_tensor *const *inputs, int flags, double weight) {
    if (ddp__pending()) return NULL;
    ddp_backward_state *s = calloc(1, sizeof *s);
    if (!s) {
        ddp__fail(DDP_ENOMEM, "backward: out of memory");
        return NULL;
    }
    int st = 0;
    s->flags = flags;
    s->capturing = n_inputs > 0;
    for (int i = 0; i < n && st == 0; i++) {
        if (!outputs[i]) st = ddp__fail(DDP_ENULL, "backward: no tensor");
        else if (!ddp__wants_grad(outputs[i]))
            st = ddp__fail(DDP_ESTATE, "backward: the result does not depend on anything that needs a gradient");
    }
    if (st == 0 && n_inputs) {
        s->inputs = calloc((size_t)n_inputs, sizeof *s->inputs);
        s->input_grads = calloc((size_t)n_inputs, sizeof *s->input_grads);
        if (!s->inputs || !s->input_grads) st = ddp__fail(DDP_ENOMEM, "backward: out of memory");
        for (int i = 0; st == 0 && i < n_inputs; i++) {
            if (!ddp__wants_grad(inputs[i])) st = ddp__fail(DDP_ESTATE, "grad: input %d needs no gradient", i + 1);
            else s->inputs[s->n_inputs++] = ddp_retain(inputs[i]);
        }
    }
    if (st == 0) st = collect(s, n, outputs);
    if (st == 0) st = tell_reducers(s, weight);
    bool mode = ddp__grad_on;
    ddp__grad_on = false;
    for (int i = 0; st == 0 && i < n; i++) st = seed(s, outputs[i], grads ? grads[i] : NULL);
    ddp__grad_on = mode;
    s->at = s->n_nodes - 1;
    s->step = STEP_NODE;
    if (st == 0) return s;
    ddp_backward_free(s);
    return NULL;
}

ddp_tensor *ddp_backward_input_grad(ddp_backward_state *s, int i) {
    return s && i >= 0 && i < s->n_inputs ? ddp_retain(s->input_grads[i]) : NULL;
}

void ddp_backward_free(ddp_backward_state *s) {
    if (!s) return;
    if (s->at >= 0 && s->at < s->n_nodes) drop_node(s, &s->nodes[s->at]);
    for (int i = 0; i < s->n_nodes; i++) {
        for (int k = 0; s->nodes[i].grads && k < s->nodes[i].node->n_out; k++) ddp__drop(s->nodes[i].grads[k]);
        free(s->nodes[i].grads);
        ddp__node_release(s->nodes[i].node);
    }
    for (int i = 0; i < s->n_leaves; i++) {
        ddp__drop(s->leaves[i].grad);
        ddp__drop(s->leaves[i].leaf);
    }
    for (int i = 0; i < s->n_inputs; i++) {
        ddp__drop(s->inputs[i]);
        ddp__drop(s->input_grads[i]);
    }
    free(s->nodes);
    free(s->leaves);
    free(s->inputs);
    free(s->input_grads);
    if (s->round) ddp__grad_slots.round_free(s->round);
    free(s);
}

/* ---- in one go ---- */

static int run_to_end(ddp_backward_state *s) {
    int st = ddp_backward_next(s);
    if (st == 1)
        st = ddp__fail(DDP_ESTATE, "backward: a custom gradient or hook stands on the way; use ddp_backward_next");
    return st;
}

int ddp_backward(ddp_tensor *loss, ddp_tensor *grad) {
    ddp_backward_state *s = ddp_backward_begin(1, &loss, &grad, 0, NULL, 0, 1);
    if (!s) return ddp__pending();
    int st = run_to_end(s);
    ddp_backward_free(s);
    return st;
}

int ddp_grad(int n_out, ddp_tensor *const *outputs, ddp_tensor *const *grad_outputs, int n_in,
             ddp_tensor *const *inputs, int flags, int allow_unused, ddp_tensor **grads) {
    ddp_backward_state *s = ddp_backward_begin(n_out, outputs, grad_outputs, n_in, inputs, flags, 1);
    if (!s) return ddp__pending();
    int st = run_to_end(s);
    for (int i = 0; st == 0 && i < n_in; i++) {
        grads[i] = ddp_backward_input_grad(s, i);
        if (grads[i] || allow_unused) continue;
        st = ddp__fail(DDP_ESTATE, "grad: input %d is not used by the outputs; pass allow_unused to get none for it",
                       i + 1);
        for (int k = 0; k < i; k++) ddp__drop(grads[k]), grads[k] = NULL;
    }
    ddp_backward_free(s);
    return st;
}
