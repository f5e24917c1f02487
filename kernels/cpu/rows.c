/* rows.c -- what softmax, losses and sums do along a row, 16-bit ones widened block by block. Whole vectors all through: the last, short one is
 * filled up in a buffer. Long sums are added in f32 over blocks, in double over those. */
#include <math.h>
#include <string.h>

#include "vectors.h"

enum { BLOCK = 1024 };

float cpu_row_max(ddp_dtype d, const void *x, int64_t i, int64_t n) {
    float top = -INFINITY;
    if (n >= CPU_W) {
        if (d == DDP_BF16) return span_max(DDP_BF16, x, i, n, 0);
        return d == DDP_F16 ? span_max(DDP_F16, x, i, n, 0) : span_max(DDP_F32, x, i, n, 0);
    }
    for (int64_t k = 0; k < n; k++) {
        float v = cpu_get(d, x, i + k);
        if (v > top || v != v) top = v; /* NaN stays: nothing is larger */
    }
    return top;
}

CPU_INLINE float sum_of(cpu_vec v) {
    v += crossed(v, 1);
    v += crossed(v, 2);
    if (CPU_W > 4) v += crossed(v, 4);
    if (CPU_W > 8) v += crossed(v, 8);
    return v[0];
}
/* y[v] = e^(x - shift) for V vectors from place i, y NULL: not kept; their sums go into s[v]. */
CPU_INLINE void exp_span(ddp_dtype d, const void *x, int64_t i, float shift, float *y, int V, cpu_vec *s) {
    for (int v = 0; v < V; v++) {
        cpu_vec e = exp_of(cpu_load(d, x, i + v * CPU_W) - shift);
        if (y) cpu_store(DDP_F32, y, v * CPU_W, e);
        s[v] += e;
    }
}
/* n a multiple of CPU_W, at most BLOCK. */
CPU_INLINE float exp_block(ddp_dtype d, const void *x, int64_t i, float shift, float *y, int64_t n) {
    cpu_vec s[4] = {{0}};
    int64_t k = 0;
    for (; k + 4 * CPU_W <= n; k += 4 * CPU_W) exp_span(d, x, i + k, shift, y ? y + k : NULL, 4, s);
    for (; k < n; k += CPU_W) exp_span(d, x, i + k, shift, y ? y + k : NULL, 1, s);
    return sum_of((s[0] + s[1]) + (s[2] + s[3]));
}
CPU_INLINE double row_exp(ddp_dtype d, const void *x, int64_t i, float shift, float *y, int64_t n) {
    float last[CPU_W];
    double sum = 0;
    int64_t whole = n & ~(int64_t)(CPU_W - 1);
    for (int64_t at = 0, m; at < whole; at += m) {
        m = whole - at < BLOCK ? whole - at : BLOCK;
        sum += y ? exp_block(d, x, i + at, shift, y + at, m) : exp_block(d, x, i + at, shift, NULL, m);
    }
    if (whole == n) return sum;
    cpu_store(DDP_F32, last, 0, all_of(-INFINITY)); /* adds 0 */
    if (d == DDP_F32) memcpy(last, (const float *)x + i + whole, (size_t)(n - whole) * sizeof *last);
    else
        for (int k = 0; k < n - whole; k++) last[k] = cpu_get(d, x, i + whole + k);
    cpu_vec e = exp_of(cpu_load(DDP_F32, last, 0) - shift);
    cpu_store(DDP_F32, last, 0, e);
    if (y) memcpy(y + whole, last, (size_t)(n - whole) * sizeof *last);
    return sum + sum_of(e);
}
double cpu_row_exp(ddp_dtype d, const void *x, int64_t i, float shift, float *y, int64_t n) {
    if (d == DDP_BF16) return row_exp(DDP_BF16, x, i, shift, y, n);
    return d == DDP_F16 ? row_exp(DDP_F16, x, i, shift, y, n) : row_exp(DDP_F32, x, i, shift, y, n);
}

double cpu_row_sum(ddp_dtype d, const void *x, int64_t i, int64_t stride, int64_t n) {
    float buffer[BLOCK];
    double sum = 0;
    for (int64_t at = 0; at < n; at += BLOCK) {
        int64_t m = n - at < BLOCK ? n - at : BLOCK;
        if (stride == 1) {
            const float *line = cpu_source(d, x, i + at, buffer, m);
            float s = 0;
#pragma omp simd reduction(+ : s)
            for (int64_t k = 0; k < m; k++) s += line[k];
            sum += s;
        } else
            for (int64_t k = 0; k < m; k++) sum += cpu_get(d, x, i + (at + k) * stride);
    }
    return sum;
}
