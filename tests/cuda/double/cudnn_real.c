/* cudnn_real.c -- the real cuDNN behind the double: it checks graphs and makes plans for a device that is only described.
 * Where from: DDP_REAL_CUDNN, a folder; else the toolkit's. DDP_DOUBLE_CUDNN_CHECK=0: not asked. */
#include "cudnn_double.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef DDP_REAL_CUDNN_DIR
#define DDP_REAL_CUDNN_DIR "/usr/local/cuda/lib64"
#endif
#ifndef DDP_PROFILES
#define DDP_PROFILES "tests/cuda/profiles"
#endif

static real_library lib;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* The driver that cuDNN loads kernels with: the few calls that plans need, beside this library. Without it no engine that is
 * compiled at run time has a plan. */
static bool open_driver(void) {
    Dl_info me;
    char path[1100];
    if (!dladdr((void *)open_driver, &me)) return false;
    snprintf(path, sizeof path, "%s", me.dli_fname);
    char *slash = strrchr(path, '/');
    if (!slash) return false;
    snprintf(slash, sizeof path - (size_t)(slash - path), "/driver/libcuda.so.1");
    return dlopen(path, RTLD_NOW | RTLD_LOCAL) != NULL;
}

static void open_library(void) {
    const char *check = getenv("DDP_DOUBLE_CUDNN_CHECK"), *dir = getenv("DDP_REAL_CUDNN");
    char path[1100];
    if ((check && strcmp(check, "0") == 0) || !open_driver()) return;
    snprintf(path, sizeof path, "%s/libcudnn_graph.so.%d", dir && *dir ? dir : DDP_REAL_CUDNN_DIR, CUDNN_MAJOR);
    void *h = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!h) return;
    *(void **)&lib.create = dlsym(h, "cudnnBackendCreateDescriptor");
    *(void **)&lib.destroy = dlsym(h, "cudnnBackendDestroyDescriptor");
    *(void **)&lib.finalize = dlsym(h, "cudnnBackendFinalize");
    *(void **)&lib.set = dlsym(h, "cudnnBackendSetAttribute");
    *(void **)&lib.get = dlsym(h, "cudnnBackendGetAttribute");
    *(void **)&lib.error_string = dlsym(h, "cudnnGetErrorString");
    *(void **)&lib.last_error = dlsym(h, "cudnnGetLastErrorString");
    __typeof__(&cudnnGetVersion) version;
    *(void **)&version = dlsym(h, "cudnnGetVersion");
    lib.there = lib.create && lib.destroy && lib.finalize && lib.set && lib.get && lib.error_string && lib.last_error &&
                version;
    if (lib.there) lib.version = version();
}

const real_library *real(void) {
    pthread_once(&once, open_library);
    return &lib;
}

const char *profile(void) {
    static char text[4096];
    const char *name = getenv("DDP_DOUBLE_PROFILE");
    char path[1100];
    if (!name || !*name) name = "h200";
    if (strchr(name, '/')) snprintf(path, sizeof path, "%s", name);
    else snprintf(path, sizeof path, "%s/%s.json", DDP_PROFILES, name);
    FILE *f = fopen(path, "re");
    size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    if (f) fclose(f);
    if (!n) {
        fprintf(stderr, "cuda double: no profile %s\n", path);
        abort();
    }
    text[n] = 0;
    return text;
}

/* ---- the runtime's double ------------------------------------------------------------------------------------------------ */

static cudart_double runtime;
static pthread_once_t runtime_once = PTHREAD_ONCE_INIT;

static void find_runtime(void) {
    char file[64];
    snprintf(file, sizeof file, "libcudart.so.%d", CUDART_VERSION / 1000);
    void *h = dlopen(file, RTLD_NOW | RTLD_NOLOAD);
    if (!h) return;
    *(void **)&runtime.enqueue = dlsym(h, "ddp_double_enqueue");
    *(void **)&runtime.check_range = dlsym(h, "ddp_double_check_range");
}

const cudart_double *cudart(void) {
    pthread_once(&runtime_once, find_runtime);
    return &runtime;
}
