/* launch.h -- ddprun: one process that starts the ranks, merges what they print, and ends the job on its first failure.
 */
#ifndef DDP_LAUNCH_H
#define DDP_LAUNCH_H

#include <signal.h>
#include <sys/types.h>

#include "../base/base.h"
#include "../comm/environment.h"
#include "../comm/flight.h"
#include "../comm/store.h"

#define DDP_RUN_VERSION "0.1.0"

enum { EXIT_USAGE = 2, MAX_LOCAL_RANKS = 4096 };
enum { RANKS_CPU = 0, RANKS_AUTO = -1, RANKS_GPU = -2 }; /* what -n may ask for in place of a number */

/* ---- options (options.c) ------------------------------------------------------------------------------------------
 */

typedef struct options {
    int n;          /* ranks; RANKS_* until all options are known */
    double timeout; /* seconds; 0: not given */
    double grace;   /* seconds between SIGTERM and SIGKILL */
    const char *engine;
    const char *log_dir; /* NULL: none */
    const char *report;  /* NULL: none */
    const char *show;    /* as given; NULL: all */
    int master_port;     /* 0: the system chooses */
    const char *master_addr;
    bool master_addr_given, nnodes_given;
    int nnodes, node_rank; /* node_rank -1: not given */
    int max_restarts;
    bool timestamps, exec, bind_core, prompt, print_env, version, help;
    char **args; /* the script or program and what follows; NULL-terminated */
} options;

/* Reads environment twins, then argv. 0, or an exit status after one sentence on stderr. */
DDP_LOCAL int options_read(options *o, int argc, char **argv);
DDP_LOCAL void options_help(void);
/* Whether rank r is among `--show`. */
DDP_LOCAL bool options_shows(const options *o, int r);

/* ---- GPUs (gpus.c) ---- */
/* GPUs that a rank on this host would see, and why there is none. */
DDP_LOCAL int gpus_here(char *why, size_t n);

/* ---- places (paths.c) -----------------------------------------------------------------------------------------------
 */

typedef struct places {
    char exe_dir[1024];  /* where ddprun lies */
    char lib_dir[1100];  /* where libddp.so lies */
    char scripts[1100];  /* our scripts */
    char lua_path[5000]; /* templates for package.path */
} places;

DDP_LOCAL int places_find(places *p);
DDP_LOCAL void places_print_env(const places *p);
/* The script `name`, here or among ours, into out. 0, or EXIT_USAGE after a sentence. */
DDP_LOCAL int places_script(const places *p, const char *name, char *out, size_t n);
/* Whether a program can be started. 0, or EXIT_USAGE after a sentence. */
DDP_LOCAL int places_program(const char *name);

/* ---- the job ---- */

typedef struct text {
    char *p;
    size_t n, room;
} text;
DDP_LOCAL bool text_add(text *t, const void *p, size_t n);

enum { TAIL_BYTES = 16 << 10 };

/* One of a rank's two output pipes. */
typedef struct stream {
    int fd;    /* -1: closed or inherited */
    int to;    /* 1 or 2 */
    text part; /* a line that has not ended */
} stream;

typedef struct rank_proc {
    pid_t pid; /* also its group; 0: not started */
    stream out, err;
    int status_fd, report_fd, log_fd;
    text status, report;
    char tail[TAIL_BYTES]; /* the last bytes of stderr */
    size_t tail_n;
    bool exited, joined, finished;
    bool failed, peer, left; /* peer: a consequence of another's failure; left: exit 0 while others wait */
    int code;                /* exit status as a shell sees it: 128 + n for a signal */
    int signal;              /* 0: none */
    double exit_at, fail_at;
    char *error; /* what it said on the status pipe */
} rank_proc;

typedef struct job {
    const options *o;
    const places *places;
    int n, threads, port;
    const char *addr;          /* of the store */
    int program_port, port_fd; /* MASTER_PORT of the ranks: the store's, or with --exec one that we hold */
    double started;
    char token[300];
    int restart;           /* the number of this attempt, from 0 */
    int node, nodes;       /* this host among all */
    int first_rank, world; /* the rank in the world of ranks[0]; ranks of all hosts */
    struct agent *agent;   /* with several hosts */
    int told;              /* what the other hosts know of us: 0 nothing, 1 that we failed, 2 that we are done */
    char remote[4500];     /* the failure of another host that ended the job; "" none */
    int remote_code;       /* and its exit status */
    bool stepped;          /* some rank has made a step */
    rank_proc *ranks;
    ddp_store_server *store;
    int flight_fd;
    ddp_flight *flight; /* [n]: what each rank is doing */
    int signal_fd, guardian_fd;
    bool prefixed; /* output goes by whole lines with a prefix */
    bool at_line_start[3];
    bool broken[3];  /* nobody reads our stdout, our stderr */
    int first;       /* the rank that failed first, -1: none */
    int waiter;      /* the rank that waited for one that left or is stuck, -1: none */
    int stuck;       /* the rank that did not come where the first one waited, -1: none */
    double asked_at; /* when the stuck one was asked for its stack; 0: not yet */
    double watch_at; /* when to look for long waits again */
    uint32_t warned; /* the collective that a long wait was told of */
    text doing;      /* what all were doing when the first failure was known */
    bool in_rendezvous;
    int stop_signal; /* that a user sent us */
    bool child_news; /* a SIGCHLD came that nobody has looked into */
    bool stopping, killed;
    char stubborn[64]; /* who had to be killed, for the last block */
    double stopped_at, kill_at, killed_at, drain_until;
    long oom_kills; /* at the start; -1: unknown */
} job;

/* spawn.c: starts all ranks. 0, or an exit status after a sentence. */
DDP_LOCAL int spawn_ranks(job *j);
/* terminal.c: keeps how the terminal is, for -i; makes it so again, and ours. */
DDP_LOCAL void terminal_keep(void);
DDP_LOCAL void terminal_restore(void);
/* rank.c: the far side: main of `--rank-trampoline`. */
DDP_LOCAL int rank_main(int argc, char **argv);
/* rank.c: a function of libddp_host, "ddp_host_main" or "ddp_host_prompt", with the script and its arguments. */
DDP_LOCAL int rank_run_lua(const char *entry, int argc, char **argv);
/* guardian.c: starts the guardian; main of it; tells it a group; tells it to leave. */
DDP_LOCAL int guardian_start(job *j);
DDP_LOCAL int guardian_main(int argc, char **argv);
DDP_LOCAL void guardian_tell(job *j, pid_t group);
DDP_LOCAL void guardian_dismiss(job *j);
/* job.c: runs the job to its end; the exit status. */
DDP_LOCAL int job_run(job *j);
/* Reads signals that have come, and kills when the grace is over: while output is stuck too. */
DDP_LOCAL void job_attend(job *j);
DDP_LOCAL void job_stop(job *j, int sig);

/* output.c: reads once from a pipe: 1: there may be more, 0: nothing now, -1: its end. */
DDP_LOCAL int output_read(job *j, int r, stream *s);
/* Ends a partial last line and closes. */
DDP_LOCAL void output_close(job *j, int r, stream *s);
/* Writes to fd 1 or 2 whatever it takes. */
DDP_LOCAL void output_write(job *j, int fd, const char *p, size_t n);

/* verdict.c: takes in a rank's status lines, judges an exit, chooses the first failure, prints the last block. */
DDP_LOCAL void verdict_status_line(job *j, int r, char *line);
DDP_LOCAL void verdict_exited(job *j, int r);
DDP_LOCAL void verdict_decide(job *j);
/* Whether a decision is only a matter of time, so that the loop must look again soon. */
DDP_LOCAL bool verdict_pending(const job *j);
DDP_LOCAL int verdict_print(job *j);
/* The block on the first failure, into t. */
DDP_LOCAL void verdict_text(text *t, const job *j);
DDP_LOCAL long verdict_oom_kills(void);

/* doing.c: memory for the ranks' flight records; 0, or 1 after a sentence. */
DDP_LOCAL int doing_open(job *j);
DDP_LOCAL void doing_close(job *j);
/* A line a rank, in words. */
DDP_LOCAL void doing_add_all(text *t, const job *j, const char *margin);
DDP_LOCAL const char *doing_text(const job *j, int r, double now, char *text, size_t n);
/* Tells once of a collective that ranks wait in for long, and asks who is not there for its stack. */
DDP_LOCAL void doing_watch(job *j);
/* Asks a Lua rank to write its stacks to stderr. */
DDP_LOCAL void doing_ask(const job *j, int r);
/* The one rank that has not reached the collective in which r's wait timed out (in words in `what`); -1: none, or several. */
DDP_LOCAL int doing_who_is_behind(const job *j, int r, char *what, size_t n);

/* report.c: writes rank 0's report; 0 or 1 after a sentence. */
DDP_LOCAL int report_write(job *j);

/* One line on stderr, "ddprun: ...". */
DDP_LOCAL void say(const char *fmt, ...) DDP_PRINTF(1, 2);

#endif
