/* tape.h -- what is remembered of a call so that gradients can flow back through it. */
#ifndef DDP_TAPE_H
#define DDP_TAPE_H

#include "../op/op.h"

typedef enum ddp_node_kind { DDP_NODE_OP, DDP_NODE_HOST } ddp_node_kind;

/* Where the gradient of an input goes: to a node's output, or to a leaf; neither: nowhere. Owns a reference to either. */
typedef struct ddp_edge {
    ddp_node *node;
    int out;
    ddp_tensor *leaf;
} ddp_edge;

/* A host function to call with a gradient. */
typedef struct ddp_hook {
    int64_t id;
    int out; /* of a node: which output */
} ddp_hook;

typedef struct ddp_segment ddp_segment; /* segment.c */

struct ddp_node {
    atomic_int refs;
    ddp_node_kind kind;
    uint64_t seq;         /* of recording: inputs of a node have lower ones */
    uint64_t stamp;       /* the backward that last found it */
    const ddp_op_def *op; /* of an OP */
    int64_t host_id;      /* of a HOST */
    int n_in, n_out;
    bool freed;         /* saved tensors are gone */
    int module;         /* that ran it, as ddp__op_where has it */
    ddp_edge *edges;    /* [n_in] */
    ddp_meta *meta;     /* [n_in + n_out]; ndim -1 for an absent input */
    ddp_tensor **saved; /* [n_in + n_out], NULL where not kept; outputs as aliases without history */
    uint64_t *version;  /* [n_in + n_out] of saved storages at the time */
    void *attrs;
    ddp_hook *hooks;
    int n_hooks;
    ddp_segment *segment; /* owned; NULL: none, it keeps what it saves */
    int place;            /* in it */
};

/* What a leaf has besides its gradient. */
struct ddp_leaf_info {
    uint64_t stamp;
    ddp_hook *hooks; /* before accumulation */
    int n_hooks;
    ddp_hook *after; /* after accumulation and reduction */
    int n_after;
    void *bucket_slot; /* of a reducer; NULL: none */
    bool is_late; /* the gradient is `late` times what its bytes say: only while it is read through the leaf alone */
    double late;
};

DDP_LOCAL extern _Thread_local bool ddp__grad_on;
DDP_LOCAL void ddp__node_release(ddp_node *n);
/* Drops what backward reads; edges stay. */
DDP_LOCAL void ddp__node_free_saved(ddp_node *n);
static inline bool ddp__wants_grad(const ddp_tensor *t) { return t && (t->requires_grad || t->node); }
DDP_LOCAL ddp_leaf_info *ddp__leaf_info(ddp_tensor *t);
/* leaf.grad changes or goes: what its bytes lacked is no more. */
static inline void ddp__grad_forget(ddp_tensor *leaf) {
    if (leaf->leaf) leaf->leaf->is_late = false;
}
/* *sum += g, in place where nobody else can see *sum and no graph is made; takes no reference of g (accumulate.c). */
DDP_LOCAL int ddp__grad_add(ddp_tensor **sum, ddp_tensor *g, bool create_graph);
/* g becomes, or is added to, leaf.grad: in its bucket where it has one. Takes no reference of g. */
DDP_LOCAL int ddp__grad_accumulate(ddp_tensor *leaf, ddp_tensor *g, bool create_graph);
/* Brings the bytes of leaf.grad up to what they should say (optim.c). Whoever reads leaf.grad calls it first. */
DDP_LOCAL int ddp__grad_settle(ddp_tensor *leaf);
/* A handle on the same storage without history; not in a scope. */
DDP_LOCAL ddp_tensor *ddp__alias(const ddp_tensor *t);

/* ---- segments (segment.c): stretches that keep nothing and are run again for backward ---- */
/* Does a node recorded now keep what it saves? */
DDP_LOCAL bool ddp__segment_keeps(void);
/* Puts a new node into the open segment, if there is one. */
DDP_LOCAL int ddp__segment_add(ddp_node *n);
/* The node goes. */
DDP_LOCAL void ddp__segment_forget(ddp_node *n);
/* The host function to run before n can give its gradient; 0: none. */
DDP_LOCAL int64_t ddp__segment_missing(const ddp_node *n);
/* Opens the second run of what n misses; ends it, handing over what was saved (ok) or nothing. */
DDP_LOCAL int ddp__segment_again(void);
DDP_LOCAL int ddp__segment_filled(const ddp_node *n, bool ok);
/* Nothing can ask for this host function any more. */
DDP_LOCAL void ddp__host_dead(int64_t id);

/* What reducers put here: gradients of leaves with a bucket slot go through `accumulate`. */
typedef struct ddp_grad_slots {
    /* Before the walk, for each such leaf. *round, the reduction that this leads to, and *number are the backward's, 0 at
     * first; weight: this rank's. */
    int (*take_part)(ddp_reduction **round, int64_t *number, ddp_tensor *leaf, double weight);
    int (*accumulate)(ddp_tensor *leaf, ddp_tensor *grad);
    int (*ask)(ddp_reduction *round, int64_t *id);          /* between nodes. 1: the host is to run `id` */
    int (*backward_end)(ddp_reduction *round, int64_t *id); /* after the last node: flush and wait. 1: the same */
    void (*round_free)(ddp_reduction *round);
    int (*set_grad)(ddp_tensor *leaf, ddp_tensor *grad); /* p.grad = t */
} ddp_grad_slots;
DDP_LOCAL extern ddp_grad_slots ddp__grad_slots;

#endif
