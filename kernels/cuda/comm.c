/* comm.c -- collective ops in a world of one: with several ranks they never come here. */
#include "cuda.h"

/* The result is row-major and as large as the input; all_gather's has a first dim of 1 besides. */
static int run_copy(const ddp_call *c) { return ddp__cuda_copy(c, c->out[0], c->in[0]); }
DDP_CUDA_KERNEL(all_gather, NULL, run_copy);
DDP_CUDA_KERNEL(reduce_scatter, NULL, run_copy);

static int run_nothing(const ddp_call *c) {
    (void)c;
    return 0;
}
DDP_CUDA_KERNEL(all_reduce_, NULL, run_nothing);
DDP_CUDA_KERNEL(broadcast_, NULL, run_nothing);
