/* matmul.c -- matmul, linear and linear_act by cuBLAS.
 *
 * cuBLAS's matrices lie column by column, so y = a b row by row is its y^T = b^T a^T: b comes first and N before M. What it can walk
 * through needs no copy: one unit stride a matrix, and any strides over batches. Else a matrix is copied into scratch. */
#include <limits.h>
#include <string.h>

#include "../cuda/recent.h"
#include "cublas.h"

/* ---- what cuBLAS takes ---- */

static const char *reject(const ddp_call *c) {
    static atomic_bool told;
    const char *missing = ddp__cuda_missing(DDP_LIB_CUBLAS);
    if (missing) {
        if (!atomic_exchange(&told, true))
            ddp__log(DDP_LOG_WARN, "matrix products run on kernels that are many times slower: %s", missing);
        return missing;
    }
    if (!ddp__is_float(c->in[0]->m.dtype)) return "cuBLAS is used for floats only";
    if (!ddp__meta_is_rowmajor(&c->out[0]->m)) return "a result that is not row-major";
    matmul_args p;
    ddp__product_of(&p, c, c->in[0], c->in[1]);
    const int64_t sizes[8] = {p.M, p.N, p.K, p.batches, p.am, p.ak, p.bk, p.bn};
    for (int i = 0; i < 8; i++)
        if (sizes[i] > INT_MAX) return "a size beyond 32 bits";
    return NULL;
}

/* rows x cols with strides (r, c) as cuBLAS reads it: a unit stride and no overlap. Strides of sizes of 1 may be anything. */
static bool gemm_able(int64_t rows, int64_t cols, int64_t *r, int64_t *c) {
    if (cols == 1) *c = 1;
    if (*c == 1 && rows == 1) *r = cols;
    if (*c == 1 && *r >= cols) return true;
    if (rows == 1) *r = 1;
    if (*r == 1 && cols == 1) *c = rows;
    return *r == 1 && *c >= rows;
}

/* A call's product, and copies of what cuBLAS cannot walk through. */
typedef struct job {
    matmul_args p;
    dense_copy a, b;
    ddp_dtype in, out; /* out: of what y is written in */
} job;

static int job_take(const ddp_call *c, job *j) {
    const ddp_tensor *a = c->in[0], *b = c->in[1];
    memset(j, 0, sizeof *j);
    j->in = j->out = a->m.dtype;
    ddp__product_of(&j->p, c, a, b);
    bool a_lies = gemm_able(j->p.M, j->p.K, &j->p.am, &j->p.ak), b_lies = gemm_able(j->p.K, j->p.N, &j->p.bk, &j->p.bn);
    if ((a_lies && b_lies) || j->p.K == 0) return 0;
    int st = a_lies ? 0 : ddp__dense_copy_take(c, &j->a, a);
    if (st == 0 && !b_lies) st = ddp__dense_copy_take(c, &j->b, b);
    if (st < 0) return st;
    ddp__product_of(&j->p, c, a_lies ? a : &j->a.t, b_lies ? b : &j->b.t);
    gemm_able(j->p.M, j->p.K, &j->p.am, &j->p.ak);
    gemm_able(j->p.K, j->p.N, &j->p.bk, &j->p.bn);
    return 0;
}
static void job_give(const ddp_call *c, job *j) {
    ddp__dense_copy_give(c, &j->a);
    ddp__dense_copy_give(c, &j->b);
}

/* ---- the product ---- */

static const cudaDataType types[] = {
    [DDP_F32] = CUDA_R_32F, [DDP_F64] = CUDA_R_64F, [DDP_F16] = CUDA_R_16F, [DDP_BF16] = CUDA_R_16BF};

/* "exact" allows no trick at all, "high" TF32: 10 bits of each factor's fraction, on tensor cores. */
static cublasComputeType_t compute_type(ddp_dtype d) {
    if (d == DDP_F64) return CUBLAS_COMPUTE_64F;
    if (d != DDP_F32) return CUBLAS_COMPUTE_32F;
    switch (ddp_float32_matmul_precision()) {
        case DDP_F32_EXACT: return CUBLAS_COMPUTE_32F_PEDANTIC;
        case DDP_F32_HIGH: return CUBLAS_COMPUTE_32F_FAST_TF32;
        default: return CUBLAS_COMPUTE_32F;
    }
}

/* What all of cuBLAS's calls are told. */
typedef struct gemm_call {
    cublasHandle_t h;
    cublasOperation_t tb, ta;
    int m, n, k, ldb, lda, ldy; /* cuBLAS's m is our N */
    cudaDataType in, out;
    cublasComputeType_t compute;
    union {
        float f;
        double d;
    } one, beta;
} gemm_call;

static void gemm_call_of(gemm_call *g, const job *j, cublasHandle_t h, double beta) {
    const matmul_args *p = &j->p;
    bool b_rows = p->bn == 1 && p->bk >= p->N, a_rows = p->ak == 1 && p->am >= p->K;
    *g = (gemm_call){.h = h,
                     .tb = b_rows ? CUBLAS_OP_N : CUBLAS_OP_T,
                     .ta = a_rows ? CUBLAS_OP_N : CUBLAS_OP_T,
                     .m = (int)p->N,
                     .n = (int)p->M,
                     .k = (int)p->K,
                     .ldb = (int)(b_rows ? p->bk : p->bn),
                     .lda = (int)(a_rows ? p->am : p->ak),
                     .ldy = (int)p->N,
                     .in = types[j->in],
                     .out = types[j->out],
                     .compute = compute_type(j->in)};
    if (j->in == DDP_F64) {
        g->one.d = 1;
        g->beta.d = beta;
    } else {
        g->one.f = 1;
        g->beta.f = (float)beta;
    }
}

static int one(const ddp_call *c, const gemm_call *g, const void *b, const void *a, void *y) {
    return ddp__cublas_check(c,
                             ddp__cuda.cublasGemmEx(g->h, g->tb, g->ta, g->m, g->n, g->k, &g->one, b, g->in, g->ldb, a,
                                                    g->in, g->lda, &g->beta, y, g->out, g->ldy, g->compute,
                                                    CUBLAS_GEMM_DEFAULT),
                             "cublasGemmEx");
}

/* Batches of dim d, the first of them at b, a, y. */
static int strided(const ddp_call *c, const gemm_call *g, const matmul_args *p, int d, const void *b, const void *a,
                   void *y) {
    return ddp__cublas_check(c,
                             ddp__cuda.cublasGemmStridedBatchedEx(g->h, g->tb, g->ta, g->m, g->n, g->k, &g->one, b,
                                                                  g->in, g->ldb, p->sb[d], a, g->in, g->lda, p->sa[d],
                                                                  &g->beta, y, g->out, g->ldy, p->sy[d],
                                                                  (int)p->size[d], g->compute, CUBLAS_GEMM_DEFAULT),
                             "cublasGemmStridedBatchedEx");
}

static bool aligned(const void *first, const int64_t *stride, int n, int bytes) {
    if ((uintptr_t)first % 16 != 0) return false;
    for (int i = 0; i < n; i++)
        if (stride[i] * bytes % 16 != 0) return false;
    return true;
}

/* Batches that do not lie evenly: a list of where each matrix begins, made by a kernel; two launches for all of them. */
static int by_pointers(const ddp_call *c, const gemm_call *g, const job *j) {
    const matmul_args *p = &j->p;
    size_t bytes = 3 * (size_t)p->batches * sizeof(void *);
    void **list = ddp__cuda_scratch_take(c, bytes);
    if (!list) return ddp__pending();
    product_pointers_args args = {
        .p = *p, .out = list, .in_bytes = ddp__dtype_bytes[j->in], .y_bytes = ddp__dtype_bytes[j->out]};
    int st = ddp__launch_product_pointers(c, &args, ddp__grid(p->batches, 1));
    if (st == 0)
        st = ddp__cublas_check(c,
                               ddp__cuda.cublasGemmBatchedEx(g->h, g->tb, g->ta, g->m, g->n, g->k, &g->one,
                                                             (const void *const *)list, g->in, g->ldb,
                                                             (const void *const *)(list + p->batches), g->in, g->lda,
                                                             &g->beta, list + 2 * p->batches, g->out, g->ldy,
                                                             (int)p->batches, g->compute, CUBLAS_GEMM_DEFAULT),
                               "cublasGemmBatchedEx");
    ddp__cuda_scratch_give(c, list, bytes);
    return st;
}

/* Matrices that begin off 16 bytes are none of the lists': each run of the last dim by itself. */
static int by_runs(const ddp_call *c, const gemm_call *g, const job *j) {
    const matmul_args *p = &j->p;
    int last = p->batch_dims - 1, st = 0;
    int64_t in = ddp__dtype_bytes[j->in], out = ddp__dtype_bytes[j->out];
    for (int64_t t = 0; t < p->batches / p->size[last] && st == 0; t++) {
        int64_t at_a = 0, at_b = 0, at_y = 0, rest = t;
        for (int d = last - 1; d >= 0; rest /= p->size[d--]) {
            int64_t i = rest % p->size[d];
            at_a += i * p->sa[d];
            at_b += i * p->sb[d];
            at_y += i * p->sy[d];
        }
        st = strided(c, g, p, last, (const char *)p->b + at_b * in, (const char *)p->a + at_a * in,
                     (char *)p->y + at_y * out);
    }
    return st;
}

static int batches(const ddp_call *c, const gemm_call *g, const job *j) {
    const matmul_args *p = &j->p;
    int in = ddp__dtype_bytes[j->in], n = p->batch_dims;
    if (n == 0) return one(c, g, p->b, p->a, p->y);
    if (n == 1) return strided(c, g, p, 0, p->b, p->a, p->y);
    bool lists =
        aligned(p->a, p->sa, n, in) && aligned(p->b, p->sb, n, in) && aligned(p->y, p->sy, n, ddp__dtype_bytes[j->out]);
    return lists ? by_pointers(c, g, j) : by_runs(c, g, j);
}

/* y = a b + beta y. y may be another than the call's, in j->out, row-major all the same. */
static int product(const ddp_call *c, job *j, double beta) {
    matmul_args *p = &j->p;
    ddp_gpu *gpu = ddp__gpu_of(c);
    cublasHandle_t h = ddp__cublas(c);
    gemm_call g;
    if (!h || !gpu) return ddp__pending();
    int64_t rows = p->M * p->batches;
    if (p->K == 0) { /* nothing is added up */
        size_t bytes = (size_t)(rows * p->N) * ddp__dtype_bytes[j->out];
        return beta != 0 ? 0
                         : ddp__cuda_check(ddp__cuda.cudaMemsetAsync(p->y, 0, bytes, gpu->compute), "cudaMemsetAsync");
    }
    gemm_call_of(&g, j, h, beta);
    ddp__recent_add(c->op->name, "cuBLAS");
    int st = batches(c, &g, j);
    return st < 0 ? st : ddp__cuda_launched(gpu, c->op->name, "of cuBLAS", cudaSuccess);
}

static int run_matmul(const ddp_call *c) {
    job j;
    if (c->out[0]->numel == 0) return 0;
    int st = job_take(c, &j);
    if (st == 0) st = product(c, &j, 0);
    job_give(c, &j);
    return st;
}
const ddp_kernel ddp__cublas_matmul[] = {{"matmul.cublas", reject, run_matmul}, {NULL, NULL, NULL}};

/* ---- linear maps ---- */

static bool vector(const bias_args *a, ddp_dtype d) {
    const void *p[5] = {a->z, a->bias, a->residual, a->pre, a->y};
    for (int i = 0; i < 5; i++)
        if ((uintptr_t)p[i] % 16 != 0) return false;
    return a->columns * ddp__dtype_bytes[d] % 16 == 0 && (!a->bias || a->bias_stride == 1);
}

/* bias_args of a linear map over rows x N; z and pre are not set. */
static void bias_args_of(bias_args *a, const ddp_call *c, const job *j, const ddp_tensor *residual) {
    const ddp_tensor *bias = c->in[2];
    *a = (bias_args){.y = ddp__ptr(c->out[0]), .rows = j->p.M * j->p.batches, .columns = j->p.N};
    if (bias) {
        a->bias = ddp__ptr(bias);
        a->bias_stride = bias->m.stride[0];
    }
    if (residual) a->residual = ddp__ptr(residual);
}

/* Without act: y is filled with bias and residual and the product added to it: read and written once more than the product
 * alone, rounded once. */
static int added_to(const ddp_call *c, job *j, const ddp_tensor *residual) {
    bias_args a;
    bias_args_of(&a, c, j, residual);
    a.vector = vector(&a, j->in);
    int st = 0;
    if (a.bias || a.residual)
        st = ddp__launch_bias_fill(c, j->in, &a, ddp__grid(c->out[0]->numel, 16 / ddp__dtype_bytes[j->in]));
    return st < 0 ? st : product(c, j, a.bias || a.residual ? 1 : 0);
}

/* The product in what it is summed in (f32 and f64 in y or pre itself, 16 bits in scratch: they are rounded once, at the end), then
 * one pass with bias, act and residual. */
static int passed_over(const ddp_call *c, job *j, const ddp_tensor *residual, ddp_tensor *pre, int act) {
    ddp_tensor *y = c->out[0];
    bool half = ddp__is_half(j->in);
    size_t bytes = half ? (size_t)y->numel * sizeof(float) : 0;
    void *scratch = half ? ddp__cuda_scratch_take(c, bytes) : NULL;
    bias_args a;
    if (half && !scratch) return ddp__pending();
    bias_args_of(&a, c, j, residual);
    j->out = ddp__wide(j->in);
    j->p.y = half ? scratch : pre ? ddp__ptr(pre) : ddp__ptr(y);
    a.z = j->p.y;
    a.pre = pre && (half || a.bias) ? ddp__ptr(pre) : NULL;
    a.act = act;
    a.vector = vector(&a, j->in);
    int st = product(c, j, 0);
    if (st == 0) st = ddp__launch_bias_act(c, j->in, &a, ddp__grid(y->numel, 16 / ddp__dtype_bytes[j->in]));
    if (half) ddp__cuda_scratch_give(c, scratch, bytes);
    return st;
}

static int run_linear(const ddp_call *c) {
    job j;
    dense_copy copy = {0};
    bool acts = c->op->id == DDP_OP_linear_act;
    int act = acts ? (int)((const ddp_linear_act_attrs *)c->attrs)->act : DDP_ACT_NONE;
    const ddp_tensor *residual = acts ? c->in[3] : NULL;
    if (c->out[0]->numel == 0) return 0;
    int st = job_take(c, &j);
    if (st == 0 && residual && !ddp__meta_is_rowmajor(&residual->m)) {
        st = ddp__dense_copy_take(c, &copy, residual);
        residual = &copy.t;
    }
    bool filled = act == DDP_ACT_NONE && !(c->in[2] && residual && ddp__is_half(j.in));
    if (st == 0) st = filled ? added_to(c, &j, residual) : passed_over(c, &j, residual, ddp__product_pre(c), act);
    ddp__dense_copy_give(c, &copy);
    job_give(c, &j);
    return st;
}
const ddp_kernel ddp__cublas_linear[] = {{"linear.cublas", reject, run_linear}, {NULL, NULL, NULL}};
const ddp_kernel ddp__cublas_linear_act[] = {{"linear_act.cublas", reject, run_linear}, {NULL, NULL, NULL}};
