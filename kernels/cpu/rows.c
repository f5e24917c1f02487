/* rows.c -- what softmax, losses and sums do along a row, 16-bit ones widened block by block. Whole vectors all through: the last, short one is
 * filled up in a buffer. Long sums are added in f32 over blocks, in double over those. */
#include <math.h>
#include <string.h>

#include "cpu.h"

#pragma omp declare simd notinbranch
extern float expf(float);

enum { BLOCK = 1024, WIDE = 16 };

static float max_of(const float *x, int64_t n) {
    float top = -INFINITY, nan = 0;
#pragma omp simd reduction(max : top) reduction(+ : nan)
    for (int64_t i = 0; i < n; i++) {
        top = x[i] > top ? x[i] : top;
        nan += x[i] != x[i] ? 1.0f : 0.0f;
    }
    return nan > 0 ? NAN : top;
}

float cpu_row_max(ddp_dtype d, const void *x, int64_t i, int64_t n) {
    float top = -INFINITY, buffer[BLOCK];
    if (n <= WIDE) {
        for (int64_t k = 0; k < n; k++) {
            float v = cpu_get(d, x, i + k);
            if (v > top || v != v) top = v; /* NaN stays: nothing is larger */
        }
        return top;
    }
    if (d == DDP_F32) return max_of((const float *)x + i, n);
    for (int64_t at = 0; at < n; at += BLOCK) {
        int64_t m = n - at < BLOCK ? n - at : BLOCK;
        float v = max_of(cpu_source(d, x, i + at, buffer, m), m);
        if (v > top || v != v) top = v;
    }
    return top;
}

/* n a multiple of WIDE, at most BLOCK. */
static float exp_block(const float *x, float shift, float *y, int64_t n) {
    float s = 0;
#pragma omp simd reduction(+ : s)
    for (int64_t i = 0; i < n; i++) {
        float e = expf(x[i] - shift);
        y[i] = e;
        s += e;
    }
    return s;
}

double cpu_row_exp(ddp_dtype d, const void *x, int64_t i, float shift, float *y, int64_t n) {
    float buffer[BLOCK], wide[BLOCK];
    double sum = 0;
    int64_t whole = n & ~(int64_t)(WIDE - 1);
    for (int64_t at = 0; at < whole; at += BLOCK) {
        int64_t m = whole - at < BLOCK ? whole - at : BLOCK;
        sum += exp_block(cpu_source(d, x, i + at, wide, m), shift, y ? y + at : buffer, m);
    }
    if (whole == n) return sum;
    for (int k = 0; k < WIDE; k++) buffer[k] = -INFINITY;
    for (int k = 0; k < n - whole; k++) buffer[k] = cpu_get(d, x, i + whole + k);
    exp_block(buffer, shift, buffer, WIDE);
    for (int k = 0; k < n - whole; k++) {
        sum += buffer[k];
        if (y) y[whole + k] = buffer[k];
    }
    return sum;
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
