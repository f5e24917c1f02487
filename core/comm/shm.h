/* shm.h -- collectives of the ranks of one host over shared memory.
 *
 * One control segment, made by rank 0: a block a rank with its counters, and two slots a rank for chunks of private
 * buffers. Buckets live in segments of their own, mapped by all ranks, and are reduced where they lie.
 *
 * Every rank runs the same sequence of collectives. A request is published by its signature in the rank's ring and the
 * counter `posted`; then
 *   in place    (all buffers at one offset of one bucket segment): each rank reduces its share over all copies, writes the
 *               result into every copy and counts `shared`; done when all have.
 *   by chunks   each rank copies a chunk into its slot and counts `copied`; when all have, each reads the slots in rank
 *               order and counts `consumed`; a slot is written again when all have consumed what it held.
 * Every result is computed from the same values in the same order, so all ranks hold the same bits. */
#ifndef DDP_SHM_H
#define DDP_SHM_H

#include <stdatomic.h>

#include "../tensor/tensor.h"
#include "engine.h"

enum { SHM_RING = 64, SHM_MAX_RANKS = 64, SHM_CHUNK = 256 << 10, SHM_MAX_SEGMENTS = 4096 };

/* What a rank shows of one request. */
typedef struct shm_entry {
    ddp_signature sig;
    double weight;
    int32_t segment; /* of the buffer; -1: private */
    int64_t offset;  /* bytes into the rank's part of it */
} shm_entry;

typedef struct shm_rank {
    _Alignas(64) atomic_uint posted;
    _Alignas(64) atomic_uint shared;
    _Alignas(64) atomic_uint copied;
    _Alignas(64) atomic_uint consumed;
    _Alignas(64) atomic_uint bell; /* a futex: rung for the rank when it waits and something changed */
    atomic_uint waiting;
    atomic_int pid, left;
    shm_entry ring[SHM_RING];
} shm_rank;

typedef struct shm_control {
    atomic_int aborted; /* 1 being written, 2 text is there */
    int abort_rank;
    char abort_text[512];
    shm_rank rank[SHM_MAX_RANKS];
} shm_control;

typedef struct shm_segment {
    char *base; /* of all parts; part r begins at r * part */
    size_t part;
} shm_segment;

typedef enum shm_state { SHM_WAIT_POSTED, SHM_WAIT_SHARED, SHM_COPY_IN, SHM_READ, SHM_DONE } shm_state;

struct ddp_req {
    ddp_comm *comm;
    ddp_req *next;
    ddp_coll coll;
    uint32_t seq; /* counted from 1 */
    bool published;
    shm_state state;
    int64_t chunk, n_chunks, chunk_elems;
    uint32_t base; /* chunks of the requests before */
    double weight_sum;
};

struct ddp_comm {
    int rank, size, spin;
    double timeout;
    shm_control *ctl;
    char *slots; /* [size][2][SHM_CHUNK] */
    size_t ctl_bytes;
    ddp_store *store;
    char prefix[64];
    shm_segment segments[SHM_MAX_SEGMENTS];
    int n_segments;
    ddp_req *head, *tail; /* in order; finished ones are off the list */
    uint32_t next_seq, chunks;
    int status; /* what killed it */
    char text[768];
    double delay; /* seconds, put in by DDP_FAULT=delay:MS */
};

/* ---- shm_run.c -------------------------------------------------------------------------------------------------- */
/* Moves the requests at the head as far as they go without waiting. 0, or the status that killed the communicator. */
DDP_LOCAL int shm_progress(ddp_comm *c);
DDP_LOCAL int shm_wait(ddp_req *r);
/* Records what killed c and sets the error; returns the status. */
DDP_LOCAL int shm_die(ddp_comm *c, int status, const char *fmt, ...) DDP_PRINTF(3, 4);
/* The recorded error again; 0 when alive. Also sees an abort by another rank. */
DDP_LOCAL int shm_health(ddp_comm *c);
/* Wakes every rank that waits. */
DDP_LOCAL void shm_ring(ddp_comm *c);
DDP_LOCAL void shm_abort(ddp_comm *c, const char *why);

/* ---- shm_reduce.c ------------------------------------------------------------------------------------------------ */
/* out[k][i] = reduce over r of in[r][i], for all n_out outputs; inputs in rank order. weights [n_in]; MEAN divides by
 * their sum; a weight of 0 contributes nothing. Outputs may be the inputs. */
DDP_LOCAL void shm_reduce(ddp_dtype dtype, int reduce, int n_in, const void *const *in, const double *weights,
                          int n_out, void *const *out, int64_t n);

#endif
