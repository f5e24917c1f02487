/* threads.c -- how many cores there are, and who this process is in its job (from the environment). */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base.h"

/* cpu.max of cgroup v2: "quota period" or "max period". 0 when there is no limit. */
static int cgroup_cores(void) {
    char path[512] = "", line[512];
    FILE *f = fopen("/proc/self/cgroup", "re");
    if (!f) return 0;
    while (fgets(line, sizeof line, f)) {
        if (strncmp(line, "0::", 3) == 0) {
            line[strcspn(line, "\n")] = 0;
            snprintf(path, sizeof path, "/sys/fs/cgroup%.400s/cpu.max", line + 3);
        }
    }
    fclose(f);
    f = path[0] ? fopen(path, "re") : NULL;
    if (!f) return 0;
    long quota = 0, period = 0;
    int got = fscanf(f, "%ld %ld", &quota, &period);
    fclose(f);
    if (got != 2 || quota <= 0 || period <= 0) return 0;
    int cores = (int)(quota / period);
    return cores < 1 ? 1 : cores;
}

int ddp__cores(void) {
    cpu_set_t set;
    int n = 1;
    if (sched_getaffinity(0, sizeof set, &set) == 0) n = CPU_COUNT(&set);
    int quota = cgroup_cores();
    if (quota && quota < n) n = quota;
    return n < 1 ? 1 : n;
}
