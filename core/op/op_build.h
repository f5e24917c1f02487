/* op_build.h -- what the generated op functions stand on. */
#ifndef DDP_OP_BUILD_H
#define DDP_OP_BUILD_H

#include "op.h"

/* Copies n values into a list attribute; n < 0 means none. */
DDP_LOCAL int ddp__ints_set(const char *op, const char *attr, ddp_ints *out, int n, const int64_t *v);
/* lists[0..k) of n tensors each, one after the other; the caller frees. NULL with the error set. */
DDP_LOCAL ddp_tensor **ddp__join_lists(int k, int n, ddp_tensor *const *const *lists);

#endif
