/* environment.h -- who this process is in its job, as whoever started it says through the environment. */
#ifndef DDP_ENVIRONMENT_H
#define DDP_ENVIRONMENT_H

#include "../base/base.h"

typedef struct ddp_environment {
    int rank, size, local_rank, local_size;
    bool hosts_known;     /* something said how many ranks are here: else one host is assumed */
    int node, nodes;      /* this host among the job's; -1 and 0 where nothing says it */
    const char *rank_var; /* the variable that gave the rank; NULL: no launcher, a world of one */
    const char *size_var;
} ddp_environment;

/* Reads it. DDP_EINVAL naming variable and value, with *e a world of one, when it contradicts itself or is half of one. */
DDP_LOCAL int ddp__environment(ddp_environment *e);
/* Where rank 0 serves the store: MASTER_ADDR and MASTER_PORT, else what the launcher's variables lead to on all ranks
 * alike. DDP_EINVAL naming what to set. */
DDP_LOCAL int ddp__environment_master(const ddp_environment *e, char *host, size_t n, int *port);

/* The first host of a list in Slurm's short form: "n[03-05,9],m1" -> "n03". */
DDP_LOCAL void ddp__first_host(const char *list, char *out, size_t n);
/* The number for this host in Slurm's list of tasks a host, "2(x3),1"; 0: none. */
DDP_LOCAL int ddp__tasks_on_node(const char *list, int node);

/* A port that follows from a job's name. */
DDP_LOCAL int ddp__job_port(const char *id);

#endif
