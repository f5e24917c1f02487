/* conv_wino.h -- what both Winograd convolutions share: gathered pixels, taps, and the matrix products at each point. */
#ifndef DDP_CPU_CONV_WINO_H
#define DDP_CPU_CONV_WINO_H

#include "conv.h"

/* Interpolation points are +-1/sqrt(2), +-sqrt(2), infinity and, for stride 1, 0. */
static const float SQ2 = 1.41421356237309505f, HALF_SQ2 = 0.70710678118654752f;

/* Pointers to size x size pixels of an image [H, W] of rows of `bytes`, from (h, w) on; `outside` for those that are not. */
static inline void pixels(const char *image, int64_t H, int64_t W, int64_t bytes, int64_t h, int64_t w, int size,
                          const char *outside, const char **p) {
    for (int r = 0; r < size; r++)
        for (int s = 0; s < size; s++) {
            bool inside = h + r >= 0 && h + r < H && w + s >= 0 && w + s < W;
            p[r * size + s] = inside ? image + ((h + r) * W + w + s) * bytes : outside;
        }
}

/* raw[tap][i] = the taps of n weights `step` floats apart, turned around where `flip` is set; 0 beyond n. */
static inline void gather_taps(const float *w, int64_t step, int64_t n, bool flip, float raw[9][CPU_W]) {
    float *first = flip ? raw[8] : raw[0];
    int64_t next = flip ? -CPU_W : CPU_W, i = 0;
    for (; i + 8 <= CPU_W && i + 8 <= n; i += 8) {
        cpu_transpose8(w + i * step, step, first + i, next);
        for (int64_t j = i; j < i + 8; j++) first[8 * next + j] = w[j * step + 8];
    }
    for (; i < CPU_W; i++)
        for (int tap = 0; tap < 9; tap++) first[tap * next + i] = i < n ? w[i * step + tap] : 0;
}

/* m[rows][CONV_NR] = v[rows][C] u[C][CONV_NR]. */
CPU_INLINE void product(int rows, const float *v, int64_t vs, const float *u, int64_t C, float *m) {
    cpu_vec acc[CONV_MR][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) acc[i][0] = acc[i][1] = (cpu_vec){0};
    for (int64_t c = 0; c < C; c++, u += CONV_NR) {
        cpu_vec a = *(const cpu_vec *)u, b = *(const cpu_vec *)(u + CPU_W);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            float x = v[i * vs + c];
            acc[i][0] += x * a;
            acc[i][1] += x * b;
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        *(cpu_vec *)(m + i * CONV_NR) = acc[i][0];
        *(cpu_vec *)(m + i * CONV_NR + CPU_W) = acc[i][1];
    }
}

static inline void products(int64_t rows, const float *v, int64_t vs, const float *u, int64_t C, float *m) {
    int64_t i = 0;
    for (; i + CONV_MR <= rows; i += CONV_MR) product(CONV_MR, v + i * vs, vs, u, C, m + i * CONV_NR);
    for (; i + 4 <= rows; i += 4) product(4, v + i * vs, vs, u, C, m + i * CONV_NR);
    for (; i < rows; i++) product(1, v + i * vs, vs, u, C, m + i * CONV_NR);
}

/* Rows of a register tile of the gradient. */
#if defined(__AVX512F__)
enum { BACK_ROWS = 8 };
#else
enum { BACK_ROWS = 4 };
#endif

/* u[rows][v vectors] (+)= v[T][rows]^T z[T][v vectors]. */
CPU_INLINE void back_product(int rows, int vecs, const float *v, int64_t vs, const float *z, int64_t zs, int64_t T,
                             float *u, int64_t us, bool begin) {
    cpu_vec acc[BACK_ROWS][2];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vecs; j++) acc[i][j] = begin ? (cpu_vec){0} : *(const cpu_vec *)(u + i * us + j * CPU_W);
    for (int64_t t = 0; t < T; t++, v += vs, z += zs) {
        cpu_vec a[2];
        for (int j = 0; j < vecs; j++) a[j] = *(const cpu_vec *)(z + j * CPU_W);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < vecs; j++) acc[i][j] += v[i] * a[j];
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vecs; j++) *(cpu_vec *)(u + i * us + j * CPU_W) = acc[i][j];
}

/* Columns k .. k + CONV_NR (or one vector, where kp ends) of u[Cp][kp] (+)= v[T][Cp]^T z[T][kp]; Cp a multiple of
 * BACK_ROWS. Tiles go in blocks whose panel of z stays in L1. */
static inline void back_panel(const float *v, int64_t Cp, const float *z, int64_t kp, int64_t k, int64_t T, float *u,
                              bool begin) {
    enum { BLOCK = 128 };
    for (int64_t t = 0; t < T; t += BLOCK, begin = false)
        for (int64_t c = 0; c < Cp; c += BACK_ROWS) {
            int64_t n = T - t < BLOCK ? T - t : BLOCK;
            const float *vt = v + t * Cp + c, *zt = z + t * kp + k;
            if (k + CONV_NR <= kp) back_product(BACK_ROWS, 2, vt, Cp, zt, kp, n, u + c * kp + k, kp, begin);
            else back_product(BACK_ROWS, 1, vt, Cp, zt, kp, n, u + c * kp + k, kp, begin);
        }
}

/* dw[k ..][c] of up to CPU_W channels k from their nine taps. */
static inline void put_taps(ddp_tensor *dw, int64_t k, int64_t n, int64_t C, int64_t c, const cpu_vec *o) {
    float row[CPU_W][16]; /* the taps of each channel side by side */
    const float *taps = (const float *)(const void *)o;
    for (int i = 0; i < CPU_W; i += 8) cpu_transpose8(taps + i, CPU_W, row[i], 16);
    for (int i = 0; i < CPU_W; i++) row[i][8] = o[8][i];
    for (int64_t i = 0; i < n; i++) {
        int64_t at = ((k + i) * C + c) * 9;
        if (dw->m.dtype == DDP_F32) memcpy(cpu_f32(dw) + at, row[i], 9 * sizeof(float));
        else cpu_narrow(dw->m.dtype, row[i], ddp__ptr(dw), at, 9);
    }
}

#endif
