/* guardian.c -- a process of its own session that outlives ddprun's death by a moment and kills every rank's group.
 *
 * It reads one close-on-exec pipe whose write end only ddprun holds: group ids come through it, and its end without
 * a good-bye means that ddprun is gone. The kernel keeps what was written, so no group is missed. */
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launch.h"

extern char **environ;

int guardian_start(job *j) {
    int pipe_fd[2], err;
    posix_spawn_file_actions_t fa;
    posix_spawnattr_t attr;
    sigset_t none;
    pid_t pid;
    char *const argv[] = {"ddprun", "--guardian", NULL};
    if (pipe2(pipe_fd, O_CLOEXEC) < 0) {
        say("cannot make a pipe: %s", strerror(errno));
        return 1;
    }
    sigemptyset(&none);
    posix_spawn_file_actions_init(&fa);
    posix_spawnattr_init(&attr);
    posix_spawn_file_actions_adddup2(&fa, pipe_fd[0], 0);
    posix_spawn_file_actions_addopen(&fa, 1, "/dev/null", O_WRONLY, 0); /* so that nobody waits for it to close them */
    posix_spawn_file_actions_addopen(&fa, 2, "/dev/null", O_WRONLY, 0);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK);
    posix_spawnattr_setsigmask(&attr, &none);
    err = posix_spawn(&pid, "/proc/self/exe", &fa, &attr, argv, environ);
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&fa);
    close(pipe_fd[0]);
    if (err) {
        say("cannot start the guardian: %s", strerror(err));
        close(pipe_fd[1]);
        return 1;
    }
    j->guardian_fd = pipe_fd[1];
    return 0;
}

static void tell(job *j, pid_t word) {
    if (j->guardian_fd < 0) return;
    while (write(j->guardian_fd, &word, sizeof word) < 0 && errno == EINTR) {
    }
}

void guardian_tell(job *j, pid_t group) { tell(j, group); }

void guardian_dismiss(job *j) {
    tell(j, 0);
    if (j->guardian_fd >= 0) close(j->guardian_fd);
    j->guardian_fd = -1;
}

int guardian_main(int argc, char **argv) {
    static pid_t groups[MAX_LOCAL_RANKS];
    int n = 0;
    (void)argc;
    (void)argv;
    const int ignored[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE};
    for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++) signal(ignored[i], SIG_IGN);
    for (;;) {
        pid_t word;
        ssize_t k = read(0, &word, sizeof word); /* words are written at once and so arrive whole */
        if (k < 0 && errno == EINTR) continue;
        if (k != sizeof word) break;
        if (word == 0) return 0;
        if (n < MAX_LOCAL_RANKS) groups[n++] = word;
    }
    for (int i = 0; i < n; i++) kill(-groups[i], SIGKILL);
    return 0;
}
