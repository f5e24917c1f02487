/* chain.h -- chains of elementwise ops as one generated kernel: every operand is read once, every result written once. */
#ifndef DDP_CUDA_CHAIN_H
#define DDP_CUDA_CHAIN_H

#include "cuda.h"

enum { CHAIN_INPUTS = 8, CHAIN_STEPS = 16, CHAIN_RESULTS = 4 };

/* Values are numbered: the inputs from 0, then the results of the steps. What a step computes is rounded to its dtype, as if the
 * op had run by itself. */
typedef struct ddp_chain_step {
    const char *op; /* of elementwise.def, of its variants, "cast" or "where" */
    int32_t in[3];  /* values; of one dtype, but for the condition of where, which is bool */
    int32_t to;     /* of cast: the dtype */
} ddp_chain_step;
typedef struct ddp_chain {
    int32_t n_in, n_steps, n_out;
    int32_t dtype[CHAIN_INPUTS];
    int32_t is_number[CHAIN_INPUTS]; /* its value comes with each launch */
    ddp_chain_step step[CHAIN_STEPS];
    int32_t out[CHAIN_RESULTS]; /* values */
} ddp_chain;

/* The source of the chain's kernel, `chain`, into text, which is grown as needed (free it): a status. DDP_EINVAL for an op that is not
 * there, a value out of range, dtypes that differ. */
DDP_LOCAL int ddp__chain_source(const ddp_chain *ch, char **text);
/* Its kernel for a GPU, out of a cache or compiled now. */
DDP_LOCAL int ddp__chain_kernel(const ddp_chain *ch, const ddp_gpu *gpu, cudaKernel_t *out);
/* One launch. in[n_in], numbers where the chain says so, broadcast to out[0]; out[n_out] of one size and of the values' dtypes, in any
 * layout. At most DDP_ITER_MAX tensors that are no numbers. */
DDP_LOCAL int ddp__chain_launch(cudaKernel_t kernel, const ddp_chain *ch, ddp_tensor *const *in,
                                ddp_tensor *const *out);

/* All of these in one, for tests and until a plan keeps its kernels. */
DDP_API int ddp_cuda_chain(const ddp_chain *ch, ddp_tensor *const *in, ddp_tensor *const *out);
/* Compiles for "sm_90" and the like without a GPU: a status; log (n bytes) is what NVRTC said, "" when it had nothing to say. */
DDP_API int ddp_cuda_chain_compile(const ddp_chain *ch, const char *arch, char *log, size_t n);

#endif
