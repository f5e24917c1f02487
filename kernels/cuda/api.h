/* api.h -- NVIDIA's libraries as a table of function pointers, filled by dlopen: nothing of theirs is linked, and each is
 * opened when it is first needed. */
#ifndef DDP_CUDA_API_H
#define DDP_CUDA_API_H

#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <cudnn.h>
#include <nccl.h>
#include <nvrtc.h>

#include <stdatomic.h>

#include "../../core/base/base.h"

typedef struct ddp_cuda_api {
#define CUDART(f) __typeof__(&f) f;
#define CUBLAS(f) __typeof__(&f) f;
#define CUDNN(f) __typeof__(&f) f;
#define NCCL(f) __typeof__(&f) f;
#define NVRTC(f) __typeof__(&f) f;
#include "api.def"
} ddp_cuda_api;
DDP_LOCAL extern ddp_cuda_api ddp__cuda;

typedef enum ddp_cuda_lib {
    DDP_LIB_CUDART,
    DDP_LIB_CUBLAS,
    DDP_LIB_CUDNN,
    DDP_LIB_NCCL,
    DDP_LIB_NVRTC,
    DDP_CUDA_LIBS
} ddp_cuda_lib;

/* Opens a library and checks its version, once; later calls cost a load. 0, or DDP_ENOSUP with a sentence that names what is missing or
 * wrong and what to install. Any thread. */
DDP_LOCAL int ddp__cuda_need(ddp_cuda_lib lib);
/* The same without an error set: NULL, or why not. */
DDP_LOCAL const char *ddp__cuda_missing(ddp_cuda_lib lib);
/* It was opened before. */
DDP_LOCAL bool ddp__cuda_opened(ddp_cuda_lib lib);

#endif
