/* device.c -- GPUs: made ready on first use, their streams, copies, waits, and what their errors mean. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"
#include "lists.h"
#include "recent.h"

enum { MAX_GPUS = 64 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    ddp_gpu gpu;
    atomic_bool ready;
} gpus[MAX_GPUS];
static _Thread_local int selected = -1; /* on this thread */

/* ---- errors ---- */

/* After these the runtime answers every call of this process with them. */
static bool is_final(cudaError_t e) {
    switch (e) {
        case cudaErrorIllegalAddress:
        case cudaErrorLaunchFailure:
        case cudaErrorIllegalInstruction:
        case cudaErrorMisalignedAddress:
        case cudaErrorInvalidAddressSpace:
        case cudaErrorInvalidPc:
        case cudaErrorHardwareStackError:
        case cudaErrorAssert:
        case cudaErrorLaunchTimeout:
        case cudaErrorECCUncorrectable:
        case cudaErrorNvlinkUncorrectable:
        case cudaErrorMpsRpcFailure:
        case cudaErrorDevicesUnavailable:
        case cudaErrorNoDevice:
        case cudaErrorUnknown: return true;
        default: return false;
    }
}

/* The first final error, as it was told. */
static pthread_mutex_t end_lock = PTHREAD_MUTEX_INITIALIZER;
static char ended[700];

/* Tells what e means, with what was launched since the host last waited. */
static int tell(cudaError_t e, const char *what) {
    const char *name = ddp__cuda.cudaGetErrorName(e), *text = ddp__cuda.cudaGetErrorString(e);
    const char *final = is_final(e) ? "; this process can use the GPU no more: start it again, from a checkpoint" : "";
    char recent[400], from[520] = "";
    ddp__recent_text(recent, sizeof recent);
    if (*recent)
        snprintf(from, sizeof from, ". It comes from this or an op launched before: %s%s", recent,
                 ddp__cuda_synchronous() ? "" : "; DDP_SYNC=1 finds which");
    if (e == cudaErrorDevicesUnavailable || e == cudaErrorNoDevice || e == cudaErrorUnknown)
        return ddp__fail(DDP_EDEVICE,
                         "%s: the GPU does not answer any more (%s: %s): it may have fallen off the bus; see `dmesg | "
                         "grep -i xid` and `nvidia-smi`, then start again from a checkpoint",
                         what, name, text);
    return ddp__fail(DDP_EDEVICE, "%s: CUDA error %d, %s: %s%s%s", what, (int)e, name, text, from, final);
}

int ddp__cuda_check(cudaError_t e, const char *what) {
    if (e == cudaSuccess) return 0;
    ddp__cuda.cudaGetLastError(); /* it is told here: the next call's error is its own */
    if (e == cudaErrorMemoryAllocation) return ddp__fail(DDP_ENOMEM, "%s: out of memory on cuda:%d", what, selected);
    if (!is_final(e)) return tell(e, what);
    pthread_mutex_lock(&end_lock);
    int st;
    if (*ended) st = ddp__fail(DDP_EDEVICE, "%s: the GPU's work ended before: %s", what, ended);
    else {
        ddp_saved_error first;
        st = tell(e, what);
        ddp__error_save(&first);
        snprintf(ended, sizeof ended, "%s", first.text ? first.text : what);
        ddp__error_restore(&first);
    }
    pthread_mutex_unlock(&end_lock);
    return st;
}

/* ---- one GPU ---- */

static int make_ready(ddp_gpu *g, int i) {
    int least = 0, most = 0;
    g->index = i;
    cudaError_t e = ddp__cuda.cudaGetDeviceProperties(&g->prop, i);
    if (!e && g->prop.major * 10 + g->prop.minor < DDP_CUDA_OLDEST)
        return ddp__fail(DDP_ENOSUP, "cuda:%d is a %s of compute capability %d.%d; CUDA %d computes on %d.%d and later",
                         i, g->prop.name, g->prop.major, g->prop.minor, DDP_CUDA_MAJOR, DDP_CUDA_OLDEST / 10,
                         DDP_CUDA_OLDEST % 10);
    if (!e) e = ddp__cuda.cudaDeviceGetStreamPriorityRange(&least, &most);
    if (!e) e = ddp__cuda.cudaStreamCreateWithPriority(&g->compute, cudaStreamNonBlocking, least);
    if (!e) e = ddp__cuda.cudaStreamCreateWithPriority(&g->copy, cudaStreamNonBlocking, most);
    if (!e) e = ddp__cuda.cudaEventCreateWithFlags(&g->computed, cudaEventDisableTiming);
    if (!e) e = ddp__cuda.cudaEventCreateWithFlags(&g->copied, cudaEventDisableTiming);
    if (!e) return 0;
    if (g->computed) ddp__cuda.cudaEventDestroy(g->computed);
    if (g->copy) ddp__cuda.cudaStreamDestroy(g->copy);
    if (g->compute) ddp__cuda.cudaStreamDestroy(g->compute);
    g->computed = NULL;
    g->copy = g->compute = NULL;
    return ddp__cuda_check(e, "making a GPU ready");
}

cudaError_t ddp__gpu_select(int i) {
    cudaError_t e = selected == i ? cudaSuccess : ddp__cuda.cudaSetDevice(i);
    if (!e) selected = i;
    return e;
}

ddp_gpu *ddp__gpu(int i) {
    cudaError_t e = ddp__gpu_select(i);
    if (e) {
        ddp__cuda_check(e, "cudaSetDevice");
        return NULL;
    }
    if (atomic_load_explicit(&gpus[i].ready, memory_order_acquire)) return &gpus[i].gpu;
    pthread_mutex_lock(&lock);
    int st = atomic_load(&gpus[i].ready) ? 0 : make_ready(&gpus[i].gpu, i);
    if (st == 0) atomic_store(&gpus[i].ready, true);
    pthread_mutex_unlock(&lock);
    return st < 0 ? NULL : &gpus[i].gpu;
}

ddp_gpu *ddp__gpu_of(const ddp_call *c) {
    for (int i = 0; i < c->op->n_out; i++)
        if (c->out[i] && c->out[i]->m.device != DDP_CPU) return ddp__gpu(c->out[i]->m.device - 1);
    for (int i = 0; i < c->n_in; i++)
        if (c->in[i] && c->in[i]->m.device != DDP_CPU) return ddp__gpu(c->in[i]->m.device - 1);
    ddp__op_fail(c, DDP_EDEVICE, "no tensor on a GPU");
    return NULL;
}

/* ---- failures of other ranks ---- */

/* After a failure of another rank what is queued here ends, or is ended, without a right result. */
static struct {
    atomic_int status;
    char text[512];
} poison[MAX_GPUS];

static void gpu_poison(int i, int status, const char *text) {
    if (atomic_load(&poison[i].status)) return;
    snprintf(poison[i].text, sizeof poison[i].text, "%s", text);
    atomic_store(&poison[i].status, status);
}

/* ---- ids out of range, noted by kernels ---- */

static _Atomic(const char *) op_names[DDP_OP_COUNT]; /* of those that note */

int64_t *ddp__cuda_fault_word(const ddp_call *c) {
    ddp_gpu *g = ddp__gpu_of(c);
    if (!g) return NULL;
    atomic_store_explicit(&op_names[c->op->id], c->op->name, memory_order_relaxed);
    int64_t *word = atomic_load_explicit(&g->fault, memory_order_acquire);
    if (word) return word;
    pthread_mutex_lock(&lock);
    word = atomic_load(&g->fault);
    void *p = NULL;
    if (!word && ddp__cuda_check(ddp__cuda.cudaHostAlloc(&p, 4 * sizeof *word, cudaHostAllocMapped),
                                 "pinned memory for the faults of kernels") == 0) {
        word = memset(p, 0, 4 * sizeof *word);
        atomic_store_explicit(&g->fault, word, memory_order_release);
    }
    pthread_mutex_unlock(&lock);
    return word;
}

/* After a wait: what kernels noted, raised once. */
static int raise_fault(ddp_gpu *g) {
    volatile int64_t *word = atomic_load_explicit(&g->fault, memory_order_acquire);
    int64_t op = word ? word[0] - 1 : -1;
    if (op < 0 || op >= DDP_OP_COUNT) return 0;
    long long value = word[1], limit = word[2];
    word[1] = word[2] = 0;
    word[0] = 0;
    return ddp__fail(DDP_EINVAL, "%s: id %lld, expected 0 to %lld", atomic_load(&op_names[op]), value, limit - 1);
}

int ddp__gpu_wait(ddp_gpu *g, const char *what) {
    int st = ddp__cuda_check(ddp__cuda.cudaStreamSynchronize(g->compute), what);
    if (st < 0) return st;
    if (atomic_load(&poison[g->index].status))
        return ddp__fail(atomic_load(&poison[g->index].status), "%s", poison[g->index].text);
    ddp__recent_clear();
    ddp__gpu_waited(g->index);
    return raise_fault(g);
}

/* ---- the table that the core sees ---- */

/* Would an asynchronous copy still read p after it returned? */
static bool is_pinned(const void *p) {
    struct cudaPointerAttributes a;
    if (ddp__cuda.cudaPointerGetAttributes(&a, p) == cudaSuccess) return a.type == cudaMemoryTypeHost;
    ddp__cuda.cudaGetLastError();
    return false;
}

static int gpu_copy(void *dst, int dst_device, const void *src, int src_device, size_t bytes) {
    ddp_gpu *g = ddp__gpu((dst_device ? dst_device : src_device) - 1);
    if (!g) return ddp__pending();
    const char *what = !dst_device ? "reading from the GPU" : !src_device ? "copying to the GPU" : "copying on the GPU";
    int st = ddp__cuda_check(ddp__cuda.cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, g->compute), what);
    return st == 0 && (!dst_device || (!src_device && is_pinned(src))) ? ddp__gpu_wait(g, what) : st;
}

static int gpu_zero(int i, void *p, size_t bytes) {
    const ddp_gpu *g = ddp__gpu(i);
    return g ? ddp__cuda_check(ddp__cuda.cudaMemsetAsync(p, 0, bytes, g->compute), "cudaMemsetAsync") : ddp__pending();
}

static int gpu_wait(int i) {
    ddp_gpu *g = ddp__gpu(i);
    return g ? ddp__gpu_wait(g, "waiting for the GPU") : ddp__pending();
}

static const char to_gpu[] = "copying to the GPU";

static int gpu_copy_later(int i, void *dst, const void *src, size_t bytes) {
    const ddp_gpu *g = ddp__gpu(i);
    if (!g) return ddp__pending();
    int st = ddp__cuda_check(ddp__cuda.cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, g->compute), to_gpu);
    return st < 0 ? st : ddp__pinned_read_by(src, g->compute);
}

static int gpu_copy_ahead(int i, void *dst, const void *src, size_t bytes) {
    const ddp_gpu *g = ddp__gpu(i);
    if (!g) return ddp__pending();
    cudaError_t e = ddp__cuda.cudaEventRecord(g->computed, g->compute); /* dst's bytes may still be in use */
    if (!e) e = ddp__cuda.cudaStreamWaitEvent(g->copy, g->computed, 0);
    if (!e) e = ddp__cuda.cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, g->copy);
    if (e) return ddp__cuda_check(e, to_gpu);
    ddp__gpu_block_used_on(dst, g->copy);
    return ddp__pinned_read_by(src, g->copy);
}

static int gpu_copies_join(int i) {
    const ddp_gpu *g = ddp__gpu(i);
    if (!g) return ddp__pending();
    cudaError_t e = ddp__cuda.cudaEventRecord(g->copied, g->copy);
    if (!e) e = ddp__cuda.cudaStreamWaitEvent(g->compute, g->copied, 0);
    if (!e) ddp__gpu_stream_joined(i, g->copy);
    return ddp__cuda_check(e, to_gpu);
}

static int64_t gpu_memory(int i) {
    const ddp_gpu *g = ddp__gpu(i);
    return g ? (int64_t)g->prop.totalGlobalMem : 0;
}

static void gpu_empty_cache(int i) {
    ddp__gpu_empty_cache(i);
    ddp__pinned_empty();
}

static const char *gpu_describe(int i, char *text, size_t n) {
    struct cudaDeviceProp p;
    int driver = 0;
    if (ddp__cuda.cudaGetDeviceProperties(&p, i)) {
        snprintf(text, n, "cuda:%d, which does not answer", i);
        return text;
    }
    ddp__cuda.cudaDriverGetVersion(&driver);
    snprintf(text, n, "%s, %.0f GB, compute capability %d.%d, driver for CUDA %d.%d", p.name,
             (double)p.totalGlobalMem / 1e9, p.major, p.minor, driver / 1000, driver % 1000 / 10);
    return text;
}

static int gpu_uuid(int i, unsigned char uuid[16]) {
    struct cudaDeviceProp p;
    int st = ddp__cuda_check(ddp__cuda.cudaGetDeviceProperties(&p, i), "cudaGetDeviceProperties");
    if (st == 0) memcpy(uuid, &p.uuid, 16);
    return st;
}

static ddp_device_type type = {
    .size = sizeof(ddp_device_type),
    .name = "cuda",
    .lists = ddp__cuda_lists,
    .alloc = ddp__gpu_alloc,
    .release = ddp__gpu_release,
    .copy = gpu_copy,
    .zero = gpu_zero,
    .wait = gpu_wait,
    .host_alloc = ddp__pinned_alloc,
    .host_release = ddp__pinned_release,
    .copy_later = gpu_copy_later,
    .copy_ahead = gpu_copy_ahead,
    .copies_join = gpu_copies_join,
    .stats = ddp__gpu_stats,
    .reset_peak = ddp__gpu_reset_peak,
    .empty_cache = gpu_empty_cache,
    .memory = gpu_memory,
    .count_bad = ddp__gpu_count_bad,
    .describe = gpu_describe,
    .vendor_library = ddp__cuda_library,
    .peer = ddp__cuda_peer,
    .uuid = gpu_uuid,
    .poison = gpu_poison,
    .coll = &ddp__nccl,
};

/* Why the runtime sees no GPU, in a sentence. */
static void explain(cudaError_t e, char *why, size_t n) {
    int driver = 0;
    ddp__cuda.cudaDriverGetVersion(&driver);
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (e == cudaErrorInsufficientDriver && driver == 0)
        snprintf(why, n, "no NVIDIA driver answers: install it until `nvidia-smi` lists a GPU, or compute on \"cpu\"");
    else if (e == cudaErrorInsufficientDriver)
        snprintf(why, n,
                 "the NVIDIA driver is too old: it is for CUDA %d.%d, this build for CUDA %d.%d; update the driver",
                 driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    else if (e == cudaErrorNoDevice && visible)
        snprintf(why, n, "no GPU: CUDA_VISIBLE_DEVICES=%s names none that is here; `nvidia-smi -L` lists them",
                 visible);
    else if (e == cudaErrorNoDevice || e == cudaErrorStubLibrary)
        snprintf(why, n, "no GPU: `nvidia-smi -L` must list one; in a container start it with --gpus all");
    else
        snprintf(why, n, "the CUDA runtime does not start: %s, %s", ddp__cuda.cudaGetErrorName(e),
                 ddp__cuda.cudaGetErrorString(e));
}

DDP_API const ddp_device_type *ddp_plugin_device(char *why, size_t n, int *code);
const ddp_device_type *ddp_plugin_device(char *why, size_t n, int *code) {
    const char *missing = ddp__cuda_missing(DDP_LIB_CUDART);
    int count = 0;
    if (missing) {
        snprintf(why, n, "%s", missing);
        return NULL;
    }
    cudaError_t e = ddp__cuda.cudaGetDeviceCount(&count);
    if (!e && count == 0) e = cudaErrorNoDevice;
    *code = (int)e;
    if (e) {
        ddp__cuda.cudaGetLastError();
        explain(e, why, n);
        return NULL;
    }
    type.count = count < MAX_GPUS ? count : MAX_GPUS;
    return &type;
}
