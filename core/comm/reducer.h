/* reducer.h -- buckets of gradients (reducer.c) and the rounds in which the ranks reduce them (round.c). */
#ifndef DDP_REDUCER_H
#define DDP_REDUCER_H

#include "comm.h"

typedef struct slot { /* of one parameter */
    ddp_reducer *reducer;
    ddp_tensor *param; /* owned */
    ddp_tensor *view;  /* owned; its gradient's place in the bucket */
    int bucket, index; /* which bucket, which place in it */
    bool ready;        /* whole in this backward */
    bool reduced;      /* holds a reduced gradient, not added to since */
    bool touched;      /* by some rank, in the last reduction */
    bool used;         /* by some rank, in any */
} slot;

/* Memory of a bucket: n gradients, each on a cache line of its own; then, from `tail` on, one number a parameter that says
 * whether this rank touched it; then, in a reducer's first bucket, TAIL_MORE numbers about the rank itself (round.c). */
enum { TAIL_HERE, TAIL_LAST, TAIL_MORE };

typedef struct bucket {
    void *mem;
    int64_t count, tail; /* elements */
    ddp_dtype dtype;
    int n, n_ready;
    slot **slots; /* [n] */
    ddp_req *req; /* posted and not yet waited for */
    /* With compression: all of it, and what travels in its place; with feedback, what was rounded off; owned. */
    ddp_tensor *wide, *narrow, *rest;
    void *narrow_mem;
} bucket;

struct ddp_reducer {
    int64_t serial; /* by construction, alike on all ranks; from 1 */
    slot *slots;    /* [n], in the order of parameters */
    int n;
    bucket *buckets;
    int n_buckets, n_posted;
    int reduce; /* DDP_MEAN or DDP_SUM */
    bool weighted, sync;
    bool unreduced;       /* holds gradients that no round has reduced */
    bool seen;            /* a round was of it */
    int64_t last;         /* the number of the backward that reached it last */
    ddp_reduction *round; /* that it is in */
    ddp_reducer *next;    /* of all reducers: older ones */
    /* With a hook the host exchanges the gradients; what else a bucket's tail says goes as one small bucket of its own. */
    int device; /* where parameters and buckets lie. On a GPU the tails, which the host reads, go by `flags` as with a hook */
    int64_t hook;    /* 0: none */
    int hook_bucket; /* what it is to do now */
    bool hook_waited;
    bucket flags; /* [n touched][TAIL_MORE] */
};

/* Do the numbers behind the gradients travel as a bucket of their own? */
static inline bool ddp__apart(const ddp_reducer *r) { return r->hook || r->device != DDP_CPU; }

/* All that live, the newest first. */
DDP_LOCAL extern ddp_reducer *ddp__reducers;

enum { ROUND_MAX = 8 }; /* reducers in one round */

/* One reduction: of the models that a backward reached, or of one. */
struct ddp_reduction {
    ddp_reducer *list[ROUND_MAX]; /* the newest first: the order in which they are posted, the same on every rank */
    int n;
    double weight; /* this rank's */
    bool begun;    /* a bucket was posted, or the round announced */
    bool ended;    /* this rank only answers: it has no more data */
    bool hooked;   /* one of them has a hook */
    void **saved;  /* [buckets of all] what lay there, where it may turn out that all only answer; NULL: not kept */
    int n_saved;
    double here; /* [OUT] ranks that took part for real */
};

/* A round of nobody yet; NULL when out of memory. */
DDP_LOCAL ddp_reduction *ddp__round_new(double weight);
/* Puts r into the round; DDP_ENOSUP when there are too many. */
DDP_LOCAL int ddp__round_add(ddp_reduction *d, ddp_reducer *r);
/* Posts buckets in their order, as far as they are ready; all of them with `all`. 1: a hook is to run now, then call it again;
 * without `ask` it stops there and returns 0. */
DDP_LOCAL int ddp__round_post(ddp_reduction *d, bool all, bool ask);
/* Posts the rest, waits, and hands out the results. 1: a hook is to run now, then call it again. */
DDP_LOCAL int ddp__round_finish(ddp_reduction *d);
/* A round of r alone, which has no hook. */
DDP_LOCAL int ddp__round_alone(ddp_reducer *r, double weight);
/* The number of a new backward that reaches parameters of reducers. */
DDP_LOCAL int64_t ddp__round_count(void);
/* g / size: what was summed over the ranks already counts once when it is summed again, not once a rank. */
DDP_LOCAL int ddp__round_divide(ddp_tensor *g);
/* A reducer goes. */
DDP_LOCAL void ddp__round_forget(const ddp_reducer *r);

#endif
