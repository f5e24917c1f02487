/* output.c -- what ranks print: merged by whole lines, each rank's in its order. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "launch.h"

enum { READ_STEP = 64 << 10, LINE_MAX_BYTES = 256 << 20 };

bool text_add(text *t, const void *p, size_t n) {
    if (t->room - t->n < n + 1) {
        size_t room = t->room ? t->room : 4096;
        while (room - t->n < n + 1) room *= 2;
        char *grown = realloc(t->p, room);
        if (!grown) return false;
        t->p = grown;
        t->room = room;
    }
    if (n) memcpy(t->p + t->n, p, n);
    t->n += n;
    t->p[t->n] = 0;
    return true;
}

/* Seconds that a reader has for our last words when the job is being ended. */
static const double LAST_WORDS = 1;

/* Waits until fd takes bytes, and attends to signals meanwhile: Ctrl-C works while a pager holds our output back.
 * False: give up. */
static bool wait_writable(job *j, int fd) {
    for (;;) {
        struct pollfd p[] = {{.fd = fd, .events = POLLOUT}, {.fd = j->signal_fd, .events = POLLIN}};
        int k = poll(p, 2, 100);
        if (k < 0 && errno != EINTR) return false;
        if (p[0].revents) return true;
        job_attend(j);
        if (j->stopping && ddp__now() > j->stopped_at + LAST_WORDS) return false;
    }
}

void output_write(job *j, int fd, const char *p, size_t n) {
    struct stat st;
    if (n == 0 || j->broken[fd]) return;
    j->at_line_start[fd] = p[n - 1] == '\n';
    /* A pipe that polls writable takes PIPE_BUF bytes without blocking; a file takes anything. */
    size_t step = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) ? 1 << 20 : 4096;
    while (n) {
        if (!wait_writable(j, fd)) {
            j->broken[fd] = true; /* or each further piece would wait again */
            return;
        }
        ssize_t k = write(fd, p, n < step ? n : step);
        if (k < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (k < 0) {
            j->broken[fd] = true;
            if (fd == 1 && errno != EPIPE) say("cannot write to stdout: %s", strerror(errno));
            return;
        }
        p += k;
        n -= (size_t)k;
    }
}

static size_t make_prefix(const job *j, int r, char *buf, size_t n) {
    size_t k = 0;
    if (j->o->timestamps) {
        struct timespec t;
        struct tm tm;
        clock_gettime(CLOCK_REALTIME, &t);
        localtime_r(&t.tv_sec, &tm);
        k = strftime(buf, n, "%H:%M:%S", &tm);
        k += (size_t)snprintf(buf + k, n - k, ".%03ld ", t.tv_nsec / 1000000);
    }
    if (j->world > 1) k += (size_t)snprintf(buf + k, n - k, "[r%d] ", j->first_rank + r);
    return k;
}

/* Writes whole lines (a last one without its end gets it), each with the prefix. */
static void write_lines(job *j, int r, int to, const char *p, size_t n) {
    char prefix[64];
    size_t len = make_prefix(j, r, prefix, sizeof prefix);
    text out = {0};
    for (const char *end = p + n; p < end;) {
        const char *eol = memchr(p, '\n', (size_t)(end - p));
        size_t line = (size_t)((eol ? eol : end) - p);
        if (!text_add(&out, prefix, len) || !text_add(&out, p, line) || !text_add(&out, "\n", 1)) break;
        p += line + 1;
    }
    output_write(j, to, out.p, out.n);
    free(out.p);
}

static void keep_tail(rank_proc *p, const char *b, size_t n) {
    if (n > TAIL_BYTES) {
        b += n - TAIL_BYTES;
        n = TAIL_BYTES;
    }
    size_t keep = p->tail_n + n > TAIL_BYTES ? TAIL_BYTES - n : p->tail_n;
    memmove(p->tail, p->tail + p->tail_n - keep, keep);
    memcpy(p->tail + keep, b, n);
    p->tail_n = keep + n;
}

static void write_log(rank_proc *p, const char *b, size_t n) {
    while (n && p->log_fd >= 0) {
        ssize_t k = write(p->log_fd, b, n);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) {
            say("--log-dir: cannot write a rank's file: %s", strerror(errno));
            close(p->log_fd);
            p->log_fd = -1;
            return;
        }
        b += k;
        n -= (size_t)k;
    }
}

/* Takes n bytes that came: whole lines go out, the rest waits for its end. */
static void take(job *j, int r, stream *s, const char *b, size_t n) {
    if (s->to == 2) keep_tail(&j->ranks[r], b, n);
    write_log(&j->ranks[r], b, n);
    if (!options_shows(j->o, j->first_rank + r)) return;
    if (!j->prefixed) {
        output_write(j, s->to, b, n);
        return;
    }
    const char *last = memrchr(b, '\n', n);
    size_t whole = last ? (size_t)(last - b) + 1 : 0;
    if (whole && s->part.n) {
        size_t first = (size_t)((const char *)memchr(b, '\n', n) - b) + 1;
        text_add(&s->part, b, first);
        write_lines(j, r, s->to, s->part.p, s->part.n);
        s->part.n = 0;
        b += first;
        n -= first;
        whole -= first;
    }
    if (whole) write_lines(j, r, s->to, b, whole);
    text_add(&s->part, b + whole, n - whole);
    if (s->part.n < LINE_MAX_BYTES) return;
    write_lines(j, r, s->to, s->part.p, s->part.n); /* not text: it must not eat the host's memory */
    s->part.n = 0;
}

int output_read(job *j, int r, stream *s) {
    static char buf[READ_STEP];
    if (s->fd < 0) return -1;
    ssize_t k = read(s->fd, buf, sizeof buf);
    if (k < 0 && (errno == EINTR || errno == EAGAIN)) return 0;
    if (k <= 0) return -1;
    take(j, r, s, buf, (size_t)k);
    return j->broken[s->to] && s->to == 1 ? -1 : 1; /* the rank learns as it would without us: by SIGPIPE */
}

void output_close(job *j, int r, stream *s) {
    if (s->fd >= 0) close(s->fd);
    s->fd = -1;
    if (s->part.n) write_lines(j, r, s->to, s->part.p, s->part.n);
    free(s->part.p);
    s->part = (text){0};
}
