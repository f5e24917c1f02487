/* attention.h -- attention without its matrix of scores in memory (Dao et al. 2022), as graphs of cuDNN's. For the op that will come. */
#ifndef DDP_CUDNN_ATTENTION_H
#define DDP_CUDNN_ATTENTION_H

#include "graph.h"

/* Under which uids a run gets its tensors. TOTAL, SUM and ONE are the functions' own. */
enum {
    ATT_Q = 1,
    ATT_K,
    ATT_V,
    ATT_O,
    ATT_STATS,
    ATT_DO,
    ATT_SUM,
    ATT_DV,
    ATT_TOTAL,
    ATT_DQ,
    ATT_DK,
    ATT_SCALE,
    ATT_ONE,
    ATT_LOW
};

/* q [B, H, Sq, D], k and v [B, H, Sk, D], o as q: f16 or bf16, any strides whose last is 1.
 *   stats  [B, H, Sq, 1] f32, row-major: log of the sum of e^score over a row; what the gradient needs
 *   causal query i sees keys 0 to i
 * Words of a cache's key, as conv's. */
typedef struct attention {
    int64_t dtype, causal;
    int64_t batch, heads, queries, keys, dim;
    int64_t q[4], k[4], v[4], o[4]; /* strides, elements */
    int64_t align;                  /* of all their pointers, bytes */
} attention;

/* Operations of the forward and of its gradient (dq, dk, dv and do lie as q, k, v and o do); a status. */
int attention_forward_graph(cg_graph *g, const void *a);
int attention_backward_graph(cg_graph *g, const void *a);

/* NULL where cuDNN computes this on c's GPU, both ways; else why not. Then o (and stats) from q, k and v, and dq, dk and dv from all
 * of these and g. scale: what scores are multiplied by. Pointers of the device; queued on c's GPU. A status. */
DDP_LOCAL const char *ddp__cudnn_attention_reject(const ddp_call *c, const attention *a);
DDP_LOCAL int ddp__cudnn_attention(const ddp_call *c, const attention *a, double scale, const void *q, const void *k,
                                   const void *v, void *o, float *stats);
DDP_LOCAL int ddp__cudnn_attention_grad(const ddp_call *c, const attention *a, double scale, const void *q,
                                        const void *k, const void *v, const void *o, const float *stats, const void *g,
                                        void *dq, void *dk, void *dv);

#endif
