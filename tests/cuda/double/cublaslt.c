/* cublaslt.c -- the double of cuBLASLt: it is there, has a version, and knows no algorithm for anything. */
#include "double.h"

#pragma GCC visibility push(default)
#include <cublasLt.h>
#pragma GCC visibility pop

#include <stdlib.h>
#include <string.h>

struct cublasLtContext {
    int device;
};

cublasStatus_t cublasLtCreate(cublasLtHandle_t *out) {
    int status = ddp_double_fault("cublasLtCreate", CUBLAS_STATUS_ALLOC_FAILED), count;
    if (status) return (cublasStatus_t)status;
    if (!out) return CUBLAS_STATUS_INVALID_VALUE;
    if (cudaGetDeviceCount(&count)) return CUBLAS_STATUS_NOT_INITIALIZED;
    *out = calloc(1, sizeof **out);
    ddp_double_count("cublasLt handle", 1);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t h) {
    if (!h) return CUBLAS_STATUS_NOT_INITIALIZED;
    free(h);
    ddp_double_count("cublasLt handle", -1);
    return CUBLAS_STATUS_SUCCESS;
}
size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
size_t cublasLtGetCudartVersion(void) { return CUDART_VERSION; }

/* Descriptors hold nothing: no product is ever run from them. */
static cublasStatus_t make(void **out, const char *what) {
    if (!out) return CUBLAS_STATUS_INVALID_VALUE;
    *out = calloc(1, 64);
    ddp_double_count(what, 1);
    return CUBLAS_STATUS_SUCCESS;
}
static cublasStatus_t drop(void *p, const char *what) {
    free(p);
    if (p) ddp_double_count(what, -1);
    return CUBLAS_STATUS_SUCCESS;
}
static cublasStatus_t set(const void *p, const void *value, size_t bytes) {
    return p && value && bytes ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *out, cublasComputeType_t compute, cudaDataType_t scale) {
    (void)compute, (void)scale;
    return make((void **)out, "cublasLt product");
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) { return drop(d, "cublasLt product"); }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t a,
                                              const void *value, size_t bytes) {
    (void)a;
    return set(d, value, bytes);
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *out, cudaDataType type, uint64_t rows, uint64_t cols,
                                          int64_t ld) {
    (void)type, (void)rows, (void)cols, (void)ld;
    return make((void **)out, "cublasLt layout");
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t d) { return drop(d, "cublasLt layout"); }
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t d, cublasLtMatrixLayoutAttribute_t a,
                                                const void *value, size_t bytes) {
    (void)a;
    return set(d, value, bytes);
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *out) {
    return make((void **)out, "cublasLt preference");
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t d) { return drop(d, "cublasLt preference"); }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t d,
                                                    cublasLtMatmulPreferenceAttributes_t a, const void *value,
                                                    size_t bytes) {
    (void)a;
    return set(d, value, bytes);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t what, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int most,
                                              cublasLtMatmulHeuristicResult_t results[], int *count) {
    if (!h) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!what || !a || !b || !c || !d || !preference || most <= 0 || !results || !count)
        return CUBLAS_STATUS_INVALID_VALUE;
    *count = 0;
    return CUBLAS_STATUS_NOT_SUPPORTED;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t h, cublasLtMatmulDesc_t what, const void *alpha, const void *A,
                              cublasLtMatrixLayout_t a, const void *B, cublasLtMatrixLayout_t b, const void *beta,
                              const void *C, cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t *algo, void *workspace, size_t bytes, cudaStream_t stream) {
    (void)h, (void)what, (void)alpha, (void)A, (void)a, (void)B, (void)b, (void)beta, (void)C, (void)c, (void)D,
        (void)d, (void)algo, (void)workspace;
    (void)bytes, (void)stream;
    ddp_double_unsimulated("cublasLtMatmul");
}
