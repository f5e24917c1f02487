/* launch.c -- own kernels by name: each family's image is loaded when a kernel of it is first launched. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"
#include "recent.h"

/* ---- the table, from kernels.def ---- */

typedef struct kernel_name {
    const char *name;  /* NULL: a family begins */
    const void *image; /* of a family */
} kernel_name;

#define FAMILY(f) extern const unsigned char ddp__image_##f[] __attribute__((visibility("hidden")));
#define KERNEL(name, args, flags)
#define KERNEL_FLOATS(name, args, flags)
#define KERNEL_ALL(name, args, flags)
#include "kernels.def"

static const kernel_name table[DDP_K_COUNT] = {
#define FAMILY(f) {NULL, ddp__image_##f},
#define KERNEL(name, args, flags) {#name, NULL},
#define KERNEL_FLOATS(name, args, flags) \
    {#name "_f32", NULL}, {#name "_f64", NULL}, {#name "_f16", NULL}, {#name "_bf16", NULL},
#define KERNEL_ALL(name, args, flags)                                                                \
    KERNEL_FLOATS(name, args, flags){#name "_i64", NULL}, {#name "_i32", NULL}, {#name "_u8", NULL}, \
        {#name "_bool", NULL},
#include "kernels.def"
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(cudaKernel_t) ready[DDP_K_COUNT];
static cudaLibrary_t loaded[DDP_K_COUNT]; /* by the row where the family begins */

/* Lock held. */
static int load(int k, const ddp_gpu *gpu) {
    int family = k;
    while (table[family].name) family--;
    if (!loaded[family]) {
        cudaError_t e =
            ddp__cuda.cudaLibraryLoadData(&loaded[family], table[family].image, NULL, NULL, 0, NULL, NULL, 0);
        if (e == cudaErrorNoKernelImageForDevice || e == cudaErrorUnsupportedPtxVersion || e == cudaErrorInvalidPtx)
            return ddp__fail(
                DDP_ENOSUP,
                "%s has compute capability %d.%d; this build has kernels for %s and later ones that take their "
                "PTX: build with CUDA_ARCHS=\"%d%d\", or update the driver",
                gpu->prop.name, gpu->prop.major, gpu->prop.minor, DDP_CUDA_ARCHS, gpu->prop.major, gpu->prop.minor);
        if (e) return ddp__cuda_check(e, "cudaLibraryLoadData");
    }
    cudaKernel_t f;
    cudaError_t e = ddp__cuda.cudaLibraryGetKernel(&f, loaded[family], table[k].name);
    if (e) return ddp__cuda_check(e, table[k].name);
    atomic_store_explicit(&ready[k], f, memory_order_release);
    return 0;
}

bool ddp__cuda_synchronous(void) {
    static atomic_int on = -1;
    int v = atomic_load_explicit(&on, memory_order_relaxed);
    if (v < 0) {
        const char *s = getenv("DDP_SYNC");
        atomic_store(&on, v = s && strcmp(s, "1") == 0);
    }
    return v;
}

int ddp__cuda_launch(const ddp_call *c, int k, const void *args, ddp_grid g) {
    ddp_gpu *gpu = ddp__gpu_of(c);
    return gpu ? ddp__cuda_launch_on(gpu, c->op->name, k, args, g) : ddp__pending();
}

int ddp__cuda_launched(ddp_gpu *gpu, const char *op, const char *kernel, cudaError_t e) {
    if (!e && !ddp__cuda_synchronous()) return 0;
    char what[160];
    snprintf(what, sizeof what, "%s (kernel %s)", op, kernel);
    return e ? ddp__cuda_check(e, what) : ddp__gpu_wait(gpu, what);
}

int ddp__cuda_launch_on(ddp_gpu *gpu, const char *op, int k, const void *args, ddp_grid g) {
    if (g.x == 0 || g.y == 0 || g.z == 0) return 0;
    cudaKernel_t f = atomic_load_explicit(&ready[k], memory_order_acquire);
    if (!f) {
        pthread_mutex_lock(&lock);
        int st = load(k, gpu);
        pthread_mutex_unlock(&lock);
        if (st < 0) return st;
        f = atomic_load(&ready[k]);
    }
    void *one = (void *)(uintptr_t)args;
    ddp__recent_add(op, table[k].name);
    cudaError_t e = ddp__cuda.cudaLaunchKernel((const void *)f, (dim3){g.x, g.y, g.z}, (dim3){g.threads, 1, 1}, &one,
                                               g.shared, gpu->compute);
    return ddp__cuda_launched(gpu, op, table[k].name, e);
}

/* ---- grids ---- */

enum { THREADS = 256, BLOCKS = 2048 };

ddp_grid ddp__grid(int64_t n, int per) {
    int64_t threads = (n + per - 1) / per, blocks = (threads + THREADS - 1) / THREADS;
    return (ddp_grid){(unsigned)(blocks < BLOCKS ? blocks : BLOCKS), 1, 1, THREADS, 0};
}

ddp_grid ddp__grid_rows(int64_t n, unsigned threads) {
    return (ddp_grid){(unsigned)(n < 0x7fffffff ? n : 0x7fffffff), 1, 1, threads, 0};
}
