/* ops.h -- what the rules of ops share. */
#ifndef DDP_OPS_RULES_H
#define DDP_OPS_RULES_H

#include "../op/op.h"

/* g summed over the dims where a tensor of meta m was broadcast to g's shape; g itself where it was not. */
DDP_LOCAL ddp_tensor *ddp__sum_to(ddp_tensor *g, const ddp_meta *m);

/* x in another shape: a view where the strides allow, else a copy. A new reference (the scope's in a scope). */
DDP_LOCAL ddp_tensor *ddp__reshape(ddp_tensor *x, int ndim, const int64_t *size);
/* Can m be seen as `size` (no -1 in it) without a copy? Then its strides, when asked for. */
DDP_LOCAL bool ddp__view_fits(const ddp_meta *m, int ndim, const int64_t *size, int64_t *stride);

/* x in the dtype that arithmetic on it is done in (f32 for 16-bit x): x itself where it has that. NULL gives NULL. */
DDP_LOCAL ddp_tensor *ddp__widened(ddp_tensor *x);
/* x in `dtype`: x itself where it has that. NULL gives NULL. */
DDP_LOCAL ddp_tensor *ddp__narrowed(ddp_tensor *x, ddp_dtype dtype);

/* The gradient of a fused op by re-running its unfused chain: for second gradients. `chain` computes the op's outputs
 * from inputs by simple ops (NULL entries: outputs without gradient). Reads v->in (all that chain reads must be saved). */
typedef int (*ddp_chain_fn)(ddp_vjp *v, ddp_tensor *const *in, ddp_tensor **out);
DDP_LOCAL int ddp__vjp_by_chain(ddp_vjp *v, ddp_chain_fn chain);

/* linear's inference (matmul.c): in[0..3) are x, w, bias. */
DDP_LOCAL int ddp__linear_infer(const ddp_call *c, ddp_meta *out);
/* conv2d's inference (conv.c) but for bias: in[0], in[1] are x and w; attributes begin as conv2d's. */
DDP_LOCAL int ddp__conv2d_infer(const ddp_call *c, ddp_meta *out);
/* 2 N K C/groups R S Ho Wo. */
DDP_LOCAL double ddp__conv2d_flops(const ddp_call *c);
/* in[i] (or NULL) is [channels], as in[of] has them: of the statistics' dtype (f32 where in[0] is f16 or bf16) or, where `own` is
 * set, of in[0]'s (norm.c). */
DDP_LOCAL int ddp__need_channels(const ddp_call *c, int i, int of, int64_t channels, bool own);
/* An eps that is at least 0 (norm.c). */
DDP_LOCAL int ddp__need_eps(const ddp_call *c, double eps);
/* in[i] (or NULL), a residual, has y's sizes and dtype. */
DDP_LOCAL int ddp__need_residual(const ddp_call *c, int i, const ddp_meta *y);
/* Inference of ops that make tensors: checks dtype, device and sizes. */
DDP_LOCAL int ddp__new_tensor(const ddp_call *c, int64_t dtype, int64_t device, int ndim, const int64_t *size,
                              ddp_meta *out);

/* Sizes of a window op along one dim: (in + 2*pad - dilation*(k-1) - 1)/stride + 1 rounded down; < 1 when it exceeds. */
static inline int64_t ddp__window_out(int64_t in, int64_t k, int64_t stride, int64_t pad, int64_t dilation) {
    int64_t room = in + 2 * pad - dilation * (k - 1) - 1;
    return room < 0 ? 0 : room / stride + 1;
}

#endif
