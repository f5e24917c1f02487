/* threads.c -- how many cores there are, and who this process is in its job (from the environment). */
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base.h"

/* ---- the quota of a cgroup, and of those above it ---- */

/* Reads a quota and its period, microseconds, from a cgroup's folder; false: it has none. */
typedef bool quota_reader(const char *folder, double *quota, double *period);

static bool read_number(const char *folder, const char *file, double *out) {
    char path[600];
    snprintf(path, sizeof path, "%s/%s", folder, file);
    FILE *f = fopen(path, "re");
    if (!f) return false;
    int got = fscanf(f, "%lf", out);
    fclose(f);
    return got == 1;
}

/* Version 2: "quota period" or "max period". */
static bool read_v2(const char *folder, double *quota, double *period) {
    char path[600];
    snprintf(path, sizeof path, "%s/cpu.max", folder);
    FILE *f = fopen(path, "re");
    if (!f) return false;
    int got = fscanf(f, "%lf %lf", quota, period);
    fclose(f);
    return got == 2;
}

/* Version 1: a quota of -1 is none. */
static bool read_v1(const char *folder, double *quota, double *period) {
    return read_number(folder, "cpu.cfs_quota_us", quota) && read_number(folder, "cpu.cfs_period_us", period);
}

/* The least number of cores that a cgroup at root/path and those above it grant; INFINITY: no quota. */
static double granted(const char *root, char *path, quota_reader *read) {
    double least = INFINITY;
    for (;;) {
        char folder[560];
        double quota, period;
        snprintf(folder, sizeof folder, "%s%s", root, path);
        if (read(folder, &quota, &period) && quota > 0 && period > 0 && quota / period < least) least = quota / period;
        char *slash = strrchr(path, '/');
        if (!slash) return least;
        *slash = 0;
    }
}

/* Whether `name` is one of "a,b,c" up to its colon. */
static bool lists(const char *controllers, const char *name) {
    size_t n = strlen(name);
    for (const char *s = controllers; *s && *s != ':'; s += strcspn(s, ",:"), s += *s == ',')
        if (strncmp(s, name, n) == 0 && (s[n] == ',' || s[n] == ':')) return true;
    return false;
}

/* Whole cores of the quota, at least 1; 0 when there is no limit. */
static int cgroup_cores(void) {
    char line[512];
    double least = INFINITY;
    FILE *f = fopen("/proc/self/cgroup", "re");
    if (!f) return 0;
    while (fgets(line, sizeof line, f)) { /* "number:controllers:path" */
        char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
        double cores = INFINITY;
        if (!path) continue;
        path++;
        path[strcspn(path, "\n")] = 0;
        if (lists(controllers + 1, "cpu")) cores = granted("/sys/fs/cgroup/cpu", path, read_v1);
        else if (strncmp(line, "0::", 3) == 0) cores = granted("/sys/fs/cgroup", path, read_v2);
        if (cores < least) least = cores;
    }
    fclose(f);
    if (!(least < 1e6)) return 0;
    return least < 1 ? 1 : (int)least;
}

int ddp__cores(void) {
    cpu_set_t set;
    int n = 1;
    if (sched_getaffinity(0, sizeof set, &set) == 0) n = CPU_COUNT(&set);
    int quota = cgroup_cores();
    if (quota && quota < n) n = quota;
    return n < 1 ? 1 : n;
}
