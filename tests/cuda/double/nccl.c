/* nccl.c -- the double of NCCL: communicators, groups, and calls put on streams. */
#include "nccl_world.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SPINS = 100 };

/* Calls of one group on one communicator and one stream: one operation of the stream. */
typedef struct batch {
    ncclComm *comm;
    cudaStream_t stream;
    bool captured;
    uint64_t number; /* of the communicator; batches run in this order, but for captured ones */
    int count, room;
    call *calls;
} batch;

static __thread int group_depth;
static __thread batch **group;
static __thread int group_count;
static __thread ncclComm **joining; /* made in this group */
static __thread int joining_count;

/* ---- small things -------------------------------------------------------------------------------------------------- */
ncclResult_t ncclGetVersion(int *version) {
    if (!version) return ncclInvalidArgument;
    *version = (int)ddp_double_setting("DDP_DOUBLE_NCCL", NCCL_VERSION_CODE);
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t status) {
    switch (status) {
        case ncclSuccess: return "no error";
        case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
        case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
        case ncclInternalError: return "internal error";
        case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
        case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
        case ncclRemoteError: return "remote process exited or there was a network error";
        case ncclInProgress: return "NCCL operation in progress";
        default: return "unknown result code";
    }
}

/* The fault asked for, or that the device is stuck; ncclSuccess when the call may go on. */
static ncclResult_t begin(const char *name) {
    ddp_double_lock();
    int status = ddp_double_fault(name, ncclUnhandledCudaError);
    ddp_double_unlock();
    if (status) set_last_error("%s: asked to fail", name);
    return (ncclResult_t)status;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    ncclResult_t status = begin("ncclGetUniqueId");
    return status ? status : id ? world_name(id) : ncclInvalidArgument;
}

static void nap(void) {
    struct timespec t = {0, 200000};
    nanosleep(&t, NULL);
}

static void release(ncclComm *comm) {
    if (--comm->refs) return;
    world_leave(comm->w);
    free(comm);
}

/* ---- making a communicator ----------------------------------------------------------------------------------------- */
static ncclResult_t check_joined(ncclComm *comm) {
    if (comm->checked) return comm->async;
    if (!world_is_complete(comm->w)) return ncclInProgress;
    comm->checked = true;
    comm->async = world_check(comm->w);
    return comm->async;
}

static ncclResult_t wait_joined(ncclComm *comm) {
    ncclResult_t status;
    while ((status = check_joined(comm)) == ncclInProgress) nap();
    return status;
}

static ncclResult_t init(ncclComm_t *out, int ranks, const ncclUniqueId *id, int rank, const ncclConfig_t *config,
                         const char *name) {
    ncclResult_t status = begin(name);
    if (status) return status;
    if (!out || ranks < 1 || rank < 0 || rank >= ranks) {
        set_last_error("%s: rank %d of %d", name, rank, ranks);
        return ncclInvalidArgument;
    }
    if (config && (config->magic != 0xcafebeef || config->blocking < NCCL_CONFIG_UNDEF_INT || (config->blocking > 1))) {
        set_last_error("%s: the configuration was not initialised", name);
        return ncclInvalidArgument;
    }
    if (ddp_double_stuck(ddp_double_device())) return ncclUnhandledCudaError;
    ncclComm *comm = calloc(1, sizeof *comm);
    *comm = (ncclComm){.rank = rank, .ranks = ranks, .refs = 1, .device = ddp_double_device(), .answered = true};
    comm->blocking = !config || config->blocking != 0;
    status = world_join(id, ranks, rank, comm->device, &comm->w);
    if (status) {
        free(comm);
        return status;
    }
    *out = comm;
    ddp_double_log("%s rank %d of %d on device %d", name, rank, ranks, comm->device);
    ddp_double_count("nccl communicator", 1);
    if (group_depth && comm->blocking) {
        joining = realloc(joining, (size_t)(joining_count + 1) * sizeof(ncclComm *));
        joining[joining_count++] = comm;
        return ncclSuccess;
    }
    return comm->blocking ? wait_joined(comm) : ncclInProgress;
}

ncclResult_t ncclCommInitRank(ncclComm_t *out, int ranks, ncclUniqueId id, int rank) {
    return init(out, ranks, &id, rank, NULL, "ncclCommInitRank");
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
    return init(out, ranks, &id, rank, config, "ncclCommInitRankConfig");
}

/* ---- asking and ending --------------------------------------------------------------------------------------------- */
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *out) {
    if (!comm || !out) return ncclInvalidArgument;
    ddp_double_lock();
    int fault = ddp_double_fault("ncclAsync", ncclRemoteError);
    ncclResult_t joined = check_joined(comm);
    if (fault) {
        comm->async = (ncclResult_t)fault;
        set_last_error("asked to fail in the background");
    }
    if (comm->finalized) ddp_double_progress();
    *out = comm->async ? comm->async : joined;
    if (!*out && (!comm->answered || (comm->finalized && comm->pending))) {
        comm->answered = true;
        *out = ncclInProgress;
    }
    ddp_double_unlock();
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *out) {
    if (!comm || !out) return ncclInvalidArgument;
    *out = comm->ranks;
    return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *out) {
    if (!comm || !out) return ncclInvalidArgument;
    *out = comm->rank;
    return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *out) {
    if (!comm || !out) return ncclInvalidArgument;
    *out = comm->device;
    return ncclSuccess;
}

static void wait_queue(ncclComm *comm) {
    for (;;) {
        ddp_double_lock();
        ddp_double_progress();
        bool empty = !comm->pending || comm->aborted || ddp_double_stuck(comm->device);
        ddp_double_unlock();
        if (empty) return;
        nap();
    }
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    ncclResult_t status = begin("ncclCommFinalize");
    if (status) return status;
    if (!comm) return ncclInvalidArgument;
    comm->finalized = true;
    if (!comm->blocking) {
        comm->answered = false;
        return ncclInProgress;
    }
    wait_queue(comm);
    return ncclSuccess;
}

/* Waits for what is queued: for ever when a peer is gone. */
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    ncclResult_t status = begin("ncclCommDestroy");
    if (status) return status;
    if (!comm) return ncclSuccess;
    wait_queue(comm);
    ddp_double_lock();
    ddp_double_count("nccl communicator", -1);
    release(comm);
    ddp_double_unlock();
    return ncclSuccess;
}

/* Everything queued on it counts as done. */
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    ncclResult_t status = begin("ncclCommAbort");
    if (status) return status;
    if (!comm) return ncclSuccess;
    ddp_double_lock();
    ddp_double_log("ncclCommAbort rank %d", comm->rank);
    comm->aborted = true;
    ddp_double_count("nccl communicator", -1);
    release(comm);
    ddp_double_unlock();
    return ncclSuccess;
}

/* ---- batches on streams -------------------------------------------------------------------------------------------- */
static bool try_batch(batch *b) {
    bool all = true, in_order = true;
    for (int i = 0; i < b->count; i++) {
        call *c = &b->calls[i];
        bool message = c->kind == SEND || c->kind == RECV;
        if (!message && !in_order) continue;
        bool done = advance(c);
        all = all && done;
        if (!message) in_order = done;
    }
    return all;
}

/* A graph runs it again. */
static void begin_anew(batch *b) {
    for (int i = 0; i < b->count; i++) {
        call *c = &b->calls[i];
        c->done = 0;
        c->started = c->posted = c->wrong = false;
    }
}

static int run_batch(void *ctx) {
    batch *b = ctx;
    ncclComm *comm = b->comm;
    bool done = comm->aborted;
    if (!done && !b->captured && b->number != comm->next) return DOUBLE_WAITS;
    for (int spin = 0; !done && spin < SPINS; spin++) {
        done = try_batch(b);
        if (!done) sched_yield();
    }
    if (!done) return DOUBLE_WAITS;
    begin_anew(b);
    if (!b->captured) comm->next++, comm->pending--;
    return 0;
}

static void drop_batch(void *ctx) {
    batch *b = ctx;
    release(b->comm);
    free(b->calls);
    free(b);
}

static ncclResult_t queue_batch(batch *b) {
    enum cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    ncclComm *comm = b->comm;
    ddp_double_lock();
    cudaStreamIsCapturing(b->stream, &capturing);
    b->captured = capturing == cudaStreamCaptureStatusActive;
    if (!b->captured && !ddp_double_dry()) {
        b->number = comm->queued++;
        comm->pending++;
    }
    if (!comm->blocking) comm->answered = false;
    ncclResult_t status = comm->blocking ? ncclSuccess : ncclInProgress;
    ddp_double_enqueue_attempt(b->stream, run_batch, drop_batch, b, "nccl");
    ddp_double_unlock();
    return status;
}

static ncclResult_t end_group(void) {
    ncclResult_t status = ncclSuccess;
    if (--group_depth) return ncclSuccess;
    for (int i = 0; i < joining_count; i++) {
        ncclResult_t s = wait_joined(joining[i]);
        if (s) status = s;
    }
    for (int i = 0; i < group_count; i++) {
        ncclResult_t s = queue_batch(group[i]);
        if (s) status = s;
    }
    free(group);
    free(joining);
    group = NULL;
    joining = NULL;
    group_count = joining_count = 0;
    return status;
}

ncclResult_t ncclGroupStart(void) {
    ncclResult_t status = begin("ncclGroupStart");
    if (!status) group_depth++;
    return status;
}
ncclResult_t ncclGroupEnd(void) {
    ncclResult_t status = begin("ncclGroupEnd");
    if (!group_depth) {
        set_last_error("ncclGroupEnd: not in a group call.");
        return ncclInvalidUsage;
    }
    ncclResult_t ended = end_group();
    return status ? status : ended;
}

static batch *batch_of(ncclComm *comm, cudaStream_t stream) {
    for (int i = 0; i < group_count; i++)
        if (group[i]->comm == comm && group[i]->stream == stream) return group[i];
    batch *b = calloc(1, sizeof *b);
    b->comm = comm;
    b->stream = stream;
    comm->refs++;
    group = realloc(group, (size_t)(group_count + 1) * sizeof *group);
    group[group_count++] = b;
    return b;
}

/* ---- calls --------------------------------------------------------------------------------------------------------- */
static ncclResult_t check_comm(ncclComm *comm, cudaStream_t stream, const char *name) {
    if (!comm) {
        set_last_error("%s: the communicator is NULL", name);
        return ncclInvalidArgument;
    }
    if (ddp_double_stuck(comm->device)) return ncclUnhandledCudaError;
    if (check_joined(comm) == ncclInProgress || !comm->answered) {
        set_last_error("Attempt to use communicator before the previous operation returned ncclSuccess");
        return ncclInvalidArgument;
    }
    if (comm->async) return comm->async;
    if (comm->finalized) {
        set_last_error("%s: the communicator is finalized", name);
        return ncclInvalidArgument;
    }
    if (ddp_double_stream_device(stream) != comm->device) {
        set_last_error("%s: a stream of device %d, the communicator is of device %d", name,
                       ddp_double_stream_device(stream), comm->device);
        return ncclInvalidArgument;
    }
    return ncclSuccess;
}

static void check_buffers(const call *c, const char *name) {
    char what[100];
    size_t n = c->count * element_bytes(c->type), ranks = (size_t)c->comm->ranks;
    bool reads = c->kind != RECV && (c->kind != BROADCAST || c->comm->rank == c->root);
    bool writes = c->kind != SEND && (c->kind != REDUCE || c->comm->rank == c->root);
    snprintf(what, sizeof what, "%s: send buffer", name);
    if (reads) ddp_double_check_range(c->in, c->kind == REDUCE_SCATTER ? n * ranks : n, what);
    snprintf(what, sizeof what, "%s: receive buffer", name);
    if (writes) ddp_double_check_range(c->out, c->kind == ALL_GATHER ? n * ranks : n, what);
}

static ncclResult_t start(const char *name, call c, cudaStream_t stream) {
    ncclResult_t status = begin(name);
    if (!status) status = check_comm(c.comm, stream, name);
    if (status) return status;
    if ((unsigned)c.type >= ncclNumTypes || c.root < 0 || c.root >= c.comm->ranks || c.op < 0 ||
        c.op >= ncclNumOps + 64) {
        set_last_error("%s: type %d, root or peer %d, reduction %d", name, (int)c.type, c.root, c.op);
        return ncclInvalidArgument;
    }
    if (c.op >= ncclNumOps) {
        c.scale = c.comm->scales[c.op - ncclNumOps];
        if (!c.scale.used) return ncclInvalidArgument;
    }
    if (!c.count) return ncclSuccess;
    check_buffers(&c, name);
    c.wrong = ddp_double_fault("ncclHang", 1) != 0;
    c.spoiled = ddp_double_fault("ncclWrong", 1) != 0;
    ddp_double_log("%s rank %d count %zu %s op %d root %d", name, c.comm->rank, c.count, type_name((int)c.type), c.op,
                   c.root);
    group_depth++;
    ddp_double_lock();
    batch *b = batch_of(c.comm, stream);
    ddp_double_unlock();
    if (b->count == b->room) {
        b->room = b->room ? 2 * b->room : 4;
        b->calls = realloc(b->calls, (size_t)b->room * sizeof *b->calls);
    }
    b->calls[b->count++] = c;
    return end_group();
}

ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    return start(
        "ncclAllReduce",
        (call){.comm = comm, .kind = ALL_REDUCE, .in = in, .out = out, .count = count, .type = type, .op = (int)op},
        stream);
}
ncclResult_t ncclReduce(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
    return start("ncclReduce",
                 (call){.comm = comm,
                        .kind = REDUCE,
                        .in = in,
                        .out = out,
                        .count = count,
                        .type = type,
                        .op = (int)op,
                        .root = root},
                 stream);
}
ncclResult_t ncclReduceScatter(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
    return start(
        "ncclReduceScatter",
        (call){.comm = comm, .kind = REDUCE_SCATTER, .in = in, .out = out, .count = count, .type = type, .op = (int)op},
        stream);
}
ncclResult_t ncclBroadcast(const void *in, void *out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
    return start(
        "ncclBroadcast",
        (call){.comm = comm, .kind = BROADCAST, .in = in, .out = out, .count = count, .type = type, .root = root},
        stream);
}
ncclResult_t ncclAllGather(const void *in, void *out, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    return start("ncclAllGather",
                 (call){.comm = comm, .kind = ALL_GATHER, .in = in, .out = out, .count = count, .type = type}, stream);
}
ncclResult_t ncclSend(const void *in, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return start("ncclSend", (call){.comm = comm, .kind = SEND, .in = in, .count = count, .type = type, .root = peer},
                 stream);
}
ncclResult_t ncclRecv(void *out, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return start("ncclRecv", (call){.comm = comm, .kind = RECV, .out = out, .count = count, .type = type, .root = peer},
                 stream);
}

/* ---- reductions of one's own, memory ------------------------------------------------------------------------------- */
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
    ncclResult_t status = begin("ncclRedOpCreatePreMulSum");
    if (status) return status;
    if (!op || !scalar || !comm) return ncclInvalidArgument;
    for (int i = 0; i < 64; i++) {
        struct scale *s = &comm->scales[i];
        if (s->used) continue;
        *s = (struct scale){.used = true, .on_device = residence == ncclScalarDevice, .at = scalar, .type = type};
        if (!s->on_device) s->value = read_scalar(scalar, type);
        *op = (ncclRedOp_t)(ncclNumOps + i);
        return ncclSuccess;
    }
    ddp_double_unsimulated("more than 64 reductions of ncclRedOpCreatePreMulSum");
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
    int i = (int)op - ncclNumOps;
    if (!comm || i < 0 || i >= 64 || !comm->scales[i].used) return ncclInvalidArgument;
    comm->scales[i].used = false;
    return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void **out, size_t bytes) {
    ncclResult_t status = begin("ncclMemAlloc");
    return status ? status : cudaMalloc(out, bytes) ? ncclUnhandledCudaError : ncclSuccess;
}
ncclResult_t ncclMemFree(void *p) {
    ncclResult_t status = begin("ncclMemFree");
    return status ? status : cudaFree(p) ? ncclUnhandledCudaError : ncclSuccess;
}
ncclResult_t ncclCommRegister(const ncclComm_t comm, void *p, size_t bytes, void **handle) {
    ncclResult_t status = begin("ncclCommRegister");
    if (status) return status;
    if (!comm || !p || !handle) return ncclInvalidArgument;
    ddp_double_check_range(p, bytes, "ncclCommRegister");
    *handle = malloc(1);
    ddp_double_count("nccl registration", 1);
    return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle) {
    ncclResult_t status = begin("ncclCommDeregister");
    if (status) return status;
    if (!comm || !handle) return ncclInvalidArgument;
    free(handle);
    ddp_double_count("nccl registration", -1);
    return ncclSuccess;
}
