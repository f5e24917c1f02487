/* environment.c -- torchrun's, Open MPI's, Slurm's, MPICH's and Kubernetes' variables, read as one. */
#include "environment.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_RANKS = 1 << 20 };

/* Variables of one launcher. A family is complete when rank and size are there; what else is missing is worked out. */
typedef struct family {
    const char *rank, *size[2]; /* of sizes the first that is set */
    const char *local_rank, *local_size, *node, *nodes;
} family;

/* In the order in which they are asked: what a user sets by hand first, then the launcher nearest to the process. */
static const family families[] = {
    {"DDP_RANK", {"DDP_WORLD_SIZE"}, "DDP_LOCAL_RANK", "DDP_LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"},
    {"RANK", {"WORLD_SIZE"}, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"},
    {"OMPI_COMM_WORLD_RANK",
     {"OMPI_COMM_WORLD_SIZE"},
     "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE",
     "GROUP_RANK",
     "GROUP_WORLD_SIZE"},
    {"SLURM_PROCID",
     {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"},
     "SLURM_LOCALID",
     NULL,
     "SLURM_NODEID",
     "SLURM_STEP_NUM_NODES"},
    {"PMI_RANK", {"PMI_SIZE"}, "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "GROUP_RANK", "GROUP_WORLD_SIZE"},
    {"JOB_COMPLETION_INDEX", {"WORLD_SIZE", "JOB_COMPLETIONS"}, "LOCAL_RANK", "LOCAL_WORLD_SIZE", NULL, NULL},
};
enum { DDP_FAMILY, TORCHRUN, OPEN_MPI, SLURM, PMI, KUBERNETES, FAMILIES };

/* ---- single variables ---- */

/* The text of a variable, NULL where it is unset or empty. */
static const char *value(const char *name) {
    const char *s = name ? getenv(name) : NULL;
    return s && *s ? s : NULL;
}

/* A whole number in [lo, hi] into *out, which stays when the variable is unset. A status. */
static int number(const char *name, int lo, int hi, int *out) {
    const char *s = value(name);
    if (!s) return 0;
    char *end;
    errno = 0;
    long v = strtol(s, &end, 10);
    if (errno || *end || isspace((unsigned char)*s) || v < lo || v > hi)
        return ddp__fail(DDP_EINVAL, "init: %s is \"%s\", expected a whole number from %d to %d", name, s, lo, hi);
    *out = (int)v;
    return 0;
}

static const char *size_of(const family *f) { return value(f->size[0]) || !f->size[1] ? f->size[0] : f->size[1]; }

/* ---- Slurm's lists ---- */

void ddp__first_host(const char *list, char *out, size_t n) {
    size_t k = 0;
    for (const char *s = list; *s && *s != ',' && k + 1 < n; s++) {
        if (*s != '[') {
            out[k++] = *s;
            continue;
        }
        for (s++; *s && !strchr("-,]", *s) && k + 1 < n; s++) out[k++] = *s;
        s += strcspn(s, "]");
        if (!*s) break;
    }
    out[k] = 0;
}

int ddp__tasks_on_node(const char *list, int node) {
    for (const char *s = list; *s;) {
        int tasks = 0, hosts = 1;
        if (sscanf(s, "%d(x%d)", &tasks, &hosts) < 1 || hosts < 1) return 0;
        if (node < hosts) return tasks;
        node -= hosts;
        s += strcspn(s, ",");
        s += *s == ',';
    }
    return 0;
}

/* ---- which family ---- */

/* A task of srun: only those have a step. The shell that salloc opens is a step with a number from the system's own. */
static bool in_slurm_step(void) {
    const char *s = value("SLURM_STEP_ID");
    return s && strtoul(s, NULL, 10) < 0xfffffff0u;
}

static bool applies(int k) {
    /* ddprun sets RANK and no other; what else there is was meant for ddprun itself, or for what started it. */
    const char *by = getenv("DDP_STORE");
    if (by && strcmp(by, "launcher") == 0) return k == TORCHRUN;
    /* MPICH's launcher may start its helpers by srun: then Slurm's numbers are the helpers'. */
    if (k == SLURM) return in_slurm_step() && !value("MPI_LOCALRANKID");
    return true;
}

/* Half a family, and no whole one: a job was meant, and this process would train alone without a word. */
static int incomplete(const family *f) {
    const char *size = size_of(f), *v = value(f->rank);
    if (!v && strcmp(value(size), "1") == 0) return 0;
    if (!v) return ddp__fail(DDP_EINVAL, "init: %s is %s but %s is not set", size, value(size), f->rank);
    if (f != &families[KUBERNETES]) return ddp__fail(DDP_EINVAL, "init: %s is %s but %s is not set", f->rank, v, size);
    return ddp__fail(DDP_EINVAL,
                     "init: %s is %s but neither %s nor %s is set; set one to the number of pods, or RANK=0 and "
                     "WORLD_SIZE=1 to train alone",
                     f->rank, v, f->size[0], f->size[1]);
}

/* ---- one family ---- */

static int check_below(const char *name, int v, const char *limit_name, int limit) {
    if (v < limit) return 0;
    return ddp__fail(DDP_EINVAL, "init: %s is %d, expected less than %s, which is %d", name, v, limit_name, limit);
}

/* Ranks on this host and which of them this is. Without a word about hosts there is one. */
static int read_local(const family *f, ddp_environment *e) {
    int st;
    bool pods = f == &families[KUBERNETES];
    const char *local_name = f->local_size ? f->local_size : "SLURM_STEP_TASKS_PER_NODE";
    const char *tasks = f == &families[SLURM] ? value(local_name) : NULL;
    e->hosts_known = pods || tasks || e->nodes > 0 || value(f->local_size);
    e->local_size = pods ? 1 : e->nodes > 1 ? 0 : e->size;
    if (tasks && e->node >= 0) e->local_size = ddp__tasks_on_node(tasks, e->node);
    if (e->local_size < 1 && e->nodes > 0 && e->size % e->nodes == 0) e->local_size = e->size / e->nodes;
    if ((st = number(f->local_size, 1, MAX_RANKS, &e->local_size)) < 0) return st;
    if (e->local_size < 1)
        return ddp__fail(DDP_EINVAL, "init: %s is %d on %d hosts, and %s does not say how many are on this one",
                         e->size_var, e->size, e->nodes, local_name);
    if (e->local_size > e->size)
        return ddp__fail(DDP_EINVAL, "init: %s is %d in a world of %d (%s)", local_name, e->local_size, e->size,
                         e->size_var);
    e->local_rank = e->rank % e->local_size;
    if ((st = number(f->local_rank, 0, MAX_RANKS, &e->local_rank)) < 0) return st;
    return check_below(f->local_rank, e->local_rank, local_name, e->local_size);
}

/* Which host this is where no variable says it: hosts of equal size that are filled one after the other. */
static void guess_node(ddp_environment *e) {
    if (e->local_size == e->size) {
        e->node = 0;
        e->nodes = 1;
    } else if (e->size % e->local_size == 0 && e->rank % e->local_size == e->local_rank) {
        e->node = e->rank / e->local_size;
        e->nodes = e->size / e->local_size;
    }
}

static int take(const family *f, ddp_environment *e) {
    int st;
    e->rank_var = f->rank;
    e->size_var = size_of(f);
    e->node = -1;
    e->nodes = 0;
    if ((st = number(e->size_var, 1, MAX_RANKS, &e->size)) < 0) return st;
    if ((st = number(f->rank, 0, MAX_RANKS, &e->rank)) < 0) return st;
    if (e->rank >= e->size)
        return ddp__fail(DDP_EINVAL, "init: %s is %d in a world of %d (%s); ranks count from 0", f->rank, e->rank,
                         e->size, e->size_var);
    if ((st = number(f->nodes, 1, e->size, &e->nodes)) < 0) return st;
    if ((st = number(f->node, 0, MAX_RANKS, &e->node)) < 0) return st;
    if (e->nodes && e->node >= 0 && (st = check_below(f->node, e->node, f->nodes, e->nodes)) < 0) return st;
    if ((st = read_local(f, e)) < 0) return st;
    if (e->nodes == 0 || e->node < 0) guess_node(e);
    return 0;
}

int ddp__environment(ddp_environment *e) {
    static const ddp_environment alone = {.size = 1, .local_size = 1, .nodes = 1};
    const family *half = NULL;
    int st = 0;
    *e = alone;
    for (int k = 0; k < FAMILIES; k++) {
        const family *f = &families[k];
        bool rank = value(f->rank), size = value(size_of(f));
        if (!(rank || size) || !applies(k)) continue;
        if (!rank || !size) {
            half = half ? half : f;
            continue;
        }
        st = take(f, e);
        half = NULL;
        break;
    }
    if (half) st = incomplete(half);
    if (st < 0) *e = alone;
    return st;
}

/* ---- where the store is ---- */

/* The process above all that the job's launcher started on this host, when it is MPICH's; 0: none. All ranks of a host
 * find the same, through shells and wrappers too. */
static int hydra_proxy(void) {
    int pid = getppid();
    for (int depth = 0; pid > 1 && depth < 64; depth++) {
        char path[40], line[512], *after;
        snprintf(path, sizeof path, "/proc/%d/stat", pid);
        FILE *f = fopen(path, "re");
        if (!f) return 0;
        size_t n = fread(line, 1, sizeof line - 1, f);
        fclose(f);
        line[n] = 0;
        if (strstr(line, "(hydra_")) return pid;
        after = strrchr(line, ')'); /* ") S ppid ..." */
        if (!after || strlen(after) < 4) return 0;
        pid = atoi(after + 4);
    }
    return 0;
}

/* What names the job on all ranks alike and on no other job of its hosts, into id; false: nothing does. */
static bool job_name(const ddp_environment *e, char *id, size_t n) {
    const char *a = NULL, *b = "";
    id[0] = 0;
    if (e->rank_var == families[SLURM].rank) {
        a = value("SLURM_JOB_ID");
        b = value("SLURM_STEP_ID");
    } else if (e->rank_var == families[OPEN_MPI].rank) {
        a = value("OMPI_MCA_ess_base_jobid");
        if (!a) a = value("PMIX_NAMESPACE");
    } else if (e->rank_var == families[PMI].rank) {
        int proxy = e->local_size == e->size ? hydra_proxy() : 0;
        a = value("PMI_JOBID");
        if (!a && proxy) snprintf(id, n, "hydra %d", proxy);
    }
    if (a) snprintf(id, n, "%s.%s", a, b);
    return id[0] != 0;
}

/* FNV-1a (Fowler, Noll, Vo), 32 bits, onto ports below those that systems give out by themselves (from 32768). */
int ddp__job_port(const char *id) {
    uint32_t h = 2166136261u;
    for (; *id; id++) h = (h ^ (unsigned char)*id) * 16777619u;
    return 10000 + (int)(h % 20000);
}

static int master_host(const ddp_environment *e, char *host, size_t n) {
    const char *addr = value("MASTER_ADDR"), *list = value("SLURM_STEP_NODELIST");
    if (e->hosts_known && e->local_size == e->size) snprintf(host, n, "127.0.0.1"); /* no name to look up */
    else if (addr) snprintf(host, n, "%s", addr);
    else if (e->local_size == e->size) snprintf(host, n, "127.0.0.1");
    else if (list && e->rank_var == families[SLURM].rank) ddp__first_host(list, host, n);
    else
        return ddp__fail(DDP_EINVAL,
                         "init: %d of %d ranks are on this host and MASTER_ADDR is not set; set it to rank 0's host on "
                         "all ranks%s",
                         e->local_size, e->size,
                         e->rank_var == families[OPEN_MPI].rank ? " (mpirun -x MASTER_ADDR=HOST)" : "");
    return 0;
}

int ddp__environment_master(const ddp_environment *e, char *host, size_t n, int *port) {
    char id[256];
    int st = master_host(e, host, n);
    *port = 0;
    if (st == 0 && value("DDP_STORE_PORT")) return number("DDP_STORE_PORT", 1, 65535, port); /* ddprun's own */
    if (st < 0 || (st = number("MASTER_PORT", 1, 65535, port)) < 0 || *port) return st;
    if (!job_name(e, id, sizeof id))
        return ddp__fail(DDP_EINVAL,
                         "init: %s is %d but MASTER_PORT is not set; set it to a free port, the same on all ranks",
                         e->size_var, e->size);
    *port = ddp__job_port(id);
    return 0;
}
