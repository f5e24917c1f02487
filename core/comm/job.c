/* job.c -- who we are in the job, joining it and leaving it. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../mem/device.h"
#include "comm.h"
#include "fault.h"
#include "flight.h"

ddp_job ddp__job = {.size = 1, .local_size = 1};

enum { DEFAULT_TIMEOUT = 600 };

/* ---- the environment ------------------------------------------------------------------------------------------------
 */

static int from_env(const char *name, int missing) {
    const char *s = getenv(name);
    return s && *s ? atoi(s) : missing;
}

static ddp_environment before_init; /* a world of one where it is contradictory: ddp_init says what is wrong */
static void read_once(void) {
    ddp_saved_error e;
    ddp__error_save(&e);
    ddp__environment(&before_init);
    ddp_error_take(NULL);
    ddp__error_restore(&e);
}

/* Who we are, before ddp_init as after it. */
static const ddp_environment *who(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (ddp__job.initialized) return &ddp__job.env;
    pthread_once(&once, read_once);
    return &before_init;
}

int ddp_rank(void) { return who()->rank; }
int ddp_world_size(void) { return who()->size; }
int ddp_local_rank(void) { return who()->local_rank; }
int ddp_local_world_size(void) { return who()->local_size; }
int ddp_node_rank(void) { return who()->node; }
int ddp_num_nodes(void) { return who()->nodes; }
int ddp_local_device(void) {
    int n = ddp__gpus(NULL, 0), local = ddp_local_rank();
    if (n == 0) return DDP_CPU;
    if (n == 1 || local < n) return DDP_CUDA(n == 1 ? 0 : local); /* one: each rank may see its own alone */
    return ddp__fail(
        DDP_EDEVICE,
        "rank %d has no GPU: %d here for %d ranks on this host; start `ddprun -n %d`, or compute on the cpu with "
        "DDP_DEVICE=cpu",
        ddp_rank(), n, ddp_local_world_size(), n);
}
int ddp_is_initialized(void) { return ddp__job.initialized; }

int ddp_num_threads(void) {
    static int n;
    if (n == 0) {
        int set = from_env("OMP_NUM_THREADS", 0);
        n = set > 0 ? set : ddp__cores() / ddp_local_world_size();
        if (n < 1) n = 1;
    }
    return n;
}

/* ---- the launcher ---- */

void ddp__tell_launcher(const char *line) {
    int fd = from_env("DDP_STATUS_FD", -1);
    if (fd < 0) return;
    size_t n = strlen(line);
    while (n > 0) {
        ssize_t k = write(fd, line, n);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return; /* the launcher is gone: it will not miss the line */
        line += k;
        n -= (size_t)k;
    }
}

int ddp_report_send(const char *json) {
    int fd = from_env("DDP_REPORT_FD", -1);
    if (fd < 0) return 0;
    size_t n = strlen(json);
    while (n > 0) {
        ssize_t k = write(fd, json, n);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return ddp__fail(DDP_EIO, "report: the launcher does not take it: %s", strerror(errno));
        json += k;
        n -= (size_t)k;
    }
    close(fd);
    unsetenv("DDP_REPORT_FD");
    return 0;
}

/* ---- joining ---- */

static int read_env(ddp_job *j, const ddp_init_opts *opts) {
    const char *t = getenv("DDP_TIMEOUT");
    int st = ddp__environment(&j->env);
    j->rank = j->env.rank;
    j->size = j->env.size;
    j->local_rank = j->env.local_rank;
    j->local_size = j->env.local_size;
    j->timeout = opts && opts->size >= sizeof *opts && opts->timeout > 0 ? opts->timeout
                 : t && atof(t) > 0                                      ? atof(t)
                                                                         : DEFAULT_TIMEOUT;
    return st;
}

static int pick_engine(const ddp_init_opts *opts, const ddp_job *j, const ddp_engine **out) {
    const char *name = opts && opts->size >= sizeof *opts && opts->engine ? opts->engine : getenv("DDP_ENGINE");
    return ddp__pick_engine(name, j->size, j->local_size, out);
}

/* Opens the store: the launcher's, or in a world started by hand the one that rank 0 serves. */
static int open_store(ddp_job *j, double deadline) {
    const char *by = getenv("DDP_STORE");
    char host[256];
    int port, st = ddp__environment_master(&j->env, host, sizeof host, &port);
    if (st < 0) return st;
    bool launcher = by && strcmp(by, "launcher") == 0;
    if (!launcher && j->rank == 0) {
        int fd = ddp__store_listen(host, &port);
        if (fd < 0 || !(j->server = ddp__store_serve(fd, getenv("DDP_JOB")))) return ddp__pending();
    }
    j->store = ddp__store_connect(host, port, getenv("DDP_JOB"), deadline);
    return j->store ? 0 : ddp__pending();
}

int ddp_init(const ddp_init_opts *opts) {
    ddp_job *j = &ddp__job;
    if (ddp__pending()) return ddp__pending();
    if (j->initialized) return 0;
    ddp_job fresh = {.size = 1, .local_size = 1};
    int st = read_env(&fresh, opts);
    if (st < 0) return st;
    ddp__flight_open(fresh.local_rank);
    if ((st = ddp__fault_read(fresh.rank, fresh.env.node > 0 ? fresh.env.node : 0)) < 0 ||
        (st = ddp__fault_at_init()) < 0)
        return st;
    if (fresh.size > 1) {
        ddp__forbid_fork();
        if ((st = pick_engine(opts, &fresh, &fresh.engine)) < 0 ||
            (st = open_store(&fresh, ddp__now() + fresh.timeout)) < 0)
            goto fail;
        ddp_boot boot = {.rank = fresh.rank,
                         .size = fresh.size,
                         .local_rank = fresh.local_rank,
                         .local_size = fresh.local_size,
                         .store = fresh.store,
                         .prefix = "world",
                         .timeout = fresh.timeout,
                         .cores = ddp__cores(),
                         .node_rank = fresh.env.node > 0 ? fresh.env.node : 0};
        fresh.boot = boot;
        if ((st = fresh.engine->init(&fresh.comm, &boot)) < 0) goto fail;
    }
    fresh.initialized = true;
    *j = fresh;
    ddp_stats_mark("joined");
    ddp__tell_launcher("joined\n");
    return 0;
fail:
    ddp__store_free(fresh.store);
    ddp__store_server_free(fresh.server);
    return st;
}

/* Who comes first leaves "rank value"; what follows it is there as soon as the count is 1. */
int ddp_job_compare(const char *key, const char *value, const char *what) {
    ddp_job *j = &ddp__job;
    if (ddp__pending()) return ddp__pending();
    if (!key || !value || !what) return ddp__fail(DDP_ENULL, "compare: key, value or what is NULL");
    if (!j->store) return 0;
    char name[300], *theirs = NULL;
    int64_t count;
    snprintf(name, sizeof name, "compare/%.200s/n", key);
    int st = ddp__store_add(j->store, name, 1, &count);
    name[strlen(name) - 1] = 'v';
    if (st == 0 && count == 1) {
        char mine[300];
        return ddp__store_set(j->store, name, mine, (size_t)snprintf(mine, sizeof mine, "%d %.250s", j->rank, value));
    }
    size_t n = 0;
    if (st == 0) st = ddp__store_get(j->store, name, ddp__now() + j->timeout, (void **)&theirs, &n);
    if (st == 0) {
        int rank = 0, at = 0;
        char text[300];
        snprintf(text, sizeof text, "%.*s", (int)n, theirs);
        sscanf(text, "%d %n", &rank, &at);
        if (strcmp(text + at, value) != 0)
            st = ddp__fail(DDP_EMISMATCH, "%s: rank %d has %s, rank %d has %s", what, rank, text + at, j->rank, value);
    }
    free(theirs);
    return st;
}

static void leave(void) {
    ddp_job *j = &ddp__job;
    if (ddp__forked()) return; /* the place in the job is the parent's */
    ddp__groups_leave();
    if (j->comm) j->engine->destroy(j->comm, j->engine->health(j->comm) == 0);
    j->comm = NULL;
    ddp__store_free(j->store);
    ddp__store_server_free(j->server);
    j->store = NULL;
    j->server = NULL;
}

void ddp_finish(void) {
    static bool told;
    ddp_saved_error e;
    ddp__error_save(&e);
    leave();
    if (!told && !ddp__forked()) ddp__tell_launcher("finished\n");
    told = true;
    ddp__error_restore(&e);
}

/* A process that ends without ddp_finish leaves its peers with a reason, not with a wait. */
__attribute__((destructor)) static void leave_at_exit(void) { leave(); }

int ddp_job_status(void) {
    if (!ddp__job.comm) return 0;
    ddp_saved_error e;
    ddp__error_save(&e);
    int st = ddp__job.engine->health(ddp__job.comm);
    ddp_error_take(NULL);
    ddp__error_restore(&e);
    return st;
}

void ddp_abort(const char *why) {
    if (ddp__forked()) return;
    ddp__groups_abort(why ? why : "aborted");
    if (ddp__job.comm) ddp__job.engine->abort(ddp__job.comm, why ? why : "aborted");
}
