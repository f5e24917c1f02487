/* rows.c -- what softmax, losses and sums do along a row of floats. Whole vectors all through: the last, short one is
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

float cpu_row_max(const float *x, int64_t n) {
    if (n > WIDE) return max_of(x, n);
    float top = -INFINITY;
    for (int64_t i = 0; i < n; i++)
        if (x[i] > top || x[i] != x[i]) top = x[i]; /* NaN stays: nothing is larger */
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

double cpu_row_exp(const float *x, float shift, float *y, int64_t n) {
    float buffer[BLOCK];
    double sum = 0;
    int64_t whole = n & ~(int64_t)(WIDE - 1);
    for (int64_t at = 0; at < whole; at += BLOCK)
        sum += exp_block(x + at, shift, y ? y + at : buffer, whole - at < BLOCK ? whole - at : BLOCK);
    if (whole == n) return sum;
    for (int i = 0; i < WIDE; i++) buffer[i] = -INFINITY;
    for (int i = 0; i < n - whole; i++) buffer[i] = x[whole + i];
    exp_block(buffer, shift, buffer, WIDE);
    for (int i = 0; i < n - whole; i++) {
        sum += buffer[i];
        if (y) y[whole + i] = buffer[i];
    }
    return sum;
}

double cpu_row_sum(const float *x, int64_t stride, int64_t n) {
    double sum = 0;
    for (int64_t at = 0; at < n; at += BLOCK) {
        int64_t m = n - at < BLOCK ? n - at : BLOCK;
        float s = 0;
        if (stride == 1) {
#pragma omp simd reduction(+ : s)
            for (int64_t i = 0; i < m; i++) s += x[at + i];
            sum += s;
        } else
            for (int64_t i = 0; i < m; i++) sum += x[(at + i) * stride];
    }
    return sum;
}
