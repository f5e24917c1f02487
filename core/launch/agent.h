/* agent.h -- one ddprun a host of a job on several hosts. Node 0's serves the store; all meet there, and one thread in each beats
 * once a second and looks for the beats of the others, for failures and for ends. */
#ifndef DDP_AGENT_H
#define DDP_AGENT_H

#include "launch.h"

/* What is known of the other hosts. */
typedef struct agent_news {
    int failed_node;    /* that failed first, this one too; -1: none */
    int code;           /* its exit status */
    char failure[4096]; /* what it says of it */
    int lost_node;      /* not heard of within the limit; -1: none */
    double lost_for;    /* seconds */
    char lost_host[128];
    bool all_done; /* the ranks of all hosts ended well */
} agent_news;

/* Serves the store (node 0), meets the others, finds out who has which ranks: sets store, port, first_rank, world and the host
 * names; begins to beat. 0, or 1 after a sentence. */
int agent_join(job *j);
/* Readable when there is news; -1 without other hosts. */
int agent_fd(const job *j);
/* Seconds within which the cause of a failure may come from another host. */
double agent_patience(const job *j);
/* What is known now. */
void agent_look(job *j, agent_news *news);
/* Tells all of a failure here. */
void agent_tell_failure(job *j, int code, const char *text);
/* Tells all that the ranks here ended well. */
void agent_tell_done(job *j);
/* Leaves; node 0 waits a moment for the others to have heard the end. */
void agent_leave(job *j);

#endif
