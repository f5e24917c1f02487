/* flight.h -- what each rank is doing: its last collectives, its phase, its step. It is written all the time and costs some
 * stores a collective. The records lie in memory that the launcher owns (DDP_FLIGHT_FD, a memfd of one record a local
 * rank), so that they can be read when the rank hangs, is stopped or dead; without a launcher, in the rank's own. */
#ifndef DDP_FLIGHT_H
#define DDP_FLIGHT_H

#include <stdatomic.h>

#include "../base/progress.h"
#include "engine.h"

enum { DDP_FLIGHT_CALLS = 32 };

/* One collective of a rank. Times are ddp__now seconds. */
typedef struct ddp_flight_call {
    atomic_uint seq; /* counted from 1; 0: none, or being written */
    ddp_signature sig;
    double posted;
    bool patient; /* a wait for it has no timeout */
} ddp_flight_call;

typedef struct ddp_flight {
    ddp_progress progress;
    atomic_uint posted; /* collectives begun */
    atomic_uint done;   /* the last one that is known to have ended */
    atomic_uint waits;  /* the one that the rank waits for; 0: for none */
    atomic_int failed;  /* how its last wait failed: a status */
    double since;       /* when that wait, or what follows `done`, began */
    ddp_flight_call call[DDP_FLIGHT_CALLS];
} ddp_flight;

/* ---- a rank (flight.c) ---- */

/* Maps the launcher's memory, else takes memory of its own. Never fails. */
DDP_LOCAL void ddp__flight_open(int local_rank);
/* A collective begins; its number. `req` is what it can be found by later. */
DDP_LOCAL uint32_t ddp__flight_post(const ddp_signature *sig, bool patient);
DDP_LOCAL void ddp__flight_req(uint32_t seq, const ddp_req *req);
/* The rank begins to wait for req, and ends it with a status. */
DDP_LOCAL void ddp__flight_wait(const ddp_req *req);
DDP_LOCAL void ddp__flight_end(int status);

/* ---- reading a record, by anybody (flight_read.c) ---- */

/* Copies call `seq` of f; false when the ring has it no more. */
DDP_LOCAL bool ddp__flight_call_of(const ddp_flight *f, uint32_t seq, ddp_flight_call *out);
/* "waits in all_reduce #412 ... since 2.0 s", "backward of step 20, 2.0 s after all_reduce #411 ...". */
DDP_LOCAL const char *ddp__flight_text(const ddp_flight *f, double now, char *text, size_t n);

#endif
