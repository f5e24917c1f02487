/* half.c -- runs of f16 and bf16 to f32 and back. */
#include <string.h>

#include "cpu.h"

CPU_INLINE void widen(ddp_dtype d, const void *p, int64_t i, float *to, int64_t n) {
    int64_t k = 0;
    for (; k + CPU_W <= n; k += CPU_W) cpu_store(DDP_F32, to, k, cpu_load(d, p, i + k));
    for (; k < n; k++) to[k] = cpu_get(d, p, i + k);
}

void cpu_widen(ddp_dtype d, const void *p, int64_t i, float *to, int64_t n) {
    if (d == DDP_BF16) widen(DDP_BF16, p, i, to, n);
    else if (d == DDP_F16) widen(DDP_F16, p, i, to, n);
    else memcpy(to, (const float *)p + i, (size_t)n * sizeof *to);
}

CPU_INLINE void narrow(ddp_dtype d, const float *from, void *p, int64_t i, int64_t n) {
    int64_t k = 0;
    for (; k + CPU_W <= n; k += CPU_W) cpu_store(d, p, i + k, cpu_load(DDP_F32, from, k));
    for (; k < n; k++) cpu_put(d, p, i + k, from[k]);
}

void cpu_narrow(ddp_dtype d, const float *from, void *p, int64_t i, int64_t n) {
    if (d == DDP_BF16) narrow(DDP_BF16, from, p, i, n);
    else if (d == DDP_F16) narrow(DDP_F16, from, p, i, n);
    else if (from != (float *)p + i) memcpy((float *)p + i, from, (size_t)n * sizeof *from);
}
