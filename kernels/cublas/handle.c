/* handle.c -- cuBLAS's handles: one a thread and GPU, all on the compute stream.
 *
 * The same bits every time: NVIDIA promises that for one version of cuBLAS on one model of GPU, but where several streams share one
 * handle (cuBLAS manual, "Results Reproducibility"). Here each handle knows one stream and is given a workspace by
 * cublasSetWorkspace, as that section asks; atomics stay off, which is cuBLAS's default. CUBLAS_WORKSPACE_CONFIG, which sizes the
 * workspaces of cuBLAS's own, is the user's and has no effect here. */
#include <pthread.h>

#include "cublas.h"

enum { MAX_GPUS = 64, MB = 1 << 20 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *workspaces[MAX_GPUS]; /* one a GPU: what uses it is queued on one stream */
static pthread_key_t key;          /* a thread's handles go with it */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Thread_local cublasHandle_t handles[MAX_GPUS];

static void drop_handles(void *all) {
    cublasHandle_t *h = all;
    for (int i = 0; i < MAX_GPUS; i++)
        if (h[i]) ddp__cuda.cublasDestroy_v2(h[i]);
}
static void make_key(void) { pthread_key_create(&key, drop_handles); }

/* NVIDIA's sizes: 32 MB from Hopper on, 4 MB before. */
static size_t workspace_bytes(const ddp_gpu *g) { return (size_t)(g->prop.major >= 9 ? 32 : 4) * MB; }

/* cudaMalloc, not our allocator: it stays for the life of the process and is no tensor's. */
static void *workspace(const ddp_call *c, const ddp_gpu *g) {
    pthread_mutex_lock(&lock);
    void **w = &workspaces[g->index];
    cudaError_t e = *w ? cudaSuccess : ddp__cuda.cudaMalloc(w, workspace_bytes(g));
    if (e == cudaErrorMemoryAllocation) { /* what lies in the cache unused */
        ddp__cuda.cudaGetLastError();
        ddp__gpu_empty_cache(g->index);
        e = ddp__cuda.cudaMalloc(w, workspace_bytes(g));
    }
    void *p = e ? NULL : *w;
    pthread_mutex_unlock(&lock);
    if (e) {
        ddp__cuda.cudaGetLastError();
        if (e == cudaErrorMemoryAllocation)
            ddp__op_fail(c, DDP_ENOMEM, "out of GPU memory: cuBLAS needs %zu MB to work in", workspace_bytes(g) / MB);
        else ddp__cuda_check(e, "cudaMalloc of cuBLAS's workspace");
    }
    return p;
}

int ddp__cublas_check(const ddp_call *c, cublasStatus_t st, const char *what) {
    if (st == CUBLAS_STATUS_SUCCESS) return 0;
    const ddp_meta *a = &c->in[0]->m, *b = &c->in[1]->m;
    return ddp__op_fail(c, st == CUBLAS_STATUS_ALLOC_FAILED ? DDP_ENOMEM : DDP_EDEVICE,
                        "%s: status %d, %s (%s of %s and %s, result %s)", what, (int)st,
                        ddp__cuda.cublasGetStatusString(st), ddp_dtype_name(a->dtype), DDP_SHAPE_TEXT(a),
                        DDP_SHAPE_TEXT(b), DDP_SHAPE_TEXT(&c->out[0]->m));
}

static int make(const ddp_call *c, const ddp_gpu *g, cublasHandle_t *h) {
    void *w = workspace(c, g);
    if (!w) return ddp__pending();
    int st = ddp__cublas_check(c, ddp__cuda.cublasCreate_v2(h), "cublasCreate");
    if (st < 0) return st;
    /* The stream first: setting it takes a workspace away. Sums of 16-bit products stay in f32 where they are split over blocks. */
    st = ddp__cublas_check(c, ddp__cuda.cublasSetStream_v2(*h, g->compute), "cublasSetStream");
    if (st == 0)
        st = ddp__cublas_check(c, ddp__cuda.cublasSetWorkspace_v2(*h, w, workspace_bytes(g)), "cublasSetWorkspace");
    if (st == 0)
        st = ddp__cublas_check(
            c,
            ddp__cuda.cublasSetMathMode(
                *h, (cublasMath_t)(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)),
            "cublasSetMathMode");
    if (st < 0) {
        ddp__cuda.cublasDestroy_v2(*h);
        *h = NULL;
    }
    return st;
}

cublasHandle_t ddp__cublas(const ddp_call *c) {
    const ddp_gpu *g = ddp__gpu_of(c);
    if (!g || ddp__cuda_need(DDP_LIB_CUBLAS) < 0) return NULL;
    cublasHandle_t *h = &handles[g->index];
    if (*h) return *h;
    pthread_once(&once, make_key);
    pthread_setspecific(key, handles);
    return make(c, g, h) < 0 ? NULL : *h;
}
