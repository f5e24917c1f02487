/* cublas.h -- cuBLAS on the compute stream of a GPU. */
#ifndef DDP_CUBLAS_H
#define DDP_CUBLAS_H

#include "../cuda/product.h"

/* This thread's handle for the GPU of c, on its compute stream and with a workspace of ours; NULL with the error set. */
DDP_LOCAL cublasHandle_t ddp__cublas(const ddp_call *c);
/* 0, or DDP_EDEVICE with the op's name, cuBLAS's text, the shapes and dtype. `what`: "cublasGemmEx". */
DDP_LOCAL int ddp__cublas_check(const ddp_call *c, cublasStatus_t st, const char *what);

#endif
