/* base.h -- what every room stands on: status and error text, log, clock, counter-based random numbers. */
#ifndef DDP_BASE_H
#define DDP_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../ddp.h"

#define DDP_LOCAL __attribute__((visibility("hidden")))
#define DDP_PRINTF(f, a) __attribute__((format(printf, f, a)))

/* ---- errors (error.c) -------------------------------------------------------------------------------------------
 * Sticky per thread: the first failure stays until ddp_error_take; later failures do not replace it. */

/* Records a failure and returns `status`; when one is pending already, returns the pending status. */
DDP_API int ddp__fail(int status, const char *fmt, ...) DDP_PRINTF(2, 3);
/* The pending status of this thread, 0 when none. */
DDP_API int ddp__pending(void);
/* Takes a pending error aside (status and text) so that clean-up code can run ops, and puts it back. */
typedef struct ddp_saved_error {
    int status;
    char *text; /* owned */
} ddp_saved_error;
DDP_API void ddp__error_save(ddp_saved_error *e);
DDP_API void ddp__error_restore(ddp_saved_error *e);

/* ---- forks (error.c) --------------------------------------------------------------------------------------------
 * Threads, locks and the place in the job do not survive fork(): from this call on, a child that is forked gets
 * DDP_ESTATE from every call, since ddp__pending says so. Programs that are executed are not meant. Any thread. */
void ddp__forbid_fork(void);
/* Whether this process is such a child. */
DDP_API bool ddp__forked(void);

/* ---- log (log.c): DDP_DEBUG=1 turns debug lines on; a hook of the host's replaces stderr ------------------------ */
enum { DDP_LOG_DEBUG, DDP_LOG_INFO, DDP_LOG_WARN };
DDP_API void ddp__log(int level, const char *fmt, ...) DDP_PRINTF(2, 3);

/* ---- clock: seconds, monotonic ---------------------------------------------------------------------------------- */
DDP_API double ddp__now(void);

/* ---- threads (threads.c) ----------------------------------------------------------------------------------------- */
int ddp__cores(void); /* usable cores: affinity and cgroup quota, at least 1 */

/* ---- phases of a step (phase.c): where the compute thread's time goes -------------------------------------------- */
typedef enum ddp_phase {
    DDP_PHASE_FORWARD,
    DDP_PHASE_DATA,
    DDP_PHASE_BACKWARD,
    DDP_PHASE_COMM,
    DDP_PHASE_OPTIMIZER,
    DDP_PHASES
} ddp_phase;
/* Time from now on counts for `phase`, on the thread that trains; returns the phase before, to be put back. */
ddp_phase ddp__phase_enter(ddp_phase phase);

/* ---- Philox 4x32-10 (philox.c) ------------------------------------------------------------------------------------
 * Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A pure function of (key, counter):
 * the same draw wherever and in whatever order it is asked for. */
DDP_API void ddp__philox(uint64_t key, uint64_t ctr_lo, uint64_t ctr_hi, uint32_t out[4]);
/* Uniform in [0, 1) with 24 and 53 bits. */
static inline float ddp__unit_f32(uint32_t r) { return (float)(r >> 8) * 0x1p-24f; }
static inline double ddp__unit_f64(uint32_t hi, uint32_t lo) {
    return (double)((((uint64_t)hi << 32) | lo) >> 11) * 0x1p-53;
}
/* A second key made from one (splitmix64): keys by rank, by worker. */
static inline uint64_t ddp__mix(uint64_t key, uint64_t salt) {
    uint64_t z = key + 0x9e3779b97f4a7c15u * (salt + 1);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* A generator: key and the number of calls drawn so far; see ddp_generator_new. */
struct ddp_generator {
    uint64_t key;
    uint64_t calls;
    bool per_rank;
};
/* What a random op draws with: its key and its high counter word. The low word is the logical position. */
typedef struct ddp_rng {
    uint64_t key, call;
} ddp_rng;
/* The next call of the thread's generator; `per_rank` mixes the rank into the key (dropout). */
ddp_rng ddp__rng_next(bool per_rank);

#endif
