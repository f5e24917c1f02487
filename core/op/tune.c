/* tune.c -- DDP_TUNE=1: the first call of a shape runs every kernel that takes it and keeps the fastest; so do all later calls,
 * and later processes by a file in the user's cache folder. One line a shape: what the call is and where it was measured (a
 * folder may be shared by machines), a tab, the kernel. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "registry.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

enum { KEY = 768, PATH = 1024, MACHINE = 160, RUNS = 3 };

typedef struct entry {
    char *key, *kernel;
    struct entry *next;
} entry;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool on;
static char path[PATH]; /* empty: nowhere to keep it */
static char machine[MACHINE];
static entry *entries;

/* ---- where ---------------------------------------------------------------------------------------------------------- */

/* "NAME family/model/stepping" of the processor: virtual ones have names that say little. */
static void name_processor(char *to, size_t room) {
#if defined(__x86_64__)
    unsigned r[12] = {0}, signature = 0, b, c, d;
    __get_cpuid(1, &signature, &b, &c, &d);
    for (unsigned i = 0; i < 3; i++)
        __get_cpuid(0x80000002u + i, &r[4 * i], &r[4 * i + 1], &r[4 * i + 2], &r[4 * i + 3]);
    char name[sizeof r + 1] = "";
    memcpy(name, r, sizeof r);
    unsigned family = signature >> 8 & 15, model = signature >> 4 & 15;
    if (family == 6 || family == 15) model |= signature >> 12 & 0xf0;
    if (family == 15) family += signature >> 20 & 255;
    snprintf(to, room, "%s %u/%u/%u", name, family, model, signature & 15);
#else
    snprintf(to, room, "unknown");
#endif
}

/* The processor, and what leaves some of its instructions out. */
static void name_machine(void) {
    const char *isa = getenv("DDP_ISA"), *amx = getenv("DDP_AMX");
    char processor[80];
    name_processor(processor, sizeof processor);
    snprintf(machine, sizeof machine, "%s, isa %.16s%s%.16s", processor, isa && *isa ? isa : "any",
             amx && *amx ? ", amx " : "", amx ? amx : "");
    for (char *p = machine; *p; p++)
        if (*p == '\t' || *p == '\n') *p = ' ';
}

/* ---- the file ------------------------------------------------------------------------------------------------------- */

static void remember(const char *key, const char *kernel) {
    entry *e = malloc(sizeof *e);
    if (!e) return;
    *e = (entry){strdup(key), strdup(kernel), entries};
    if (e->key && e->kernel) {
        entries = e;
        return;
    }
    free(e->key);
    free(e->kernel);
    free(e);
}

/* Later lines win: remember puts them first. */
static void read_file(void) {
    char line[KEY + 128];
    FILE *f = fopen(path, "re");
    if (!f) return;
    while (fgets(line, sizeof line, f)) {
        char *tab = strchr(line, '\t'), *end = strchr(line, '\n');
        if (!tab || !end) continue; /* cut off, or not ours */
        *tab = *end = 0;
        remember(line, tab + 1);
    }
    fclose(f);
}

static void find_file(void) {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME"), *env = getenv("DDP_TUNE");
    on = env && strcmp(env, "1") == 0;
    if (!on) return;
    name_machine();
    char folder[PATH - 16];
    int n = -1;
    if (cache && *cache) n = snprintf(folder, sizeof folder, "%s", cache);
    else if (home && *home) n = snprintf(folder, sizeof folder, "%s/.cache", home);
    if (n < 0 || n >= (int)sizeof folder - 8) return;
    mkdir(folder, 0700);
    snprintf(folder + n, sizeof folder - (size_t)n, "/ddp");
    if (mkdir(folder, 0700) < 0 && errno != EEXIST) {
        ddp__log(DDP_LOG_WARN, "DDP_TUNE: %s can't be made: %s; choices are kept for this process only", folder,
                 strerror(errno));
        return;
    }
    snprintf(path, sizeof path, "%s/kernels", folder);
    read_file();
}

/* One write, so that lines of several ranks do not mix. */
static void append(const char *key, const char *kernel) {
    char line[KEY + 128];
    int n = snprintf(line, sizeof line, "%s\t%s\n", key, kernel);
    int fd = path[0] ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (fd < 0) return;
    if (n <= 0 || n >= (int)sizeof line || write(fd, line, (size_t)n) != n)
        ddp__log(DDP_LOG_WARN, "DDP_TUNE: %s can't be written", path);
    close(fd);
}

/* ---- what a call is --------------------------------------------------------------------------------------------------- */

static size_t put_meta(char *at, size_t room, const ddp_meta *m) {
    size_t n = (size_t)snprintf(at, room, " %s", ddp_dtype_name(m->dtype));
    for (int d = 0; d < m->ndim && n < room; d++)
        n += (size_t)snprintf(at + n, room - n, "%s%lld:%lld", d ? "x" : "", (long long)m->size[d],
                              (long long)(m->size[d] == 1 ? 0 : m->stride[d]));
    return n;
}

static size_t put_attr(char *at, size_t room, const ddp_attr_def *a, const void *attrs) {
    const void *p = (const char *)attrs + a->offset;
    const int64_t *v = p;
    size_t n = (size_t)snprintf(at, room, " %s=", a->name);
    if (n >= room) return n;
    if (a->type == DDP_ATTR_FLOAT) return n + (size_t)snprintf(at + n, room - n, "%g", *(const double *)p);
    int64_t count = a->type == DDP_ATTR_INT2 ? 2 : a->type == DDP_ATTR_INTS ? *v++ : 1;
    for (int64_t i = 0; i < count && n < room; i++)
        n += (size_t)snprintf(at + n, room - n, "%s%lld", i ? "," : "", (long long)v[i]);
    return n;
}

/* False where it does not fit. */
static bool describe(const ddp_call *c, char *key) {
    size_t n = (size_t)snprintf(key, KEY, "%s %d threads", c->op->name, ddp_num_threads());
    for (int i = 0; i < c->n_in && n < KEY; i++) {
        if (c->in[i]) n += put_meta(key + n, KEY - n, &c->in[i]->m);
        else n += (size_t)snprintf(key + n, KEY - n, " -");
    }
    for (int i = 0; i < c->op->n_attrs && n < KEY; i++) n += put_attr(key + n, KEY - n, &c->op->attrs[i], c->attrs);
    if (n < KEY)
        n += (size_t)snprintf(key + n, KEY - n, " precision %d on %s", ddp_float32_matmul_precision(), machine);
    return n < KEY;
}

/* ---- the choice --------------------------------------------------------------------------------------------------------- */

bool ddp__tuning(void) {
    pthread_once(&once, find_file);
    return on && !ddp_is_deterministic();
}

static const double never = 1e30;

/* The fastest of RUNS runs after one that warms up; a failure counts as never, and is forgotten. */
static double seconds_of(const ddp_kernel *k, const ddp_call *c) {
    double best = never;
    for (int i = 0; i <= RUNS; i++) {
        double begin = ddp__now();
        if (k->run(c) < 0) {
            ddp_error_take(NULL);
            return never;
        }
        double took = ddp__now() - begin;
        if (i > 0 && took < best) best = took;
    }
    return best;
}

/* The first where all fail: it will say why. */
static const ddp_kernel *measure(const char *key, const ddp_call *c, const ddp_kernel *const *candidates, int n) {
    const ddp_kernel *best = candidates[0];
    double least = never;
    for (int i = 0; i < n; i++) {
        double s = seconds_of(candidates[i], c);
        ddp__log(DDP_LOG_DEBUG, "tune: %s: %s %.3f ms", key, candidates[i]->name, s * 1e3);
        if (s < least) best = candidates[i];
        if (s < least) least = s;
    }
    if (least == never) return best;
    remember(key, best->name);
    append(key, best->name);
    return best;
}

const ddp_kernel *ddp__tune(const ddp_call *c, const ddp_kernel *const *candidates, int n) {
    char key[KEY];
    if (n < 2 || !describe(c, key)) return candidates[0];
    pthread_mutex_lock(&lock);
    const entry *e = entries;
    while (e && strcmp(e->key, key) != 0) e = e->next;
    const ddp_kernel *known = NULL;
    for (int i = 0; e && i < n; i++)
        if (strcmp(candidates[i]->name, e->kernel) == 0) known = candidates[i];
    if (!known) known = measure(key, c, candidates, n);
    pthread_mutex_unlock(&lock);
    return known;
}
