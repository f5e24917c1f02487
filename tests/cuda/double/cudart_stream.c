/* cudart_stream.c -- streams and events of cudart. */
#include "state.h"

#include <stdlib.h>

/* ---- streams ------------------------------------------------------------------------------------------------------- */
static cudaError_t create_stream(cudaStream_t *out, unsigned flags, int priority) {
    static int made;
    if (!out || (flags & ~(unsigned)cudaStreamNonBlocking)) return leave(cudaErrorInvalidValue);
    struct CUstream_st *s = calloc(1, sizeof *s);
    s->device = current_device;
    s->flags = flags;
    s->priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    s->blocking = !(flags & cudaStreamNonBlocking);
    s->id = ++made;
    s->capture_tail = -1;
    s->next = all_streams;
    all_streams = s;
    *out = s;
    ddp_double_count("stream", 1);
    return leave(cudaSuccess);
}

cudaError_t cudaStreamCreate(cudaStream_t *out) {
    cudaError_t e = enter("cudaStreamCreate");
    return e ? e : create_stream(out, 0, 0);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) {
    cudaError_t e = enter("cudaStreamCreateWithFlags");
    return e ? e : create_stream(out, flags, 0);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
    cudaError_t e = enter("cudaStreamCreateWithPriority");
    return e ? e : create_stream(out, flags, priority);
}

/* Returns at once; what is queued still runs. */
cudaError_t cudaStreamDestroy(cudaStream_t s) {
    cudaError_t e = enter("cudaStreamDestroy");
    if (e) return e;
    if (!s || !is_stream(s) || s == stream_of(NULL)) return leave(cudaErrorInvalidResourceHandle);
    if (s->capture) s->capture->invalid = true;
    s->destroyed = true;
    ddp_double_count("stream", -1);
    if (!s->head) ddp_double_progress();
    return leave(cudaSuccess);
}

/* A stream that lives, for a call that may not be captured; otherwise NULL with the status in *e, and the lock free. */
static struct CUstream_st *begin(const char *function, cudaStream_t stream, bool capturable, cudaError_t *e) {
    *e = enter(function);
    if (*e) return NULL;
    struct CUstream_st *s = stream_of(stream);
    if (!is_stream(s)) *e = leave(cudaErrorInvalidResourceHandle);
    else if (!capturable && (*e = refuse_in_capture(s))) leave(*e);
    return *e ? NULL : s;
}

static bool stream_is_done(void *s) { return run_until(s, NULL); }

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    cudaError_t e;
    struct CUstream_st *s = begin("cudaStreamSynchronize", stream, false, &e);
    if (!s) return e;
    wait_until(stream_is_done, s);
    return leave(ddp_double_stuck(s->device));
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    cudaError_t e;
    struct CUstream_st *s = begin("cudaStreamQuery", stream, false, &e);
    if (!s) return e;
    run_one(s);
    e = ddp_double_stuck(s->device);
    return leave(e ? e : s->head ? cudaErrorNotReady : cudaSuccess);
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *flags) {
    cudaError_t e;
    struct CUstream_st *s = begin("cudaStreamGetFlags", stream, true, &e);
    if (!s) return e;
    *flags = s->flags;
    return leave(cudaSuccess);
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    cudaError_t e;
    struct CUstream_st *s = begin("cudaStreamGetPriority", stream, true, &e);
    if (!s) return e;
    *priority = s->priority;
    return leave(cudaSuccess);
}
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device) {
    cudaError_t e;
    struct CUstream_st *s = begin("cudaStreamGetDevice", stream, true, &e);
    if (!s) return e;
    *device = s->device;
    return leave(cudaSuccess);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    cudaError_t e = enter("cudaDeviceGetStreamPriorityRange");
    if (e) return e;
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return leave(cudaSuccess);
}

/* The host runs a function in its turn; it may not call cudart, and device memory is out of its reach. */
typedef struct host_call {
    cudaHostFn_t function;
    void *arg;
} host_call;
static void run_host_call(void *ctx) {
    host_call *h = ctx;
    const char *name = running;
    close_memory();
    running = NULL;
    h->function(h->arg);
    running = name;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *arg) {
    cudaError_t e;
    struct CUstream_st *s = begin("cudaLaunchHostFunc", stream, true, &e);
    if (!s) return e;
    if (!function) return leave(cudaErrorInvalidValue);
    host_call *h = malloc(sizeof *h);
    *h = (host_call){function, arg};
    ddp_double_enqueue(stream, run_host_call, free, h, "cudaLaunchHostFunc");
    return leave(cudaSuccess);
}

/* ---- events -------------------------------------------------------------------------------------------------------- */
static cudaError_t create_event(cudaEvent_t *out, unsigned flags) {
    if (!out || flags > (cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess))
        return leave(cudaErrorInvalidValue);
    if (flags & cudaEventInterprocess) ddp_double_unsimulated("cudaEventCreateWithFlags: cudaEventInterprocess");
    struct CUevent_st *ev = calloc(1, sizeof *ev);
    ev->device = current_device;
    ev->flags = flags;
    *out = ev;
    ddp_double_count("event", 1);
    return leave(cudaSuccess);
}
cudaError_t cudaEventCreate(cudaEvent_t *out) {
    cudaError_t e = enter("cudaEventCreate");
    return e ? e : create_event(out, 0);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
    cudaError_t e = enter("cudaEventCreateWithFlags");
    return e ? e : create_event(out, flags);
}
cudaError_t cudaEventDestroy(cudaEvent_t ev) {
    cudaError_t e = enter("cudaEventDestroy");
    if (e) return e;
    if (!ev) return leave(cudaErrorInvalidResourceHandle);
    release_operation(ev->mark);
    free(ev);
    ddp_double_count("event", -1);
    return leave(cudaSuccess);
}

static cudaError_t record(const char *function, cudaEvent_t ev, cudaStream_t stream) {
    cudaError_t e;
    struct CUstream_st *s = begin(function, stream, true, &e);
    if (!s) return e;
    if (!ev || ev->device != s->device) return leave(cudaErrorInvalidResourceHandle);
    ev->capture = s->capture;
    ev->capture_id = s->capture ? s->capture->id : 0;
    ev->capture_node = s->capture_tail;
    if (s->capture) return leave(cudaSuccess);
    release_operation(ev->mark);
    ev->mark = enqueue_work(s, NULL, NULL);
    ev->mark->refs++;
    after_enqueue(s);
    return leave(cudaSuccess);
}
cudaError_t cudaEventRecord(cudaEvent_t ev, cudaStream_t stream) { return record("cudaEventRecord", ev, stream); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t ev, cudaStream_t stream, unsigned flags) {
    if (flags) ddp_double_unsimulated("cudaEventRecordWithFlags: cudaEventRecordExternal");
    return record("cudaEventRecordWithFlags", ev, stream);
}

/* A stream that waits for an event of a capture joins it. */
static void join_capture(struct CUstream_st *s, struct CUevent_st *ev) {
    if (!s->capture) s->capture_tail = -1, s->capture = ev->capture;
    if (ev->capture_node < 0) return;
    s->capture_waits = realloc(s->capture_waits, (size_t)(s->capture_wait_count + 1) * sizeof(int));
    s->capture_waits[s->capture_wait_count++] = ev->capture_node;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t ev, unsigned flags) {
    cudaError_t e;
    struct CUstream_st *s = begin("cudaStreamWaitEvent", stream, true, &e);
    if (!s) return e;
    if (!ev) return leave(cudaErrorInvalidResourceHandle);
    if (flags) ddp_double_unsimulated("cudaStreamWaitEvent: cudaEventWaitExternal");
    if (ev->capture) {
        struct CUgraph_st *capture = active_capture(ev);
        if (!capture) return leave(cudaErrorCapturedEvent);
        if (s->capture && s->capture != capture) return leave(cudaErrorStreamCaptureMerge);
        join_capture(s, ev);
        return leave(cudaSuccess);
    }
    if (s->capture && ev->mark) {
        s->capture->invalid = true;
        return leave(cudaErrorStreamCaptureIsolation); /* it waits for work outside of the capture */
    }
    if (ev->mark && !ev->mark->done) {
        enqueue_work(s, NULL, ev->mark);
        after_enqueue(s);
    }
    return leave(cudaSuccess);
}

static bool event_is_done(void *arg) {
    struct CUevent_st *ev = arg;
    return !ev->mark || ev->mark->done || run_until(ev->mark->stream, ev->mark);
}
/* Under the lock: the event, when it may be asked. */
static cudaError_t begin_event(const char *function, cudaEvent_t ev) {
    cudaError_t e = enter(function);
    if (e) return e;
    if (!ev) return leave(cudaErrorInvalidResourceHandle);
    if (ev->capture) {
        if (active_capture(ev)) ev->capture->invalid = true;
        return leave(cudaErrorCapturedEvent);
    }
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t ev) {
    cudaError_t e = begin_event("cudaEventSynchronize", ev);
    if (e) return e;
    wait_until(event_is_done, ev);
    return leave(ddp_double_stuck(ev->device));
}

cudaError_t cudaEventQuery(cudaEvent_t ev) {
    cudaError_t e = begin_event("cudaEventQuery", ev);
    if (e) return e;
    if (ev->mark && !ev->mark->done) run_one(ev->mark->stream);
    e = ddp_double_stuck(ev->device);
    return leave(e ? e : ev->mark && !ev->mark->done ? cudaErrorNotReady : cudaSuccess);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    cudaError_t e = begin_event("cudaEventElapsedTime", from);
    if (e) return e;
    if (!ms || !to || ((from->flags | to->flags) & cudaEventDisableTiming) || !from->mark || !to->mark)
        return leave(cudaErrorInvalidResourceHandle);
    if (!from->mark->done || !to->mark->done) return leave(cudaErrorNotReady);
    *ms = (float)(to->mark->finished - from->mark->finished);
    return leave(cudaSuccess);
}
