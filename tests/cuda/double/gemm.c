/* gemm.c -- products on the CPU. */
#include "gemm.h"

#include "numbers.h"

#include <stdlib.h>

enum { ROWS = 32, COLS = 4, DEPTH = 256 };

#define REAL float
#define NAME(f) f##_float
#include "gemm_loops.h"
#undef REAL
#undef NAME
#define REAL double
#define NAME(f) f##_double
#include "gemm_loops.h"

void multiply(const product *p) {
    if (p->type_c == CUDA_R_64F) multiply_double(p);
    else multiply_float(p);
}

size_t type_bytes(cudaDataType_t type) { return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2; }
