/* spawn.c -- starting the ranks: their environment, their pipes, their process groups. */
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "launch.h"

extern char **environ;

/* ---- the environment ------------------------------------------------------------------------------------------------
 */

enum { SET_MAX = 32, SET_LEN = 6000 };

typedef struct env_list {
    char *set[SET_MAX]; /* "NAME=value", owned */
    int n_set;
    char **all; /* what posix_spawn takes; the array alone is owned */
} env_list;

static void env_set(env_list *e, const char *name, const char *fmt, ...) DDP_PRINTF(3, 4);
static void env_set(env_list *e, const char *name, const char *fmt, ...) {
    char line[SET_LEN];
    va_list ap;
    int n = snprintf(line, sizeof line, "%s=", name);
    va_start(ap, fmt);
    vsnprintf(line + n, sizeof line - (size_t)n, fmt, ap);
    va_end(ap);
    char *copy = e->n_set < SET_MAX ? strdup(line) : NULL;
    if (copy) e->set[e->n_set++] = copy;
}

static bool is_set(const env_list *e, const char *line) {
    size_t name = strcspn(line, "=") + 1;
    for (int i = 0; i < e->n_set; i++)
        if (strncmp(e->set[i], line, name) == 0) return true;
    return false;
}

/* Ours, then what we inherited and did not set. */
static bool env_join(env_list *e) {
    size_t n = 0, k = 0;
    while (environ[n]) n++;
    e->all = malloc((n + (size_t)e->n_set + 1) * sizeof *e->all);
    if (!e->all) return false;
    for (int i = 0; i < e->n_set; i++) e->all[k++] = e->set[i];
    for (size_t i = 0; i < n; i++)
        if (!is_set(e, environ[i])) e->all[k++] = environ[i];
    e->all[k] = NULL;
    return true;
}

static void env_free(env_list *e) {
    for (int i = 0; i < e->n_set; i++) free(e->set[i]);
    free(e->all);
}

static bool env_of_rank(const job *j, int r, int status_fd, int report_fd, env_list *e) {
    *e = (env_list){0};
    env_set(e, "RANK", "%d", j->first_rank + r);
    env_set(e, "LOCAL_RANK", "%d", r);
    env_set(e, "WORLD_SIZE", "%d", j->world);
    env_set(e, "LOCAL_WORLD_SIZE", "%d", j->n);
    env_set(e, "GROUP_RANK", "%d", j->node);
    env_set(e, "GROUP_WORLD_SIZE", "%d", j->nodes);
    env_set(e, "MASTER_ADDR", "%s", j->addr);
    env_set(e, "MASTER_PORT", "%d", j->program_port);
    env_set(e, "DDP_STORE", "launcher");
    env_set(e, "DDP_STORE_PORT", "%d", j->port);
    env_set(e, "DDP_RESTART", "%d", j->restart);
    env_set(e, "DDP_JOB", "%s", j->token);
    env_set(e, "DDP_LAUNCHED", "%.6f", j->started);
    env_set(e, "DDP_ENGINE", "%s", j->o->engine);
    env_set(e, "DDP_STATUS_FD", "%d", status_fd);
    env_set(e, "DDP_REPORT_FD", "%d", report_fd);
    env_set(e, "DDP_FLIGHT_FD", "%d", j->flight_fd);
    env_set(e, "DDP_LUA_PATH", "%s", j->places->lua_path);
    env_set(e, "DDP_LIB", "%s", j->places->lib_dir);
    if (j->o->timeout > 0) env_set(e, "DDP_TIMEOUT", "%.9g", j->o->timeout);
    if (j->threads > 0) env_set(e, "OMP_NUM_THREADS", "%d", j->threads);
    return env_join(e);
}

/* ---- one rank ---- */

/* The write ends that the rank takes; -1: none. */
typedef struct ends {
    int out, err, status, report;
} ends;

static void close_ends(ends *w) {
    int *const fds[] = {&w->out, &w->err, &w->status, &w->report};
    for (size_t i = 0; i < 4; i++)
        if (*fds[i] >= 0) close(*fds[i]);
}

/* A pipe: the end we read never blocks, the other blocks as the rank expects. */
static bool make_pipe(int *read_end, int *write_end) {
    int fd[2];
    if (pipe2(fd, O_CLOEXEC) < 0) return false;
    fcntl(fd[0], F_SETFL, O_NONBLOCK);
    *read_end = fd[0];
    *write_end = fd[1];
    return true;
}

static bool make_pipes(const job *j, rank_proc *p, ends *w) {
    *w = (ends){-1, -1, -1, -1};
    /* One rank writes straight to our stdout, unless its lines have to be seen here. */
    bool direct = j->n == 1 && !j->prefixed && !j->o->log_dir && options_shows(j->o, j->first_rank);
    return (direct || make_pipe(&p->out.fd, &w->out)) && make_pipe(&p->err.fd, &w->err) &&
           make_pipe(&p->status_fd, &w->status) && make_pipe(&p->report_fd, &w->report);
}

static void set_files(posix_spawn_file_actions_t *fa, const job *j, int r, const ends *w) {
    /* A rank is not in the terminal's foreground group: reading from it would stop the rank. A prompt enters it. */
    if (r > 0 || (isatty(0) && !j->o->prompt)) posix_spawn_file_actions_addopen(fa, 0, "/dev/null", O_RDONLY, 0);
    if (w->out >= 0) posix_spawn_file_actions_adddup2(fa, w->out, 1);
    posix_spawn_file_actions_adddup2(fa, w->err, 2);
    posix_spawn_file_actions_adddup2(fa, w->status, w->status); /* onto itself: stays open over exec */
    posix_spawn_file_actions_adddup2(fa, w->report, w->report);
    posix_spawn_file_actions_adddup2(fa, j->flight_fd, j->flight_fd);
}

static int spawn_with(const job *j, rank_proc *p, int r, const ends *w, char **argv, char **env) {
    posix_spawn_file_actions_t fa;
    posix_spawnattr_t attr;
    sigset_t none, every;
    sigemptyset(&none);
    sigfillset(&every);
    posix_spawn_file_actions_init(&fa);
    posix_spawnattr_init(&attr);
    set_files(&fa, j, r, w);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    posix_spawnattr_setpgroup(&attr, 0);
    posix_spawnattr_setsigmask(&attr, &none);
    posix_spawnattr_setsigdefault(&attr, &every);
    int err = posix_spawn(&p->pid, "/proc/self/exe", &fa, &attr, argv, env);
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&fa);
    if (err) p->pid = 0;
    return err;
}

static int spawn_rank(job *j, int r, char **argv, char *cpus, size_t cpus_n) {
    rank_proc *p = &j->ranks[r];
    ends w;
    env_list env = {0};
    int err = 0, per = ddp__cores() / j->n;
    if (j->o->bind_core) snprintf(cpus, cpus_n, "%d:%d", r * (per > 0 ? per : 1), per > 0 ? per : 1);
    if (!make_pipes(j, p, &w)) err = errno;
    else if (!env_of_rank(j, r, w.status, w.report, &env)) err = ENOMEM;
    else err = spawn_with(j, p, r, &w, argv, env.all);
    env_free(&env);
    close_ends(&w);
    if (err) {
        say("cannot start rank %d of %d: %s", j->first_rank + r, j->world, strerror(err));
        return 1;
    }
    guardian_tell(j, p->pid);
    return 0;
}

/* ---- all ranks ---- */

static int open_logs(job *j) {
    char path[4096];
    const char *dir = j->o->log_dir;
    for (size_t i = 1; i <= strlen(dir); i++) { /* with the folders above it */
        if (dir[i] != '/' && dir[i]) continue;
        snprintf(path, sizeof path, "%.*s", (int)i, dir);
        if (mkdir(path, 0777) < 0 && errno != EEXIST) goto fail;
    }
    for (int r = 0; r < j->n; r++) {
        snprintf(path, sizeof path, "%s/rank-%d.out", dir, j->first_rank + r);
        j->ranks[r].log_fd = open(path, O_WRONLY | O_CREAT | (j->restart ? O_APPEND : O_TRUNC) | O_CLOEXEC, 0666);
        if (j->ranks[r].log_fd < 0) goto fail;
    }
    return 0;
fail:
    say("--log-dir: cannot write %s: %s", path, strerror(errno));
    return 1;
}

int spawn_ranks(job *j) {
    char parent[24], cpus[32] = "-";
    size_t n = 0;
    int st = 0;
    if (j->o->log_dir && open_logs(j) != 0) return 1;
    while (j->o->args[n]) n++;
    char **argv = malloc((n + 6) * sizeof *argv);
    if (!argv) {
        say("out of memory");
        return 1;
    }
    snprintf(parent, sizeof parent, "%ld", (long)getpid());
    char *const head[] = {"ddprun", "--rank-trampoline", parent, cpus,
                          j->o->exec     ? "exec"
                          : j->o->prompt ? "prompt"
                                         : "script"};
    memcpy(argv, head, sizeof head);
    memcpy(argv + 5, j->o->args, (n + 1) * sizeof *argv);
    for (int r = 0; r < j->n && st == 0; r++) st = spawn_rank(j, r, argv, cpus, sizeof cpus);
    free(argv);
    return st;
}
