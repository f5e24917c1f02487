/* device.c -- finds the plug-in that computes on GPUs, once, and says in a sentence why there is none. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const ddp_device_type *cuda;
static char why_not[400];
_Thread_local bool ddp__copies_later;

/* Does DDP_DEVICE keep this process on the CPU? */
static bool cpu_forced(void) {
    const char *d = getenv("DDP_DEVICE");
    return d && strcmp(d, "cpu") == 0;
}

/* The driver's library is there, or a test says where other libraries are. */
static bool driver_there(void) {
    const char *dir = getenv("DDP_CUDA_LIBS");
    if (dir && *dir) return true;
    void *lib = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (lib) dlclose(lib);
    return lib != NULL;
}

static void load_cuda(void) {
    char path[1100];
    Dl_info info;
    if (!driver_there()) {
        snprintf(why_not, sizeof why_not,
                 "no NVIDIA driver (libcuda.so.1 is not there): install it until `nvidia-smi` lists a GPU, or compute "
                 "on \"cpu\"");
        return;
    }
    path[0] = 0;
    if (dladdr((void *)(uintptr_t)&ddp__device, &info) && info.dli_fname) {
        const char *slash = strrchr(info.dli_fname, '/');
        snprintf(path, sizeof path, "%.*s", slash ? (int)(slash + 1 - info.dli_fname) : 0, info.dli_fname);
    }
    snprintf(path + strlen(path), sizeof path - strlen(path), "libddp_cuda.so");
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!lib) {
        snprintf(why_not, sizeof why_not,
                 "this build has no libddp_cuda.so (%s): build it where the CUDA toolkit (nvcc) is installed",
                 dlerror());
        return;
    }
    ddp_plugin_device_fn entry;
    int code = 0;
    *(void **)&entry = dlsym(lib, "ddp_plugin_device");
    if (!entry) snprintf(why_not, sizeof why_not, "%s is of another version of ddp", path);
    else cuda = entry(why_not, sizeof why_not, &code);
    if (cuda && cuda->size != sizeof *cuda) {
        snprintf(why_not, sizeof why_not, "%s is of another version of ddp", path);
        cuda = NULL;
    }
    if (!cuda) ddp__log(DDP_LOG_DEBUG, "no GPU is used: %s", why_not);
}

const ddp_device_type *ddp__device(int device, const char *what) {
    if (device < 0) {
        ddp__fail(DDP_EDEVICE, "%s: no device %d", what, device);
        return NULL;
    }
    if (cpu_forced()) {
        ddp__fail(DDP_EDEVICE, "%s: a GPU is asked for, but DDP_DEVICE=cpu keeps this process on the cpu", what);
        return NULL;
    }
    pthread_once(&once, load_cuda);
    if (!cuda) ddp__fail(DDP_EDEVICE, "%s: \"cuda:%d\": %s", what, device - 1, why_not);
    else if (device > cuda->count)
        ddp__fail(DDP_EDEVICE, "%s: no \"cuda:%d\": this process sees %d GPU%s (CUDA_VISIBLE_DEVICES=%s)", what,
                  device - 1, cuda->count, cuda->count == 1 ? ", cuda:0" : "s, from cuda:0 on",
                  getenv("CUDA_VISIBLE_DEVICES") ? getenv("CUDA_VISIBLE_DEVICES") : "");
    else return cuda;
    return NULL;
}

const ddp_device_type *ddp__device_of(int device) {
    (void)device;
    return cuda;
}

int ddp__gpus(char *why, size_t n) {
    if (cpu_forced()) {
        if (why) snprintf(why, n, "DDP_DEVICE=cpu");
        return 0;
    }
    pthread_once(&once, load_cuda);
    if (why) snprintf(why, n, "%s", why_not);
    return cuda ? cuda->count : 0;
}

int ddp_device_check(int device) {
    if (ddp__pending()) return ddp__pending();
    return device == DDP_CPU || ddp__device(device, "device") ? 0 : ddp__pending();
}

int ddp_device_wait(int device) {
    if (ddp__pending()) return ddp__pending();
    if (device == DDP_CPU) return 0;
    const ddp_device_type *d = ddp__device(device, "device_wait");
    return d ? d->wait(device - 1) : ddp__pending();
}

int ddp_device_text(int device, char *text, size_t n) {
    if (ddp__pending()) return ddp__pending();
    if (device == DDP_CPU) {
        snprintf(text, n, "cpu");
        return 0;
    }
    const ddp_device_type *d = ddp__device(device, "device_text");
    if (!d) return ddp__pending();
    d->describe(device - 1, text, n);
    return 0;
}

int ddp_num_gpus(char *why, size_t n) { return ddp__gpus(why, n); }

int ddp_gpu_library(int k, int open, const char **name, char *text, size_t n) {
    if (open) pthread_once(&once, load_cuda);
    return cuda ? cuda->vendor_library(k, open != 0, name, text, n) : -1;
}

int ddp_gpu_peer(int i, int j) { return ddp__gpus(NULL, 0) > (i > j ? i : j) && cuda->peer(i, j); }
