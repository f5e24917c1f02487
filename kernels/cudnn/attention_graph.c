/* attention_graph.c -- attention as the chains of operations that cuDNN knows to be one kernel.
 *
 * Forward: S = scale q k^T, masked; m = its rows' maxima, e = exp(S - m), z = their sums; o = (e / z) v, stats = m + log z.
 * Backward: P = exp(S - stats), dv = P^T do, dP = do v^T, dS = scale P (dP - rowsum(do o)), dq = dS k, dk = dS^T q. */
#include "attention.h"

#include <string.h>

#define F32 CUDNN_DATA_FLOAT

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

/* [B, H, a, b] with strides; uid 0: virtual. */
static int strided(cg_graph *g, const attention *t, int64_t uid, cudnnDataType_t type, int64_t a, int64_t b,
                   const int64_t *s, bool reordered) {
    cg_spec spec = {.uid = uid,
                    .type = type,
                    .n = 4,
                    .size = {t->batch, t->heads, a, b},
                    .stride = {s[0], s[1], s[2], s[3]},
                    .align = uid ? t->align : 0,
                    .reordered = reordered};
    return cg_tensor(g, &spec);
}

/* Row-major. */
static int rows(cg_graph *g, const attention *t, int64_t uid, cudnnDataType_t type, int64_t a, int64_t b,
                bool reordered) {
    const int64_t s[4] = {t->heads * a * b, a * b, b, 1};
    return strided(g, t, uid, type, a, b, s, reordered);
}

/* The same memory with its last two dims exchanged: [B, H, b, a] of strides s of [B, H, a, b]. */
static int turned(cg_graph *g, const attention *t, int64_t uid, cudnnDataType_t type, int64_t a, int64_t b,
                  const int64_t *s) {
    const int64_t by[4] = {s[0], s[1], s[3], s[2]};
    return strided(g, t, uid, type, b, a, by, false);
}

static int scores(cg_graph *g, const attention *t) { return rows(g, t, 0, F32, t->queries, t->keys, false); }
static int row_of(cg_graph *g, const attention *t, int64_t uid) { return rows(g, t, uid, F32, t->queries, 1, false); }

/* A virtual result of mode(x, b). */
static int point(cg_graph *g, const attention *t, cudnnPointwiseMode_t mode, int x, int b) {
    int y = scores(g, t);
    cg_pointwise(g, mode, x, b, CG_NONE, y);
    return y;
}

/* ---- what both ways begin with ----------------------------------------------------------------------------------- */

typedef struct inputs {
    int q, k_turned, v, o, scale, masked;
} inputs;

/* s where query i may see key j, else a number whose exponential is 0. */
static int masked(cg_graph *g, const attention *t, int s) {
    int i = scores(g, t), j = scores(g, t);
    int sees = rows(g, t, 0, CUDNN_DATA_BOOLEAN, t->queries, t->keys, false), y = scores(g, t);
    int low = cg_number(g, ATT_LOW, F32, 4);
    cg_index(g, s, 2, i);
    cg_index(g, s, 3, j);
    cg_pointwise(g, CUDNN_POINTWISE_CMP_GE, i, j, CG_NONE, sees);
    cg_pointwise(g, CUDNN_POINTWISE_BINARY_SELECT, s, low, sees, y);
    return y;
}

static inputs begin(cg_graph *g, const attention *t) {
    inputs in;
    cudnnDataType_t type = cg_type((ddp_dtype)t->dtype);
    in.q = strided(g, t, ATT_Q, type, t->queries, t->dim, t->q, false);
    in.k_turned = turned(g, t, ATT_K, type, t->keys, t->dim, t->k);
    in.o = strided(g, t, ATT_O, type, t->queries, t->dim, t->o, false);
    in.scale = cg_number(g, ATT_SCALE, F32, 4);
    return in;
}

static int scaled_scores(cg_graph *g, const attention *t, const inputs *in) {
    int s = scores(g, t);
    cg_matmul(g, in->q, in->k_turned, s);
    s = point(g, t, CUDNN_POINTWISE_MUL, s, in->scale);
    return t->causal ? masked(g, t, s) : s;
}

/* ---- the graphs -------------------------------------------------------------------------------------------------- */

int attention_forward_graph(cg_graph *g, const void *ctx) {
    const attention *t = ctx;
    cudnnDataType_t type = cg_type((ddp_dtype)t->dtype);
    inputs in = begin(g, t);
    int v = strided(g, t, ATT_V, type, t->keys, t->dim, t->v, false), s = scaled_scores(g, t, &in);
    int most = row_of(g, t, 0), sum = row_of(g, t, 0), log_sum = row_of(g, t, 0), stats = row_of(g, t, ATT_STATS);
    cg_reduce(g, CUDNN_REDUCE_TENSOR_MAX, s, most);
    int e = point(g, t, CUDNN_POINTWISE_EXP, point(g, t, CUDNN_POINTWISE_SUB, s, most), CG_NONE);
    cg_reduce(g, CUDNN_REDUCE_TENSOR_ADD, e, sum);
    cg_pointwise(g, CUDNN_POINTWISE_LOG, sum, CG_NONE, CG_NONE, log_sum);
    cg_pointwise(g, CUDNN_POINTWISE_ADD, most, log_sum, CG_NONE, stats);
    int p = rows(g, t, 0, type, t->queries, t->keys, true);
    cg_pointwise(g, CUDNN_POINTWISE_DIV, e, sum, CG_NONE, p);
    cg_matmul(g, p, v, in.o);
    return g->status;
}

/* P, in f32 and, as tensor cores read it, in the tensors' type; dv from the latter. */
static int probabilities(cg_graph *g, const attention *t, int s, int stats, int d_o) {
    cudnnDataType_t type = cg_type((ddp_dtype)t->dtype);
    int64_t sq = t->queries, sk = t->keys;
    const int64_t by_row[4] = {t->heads * sq * sk, sq * sk, sk, 1};
    int p = rows(g, t, 0, F32, sq, sk, true), narrow = rows(g, t, 0, type, sq, sk, true);
    cg_pointwise(g, CUDNN_POINTWISE_EXP, point(g, t, CUDNN_POINTWISE_SUB, s, stats), CG_NONE, CG_NONE, p);
    cg_pointwise(g, CUDNN_POINTWISE_IDENTITY, p, CG_NONE, CG_NONE, narrow);
    int p_turned = turned(g, t, 0, type, sq, sk, by_row), dv = strided(g, t, ATT_DV, type, sk, t->dim, t->v, false);
    cg_reshape(g, narrow, p_turned);
    cg_matmul(g, p_turned, d_o, dv);
    return p;
}

/* dq and dk from dS. dq is added up in memory of its own, in f32. */
static void grad_of_scores(cg_graph *g, const attention *t, const inputs *in, int ds) {
    cudnnDataType_t type = cg_type((ddp_dtype)t->dtype);
    int64_t sq = t->queries, sk = t->keys;
    const int64_t by_row[4] = {t->heads * sq * sk, sq * sk, sk, 1};
    const int64_t total_stride[4] = {t->heads * sq * t->dim, t->dim, t->heads * t->dim, 1};
    int k = strided(g, t, 0, type, sk, t->dim, t->k, false);
    int total = strided(g, t, ATT_TOTAL, F32, sq, t->dim, total_stride, true);
    int dq = strided(g, t, ATT_DQ, type, sq, t->dim, t->q, false),
        dk = strided(g, t, ATT_DK, type, sk, t->dim, t->k, false);
    cg_reshape(g, in->k_turned, k);
    cg_matmul(g, ds, k, total);
    int ds_turned = turned(g, t, 0, F32, sq, sk, by_row);
    cg_reshape(g, ds, ds_turned);
    cg_matmul(g, ds_turned, in->q, dk);
    cg_pointwise(g, CUDNN_POINTWISE_IDENTITY, total, CG_NONE, CG_NONE, dq);
}

int attention_backward_graph(cg_graph *g, const void *ctx) {
    const attention *t = ctx;
    cudnnDataType_t type = cg_type((ddp_dtype)t->dtype);
    inputs in = begin(g, t);
    int d_o = strided(g, t, ATT_DO, type, t->queries, t->dim, t->o, false);
    int v_turned = turned(g, t, ATT_V, type, t->keys, t->dim, t->v), stats = row_of(g, t, ATT_STATS);
    int product = strided(g, t, 0, F32, t->queries, t->dim, t->o, false), sum = row_of(g, t, 0);
    int one = cg_number(g, ATT_ONE, F32, 4), row_sum = row_of(g, t, ATT_SUM);
    cg_pointwise(g, CUDNN_POINTWISE_MUL, d_o, in.o, CG_NONE, product);
    cg_reduce(g, CUDNN_REDUCE_TENSOR_ADD, product, sum);
    cg_pointwise(g, CUDNN_POINTWISE_MUL, sum, one, CG_NONE, row_sum);
    int p = probabilities(g, t, scaled_scores(g, t, &in), stats, d_o), dp = scores(g, t);
    cg_matmul(g, d_o, v_turned, dp);
    int ds = point(g, t, CUDNN_POINTWISE_SUB, dp, row_sum);
    ds = point(g, t, CUDNN_POINTWISE_MUL, ds, p);
    ds = point(g, t, CUDNN_POINTWISE_MUL, ds, in.scale);
    grad_of_scores(g, t, &in, ds);
    return g->status;
}
