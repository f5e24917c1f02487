/* options.c -- the command line and its twins in the environment. */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch.h"

typedef struct option {
    const char *name;   /* as typed */
    const char *env;    /* its twin; NULL: none */
    const char *value;  /* what stands for its value in the help; NULL: a flag */
    const char *expect; /* what a value must be, for messages */
    const char *help;
    /* Takes a value; 0, or nonzero when it is not as expected. */
    int (*take)(options *o, const char *value);
} option;

static int whole(const char *s, int lo, int hi, int *out) {
    char *end;
    errno = 0;
    long v = strtol(s, &end, 10);
    if (end == s || *end || errno || v < lo || v > hi || isspace((unsigned char)*s)) return 1;
    *out = (int)v;
    return 0;
}

static int seconds(const char *s, double least, double *out) {
    char *end;
    double v = strtod(s, &end);
    if (end == s || *end || !(v >= least && v < 1e9) || isspace((unsigned char)*s)) return 1;
    *out = v;
    return 0;
}

static int flag(const char *s, bool *out) {
    *out = strcmp(s, "1") == 0;
    return !*out && strcmp(s, "0") != 0;
}

static int take_n(options *o, const char *s) {
    o->n = strcmp(s, "gpu") == 0 ? RANKS_GPU : strcmp(s, "auto") == 0 ? RANKS_AUTO : RANKS_CPU;
    return o->n != RANKS_CPU || strcmp(s, "cpu") == 0 ? 0 : whole(s, 1, MAX_LOCAL_RANKS, &o->n);
}
static int take_engine(options *o, const char *s) {
    o->engine = s;
    static const char *const names[] = {"auto", "shm", "gloo", "mpi", "hier", "nccl"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(s, names[i]) == 0) return 0;
    return 1;
}
static int take_timeout(options *o, const char *s) { return seconds(s, 1e-3, &o->timeout); }
static int take_grace(options *o, const char *s) { return seconds(s, 0, &o->grace); }
static int take_bind(options *o, const char *s) {
    o->bind_core = strcmp(s, "core") == 0;
    return !o->bind_core && strcmp(s, "none") != 0;
}
static int take_show(options *o, const char *s) {
    o->show = strcmp(s, "all") == 0 ? NULL : s;
    if (!o->show) return 0;
    for (int digits = 0;; s++) {
        if (isdigit((unsigned char)*s)) {
            digits++;
            continue;
        }
        if (!digits || (*s && *s != ',')) return 1;
        if (!*s) return 0;
        digits = 0;
    }
}
static int take_log_dir(options *o, const char *s) {
    o->log_dir = s;
    return !*s;
}
static int take_report(options *o, const char *s) {
    o->report = s;
    return !*s;
}
static int take_timestamps(options *o, const char *s) { return flag(s, &o->timestamps); }
static int take_prompt(options *o, const char *s) { return flag(s, &o->prompt); }
static int take_exec(options *o, const char *s) { return flag(s, &o->exec); }
static int take_env(options *o, const char *s) { return flag(s, &o->print_env); }
static int take_version(options *o, const char *s) { return flag(s, &o->version); }
static int take_help(options *o, const char *s) { return flag(s, &o->help); }
static int take_master_port(options *o, const char *s) { return whole(s, 0, 65535, &o->master_port); }
static int take_master_addr(options *o, const char *s) {
    o->master_addr = s;
    o->master_addr_given = true;
    return !*s || strlen(s) > 200;
}
static int take_nnodes(options *o, const char *s) {
    o->nnodes_given = true;
    return whole(s, 1, 4096, &o->nnodes);
}
static int take_node_rank(options *o, const char *s) { return whole(s, 0, 4095, &o->node_rank); }
static int take_max_restarts(options *o, const char *s) { return whole(s, 0, 1000000, &o->max_restarts); }
static const option all[] = {
    {"-n", "DDP_N", "N", "a number from 1, auto, gpu or cpu",
     "ranks on this host: a number, auto (one a GPU, else one), gpu (one a GPU) or cpu (one a core); default 1",
     take_n},
    {"--engine", "DDP_ENGINE", "NAME", "auto, shm, gloo, mpi, hier or nccl",
     "how ranks talk: auto, shm, gloo, mpi, hier, nccl", take_engine},
    {"--timeout", "DDP_TIMEOUT", "S", "seconds above 0", "seconds for every wait of a rank; default 600", take_timeout},
    {"--grace", "DDP_GRACE", "S", "seconds from 0", "seconds between SIGTERM and SIGKILL; default 5", take_grace},
    {"--bind", "DDP_BIND", "HOW", "none or core", "bind ranks to cores of their own: none, core", take_bind},
    {"--show", "DDP_SHOW", "WHO", "all or ranks like 0,2", "whose output to show: all, or ranks like 0,2", take_show},
    {"--log-dir", "DDP_LOG_DIR", "DIR", "a folder", "also write each rank's output to DIR/rank-N.out", take_log_dir},
    {"--timestamps", "DDP_TIMESTAMPS", NULL, "1 or 0", "put the time before each line", take_timestamps},
    {"--report", "DDP_REPORT", "FILE", "a file name", "write the report of the run to FILE as JSON", take_report},
    {"--exec", NULL, NULL, NULL, "run a program in place of a Lua script", take_exec},
    {"--nnodes", "DDP_NNODES", "N", "a number from 1", "hosts of the job; on each a ddprun with the same options",
     take_nnodes},
    {"--node-rank", "DDP_NODE_RANK", "I", "a number from 0", "which of them this one is, from 0", take_node_rank},
    {"--master-addr", "DDP_MASTER_ADDR", "HOST", "an address or a name of node 0", "where all hosts reach node 0",
     take_master_addr},
    {"--master-port", "DDP_MASTER_PORT", "P", "a port, or 0 for any",
     "the port of the store there; default on one host: one that is free", take_master_port},
    {"--max-restarts", "DDP_MAX_RESTARTS", "K", "a number from 0",
     "start the whole job again when it fails after its first step, K times at most", take_max_restarts},
    {"-i", NULL, NULL, NULL, "a prompt, after the script if one is given; one rank", take_prompt},
    {"--env", NULL, NULL, NULL, "print shell lines that let a plain luajit find ddp", take_env},
    {"--version", NULL, NULL, NULL, "print the version", take_version},
    {"--help", NULL, NULL, NULL, "print this", take_help},
};
enum { COUNT = sizeof all / sizeof *all };

/* Edits between two short words. */
static int distance(const char *a, const char *b) {
    int row[64];
    size_t la = strlen(a), lb = strlen(b);
    if (la > 40 || lb > 40) return 99;
    for (size_t k = 0; k <= lb; k++) row[k] = (int)k;
    for (size_t i = 1; i <= la; i++) {
        int diagonal = row[0];
        row[0] = (int)i;
        for (size_t k = 1; k <= lb; k++) {
            int best = diagonal + (a[i - 1] != b[k - 1]);
            if (row[k] + 1 < best) best = row[k] + 1;
            if (row[k - 1] + 1 < best) best = row[k - 1] + 1;
            diagonal = row[k];
            row[k] = best;
        }
    }
    return row[lb];
}

static int unknown(const char *got, size_t len) {
    char name[64];
    const char *near = NULL;
    int best = 3;
    snprintf(name, sizeof name, "%.*s", (int)len, got);
    for (int i = 0; i < COUNT; i++) {
        int d = strncmp(all[i].name, "--", 2) == 0 ? distance(name, all[i].name) : 99;
        if (d < best) {
            best = d;
            near = all[i].name;
        }
    }
    if (strcmp(name, "-h") == 0) near = "--help";
    if (near) say("unknown option %s, did you mean %s?", name, near);
    else say("unknown option %s, expected one of those that ddprun --help lists", name);
    return EXIT_USAGE;
}

/* Gives a value to an option; `source` is what the user wrote it as. */
static int take(options *o, const option *p, const char *source, const char *value) {
    if (p->take(o, value) == 0) return 0;
    static const char *const later[] = {"nccl"};
    for (size_t i = 0; p->take == take_engine && i < sizeof later / sizeof *later; i++) {
        if (strcmp(value, later[i]) != 0) continue;
        say("%s %s is not built yet, expected %s", source, value, p->expect);
        return EXIT_USAGE;
    }
    say("%s is \"%s\", expected %s", source, value, p->expect ? p->expect : "no value");
    return EXIT_USAGE;
}

/* The option at args[*i], moved on to its last word. */
static int read_one(options *o, char **args, int *i) {
    const char *arg = args[*i], *value = NULL;
    size_t len = strncmp(arg, "--", 2) == 0 ? strcspn(arg, "=") : strlen(arg);
    if (arg[0] == '-' && arg[1] == 'n' && isdigit((unsigned char)arg[2])) len = 2; /* -n2 */
    for (int k = 0; k < COUNT; k++) {
        const option *p = &all[k];
        if (strlen(p->name) != len || strncmp(p->name, arg, len) != 0) continue;
        if (arg[len] == '=') value = arg + len + 1;
        else if (arg[len]) value = arg + len;
        else if (p->value) value = args[*i + 1] ? args[++*i] : NULL;
        else value = "1";
        if (value) return take(o, p, p->name, value);
        say("%s needs a value, expected %s", p->name, p->expect);
        return EXIT_USAGE;
    }
    return unknown(arg, len);
}

/* One ddprun a host under srun: how many hosts, which one this is and where they meet follow from the step's variables. */
static int hosts_of_slurm(options *o) {
    static char addr[256];
    const char *step = getenv("SLURM_STEP_ID"), *nodes = getenv("SLURM_STEP_NUM_NODES"), *node = getenv("SLURM_NODEID");
    const char *tasks = getenv("SLURM_STEP_NUM_TASKS"), *list = getenv("SLURM_STEP_NODELIST"),
               *job = getenv("SLURM_JOB_ID");
    char id[100];
    if (o->nnodes_given || !step || !nodes || !node || !list || atoi(nodes) < 2) return 0;
    if (tasks && atoi(tasks) != atoi(nodes)) {
        say("srun started %s ddprun on %s hosts; one on each is needed: srun -N%s --ntasks-per-node=1 ddprun ...",
            tasks, nodes, nodes);
        return EXIT_USAGE;
    }
    o->nnodes = atoi(nodes);
    o->node_rank = atoi(node);
    snprintf(id, sizeof id, "%.40s.%.40s", job ? job : "", step);
    ddp__first_host(list, addr, sizeof addr);
    if (!o->master_addr_given) take_master_addr(o, addr);
    if (o->master_port == 0) o->master_port = ddp__job_port(id);
    return 0;
}

/* Several hosts need a place to meet and a number each; one needs neither. */
static int check_hosts(options *o) {
    if (o->node_rank >= o->nnodes) {
        say("--node-rank is %d, expected less than --nnodes %d", o->node_rank, o->nnodes);
        return EXIT_USAGE;
    }
    if (o->nnodes == 1) {
        if (strcmp(o->master_addr, "localhost") == 0) o->master_addr = "127.0.0.1";
        if (o->node_rank < 0) o->node_rank = 0;
        return 0;
    }
    const char *missing = o->node_rank < 0 ? "--node-rank, from 0"
                          : strcmp(o->master_addr, "127.0.0.1") == 0 && !o->master_addr_given
                              ? "--master-addr, where all hosts reach node 0"
                          : o->master_port == 0 ? "--master-port, the same on all hosts"
                                                : NULL;
    if (!missing) return 0;
    say("--nnodes %d needs %s", o->nnodes, missing);
    return EXIT_USAGE;
}

/* A rank for each core or GPU. */
static int count_ranks(options *o) {
    char why[500];
    bool needed = o->n == RANKS_GPU;
    if (o->n == RANKS_CPU) o->n = ddp__cores();
    if (o->n > 0) return 0;
    o->n = gpus_here(why, sizeof why);
    if (o->n == 0 && needed) {
        say("-n gpu: no GPU is seen here: %s", why);
        return EXIT_USAGE;
    }
    if (o->n == 0) o->n = 1;
    return 0;
}

/* What can only be said once all options are known. */
static int check_whole(options *o) {
    int st = count_ranks(o);
    if (st) return st;
    if (o->prompt && (o->n > 1 || o->exec)) {
        if (o->exec) say("-i is a prompt of Lua, --exec runs a program");
        else say("-i is a prompt for one rank, -n is %d", o->n);
        return EXIT_USAGE;
    }
    st = hosts_of_slurm(o);
    if (st == 0) st = check_hosts(o);
    if (st) return st;
    for (const char *s = o->show; s && *s && o->nnodes == 1; s += strcspn(s, ","), s += *s == ',') {
        char *end;
        long r = strtol(s, &end, 10);
        if (r < o->n) continue;
        say("--show names rank %.*s, expected ranks from 0 to %d", (int)strcspn(s, ","), s, o->n - 1);
        return EXIT_USAGE;
    }
    return 0;
}

int options_read(options *o, int argc, char **argv) {
    int st, i;
    *o = (options){.n = 1, .grace = 5, .engine = "auto", .master_addr = "127.0.0.1", .nnodes = 1, .node_rank = -1};
    for (int k = 0; k < COUNT; k++) {
        const char *value = all[k].env ? getenv(all[k].env) : NULL;
        if (value && *value && (st = take(o, &all[k], all[k].env, value)) != 0) return st;
    }
    for (i = 1; i < argc && argv[i][0] == '-' && argv[i][1]; i++) {
        if (strcmp(argv[i], "--") == 0) {
            i++;
            break;
        }
        if ((st = read_one(o, argv, &i)) != 0) return st;
    }
    o->args = argv + i;
    if (o->help || o->version || o->print_env) return 0;
    if (i >= argc && !o->prompt) {
        if (o->exec) say("no program given, expected: ddprun [options] --exec program [arguments]");
        else say("no script given, expected: ddprun [options] script.lua [arguments]");
        return EXIT_USAGE;
    }
    return check_whole(o);
}

bool options_shows(const options *o, int r) {
    if (!o->show) return true;
    for (const char *s = o->show; *s; s += strcspn(s, ","), s += *s == ',')
        if (atoi(s) == r) return true;
    return false;
}

void options_help(void) {
    printf("usage: ddprun [options] script.lua [arguments of the script]\n"
           "       ddprun -i [script.lua]    a prompt\n"
           "       ddprun doctor             what is there, slow or broken\n"
           "Runs a Lua script as one process a rank, and ends all of them when one fails.\n\n");
    for (int i = 0; i < COUNT; i++) {
        char left[40];
        snprintf(left, sizeof left, "%s %s", all[i].name, all[i].value ? all[i].value : "");
        printf("  %-22s%-18s%s\n", left, all[i].env ? all[i].env : "", all[i].help);
    }
    printf("\nThe second column is the option's twin in the environment; the command line wins.\n"
           "Also read by ranks: OMP_NUM_THREADS, DDP_IFACE, DDP_MPI, DDP_HIER, DDP_ISA, DDP_TUNE, DDP_DEVICE,\n"
           "DDP_DEBUG, DDP_FAULT, DDP_PACK_CACHE_MB. Read by ddprun of several hosts: DDP_HEARTBEAT (seconds without "
           "word\n"
           "from a host; 5), DDP_JOB (what the hosts know each other by).\n"
           "Ranks find RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and DDP_RESTART set.\n"
           "Exit status: that of the rank that failed first, 128 + n for signal n; 2 for wrong usage.\n");
}
