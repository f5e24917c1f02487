/* attention.c -- runs attention's graphs. */
#include "attention.h"

#include <string.h>

#include "plan.h"

static const float one = 1, low = -1e20f;

/* A way is a part of the key: the op is one. */
static void key_of(const ddp_call *c, const attention *a, int64_t backward, plan_key *k) {
    plan_key_start(k, c);
    plan_key_add(k, 1, &backward);
    plan_key_add(k, (int)(sizeof *a / sizeof(int64_t)), (const int64_t *)(const void *)a);
}

const char *ddp__cudnn_attention_reject(const ddp_call *c, const attention *a) {
    plan_key k;
    if (!ddp__is_half((ddp_dtype)a->dtype)) return "cuDNN's attention is for f16 and bf16";
    if (a->dim % 8) return "cuDNN's attention takes heads of a multiple of 8";
    if (a->q[3] != 1 || a->k[3] != 1 || a->v[3] != 1 || a->o[3] != 1) return "a last dim whose stride is not 1";
    key_of(c, a, 0, &k);
    const char *no = plan_missing(c, &k, attention_forward_graph, a);
    if (no) return no;
    key_of(c, a, 1, &k);
    return plan_missing(c, &k, attention_backward_graph, a);
}

/* A const pointer in a variant pack: cuDNN reads it only. */
#define IN(p) ((void *)(uintptr_t)(p))

int ddp__cudnn_attention(const ddp_call *c, const attention *a, double scale, const void *q, const void *k,
                         const void *v, void *o, float *stats) {
    static const int64_t uid[] = {ATT_Q, ATT_K, ATT_V, ATT_O, ATT_STATS, ATT_SCALE, ATT_LOW};
    float by = (float)scale;
    void *const ptr[] = {IN(q), IN(k), IN(v), o, stats, &by, IN(&low)};
    plan_key key;
    key_of(c, a, 0, &key);
    return plan_run(c, &key, attention_forward_graph, a, a->causal ? 7 : 6, uid, ptr);
}

int ddp__cudnn_attention_grad(const ddp_call *c, const attention *a, double scale, const void *q, const void *k,
                              const void *v, const void *o, const float *stats, const void *g, void *dq, void *dk,
                              void *dv) {
    static const int64_t uid[] = {ATT_Q,  ATT_K,     ATT_V,  ATT_O,  ATT_STATS, ATT_DO,  ATT_SUM,
                                  ATT_DV, ATT_TOTAL, ATT_DQ, ATT_DK, ATT_SCALE, ATT_ONE, ATT_LOW};
    const ddp_gpu *gpu = ddp__gpu_of(c);
    int64_t rows = a->batch * a->heads * a->queries;
    size_t sum_bytes = (size_t)rows * sizeof(float), total_bytes = sum_bytes * (size_t)a->dim;
    float by = (float)scale;
    plan_key key;
    if (!gpu) return ddp__pending();
    void *sum = ddp__cuda_scratch_take(c, sum_bytes), *total = sum ? ddp__cuda_scratch_take(c, total_bytes) : NULL;
    int st = total ? 0 : ddp__pending();
    if (st == 0) /* dq is added up there */
        st = ddp__cuda_check(ddp__cuda.cudaMemsetAsync(total, 0, total_bytes, gpu->compute), c->op->name);
    if (st == 0) {
        void *const ptr[] = {IN(q), IN(k), IN(v), IN(o), IN(stats), IN(g),    sum,
                             dv,    total, dq,    dk,    &by,       IN(&one), IN(&low)};
        key_of(c, a, 1, &key);
        st = plan_run(c, &key, attention_backward_graph, a, a->causal ? 14 : 13, uid, ptr);
    }
    if (total) ddp__cuda_scratch_give(c, total, total_bytes);
    if (sum) ddp__cuda_scratch_give(c, sum, sum_bytes);
    return st;
}
