/* report.c -- --report: rank 0's JSON, put into place whole. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launch.h"

static int write_file(int fd, const char *p, size_t n) {
    while (n) {
        ssize_t k = write(fd, p, n);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) return -1;
        p += k;
        n -= (size_t)k;
    }
    return 0;
}

int report_write(job *j) {
    const char *file = j->o->report;
    text *t = &j->ranks[0].report;
    char tmp[4096];
    int fd;
    if (!file || j->first_rank > 0) return 0; /* rank 0 lives on node 0 */
    if (t->n == 0) {
        if (j->first >= 0 || j->stop_signal) return 0; /* the failure is the news */
        say("--report: rank 0 sent no report, so %s is not written", file);
        return 1;
    }
    if (t->p[t->n - 1] != '\n') text_add(t, "\n", 1);
    snprintf(tmp, sizeof tmp, "%s.%ld.tmp", file, (long)getpid());
    fd = open(tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) goto fail;
    if (write_file(fd, t->p, t->n) < 0) goto fail_written;
    if (close(fd) < 0 || rename(tmp, file) < 0) {
        fd = -1;
        goto fail_written;
    }
    return 0;
fail_written:;
    int err = errno;
    if (fd >= 0) close(fd);
    unlink(tmp);
    errno = err;
fail:
    say("--report: cannot write %s: %s", file, strerror(errno));
    return 1;
}
