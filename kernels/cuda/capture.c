/* capture.c -- CUDA graphs of what the compute stream is given. */
#include "capture.h"

#include <stdlib.h>

#include "cuda.h"

ddp_captures ddp__captures(int op) {
    switch (op) {
        case DDP_OP_randperm: /* drawn on the host */
        case DDP_OP_to_device:
        case DDP_OP_all_gather:
        case DDP_OP_reduce_scatter:
        case DDP_OP_all_reduce_:
        case DDP_OP_broadcast_: return DDP_CAPTURE_NEVER;
        case DDP_OP_dropout:
        case DDP_OP_rand:
        case DDP_OP_randn:
        case DDP_OP_randint:
        case DDP_OP_uniform_:
        case DDP_OP_normal_:
        case DDP_OP_bernoulli_:
        case DDP_OP_sgd_step:
        case DDP_OP_adam_step: return DDP_CAPTURE_ARGUMENTS;
        default: return DDP_CAPTURE_AS_IS;
    }
}

struct ddp_capture {
    int gpu;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
};

int ddp__capture_begin(int i) {
    const ddp_gpu *g = ddp__gpu(i);
    if (!g) return ddp__pending();
    return ddp__cuda_check(ddp__cuda.cudaStreamBeginCapture(g->compute, cudaStreamCaptureModeThreadLocal),
                           "beginning a capture");
}

int ddp__capture_end(int i, ddp_capture **out) {
    const ddp_gpu *g = ddp__gpu(i);
    *out = NULL;
    if (!g) return ddp__pending();
    ddp_capture *c = calloc(1, sizeof *c);
    if (!c) return ddp__fail(DDP_ENOMEM, "capture: out of memory");
    c->gpu = i;
    cudaError_t e = ddp__cuda.cudaStreamEndCapture(g->compute, &c->graph);
    if (!e) e = ddp__cuda.cudaGraphInstantiate(&c->exec, c->graph, 0);
    int st = ddp__cuda_check(e, "ending a capture");
    if (st == 0) *out = c;
    else ddp__capture_free(c);
    return st;
}

int ddp__capture_run(const ddp_capture *c) {
    const ddp_gpu *g = ddp__gpu(c->gpu);
    return g ? ddp__cuda_check(ddp__cuda.cudaGraphLaunch(c->exec, g->compute), "running a graph") : ddp__pending();
}

void ddp__capture_free(ddp_capture *c) {
    if (!c) return;
    if (c->exec) ddp__cuda.cudaGraphExecDestroy(c->exec);
    if (c->graph) ddp__cuda.cudaGraphDestroy(c->graph);
    free(c);
}
