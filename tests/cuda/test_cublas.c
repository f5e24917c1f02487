/* link: -lcublas -lcublasLt */
/* The double of cuBLAS: products of every type against loops, and the answers to wrong arguments. */
#include "child.h"
#include "double/numbers.h"

#include <cublasLt.h>
#include <cublas_v2.h>

#include <math.h>
#include <time.h>

enum { MOST = 64 * 1024 };
static cublasHandle_t handle;
static cudaStream_t stream;
static void *device[3];    /* a, b, c */
static double in[3][MOST]; /* what they hold */

static size_t bytes_of(cudaDataType_t t) { return t == CUDA_R_64F ? 8 : t == CUDA_R_32F ? 4 : 2; }
static double read_as(const void *p, int i, cudaDataType_t t) {
    if (t == CUDA_R_64F) return ((const double *)p)[i];
    if (t == CUDA_R_32F) return ((const float *)p)[i];
    return t == CUDA_R_16F ? float_of_half(((const uint16_t *)p)[i]) : float_of_bf16(((const uint16_t *)p)[i]);
}
static void write_as(void *p, int i, cudaDataType_t t, double x) {
    if (t == CUDA_R_64F) ((double *)p)[i] = x;
    else if (t == CUDA_R_32F) ((float *)p)[i] = (float)x;
    else ((uint16_t *)p)[i] = t == CUDA_R_16F ? half_of_float((float)x) : bf16_of_float((float)x);
}

/* Operand k: n numbers of this type, small multiples of 1/8, exact in every type. */
static int load(int k, cudaDataType_t t, int n) {
    static char bytes[MOST * 8];
    for (int i = 0; i < n; i++) {
        in[k][i] = (double)((i * 37 + k * 11) % 23 - 11) / 8;
        write_as(bytes, i, t, in[k][i]);
    }
    return (int)cudaMemcpy(device[k], bytes, (size_t)n * bytes_of(t), cudaMemcpyHostToDevice);
}

static int start(void) {
    WORKS(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    WORKS(cublasCreate(&handle));
    WORKS(cublasSetStream(handle, stream));
    for (int k = 0; k < 3; k++) WORKS(cudaMalloc(&device[k], MOST * 8));
    return 0;
}
static int finish(void) {
    for (int k = 0; k < 3; k++) WORKS(cudaFree(device[k]));
    WORKS(cublasDestroy(handle));
    return (int)cudaStreamDestroy(stream);
}

typedef struct shape {
    int m, n, k, batch;
    cublasOperation_t ta, tb;
    cudaDataType_t type, out;
    cublasComputeType_t compute;
    double alpha, beta;
} shape;

/* The element (i, j) of the b-th result, from loops. */
static double expected(const shape *s, int b, int i, int j, int lda, int ldb, int ldc, const int size[3]) {
    double sum = 0;
    for (int l = 0; l < s->k; l++) {
        int at_a = b * size[0] + (s->ta == CUBLAS_OP_N ? l * lda + i : i * lda + l);
        int at_b = b * size[1] + (s->tb == CUBLAS_OP_N ? j * ldb + l : l * ldb + j);
        sum += in[0][at_a] * in[1][at_b];
    }
    return s->alpha * sum + (s->beta != 0 ? s->beta * in[2][b * size[2] + j * ldc + i] : 0);
}

static int product_is_right(shape s) {
    static char got[MOST * 8];
    int lda = (s.ta == CUBLAS_OP_N ? s.m : s.k) + 3, ldb = (s.tb == CUBLAS_OP_N ? s.k : s.n) + 1, ldc = s.m + 2;
    int size[3] = {lda * (s.ta == CUBLAS_OP_N ? s.k : s.m), ldb * (s.tb == CUBLAS_OP_N ? s.n : s.k), ldc * s.n};
    float alpha = (float)s.alpha, beta = (float)s.beta;
    bool wide = s.type == CUDA_R_64F;
    WORKS(load(0, s.type, size[0] * s.batch));
    WORKS(load(1, s.type, size[1] * s.batch));
    if (s.beta != 0) WORKS(load(2, s.out, size[2] * s.batch));
    WORKS(cublasGemmStridedBatchedEx(handle, s.ta, s.tb, s.m, s.n, s.k, wide ? (void *)&s.alpha : &alpha, device[0],
                                     s.type, lda, size[0], device[1], s.type, ldb, size[1],
                                     wide ? (void *)&s.beta : &beta, device[2], s.out, ldc, size[2], s.batch, s.compute,
                                     CUBLAS_GEMM_DEFAULT));
    WORKS(cudaStreamSynchronize(stream));
    WORKS(cudaMemcpy(got, device[2], (size_t)(size[2] * s.batch) * bytes_of(s.out), cudaMemcpyDeviceToHost));
    double tolerance = s.out == CUDA_R_64F ? 1e-12 : s.out == CUDA_R_32F ? 1e-5 : s.out == CUDA_R_16F ? 1e-3 : 8e-3;
    for (int b = 0; b < s.batch; b++)
        for (int j = 0; j < s.n; j++)
            for (int i = 0; i < s.m; i++) {
                double want = expected(&s, b, i, j, lda, ldb, ldc, size),
                       x = read_as(got, b * size[2] + j * ldc + i, s.out);
                MUST(fabs(x - want) <= tolerance * (1 + fabs(want)));
            }
    return 0;
}

static int products(void) {
    static const struct {
        cudaDataType_t in, out;
        cublasComputeType_t compute;
    } types[] = {
        {CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F},           {CUDA_R_64F, CUDA_R_64F, CUBLAS_COMPUTE_64F},
        {CUDA_R_16F, CUDA_R_16F, CUBLAS_COMPUTE_32F},           {CUDA_R_16BF, CUDA_R_16BF, CUBLAS_COMPUTE_32F},
        {CUDA_R_16F, CUDA_R_32F, CUBLAS_COMPUTE_32F_PEDANTIC},  {CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F},
        {CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_TF32}, {CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F_PEDANTIC}};
    static const int sizes[][4] = {{1, 1, 1, 1},   {5, 7, 3, 1},  {33, 6, 41, 1},
                                   {3, 70, 20, 2}, {40, 5, 0, 1}, {17, 2, 300, 3}};
    WORKS(start());
    for (size_t t = 0; t < sizeof types / sizeof *types; t++)
        for (size_t z = 0; z < sizeof sizes / sizeof *sizes; z++)
            for (int turns = 0; turns < 4; turns++) {
                shape s = {sizes[z][0],
                           sizes[z][1],
                           sizes[z][2],
                           sizes[z][3],
                           turns & 1 ? CUBLAS_OP_T : CUBLAS_OP_N,
                           turns & 2 ? CUBLAS_OP_T : CUBLAS_OP_N,
                           types[t].in,
                           types[t].out,
                           types[t].compute,
                           0.5,
                           turns & 1 ? 0 : 2};
                WORKS(product_is_right(s));
            }
    return finish();
}

/* 1 + 2^-12 is not a TF32 number: it becomes 1. */
static int tf32_rounds(void) {
    float x = 1 + 0x1p-12f, y, one = 1, zero = 0;
    WORKS(start());
    for (int fast = 0; fast < 3; fast++) {
        WORKS(cublasSetMathMode(handle, fast == 1 ? CUBLAS_TF32_TENSOR_OP_MATH : CUBLAS_DEFAULT_MATH));
        for (int k = 0; k < 2; k++) WORKS(cudaMemcpy(device[k], k ? &one : &x, 4, cudaMemcpyHostToDevice));
        WORKS(cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, 1, 1, 1, &one, device[0], CUDA_R_32F, 1, device[1],
                           CUDA_R_32F, 1, &zero, device[2], CUDA_R_32F, 1,
                           fast == 2 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
        WORKS(cudaStreamSynchronize(stream));
        WORKS(cudaMemcpy(&y, device[2], 4, cudaMemcpyDeviceToHost));
        MUST(y == (fast ? 1 : x));
    }
    return finish();
}

static int lists_and_device_scalars(void) {
    float scalars[2] = {2, 0}, numbers[4] = {3, 5, 7, 11}, got[2];
    void *lists[6], *scalar_memory, *list_memory;
    WORKS(start());
    WORKS(cudaMalloc(&scalar_memory, 8));
    WORKS(cudaMalloc(&list_memory, sizeof lists));
    for (int i = 0; i < 6; i++) lists[i] = (char *)device[i / 2] + i % 2 * 4;
    WORKS(cudaMemcpy(scalar_memory, scalars, 8, cudaMemcpyHostToDevice));
    WORKS(cudaMemcpy(list_memory, lists, sizeof lists, cudaMemcpyHostToDevice));
    WORKS(cudaMemcpy(device[0], numbers, 8, cudaMemcpyHostToDevice));
    WORKS(cudaMemcpy(device[1], numbers + 2, 8, cudaMemcpyHostToDevice));
    WORKS(cublasSetPointerMode(handle, CUBLAS_POINTER_MODE_DEVICE));
    void **l = list_memory;
    WORKS(cublasGemmBatchedEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, 1, 1, 1, scalar_memory, (const void *const *)l,
                              CUDA_R_32F, 1, (const void *const *)(l + 2), CUDA_R_32F, 1, (char *)scalar_memory + 4,
                              l + 4, CUDA_R_32F, 1, 2, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    WORKS(cudaStreamSynchronize(stream));
    WORKS(cudaMemcpy(got, device[2], 8, cudaMemcpyDeviceToHost));
    MUST(got[0] == 42 && got[1] == 110);
    WORKS(cudaFree(scalar_memory));
    WORKS(cudaFree(list_memory));
    return finish();
}

static int gemm(int m, int n, int k, int lda, int ldb, int ldc, cudaDataType_t type, cublasComputeType_t compute,
                const void *alpha) {
    float zero = 0;
    return (int)cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_T, m, n, k, alpha, device[0], type, lda, device[1], type,
                             ldb, &zero, device[2], type, ldc, compute, CUBLAS_GEMM_DEFAULT);
}
static int refusals(void) {
    float one = 1;
    cublasHandle_t none = NULL;
    GIVES(cublasSetStream(none, NULL), CUBLAS_STATUS_NOT_INITIALIZED);
    WORKS(start());
    WORKS(gemm(4, 5, 6, 4, 5, 4, CUDA_R_32F, CUBLAS_COMPUTE_32F, &one));
    GIVES(gemm(4, 5, 6, 3, 5, 4, CUDA_R_32F, CUBLAS_COMPUTE_32F, &one), CUBLAS_STATUS_INVALID_VALUE);
    GIVES(gemm(4, 5, 6, 4, 4, 4, CUDA_R_32F, CUBLAS_COMPUTE_32F, &one), CUBLAS_STATUS_INVALID_VALUE);
    GIVES(gemm(4, 5, 6, 4, 5, 3, CUDA_R_32F, CUBLAS_COMPUTE_32F, &one), CUBLAS_STATUS_INVALID_VALUE);
    GIVES(gemm(-1, 5, 6, 4, 5, 4, CUDA_R_32F, CUBLAS_COMPUTE_32F, &one), CUBLAS_STATUS_INVALID_VALUE);
    GIVES(gemm(4, 5, 6, 4, 5, 4, CUDA_R_32F, CUBLAS_COMPUTE_32F, NULL), CUBLAS_STATUS_INVALID_VALUE);
    GIVES(gemm(4, 5, 6, 4, 5, 4, CUDA_R_64F, CUBLAS_COMPUTE_32F, &one), CUBLAS_STATUS_NOT_SUPPORTED);
    WORKS(gemm(0, 5, 6, 1, 5, 1, CUDA_R_32F, CUBLAS_COMPUTE_32F, &one));
    GIVES(cublasSetWorkspace(handle, (char *)device[0] + 8, 1024), CUBLAS_STATUS_INVALID_VALUE);
    WORKS(cublasSetWorkspace(handle, device[0], 1024));
    WORKS(cudaStreamSynchronize(stream));
    MUST(!strcmp(cublasGetStatusString(CUBLAS_STATUS_NOT_SUPPORTED), "CUBLAS_STATUS_NOT_SUPPORTED"));
    return finish();
}
static int second_product_fails(void) {
    float one = 1;
    WORKS(start());
    WORKS(gemm(4, 5, 6, 4, 5, 4, CUDA_R_32F, CUBLAS_COMPUTE_32F, &one));
    GIVES(gemm(4, 5, 6, 4, 5, 4, CUDA_R_32F, CUBLAS_COMPUTE_32F, &one), CUBLAS_STATUS_INTERNAL_ERROR);
    return finish();
}
static int past_the_end(void) {
    float one = 1;
    WORKS(start());
    WORKS(gemm(MOST, 1, 3, MOST, 1, MOST, CUDA_R_32F, CUBLAS_COMPUTE_32F, &one));
    return finish();
}
static int host_operand(void) {
    float one = 1, numbers[4] = {0};
    WORKS(start());
    void *kept = device[1];
    device[1] = numbers;
    WORKS(gemm(2, 2, 1, 2, 2, 2, CUDA_R_32F, CUBLAS_COMPUTE_32F, &one));
    device[1] = kept;
    return finish();
}
static int handle_left(void) { return (int)cublasCreate(&handle); }
static int lt_knows_nothing(void) {
    cublasLtHandle_t h;
    WORKS(cublasLtCreate(&h));
    MUST(cublasLtGetVersion() == CUBLAS_VERSION);
    WORKS(cublasLtDestroy(h));
    return 0;
}

static int speed(void) {
    static const int sizes[][3] = {{128, 128, 128}, {10, 64, 256}, {256, 256, 256}};
    struct timespec from, to;
    float one = 1;
    WORKS(start());
    WORKS(load(0, CUDA_R_32F, MOST));
    WORKS(load(1, CUDA_R_32F, MOST));
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const int *z = sizes[i];
        clock_gettime(CLOCK_MONOTONIC, &from);
        for (int r = 0; r < 10; r++)
            WORKS(gemm(z[0], z[1], z[2], z[0], z[1], z[0], CUDA_R_32F, CUBLAS_COMPUTE_32F, &one));
        WORKS(cudaStreamSynchronize(stream));
        clock_gettime(CLOCK_MONOTONIC, &to);
        double s = (double)(to.tv_sec - from.tv_sec) + (double)(to.tv_nsec - from.tv_nsec) * 1e-9;
        printf("# f32 %d x %d x %d: %.1f GFLOP/s\n", z[0], z[1], z[2], 20.0 * z[0] * z[1] * z[2] / s * 1e-9);
    }
    fflush(stdout);
    return finish();
}

int main(void) {
    passes("cublas double: products of every type", "DDP_DOUBLE_LEAKS=fatal", products);
    passes("cublas double: TF32 rounds its inputs", "DDP_DOUBLE_LEAKS=fatal", tf32_rounds);
    passes("cublas double: lists of matrices, scalars on the device", "DDP_DOUBLE_LEAKS=fatal",
           lists_and_device_scalars);
    passes("cublas double: refusals", "DDP_DOUBLE_LEAKS=fatal", refusals);
    passes("cublas double: the second product fails", "DDP_DOUBLE_LEAKS=fatal DDP_DOUBLE_FAIL=cublasGemmEx:2",
           second_product_fails);
    passes("cublas double: cuBLASLt is there", "DDP_DOUBLE_LEAKS=fatal", lt_knows_nothing);
    caught("cublas double catches: a matrix past the end", "", past_the_end, 99, "cublasGemmEx: A: 786432 bytes at 0x");
    caught("cublas double catches: a matrix in host memory", "", host_operand, 99, "cublasGemmEx: B: 0x");
    caught("cublas double catches: a handle left", "DDP_DOUBLE_LEAKS=fatal", handle_left, 99,
           "LEAK: 1 of: cublas handle");
    passes("cublas double: speed", "", speed);
    return failures != 0;
}
