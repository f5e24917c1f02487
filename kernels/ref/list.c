/* list.c -- the reference list: complete by construction, since an op without its kernel does not link. */
#include "../../core/op/registry.h"

#define OP(name, sig, flags) extern const ddp_kernel ddp__ref_##name[];
#include "../../core/op/ops.def"
#undef OP

#define OP(name, sig, flags) [DDP_OP_##name] = ddp__ref_##name,
static const ddp_kernel *by_op[DDP_OP_COUNT] = {
#include "../../core/op/ops.def"
};
#undef OP

const ddp_kernel_list ddp__kernels_ref = {"ref", by_op};
