/* cublas.c -- the double of cuBLAS: handles, and products with the checks that cuBLAS documents. */
#include "double.h"

#pragma GCC visibility push(default)
#include <cublas_v2.h>
#pragma GCC visibility pop

#include "gemm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct cublasContext {
    cudaStream_t stream;
    int device;
    void *workspace;
    size_t workspace_bytes;
    cublasMath_t math;
    cublasPointerMode_t pointers;
    cublasAtomicsMode_t atomics;
    bool live;
};

/* ---- handles ------------------------------------------------------------------------------------------------------- */
#define ENTER(handle, name)                                                     \
    do {                                                                        \
        int status_ = ddp_double_fault(name, CUBLAS_STATUS_INTERNAL_ERROR);     \
        if (status_) return (cublasStatus_t)status_;                            \
        if (!(handle) || !(handle)->live) return CUBLAS_STATUS_NOT_INITIALIZED; \
    } while (0)

cublasStatus_t cublasCreate_v2(cublasHandle_t *out) {
    int status = ddp_double_fault("cublasCreate_v2", CUBLAS_STATUS_ALLOC_FAILED), count;
    if (status) return (cublasStatus_t)status;
    if (!out) return CUBLAS_STATUS_INVALID_VALUE;
    if (cudaGetDeviceCount(&count) || ddp_double_stuck(ddp_double_device())) return CUBLAS_STATUS_NOT_INITIALIZED;
    cublasHandle_t h = calloc(1, sizeof *h);
    h->device = ddp_double_device();
    h->live = true;
    *out = h;
    ddp_double_count("cublas handle", 1);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t h) {
    ENTER(h, "cublasDestroy_v2");
    h->live = false;
    free(h);
    ddp_double_count("cublas handle", -1);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetVersion_v2(cublasHandle_t h, int *version) {
    (void)h;
    if (!version) return CUBLAS_STATUS_INVALID_VALUE;
    *version = CUBLAS_VERSION;
    return CUBLAS_STATUS_SUCCESS;
}
/* Resets the workspace, as the real one. */
cublasStatus_t cublasSetStream_v2(cublasHandle_t h, cudaStream_t stream) {
    ENTER(h, "cublasSetStream_v2");
    if (ddp_double_stream_device(stream) != h->device) return CUBLAS_STATUS_INVALID_VALUE;
    h->stream = stream;
    h->workspace = NULL;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetStream_v2(cublasHandle_t h, cudaStream_t *stream) {
    ENTER(h, "cublasGetStream_v2");
    if (!stream) return CUBLAS_STATUS_INVALID_VALUE;
    *stream = h->stream;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t h, void *workspace, size_t bytes) {
    ENTER(h, "cublasSetWorkspace_v2");
    if ((uintptr_t)workspace % 256) return CUBLAS_STATUS_INVALID_VALUE;
    if (workspace) ddp_double_check_range(workspace, bytes, "cublasSetWorkspace");
    h->workspace = workspace;
    h->workspace_bytes = bytes;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t mode) {
    ENTER(h, "cublasSetPointerMode_v2");
    if (mode != CUBLAS_POINTER_MODE_HOST && mode != CUBLAS_POINTER_MODE_DEVICE) return CUBLAS_STATUS_INVALID_VALUE;
    h->pointers = mode;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t *mode) {
    ENTER(h, "cublasGetPointerMode_v2");
    if (!mode) return CUBLAS_STATUS_INVALID_VALUE;
    *mode = h->pointers;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t h, cublasMath_t mode) {
    ENTER(h, "cublasSetMathMode");
    if ((mode & 15) > CUBLAS_TF32_TENSOR_OP_MATH) return CUBLAS_STATUS_INVALID_VALUE;
    h->math = mode;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetMathMode(cublasHandle_t h, cublasMath_t *mode) {
    ENTER(h, "cublasGetMathMode");
    if (!mode) return CUBLAS_STATUS_INVALID_VALUE;
    *mode = h->math;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetAtomicsMode(cublasHandle_t h, cublasAtomicsMode_t mode) {
    ENTER(h, "cublasSetAtomicsMode");
    h->atomics = mode;
    return CUBLAS_STATUS_SUCCESS;
}

static const char *status_name(cublasStatus_t status) {
    switch (status) {
        case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
        case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
        case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
        case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
        case CUBLAS_STATUS_ARCH_MISMATCH: return "CUBLAS_STATUS_ARCH_MISMATCH";
        case CUBLAS_STATUS_MAPPING_ERROR: return "CUBLAS_STATUS_MAPPING_ERROR";
        case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
        case CUBLAS_STATUS_INTERNAL_ERROR: return "CUBLAS_STATUS_INTERNAL_ERROR";
        case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
        case CUBLAS_STATUS_LICENSE_ERROR: return "CUBLAS_STATUS_LICENSE_ERROR";
    }
    return "unknown status";
}
const char *cublasGetStatusName(cublasStatus_t status) { return status_name(status); }
const char *cublasGetStatusString(cublasStatus_t status) { return status_name(status); }

/* ---- products ------------------------------------------------------------------------------------------------------ */
/* One call of any of the three: strides count elements; `lists`: a, b, c are arrays of pointers on the device. */
typedef struct call {
    product p;
    const void *alpha, *beta;
    bool scalars_on_device, lists;
    long long stride_a, stride_b, stride_c;
    int batch;
    cublasComputeType_t compute;
    const char *name;
} call;

static double scalar(const void *p, cublasComputeType_t compute) {
    return compute == CUBLAS_COMPUTE_64F || compute == CUBLAS_COMPUTE_64F_PEDANTIC ? *(const double *)p
                                                                                   : (double)*(const float *)p;
}

static const char *at(const void *p, long long elements, cudaDataType_t type) {
    return (const char *)p + elements * (long long)type_bytes(type);
}

static void run_call(void *ctx) {
    const call *c = ctx;
    product p = c->p;
    if (c->scalars_on_device) p.alpha = scalar(c->alpha, c->compute), p.beta = scalar(c->beta, c->compute);
    for (int i = 0; i < c->batch; i++) {
        product one = p;
        one.a = c->lists ? ((const void *const *)p.a)[i] : at(p.a, i * c->stride_a, p.type_a);
        one.b = c->lists ? ((const void *const *)p.b)[i] : at(p.b, i * c->stride_b, p.type_b);
        one.c = c->lists ? ((void *const *)p.c)[i] : (void *)at(p.c, i * c->stride_c, p.type_c);
        multiply(&one);
    }
}

static bool is_any(cudaDataType_t t, cudaDataType_t a, cudaDataType_t b, cudaDataType_t c) {
    return t == a || t == b || t == c;
}

/* The combinations of types that cuBLAS documents, as far as they are simulated. */
static bool supported(const call *c) {
    const product *p = &c->p;
    cudaDataType_t in = p->type_a, out = p->type_c;
    if (p->type_b != in) return false;
    switch (c->compute) {
        case CUBLAS_COMPUTE_64F:
        case CUBLAS_COMPUTE_64F_PEDANTIC: return in == CUDA_R_64F && out == CUDA_R_64F;
        case CUBLAS_COMPUTE_32F_FAST_TF32: return in == CUDA_R_32F && out == CUDA_R_32F;
        case CUBLAS_COMPUTE_32F:
        case CUBLAS_COMPUTE_32F_PEDANTIC:
            return is_any(in, CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF) && (out == in || out == CUDA_R_32F);
        case CUBLAS_COMPUTE_16F:
        case CUBLAS_COMPUTE_16F_PEDANTIC:
        case CUBLAS_COMPUTE_32F_FAST_16F:
        case CUBLAS_COMPUTE_32F_FAST_16BF: ddp_double_unsimulated("cuBLAS: products computed in 16 bits");
        default: return false;
    }
}

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static cublasStatus_t check(const call *c, cublasOperation_t ta, cublasOperation_t tb) {
    const product *p = &c->p;
    bool known = (ta == CUBLAS_OP_N || ta == CUBLAS_OP_T || ta == CUBLAS_OP_C) &&
                 (tb == CUBLAS_OP_N || tb == CUBLAS_OP_T || tb == CUBLAS_OP_C);
    if (!known || p->m < 0 || p->n < 0 || p->k < 0 || c->batch < 0) return CUBLAS_STATUS_INVALID_VALUE;
    if (p->lda < most(1, p->turn_a ? p->k : p->m) || p->ldb < most(1, p->turn_b ? p->n : p->k) ||
        p->ldc < most(1, p->m))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (!c->alpha || !c->beta) return CUBLAS_STATUS_INVALID_VALUE;
    return supported(c) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

/* All matrices of one operand lie in one live allocation. */
static void check_operand(const call *c, const void *p, long long stride, int64_t ld, int64_t rows, int64_t cols,
                          cudaDataType_t type, char which) {
    char what[100];
    if (!rows || !cols) return;
    snprintf(what, sizeof what, "%s: %c", c->name, which);
    long long last = c->batch > 1 ? (c->batch - 1) * stride : 0;
    size_t bytes = (size_t)((cols - 1) * ld + rows) * type_bytes(type);
    if (c->lists) {
        ddp_double_check_range(p, (size_t)c->batch * sizeof(void *), what);
        return;
    }
    if (last < 0) ddp_double_unsimulated("cuBLAS: negative strides of a batch");
    ddp_double_check_range(p, bytes + (size_t)last * type_bytes(type), what);
}

static void check_operands(const call *c) {
    const product *p = &c->p;
    check_operand(c, p->a, c->stride_a, p->lda, p->turn_a ? p->k : p->m, p->turn_a ? p->m : p->k, p->type_a, 'A');
    check_operand(c, p->b, c->stride_b, p->ldb, p->turn_b ? p->n : p->k, p->turn_b ? p->k : p->n, p->type_b, 'B');
    check_operand(c, p->c, c->stride_c, p->ldc, p->m, p->n, p->type_c, 'C');
    if (c->batch > 1 && !c->lists && c->stride_c < (p->n - 1) * p->ldc + p->m)
        ddp_double_die("%s: the results of the batch overlap", c->name);
}

static cublasStatus_t start(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, call what) {
    ENTER(h, what.name);
    what.p.turn_a = ta != CUBLAS_OP_N;
    what.p.turn_b = tb != CUBLAS_OP_N;
    what.scalars_on_device = h->pointers == CUBLAS_POINTER_MODE_DEVICE;
    what.p.tf32 = what.p.type_a == CUDA_R_32F &&
                  (what.compute == CUBLAS_COMPUTE_32F_FAST_TF32 ||
                   (what.compute == CUBLAS_COMPUTE_32F && (h->math & 15) == CUBLAS_TF32_TENSOR_OP_MATH));
    cublasStatus_t status = check(&what, ta, tb);
    if (status) return status;
    if (ddp_double_stuck(h->device)) return CUBLAS_STATUS_EXECUTION_FAILED;
    if (!what.p.m || !what.p.n || !what.batch) return CUBLAS_STATUS_SUCCESS;
    if (h->workspace) ddp_double_check_range(h->workspace, h->workspace_bytes, "the workspace of cuBLAS");
    check_operands(&what);
    if (!what.scalars_on_device)
        what.p.alpha = scalar(what.alpha, what.compute), what.p.beta = scalar(what.beta, what.compute);
    ddp_double_log("%s %c%c m %ld n %ld k %ld batch %d types %d %d compute %d tf32 %d", what.name,
                   what.p.turn_a ? 'T' : 'N', what.p.turn_b ? 'T' : 'N', (long)what.p.m, (long)what.p.n, (long)what.p.k,
                   what.batch, what.p.type_a, what.p.type_c, what.compute, what.p.tf32);
    call *c = malloc(sizeof *c);
    *c = what;
    ddp_double_enqueue(h->stream, run_call, free, c, what.name);
    return CUBLAS_STATUS_SUCCESS;
}

static product operands(int m, int n, int k, const void *a, cudaDataType ta, int lda, const void *b, cudaDataType tb,
                        int ldb, void *c, cudaDataType tc, int ldc) {
    return (product){.m = m,
                     .n = n,
                     .k = k,
                     .a = a,
                     .b = b,
                     .c = c,
                     .type_a = ta,
                     .type_b = tb,
                     .type_c = tc,
                     .lda = lda,
                     .ldb = ldb,
                     .ldc = ldc};
}

cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                            const void *alpha, const void *a, cudaDataType type_a, int lda, const void *b,
                            cudaDataType type_b, int ldb, const void *beta, void *c, cudaDataType type_c, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t algo) {
    (void)algo;
    return start(h, ta, tb,
                 (call){.p = operands(m, n, k, a, type_a, lda, b, type_b, ldb, c, type_c, ldc),
                        .alpha = alpha,
                        .beta = beta,
                        .batch = 1,
                        .compute = compute,
                        .name = "cublasGemmEx"});
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n,
                                          int k, const void *alpha, const void *a, cudaDataType type_a, int lda,
                                          long long stride_a, const void *b, cudaDataType type_b, int ldb,
                                          long long stride_b, const void *beta, void *c, cudaDataType type_c, int ldc,
                                          long long stride_c, int batch, cublasComputeType_t compute,
                                          cublasGemmAlgo_t algo) {
    (void)algo;
    return start(h, ta, tb,
                 (call){.p = operands(m, n, k, a, type_a, lda, b, type_b, ldb, c, type_c, ldc),
                        .alpha = alpha,
                        .beta = beta,
                        .batch = batch,
                        .stride_a = stride_a,
                        .stride_b = stride_b,
                        .stride_c = stride_c,
                        .compute = compute,
                        .name = "cublasGemmStridedBatchedEx"});
}

cublasStatus_t cublasGemmBatchedEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                                   const void *alpha, const void *const a[], cudaDataType type_a, int lda,
                                   const void *const b[], cudaDataType type_b, int ldb, const void *beta,
                                   void *const c[], cudaDataType type_c, int ldc, int batch,
                                   cublasComputeType_t compute, cublasGemmAlgo_t algo) {
    (void)algo;
    return start(h, ta, tb,
                 (call){.p = operands(m, n, k, a, type_a, lda, b, type_b, ldb, (void *)c, type_c, ldc),
                        .alpha = alpha,
                        .beta = beta,
                        .batch = batch,
                        .lists = true,
                        .compute = compute,
                        .name = "cublasGemmBatchedEx"});
}
