/* nccl.c -- collectives between GPUs by NCCL, for core/comm/gpu.c: a communicator that never blocks the host, a stream of its own of
 * high priority, events between it and the compute stream. NCCL_* in the environment is the user's. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "../../core/comm/device_coll.h"
#include "../cuda/cuda.h"
#include "../cuda/lists.h"

typedef struct ticket {
    struct ticket *next; /* of the spare ones */
    cudaEvent_t begin, end;
} ticket;

/* Memory of a bucket, registered: NCCL reads and writes it in place where the hardware can. */
typedef struct bucket_memory {
    struct bucket_memory *next;
    void *p, *handle;
} bucket_memory;

typedef struct nccl_comm {
    ncclComm_t comm;
    int gpu, rank, size;
    double timeout;
    cudaStream_t stream;
    pthread_mutex_t lock; /* of spare */
    ticket *spare;
    bucket_memory *buckets; /* of the compute thread */
} nccl_comm;

/* ---- NCCL's answers ---- */

/* "NCCL: unhandled system error (2): socket ...": NCCL's own last words are the line it would print with NCCL_DEBUG=WARN. */
static const char *words(const nccl_comm *n, ncclResult_t r, const char *what, char *text, size_t room) {
    const char *last = ddp__cuda.ncclGetLastError(n ? n->comm : NULL);
    snprintf(text, room, "%s: NCCL: %s (%d)%s%.240s%s", what, ddp__cuda.ncclGetErrorString(r), (int)r,
             last && *last ? ": " : "", last ? last : "",
             r == ncclSystemError || r == ncclRemoteError ? "; NCCL_DEBUG=INFO says more" : "");
    return text;
}

static int nccl_fail(const nccl_comm *n, ncclResult_t r, const char *what) {
    char text[500];
    return ddp__fail(r == ncclRemoteError ? DDP_EPEER : DDP_ESTATE, "%s", words(n, r, what, text, sizeof text));
}

/* Calls of a communicator that does not block are done when its state says so. */
static int settle(const nccl_comm *n, ncclResult_t r, const char *what, double deadline) {
    while (r == ncclInProgress) {
        if (ddp__now() > deadline)
            return ddp__fail(
                DDP_ETIMEOUT,
                "%s: NCCL has not come to an end in %.1f s: a rank is missing, or its network (NCCL_SOCKET_IFNAME) "
                "or GPU does not answer; NCCL_DEBUG=INFO says more",
                what, n->timeout);
        usleep(20);
        ncclResult_t asked = ddp__cuda.ncclCommGetAsyncError(n->comm, &r);
        if (asked != ncclSuccess) r = asked;
    }
    return r == ncclSuccess ? 0 : nccl_fail(n, r, what);
}

static ncclDataType_t type_of(ddp_dtype d) {
    static const ncclDataType_t types[DDP_DTYPES] = {
        [DDP_F32] = ncclFloat32, [DDP_F64] = ncclFloat64, [DDP_F16] = ncclFloat16, [DDP_BF16] = ncclBfloat16,
        [DDP_I64] = ncclInt64,   [DDP_I32] = ncclInt32,   [DDP_U8] = ncclUint8,    [DDP_BOOL] = ncclUint8};
    return types[d];
}

/* ---- tickets ---- */

static ticket *take_ticket(nccl_comm *n) {
    pthread_mutex_lock(&n->lock);
    ticket *t = n->spare;
    if (t) n->spare = t->next;
    pthread_mutex_unlock(&n->lock);
    if (t) return t;
    t = calloc(1, sizeof *t);
    if (!t) {
        ddp__fail(DDP_ENOMEM, "nccl: out of memory");
        return NULL;
    }
    cudaError_t e = ddp__cuda.cudaEventCreateWithFlags(&t->begin, cudaEventDisableTiming);
    if (!e) e = ddp__cuda.cudaEventCreateWithFlags(&t->end, cudaEventDisableTiming);
    if (ddp__cuda_check(e, "cudaEventCreate") == 0) return t;
    free(t);
    return NULL;
}

static void nccl_ticket_free(void *comm, void *p) {
    nccl_comm *n = comm;
    ticket *t = p;
    pthread_mutex_lock(&n->lock);
    t->next = n->spare;
    n->spare = t;
    pthread_mutex_unlock(&n->lock);
}

static int nccl_done(const void *p) {
    const ticket *t = p;
    return ddp__cuda.cudaEventQuery(t->end) == cudaSuccess;
}

/* ---- collectives ---- */

/* Each rank's part of a mean is its weight over this, multiplied in as it is sent: what is summed in 16 bits stays small. It is the number of
 * ranks; in 16 bits the power of two above it, for a third, say, would be off by a part of a thousand, always to the same side. */
static double divisor(const nccl_comm *n, ddp_dtype d) {
    double two = 1;
    while (two < n->size) two *= 2;
    return d == DDP_F16 || d == DDP_BF16 ? two : n->size;
}

static int make_mean(const nccl_comm *n, const ddp_coll *c, ncclRedOp_t *op) {
    union {
        float f;
        double d;
        uint16_t h;
    } scale;
    double w = c->weight / divisor(n, c->dtype);
    if (c->dtype == DDP_F64) scale.d = w;
    else if (c->dtype == DDP_F32) scale.f = (float)w;
    else scale.h = c->dtype == DDP_F16 ? ddp__f32_to_f16((float)w) : ddp__f32_to_bf16((float)w);
    ncclResult_t r =
        ddp__cuda.ncclRedOpCreatePreMulSum(op, &scale, type_of(c->dtype), ncclScalarHostImmediate, n->comm);
    return r == ncclSuccess ? 0 : nccl_fail(n, r, "ncclRedOpCreatePreMulSum");
}

static ncclResult_t start(const nccl_comm *n, const ddp_coll *c, ncclRedOp_t op) {
    ncclDataType_t type = type_of(c->dtype);
    size_t count = (size_t)c->count;
    switch (c->sig.kind) {
        case DDP_COLL_ALL_REDUCE: return ddp__cuda.ncclAllReduce(c->buf, c->buf, count, type, op, n->comm, n->stream);
        case DDP_COLL_BROADCAST:
            return ddp__cuda.ncclBroadcast(c->buf, c->buf, count, type, c->root, n->comm, n->stream);
        case DDP_COLL_ALL_GATHER: return ddp__cuda.ncclAllGather(c->in, c->buf, count, type, n->comm, n->stream);
        default: return ddp__cuda.ncclReduceScatter(c->in, c->buf, count, type, op, n->comm, n->stream);
    }
}

static int enqueue(nccl_comm *n, const ddp_coll *c) {
    bool adds = c->sig.kind == DDP_COLL_ALL_REDUCE || c->sig.kind == DDP_COLL_REDUCE_SCATTER;
    bool mean = adds && c->reduce == DDP_MEAN;
    ncclRedOp_t op = c->reduce == DDP_MIN ? ncclMin : c->reduce == DDP_MAX ? ncclMax : ncclSum;
    int64_t mine = c->sig.kind == DDP_COLL_REDUCE_SCATTER ? c->count * n->size : c->count;
    void *from = c->sig.kind == DDP_COLL_REDUCE_SCATTER ? (void *)(uintptr_t)c->in : c->buf;
    int st = 0;
    if (adds && c->weight == 0 && (mean || c->reduce == DDP_SUM)) /* 0 times NaN is NaN */
        st = ddp__cuda_check(ddp__cuda.cudaMemsetAsync(from, 0, (size_t)mine * ddp__dtype_bytes[c->dtype], n->stream),
                             "cudaMemsetAsync");
    if (st == 0 && mean) st = make_mean(n, c, &op);
    if (st < 0) return st;
    st = settle(n, start(n, c, op), "collective", ddp__now() + n->timeout);
    if (mean) ddp__cuda.ncclRedOpDestroy(op, n->comm);
    return st;
}

static int nccl_post(void *comm, const ddp_coll *c, void **out) {
    nccl_comm *n = comm;
    int st = ddp__coll_check(c);
    ddp_gpu *gpu = st < 0 ? NULL : ddp__gpu(n->gpu);
    ticket *t = gpu ? take_ticket(n) : NULL;
    if (!t) return ddp__pending();
    cudaError_t e = ddp__cuda.cudaEventRecord(t->begin, gpu->compute);
    if (!e) e = ddp__cuda.cudaStreamWaitEvent(n->stream, t->begin, 0);
    st = ddp__cuda_check(e, "collective");
    if (st == 0 && c->count > 0) st = enqueue(n, c);
    if (st == 0) st = ddp__cuda_check(ddp__cuda.cudaEventRecord(t->end, n->stream), "collective");
    if (st < 0) nccl_ticket_free(n, t);
    else *out = t;
    return st;
}

static int nccl_after(void *comm, const ddp_coll *c, void *p, double factor) {
    const nccl_comm *n = comm;
    const ticket *t = p;
    ddp_gpu *gpu = ddp__gpu(n->gpu);
    if (!gpu) return ddp__pending();
    int st = ddp__cuda_check(ddp__cuda.cudaStreamWaitEvent(gpu->compute, t->end, 0), "collective");
    bool adds = c->sig.kind == DDP_COLL_ALL_REDUCE || c->sig.kind == DDP_COLL_REDUCE_SCATTER;
    if (adds && c->reduce == DDP_MEAN) factor *= divisor(n, c->dtype) / n->size;
    if (st < 0 || factor == 1 || c->count == 0) return st;
    walk_args a = {.p = {c->buf, c->buf}, .number = {0, 0, factor}, .n = c->count};
    if ((uintptr_t)c->buf % 16) { /* not for 16 bytes at a time */
        a.ndim = 1;
        a.size[0] = c->count;
        a.stride[0][0] = a.stride[1][0] = 1;
    }
    return ddp__cuda_launch_on(gpu, "mean over ranks", DDP_K_mul + (int)c->dtype, &a, ddp__grid(c->count, 4));
}

static const char *nccl_health(void *comm, char *why, size_t room) {
    nccl_comm *n = comm;
    ncclResult_t state = ncclSuccess;
    if (!ddp__gpu(n->gpu)) { /* the watchdog's thread: it selects the GPU for its calls */
        ddp_error_take(NULL);
        snprintf(why, room, "the GPU does not answer");
        return why;
    }
    ncclResult_t r = ddp__cuda.ncclCommGetAsyncError(n->comm, &state);
    if (r != ncclSuccess) state = r;
    if (state == ncclSuccess || state == ncclInProgress) return NULL;
    return words(n, state, "on the GPUs", why, room);
}

static void nccl_abort(void *comm) {
    nccl_comm *n = comm;
    ddp__cuda.ncclCommAbort(n->comm);
}

/* ---- memory of buckets ---- */

static int nccl_alloc(void *comm, int gpu, size_t bytes, void **out) {
    nccl_comm *n = comm;
    const ddp_gpu *g = ddp__gpu(gpu);
    bucket_memory *b = g ? calloc(1, sizeof *b) : NULL;
    if (!b) return g ? ddp__fail(DDP_ENOMEM, "nccl: out of memory") : ddp__pending();
    ncclResult_t r = ddp__cuda.ncclMemAlloc(&b->p, bytes);
    if (r != ncclSuccess) {
        free(b);
        return nccl_fail(n, r, "memory of a bucket");
    }
    if (ddp__cuda.ncclCommRegister(n->comm, b->p, bytes, &b->handle) != ncclSuccess)
        b->handle = NULL; /* works without, too */
    b->next = n->buckets;
    n->buckets = b;
    *out = b->p;
    return ddp__cuda_check(ddp__cuda.cudaMemsetAsync(b->p, 0, bytes, g->compute), "cudaMemsetAsync");
}

static void nccl_dealloc(void *comm, int gpu, void *p, size_t bytes) {
    nccl_comm *n = comm;
    (void)bytes;
    const ddp_gpu *g = ddp__gpu(gpu);
    for (bucket_memory **at = &n->buckets; g && *at; at = &(*at)->next) {
        bucket_memory *b = *at;
        if (b->p != p) continue;
        *at = b->next;
        ddp__cuda.cudaStreamSynchronize(g->compute); /* nobody reads it any more */
        if (b->handle) ddp__cuda.ncclCommDeregister(n->comm, b->handle);
        ddp__cuda.ncclMemFree(p);
        free(b);
        return;
    }
}

/* ---- joining and leaving ---- */

static int nccl_make_id(unsigned char id[DDP_DEVICE_ID]) {
    _Static_assert(sizeof(ncclUniqueId) == DDP_DEVICE_ID, "what ranks exchange");
    int st = ddp__cuda_need(DDP_LIB_NCCL);
    if (st < 0) return st;
    ncclResult_t r = ddp__cuda.ncclGetUniqueId((ncclUniqueId *)(void *)id);
    return r == ncclSuccess ? 0 : nccl_fail(NULL, r, "ncclGetUniqueId");
}

static void nccl_leave(void *comm, int graceful) {
    nccl_comm *n = comm;
    if (ddp__gpu(n->gpu)) {
        if (graceful && settle(n, ddp__cuda.ncclCommFinalize(n->comm), "leaving", ddp__now() + n->timeout) == 0)
            ddp__cuda.ncclCommDestroy(n->comm);
        else ddp__cuda.ncclCommAbort(n->comm);
    }
    ddp_error_take(NULL);
    while (n->spare) {
        ticket *t = n->spare;
        n->spare = t->next;
        ddp__cuda.cudaEventDestroy(t->begin);
        ddp__cuda.cudaEventDestroy(t->end);
        free(t);
    }
    while (n->buckets) { /* their reducers are gone, or never will be */
        bucket_memory *b = n->buckets;
        n->buckets = b->next;
        free(b);
    }
    if (n->stream) ddp__cuda.cudaStreamDestroy(n->stream);
    pthread_mutex_destroy(&n->lock);
    free(n);
}

/* rank + 1 summed over the ranks is known: a GPU pair that cannot really reach one another often answers, but wrongly. */
static int check_by_value(nccl_comm *n) {
    enum { COUNT = 1024 };
    static const char remedies[] = "try NCCL_P2P_DISABLE=1 (PCIe access between GPUs: ACS in the BIOS, or a virtual "
                                   "machine), NCCL_SHM_DISABLE=1 or a "
                                   "larger shared memory (docker --shm-size=1g --ipc=host); NCCL_DEBUG=INFO says more";
    float *got = malloc(COUNT * sizeof *got), want = (float)n->size * (float)(n->size + 1) / 2;
    void *mem = ddp__gpu_alloc(n->gpu, COUNT * sizeof *got);
    ddp_gpu *gpu = ddp__gpu(n->gpu);
    ddp_coll c = {.buf = mem, .count = COUNT, .dtype = DDP_F32, .weight = 1, .sig = {.kind = DDP_COLL_ALL_REDUCE}};
    walk_args a = {.p = {mem}, .n = COUNT, .attrs = {n->rank + 1}};
    void *t = NULL;
    int st = got && mem ? ddp__cuda_launch_on(gpu, "first all_reduce", DDP_K_fill + DDP_F32, &a, ddp__grid(COUNT, 4))
                        : ddp__fail(DDP_ENOMEM, "nccl: out of memory");
    if (st == 0) st = nccl_post(n, &c, &t);
    for (double end = ddp__now() + n->timeout; st == 0 && !nccl_done(t); usleep(100))
        if (ddp__now() > end)
            st = ddp__fail(DDP_ETIMEOUT, "the first all_reduce of %d GPUs has not ended in %.1f s; %s", n->size,
                           n->timeout, remedies);
    if (st == 0) st = nccl_after(n, &c, t, 1);
    if (st == 0)
        st = ddp__cuda_check(ddp__cuda.cudaMemcpyAsync(got, mem, COUNT * sizeof *got, cudaMemcpyDefault, gpu->compute),
                             "first all_reduce");
    if (st == 0) st = ddp__cuda_check(ddp__cuda.cudaStreamSynchronize(gpu->compute), "first all_reduce");
    for (int i = 0; st == 0 && i < COUNT; i++)
        if (!(got[i] == want))
            st = ddp__fail(DDP_ESTATE, "the first all_reduce of %d GPUs is wrong: element %d is %g, expected %g; %s",
                           n->size, i, (double)got[i], (double)want, remedies);
    if (t) nccl_ticket_free(n, t);
    if (mem) ddp__gpu_release(n->gpu, mem, COUNT * sizeof *got);
    free(got);
    return st;
}

static int nccl_join(int gpu, int rank, int size, const unsigned char id[DDP_DEVICE_ID], double timeout, void **out) {
    int st = ddp__cuda_need(DDP_LIB_NCCL), least = 0, most = 0;
    if (st < 0 || !ddp__gpu(gpu)) return ddp__pending();
    nccl_comm *n = calloc(1, sizeof *n);
    if (!n) return ddp__fail(DDP_ENOMEM, "nccl: out of memory");
    *n = (nccl_comm){.gpu = gpu, .rank = rank, .size = size, .timeout = timeout};
    pthread_mutex_init(&n->lock, NULL);
    cudaError_t e = ddp__cuda.cudaDeviceGetStreamPriorityRange(&least, &most);
    if (!e) e = ddp__cuda.cudaStreamCreateWithPriority(&n->stream, cudaStreamNonBlocking, most);
    if ((st = ddp__cuda_check(e, "the stream of NCCL")) < 0) {
        free(n);
        return st;
    }
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclUniqueId nccl_id;
    __builtin_memcpy(&nccl_id, id, sizeof nccl_id);
    st = settle(n, ddp__cuda.ncclCommInitRankConfig(&n->comm, size, nccl_id, rank, &config), "joining GPUs",
                ddp__now() + timeout);
    if (st == 0) st = check_by_value(n);
    if (st == 0) {
        *out = n;
        return 0;
    }
    ddp_saved_error why;
    ddp__error_save(&why);
    nccl_leave(n, 0);
    ddp__error_restore(&why);
    return st;
}

const ddp_device_coll ddp__nccl = {.name = "nccl",
                                   .make_id = nccl_make_id,
                                   .join = nccl_join,
                                   .post = nccl_post,
                                   .done = nccl_done,
                                   .after = nccl_after,
                                   .ticket_free = nccl_ticket_free,
                                   .health = nccl_health,
                                   .abort = nccl_abort,
                                   .leave = nccl_leave,
                                   .alloc = nccl_alloc,
                                   .dealloc = nccl_dealloc};
