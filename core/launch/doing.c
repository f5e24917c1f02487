/* doing.c -- what the ranks are doing: their flight records, in memory that we own, joined into sentences. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "launch.h"

int doing_open(job *j) {
    size_t bytes = (size_t)j->n * sizeof(ddp_flight);
    j->flight_fd = memfd_create("ddp-flight", MFD_CLOEXEC);
    if (j->flight_fd >= 0 && ftruncate(j->flight_fd, (off_t)bytes) == 0) {
        void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, j->flight_fd, 0);
        if (p != MAP_FAILED) j->flight = p;
    }
    if (j->flight) return 0;
    say("no memory for the flight records of %d ranks: %s", j->n, strerror(errno));
    return 1;
}

void doing_close(job *j) {
    if (j->flight) munmap(j->flight, (size_t)j->n * sizeof(ddp_flight));
    if (j->flight_fd >= 0) close(j->flight_fd);
    j->flight = NULL;
    j->flight_fd = -1;
}

/* The letter of a process's state: R, S, D, T (stopped), Z; '?' when it cannot be read. */
static char state_of(pid_t pid) {
    char path[64], line[512];
    snprintf(path, sizeof path, "/proc/%ld/stat", (long)pid);
    FILE *f = fopen(path, "re");
    size_t n = f ? fread(line, 1, sizeof line - 1, f) : 0;
    if (f) fclose(f);
    line[n] = 0;
    const char *paren = strrchr(line, ')');
    return paren && paren[1] ? paren[2] : '?';
}

const char *doing_text(const job *j, int r, double now, char *text, size_t n) {
    const rank_proc *p = &j->ranks[r];
    const char *how = p->finished ? "finished: " : p->exited ? "gone; was: " : "";
    char state = p->exited ? '?' : state_of(p->pid), what[600];
    if (state == 'T' || state == 't') how = "stopped (by SIGSTOP, or a debugger): ";
    if (state == 'D') how = "in the kernel (a disk, or a network file system): ";
    if (!p->joined) snprintf(what, sizeof what, "has not joined");
    else ddp__flight_text(&j->flight[r], p->exited ? p->exit_at : now, what, sizeof what);
    snprintf(text, n, "%s%s", how, what);
    return text;
}

void doing_add_all(text *t, const job *j, const char *margin) {
    char line[800], what[700];
    double now = ddp__now();
    for (int r = 0; r < j->n; r++) {
        snprintf(line, sizeof line, "%srank %d: %s\n", margin, j->first_rank + r,
                 doing_text(j, r, now, what, sizeof what));
        text_add(t, line, strlen(line));
    }
}

int doing_who_is_behind(const job *j, int r, char *what, size_t n) {
    const ddp_flight *f = &j->flight[r];
    uint32_t seq = atomic_load(&f->waits);
    ddp_flight_call c;
    int behind = -1;
    if (!j->ranks[r].joined || atomic_load(&f->failed) != DDP_ETIMEOUT || !ddp__flight_call_of(f, seq, &c)) return -1;
    for (int q = 0; q < j->n; q++) {
        if (q == r || !j->ranks[q].joined || (int32_t)(atomic_load(&j->flight[q].posted) - seq) >= 0) continue;
        if (behind >= 0) return -1; /* several: the waiting rank's own words name them */
        behind = q;
    }
    if (behind >= 0) ddp__signature_call(&c.sig, seq, what, n);
    return behind;
}

void doing_ask(const job *j, int r) {
    const rank_proc *p = &j->ranks[r]; /* another program than a script may not expect the signal */
    if (!j->o->exec && p->pid > 0 && !p->exited && p->joined && !p->finished) kill(p->pid, SIGUSR1);
}

/* Seconds after which a wait is worth a line: a tenth of the timeout. */
static double long_wait(const job *j) { return (j->o->timeout > 0 ? j->o->timeout : 600) / 10; }

void doing_watch(job *j) {
    double now = ddp__now();
    if (j->n == 1 || j->stopping || now < j->watch_at) return;
    j->watch_at = now + (long_wait(j) < 10 ? long_wait(j) / 10 : 1);
    for (int r = 0; r < j->n; r++) {
        const ddp_flight *f = &j->flight[r];
        uint32_t seq = atomic_load(&f->waits);
        char text[600];
        ddp_flight_call c;
        if (!j->ranks[r].joined || j->ranks[r].exited || seq == 0 || seq == j->warned || now - f->since < long_wait(j))
            continue;
        if (!ddp__flight_call_of(f, seq, &c) || c.patient) continue;
        j->warned = seq;
        say("rank %d %s", j->first_rank + r, ddp__flight_text(f, now, text, sizeof text));
        for (int q = 0; q < j->n; q++) {
            if ((int32_t)(atomic_load(&j->flight[q].posted) - seq) >= 0) continue;
            say("  rank %d has not come: %s", j->first_rank + q, doing_text(j, q, now, text, sizeof text));
            doing_ask(j, q);
        }
        return;
    }
}
