/* job.c -- who we are in the job, joining it and leaving it. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm.h"

ddp_job ddp__job = {.size = 1, .local_size = 1};

enum { DEFAULT_TIMEOUT = 600, MAX_RANKS = 1 << 20 };

/* ---- the environment ------------------------------------------------------------------------------------------------
 */

/* A whole number in [lo, hi] from the environment; `missing` when unset. A status. */
static int env_int(const char *name, int missing, int lo, int hi, int *out) {
    const char *s = getenv(name);
    *out = missing;
    if (!s || !*s) return 0;
    char *end;
    errno = 0;
    long v = strtol(s, &end, 10);
    if (errno || *end || v < lo || v > hi)
        return ddp__fail(DDP_EINVAL, "init: %s is \"%s\", expected a whole number from %d to %d", name, s, lo, hi);
    *out = (int)v;
    return 0;
}

static int from_env(const char *name, int missing) {
    const char *s = getenv(name);
    return s && *s ? atoi(s) : missing;
}

int ddp_rank(void) { return ddp__job.initialized ? ddp__job.rank : from_env("RANK", 0); }
int ddp_world_size(void) {
    int n = ddp__job.initialized ? ddp__job.size : from_env("WORLD_SIZE", 1);
    return n < 1 ? 1 : n;
}
int ddp_local_rank(void) { return ddp__job.initialized ? ddp__job.local_rank : from_env("LOCAL_RANK", ddp_rank()); }
int ddp_local_world_size(void) {
    int n = ddp__job.initialized ? ddp__job.local_size : from_env("LOCAL_WORLD_SIZE", ddp_world_size());
    return n < 1 ? 1 : n;
}
int ddp_local_device(void) { return DDP_CPU; }
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
    int st;
    if ((st = env_int("WORLD_SIZE", 1, 1, MAX_RANKS, &j->size)) < 0 ||
        (st = env_int("RANK", 0, 0, MAX_RANKS, &j->rank)) < 0)
        return st;
    if (j->size > 1 && !getenv("RANK"))
        return ddp__fail(DDP_EINVAL, "init: WORLD_SIZE is %d but RANK is not set", j->size);
    if (j->rank >= j->size)
        return ddp__fail(DDP_EINVAL, "init: RANK is %d in a world of %d; ranks count from 0", j->rank, j->size);
    if ((st = env_int("LOCAL_RANK", j->rank, 0, MAX_RANKS, &j->local_rank)) < 0) return st;
    if ((st = env_int("LOCAL_WORLD_SIZE", j->size, 1, MAX_RANKS, &j->local_size)) < 0) return st;
    const char *t = getenv("DDP_TIMEOUT");
    j->timeout = opts && opts->size >= sizeof *opts && opts->timeout > 0 ? opts->timeout
                 : t && atof(t) > 0                                      ? atof(t)
                                                                         : DEFAULT_TIMEOUT;
    return 0;
}

static int pick_engine(const ddp_init_opts *opts, const ddp_engine **out) {
    const char *name = opts && opts->size >= sizeof *opts && opts->engine ? opts->engine : getenv("DDP_ENGINE");
    if (!name || !*name || strcmp(name, "auto") == 0 || strcmp(name, "shm") == 0) *out = &ddp__engine_shm;
    else return ddp__fail(DDP_EINVAL, "init: engine \"%s\" is not built yet, expected auto or shm", name);
    char why[256] = "";
    if ((*out)->probe && (*out)->probe(why, sizeof why) != 0)
        return ddp__fail(DDP_ENOSUP, "init: engine %s cannot work here: %s", (*out)->name, why);
    return 0;
}

/* Opens the store: the launcher's, or in a world started by hand the one that rank 0 serves. */
static int open_store(ddp_job *j, double deadline) {
    const char *host = getenv("MASTER_ADDR"), *port_text = getenv("MASTER_PORT"), *by = getenv("DDP_STORE");
    int port;
    if (!host || !*host) host = "127.0.0.1";
    if (!port_text) return ddp__fail(DDP_EINVAL, "init: WORLD_SIZE is %d but MASTER_PORT is not set", j->size);
    int st = env_int("MASTER_PORT", 0, 1, 65535, &port);
    if (st < 0) return st;
    bool launcher = by && strcmp(by, "launcher") == 0;
    if (!launcher && j->rank == 0) {
        bool local = strncmp(host, "127.", 4) == 0 || strcmp(host, "localhost") == 0;
        int fd = ddp__store_listen(!local, &port);
        if (fd < 0 || !(j->server = ddp__store_serve(fd))) return ddp__pending();
    }
    j->store = ddp__store_connect(host, port, deadline);
    return j->store ? 0 : ddp__pending();
}

int ddp_init(const ddp_init_opts *opts) {
    ddp_job *j = &ddp__job;
    if (ddp__pending()) return ddp__pending();
    if (j->initialized) return 0;
    ddp_job fresh = {.size = 1, .local_size = 1};
    int st = read_env(&fresh, opts);
    if (st < 0) return st;
    if (fresh.size > 1) {
        if ((st = pick_engine(opts, &fresh.engine)) < 0 || (st = open_store(&fresh, ddp__now() + fresh.timeout)) < 0)
            goto fail;
        ddp_boot boot = {.rank = fresh.rank,
                         .size = fresh.size,
                         .local_rank = fresh.local_rank,
                         .local_size = fresh.local_size,
                         .store = fresh.store,
                         .prefix = "world",
                         .timeout = fresh.timeout,
                         .cores = ddp__cores()};
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
    if (!told) ddp__tell_launcher("finished\n");
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
    if (ddp__job.comm) ddp__job.engine->abort(ddp__job.comm, why ? why : "aborted");
}
