/* list.c -- who computes what on a GPU. */
#include "lists.h"

#define CUDA_OP(op) extern const ddp_kernel ddp__cuda_##op[];
#include "cuda_ops.def"
#undef CUDA_OP

static const ddp_kernel *own[DDP_OP_COUNT] = {
#define CUDA_OP(op) [DDP_OP_##op] = ddp__cuda_##op,
#include "cuda_ops.def"
#undef CUDA_OP
};

static const ddp_kernel_list own_list = {"cuda", own};
const ddp_kernel_list *const ddp__cuda_lists[] = {&ddp__cudnn_list, &ddp__cublas_list, &own_list, NULL};
