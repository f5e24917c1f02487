/* progress.h -- where the training stands, kept by phase.c for others to read. */
#ifndef DDP_PROGRESS_H
#define DDP_PROGRESS_H

#include <stdatomic.h>

#include "base.h"

typedef struct ddp_progress {
    atomic_int phase;   /* ddp_phase */
    atomic_llong steps; /* that have ended */
} ddp_progress;

/* From now on it is kept in p, which must stay. */
DDP_LOCAL void ddp__progress_show(ddp_progress *p);
/* Called at each step's end with the number of steps that have ended; NULL: nothing. */
DDP_LOCAL extern void (*ddp__step_ended)(int64_t steps);

#endif
