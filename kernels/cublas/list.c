/* list.c -- what cuBLAS computes. */
#include "../cuda/lists.h"

extern const ddp_kernel ddp__cublas_matmul[], ddp__cublas_linear[], ddp__cublas_linear_act[];
static const ddp_kernel *by_op[DDP_OP_COUNT] = {[DDP_OP_matmul] = ddp__cublas_matmul,
                                                [DDP_OP_linear] = ddp__cublas_linear,
                                                [DDP_OP_linear_act] = ddp__cublas_linear_act};
const ddp_kernel_list ddp__cublas_list = {"cublas", by_op};
