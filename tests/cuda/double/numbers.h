/* numbers.h -- 16-bit floats and TF32 on the CPU; rounding is to nearest, ties to even. */
#ifndef DDP_DOUBLE_NUMBERS_H
#define DDP_DOUBLE_NUMBERS_H

#include <stdint.h>
#include <string.h>

static inline float float_of_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}
/* Drops the low bits of x, keeping 32 - bits of them; NaN stays NaN. */
static inline float round_off(float x, int bits) {
    uint32_t u, half = (1u << (bits - 1)) - 1;
    if (x != x) return x;
    memcpy(&u, &x, sizeof u);
    u = (u + half + (u >> bits & 1)) & ~((1u << bits) - 1);
    memcpy(&x, &u, sizeof x);
    return x;
}
static inline uint16_t bf16_of_float(float x) {
    uint32_t u;
    if (x != x) return 0x7FFF;
    x = round_off(x, 16);
    memcpy(&u, &x, sizeof u);
    return (uint16_t)(u >> 16);
}
static inline float float_of_half(uint16_t x) {
    _Float16 h;
    memcpy(&h, &x, sizeof h);
    return (float)h;
}
static inline uint16_t half_of_float(float x) {
    _Float16 h = (_Float16)x;
    uint16_t u;
    memcpy(&u, &h, sizeof u);
    return u;
}
static inline float tf32_of_float(float x) { return round_off(x, 13); }

#endif
