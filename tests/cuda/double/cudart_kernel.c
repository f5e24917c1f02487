/* cudart_kernel.c -- libraries and kernels of cudart. Any image is accepted as a library; a kernel is found by its name in
 * libddp_emulated.so, the same kernels compiled for the emulator: beside this library, or where DDP_DOUBLE_KERNELS says. An image that
 * is the text "DDPEMU:PATH" comes from the double of NVRTC: its kernels are in that file. */
#include "state.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void emulated(const unsigned grid[3], const unsigned block[3], size_t shared, const void *args);

typedef struct kernel {
    char name[128];
    emulated *run;
    void *from;                    /* what dlopen gave */
    size_t arg_bytes, shared_most; /* dynamic shared memory it may ask for */
    struct kernel *next;
} kernel;
static kernel *kernels; /* never freed: names and handles stay good */

struct CUlib_st {
    void *from; /* what dlopen gave; NULL: the emulated kernels of the build */
};

int (*emulator_where)(const void *address, char *text, size_t size);
static const size_t shared_default = 48 << 10;

/* ---- lookups ------------------------------------------------------------------------------------------------------- */
static void *emulator(void) {
    static void *library;
    char path[1100];
    Dl_info here;
    if (library) return library;
    const char *set = getenv("DDP_DOUBLE_KERNELS");
    if (set && *set) {
        snprintf(path, sizeof path, "%s", set);
    } else {
        dladdr((void *)emulator, &here);
        const char *slash = strrchr(here.dli_fname, '/');
        snprintf(path, sizeof path, "%.*s/libddp_emulated.so", slash ? (int)(slash - here.dli_fname) : 1,
                 slash ? here.dli_fname : ".");
    }
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) ddp_double_die("the emulated kernels: %s", dlerror());
    *(void **)&emulator_where = dlsym(library, "ddp_emu_where");
    return library;
}

/* Opt-in limit of dynamic shared memory by compute capability: 227 KB of 9.0 and 10.0, 163 of 8.0, 99 of 8.6, 8.9 and 12.0, 64 of 7.5. */
static size_t shared_optin(void) {
    switch (config.cc) {
        case 75: return 64 << 10;
        case 80:
        case 87: return 163 << 10;
        case 86:
        case 89:
        case 120: return 99 << 10;
        default: return 227 << 10;
    }
}
unsigned *emulator_most_blocks(void) { return dlsym(emulator(), "ddp_emu_most_blocks"); }
size_t double_shared_optin(void) { return shared_optin(); }

cudaError_t cudaLibraryLoadData(cudaLibrary_t *out, const void *code, enum cudaJitOption *jit, void **jit_values,
                                unsigned jit_count, enum cudaLibraryOption *options, void **values, unsigned count) {
    (void)jit, (void)jit_values, (void)options, (void)values;
    cudaError_t e = enter("cudaLibraryLoadData");
    if (e) return e;
    if (!out || !code) return leave(cudaErrorInvalidValue);
    if (jit_count || count) ddp_double_unsimulated("cudaLibraryLoadData: options");
    void *from = NULL;
    if (strncmp(code, "DDPEMU:", 7) == 0 && !(from = dlopen((const char *)code + 7, RTLD_NOW | RTLD_LOCAL))) {
        ddp_double_log("cudaLibraryLoadData: %s", dlerror());
        return leave(cudaErrorInvalidKernelImage);
    }
    *out = calloc(1, sizeof **out);
    (*out)->from = from;
    ddp_double_count("kernel library", 1);
    return leave(cudaSuccess);
}

cudaError_t cudaLibraryUnload(cudaLibrary_t library) {
    cudaError_t e = enter("cudaLibraryUnload");
    if (e) return e;
    if (!library) return leave(cudaErrorInvalidResourceHandle);
    free(library);
    ddp_double_count("kernel library", -1);
    return leave(cudaSuccess);
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *out, cudaLibrary_t library, const char *name) {
    cudaError_t e = enter("cudaLibraryGetKernel");
    if (e) return e;
    if (!out || !name) return leave(cudaErrorInvalidValue);
    if (!library) return leave(cudaErrorInvalidResourceHandle);
    void *from = library->from ? library->from : emulator();
    for (kernel *k = kernels; k; k = k->next)
        if (k->from == from && !strcmp(k->name, name)) {
            *out = (cudaKernel_t)k;
            return leave(cudaSuccess);
        }
    char symbol[200];
    snprintf(symbol, sizeof symbol, "ddp_emu_%s", name);
    void *run = dlsym(from, symbol);
    snprintf(symbol, sizeof symbol, "ddp_emu_size_%s", name);
    const size_t *bytes = dlsym(from, symbol);
    if (!run || !bytes) return leave(cudaErrorSymbolNotFound);
    kernel *k = calloc(1, sizeof *k);
    snprintf(k->name, sizeof k->name, "%s", name);
    *(void **)&k->run = run;
    k->arg_bytes = *bytes;
    k->from = from;
    k->shared_most = shared_default;
    k->next = kernels;
    kernels = k;
    *out = (cudaKernel_t)k;
    return leave(cudaSuccess);
}

/* Comes to the front: the next launch is often of the same. */
static kernel *kernel_of(const void *f) {
    for (kernel **p = &kernels; *p; p = &(*p)->next) {
        kernel *k = *p;
        if (k != f) continue;
        *p = k->next;
        k->next = kernels;
        kernels = k;
        return k;
    }
    return NULL;
}

/* ---- attributes ---------------------------------------------------------------------------------------------------- */
static cudaError_t set_attribute(const void *f, enum cudaFuncAttribute attribute, int value) {
    kernel *k = kernel_of(f);
    if (!k) return leave(cudaErrorInvalidDeviceFunction);
    if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return leave(cudaSuccess);
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize)
        ddp_double_unsimulated("cudaFuncSetAttribute: this attribute");
    if (value < 0 || (size_t)value > shared_optin()) return leave(cudaErrorInvalidValue);
    k->shared_most = (size_t)value > shared_default ? (size_t)value : shared_default;
    return leave(cudaSuccess);
}
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute attribute, int value) {
    cudaError_t e = enter("cudaFuncSetAttribute");
    return e ? e : set_attribute(f, attribute, value);
}
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t f, enum cudaFuncAttribute attribute, int value, int device) {
    cudaError_t e = enter("cudaKernelSetAttributeForDevice");
    if (e) return e;
    return device < 0 || device >= config.devices ? leave(cudaErrorInvalidDevice) : set_attribute(f, attribute, value);
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *f) {
    cudaError_t e = enter("cudaFuncGetAttributes");
    if (e) return e;
    kernel *k = kernel_of(f);
    if (!out || !k) return leave(cudaErrorInvalidDeviceFunction);
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    out->numRegs = 32;
    out->ptxVersion = out->binaryVersion = config.cc;
    out->maxDynamicSharedSizeBytes = (int)k->shared_most;
    return leave(cudaSuccess);
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *f, int threads, size_t shared) {
    cudaError_t e = enter("cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    if (e) return e;
    if (!blocks || !kernel_of(f) || threads <= 0 || threads > 1024) return leave(cudaErrorInvalidValue);
    int by_shared = shared ? (int)(shared_optin() / shared) : 32;
    *blocks = 2048 / threads < by_shared ? 2048 / threads : by_shared;
    return leave(cudaSuccess);
}

/* ---- launches ------------------------------------------------------------------------------------------------------ */
typedef struct launch {
    kernel *k;
    unsigned grid[3], block[3];
    size_t shared;
    int device;
    char args[];
} launch;

/* `kernel:k` of DDP_DOUBLE_FAIL: the k-th kernel that runs ends with an illegal address. `lost:k`: the GPU is gone from then on. */
static int run_kernel(void *ctx) {
    launch *l = ctx;
    int status = ddp_double_fault("kernel", cudaErrorIllegalAddress);
    if (!status) status = ddp_double_fault("lost", cudaErrorUnknown);
    ddp_double_reach();
    if (!status) l->k->run(l->grid, l->block, l->shared, l->args);
    return status;
}

/* A line with the device memory among its arguments, in hexadecimal; in a dry run with what is done there in front: r, w or b for both, and
 * what is not touched left out. */
static void log_launch(const launch *l, int stream) {
    enum { MOST = 512 };
    char text[7200], *pointers[MOST];
    size_t at = 0, where[MOST];
    unsigned char how[MOST] = {0};
    int n = 0;
    for (size_t i = 0; i + sizeof(void *) <= l->k->arg_bytes && n < MOST; i += sizeof(void *)) {
        memcpy(&pointers[n], l->args + i, sizeof(void *));
        if (ddp_double_is_device(pointers[n])) where[n++] = i;
    }
    if (config.mode == DRY) {
        probed p = {l->k->name,
                    l->k->run,
                    {l->grid[0], l->grid[1], l->grid[2]},
                    {l->block[0], l->block[1], l->block[2]},
                    l->shared,
                    l->k->arg_bytes,
                    l->args};
        running = l->k->name;
        probe(&p, pointers, where, n, how);
        running = NULL;
    }
    text[0] = 0;
    for (int i = 0; i < n && at + 20 < sizeof text; i++)
        if (config.mode != DRY || how[i])
            at += (size_t)snprintf(text + at, sizeof text - at, " %.*s%llx", config.mode == DRY,
                                   &"?rwb"[how[i] & (config.mode == DRY ? 3 : 0)],
                                   (unsigned long long)(uintptr_t)pointers[i]);
    ddp_double_log("launch %s grid %u,%u,%u block %u,%u,%u shared %zu, stream %d%s%s", l->k->name, l->grid[0],
                   l->grid[1], l->grid[2], l->block[0], l->block[1], l->block[2], l->shared, stream,
                   at ? ", memory" : "", text);
}

static bool possible(dim3 grid, dim3 block, size_t shared, const kernel *k) {
    bool ok = grid.x && grid.y && grid.z && block.x && block.y && block.z;
    ok = ok && grid.x <= 0x7fffffff && grid.y <= 65535 && grid.z <= 65535;
    ok = ok && block.x <= 1024 && block.y <= 1024 && block.z <= 64 && (size_t)block.x * block.y * block.z <= 1024;
    return ok && shared <= k->shared_most;
}

cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    cudaError_t e = enter("cudaLaunchKernel");
    if (e) return e;
    struct CUstream_st *s = stream_of(stream);
    kernel *k = kernel_of(f);
    if (!k) return leave(cudaErrorInvalidDeviceFunction);
    if (!is_stream(s) || s->device != current_device) return leave(cudaErrorInvalidResourceHandle);
    if (!possible(grid, block, shared, k)) return leave(cudaErrorInvalidConfiguration);
    if (!args || !args[0]) return leave(cudaErrorInvalidValue);
    launch *l = malloc(sizeof *l + k->arg_bytes);
    *l = (launch){k, {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared, s->device};
    memcpy(l->args, args[0], k->arg_bytes);
    if (ddp_double_logs()) log_launch(l, s->id);
    ddp_double_enqueue_attempt(stream, run_kernel, free, l, k->name);
    return leave(cudaSuccess);
}
