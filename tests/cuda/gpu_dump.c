/* gpu_dump.c -- gpu_dump [FOLDER|--nccl]: what the CUDA side sees of this machine: versions of NVIDIA's libraries, each GPU's properties. With a folder,
 * cuDNN's own profile of GPU i goes to FOLDER/cudnn_profile_<i>.json (tests/cuda/profiles has such files, made by hand). --nccl: an all-reduce
 * of a world of one instead. Status 1 when there is no GPU, or a part failed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../kernels/cuda/api.h"

static int there(ddp_cuda_lib id, const char *name) {
    const char *missing = ddp__cuda_missing(id);
    if (missing) printf("%s: %s\n", name, missing);
    return !missing;
}

static void versions(void) {
    int v = 0, minor = 0;
    cublasHandle_t blas;
    if (ddp__cuda.cudaDriverGetVersion(&v) == cudaSuccess)
        printf("driver is for CUDA: %d.%d\n", v / 1000, v % 1000 / 10);
    if (ddp__cuda.cudaRuntimeGetVersion(&v) == cudaSuccess) printf("cudart: %d.%d\n", v / 1000, v % 1000 / 10);
    if (there(DDP_LIB_CUBLAS, "cuBLAS") && ddp__cuda.cublasCreate_v2(&blas) == CUBLAS_STATUS_SUCCESS) {
        if (ddp__cuda.cublasGetVersion_v2(blas, &v) == CUBLAS_STATUS_SUCCESS) printf("cuBLAS: %d\n", v);
        ddp__cuda.cublasDestroy_v2(blas);
    }
    if (there(DDP_LIB_CUDNN, "cuDNN")) printf("cuDNN: %zu\n", ddp__cuda.cudnnGetVersion());
    if (there(DDP_LIB_NCCL, "NCCL") && ddp__cuda.ncclGetVersion(&v) == ncclSuccess) printf("NCCL: %d\n", v);
    if (there(DDP_LIB_NVRTC, "NVRTC") && ddp__cuda.nvrtcVersion(&v, &minor) == NVRTC_SUCCESS)
        printf("NVRTC: %d.%d\n", v, minor);
}

static int properties(int i) {
    struct cudaDeviceProp p;
    size_t free = 0, total = 0;
    cudaError_t e = ddp__cuda.cudaGetDeviceProperties(&p, i);
    if (!e) e = ddp__cuda.cudaSetDevice(i);
    if (!e) e = ddp__cuda.cudaMemGetInfo(&free, &total);
    if (e) {
        printf("GPU %d: %s\n", i, ddp__cuda.cudaGetErrorString(e));
        return 1;
    }
    printf("GPU %d: %s\n", i, p.name);
    printf("  compute capability: %d.%d\n  memory: %zu bytes, %zu free\n", p.major, p.minor, total, free);
    printf("  multiprocessors: %d\n  registers of a multiprocessor: %d\n", p.multiProcessorCount,
           p.regsPerMultiprocessor);
    printf("  threads of a multiprocessor: %d\n  blocks of a multiprocessor: %d\n", p.maxThreadsPerMultiProcessor,
           p.maxBlocksPerMultiProcessor);
    printf("  shared memory of a block: %zu, opted in %zu, of a multiprocessor %zu\n", p.sharedMemPerBlock,
           p.sharedMemPerBlockOptin, p.sharedMemPerMultiprocessor);
    printf("  L2 cache: %d\n  memory bus: %d bits\n  ECC: %d\n", p.l2CacheSize, p.memoryBusWidth, p.ECCEnabled);
    printf("  engines for copies: %d\n  PCI: %04x:%02x:%02x\n", p.asyncEngineCount, (unsigned)p.pciDomainID,
           (unsigned)p.pciBusID, (unsigned)p.pciDeviceID);
    return 0;
}

/* cuDNN's profile of the GPU that is selected, as text to free; NULL with the reason printed. */
static char *profile_text(cudnnHandle_t handle, cudnnBackendDescriptor_t d) {
    int64_t n = 0;
    cudnnStatus_t s =
        ddp__cuda.cudnnBackendSetAttribute(d, CUDNN_ATTR_DEVICEPROP_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
    if (!s) s = ddp__cuda.cudnnBackendFinalize(d);
    if (!s)
        s = ddp__cuda.cudnnBackendGetAttribute(d, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, 0, &n,
                                               NULL);
    char *text = s || n <= 0 ? NULL : calloc((size_t)n + 1, 1);
    if (text)
        s = ddp__cuda.cudnnBackendGetAttribute(d, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, n, &n,
                                               text);
    if (!text || s) {
        printf("  cuDNN gives no profile: %s\n", ddp__cuda.cudnnGetErrorString(s));
        free(text);
        return NULL;
    }
    return text;
}

static int write_profile(int i, const char *folder) {
    cudnnHandle_t handle;
    cudnnBackendDescriptor_t d = NULL;
    char path[1100];
    if (ddp__cuda_missing(DDP_LIB_CUDNN) || ddp__cuda.cudaSetDevice(i) || ddp__cuda.cudnnCreate(&handle)) return 0;
    cudnnStatus_t s = ddp__cuda.cudnnBackendCreateDescriptor(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &d);
    char *text = s ? NULL : profile_text(handle, d);
    if (s) printf("  cuDNN knows no profiles: %s\n", ddp__cuda.cudnnGetErrorString(s));
    if (d) ddp__cuda.cudnnBackendDestroyDescriptor(d);
    ddp__cuda.cudnnDestroy(handle);
    if (!text) return 0;
    snprintf(path, sizeof path, "%s/cudnn_profile_%d.json", folder, i);
    FILE *f = fopen(path, "w");
    int bad = !f || fprintf(f, "%s\n", text) < 0;
    if (f && fclose(f)) bad = 1;
    printf(bad ? "  %s cannot be written\n" : "  cuDNN's profile: %s\n", path);
    free(text);
    return bad;
}

/* A world of one: x is summed over itself. Prints what failed; NULL is nothing. */
static const char *nccl_steps(float *x, int n, cudaStream_t stream, void *device, ncclComm_t *comm) {
    ncclUniqueId id;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    size_t bytes = (size_t)n * sizeof *x;
    if (ddp__cuda.ncclGetUniqueId(&id)) return "ncclGetUniqueId";
    if (ddp__cuda.ncclCommInitRankConfig(comm, 1, id, 0, &config)) return "ncclCommInitRankConfig";
    if (ddp__cuda.cudaMemcpyAsync(device, x, bytes, cudaMemcpyDefault, stream)) return "copying to the GPU";
    if (ddp__cuda.ncclAllReduce(device, device, (size_t)n, ncclFloat, ncclSum, *comm, stream)) return "ncclAllReduce";
    for (int i = 0; i < n; i++) x[i] = 0;
    if (ddp__cuda.cudaMemcpyAsync(x, device, bytes, cudaMemcpyDefault, stream)) return "copying from the GPU";
    if (ddp__cuda.cudaStreamSynchronize(stream)) return "cudaStreamSynchronize";
    for (int i = 0; i < n; i++)
        if (!(x[i] == (float)i)) return "the sum: it is wrong";
    return NULL;
}

static int nccl_alone(void) {
    enum { N = 1000 };
    float x[N];
    cudaStream_t stream;
    void *device = NULL;
    ncclComm_t comm = NULL;
    for (int i = 0; i < N; i++) x[i] = (float)i;
    if (!there(DDP_LIB_NCCL, "NCCL") || ddp__cuda.cudaSetDevice(0) || ddp__cuda.cudaMalloc(&device, sizeof x) ||
        ddp__cuda.cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0))
        return 1;
    const char *failed = nccl_steps(x, N, stream, device, &comm);
    if (failed) printf("NCCL, a world of one: %s failed: %s\n", failed, ddp__cuda.ncclGetLastError(comm));
    else printf("NCCL, a world of one: all-reduce is right\n");
    if (comm) ddp__cuda.ncclCommDestroy(comm);
    ddp__cuda.cudaStreamDestroy(stream);
    ddp__cuda.cudaFree(device);
    return failed != NULL;
}

int main(int argc, char **argv) {
    int count = 0, bad = 0;
    if (!there(DDP_LIB_CUDART, "cudart")) return 1;
    cudaError_t e = ddp__cuda.cudaGetDeviceCount(&count);
    if (e || count == 0) {
        printf("no GPU: %s\n", e ? ddp__cuda.cudaGetErrorString(e) : "none is listed");
        return 1;
    }
    if (argc > 1 && strcmp(argv[1], "--nccl") == 0) return nccl_alone();
    versions();
    for (int i = 0; i < count; i++) {
        bad |= properties(i);
        if (argc > 1) bad |= write_profile(i, argv[1]);
    }
    printf("%d GPUs\n", count);
    return bad;
}
