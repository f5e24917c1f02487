/* matmul.c -- matmul and linear. One product with b lying row by row goes to sgemm; transposed ones and batches to the
 * matmul primitive (README.md has the times); what that has no fast loop for, to sgemm batch by batch. */
#include "dnnl_util.h"

#include <string.h>

enum { BATCH_DIMS = DDP_MAX_DIM - 2 };

/* y[..., M, N] = a[..., M, K] b[..., K, N] + bias[N]: sizes, and strides in elements. Also the cache key. */
typedef struct product {
    int64_t M, N, K, bias, batch_dims;
    int64_t am, ak, bk, bn;                 /* one of each pair is 1 */
    int64_t size[BATCH_DIMS];               /* of the batch dims of y */
    int64_t sa[BATCH_DIMS], sb[BATCH_DIMS]; /* 0 where broadcast */
} product;

/* ---- from a call to a product ------------------------------------------------------------------------------------ */

static void batch_strides(const ddp_meta *m, const product *p, int64_t *stride) {
    int own = m->ndim > 2 ? m->ndim - 2 : 0;
    for (int i = 0; i < p->batch_dims; i++) {
        int k = i - ((int)p->batch_dims - own);
        stride[i] = k >= 0 && m->size[k] != 1 ? m->stride[k] : 0;
    }
}

/* rows x cols with strides (r, c) as sgemm reads it: a unit stride and no overlap. */
static bool gemm_able(int64_t rows, int64_t cols, int64_t *r, int64_t *c) {
    if (cols == 1) *c = 1;
    if (*c == 1 && rows == 1) *r = cols;
    if (*c == 1 && *r >= cols) return true;
    if (rows == 1) *r = 1;
    if (*r == 1 && cols == 1) *c = rows;
    return *r == 1 && *c >= rows;
}

/* A batch of a against one b is one tall product where the rows of a lie evenly. */
static void merge_rows(product *p) {
    while (p->batch_dims > 0) {
        int last = (int)p->batch_dims - 1;
        for (int i = 0; i <= last; i++)
            if (p->sb[i] != 0) return;
        if (p->size[last] != 1 && (p->sa[last] != p->M * p->am || p->ak != 1)) return;
        if (p->M == 1) p->am = p->sa[last] ? p->sa[last] : p->am;
        p->M *= p->size[last];
        p->batch_dims--;
    }
}

static const char *matmul_product(const ddp_call *c, product *p) {
    const ddp_meta *a = &c->in[0]->m, *b = &c->in[1]->m, *y = &c->out[0]->m;
    bool row = a->ndim == 1, col = b->ndim == 1;
    memset(p, 0, sizeof *p);
    p->M = row ? 1 : a->size[a->ndim - 2];
    p->K = a->size[a->ndim - 1];
    p->N = col ? 1 : b->size[b->ndim - 1];
    p->am = row ? p->K : a->stride[a->ndim - 2];
    p->ak = a->stride[a->ndim - 1];
    p->bk = col ? b->stride[0] : b->stride[b->ndim - 2];
    p->bn = col ? 1 : b->stride[b->ndim - 1];
    p->batch_dims = y->ndim - !row - !col;
    if (p->batch_dims > BATCH_DIMS) return "too many batch dims";
    for (int i = 0; i < p->batch_dims; i++) p->size[i] = y->size[i];
    batch_strides(a, p, p->sa);
    batch_strides(b, p, p->sb);
    return NULL;
}

static const char *linear_product(const ddp_call *c, product *p) {
    const ddp_meta *x = &c->in[0]->m, *w = &c->in[1]->m;
    memset(p, 0, sizeof *p);
    p->M = x->ndim > 1 ? x->size[x->ndim - 2] : 1;
    p->K = w->size[1];
    p->N = w->size[0];
    p->am = x->ndim > 1 ? x->stride[x->ndim - 2] : p->K;
    p->ak = x->stride[x->ndim - 1];
    p->bk = w->stride[1];
    p->bn = w->stride[0];
    p->bias = c->in[2] != NULL;
    p->batch_dims = x->ndim > 2 ? x->ndim - 2 : 0;
    for (int i = 0; i < p->batch_dims; i++) p->size[i] = x->size[i];
    batch_strides(x, p, p->sa);
    return NULL;
}

static const char *product_of(const ddp_call *c, product *p) {
    if (c->in[0]->m.dtype != DDP_F32) return "oneDNN is used for f32 only";
    if (c->out[0]->numel == 0 || c->in[0]->numel == 0) return "an empty tensor";
    ddp_meta y = c->out[0]->m;
    int64_t s = 1;
    for (int i = y.ndim - 1; i >= 0; s *= y.size[i--])
        if (y.size[i] != 1 && y.stride[i] != s) return "a result that is not row-major";
    const char *no = c->op->id == DDP_OP_linear ? linear_product(c, p) : matmul_product(c, p);
    if (no) return no;
    if (p->bias && p->N > 1 && c->in[2]->m.stride[0] != 1) return "a bias with a stride";
    merge_rows(p);
    if (!gemm_able(p->M, p->K, &p->am, &p->ak) || !gemm_able(p->K, p->N, &p->bk, &p->bn))
        return "a matrix without a unit stride";
    return NULL;
}

/* ---- the primitive ----------------------------------------------------------------------------------------------- */

/* Batch dims where the operand is broadcast get size 1. */
static bool operand(dnnl_memory_desc_t *md, const product *p, const int64_t *batch, int64_t rows, int64_t cols,
                    int64_t r, int64_t c) {
    int n = (int)p->batch_dims;
    int64_t size[DDP_MAX_DIM], stride[DDP_MAX_DIM], dense = rows * cols;
    size[n] = rows;
    size[n + 1] = cols;
    stride[n] = r;
    stride[n + 1] = c;
    for (int i = n - 1; i >= 0; i--) {
        size[i] = batch[i] ? p->size[i] : 1;
        stride[i] = batch[i] ? batch[i] : dense;
        dense = stride[i] * size[i];
    }
    return dnn_md(md, n + 2, size, stride);
}

static const char *build(dnn_entry *e, const void *ctx) {
    static const char *const no = "oneDNN does not take these strides";
    const product *p = ctx;
    dnnl_memory_desc_t a, b, y, bias;
    int64_t dense[BATCH_DIMS + 1], ones[DDP_MAX_DIM], stride[DDP_MAX_DIM];
    int n = (int)p->batch_dims;
    dense[n] = p->M * p->N;
    for (int i = n - 1; i >= 0; i--) dense[i] = dense[i + 1] * p->size[i];
    for (int i = 0; i < n + 2; i++) {
        ones[i] = 1;
        stride[i] = p->N;
    }
    ones[n + 1] = p->N;
    stride[n + 1] = 1;
    if (!operand(&a, p, p->sa, p->M, p->K, p->am, p->ak)) return no;
    if (!operand(&b, p, p->sb, p->K, p->N, p->bk, p->bn)) return no;
    if (!operand(&y, p, dense + 1, p->M, p->N, p->N, 1) || !dnn_md(&bias, n + 2, ones, stride)) return no;
    dnnl_matmul_desc_t d;
    if (dnnl_matmul_desc_init(&d, &a, &b, p->bias ? &bias : NULL, &y) != dnnl_success) return no;
    dnnl_primitive_desc_t pd = dnn_desc(&d, NULL);
    if (!pd) return no;
    if (dnn_is_reference(pd)) {
        dnnl_primitive_desc_destroy(pd);
        return no;
    }
    const dnn_use use[4] = {{DNNL_ARG_SRC, false, dnnl_query_src_md, 0, a},
                            {DNNL_ARG_WEIGHTS, false, dnnl_query_weights_md, 0, b},
                            {DNNL_ARG_DST, true, dnnl_query_dst_md, 0, y},
                            {DNNL_ARG_BIAS, false, dnnl_query_weights_md, 1, bias}};
    return dnn_entry_make(e, pd, p->bias ? 4 : 3, use);
}

/* ---- sgemm ------------------------------------------------------------------------------------------------------- */

static int one_sgemm(const product *p, const float *a, const float *b, const float *bias, float *y) {
    bool ta = !(p->ak == 1 && p->am >= p->K), tb = !(p->bn == 1 && p->bk >= p->N);
    for (int64_t m = 0; bias && m < p->M; m++) memcpy(y + m * p->N, bias, (size_t)p->N * sizeof *y);
    dnnl_status_t st = dnnl_sgemm(ta ? 'T' : 'N', tb ? 'T' : 'N', p->M, p->N, p->K, 1, a, ta ? p->ak : p->am, b,
                                  tb ? p->bn : p->bk, bias ? 1 : 0, y, p->N);
    return st == dnnl_success ? 0 : ddp__fail(DDP_ENOSUP, "matmul: oneDNN's sgemm failed");
}

static int each_sgemm(const product *p, const float *a, const float *b, const float *bias, float *y) {
    int64_t batches = 1;
    dnn_threads();
    for (int i = 0; i < p->batch_dims; i++) batches *= p->size[i];
    for (int64_t t = 0; t < batches; t++) {
        int64_t ai = 0, bi = 0, left = t;
        for (int i = (int)p->batch_dims - 1; i >= 0; left /= p->size[i--]) {
            ai += left % p->size[i] * p->sa[i];
            bi += left % p->size[i] * p->sb[i];
        }
        int st = one_sgemm(p, a + ai, b + bi, bias, y + t * p->M * p->N);
        if (st < 0) return st;
    }
    return 0;
}

/* Measured: sgemm wins with b as it lies, and for one row. */
static bool sgemm_pays(const product *p) { return p->batch_dims == 0 && !p->bias && (p->M == 1 || p->bn == 1); }

/* ---- kernels ----------------------------------------------------------------------------------------------------- */

static const char *reject(const ddp_call *c) {
    product p;
    return product_of(c, &p);
}

static int run(const ddp_call *c) {
    product p;
    const char *no = product_of(c, &p);
    if (no) return ddp__fail(DDP_ENOSUP, "%s: %s", c->op->name, no);
    float *a = dnn_ptr(c->in[0]), *b = dnn_ptr(c->in[1]), *y = dnn_ptr(c->out[0]);
    float *bias = p.bias ? dnn_ptr(c->in[2]) : NULL;
    if (sgemm_pays(&p)) return each_sgemm(&p, a, b, bias, y);
    dnn_key k;
    dnn_key_start(&k, DDP_OP_matmul);
    dnn_key_add(&k, (int)(sizeof p / sizeof(int64_t)), (const int64_t *)(const void *)&p);
    const dnn_entry *e = dnn_find(&k, build, &p);
    if (!e) return ddp__pending();
    if (e->why) return each_sgemm(&p, a, b, bias, y);
    return dnn_run(e, c->op->name, (void *[]){a, b, y, bias});
}

const ddp_kernel dnn_matmul[] = {{"matmul.onednn", reject, run}, {NULL, NULL, NULL}};
const ddp_kernel dnn_linear[] = {{"linear.onednn", reject, run}, {NULL, NULL, NULL}};
