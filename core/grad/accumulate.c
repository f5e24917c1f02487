/* accumulate.c -- adding gradients up: where they meet on the tape, and into leaf.grad. */
#include "tape.h"

/* Nobody else can see its elements. */
static bool sole_owner(const ddp_tensor *t) { return t->refs == 1 && t->storage->refs == 1 && !t->node; }

int ddp__grad_add(ddp_tensor **sum, ddp_tensor *g, bool create_graph) {
    if (!*sum) {
        *sum = ddp_retain(g);
        return 0;
    }
    if (!create_graph && sole_owner(*sum) && ddp__meta_is_dense(&(*sum)->m)) return ddp_add_(*sum, g);
    ddp_tensor *t = ddp_keep(ddp_add(*sum, g));
    if (!t) return ddp__pending();
    ddp__drop(*sum);
    *sum = t;
    return 0;
}

int ddp__grad_accumulate(ddp_tensor *leaf, ddp_tensor *g, bool create_graph) {
    int st = ddp__grad_settle(leaf);
    if (st < 0) return st;
    if (leaf->leaf->bucket_slot && ddp__grad_slots.accumulate) return ddp__grad_slots.accumulate(leaf, g);
    if (!leaf->grad) {
        bool keep = create_graph || (sole_owner(g) && ddp__meta_is_dense(&g->m));
        leaf->grad = keep ? ddp_retain(g) : ddp_keep(ddp_clone(g, 1));
        return ddp__pending();
    }
    if (!create_graph) return ddp_add_(leaf->grad, g);
    ddp_tensor *sum = ddp_keep(ddp_add(leaf->grad, g));
    if (!sum) return ddp__pending();
    ddp__drop(leaf->grad);
    leaf->grad = sum;
    return ddp__pending();
}
