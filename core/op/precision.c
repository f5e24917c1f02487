/* precision.c -- how exact f32 products are, and whether results may depend on how work is shared: kernels ask here. */
#include <stdatomic.h>

#include "op.h"

static atomic_int precision = DDP_F32_HIGHEST;
static atomic_bool deterministic;

int ddp_set_float32_matmul_precision(int level) {
    if (ddp__pending()) return ddp__pending();
    if (level < DDP_F32_EXACT || level > DDP_F32_HIGH)
        return ddp__fail(DDP_EINVAL, "set_float32_matmul_precision: no level %d", level);
    atomic_store(&precision, level);
    return 0;
}

int ddp_float32_matmul_precision(void) { return atomic_load_explicit(&precision, memory_order_relaxed); }

void ddp_set_deterministic(int on) { atomic_store(&deterministic, on != 0); }

int ddp_is_deterministic(void) { return atomic_load_explicit(&deterministic, memory_order_relaxed); }
