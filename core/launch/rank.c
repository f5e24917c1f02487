/* rank.c -- the first thing in a rank's process: it ties its life to ddprun's, then becomes the script or the program.
 *
 *   ddprun --rank-trampoline PARENT CPUS script|exec|prompt NAME [arguments]     CPUS: "first:count" of the usable cores, or "-" */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "launch.h"

/* Binds to `count` of the usable cores from the first-th on, around the end. */
static void bind_cores(const char *spec) {
    int first, count, k = 0, usable[CPU_SETSIZE];
    cpu_set_t set;
    if (sscanf(spec, "%d:%d", &first, &count) != 2 || sched_getaffinity(0, sizeof set, &set) < 0) return;
    for (int c = 0; c < CPU_SETSIZE; c++)
        if (CPU_ISSET(c, &set)) usable[k++] = c;
    CPU_ZERO(&set);
    for (int i = 0; i < count && k; i++) CPU_SET(usable[(first + i) % k], &set);
    if (sched_setaffinity(0, sizeof set, &set) < 0) say("cannot bind to cores: %s", strerror(errno));
}

/* Programs that a script starts must not hold the launcher's pipes. */
static void close_on_exec(const char *env) {
    const char *s = getenv(env);
    if (s) fcntl(atoi(s), F_SETFD, FD_CLOEXEC);
}

/* The Lua side is loaded here and not linked, so that the launcher itself starts in no time. */
int rank_run_lua(const char *entry, int argc, char **argv) {
    char path[1200];
    places p;
    int (*host_main)(const char *script, int argc, char **argv);
    if (places_find(&p) != 0) return 1;
    snprintf(path, sizeof path, "%s/libddp_host.so", p.lib_dir);
    void *lib = dlopen(path, RTLD_LAZY | RTLD_GLOBAL); /* global: C modules of Lua look for lua_* */
    void *sym = lib ? dlsym(lib, entry) : NULL;
    if (!sym) {
        say("cannot load the Lua side: %s", dlerror());
        return 1;
    }
    memcpy(&host_main, &sym, sizeof sym);
    return host_main(argv[0], argc ? argc - 1 : 0, argc ? argv + 1 : argv);
}

int rank_main(int argc, char **argv) {
    if (argc < 5) return EXIT_USAGE;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != (pid_t)atol(argv[2])) return 1; /* ddprun died before the line above */
    if (strcmp(argv[3], "-") != 0) bind_cores(argv[3]);
    bool prompt = strcmp(argv[4], "prompt") == 0;
    if (prompt || strcmp(argv[4], "script") == 0) {
        close_on_exec("DDP_STATUS_FD");
        close_on_exec("DDP_REPORT_FD");
        close_on_exec("DDP_FLIGHT_FD");
        return rank_run_lua(prompt ? "ddp_host_prompt" : "ddp_host_main", argc - 5, argv + 5);
    }
    execvp(argv[5], argv + 5);
    say("cannot run %s: %s", argv[5], strerror(errno));
    return errno == ENOENT ? 127 : 126;
}
