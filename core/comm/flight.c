/* flight.c -- a rank's own record of what it does. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "flight.h"

static ddp_flight own; /* where there is no launcher */
static ddp_flight *record = &own;
static const ddp_req *reqs[DDP_FLIGHT_CALLS]; /* of the calls in the ring */

void ddp__flight_open(int local_rank) {
    const char *fd_text = getenv("DDP_FLIGHT_FD");
    struct stat s;
    size_t bytes = (size_t)(local_rank + 1) * sizeof own;
    if (fd_text && record == &own && fstat(atoi(fd_text), &s) == 0 && (size_t)s.st_size >= bytes) {
        ddp_flight *all = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, atoi(fd_text), 0);
        if (all != MAP_FAILED) record = all + local_rank;
    }
    record->since = ddp__now();
    ddp__progress_show(&record->progress);
}

uint32_t ddp__flight_post(const ddp_signature *sig, bool patient) {
    uint32_t seq = atomic_load_explicit(&record->posted, memory_order_relaxed) + 1;
    ddp_flight_call *c = &record->call[seq % DDP_FLIGHT_CALLS];
    atomic_store(&c->seq, 0);
    c->sig = *sig;
    c->posted = ddp__now();
    c->patient = patient;
    reqs[seq % DDP_FLIGHT_CALLS] = NULL;
    atomic_store(&c->seq, seq);
    atomic_store(&record->posted, seq);
    return seq;
}

void ddp__flight_req(uint32_t seq, const ddp_req *req) { reqs[seq % DDP_FLIGHT_CALLS] = req; }

/* The number of req, 0 when the ring has it no more. */
static uint32_t number_of(const ddp_req *req) {
    for (int i = 0; i < DDP_FLIGHT_CALLS; i++)
        if (reqs[i] == req) return atomic_load(&record->call[i].seq);
    return 0;
}

void ddp__flight_wait(const ddp_req *req) {
    record->since = ddp__now();
    atomic_store(&record->waits, number_of(req));
}

void ddp__flight_end(int status) {
    uint32_t seq = atomic_load(&record->waits);
    if (status < 0) { /* what it waited for stays readable */
        atomic_store(&record->failed, status);
        return;
    }
    record->since = ddp__now();
    if (seq > atomic_load(&record->done)) atomic_store(&record->done, seq);
    reqs[seq % DDP_FLIGHT_CALLS] = NULL; /* the engine frees it; its address may come again */
    atomic_store(&record->waits, 0);
}
