/* dtype.c -- element types: names, sizes, f16 and bf16 as bits. */
#include <math.h>
#include <string.h>

#include "tensor.h"

const uint8_t ddp__dtype_bytes[DDP_DTYPES] = {4, 8, 2, 2, 8, 4, 1, 1};
static const char *const names[DDP_DTYPES] = {"f32", "f64", "f16", "bf16", "i64", "i32", "u8", "bool"};

const char *ddp_dtype_name(int d) { return d >= 0 && d < DDP_DTYPES ? names[d] : "?"; }
size_t ddp_dtype_size(int d) { return d >= 0 && d < DDP_DTYPES ? ddp__dtype_bytes[d] : 0; }

int ddp_dtype_from_name(const char *name) {
    for (int d = 0; name && d < DDP_DTYPES; d++)
        if (strcmp(name, names[d]) == 0) return d;
    return -1;
}

static uint32_t bits_of(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static float float_of(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

float ddp__f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = (h >> 10) & 31, man = h & 1023;
    if (exp == 31) return float_of(sign | 0x7f800000u | man << 13);
    if (exp == 0) { /* zero or subnormal: man * 2^-24 */
        float f = (float)man * 0x1p-24f;
        return float_of(bits_of(f) | sign);
    }
    return float_of(sign | (exp + 112) << 23 | man << 13);
}

uint16_t ddp__f32_to_f16(float f) {
    uint32_t u = bits_of(f), sign = (u >> 16) & 0x8000, abs = u & 0x7fffffff;
    if (abs > 0x7f800000u) return (uint16_t)(sign | 0x7e00);
    if (abs >= 0x477ff000u) return (uint16_t)(sign | 0x7c00); /* 65520 and up round to infinity */
    if (abs < 0x38800000u) {                                  /* below 2^-14: subnormal, nearest even by the adder */
        float r = float_of(abs) + 0.5f;
        return (uint16_t)(sign | (bits_of(r) - 0x3f000000u));
    }
    uint32_t odd = (abs >> 13) & 1;
    return (uint16_t)(sign | ((abs - 0x38000000u + 0xfff + odd) >> 13));
}

uint16_t ddp__f32_to_bf16(float f) {
    uint32_t u = bits_of(f);
    if ((u & 0x7fffffff) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

double ddp__load(ddp_dtype d, const void *p, int64_t i) {
    switch (d) {
        case DDP_F32: return ((const float *)p)[i];
        case DDP_F64: return ((const double *)p)[i];
        case DDP_F16: return ddp__f16_to_f32(((const uint16_t *)p)[i]);
        case DDP_BF16: return ddp__bf16_to_f32(((const uint16_t *)p)[i]);
        case DDP_I64: return (double)((const int64_t *)p)[i];
        case DDP_I32: return ((const int32_t *)p)[i];
        default: return ((const uint8_t *)p)[i];
    }
}

/* Out-of-range values to integers saturate: the conversion alone would be undefined. */
static int64_t to_i64(double v) {
    if (!(v > -9223372036854775808.0)) return v == v ? INT64_MIN : 0;
    return v >= 9223372036854775808.0 ? INT64_MAX : (int64_t)v;
}

void ddp__store(ddp_dtype d, void *p, int64_t i, double v) {
    switch (d) {
        case DDP_F32: ((float *)p)[i] = (float)v; break;
        case DDP_F64: ((double *)p)[i] = v; break;
        case DDP_F16: ((uint16_t *)p)[i] = ddp__f32_to_f16((float)v); break;
        case DDP_BF16: ((uint16_t *)p)[i] = ddp__f32_to_bf16((float)v); break;
        case DDP_I64: ((int64_t *)p)[i] = to_i64(v); break;
        case DDP_I32: ((int32_t *)p)[i] = (int32_t)to_i64(v); break;
        case DDP_U8: ((uint8_t *)p)[i] = (uint8_t)to_i64(v); break;
        default: ((uint8_t *)p)[i] = v != 0; break;
    }
}
