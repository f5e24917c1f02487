/* conv_wide.h -- a call of f16 or bf16 computed in f32. */
#ifndef DDP_CUDNN_CONV_WIDE_H
#define DDP_CUDNN_CONV_WIDE_H

#include "../../core/op/op.h"

/* What reject and run, which take f32, say and do to c with its half-wide tensors cast. */
const char *conv_wide_reject(const ddp_call *c, const char *(*reject)(const ddp_call *c));
int conv_wide_run(const ddp_call *c, int (*run)(const ddp_call *c));

#endif
