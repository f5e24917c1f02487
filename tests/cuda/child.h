/* child.h -- a case in a process of its own, with its environment; what it printed on stderr and how it ended is looked at. The
 * double reads its settings at the first call, so the parent makes none. */
#ifndef DDP_TEST_CHILD_H
#define DDP_TEST_CHILD_H

#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* The emulator's test kernels lie beside the test. */
static inline void use_test_kernels(void) {
    char path[1100];
    ssize_t n = readlink("/proc/self/exe", path, 1000);
    path[n > 0 ? n : 0] = 0;
    char *slash = strrchr(path, '/');
    strcpy(slash ? slash + 1 : path, "libtest_emulated.so");
    setenv("DDP_DOUBLE_KERNELS", path, 0);
}

typedef struct outcome {
    int status; /* of exit, or 128 + the signal */
    char text[8000];
} outcome;

static int failures;

static void set_variables(const char *variables) { /* "A=1 B=2" */
    char *rest = strdup(variables);
    for (char *word; (word = strsep(&rest, " "));)
        if (*word) putenv(word);
}

static pid_t start_child(const char *variables, int (*body)(void), int output) {
    fflush(stdout);
    pid_t pid = fork();
    if (pid) return pid;
    dup2(output, STDERR_FILENO);
    close(output);
    set_variables(variables);
    alarm(60);
    int status = body();
    if (status) _exit(status); /* what is left then is no leak */
    exit(0);
}

static int exit_status(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status); }

static outcome run_child(const char *variables, int (*body)(void)) {
    outcome o = {0};
    int ends[2], status = 0;
    size_t n = 0;
    if (pipe(ends)) abort();
    pid_t pid = start_child(variables, body, ends[1]);
    close(ends[1]);
    for (ssize_t got; n < sizeof o.text - 1 && (got = read(ends[0], o.text + n, sizeof o.text - 1 - n)) > 0;)
        n += (size_t)got;
    close(ends[0]);
    waitpid(pid, &status, 0);
    o.status = exit_status(status);
    return o;
}

static void verdict(const char *name, bool ok, const outcome *o) {
    if (ok) printf("ok %s\n", name);
    else printf("not ok %s: status %d, %.900s\n", name, o->status, o->text), failures++;
}

/* The right program: it ends with 0 and nothing is said. */
static inline void passes(const char *name, const char *variables, int (*body)(void)) {
    outcome o = run_child(variables, body);
    verdict(name, o.status == 0 && !o.text[0], &o);
}
/* A wrong one: it ends with this status, and this is said (NULL: nothing at all). */
static inline void caught(const char *name, const char *variables, int (*body)(void), int status, const char *text) {
    outcome o = run_child(variables, body);
    verdict(name, o.status == status && (text ? strstr(o.text, text) != NULL : !o.text[0]), &o);
}

/* In a body: the sentence must hold. */
#define MUST(what)                                                               \
    do {                                                                         \
        if (!(what)) {                                                           \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #what); \
            return 1;                                                            \
        }                                                                        \
    } while (0)
/* In a body: the call must answer this. */
#define GIVES(call, status)                                                                                  \
    do {                                                                                                     \
        int got_ = (int)(call);                                                                              \
        if (got_ != (int)(status)) {                                                                         \
            fprintf(stderr, "%s:%d: %s gives %d, not %d\n", __FILE__, __LINE__, #call, got_, (int)(status)); \
            return 1;                                                                                        \
        }                                                                                                    \
    } while (0)
#define WORKS(call) GIVES(call, 0)

#endif
