/* nccl_world.h -- the inside of the double of NCCL: what the ranks of a communicator share, and one rank's part in it.
 *
 * Ranks may be threads or processes. They meet in a memory file that nobody names in a folder: the rank that made the unique id holds it,
 * the others open it through /proc. A message goes through the file in pieces: each rank puts its piece in its slot, waits until all
 * have, and works on all of them in rank order, so that results are the same bits everywhere. */
#ifndef DDP_DOUBLE_NCCL_WORLD_H
#define DDP_DOUBLE_NCCL_WORLD_H

#include "double.h"

#pragma GCC visibility push(default)
#include <nccl.h>
#pragma GCC visibility pop

#include <stdatomic.h>

enum { MOST_RANKS = 16, SLOT_BYTES = 4 << 20, MAIL_BYTES = 256 << 10 };

typedef enum call_kind { ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND, RECV } call_kind;

/* What the ranks must agree on. */
typedef struct signature {
    uint64_t number, count; /* of the collectives of this communicator; elements */
    int32_t kind, type, op, root;
} signature;

typedef struct shared_rank {
    atomic_int pid;
    unsigned char uuid[16];
    int32_t bus;
    _Atomic uint64_t posted,
        finished; /* pieces that it has put into its slot; that it has done with the slots of all */
    signature call;
} shared_rank;

typedef struct mailbox {             /* from one rank to one */
    _Atomic uint64_t written, taken; /* messages' pieces */
    uint64_t bytes;                  /* of the whole message */
    int32_t type;
    char data[MAIL_BYTES];
} mailbox;

typedef struct world {
    uint64_t nonce;
    _Atomic uint32_t ranks, joined;
    shared_rank rank[MOST_RANKS];
    char slot[MOST_RANKS][SLOT_BYTES];
    mailbox mail[MOST_RANKS][MOST_RANKS];
} world;

/* ---- joining (nccl_world.c) ---------------------------------------------------------------------------------------- */
ncclResult_t world_name(ncclUniqueId *id);
/* Maps the world and takes a seat in it. */
ncclResult_t world_join(const ncclUniqueId *id, int ranks, int rank, int device, world **out);
bool world_is_complete(const world *w);
/* All are there: ncclSuccess, or two of them use one GPU. */
ncclResult_t world_check(const world *w);
void world_leave(world *w);
void set_last_error(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- one call (nccl_call.c) ---------------------------------------------------------------------------------------- */
typedef struct ncclComm {
    world *w;
    int rank, ranks, device, refs;
    bool blocking, checked, aborted, finalized,
        answered;               /* answered: the caller has been told that the last call is through */
    uint64_t turn, collectives; /* pieces and calls so far */
    uint64_t queued, next;      /* batches: number of the next that is queued, that runs */
    int pending;                /* batches in the queues */
    ncclResult_t async;
    struct scale {
        bool used, on_device;
        double value;
        const void *at;
        ncclDataType_t type;
    } scales[64]; /* reductions made by ncclRedOpCreatePreMulSum */
} ncclComm;

typedef struct call {
    ncclComm *comm;
    call_kind kind;
    const char *in;
    char *out;
    size_t count; /* elements: as NCCL counts for this call */
    ncclDataType_t type;
    int op, root; /* root: or the peer */
    struct scale scale;
    /* where it is: */
    size_t done; /* elements, or bytes of a message */
    bool started, posted, wrong; /* wrong: it never ends */
    bool spoiled;                /* its first element comes out changed */
    uint64_t number;
} call;

/* Goes on with a call: true when it is done (and begins anew next time). */
bool advance(call *c);
size_t element_bytes(ncclDataType_t type);
const char *type_name(int type);

/* ---- arithmetic (nccl_reduce.c) ------------------------------------------------------------------------------------ */
/* out[i] = the ranks' pieces reduced in rank order; from[r] is rank r's. */
void reduce(void *out, const char *const *from, int ranks, size_t n, ncclDataType_t type, int op);
/* to[i] = from[i] * by */
void scale_copy(void *to, const void *from, size_t n, ncclDataType_t type, double by);
double read_scalar(const void *p, ncclDataType_t type);

#endif
