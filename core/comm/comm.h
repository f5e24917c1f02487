/* comm.h -- the job as the rest of comm sees it: one engine, one communicator of all ranks. */
#ifndef DDP_COMM_H
#define DDP_COMM_H

#include "../grad/tape.h"
#include "engine.h"
#include "environment.h"

struct ddp_group {
    int n, rank; /* rank: this one's place in it, -1 outside */
    int *ranks;  /* [n] of the job, ascending; owned */
    char prefix[64];
    char text[128];  /* "{0, 1}" */
    ddp_comm *comm;  /* NULL outside, of one rank, and after finish */
    ddp_group *next; /* of all */
};

typedef struct ddp_job {
    bool initialized;
    int rank, size, local_rank, local_size;
    ddp_environment env;
    double timeout;           /* seconds */
    const ddp_engine *engine; /* NULL in a world of one */
    ddp_comm *comm;
    ddp_store *store;
    ddp_store_server *server; /* of a world started by hand, on rank 0 */
    bool solo;                /* inside ddp.rank0: no collectives */
    ddp_boot boot;            /* what the engine was given */
    ddp_group *group;         /* that collectives are of now; NULL: all ranks */
} ddp_job;
DDP_LOCAL extern ddp_job ddp__job;

/* ---- group.c ---- */
/* Of the group in force: its communicator, size, and the place of a rank of the job (negative: an error, `what` in its text). */
DDP_LOCAL ddp_comm *ddp__comm_here(void);
DDP_LOCAL int ddp__size_here(void);
DDP_LOCAL int ddp__place_here(const char *what, const char *who, int rank);
/* st; where it is an error inside a group its text says of whom it speaks: engines count ranks in their communicator. */
DDP_LOCAL int ddp__group_note(int st);
DDP_LOCAL void ddp__groups_abort(const char *why);
DDP_LOCAL void ddp__groups_leave(void);
/* ddp_all_reduce and ddp_broadcast: in place on t; root counts in the group in force. */
DDP_LOCAL int ddp__in_place(ddp_coll_kind kind, const char *what, ddp_tensor *t, int reduce, int root, const char *name,
                            ddp_work **out);

/* ---- comm.c, job.c ---- */
/* Joins if need be; a status. `what` is for the error inside rank0. */
DDP_LOCAL int ddp__job_ready(const char *what);
/* Starts coll on the communicator of the group in force and, without `req`, waits for it. Fills in where. World of more than one. */
DDP_LOCAL int ddp__coll_run(ddp_coll *coll, ddp_req **req);
/* Waits for a request, its time counted as exposed communication; frees it. */
DDP_LOCAL int ddp__coll_wait(ddp_req *req, double *weight_sum);
/* A coll on `count` elements at buf. */
DDP_LOCAL ddp_coll ddp__coll(ddp_coll_kind kind, const void *in, void *buf, int64_t count, ddp_dtype dtype,
                             const char *name);
/* A line for the launcher ("joined", "finished", "error ..."); nothing without one. */
DDP_LOCAL void ddp__tell_launcher(const char *line);

#endif
