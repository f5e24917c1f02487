/* rows.c -- the sum of a row, 16-bit ones widened vector by vector: in f32 over blocks, in double over those. */
#include "vectors.h"

enum { BLOCK = 1024, BESIDE = 4 };

/* n <= BLOCK neighbours from place i. */
CPU_INLINE float block_sum(ddp_dtype d, const void *x, int64_t i, int64_t n) {
    cpu_vec s[BESIDE] = {{0}};
    int64_t k = 0;
    for (; k + BESIDE * CPU_W <= n; k += BESIDE * CPU_W)
        for (int v = 0; v < BESIDE; v++) s[v] += cpu_load(d, x, i + k + v * CPU_W);
    for (; k + CPU_W <= n; k += CPU_W) s[0] += cpu_load(d, x, i + k);
    if (k < n) s[1] += load_some(d, x, i + k, n - k, 0);
    return lanes_sum((s[0] + s[1]) + (s[2] + s[3]));
}
CPU_INLINE double row_sum(ddp_dtype d, const void *x, int64_t i, int64_t n) {
    double sum = 0;
    for (int64_t at = 0; at < n; at += BLOCK) sum += block_sum(d, x, i + at, n - at < BLOCK ? n - at : BLOCK);
    return sum;
}

double cpu_row_sum(ddp_dtype d, const void *x, int64_t i, int64_t stride, int64_t n) {
    double sum = 0;
    if (stride != 1) {
        for (int64_t k = 0; k < n; k++) sum += cpu_get(d, x, i + k * stride);
        return sum;
    }
    if (d == DDP_BF16) return row_sum(DDP_BF16, x, i, n);
    return d == DDP_F16 ? row_sum(DDP_F16, x, i, n) : row_sum(DDP_F32, x, i, n);
}
