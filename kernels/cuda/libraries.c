/* libraries.c -- which of NVIDIA's libraries are there, in which versions, and which GPUs reach one another. */
#include <stdio.h>

#include "cuda.h"

static const char *const names[DDP_CUDA_LIBS] = {
    [DDP_LIB_CUDART] = "CUDA", [DDP_LIB_CUBLAS] = "cuBLAS", [DDP_LIB_CUDNN] = "cuDNN",
    [DDP_LIB_NCCL] = "NCCL",   [DDP_LIB_NVRTC] = "NVRTC",
};

/* Of an opened library, as its makers write it. */
static void version_of(ddp_cuda_lib id, char *text, size_t n) {
    int v = 0, minor = 0;
    if (id == DDP_LIB_CUDART) {
        int driver = 0;
        ddp__cuda.cudaRuntimeGetVersion(&v);
        ddp__cuda.cudaDriverGetVersion(&driver);
        snprintf(text, n, "%d.%d, the driver's %d.%d", v / 1000, v % 1000 / 10, driver / 1000, driver % 1000 / 10);
    } else if (id == DDP_LIB_CUDNN) {
        v = (int)ddp__cuda.cudnnGetVersion();
        snprintf(text, n, "%d.%d.%d", v / 10000, v / 100 % 100, v % 100);
    } else if (id == DDP_LIB_NCCL) {
        ddp__cuda.ncclGetVersion(&v);
        snprintf(text, n, "%d.%d.%d", v / 10000, v / 100 % 100, v % 100);
    } else if (id == DDP_LIB_NVRTC) {
        ddp__cuda.nvrtcVersion(&v, &minor);
        snprintf(text, n, "%d.%d", v, minor);
    } else { /* cuBLAS tells its version to a handle alone, which would take a GPU's memory: the major is the file's */
        snprintf(text, n, "%d", DDP_CUDA_MAJOR);
    }
}

int ddp__cuda_library(int k, bool open, const char **name, char *text, size_t n) {
    if (k < 0 || k >= DDP_CUDA_LIBS) return -1;
    text[0] = 0;
    *name = names[k];
    const char *missing = open ? ddp__cuda_missing((ddp_cuda_lib)k) : ddp__cuda_opened((ddp_cuda_lib)k) ? NULL : "";
    if (missing) snprintf(text, n, "%s", missing);
    else version_of((ddp_cuda_lib)k, text, n);
    return !missing;
}

bool ddp__cuda_peer(int i, int j) {
    int can = 0;
    if (ddp__cuda.cudaDeviceCanAccessPeer(&can, i, j)) ddp__cuda.cudaGetLastError();
    return can;
}
