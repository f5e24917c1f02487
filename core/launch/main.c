/* main.c -- ddprun: its modes. The hidden ones are what ddprun starts itself as. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launch.h"

void say(const char *fmt, ...) {
    char line[8192];
    va_list ap;
    int n = snprintf(line, sizeof line, "ddprun: ");
    va_start(ap, fmt);
    n += vsnprintf(line + n, sizeof line - (size_t)n, fmt, ap);
    va_end(ap);
    if (n > (int)sizeof line - 2) n = sizeof line - 2;
    line[n++] = '\n';
    while (write(2, line, (size_t)n) < 0 && errno == EINTR) {
    } /* one write, so that lines of two jobs do not mix */
}

/* The script's place in o->args[0], or a check that the program is there. */
static int find_script(const options *o, const places *p, char *script, size_t n) {
    if (!o->args[0]) return 0; /* a prompt alone */
    if (o->exec) return places_program(o->args[0]);
    int st = places_script(p, o->args[0], script, n);
    if (st == 0) o->args[0] = script;
    return st;
}

/* The job, and again after failures as often as it may. */
static int run(const options *o, const places *p, double started) {
    for (int k = 0;; k++) {
        job j = {.o = o,
                 .places = p,
                 .n = o->n,
                 .addr = o->master_addr,
                 .restart = k,
                 .node = o->node_rank,
                 .nodes = o->nnodes,
                 .started = k ? ddp__now() : started,
                 .signal_fd = -1,
                 .guardian_fd = -1,
                 .flight_fd = -1,
                 .port_fd = -1,
                 .first = -1,
                 .stuck = -1,
                 .waiter = -1};
        int st = job_run(&j);
        bool failed = st != 0 && (j.first >= 0 || j.remote[0]) && !j.stop_signal;
        if (!failed || k >= o->max_restarts) return st;
        if (!j.stepped) {
            say("it is not started again: it failed before its first step");
            return st;
        }
        say("restart %d of %d", k + 1, o->max_restarts);
    }
}

/* `ddprun doctor` is no job: it must also run where a job can't. */
static bool is_doctor(const options *o) {
    return o->args[0] && strcmp(o->args[0], "doctor") == 0 && o->n == 1 && !o->exec && !o->prompt;
}

int main(int argc, char **argv) {
    static char script[4096];
    static places p;
    options o;
    double started = ddp__now();
    int st;
    if (argc > 1 && strcmp(argv[1], "--rank-trampoline") == 0) return rank_main(argc, argv);
    if (argc > 1 && strcmp(argv[1], "--guardian") == 0) return guardian_main(argc, argv);
    if ((st = options_read(&o, argc, argv)) != 0) return st;
    if ((st = places_find(&p)) != 0) return st;
    if (o.help) options_help();
    else if (o.version) puts("ddp " DDP_RUN_VERSION);
    else if (o.print_env) places_print_env(&p);
    if (o.help || o.version || o.print_env) return fflush(stdout) == 0 ? 0 : 1;
    bool doctor = is_doctor(&o);
    if ((st = find_script(&o, &p, script, sizeof script)) != 0) return st;
    if (doctor && strcmp(script, "doctor") != 0) { /* no file of that name lies here */
        int n = argc - (int)(o.args - argv);
        return rank_run_lua("ddp_host_main", n, o.args);
    }
    if (o.prompt) terminal_keep();
    st = run(&o, &p, started);
    terminal_restore();
    return st;
}
