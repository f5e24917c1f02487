/* fault.h -- faults put in on purpose, for tests and for users who want to see what their script does:
 *
 *   DDP_FAULT="rank=1 step=20 at=all_reduce do=kill"
 *
 *   rank=R      the rank that it befalls (default: each)
 *   node=I      or all ranks of that host
 *   step=N      in the N-th step of the optimizer, counted from 1 (default: any)
 *   call=N      at the N-th call of the kind `at`, counted from 1 within that step, or in all without `step`
 *   restart=K   in the K-th restart only (default 0: the first run, so that a job that restarts goes on)
 *   at=WHERE    all_reduce, broadcast, all_gather, reduce_scatter, barrier: as it is called; init: before the rank joins;
 *               step: after the step (default: the first collective that the other words leave)
 *   do=WHAT     kill  stop  segv  abort  exit:STATUS    of the process
 *               throw         the call is an error
 *               delay:MS      the call comes later
 *               skip          the rank leaves the call out
 *               flip          one bit of the result changes, on this rank alone
 *
 * A fault happens once; a delay without step and call happens at each call. `DDP_FAULT=delay:MS` is another thing: it makes
 * the transport of the shm engine slower on all ranks. */
#ifndef DDP_FAULT_H
#define DDP_FAULT_H

#include "engine.h"

/* What the caller has to do itself. */
typedef enum ddp_fault_do { DDP_FAULT_NONE, DDP_FAULT_SKIP, DDP_FAULT_FLIP } ddp_fault_do;

/* Reads DDP_FAULT; DDP_EINVAL naming the word that is wrong. */
DDP_LOCAL int ddp__fault_read(int rank, int node);
DDP_LOCAL int ddp__fault_at_init(void);
DDP_LOCAL int ddp__fault_at_collective(const ddp_signature *sig, ddp_fault_do *out);
/* Turns around one bit of n bytes. */
DDP_LOCAL void ddp__fault_flip(void *p, size_t n);

#endif
