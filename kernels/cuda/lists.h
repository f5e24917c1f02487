/* lists.h -- the kernel lists of a GPU, in order of preference, NULL at the end. */
#ifndef DDP_CUDA_LISTS_H
#define DDP_CUDA_LISTS_H

#include "../../core/comm/device_coll.h"
#include "../../core/op/op.h"

DDP_LOCAL extern const ddp_kernel_list *const ddp__cuda_lists[];
DDP_LOCAL extern const ddp_kernel_list ddp__cublas_list; /* kernels/cublas */
DDP_LOCAL extern const ddp_kernel_list ddp__cudnn_list;  /* kernels/cudnn */
/* kernels/nccl: collectives between GPUs. */
DDP_LOCAL extern const ddp_device_coll ddp__nccl;

#endif
