/* job.c -- the life of a job: start, one loop over signals and pipes, end. */
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent.h"

/* Seconds: what a pipe that grandchildren hold open may still bring after the last rank left; how long we wait for
 * ranks that SIGKILL does not end (they hang in the kernel); in which a repeated signal is the same one (timeout(1)
 * sends it to the process and to its group). */
static const double DRAIN = 0.2, UNKILLABLE = 3, SAME_SIGNAL = 0.1;
enum { FDS_A_RANK = 4, FDS_BEFORE = 2 };

/* ---- signals and the end of ranks ---- */

static void signal_groups(job *j, int sig) {
    for (int r = 0; r < j->n; r++) /* a dead leader stays a zombie until the end, so its group's id is still its own */
        if (j->ranks[r].pid > 0) kill(-j->ranks[r].pid, sig);
}

void job_stop(job *j, int sig) {
    if (j->stopping) return;
    j->stopping = true;
    j->stopped_at = ddp__now();
    j->kill_at = j->stopped_at + j->o->grace;
    signal_groups(j, sig);
    signal_groups(j, SIGCONT); /* a stopped rank would not see it */
}

static void kill_all(job *j) {
    size_t n = 0;
    if (j->killed) return;
    j->stopping = j->killed = true;
    j->killed_at = ddp__now();
    for (int r = 0; r < j->n && n < sizeof j->stubborn - 8; r++)
        if (!j->ranks[r].exited)
            n += (size_t)snprintf(j->stubborn + n, sizeof j->stubborn - n, "%s%d", n ? ", " : "", r);
    signal_groups(j, SIGKILL);
}

/* What the ranks are doing now, for a user who asks by SIGUSR1. */
static void tell_doing(job *j) {
    text t = {0};
    if (j->flight) doing_add_all(&t, j, "ddprun: ");
    output_write(j, 2, t.p, t.n);
    free(t.p);
    for (int r = 0; r < j->n; r++) doing_ask(j, r);
}

static void user_signal(job *j, int sig) {
    if (!j->stopping) {
        j->stop_signal = sig;
        job_stop(j, sig);
    } else if (ddp__now() > j->stopped_at + SAME_SIGNAL) {
        kill_all(j);
    }
}

void job_attend(job *j) {
    struct signalfd_siginfo s;
    while (read(j->signal_fd, &s, sizeof s) == sizeof s) {
        if (s.ssi_signo == SIGCHLD) j->child_news = true;
        else if (s.ssi_signo == SIGUSR1) tell_doing(j);
        else user_signal(j, (int)s.ssi_signo);
    }
    if (j->stopping && !j->killed && ddp__now() >= j->kill_at) kill_all(j);
}

/* ---- pipes ---- */

static void close_fd(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

/* Reads all that is there into t; closes at the end. */
static void read_into(int *fd, text *t) {
    char buf[4096];
    while (*fd >= 0) {
        ssize_t k = read(*fd, buf, sizeof buf);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0 && errno == EAGAIN) return;
        if (k <= 0 || !text_add(t, buf, (size_t)k)) close_fd(fd);
    }
}

static void read_status(job *j, int r) {
    text *t = &j->ranks[r].status;
    char *eol;
    read_into(&j->ranks[r].status_fd, t);
    while (t->n && (eol = memchr(t->p, '\n', t->n))) {
        size_t n = (size_t)(eol - t->p) + 1;
        *eol = 0;
        verdict_status_line(j, r, t->p);
        memmove(t->p, t->p + n, t->n - n);
        t->n -= n;
    }
}

static void read_stream(job *j, int r, stream *s, int times) {
    int k = 1;
    while (times-- > 0 && k > 0) k = output_read(j, r, s);
    if (k < 0) output_close(j, r, s);
}

/* All that a rank has left in its pipes. A bound, for a grandchild may go on writing. */
static void drain(job *j, int r) {
    rank_proc *p = &j->ranks[r];
    read_stream(j, r, &p->out, 64);
    read_stream(j, r, &p->err, 64);
    read_into(&p->report_fd, &p->report);
    read_status(j, r);
}

/* ---- the loop ---- */

static void see_exit(job *j, int r) {
    rank_proc *p = &j->ranks[r];
    siginfo_t info = {0};
    if (p->exited || p->pid <= 0) return;
    if (waitid(P_PID, (id_t)p->pid, &info, WEXITED | WNOHANG | WNOWAIT) < 0 || info.si_pid == 0) return;
    p->signal = info.si_code == CLD_EXITED ? 0 : info.si_status;
    p->code = p->signal ? 128 + p->signal : info.si_status;
    p->exit_at = ddp__now();
    p->exited = true;
    drain(j, r); /* what it said before it left counts for the judgement */
    verdict_exited(j, r);
}

static bool some_stepped(const job *j) {
    for (int r = 0; j->flight && r < j->n; r++)
        if (atomic_load(&j->flight[r].progress.steps) > 0) return true;
    return false;
}

static bool all_exited(const job *j) {
    for (int r = 0; r < j->n; r++)
        if (!j->ranks[r].exited) return false;
    return true;
}

static bool all_quiet(const job *j) {
    for (int r = 0; r < j->n; r++)
        if (j->ranks[r].out.fd >= 0 || j->ranks[r].err.fd >= 0) return false;
    return true;
}

/* Milliseconds until the loop has something to do without news. */
static int patience(const job *j) {
    double now = ddp__now(), until = now + 3600;
    if (verdict_pending(j)) until = now + 0.02;
    if (j->stopping && !j->killed && j->kill_at < until) until = j->kill_at;
    if (j->killed && now + 0.1 < until) until = now + 0.1;
    if (j->drain_until > now && j->drain_until < until) until = j->drain_until;
    if (j->agent && now + 0.2 < until) until = now + 0.2;
    if (j->n > 1 && !j->stopping && j->watch_at > now && j->watch_at < until) until = j->watch_at;
    return until <= now ? 0 : (int)((until - now) * 1000) + 1;
}

static void fill_polls(const job *j, struct pollfd *polls) {
    polls[0] = (struct pollfd){.fd = j->signal_fd, .events = POLLIN};
    polls[1] = (struct pollfd){.fd = agent_fd(j), .events = POLLIN};
    for (int r = 0; r < j->n; r++) {
        const rank_proc *p = &j->ranks[r];
        const int fds[FDS_A_RANK] = {p->out.fd, p->err.fd, p->status_fd, p->report_fd};
        for (int k = 0; k < FDS_A_RANK; k++)
            polls[FDS_BEFORE + r * FDS_A_RANK + k] = (struct pollfd){.fd = fds[k], .events = POLLIN};
    }
}

static void read_ready(job *j, const struct pollfd *polls) {
    for (int r = 0; r < j->n; r++) {
        const struct pollfd *p = polls + FDS_BEFORE + r * FDS_A_RANK;
        if (p[0].revents) read_stream(j, r, &j->ranks[r].out, 1);
        if (p[1].revents) read_stream(j, r, &j->ranks[r].err, 1);
        if (p[2].revents) read_status(j, r);
        if (p[3].revents) read_into(&j->ranks[r].report_fd, &j->ranks[r].report);
    }
}

/* ---- other hosts ---- */

/* Tells them once of our failure, or that all went well here. */
static void tell_others(job *j) {
    text t = {0};
    if (j->told == 1 || j->remote[0]) return;
    if (j->first >= 0) {
        verdict_text(&t, j);
        agent_tell_failure(j, j->ranks[j->first].code ? j->ranks[j->first].code : 1, t.p ? t.p : "");
    } else if (j->stop_signal) {
        const char *name = sigabbrev_np(j->stop_signal);
        text_add(&t, "ddprun: stopped by SIG", 22);
        text_add(&t, name ? name : "?", name ? strlen(name) : 1);
        agent_tell_failure(j, 128 + j->stop_signal, t.p ? t.p : "");
    }
    if (j->first >= 0 || j->stop_signal) j->told = 1;
    else if (j->told == 0 && all_exited(j) && !j->stopping) {
        agent_tell_done(j);
        j->told = 2;
    }
    free(t.p);
}

/* Hears of them; true: all are done. */
static bool hear_others(job *j) {
    agent_news news;
    if (!j->agent) return true;
    tell_others(j);
    agent_look(j, &news);
    if (j->remote[0] || j->told == 1) return true;
    if (news.failed_node >= 0 && news.failed_node != j->node) {
        snprintf(j->remote, sizeof j->remote, "ddprun: node %d failed first; it says:\n%s", news.failed_node,
                 news.failure);
        j->remote_code = news.code;
    } else if (news.lost_node >= 0) {
        const char *what = news.lost_node == 0 && j->node != 0 ? ", where the job's store is," : "";
        snprintf(j->remote, sizeof j->remote, "ddprun: node %d (%s)%s is lost: not heard of for %.1f s", news.lost_node,
                 news.lost_host, what, news.lost_for);
        j->remote_code = 1;
        agent_tell_failure(j, 1, j->remote);
    }
    if (j->remote[0]) job_stop(j, SIGTERM);
    return news.all_done || j->remote[0];
}

static void loop(job *j, struct pollfd *polls) {
    for (;;) {
        if (j->child_news) {
            j->child_news = false;
            for (int r = 0; r < j->n; r++) see_exit(j, r);
        }
        verdict_decide(j);
        doing_watch(j);
        bool others_done = hear_others(j);
        if (all_exited(j)) {
            if (j->drain_until <= 0) j->drain_until = ddp__now() + DRAIN;
            if (others_done && (all_quiet(j) || ddp__now() >= j->drain_until)) return;
        }
        if (j->killed && ddp__now() > j->killed_at + UNKILLABLE) return;
        fill_polls(j, polls);
        if (j->child_news) continue;
        if (poll(polls, FDS_BEFORE + (nfds_t)j->n * FDS_A_RANK, patience(j)) < 0) continue;
        job_attend(j);
        read_ready(j, polls);
    }
}

/* ---- start and end ---- */

/* All signals that we handle come through one descriptor. Before any thread starts, so that none takes them. */
static int open_signals(job *j) {
    sigset_t set;
    struct sigaction hup;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGQUIT);
    sigaddset(&set, SIGUSR1);
    if (sigaction(SIGHUP, NULL, &hup) == 0 && hup.sa_handler != SIG_IGN) sigaddset(&set, SIGHUP); /* nohup */
    signal(SIGPIPE, SIG_IGN);
    signal(SIGINT, SIG_DFL); /* a shell's background job inherits "ignore": it could not be stopped */
    signal(SIGTERM, SIG_DFL);
    signal(SIGQUIT, SIG_DFL);
    signal(SIGUSR1, SIG_DFL);
    signal(SIGCHLD, SIG_DFL); /* an inherited "ignore" would reap our ranks */
    sigprocmask(SIG_BLOCK, &set, NULL);
    j->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (j->signal_fd >= 0) return 0;
    say("signalfd: %s", strerror(errno));
    return 1;
}

static int open_store(job *j) {
    j->port = j->o->master_port;
    if (j->nodes > 1) return agent_join(j);
    j->world = j->n;
    int fd = ddp__store_listen("127.0.0.1", &j->port);
    if (fd >= 0) j->store = ddp__store_serve(fd, j->token);
    if (j->store) return 0;
    const char *why;
    ddp_error_take(&why);
    say("%s", why);
    return 1;
}

/* A program that is not ours may want to serve at MASTER_PORT itself, as torch does: a port of its own, bound here so that the
 * system gives it to nobody else, and not listened at, so that the program can. */
static int hold_port(job *j) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY)};
    socklen_t len = sizeof a;
    int on = 1;
    if (!j->o->exec || j->node != 0) return 0; /* node 0 tells the others */
    j->port_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (j->port_fd < 0 || setsockopt(j->port_fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) < 0 ||
        bind(j->port_fd, (struct sockaddr *)&a, len) < 0 || getsockname(j->port_fd, (struct sockaddr *)&a, &len) < 0) {
        say("no port for the program: %s", strerror(errno));
        return 1;
    }
    j->program_port = ntohs(a.sin_port);
    return 0;
}

static void choose_threads(job *j) {
    const char *set = getenv("OMP_NUM_THREADS");
    int cores = ddp__cores();
    char threads[64];
    if (set && *set) snprintf(threads, sizeof threads, "OMP_NUM_THREADS=%.20s", set);
    else {
        j->threads = cores / j->n < 1 ? 1 : cores / j->n;
        snprintf(threads, sizeof threads, "%d thread%s", j->threads, j->threads == 1 ? "" : "s");
    }
    int own = cores / j->n > 0 ? cores / j->n : 1;
    if (j->o->bind_core) say("each rank is bound to %d core%s of its own", own, own == 1 ? "" : "s");
    if (j->nodes > 1)
        say("node %d of %d: ranks %d to %d of %d, %s each", j->node, j->nodes, j->first_rank, j->first_rank + j->n - 1,
            j->world, threads);
    if (j->world == 1 || (j->nodes > 1 && j->n <= cores)) return;
    if (j->n > cores)
        say("%d ranks, %s each; more ranks than usable cores (%d), so they take turns", j->n, threads, cores);
    else say("%d ranks, %s each", j->n, threads);
}

/* On one host nobody can guess it; on several it is what all of them know: DDP_JOB, else the meeting place. */
static int make_token(job *j) {
    unsigned char b[16];
    const char *given = getenv("DDP_JOB");
    if (given && *given) snprintf(j->token, sizeof j->token, "%s", given);
    else if (j->nodes > 1) snprintf(j->token, sizeof j->token, "%d %.200s %d", j->nodes, j->addr, j->o->master_port);
    if (j->token[0]) return 0;
    if (getrandom(b, sizeof b, 0) != sizeof b) {
        say("getrandom: %s", strerror(errno));
        return 1;
    }
    for (size_t i = 0; i < sizeof b; i++) snprintf(j->token + 2 * i, 3, "%02x", b[i]);
    return 0;
}

static int begin(job *j) {
    j->ranks = calloc((size_t)j->n, sizeof *j->ranks);
    if (!j->ranks) {
        say("out of memory");
        return 1;
    }
    for (int r = 0; r < j->n; r++) {
        rank_proc *p = &j->ranks[r];
        p->out = (stream){.fd = -1, .to = 1};
        p->err = (stream){.fd = -1, .to = 2};
        p->status_fd = p->report_fd = p->log_fd = -1;
    }
    j->prefixed = j->n > 1 || j->nodes > 1 || j->o->timestamps;
    j->at_line_start[1] = j->at_line_start[2] = true;
    j->oom_kills = verdict_oom_kills();
    int st = open_signals(j);
    if (st == 0) st = doing_open(j);
    if (st == 0) st = make_token(j);
    if (st == 0) st = hold_port(j);
    if (st == 0) st = open_store(j);
    if (st != 0) return st;
    if (!j->o->exec) j->program_port = j->port;
    choose_threads(j);
    st = guardian_start(j);
    return st == 0 ? spawn_ranks(j) : st;
}

/* Nothing of the job outlives this. */
static void end(job *j) {
    if (!j->ranks) return;
    signal_groups(j, SIGKILL);
    guardian_dismiss(j); /* before the ids are given back */
    for (int r = 0; r < j->n; r++) {
        rank_proc *p = &j->ranks[r];
        drain(j, r);
        output_close(j, r, &p->out);
        output_close(j, r, &p->err);
        close_fd(&p->status_fd);
        close_fd(&p->report_fd);
        close_fd(&p->log_fd);
        if (p->pid > 0) waitpid(p->pid, NULL, p->exited ? 0 : WNOHANG);
    }
    agent_leave(j);
    ddp__store_server_free(j->store);
    j->store = NULL;
}

static void free_all(job *j) {
    for (int r = 0; j->ranks && r < j->n; r++) {
        free(j->ranks[r].status.p);
        free(j->ranks[r].report.p);
        free(j->ranks[r].error);
    }
    free(j->ranks);
    free(j->doing.p);
    doing_close(j);
    close_fd(&j->signal_fd);
    close_fd(&j->port_fd);
}

int job_run(job *j) {
    struct pollfd *polls = calloc(FDS_BEFORE + (size_t)j->n * FDS_A_RANK, sizeof *polls);
    int st = polls ? begin(j) : 1;
    if (st != 0) {
        end(j);
        goto out;
    }
    loop(j, polls);
    j->stepped = some_stepped(j);
    end(j);
    st = verdict_print(j);
    int reported = report_write(j);
    if (st == 0) st = reported;
out:
    free(polls);
    free_all(j);
    return st;
}
