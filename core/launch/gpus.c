/* gpus.c -- how many GPUs a rank would see. Asked in a child: the driver's libraries stay out of the launcher, whose ranks are forks of it. */
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "launch.h"

/* What a driver leaves in the file system, also in containers and under WSL: without any of it the child need not be asked. */
static bool traces_of_a_driver(void) {
    static const char *const traces[] = {"/proc/driver/nvidia", "/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg",
                                         "/dev/nvgpu"};
    const char *libs = getenv("DDP_CUDA_LIBS");
    bool found = libs && *libs;
    for (size_t i = 0; i < sizeof traces / sizeof *traces; i++) found = found || access(traces[i], F_OK) == 0;
    return found;
}

/* In the child: "COUNT why-there-is-none" into fd. */
static void answer(const char *lib_dir, int fd) {
    char path[1200], why[500] = "", text[600];
    int (*gpus)(char *, size_t) = NULL, n = 0;
    snprintf(path, sizeof path, "%s/libddp.so", lib_dir);
    void *lib = dlopen(path, RTLD_NOW);
    if (lib) *(void **)&gpus = dlsym(lib, "ddp__gpus");
    if (gpus) n = gpus(why, sizeof why);
    else snprintf(why, sizeof why, "%s", dlerror());
    int len = snprintf(text, sizeof text, "%d %s", n, why);
    if (write(fd, text, (size_t)len) != len) _exit(1);
    _exit(0);
}

int gpus_here(char *why, size_t n) {
    places p;
    int ends[2], got = 0, at = 0, count = 0;
    char text[600];
    if (!traces_of_a_driver()) {
        snprintf(why, n, "no NVIDIA driver is there");
        return 0;
    }
    snprintf(why, n, "the driver could not be asked");
    if (places_find(&p) != 0 || pipe(ends) != 0) return 0;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) answer(p.lib_dir, ends[1]);
    close(ends[1]);
    for (ssize_t k; child > 0 && got < (int)sizeof text - 1; got += (int)k) {
        k = read(ends[0], text + got, sizeof text - 1 - (size_t)got);
        if (k < 0 && errno == EINTR) k = 0;
        else if (k <= 0) break;
    }
    close(ends[0]);
    if (child > 0) waitpid(child, NULL, 0);
    text[got] = 0;
    if (sscanf(text, "%d %n", &count, &at) == 1 && at > 0) snprintf(why, n, "%s", text + at);
    return count;
}
