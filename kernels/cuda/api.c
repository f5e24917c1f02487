/* api.c -- opens NVIDIA's libraries: from the folder DDP_CUDA_LIBS, else where the loader finds them, else from the toolkit that this
 * library was built with. */
#include "api.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

ddp_cuda_api ddp__cuda;

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

/* What is opened, and the least version that will do: the major of the headers, which is the interface. */
static const struct {
    const char *file, *package;
} libs[DDP_CUDA_LIBS] = {
    [DDP_LIB_CUDART] = {"libcudart.so." TEXT(DDP_CUDA_MAJOR), "the CUDA runtime " TEXT(DDP_CUDA_MAJOR)},
    [DDP_LIB_CUBLAS] = {"libcublas.so." TEXT(DDP_CUDA_MAJOR), "cuBLAS of CUDA " TEXT(DDP_CUDA_MAJOR)},
    [DDP_LIB_CUDNN] = {"libcudnn.so." TEXT(CUDNN_MAJOR), "cuDNN " TEXT(CUDNN_MAJOR)},
    [DDP_LIB_NCCL] = {"libnccl.so.2", "NCCL 2"},
    [DDP_LIB_NVRTC] = {"libnvrtc.so." TEXT(DDP_CUDA_MAJOR), "NVRTC of CUDA " TEXT(DDP_CUDA_MAJOR)},
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool ready[DDP_CUDA_LIBS];
static bool tried[DDP_CUDA_LIBS];
static char why[DDP_CUDA_LIBS][400];

static void *open_file(const char *file) {
    const char *dir = getenv("DDP_CUDA_LIBS");
    char path[1100];
    if (dir && *dir) {
        snprintf(path, sizeof path, "%s/%s", dir, file);
        return dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    void *lib = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (lib) return lib;
    char first[300];
    snprintf(first, sizeof first, "%s", dlerror());
    snprintf(path, sizeof path, "%s/%s", DDP_CUDA_HOME_LIBS, file);
    lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!lib) ddp__log(DDP_LOG_DEBUG, "%s; %s", first, dlerror());
    return lib;
}

/* A function that is missing is named: the library is older than the headers. */
static int find(ddp_cuda_lib id, void *lib) {
    static const struct {
        ddp_cuda_lib lib;
        const char *name;
        size_t offset;
    } functions[] = {
#define ENTRY(id, f) {id, #f, offsetof(ddp_cuda_api, f)},
#define CUDART(f) ENTRY(DDP_LIB_CUDART, f)
#define CUBLAS(f) ENTRY(DDP_LIB_CUBLAS, f)
#define CUDNN(f) ENTRY(DDP_LIB_CUDNN, f)
#define NCCL(f) ENTRY(DDP_LIB_NCCL, f)
#define NVRTC(f) ENTRY(DDP_LIB_NVRTC, f)
#include "api.def"
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        if (functions[i].lib != id) continue;
        void *f = dlsym(lib, functions[i].name);
        if (!f) {
            snprintf(why[id], sizeof why[id], "%s has no %s: it is older than the one ddp was built for; install %s",
                     libs[id].file, functions[i].name, libs[id].package);
            return -1;
        }
        *(void **)((char *)&ddp__cuda + functions[i].offset) = f;
    }
    return 0;
}

/* Versions that are known not to do. cuDNN's plans for a device's properties begin with 9.8; NCCL's memory with 2.19. */
static int check_version(ddp_cuda_lib id) {
    int v = 0;
    if (id == DDP_LIB_CUDNN && ddp__cuda.cudnnGetVersion() < 90800) {
        snprintf(why[id], sizeof why[id],
                 "cuDNN is version %zu, at least 9.8 (90800) is needed: install cuDNN " TEXT(CUDNN_MAJOR),
                 ddp__cuda.cudnnGetVersion());
        return -1;
    }
    if (id == DDP_LIB_NCCL && (ddp__cuda.ncclGetVersion(&v) != ncclSuccess || v < 21900)) {
        snprintf(why[id], sizeof why[id], "NCCL is version %d.%d.%d, at least 2.19 is needed: install a newer libnccl2",
                 v / 10000, v / 100 % 100, v % 100);
        return -1;
    }
    return 0;
}

static void open_once(ddp_cuda_lib id) {
    tried[id] = true;
    void *lib = open_file(libs[id].file);
    if (!lib) {
        snprintf(why[id], sizeof why[id], "%s is not there: install %s, or set DDP_CUDA_LIBS to its folder",
                 libs[id].file, libs[id].package);
        return;
    }
    if (find(id, lib) == 0 && check_version(id) == 0) atomic_store(&ready[id], true);
}

const char *ddp__cuda_missing(ddp_cuda_lib id) {
    if (atomic_load_explicit(&ready[id], memory_order_acquire)) return NULL;
    pthread_mutex_lock(&lock);
    if (!tried[id]) open_once(id);
    pthread_mutex_unlock(&lock);
    return atomic_load(&ready[id]) ? NULL : why[id];
}

bool ddp__cuda_opened(ddp_cuda_lib id) { return atomic_load(&ready[id]); }

int ddp__cuda_need(ddp_cuda_lib id) {
    const char *no = ddp__cuda_missing(id);
    return no ? ddp__fail(DDP_ENOSUP, "%s", no) : 0;
}
