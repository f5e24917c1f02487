/* shm.h -- collectives of the ranks of one host over shared memory.
 *
 * One control segment, made by rank 0: a block a rank with its counters, and two slots a rank for chunks of private
 * buffers. Buckets live in segments of their own, mapped by all ranks, and are reduced where they lie.
 *
 * Every rank runs the same sequence of collectives. A request is published by its signature in the rank's ring and the
 * counter `posted`; then
 *   in place    (all buffers at one offset of one bucket segment): each rank reduces its share over all copies, writes the
 *               result into every copy and counts `shared`; done when all have. A broadcast reads the root's copy.
 *   by chunks   each rank copies a chunk into its slot and counts `copied`; when all have, each reads the slots in rank
 *               order and counts `consumed`; a slot is written again when all have consumed what it held.
 *   split       (large all-reduces, by chunks): between the two each rank reduces its share of the chunk, leaves the
 *               result in its slot and counts `reduced`; what is read then are the shares of the others.
 * Every number is computed by one rank, or by all from the same values in the same order, so all ranks hold the same bits. */
#ifndef DDP_SHM_H
#define DDP_SHM_H

#include <pthread.h>
#include <stdatomic.h>

#include "engine.h"
#include "reduce.h"

enum {
    SHM_RING = 64,
    SHM_MAX_RANKS = 64,
    SHM_MAX_SEGMENTS = 4096,
    SHM_SLOTS = 4,
    SHM_CHUNK = 128 << 10,
    SHM_SPLIT = 32 << 10 /* bytes from which a third exchange costs less than each rank's adding all up itself */
};

/* What a rank shows of one request. */
typedef struct shm_entry {
    ddp_signature sig;
    double weight;
    int64_t segment; /* serial number of the buffer's; -1: private */
    int64_t offset;  /* bytes into the rank's part of it */
} shm_entry;

enum { SHM_HERE, SHM_LEFT, SHM_FAILED }; /* shm_rank.left */

typedef struct shm_rank {
    _Alignas(64) atomic_uint posted;
    _Alignas(64) atomic_uint shared; /* requests that need this rank's ring no more */
    _Alignas(64) atomic_uint copied;
    _Alignas(64) atomic_uint reduced;
    _Alignas(64) atomic_uint consumed;
    _Alignas(64) atomic_uint bell; /* a futex: rung for the rank when it waits and something changed */
    atomic_uint waiting;
    atomic_int pid, left;
    atomic_ulong pid_space; /* process numbers mean the same to ranks that share it; 0: unknown */
    shm_entry ring[SHM_RING];
} shm_rank;

typedef struct shm_control {
    atomic_int aborted; /* 1 being written, 2 text is there */
    int abort_rank;
    char abort_text[512];
    shm_rank rank[SHM_MAX_RANKS];
} shm_control;

typedef struct shm_segment {
    char *base; /* of all parts; part r begins at r * part. NULL: free */
    size_t part;
    int64_t serial;
} shm_segment;

typedef enum shm_state { SHM_WAIT_POSTED, SHM_WAIT_SHARED, SHM_CHUNKS, SHM_DONE } shm_state;

struct ddp_req {
    ddp_comm *comm;
    ddp_req *next;
    ddp_coll coll;
    uint32_t seq; /* counted from 1 */
    bool published, split;
    shm_state state;
    uint64_t same; /* bit r: rank r has posted it and makes the same call */
    int64_t n_chunks, chunk_elems;
    int64_t in, mid, out; /* chunks copied in, reduced (when split), read */
    uint32_t base;        /* chunks of the requests before */
    double weight_sum;
};

struct ddp_comm {
    int rank, size;
    ddp_boot boot;
    bool spin;
    double timeout;
    shm_control *ctl; /* NULL after destroy */
    char *slots;      /* [size][SHM_SLOTS][SHM_CHUNK] */
    size_t ctl_bytes;
    ddp_store *store;
    char prefix[64];
    shm_segment segments[SHM_MAX_SEGMENTS];
    int n_segments;
    int64_t n_allocs;
    ddp_req *head, *tail; /* in order; finished ones are off the list */
    int n_reqs;           /* given out and not freed */
    uint32_t next_seq, chunks;
    uint64_t moves;        /* steps that led somewhere */
    pthread_mutex_t death; /* guards text until status is set */
    atomic_int status;     /* what killed it */
    char text[1024];
    double delay; /* seconds, put in by DDP_FAULT=delay:MS */
};

/* ---- shm_run.c -------------------------------------------------------------------------------------------------- */
/* Shows new requests to the others and moves those at the head as far as they go without waiting; without `end` none
 * is ended that would have to sleep first (DDP_FAULT). 0, or the status that killed the communicator. */
DDP_LOCAL int shm_progress(ddp_comm *c, bool end);
DDP_LOCAL bool shm_finished(const ddp_req *r);
DDP_LOCAL int shm_wait(ddp_req *r);
/* Records what killed c and sets the error; returns the status. */
DDP_LOCAL int shm_die(ddp_comm *c, int status, const char *fmt, ...) DDP_PRINTF(3, 4);
/* The recorded error again; 0 when alive. Also sees an abort by another rank. */
DDP_LOCAL int shm_health(ddp_comm *c);
/* Says to all that this rank waits for nobody any more (SHM_LEFT, SHM_FAILED). */
DDP_LOCAL void shm_leave(ddp_comm *c, int how);
DDP_LOCAL void shm_abort(ddp_comm *c, const char *why);

/* ---- shm_coll.c: where bytes move ------------------------------------------------------------------------------- */
static inline shm_entry *shm_entry_of(const ddp_comm *c, int rank, uint32_t seq) {
    return &c->ctl->rank[rank].ring[seq % SHM_RING];
}
/* The bucket segment in which p lies, NULL when in none. */
DDP_LOCAL const shm_segment *shm_find_segment(const ddp_comm *c, const void *p, size_t bytes, int64_t *offset);
/* My share of a bucket: all copies in, the result into all of them. Of a broadcast: the root's copy into mine. */
DDP_LOCAL void shm_in_place(ddp_comm *c, ddp_req *r);
DDP_LOCAL void shm_copy_in(ddp_comm *c, ddp_req *r, int64_t chunk);
DDP_LOCAL void shm_reduce_chunk(ddp_comm *c, ddp_req *r, int64_t chunk);
DDP_LOCAL void shm_read_chunk(ddp_comm *c, ddp_req *r, int64_t chunk);
/* Elements that go through the slots in all. */
static inline int64_t shm_elements(const ddp_comm *c, const ddp_req *r) {
    return r->coll.sig.kind == DDP_COLL_REDUCE_SCATTER ? r->coll.count * c->size : r->coll.count;
}

#endif
