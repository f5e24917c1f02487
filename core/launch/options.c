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
    if (strcmp(s, "auto") == 0) return whole("1", 1, 1, &o->n); /* one a GPU, else one: there is no GPU side yet */
    o->n = 0;
    return strcmp(s, "cpu") == 0 ? 0 : whole(s, 1, MAX_LOCAL_RANKS, &o->n);
}
static int take_engine(options *o, const char *s) {
    o->engine = s;
    static const char *const names[] = {"auto", "shm", "gloo", "mpi", "hier"};
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
static int take_exec(options *o, const char *s) { return flag(s, &o->exec); }
static int take_env(options *o, const char *s) { return flag(s, &o->print_env); }
static int take_version(options *o, const char *s) { return flag(s, &o->version); }
static int take_help(options *o, const char *s) { return flag(s, &o->help); }
static int take_master_port(options *o, const char *s) { return whole(s, 0, 65535, &o->master_port); }
static int take_master_addr(options *o, const char *s) {
    (void)o;
    return strcmp(s, "127.0.0.1") != 0 && strcmp(s, "localhost") != 0;
}
static int take_one(options *o, const char *s) {
    (void)o;
    return strcmp(s, "1") != 0;
}
static int take_zero(options *o, const char *s) {
    (void)o;
    return strcmp(s, "0") != 0;
}
static int take_never(options *o, const char *s) {
    (void)o;
    (void)s;
    return 1;
}

#define NOT_YET "not built yet"
static const option all[] = {
    {"-n", "DDP_N", "N", "a number from 1, auto or cpu",
     "ranks on this host: a number, auto (one) or cpu (one a core); default 1", take_n},
    {"--engine", "DDP_ENGINE", "NAME", "auto, shm, gloo, mpi or hier", "how ranks talk: auto, shm, gloo, mpi, hier",
     take_engine},
    {"--timeout", "DDP_TIMEOUT", "S", "seconds above 0", "seconds for every wait of a rank; default 600", take_timeout},
    {"--grace", "DDP_GRACE", "S", "seconds from 0", "seconds between SIGTERM and SIGKILL; default 5", take_grace},
    {"--bind", "DDP_BIND", "HOW", "none or core", "bind ranks to cores of their own: none, core", take_bind},
    {"--show", "DDP_SHOW", "WHO", "all or ranks like 0,2", "whose output to show: all, or ranks like 0,2", take_show},
    {"--log-dir", "DDP_LOG_DIR", "DIR", "a folder", "also write each rank's output to DIR/rank-N.out", take_log_dir},
    {"--timestamps", "DDP_TIMESTAMPS", NULL, "1 or 0", "put the time before each line", take_timestamps},
    {"--report", "DDP_REPORT", "FILE", "a file name", "write the report of the run to FILE as JSON", take_report},
    {"--exec", NULL, NULL, NULL, "run a program in place of a Lua script", take_exec},
    {"--master-addr", "DDP_MASTER_ADDR", "HOST", "127.0.0.1 or localhost (several hosts are not built yet)",
     "this host only", take_master_addr},
    {"--master-port", "DDP_MASTER_PORT", "P", "a port, or 0 for any",
     "the port of the store; default: one that is free", take_master_port},
    {"--nnodes", "DDP_NNODES", "N", NOT_YET ", 1 is accepted", "several hosts: not built yet", take_one},
    {"--node-rank", "DDP_NODE_RANK", "I", NOT_YET ", 0 is accepted", "several hosts: not built yet", take_zero},
    {"--max-restarts", "DDP_MAX_RESTARTS", "K", NOT_YET ", 0 is accepted", "restarts: not built yet", take_zero},
    {"-i", NULL, NULL, NOT_YET, "a prompt: not built yet", take_never},
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
    if (strcmp(p->name, "-n") == 0 && strcmp(value, "gpu") == 0)
        say("%s gpu: no GPU here, expected %s", source, p->expect);
    else if (p->take == take_never) say("%s is not built yet", source);
    else if (p->expect && strncmp(p->expect, NOT_YET, strlen(NOT_YET)) == 0)
        say("%s %s is %s", source, value, p->expect);
    else {
        for (size_t i = 0; p->take == take_engine && i < sizeof later / sizeof *later; i++) {
            if (strcmp(value, later[i]) != 0) continue;
            say("%s %s is not built yet, expected %s", source, value, p->expect);
            return EXIT_USAGE;
        }
        say("%s is \"%s\", expected %s", source, value, p->expect ? p->expect : "no value");
    }
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

/* What can only be said once all options are known. */
static int check_whole(options *o) {
    if (o->n == 0) o->n = ddp__cores();
    for (const char *s = o->show; s && *s; s += strcspn(s, ","), s += *s == ',') {
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
    *o = (options){.n = 1, .grace = 5, .engine = "auto"};
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
    if (i >= argc) {
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
           "Runs a Lua script as one process a rank, and ends all of them when one fails.\n\n");
    for (int i = 0; i < COUNT; i++) {
        char left[40];
        snprintf(left, sizeof left, "%s %s", all[i].name, all[i].value ? all[i].value : "");
        printf("  %-22s%-18s%s\n", left, all[i].env ? all[i].env : "", all[i].help);
    }
    printf("\nThe second column is the option's twin in the environment; the command line wins.\n"
           "Also read by ranks: OMP_NUM_THREADS, DDP_IFACE, DDP_MPI, DDP_HIER, DDP_ISA, DDP_TUNE, DDP_DEVICE,\n"
           "DDP_DEBUG, DDP_FAULT, DDP_PACK_CACHE_MB.\n"
           "Ranks find RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and DDP_RESTART set.\n"
           "Exit status: that of the rank that failed first, 128 + n for signal n; 2 for wrong usage.\n");
}
