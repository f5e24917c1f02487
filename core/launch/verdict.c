/* verdict.c -- which rank failed first, and why: the last block that ddprun prints. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent.h"

/* Seconds: in which the cause of a "peer:" failure may still arrive; in which a rank that reported an error may end by
 * itself; in which the other ranks of a program that never calls ddp_finish may leave too; in which a rank tells its stack; in which the host
 * of a rank that did not come says why. */
static const double CAUSE_COMES = 0.1, ENDS_ITSELF = 1, LEAVE_TOGETHER = 0.3, TELLS = 0.2, OTHER_HOST = 1.5;
enum { TAIL_LINES = 10 };

/* ---- what ranks say ---- */

/* \n and \\ as they were. */
static void unescape(char *s) {
    char *to = s;
    for (; *s; s++) {
        if (s[0] == '\\' && s[1] == 'n') *to++ = '\n', s++;
        else if (s[0] == '\\' && s[1] == '\\') *to++ = '\\', s++;
        else *to++ = *s;
    }
    *to = 0;
}

/* Whether an error is the consequence of another rank's: its first line says "peer:", after "file:line:" perhaps. */
static bool is_peer(const char *error) {
    const char *at = strstr(error, "peer:"), *eol = strchr(error, '\n');
    return at && (!eol || at < eol) && (at == error || at[-1] == ' ');
}

void verdict_status_line(job *j, int r, char *line) {
    rank_proc *p = &j->ranks[r];
    if (strcmp(line, "joined") == 0) p->joined = true;
    else if (strcmp(line, "finished") == 0) p->finished = true;
    else if (strncmp(line, "error ", 6) == 0 && !p->error) {
        p->error = strdup(line + 6);
        if (!p->error) return;
        unescape(p->error);
        if (j->stopping) return;
        p->failed = true;
        p->peer = is_peer(p->error);
        p->fail_at = ddp__now();
    }
}

void verdict_exited(job *j, int r) {
    rank_proc *p = &j->ranks[r];
    if (j->stopping || p->failed || p->code == 0) return;
    p->failed = true;
    p->fail_at = p->exit_at;
}

/* ---- choosing ---- */

/* Whether rank q is at work in the job. */
static bool works(const rank_proc *q) { return !q->exited && !q->finished; }

/* A rank that exited 0 without ddp_finish fails the job when others wait for it. */
static void judge_left(job *j, int r, double now) {
    rank_proc *p = &j->ranks[r];
    int waits = ddp__store_server_waiting(j->store);
    if (!p->exited || p->code != 0 || p->finished || p->failed) return;
    for (int q = 0; q < j->n && !p->failed; q++) {
        const rank_proc *other = &j->ranks[q];
        if (q == r || !works(other)) continue;
        if (p->joined) p->failed = other->joined && now > p->exit_at + LEAVE_TOGETHER;
        else p->failed = other->joined || waits == q;
        if (!p->failed) continue;
        j->waiter = q;
        j->in_rendezvous = !p->joined;
        p->left = true;
        p->fail_at = p->exit_at;
    }
}

static int earliest(const job *j, bool peer) {
    int best = -1;
    for (int r = 0; r < j->n; r++) {
        const rank_proc *p = &j->ranks[r];
        if (p->failed && p->peer == peer && (best < 0 || p->fail_at < j->ranks[best].fail_at)) best = r;
    }
    return best;
}

/* A rank that was done before rank r failed for want of a peer: it is the peer. */
static int who_left(const job *j, int r) {
    int best = -1;
    for (int q = 0; q < j->n; q++) {
        const rank_proc *p = &j->ranks[q];
        if (q == r || p->failed || !(p->finished || p->exited) || (p->exited && p->code != 0)) continue;
        if (best < 0 || (p->exited && p->exit_at < j->ranks[best].exit_at)) best = q;
    }
    return best;
}

void verdict_decide(job *j) {
    double now = ddp__now();
    bool others = false; /* somebody runs who may still fail of his own */
    if (j->stopping || j->first >= 0) return;
    for (int r = 0; r < j->n; r++) {
        judge_left(j, r, now);
        others |= !j->ranks[r].exited && !j->ranks[r].failed;
    }
    int r = earliest(j, false);
    if (r < 0 && (r = earliest(j, true)) >= 0) {
        double comes = j->agent ? agent_patience(j) + 1 : CAUSE_COMES;
        if ((others || j->agent) && now < j->ranks[r].fail_at + comes) return;
        int left = who_left(j, r);
        if (left >= 0) {
            j->waiter = r;
            j->ranks[left].left = true;
            r = left;
        }
    }
    if (r < 0 || (!j->ranks[r].exited && !j->ranks[r].left && now < j->ranks[r].fail_at + ENDS_ITSELF)) return;
    char what[320];
    int stuck = doing_who_is_behind(j, r, what, sizeof what);
    if (stuck >= 0 && j->asked_at <= 0) { /* its last words: where it is */
        j->asked_at = now;
        doing_ask(j, stuck);
    }
    if (stuck >= 0 && now < j->asked_at + TELLS) return;
    bool in_vain = stuck < 0 && j->ranks[r].joined && atomic_load(&j->flight[r].failed) == DDP_ETIMEOUT;
    if (j->agent && in_vain && now < j->ranks[r].fail_at + OTHER_HOST) return;
    j->first = r;
    j->stuck = stuck;
    if (j->n > 1) doing_add_all(&j->doing, j, "    ");
    job_stop(j, SIGTERM);
}

bool verdict_pending(const job *j) {
    bool left = false, at_work = false;
    if (j->stopping) return false;
    for (int r = 0; r < j->n; r++) {
        const rank_proc *p = &j->ranks[r];
        if (p->failed) return true;
        left |= p->exited && !p->finished;
        at_work |= works(p);
    }
    return left && at_work;
}

/* ---- memory ---- */

long verdict_oom_kills(void) {
    char line[512], path[600] = "";
    long n = -1;
    FILE *f = fopen("/proc/self/cgroup", "re");
    while (f && fgets(line, sizeof line, f)) {
        if (strncmp(line, "0::", 3) != 0) continue;
        line[strcspn(line, "\n")] = 0;
        snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.events", line + 3);
    }
    if (f) fclose(f);
    f = path[0] ? fopen(path, "re") : NULL;
    while (f && fgets(line, sizeof line, f)) {
        if (sscanf(line, "oom_kill %ld", &n) == 1) break;
    }
    if (f) fclose(f);
    return n;
}

/* ---- the block ---- */

static void add(text *t, const char *fmt, ...) DDP_PRINTF(2, 3);
static void add(text *t, const char *fmt, ...) {
    char line[1024];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    if (n > 0) text_add(t, line, (size_t)n < sizeof line ? (size_t)n : sizeof line - 1);
}

/* Lines of s, each behind a margin. */
static void add_lines(text *t, const char *margin, const char *s, size_t n) {
    for (const char *end = s + n; s < end;) {
        const char *eol = memchr(s, '\n', (size_t)(end - s));
        size_t len = (size_t)((eol ? eol : end) - s);
        text_add(t, margin, strlen(margin));
        text_add(t, s, len);
        text_add(t, "\n", 1);
        s += len + 1;
    }
}

/* The number of ranks[r] in the world. */
static int in_world(const job *j, int r) { return j->first_rank + r; }

static void add_tail(text *t, const job *j, int r) {
    const rank_proc *p = &j->ranks[r];
    size_t n = p->tail_n, from;
    size_t told = p->error && !p->left ? strlen(p->error) : 0;
    if (n && p->tail[n - 1] == '\n') n--;
    if (told && n >= told && memcmp(p->tail + n - told, p->error, told) == 0) n -= told; /* it stands above already */
    if (n && p->tail[n - 1] == '\n') n--;
    if (n == 0) return;
    int lines = 0;
    for (from = n; from > 0; from--)
        if (p->tail[from - 1] == '\n' && ++lines == TAIL_LINES) break;
    add(t, "  the last lines of rank %d's stderr:\n", in_world(j, r));
    add_lines(t, "    | ", p->tail + from, n - from);
}

static void add_signal(text *t, int sig) {
    const char *name = sigabbrev_np(sig);
    if (name) add(t, "SIG%s (signal %d)", name, sig);
    else add(t, "signal %d", sig);
}

static void add_cause(text *t, const job *j) {
    const rank_proc *p = &j->ranks[j->first];
    if (p->left) {
        const char *how = p->exited ? "left (exit 0)" : "finished";
        add(t, "ddprun: rank %d %s while rank %d waits for it%s\n", in_world(j, j->first), how, in_world(j, j->waiter),
            j->in_rendezvous ? " in rendezvous" : "");
        return;
    }
    char what[320];
    if (j->stuck >= 0 && doing_who_is_behind(j, j->first, what, sizeof what) == j->stuck) {
        add(t, "ddprun: rank %d is stuck: it has not reached %s, where rank %d waited %.1f s\n", in_world(j, j->stuck),
            what, in_world(j, j->first), p->fail_at - j->flight[j->first].since);
        return;
    }
    add(t, "ddprun: rank %d failed%s %.2f s after the start: ", in_world(j, j->first), j->world > 1 ? " first," : "",
        p->fail_at - j->started);
    bool by_us = p->signal && p->error; /* it had reported, and did not end by itself */
    if (by_us || !p->exited) add(t, "an error, after which it did not end");
    else if (p->signal) {
        add(t, "killed by ");
        add_signal(t, p->signal);
    } else add(t, "exit code %d", p->code);
    add(t, "\n");
}

static void add_oom(text *t, const job *j) {
    long now = j->oom_kills >= 0 ? verdict_oom_kills() : -1;
    if (now <= j->oom_kills) return;
    add(t, "  out of memory: the cgroup's oom_kill count rose by %ld, from %ld to %ld\n", now - j->oom_kills,
        j->oom_kills, now);
}

/* What all were doing, where at least one has joined. */
static void add_doing(text *t, const job *j) {
    bool joined = false;
    for (int r = 0; r < j->n; r++) joined |= j->ranks[r].joined;
    if (!joined || !j->doing.n) return;
    add(t, "  what the ranks were doing:\n");
    text_add(t, j->doing.p, j->doing.n);
}

static void add_failure(text *t, const job *j) {
    const rank_proc *p = &j->ranks[j->first];
    int teller = p->left ? j->waiter : j->first;
    add_cause(t, j);
    if (teller >= 0 && j->ranks[teller].error) {
        if (teller != j->first) add(t, "  rank %d says:\n", in_world(j, teller));
        add_lines(t, "    ", j->ranks[teller].error, strlen(j->ranks[teller].error));
    }
    add_tail(t, j, j->stuck >= 0 ? j->stuck : j->first);
    if (p->signal == SIGKILL) add_oom(t, j);
    add_doing(t, j);
}

void verdict_text(text *t, const job *j) {
    if (j->first >= 0) add_failure(t, j);
}

int verdict_print(job *j) {
    text t = {0};
    int st = 0;
    if (j->first < 0 && !j->stop_signal && !j->remote[0]) return 0;
    if (!j->at_line_start[2]) add(&t, "\n");
    if (j->remote[0]) {
        st = j->remote_code ? j->remote_code : 1;
        text_add(&t, j->remote, strlen(j->remote));
        if (t.p && t.p[t.n - 1] != '\n') add(&t, "\n");
    } else if (j->first >= 0) {
        const rank_proc *p = &j->ranks[j->first];
        bool own = p->exited && p->code != 0 && !p->left && !(p->error && p->signal);
        st = own ? p->code : 1;
        add_failure(&t, j);
    } else {
        st = 128 + j->stop_signal;
        add(&t, "ddprun: stopped by ");
        add_signal(&t, j->stop_signal);
        add(&t, "\n");
    }
    if (j->stubborn[0]) {
        double after = j->killed_at - j->stopped_at;
        add(&t, "  did not leave within %.1f s and had to be killed: rank %s\n", after, j->stubborn);
    }
    output_write(j, 2, t.p, t.n);
    free(t.p);
    return st;
}
