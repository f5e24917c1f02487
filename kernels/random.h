/* random.h -- what random ops draw, the same for every kernel. Element i (logical, row-major) of call k under key s takes
 * from Philox block philox(s, counter = (block, k)):
 *   f32: word i%4 of block i/4, 24 bits          f64: words 2(i%2), 2(i%2)+1 of block i/2, 53 bits
 * and normals come in pairs by Box-Muller from two neighbouring uniforms of that list: radius from the first (as 1 - u, so
 * that its logarithm is finite), angle from the second; the even element is the cosine, the odd one the sine. */
#ifndef DDP_KERNELS_RANDOM_H
#define DDP_KERNELS_RANDOM_H

#include <math.h>

#include "../core/tensor/tensor.h"

static inline void ddp__draw_f32(ddp_rng r, int64_t block, float u[4]) {
    uint32_t w[4];
    ddp__philox(r.key, (uint64_t)block, r.call, w);
    for (int k = 0; k < 4; k++) u[k] = ddp__unit_f32(w[k]);
}

static inline void ddp__draw_f64(ddp_rng r, int64_t block, double u[2]) {
    uint32_t w[4];
    ddp__philox(r.key, (uint64_t)block, r.call, w);
    u[0] = ddp__unit_f64(w[0], w[1]);
    u[1] = ddp__unit_f64(w[2], w[3]);
}

static inline void ddp__normal_f32(ddp_rng r, int64_t block, float n[4]) {
    float u[4];
    ddp__draw_f32(r, block, u);
    for (int k = 0; k < 4; k += 2) {
        float radius = sqrtf(-2 * logf(1 - u[k])), angle = 6.28318530717958647692f * u[k + 1];
        n[k] = radius * cosf(angle);
        n[k + 1] = radius * sinf(angle);
    }
}

static inline void ddp__normal_f64(ddp_rng r, int64_t block, double n[2]) {
    double u[2];
    ddp__draw_f64(r, block, u);
    double radius = sqrt(-2 * log(1 - u[0])), angle = 6.28318530717958647692 * u[1];
    n[0] = radius * cos(angle);
    n[1] = radius * sin(angle);
}

/* u in [0, 1) with as many bits as a dtype of 16 bits has, so that rounding does not make it 1; else u. */
static inline float ddp__unit_in(ddp_dtype d, float u) {
    if (d == DDP_BF16) return floorf(u * 0x1p8f) * 0x1p-8f;
    return d == DDP_F16 ? floorf(u * 0x1p11f) * 0x1p-11f : u;
}

/* A whole number in [0, n) from 64 bits of block i. */
static inline uint64_t ddp__draw_below(ddp_rng r, int64_t i, uint64_t n) {
    uint32_t w[4];
    ddp__philox(r.key, (uint64_t)i, r.call, w);
    uint64_t bits = ((uint64_t)w[0] << 32) | w[1];
    return (uint64_t)(((unsigned __int128)bits * n) >> 64);
}

#endif
