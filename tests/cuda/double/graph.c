/* graph.c -- stream capture and graphs: what was queued is kept, and queued again at each launch, in the order it was captured. */
#include "state.h"

#include <stdlib.h>

/* A graph that can be launched is a copy of the graph. */
struct CUgraphExec_st {
    struct CUgraph_st graph;
};

/* ---- recording ----------------------------------------------------------------------------------------------------- */
void capture_work(struct CUstream_st *s, work *w) {
    struct CUgraph_st *g = s->capture;
    if (g->count == g->room) {
        g->room = g->room ? 2 * g->room : 32;
        g->nodes = realloc(g->nodes, (size_t)g->room * sizeof *g->nodes);
    }
    struct capture_node *n = &g->nodes[g->count];
    n->what = w;
    n->after = s->capture_waits;
    n->after_count = s->capture_wait_count;
    if (s->capture_tail >= 0) {
        n->after = realloc(n->after, (size_t)(n->after_count + 1) * sizeof(int));
        n->after[n->after_count++] = s->capture_tail;
    }
    s->capture_waits = NULL;
    s->capture_wait_count = 0;
    s->capture_tail = g->count++;
}

cudaError_t refuse_in_capture(struct CUstream_st *s) {
    if (!s->capture) return cudaSuccess;
    s->capture->invalid = true;
    return cudaErrorStreamCaptureUnsupported;
}

/* Calls that wait for the device, or allocate, while a stream captures in a mode that forbids them. */
cudaError_t refuse_in_any_capture(void) {
    for (struct CUstream_st *s = all_streams; s; s = s->next)
        if (s->capture && s->capture_origin && s->capture_mode != cudaStreamCaptureModeRelaxed)
            return refuse_in_capture(s);
    return cudaSuccess;
}

struct CUgraph_st *active_capture(const struct CUevent_st *ev) {
    for (struct CUstream_st *s = all_streams; s; s = s->next)
        if (s->capture && s->capture == ev->capture && s->capture->id == ev->capture_id) return s->capture;
    return NULL;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    static int captures;
    cudaError_t e = enter("cudaStreamBeginCapture");
    if (e) return e;
    struct CUstream_st *s = stream_of(stream);
    if (!is_stream(s)) return leave(cudaErrorInvalidResourceHandle);
    if (s == stream_of(NULL)) return leave(cudaErrorStreamCaptureUnsupported);
    if (s->capture) return leave(cudaErrorIllegalState);
    s->capture = calloc(1, sizeof *s->capture);
    s->capture->device = s->device;
    s->capture->id = ++captures;
    s->capture_origin = true;
    s->capture_mode = mode;
    s->capture_tail = -1;
    ddp_double_count("graph", 1);
    return leave(cudaSuccess);
}

static void mark_reached(const struct CUgraph_st *g, int node, bool *reached) {
    if (node < 0 || reached[node]) return;
    reached[node] = true;
    for (int i = 0; i < g->nodes[node].after_count; i++) mark_reached(g, g->nodes[node].after[i], reached);
}

/* Whether all that was captured comes before the end of the stream that began. */
static bool is_joined(const struct CUgraph_st *g, const struct CUstream_st *origin) {
    bool all = true, *reached = calloc((size_t)g->count + 1, 1);
    mark_reached(g, origin->capture_tail, reached);
    for (int i = 0; i < origin->capture_wait_count; i++) mark_reached(g, origin->capture_waits[i], reached);
    for (int i = 0; i < g->count; i++) all = all && reached[i];
    free(reached);
    return all;
}

static void leave_capture(const struct CUgraph_st *g) {
    for (struct CUstream_st *s = all_streams; s; s = s->next) {
        if (s->capture != g) continue;
        s->capture = NULL;
        s->capture_origin = false;
        s->capture_tail = -1;
        s->capture_wait_count = 0;
        free(s->capture_waits);
        s->capture_waits = NULL;
    }
}

static void free_nodes(struct CUgraph_st *g) {
    for (int i = 0; i < g->count; i++) {
        release_work(g->nodes[i].what);
        free(g->nodes[i].after);
    }
    free(g->nodes);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out) {
    cudaError_t e = enter("cudaStreamEndCapture");
    if (e) return e;
    struct CUstream_st *s = stream_of(stream);
    if (!out) return leave(cudaErrorInvalidValue);
    *out = NULL;
    if (!is_stream(s) || !s->capture) return leave(cudaErrorIllegalState);
    if (!s->capture_origin) return leave(cudaErrorStreamCaptureUnmatched);
    struct CUgraph_st *g = s->capture;
    e = g->invalid ? cudaErrorStreamCaptureInvalidated : is_joined(g, s) ? cudaSuccess : cudaErrorStreamCaptureUnjoined;
    leave_capture(g);
    if (!e) {
        *out = g;
        return leave(cudaSuccess);
    }
    free_nodes(g);
    free(g);
    ddp_double_count("graph", -1);
    return leave(e);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    cudaError_t e = enter("cudaStreamIsCapturing");
    if (e) return e;
    struct CUstream_st *s = stream_of(stream);
    if (!is_stream(s) || !status) return leave(cudaErrorInvalidValue);
    *status = !s->capture           ? cudaStreamCaptureStatusNone
              : s->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                    : cudaStreamCaptureStatusActive;
    return leave(cudaSuccess);
}

/* ---- graphs -------------------------------------------------------------------------------------------------------- */
cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *count) {
    cudaError_t e = enter("cudaGraphGetNodes");
    if (e) return e;
    if (nodes) ddp_double_unsimulated("cudaGraphGetNodes: the nodes themselves");
    if (!g || !count) return leave(cudaErrorInvalidValue);
    *count = (size_t)g->count;
    return leave(cudaSuccess);
}

static cudaError_t instantiate(cudaGraphExec_t *out, cudaGraph_t g) {
    if (!out || !g) return leave(cudaErrorInvalidValue);
    struct CUgraphExec_st *x = calloc(1, sizeof *x);
    x->graph.nodes = calloc((size_t)g->count + 1, sizeof *x->graph.nodes);
    x->graph.count = g->count;
    x->graph.device = g->device;
    for (int i = 0; i < g->count; i++) {
        x->graph.nodes[i].what = g->nodes[i].what;
        x->graph.nodes[i].what->refs++;
    }
    *out = x;
    ddp_double_count("executable graph", 1);
    return leave(cudaSuccess);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t g, unsigned long long flags) {
    cudaError_t e = enter("cudaGraphInstantiate");
    if (e) return e;
    if (flags) ddp_double_unsimulated("cudaGraphInstantiate: flags");
    return instantiate(out, g);
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t g, unsigned long long flags) {
    cudaError_t e = enter("cudaGraphInstantiateWithFlags");
    if (e) return e;
    if (flags) ddp_double_unsimulated("cudaGraphInstantiateWithFlags: flags");
    return instantiate(out, g);
}

cudaError_t cudaGraphUpload(cudaGraphExec_t x, cudaStream_t stream) {
    (void)stream;
    cudaError_t e = enter("cudaGraphUpload");
    return e ? e : leave(x ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t stream) {
    cudaError_t e = enter("cudaGraphLaunch");
    if (e) return e;
    struct CUstream_st *s = stream_of(stream);
    if (!x) return leave(cudaErrorInvalidValue);
    if (!is_stream(s)) return leave(cudaErrorInvalidResourceHandle);
    if (s->capture) ddp_double_unsimulated("cudaGraphLaunch into a capture");
    ddp_double_log("cudaGraphLaunch %d operations, stream %d", x->graph.count, s->id);
    for (int i = 0; i < x->graph.count; i++) {
        x->graph.nodes[i].what->refs++;
        enqueue_work(s, x->graph.nodes[i].what, NULL);
    }
    after_enqueue(s);
    return leave(cudaSuccess);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t x) {
    cudaError_t e = enter("cudaGraphExecDestroy");
    if (e) return e;
    if (!x) return leave(cudaErrorInvalidValue);
    free_nodes(&x->graph);
    free(x);
    ddp_double_count("executable graph", -1);
    return leave(cudaSuccess);
}

cudaError_t cudaGraphDestroy(cudaGraph_t g) {
    cudaError_t e = enter("cudaGraphDestroy");
    if (e) return e;
    if (!g) return leave(cudaErrorInvalidValue);
    free_nodes(g);
    free(g);
    ddp_double_count("graph", -1);
    return leave(cudaSuccess);
}
