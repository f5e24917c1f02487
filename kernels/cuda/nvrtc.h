/* nvrtc.h -- generated source to kernels, by NVRTC, with a cache in memory and one on disk. */
#ifndef DDP_CUDA_NVRTC_H
#define DDP_CUDA_NVRTC_H

#include "cuda.h"

/* The kernel `name` of a source for the GPU's architecture. Any thread. DDP_ENOSUP without NVRTC or CUDA's headers, DDP_EDEVICE where the
 * source does not compile, with NVRTC's first error and the line it is about. */
DDP_LOCAL int ddp__nvrtc_kernel(const ddp_gpu *gpu, const char *source, const char *name, cudaKernel_t *out);
/* Compiles for "sm_90" and the like. *image, *bytes: the cubin (free it). *log: what NVRTC said (free it), set on errors too. */
DDP_LOCAL int ddp__nvrtc_compile(const char *source, const char *arch, char **image, size_t *bytes, char **log);

#endif
