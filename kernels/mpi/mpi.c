/* mpi.c -- bytes between ranks through MPI; everything else is core/comm/wire.c's. Compiled twice, against Open MPI and
 * against MPICH. All MPI calls are made on the queue's thread, which also initializes MPI; it polls, since a blocking call
 * of MPI hangs for ever when a peer is stopped. */
#include <mpi.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "pmi.h"

#if defined(OPEN_MPI)
#define LIBRARY "Open MPI"
#define STARTER "mpirun.openmpi"
#else
#define LIBRARY "MPICH"
#define STARTER "mpirun.mpich"
#endif

enum { MOST = 1 << 30, TAG = 7 }; /* bytes of one message: MPI counts in int */
#define SPIN_S 1e-3               /* a poll yields the core this long, then it sleeps between */
#define NAP_NS 50000

typedef struct wire {
    MPI_Comm comm;
    MPI_Request *requests;
    int room;
    bool ours; /* we have initialized MPI, so we finalize it */
    atomic_int stopped;
} wire;

static int failed(const char *what, int rc) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int n = 0;
    MPI_Error_string(rc, text, &n);
    return ddp__fail(DDP_EIO, "mpi: %s: %.300s", what, text);
}

/* ---- joining -------------------------------------------------------------------------------------------------------- */

static bool is_set(const char *name) {
    const char *s = getenv(name);
    return s && *s;
}

/* Has MPI's own launcher, or one that speaks for it, started us? */
static bool launched(void) {
    return is_set("OMPI_COMM_WORLD_SIZE") || is_set("PMIX_RANK") || is_set("PMI_FD") || is_set("PMI_PORT") ||
           is_set("PMI_SIZE");
}

static int initialize(wire *w) {
    int done = 0, given;
    MPI_Initialized(&done);
    if (done) return 0;
    int rc = MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &given);
    w->ours = rc == MPI_SUCCESS;
    return rc == MPI_SUCCESS ? 0 : ddp__fail(DDP_EIO, "init: " LIBRARY " does not start (MPI_Init: %d)", rc);
}

/* MPI's world in our order of ranks. */
static int take_world(wire *w, const ddp_boot *b) {
    int size = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (size != b->size)
        return ddp__fail(DDP_EMISMATCH, "init: WORLD_SIZE is %d, but " LIBRARY " has %d ranks; start all with " STARTER,
                         b->size, size);
    int rc = MPI_Comm_split(MPI_COMM_WORLD, 0, b->rank, &w->comm);
    return rc == MPI_SUCCESS ? 0 : failed("MPI_Comm_split", rc);
}

static int join(void **self, const ddp_boot *b) {
    static atomic_int joined;
    if (atomic_exchange(&joined, 1)) return ddp__fail(DDP_ESTATE, "init: MPI can be joined once in a process");
    bool by_mpi = launched();
    if (b->called && by_mpi) /* only some of the ranks come here, and MPI_Init waits for all */
        return ddp__fail(DDP_ENOSUP, "init: hier over MPI does not work under " STARTER "; take --engine mpi");
    wire *w = calloc(1, sizeof *w);
    if (!w) return ddp__fail(DDP_ENOMEM, "mpi: out of memory");
    int st = 0;
#if defined(OPEN_MPI)
    if (!by_mpi) /* its MPI_Comm_accept needs a server that mpirun starts */
        st = ddp__fail(DDP_ENOSUP, "init: Open MPI joins ranks only under its own launcher; start them with " STARTER
                                   ", or build with MPICH (libmpich-dev), or take --engine gloo");
    if (st == 0) st = initialize(w);
#else
    if (!by_mpi) st = pmi_begin(b);
    if (st == 0) st = initialize(w);
    if (!by_mpi) pmi_end();
#endif
    if (st == 0) st = take_world(w, b);
    if (st < 0) {
        free(w);
        return st;
    }
    MPI_Comm_set_errhandler(w->comm, MPI_ERRORS_RETURN);
    *self = w;
    return 0;
}

/* ---- exchanging ------------------------------------------------------------------------------------------------------- */

static int need_requests(wire *w, int n) {
    if (n <= w->room) return 0;
    MPI_Request *more = realloc(w->requests, (size_t)n * sizeof *more);
    if (!more) return ddp__fail(DDP_ENOMEM, "mpi: out of memory");
    w->requests = more;
    w->room = n;
    return 0;
}

/* Starts all parts in messages of at most MOST bytes; *n counts requests. An MPI code. */
static int start(wire *w, const ddp_part *part, int n_parts, bool receive, int *n, int *rank) {
    for (int i = 0; i < n_parts; i++) {
        for (size_t at = 0; at < part[i].n; at += MOST) {
            int bytes = part[i].n - at < MOST ? (int)(part[i].n - at) : MOST;
            if (need_requests(w, *n + 1) < 0) return MPI_ERR_NO_MEM;
            MPI_Request *q = &w->requests[*n];
            char *p = (char *)part[i].p + at;
            *rank = part[i].rank;
            int rc = receive ? MPI_Irecv(p, bytes, MPI_BYTE, part[i].rank, TAG, w->comm, q)
                             : MPI_Isend(p, bytes, MPI_BYTE, part[i].rank, TAG, w->comm, q);
            if (rc != MPI_SUCCESS) return rc;
            ++*n;
        }
    }
    *rank = -1;
    return MPI_SUCCESS;
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wstringop-overflow" /* MPICH's MPI_STATUSES_IGNORE is the address 1 */
static int wait_all(wire *w, int n) {
    double begin = 0;
    for (uint32_t tries = 1;; tries++) {
        int done = 0, rc = MPI_Testall(n, w->requests, &done, MPI_STATUSES_IGNORE);
        if (rc != MPI_SUCCESS || done) return rc;
        if (atomic_load_explicit(&w->stopped, memory_order_relaxed)) return MPI_ERR_OTHER;
        if (tries % 16) continue;
        double now = ddp_now();
        if (begin == 0) begin = now;
        if (now - begin < SPIN_S) {
            sched_yield();
        } else {
            struct timespec t = {0, NAP_NS};
            nanosleep(&t, NULL);
        }
    }
}

#pragma GCC diagnostic pop

static int exchange(void *self, const ddp_part *out, int n_out, const ddp_part *in, int n_in, int *lost) {
    wire *w = self;
    int n = 0, rc = MPI_ERR_OTHER;
    *lost = -1;
    if (!atomic_load(&w->stopped)) rc = start(w, in, n_in, true, &n, lost);
    if (rc == MPI_SUCCESS) rc = start(w, out, n_out, false, &n, lost);
    if (rc == MPI_SUCCESS) rc = wait_all(w, n);
    if (rc == MPI_SUCCESS) return 0;
    for (int i = 0; i < n; i++)
        if (w->requests[i] != MPI_REQUEST_NULL) MPI_Cancel(&w->requests[i]);
    return ddp__fail(DDP_EPEER, "mpi: a connection is lost");
}

static void stop(void *self) { atomic_store(&((wire *)self)->stopped, 1); }

static void leave(void *self, int graceful) {
    wire *w = self;
    /* MPI_Finalize waits for all ranks: only where all have said that they leave. */
    if (graceful && w->ours) MPI_Finalize();
    free(w->requests);
    free(w);
}

static int init(ddp_comm **out, const ddp_boot *b) {
    static const ddp_wire mpi = {"mpi", join, exchange, stop, leave};
    return ddp__wire_init(out, b, &mpi);
}

/* What core/comm/engines.c looks for. */
DDP_API const ddp_engine *ddp_plugin_engine(void);
const ddp_engine *ddp_plugin_engine(void) {
    static ddp_engine engine;
    if (!engine.size) ddp__queue_engine(&engine, "mpi", init);
    return &engine;
}
