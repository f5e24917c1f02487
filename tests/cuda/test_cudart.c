/* The double of cudart: what it does, and the mistakes of a program that it catches. */
#include "child.h"
#include "emu/test_args.h"

#include <cuda_runtime_api.h>

#include <math.h>

enum { N = 1000 };
static cudaLibrary_t library;
static cudaStream_t a, b;
static cudaEvent_t event;
static float *x, *y, *host; /* device, device, pinned */

static int start(void) {
    WORKS(cudaLibraryLoadData(&library, "image", NULL, NULL, 0, NULL, NULL, 0));
    WORKS(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    WORKS(cudaStreamCreateWithPriority(&b, cudaStreamNonBlocking, -5));
    WORKS(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    WORKS(cudaMalloc((void **)&x, N * sizeof *x));
    WORKS(cudaMalloc((void **)&y, N * sizeof *y));
    WORKS(cudaHostAlloc((void **)&host, N * sizeof *host, cudaHostAllocDefault));
    for (int i = 0; i < N; i++) host[i] = (float)i;
    return 0;
}
static int finish(void) {
    WORKS(cudaFree(x));
    WORKS(cudaFree(y));
    WORKS(cudaFreeHost(host));
    WORKS(cudaEventDestroy(event));
    WORKS(cudaStreamDestroy(a));
    WORKS(cudaStreamDestroy(b));
    WORKS(cudaLibraryUnload(library));
    return 0;
}

static int launch(const char *name, const void *args, unsigned blocks, unsigned threads, size_t shared,
                  cudaStream_t s) {
    cudaKernel_t k;
    void *list[] = {(void *)args};
    int e = (int)cudaLibraryGetKernel(&k, library, name);
    return e ? e : (int)cudaLaunchKernel((const void *)k, (dim3){blocks, 1, 1}, (dim3){threads, 1, 1}, list, shared, s);
}
/* y = factor * x + 1 on stream s */
static int scale(float factor, cudaStream_t s) {
    scale_args args = {x, y, factor, 1, N};
    return launch("scale", &args, 4, 64, 0, s);
}

/* ---- what works ---------------------------------------------------------------------------------------------------- */
static int two_streams(void) {
    WORKS(start());
    WORKS(cudaMemcpyAsync(x, host, N * 4, cudaMemcpyHostToDevice, a));
    WORKS(scale(2, a));
    WORKS(cudaEventRecord(event, a));
    WORKS(cudaStreamWaitEvent(b, event, 0));
    WORKS(cudaMemcpyAsync(host, y, N * 4, cudaMemcpyDeviceToHost, b));
    WORKS(cudaStreamSynchronize(b));
    for (int i = 0; i < N; i++) MUST(host[i] == 2 * (float)i + 1);
    return finish();
}

static int pageable_copies(void) {
    float here[N], there[N];
    WORKS(start());
    for (int i = 0; i < N; i++) here[i] = (float)i;
    WORKS(cudaMemcpyAsync(x, here, sizeof here, cudaMemcpyHostToDevice, a));
    memset(here, 0, sizeof here); /* it was read at the call */
    WORKS(cudaMemcpyAsync(there, x, sizeof there, cudaMemcpyDeviceToHost, a));
    for (int i = 0; i < N; i++) MUST(there[i] == (float)i); /* and this one waited */
    WORKS(cudaMemset(x, 0, 8));
    WORKS(cudaMemcpy(there, x, 8, cudaMemcpyDefault));
    MUST(there[0] == 0 && there[1] == 0);
    GIVES(cudaMemcpy(x, there, 8, cudaMemcpyDeviceToDevice), cudaErrorInvalidValue);
    return finish();
}

static int rows_of_a_matrix(void) {
    WORKS(start());
    WORKS(cudaMemsetAsync(x, 0, N * 4, a));
    WORKS(cudaMemcpy2DAsync(x, 40, host, 20, 20, 10, cudaMemcpyHostToDevice, a));
    WORKS(cudaMemcpyAsync(y, x, 400, cudaMemcpyDeviceToDevice, a));
    WORKS(cudaStreamSynchronize(a));
    WORKS(cudaMemcpy(host, y, 400, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 100; i++) MUST(host[i] == (i % 10 < 5 ? (float)(i / 10 * 5 + i % 10) : 0));
    return finish();
}

static int new_memory_is_nan(void) {
    float got[N];
    WORKS(start());
    WORKS(cudaMemcpy(got, x, sizeof got, cudaMemcpyDeviceToHost));
    for (int i = 0; i < N; i++) MUST(isnan(got[i]));
    return finish();
}

static int legacy_stream_fences(void) {
    cudaStream_t blocking;
    WORKS(start());
    WORKS(cudaStreamCreate(&blocking));
    WORKS(cudaMemcpyAsync(x, host, N * 4, cudaMemcpyHostToDevice, blocking));
    WORKS(scale(2, NULL));                                                   /* after the copy */
    WORKS(cudaMemcpyAsync(x, y, N * 4, cudaMemcpyDeviceToDevice, blocking)); /* after the kernel */
    WORKS(cudaStreamSynchronize(blocking));
    WORKS(cudaMemcpy(host, x, N * 4, cudaMemcpyDeviceToHost));
    MUST(host[10] == 21);
    WORKS(cudaStreamDestroy(blocking));
    return finish();
}

static int questions(void) {
    WORKS(start());
    WORKS(cudaEventQuery(event)); /* never recorded: complete */
    for (int i = 0; i < 5; i++) WORKS(scale(2, a));
    WORKS(cudaEventRecord(event, a));
    GIVES(cudaStreamQuery(a), cudaErrorNotReady);
    GIVES(cudaEventQuery(event), cudaErrorNotReady);
    GIVES(cudaGetLastError(), cudaErrorNotReady);
    GIVES(cudaGetLastError(), cudaSuccess);
    int asked = 0;
    while (cudaEventQuery(event) == cudaErrorNotReady) asked++;
    MUST(asked > 0 && asked < 10);
    WORKS(cudaStreamQuery(a));
    (void)cudaGetLastError();
    return finish();
}

static int idle_work_runs(void) {
    WORKS(start());
    WORKS(cudaMemsetAsync(x, 0, N * 4, a));
    WORKS(cudaMemcpyAsync(host, x, N * 4, cudaMemcpyDeviceToHost, a));
    MUST(isnan(host[7])); /* not yet */
    for (int i = 0; i < 100 && isnan(*(volatile float *)&host[7]); i++) usleep(50000);
    MUST(host[7] == 0);
    return finish();
}

static int timing(void) {
    cudaEvent_t from, to;
    float ms = -1;
    WORKS(start());
    WORKS(cudaEventCreate(&from));
    WORKS(cudaEventCreate(&to));
    WORKS(cudaEventRecord(from, a));
    WORKS(scale(2, a));
    WORKS(cudaEventRecord(to, a));
    GIVES(cudaEventElapsedTime(&ms, from, to), cudaErrorNotReady);
    WORKS(cudaEventSynchronize(to));
    WORKS(cudaEventElapsedTime(&ms, from, to));
    MUST(ms >= 0 && ms < 1000);
    GIVES(cudaEventElapsedTime(&ms, from, event), cudaErrorInvalidResourceHandle);
    (void)cudaGetLastError();
    WORKS(cudaEventDestroy(from));
    WORKS(cudaEventDestroy(to));
    return finish();
}

static int async_memory(void) {
    float *p;
    WORKS(start());
    WORKS(cudaMallocAsync((void **)&p, 4000, a));
    WORKS(cudaMemsetAsync(p, 0, 4000, a));
    WORKS(cudaFreeAsync(p, a));
    WORKS(cudaStreamSynchronize(a));
    return finish();
}

static int memory_runs_out(void) {
    void *big, *more;
    size_t left, all;
    WORKS(cudaMalloc(&big, 6 << 20));
    GIVES(cudaMalloc(&more, 6 << 20), cudaErrorMemoryAllocation);
    GIVES(cudaPeekAtLastError(), cudaErrorMemoryAllocation);
    MUST(strstr(cudaGetErrorString(cudaGetLastError()), "out of memory"));
    WORKS(cudaMemGetInfo(&left, &all));
    MUST(all == 8 << 20 && left == 2 << 20);
    WORKS(cudaFree(big));
    WORKS(cudaMalloc(&more, 6 << 20));
    return (int)cudaFree(more);
}

static int impossible_launches(void) {
    WORKS(start());
    scale_args args = {x, y, 1, 0, 0};
    GIVES(launch("scale", &args, 1, 1025, 0, a), cudaErrorInvalidConfiguration);
    GIVES(launch("scale", &args, 0, 1, 0, a), cudaErrorInvalidConfiguration);
    GIVES(launch("gemm", &args, 1, 1, 60 << 10, a), cudaErrorInvalidConfiguration);
    GIVES(launch("no_such_kernel", &args, 1, 1, 0, a), cudaErrorSymbolNotFound);
    cudaKernel_t k;
    WORKS(cudaLibraryGetKernel(&k, library, "gemm"));
    GIVES(cudaFuncSetAttribute((const void *)k, cudaFuncAttributeMaxDynamicSharedMemorySize, 300 << 10),
          cudaErrorInvalidValue);
    WORKS(cudaFuncSetAttribute((const void *)k, cudaFuncAttributeMaxDynamicSharedMemorySize, 60 << 10));
    gemm_args nothing = {x, x, y, 0, 0, 0};
    WORKS(launch("gemm", &nothing, 1, 1, 60 << 10, a));
    WORKS(cudaSetDevice(1));
    GIVES(launch("scale", &args, 1, 1, 0, a), cudaErrorInvalidResourceHandle); /* a stream of device 0 */
    WORKS(cudaSetDevice(0));
    (void)cudaGetLastError();
    return finish();
}

static int devices(void) {
    int count, version, device;
    struct cudaDeviceProp p, q;
    WORKS(cudaGetDeviceCount(&count));
    MUST(count == 3);
    WORKS(cudaGetDeviceProperties(&p, 0));
    WORKS(cudaGetDeviceProperties(&q, 2));
    MUST(p.major == 8 && p.minor == 6 && p.warpSize == 32 && memcmp(&p.uuid, &q.uuid, 16));
    GIVES(cudaSetDevice(3), cudaErrorInvalidDevice);
    WORKS(cudaSetDevice(2));
    WORKS(cudaGetDevice(&device));
    WORKS(cudaDriverGetVersion(&version));
    MUST(device == 2 && version == CUDART_VERSION);
    return 0;
}
static int visible_devices(void) {
    struct cudaDeviceProp p;
    int count;
    WORKS(cudaGetDeviceCount(&count));
    WORKS(cudaGetDeviceProperties(&p, 0));
    MUST(count == 1 && p.uuid.bytes[15] == 1);
    return 0;
}
static int no_driver(void) {
    int n, version;
    GIVES(cudaGetDeviceCount(&n), atoi(getenv("WANT")));
    GIVES(cudaMalloc((void **)&x, 4), atoi(getenv("WANT")));
    WORKS(cudaDriverGetVersion(&version));
    MUST(n == 0 && version == atoi(getenv("VERSION")));
    return 0;
}

static int graphs(void) {
    cudaGraph_t g;
    cudaGraphExec_t run;
    size_t nodes;
    WORKS(start());
    WORKS(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
    WORKS(cudaMemcpyAsync(x, host, N * 4, cudaMemcpyHostToDevice, a));
    WORKS(cudaEventRecord(event, a));
    WORKS(cudaStreamWaitEvent(b, event, 0));
    WORKS(scale(3, b));
    WORKS(cudaEventRecord(event, b));
    WORKS(cudaStreamWaitEvent(a, event, 0));
    WORKS(cudaMemcpyAsync(host, y, N * 4, cudaMemcpyDeviceToHost, a));
    WORKS(cudaStreamEndCapture(a, &g));
    MUST(host[2] == 2); /* nothing ran */
    WORKS(cudaGraphGetNodes(g, NULL, &nodes));
    MUST(nodes == 3);
    WORKS(cudaGraphInstantiate(&run, g, 0));
    WORKS(cudaGraphDestroy(g));
    for (int i = 0; i < 2; i++) WORKS(cudaGraphLaunch(run, a));
    WORKS(cudaStreamSynchronize(a));
    MUST(host[2] == 22); /* 3 * (3 * 2 + 1) + 1 */
    WORKS(cudaGraphExecDestroy(run));
    return finish();
}
static int captures_gone_wrong(void) {
    cudaGraph_t g;
    float pageable[4];
    WORKS(start());
    WORKS(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
    GIVES(cudaStreamSynchronize(a), cudaErrorStreamCaptureUnsupported);
    GIVES(cudaStreamEndCapture(a, &g), cudaErrorStreamCaptureInvalidated);
    WORKS(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
    WORKS(cudaEventRecord(event, a));
    WORKS(cudaStreamWaitEvent(b, event, 0));
    WORKS(scale(1, b));
    GIVES(cudaStreamEndCapture(a, &g), cudaErrorStreamCaptureUnjoined);
    WORKS(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
    GIVES(cudaMemcpyAsync(x, pageable, 16, cudaMemcpyHostToDevice, a), cudaErrorStreamCaptureUnsupported);
    GIVES(cudaStreamEndCapture(a, &g), cudaErrorStreamCaptureInvalidated);
    GIVES(cudaStreamEndCapture(a, &g), cudaErrorIllegalState);
    GIVES(cudaEventQuery(event), cudaErrorCapturedEvent); /* its capture is gone */
    GIVES(cudaStreamWaitEvent(b, event, 0), cudaErrorCapturedEvent);
    WORKS(cudaEventRecord(event, b));
    WORKS(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
    GIVES(cudaStreamWaitEvent(a, event, 0), cudaErrorStreamCaptureIsolation);
    GIVES(cudaStreamEndCapture(a, &g), cudaErrorStreamCaptureInvalidated);
    (void)cudaGetLastError();
    return finish();
}

/* ---- faults -------------------------------------------------------------------------------------------------------- */
static int third_malloc_fails(void) {
    void *p[3];
    WORKS(cudaMalloc(&p[0], 4));
    WORKS(cudaMalloc(&p[1], 4));
    GIVES(cudaMalloc(&p[2], 4), atoi(getenv("WANT")));
    WORKS(cudaMalloc(&p[2], 4));
    for (int i = 0; i < 3; i++) WORKS(cudaFree(p[i]));
    return 0;
}
static int kernel_fails(void) {
    int want = atoi(getenv("WANT"));
    void *p;
    WORKS(start());
    WORKS(scale(1, a)); /* the launch says nothing */
    WORKS(scale(1, a));
    GIVES(cudaStreamSynchronize(a), want);
    GIVES(cudaStreamSynchronize(b), want);
    GIVES(cudaMalloc(&p, 4), want);
    GIVES(cudaFree(x), want);
    GIVES(scale(1, a), want);
    GIVES(cudaGetLastError(), want);
    GIVES(cudaGetLastError(), want); /* it sticks */
    MUST(strlen(cudaGetErrorString((cudaError_t)want)) > 5);
    return 0;
}

/* ---- the log, and nothing done ------------------------------------------------------------------------------------- */
static char log_path[200];
static bool log_has(const char *line) {
    char text[4000];
    FILE *f = fopen(log_path, "r");
    size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    if (f) fclose(f);
    text[n] = 0;
    return strstr(text, line) != NULL;
}
static int logged(void) {
    WORKS(start());
    WORKS(cudaMemcpyAsync(x, host, N * 4, cudaMemcpyHostToDevice, a));
    WORKS(scale(2, a));
    MUST(log_has("cudaMalloc 4000 bytes on device 0: done\n"));
    MUST(log_has("cudaMemcpyAsync host to device 4000 bytes, stream 1\n"));
    MUST(log_has("launch scale grid 4,1,1 block 64,1,1 shared 0, stream 1, memory "));
    return finish();
}
static int dry(void) {
    WORKS(start());
    WORKS(cudaMemcpyAsync(x, host, N * 4, cudaMemcpyHostToDevice, a));
    WORKS(scale(2, a));
    WORKS(cudaMemcpyAsync(host, y, N * 4, cudaMemcpyDeviceToHost, a));
    WORKS(cudaStreamSynchronize(a));
    MUST(host[5] == 5); /* as it was */
    return finish();
}

/* ---- mistakes ------------------------------------------------------------------------------------------------------ */
static bool clean; /* the same program without its mistake */

static int no_event_wait(void) {
    WORKS(start());
    WORKS(cudaMemcpyAsync(x, host, N * 4, cudaMemcpyHostToDevice, a));
    WORKS(cudaEventRecord(event, a));
    if (clean) WORKS(cudaStreamWaitEvent(b, event, 0));
    WORKS(scale(2, b));
    WORKS(cudaStreamSynchronize(b));
    WORKS(cudaMemcpy(host, y, N * 4, cudaMemcpyDeviceToHost));
    MUST(host[5] == 11);
    WORKS(cudaStreamSynchronize(a));
    return finish();
}
static int no_synchronise(void) {
    WORKS(start());
    WORKS(cudaMemcpyAsync(x, host, N * 4, cudaMemcpyHostToDevice, a));
    WORKS(scale(2, a));
    WORKS(cudaMemcpyAsync(host, y, N * 4, cudaMemcpyDeviceToHost, a));
    if (clean) WORKS(cudaStreamSynchronize(a));
    MUST(host[5] == 11);
    return finish();
}
static int host_reads_device(void) {
    WORKS(start());
    if (!clean) MUST(x[3] > 0);
    return finish();
}
static int buffer_reused(void) {
    WORKS(start());
    WORKS(cudaMemcpyAsync(x, host, N * 4, cudaMemcpyHostToDevice, a));
    if (clean) WORKS(cudaStreamSynchronize(a));
    host[17] = 3;
    WORKS(cudaStreamSynchronize(a));
    return finish();
}
static int target_written(void) {
    WORKS(start());
    WORKS(cudaMemcpyAsync(host, x, N * 4, cudaMemcpyDeviceToHost, a));
    if (clean) WORKS(cudaStreamSynchronize(a));
    host[17] = 3;
    WORKS(cudaStreamSynchronize(a));
    return finish();
}
static int buffer_shared_in_order(void) { /* right: copies of one stream follow each other */
    WORKS(start());
    WORKS(cudaMemcpyAsync(x, host, N * 4, cudaMemcpyHostToDevice, a));
    WORKS(scale(2, a));
    WORKS(cudaMemcpyAsync(host, y, N * 4, cudaMemcpyDeviceToHost, a));
    WORKS(cudaMemcpyAsync(x, host, N * 4, cudaMemcpyHostToDevice, a));
    WORKS(cudaMemcpyAsync(host, x, N * 4, cudaMemcpyDeviceToHost, a));
    WORKS(cudaStreamSynchronize(a));
    MUST(host[5] == 11);
    return finish();
}
static int leak(void) {
    WORKS(start());
    if (clean) return finish();
    return 0;
}
static int overrun(void) { /* the kernel writes 2 elements more than y has */
    WORKS(start());
    scale_args args = {x, y, 1, 0, clean ? N : N + 2};
    WORKS(launch("scale", &args, 1, 64, 0, a));
    WORKS(cudaStreamSynchronize(a));
    return finish();
}
static int far_overrun(void) {
    WORKS(start());
    scale_args args = {x, y, 1, 0, clean ? N : N + 200};
    WORKS(launch("scale", &args, 1, 64, 0, a));
    WORKS(cudaStreamSynchronize(a));
    return finish();
}
static int use_after_free(void) {
    float *z;
    WORKS(start());
    WORKS(cudaMalloc((void **)&z, N * 4));
    scale_args args = {x, z, 1, 0, N};
    if (clean) WORKS(launch("scale", &args, 1, 64, 0, a));
    WORKS(cudaFree(z)); /* waits for what was launched before */
    if (!clean) WORKS(launch("scale", &args, 1, 64, 0, a));
    WORKS(cudaStreamSynchronize(a));
    return finish();
}
static int freed_copy(void) {
    float *z;
    WORKS(start());
    WORKS(cudaMalloc((void **)&z, N * 4));
    WORKS(cudaFree(z));
    if (!clean) WORKS(cudaMemcpyAsync(z, x, 4, cudaMemcpyDeviceToDevice, a));
    return finish();
}
static int double_free(void) {
    WORKS(start());
    if (!clean) WORKS(cudaFree(x));
    return finish();
}
static int host_pointer_in_kernel(void) {
    WORKS(start());
    scale_args args = {clean ? x : (float *)16, y, 1, 0, N};
    WORKS(launch("scale", &args, 1, 64, 0, a));
    WORKS(cudaStreamSynchronize(a));
    return finish();
}
static int unknown_mode(void) {
    WORKS(start());
    if (!clean) WORKS(cudaStreamWaitEvent(a, event, cudaEventWaitExternal));
    return finish();
}

static void mistake(const char *name, int (*body)(void), int status, const char *text) {
    char title[200];
    clean = true;
    snprintf(title, sizeof title, "double passes, with its mistake mended: %s", name);
    passes(title, "DDP_DOUBLE_LEAKS=fatal", body);
    clean = false;
    snprintf(title, sizeof title, "double catches: %s", name);
    caught(title, "DDP_DOUBLE_LEAKS=fatal", body, status, text);
}

static void test_mistakes(void) {
    mistake("missing event wait", no_event_wait, 1, "not true: host[5] == 11");
    mistake("missing synchronise", no_synchronise, 1, "not true: host[5] == 11");
    mistake("host reads device memory", host_reads_device, 128 + SIGSEGV, "host touched device memory at 0x");
    mistake("buffer reused in flight", buffer_reused, 99, "was written while copy 1 from it was in flight");
    mistake("target written in flight", target_written, 99, "was written while copy 1 into it was in flight");
    mistake("leak", leak, 99,
            "LEAK: 2 device allocations, 8000 bytes; the oldest: allocation 1 of 4000 bytes on device 0, allocated by "
            "cudaMalloc");
    mistake("red-zone overrun", overrun, 99, "scale wrote past the end of allocation 2 of 4000 bytes");
    mistake("overrun into the next page", far_overrun, 128 + SIGSEGV, "past the end of allocation 1");
    mistake("use after free by a kernel", use_after_free, 128 + SIGSEGV, "use after free: inside freed allocation 3");
    mistake("use after free by a copy", freed_copy, 99, "use after free: inside freed allocation 3");
    mistake("double free", double_free, 99, "double free: cudaFree");
    mistake("a kernel's wild pointer", host_pointer_in_kernel, 128 + SIGSEGV, "scale touched 0x");
    mistake("a mode that is not simulated", unknown_mode, 99,
            "cudaStreamWaitEvent: cudaEventWaitExternal is not simulated");
}

static const struct {
    const char *name;
    int (*body)(void);
} works[] = {{"two streams and an event", two_streams},
             {"copies from and to pageable memory", pageable_copies},
             {"copies of rows", rows_of_a_matrix},
             {"new memory is NaN", new_memory_is_nan},
             {"the legacy stream fences", legacy_stream_fences},
             {"stream-ordered memory", async_memory},
             {"pinned memory used by copies in order", buffer_shared_in_order},
             {"graphs", graphs},
             {"captures gone wrong", captures_gone_wrong},
             {"launches that cannot be", impossible_launches}};

int main(void) {
    static const char *const modes[] = {"lazy", "eager", "random DDP_DOUBLE_SEED=1", "random DDP_DOUBLE_SEED=2",
                                        "random DDP_DOUBLE_SEED=3"};
    char title[200], variables[300];
    use_test_kernels();
    for (size_t i = 0; i < sizeof works / sizeof *works; i++)
        for (size_t m = 0; m < sizeof modes / sizeof *modes; m++) {
            snprintf(title, sizeof title, "double: %s, %s", works[i].name, modes[m]);
            snprintf(variables, sizeof variables, "DDP_DOUBLE_LEAKS=fatal DDP_DOUBLE_MODE=%s", modes[m]);
            passes(title, variables, works[i].body);
        }
    passes("double: queries make progress", "", questions);
    passes("double: work that nobody waits for runs", "", idle_work_runs);
    passes("double: elapsed time", "", timing);
    passes("double: memory runs out", "DDP_DOUBLE_MB=8", memory_runs_out);
    passes("double: devices", "DDP_DOUBLE_GPUS=3 DDP_DOUBLE_CC=86", devices);
    passes("double: CUDA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES=1", visible_devices);
    passes("double: no driver", "DDP_DOUBLE_STATUS=35 WANT=35 VERSION=0", no_driver);
    passes("double: no device", "DDP_DOUBLE_STATUS=100 WANT=100 VERSION=13000", no_driver);
    passes("double: the stub of the driver", "DDP_DOUBLE_STATUS=34 WANT=34 VERSION=0", no_driver);
    passes("double: an old driver", "DDP_DOUBLE_DRIVER=12000 WANT=35 VERSION=12000", no_driver);
    passes("double: the third cudaMalloc fails", "DDP_DOUBLE_FAIL=cudaMalloc:3 WANT=2", third_malloc_fails);
    passes("double: it fails with another status", "DDP_DOUBLE_FAIL=cudaMalloc:3:46 WANT=46", third_malloc_fails);
    caught("double: a kernel fails, and that sticks", "DDP_DOUBLE_FAIL=kernel:2 DDP_DOUBLE_LEAKS=quiet WANT=700",
           kernel_fails, 0, NULL);
    caught("double: a GPU is lost", "DDP_DOUBLE_FAIL=lost:1 DDP_DOUBLE_LEAKS=quiet WANT=999", kernel_fails, 0, NULL);
    snprintf(log_path, sizeof log_path, "/tmp/ddp-double-log-%d", (int)getpid());
    snprintf(variables, sizeof variables, "DDP_DOUBLE_LEAKS=fatal DDP_DOUBLE_LOG=%s", log_path);
    passes("double: the log", variables, logged);
    unlink(log_path);
    passes("double: a dry run computes nothing", "DDP_DOUBLE_LEAKS=fatal DDP_DOUBLE_MODE=dry", dry);
    test_mistakes();
    return failures != 0;
}
