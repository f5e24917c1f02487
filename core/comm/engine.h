/* engine.h -- what carries collectives: a small vtable. Store, boot, deadlines, flight ring and signatures belong to
 * the core (comm.c); an engine moves bytes and reports faults.
 *
 * The rules an engine keeps: requests complete in the order they were posted; the same bits on every rank; post never
 * blocks; test drives progress; after an error the communicator is dead and every later call returns that error. */
#ifndef DDP_ENGINE_H
#define DDP_ENGINE_H

#include "../base/base.h"
#include "store.h"

typedef struct ddp_comm ddp_comm; /* an engine's own */
typedef struct ddp_req ddp_req;

enum {
    DDP_CAP_HOST = 1,          /* host memory */
    DDP_CAP_DEVICE = 2,        /* device memory */
    DDP_CAP_SELF_PROGRESS = 4, /* goes on without test: overlap pays */
    DDP_CAP_ABORTABLE = 8,
    DDP_CAP_ALLOCATES = 16, /* alloc gives memory that collectives need not copy */
    DDP_CAP_WEIGHTED = 32   /* applies ddp_coll.weight itself, in the pass that adds */
};

typedef enum ddp_coll_kind {
    DDP_COLL_ALL_REDUCE,
    DDP_COLL_BROADCAST,
    DDP_COLL_ALL_GATHER,
    DDP_COLL_REDUCE_SCATTER,
    DDP_COLL_BARRIER
} ddp_coll_kind;

/* What each rank shows the others before data moves. Fixed size, compared byte for byte up to `name`'s end. */
typedef struct ddp_signature {
    int32_t kind, reduce, root, dtype;
    int32_t on_device; /* 1: memory of a GPU */
    int32_t unused;
    int64_t count;  /* elements of the input */
    char name[48];  /* bucket or the user's name, "" when none */
    char where[96]; /* the user's line; not compared */
} ddp_signature;

/* One collective. Sizes in elements.
 *   ALL_REDUCE      in place on buf[count]
 *   BROADCAST       in place on buf[count], from root
 *   ALL_GATHER      in[count] of each rank -> buf[count * size], by rank
 *   REDUCE_SCATTER  in[count * size] -> buf[count], the rank's part */
typedef struct ddp_coll {
    ddp_signature sig;
    const void *in;
    void *buf;
    int64_t count;
    ddp_dtype dtype;
    int device; /* where in and buf lie; with CAP_DEVICE also on a GPU */
    int reduce; /* DDP_SUM, DDP_MEAN, DDP_MIN, DDP_MAX */
    int root;
    double weight;     /* with CAP_WEIGHTED and MEAN: result = sum(w*x) / sum(w); 1 by default; 0: contributes nothing.
                             With SUM: weight 0 contributes nothing. When all weights are 0 the result is 0. */
    double deadline_s; /* seconds a wait may last, from the moment it begins; <= 0: for ever */
    const volatile int *late; /* NULL, or what another thread sets to 1 to say that the wait has lasted too long */
    uint32_t number;          /* what errors call it, "#412"; 0: as the engine counts */
    double share;             /* not 0: what weight_sum adds up in place of weight, for an engine made of engines */
    double weight_sum;        /* [OUT] after completion: sum of weights of the ranks */
} ddp_coll;

/* What an engine is given. */
typedef struct ddp_boot {
    int rank, size;             /* of the world */
    int local_rank, local_size; /* of the host */
    ddp_store *store;
    const char *prefix; /* for its keys in the store */
    double timeout;     /* seconds */
    int cores;          /* usable by all local ranks together */
    int node_rank;      /* which host this is, from 0 */
    const int *called;  /* [size]: what errors call the ranks; NULL: their numbers. Stays as long as the communicator */
} ddp_boot;

typedef struct ddp_engine {
    unsigned size; /* sizeof(ddp_engine) */
    const char *name;
    unsigned caps;
    int (*probe)(char *why, size_t n);                 /* 0 when usable; else why not. No side effects */
    int (*init)(ddp_comm **out, const ddp_boot *boot); /* collective, obeys the timeout */
    int (*alloc)(ddp_comm *c, size_t bytes,
                 void **out); /* collective, same bytes on all ranks; bucket memory; zeroed */
    void (*dealloc)(ddp_comm *c, void *p);
    int (*post)(ddp_comm *c, const ddp_coll *coll, ddp_req **out); /* coll is copied; its buffers must stay */
    int (*test)(ddp_req *r);                     /* 1 done, 0 not yet, negative error; drives progress */
    int (*wait)(ddp_req *r);                     /* 0 or error: done, deadline or abort; errors name who is missing */
    double (*weight_sum)(const ddp_req *r);      /* of a finished one */
    void (*req_free)(ddp_req *r);                /* only after done or error */
    int (*health)(ddp_comm *c);                  /* 0, or the status that killed it; error text set */
    void (*abort)(ddp_comm *c, const char *why); /* from any thread, idempotent: wakes all ranks */
    void (*destroy)(ddp_comm *c, int graceful);
    /* With CAP_DEVICE, the same as alloc and dealloc for memory of a GPU (DDP_CUDA(i)). */
    int (*alloc_on)(ddp_comm *c, int device, size_t bytes, void **out);
    void (*dealloc_on)(ddp_comm *c, int device, void *p, size_t bytes);
} ddp_engine;

extern const ddp_engine ddp__engine_shm;
DDP_LOCAL const ddp_engine *ddp__engine_hier(void);
/* "nccl": GPU memory by NCCL, host memory and all that ranks tell one another by `host` (gpu.c). */
DDP_LOCAL const ddp_engine *ddp__engine_gpu(const ddp_engine *host);
/* The engine called `name` (NULL, "" and auto: the best one for these ranks) for a world of `size` ranks, `local_size` of
 * them on this host. Plug-ins are loaded from the folder of libddp. Refuses what is unknown, not built or unusable. */
DDP_LOCAL int ddp__pick_engine(const char *name, int size, int local_size, const ddp_engine **out);
/* What a plug-in exports as ddp_plugin_engine. */
typedef const ddp_engine *(*ddp_plugin_engine_fn)(void);

/* What peers are told of a mismatch: both calls in words, into text. */
DDP_LOCAL const char *ddp__signature_text(const ddp_signature *s, char *text, size_t n);
DDP_LOCAL bool ddp__signature_equal(const ddp_signature *a, const ddp_signature *b);
/* With the number of the call: "all_reduce #412 sum (f32 x 4096, bucket 3, train.lua:57)". */
DDP_LOCAL const char *ddp__signature_call(const ddp_signature *s, uint32_t seq, char *text, size_t n);

/* What errors call k, the engine's seq-th. */
static inline uint32_t ddp__number(const ddp_coll *k, uint32_t seq) { return k->number ? k->number : seq; }

/* What an engine asks before it takes c: 0, or DDP_EDTYPE for a mean of whole numbers. */
DDP_API int ddp__coll_check(const ddp_coll *c);

/* What errors call rank r of b. */
static inline int ddp__called(const ddp_boot *b, int r) { return b->called ? b->called[r] : r; }

/* Every rank says that it is here and what world it thinks it is in; then all look at all. Obeys the timeout: a rank
 * that does not come is named (DDP_ETIMEOUT), so are two of one number and worlds that differ (DDP_EMISMATCH). */
DDP_LOCAL int ddp__roll_call(const ddp_boot *b);

#endif
