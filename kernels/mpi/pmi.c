/* pmi.c -- a launcher's side of PMI-1, a protocol of lines "cmd=NAME key=value ...", over a socket pair: so that MPICH
 * starts without mpirun. Keys live in the job's store; a barrier is a counter there and a key that the last one sets. */
#include "pmi.h"

#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { LINE = 4096, WORD = 1200 };

typedef struct pmi {
    ddp_boot boot;
    int fd;
    int64_t barriers;
} pmi;

static void say(const pmi *p, const char *fmt, ...) DDP_PRINTF(2, 3);
static void say(const pmi *p, const char *fmt, ...) {
    char line[LINE];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(line, sizeof line - 1, fmt, ap);
    va_end(ap);
    if (n < 0 || n >= LINE - 1) return;
    line[n++] = '\n';
    if (send(p->fd, line, (size_t)n, MSG_NOSIGNAL) != n) close(p->fd); /* MPICH sees that the launcher is gone */
}

/* The word after "name=" in line, up to a blank; `rest`: up to the end of the line. */
static const char *word(const char *line, const char *name, bool rest, char *out) {
    char key[32];
    snprintf(key, sizeof key, " %s=", name);
    const char *at = strstr(line, key);
    out[0] = 0;
    if (!at) return out;
    at += strlen(key);
    int n = (int)(rest ? strlen(at) : strcspn(at, " "));
    snprintf(out, WORD, "%.*s", n, at);
    return out;
}

/* Where the ranks are: hosts of equally many ranks, in order. "" when they are not so. */
static void mapping(const ddp_boot *b, char *out, size_t n) {
    out[0] = 0;
    if (b->local_size > 0 && b->size % b->local_size == 0)
        snprintf(out, n, "(vector,(0,%d,%d))", b->size / b->local_size, b->local_size);
}

static void get(const pmi *p, const char *line) {
    char key[WORD], path[WORD + 16], text[WORD];
    void *value = NULL;
    size_t n = 0;
    word(line, "key", false, key);
    if (strcmp(key, "PMI_process_mapping") == 0) {
        mapping(&p->boot, text, sizeof text);
        if (text[0]) say(p, "cmd=get_result rc=0 msg=success value=%s", text);
        else say(p, "cmd=get_result rc=-1 msg=key_not_found value=unknown");
        return;
    }
    snprintf(path, sizeof path, "pmi/%.200s",
             key); /* all puts are before the barrier, so it is there or never will be */
    if (ddp__wire_get(&p->boot, path, ddp_now(), &value, &n) == 0)
        say(p, "cmd=get_result rc=0 msg=success value=%.*s", (int)n, (const char *)value);
    else say(p, "cmd=get_result rc=-1 msg=key_not_found value=unknown");
    ddp_error_take(NULL);
    free(value);
}

static void put(const pmi *p, const char *line) {
    char key[WORD], path[WORD + 16], value[WORD];
    word(line, "key", false, key);
    word(line, "value", true, value);
    snprintf(path, sizeof path, "pmi/%.200s", key);
    bool ok = ddp__wire_set(&p->boot, path, value, strlen(value)) == 0;
    ddp_error_take(NULL);
    say(p, "cmd=put_result rc=%d msg=%s", ok ? 0 : -1, ok ? "success" : "no_store");
}

static void barrier(pmi *p) {
    char count[48], open[48];
    int64_t n = 0;
    void *value = NULL;
    size_t len = 0;
    snprintf(count, sizeof count, "pmi-count/%lld", (long long)p->barriers);
    snprintf(open, sizeof open, "pmi-open/%lld", (long long)p->barriers++);
    bool ok = ddp__wire_add(&p->boot, count, 1, &n) == 0;
    if (ok && n == p->boot.size) ok = ddp__wire_set(&p->boot, open, "1", 1) == 0;
    if (ok) ok = ddp__wire_get(&p->boot, open, ddp_now() + p->boot.timeout, &value, &len) == 0;
    ddp_error_take(NULL);
    free(value);
    if (ok) say(p, "cmd=barrier_out rc=0");
    else close(p->fd);
}

/* One line; false: the last. */
static bool answer(pmi *p, const char *line) {
    char cmd[WORD], with_blank[LINE + 2];
    snprintf(with_blank, sizeof with_blank, " %s", line);
    word(with_blank, "cmd", false, cmd);
    if (strcmp(cmd, "init") == 0) say(p, "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0");
    else if (strcmp(cmd, "get_maxes") == 0) say(p, "cmd=maxes rc=0 kvsname_max=64 keylen_max=64 vallen_max=1024");
    else if (strcmp(cmd, "get_appnum") == 0) say(p, "cmd=appnum rc=0 appnum=0");
    else if (strcmp(cmd, "get_my_kvsname") == 0) say(p, "cmd=my_kvsname rc=0 kvsname=ddp");
    else if (strcmp(cmd, "get_universe_size") == 0) say(p, "cmd=universe_size rc=0 size=%d", p->boot.size);
    else if (strcmp(cmd, "put") == 0) put(p, with_blank);
    else if (strcmp(cmd, "get") == 0) get(p, with_blank);
    else if (strcmp(cmd, "barrier_in") == 0) barrier(p);
    else if (strcmp(cmd, "finalize") == 0) say(p, "cmd=finalize_ack rc=0");
    else if (strcmp(cmd, "abort") == 0) return false;
    else say(p, "cmd=%.60s rc=-1", cmd);
    return strcmp(cmd, "finalize") != 0;
}

static void *serve(void *arg) {
    pmi *p = arg;
    char text[LINE];
    size_t n = 0;
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    for (;;) {
        ssize_t k = recv(p->fd, text + n, sizeof text - 1 - n, 0);
        if (k <= 0) return NULL;
        n += (size_t)k;
        text[n] = 0;
        for (char *end; (end = strchr(text, '\n'));) {
            *end = 0;
            if (!answer(p, text)) return NULL;
            n -= (size_t)(end + 1 - text);
            memmove(text, end + 1, n + 1);
        }
        if (n == sizeof text - 1) return NULL;
    }
}

int pmi_begin(const ddp_boot *b) {
    int pair[2];
    pthread_t thread;
    char text[16];
    pmi *p = calloc(1, sizeof *p); /* the thread's, for the life of the process */
    if (!p) return ddp__fail(DDP_ENOMEM, "mpi: out of memory");
    if (ddp__wire_again(&p->boot, b) < 0 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
        free(p);
        return ddp__fail(DDP_EIO, "mpi: no socket pair");
    }
    p->fd = pair[0];
    if (pthread_create(&thread, NULL, serve, p) != 0) return ddp__fail(DDP_ENOMEM, "mpi: no thread");
    pthread_detach(thread);
    snprintf(text, sizeof text, "%d", pair[1]);
    setenv("PMI_FD", text, 1);
    snprintf(text, sizeof text, "%d", b->rank);
    setenv("PMI_RANK", text, 1);
    snprintf(text, sizeof text, "%d", b->size);
    setenv("PMI_SIZE", text, 1);
    return 0;
}

void pmi_end(void) {
    unsetenv("PMI_FD");
    unsetenv("PMI_RANK");
    unsetenv("PMI_SIZE");
}
