/* nccl_reduce.c -- sums and their like: 16-bit floats in f32, everything else in its own type. */
#include "nccl_world.h"

#include "numbers.h"

size_t element_bytes(ncclDataType_t type) {
    switch (type) {
        case ncclInt8:
        case ncclUint8: return 1;
        case ncclFloat16:
        case ncclBfloat16: return 2;
        case ncclInt32:
        case ncclUint32:
        case ncclFloat32: return 4;
        case ncclInt64:
        case ncclUint64:
        case ncclFloat64: return 8;
        default: ddp_double_unsimulated("NCCL: 8-bit floats");
    }
}

const char *type_name(int type) {
    static const char *const names[] = {"i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16"};
    return type >= 0 && type <= ncclBfloat16 ? names[type] : "?";
}

/* NaN wins in max and min, as in NCCL. */
#define COMBINE(T, WIDE, LOAD, STORE)                                 \
    do {                                                              \
        T *to = out;                                                  \
        for (size_t i = 0; i < n; i++) {                              \
            WIDE v = LOAD(((const T *)from[0])[i]);                   \
            for (int r = 1; r < ranks; r++) {                         \
                WIDE x = LOAD(((const T *)from[r])[i]);               \
                switch (op) {                                         \
                    case ncclProd: v = (WIDE)(v * x); break;          \
                    case ncclMax: v = v != v || v > x ? v : x; break; \
                    case ncclMin: v = v != v || v < x ? v : x; break; \
                    default: v = (WIDE)(v + x);                       \
                }                                                     \
            }                                                         \
            if (op == ncclAvg) v = (WIDE)(v / (WIDE)ranks);           \
            to[i] = (T)STORE(v);                                      \
        }                                                             \
    } while (0)
#define AS_IS(x) (x)

void reduce(void *out, const char *const *from, int ranks, size_t n, ncclDataType_t type, int op) {
    switch (type) {
        case ncclInt8: COMBINE(int8_t, int, AS_IS, AS_IS); return;
        case ncclUint8: COMBINE(uint8_t, unsigned, AS_IS, AS_IS); return;
        case ncclInt32: COMBINE(int32_t, int64_t, AS_IS, AS_IS); return;
        case ncclUint32: COMBINE(uint32_t, uint64_t, AS_IS, AS_IS); return;
        case ncclInt64: COMBINE(int64_t, int64_t, AS_IS, AS_IS); return;
        case ncclUint64: COMBINE(uint64_t, uint64_t, AS_IS, AS_IS); return;
        case ncclFloat16: COMBINE(uint16_t, float, float_of_half, half_of_float); return;
        case ncclBfloat16: COMBINE(uint16_t, float, float_of_bf16, bf16_of_float); return;
        case ncclFloat32: COMBINE(float, float, AS_IS, AS_IS); return;
        case ncclFloat64: COMBINE(double, double, AS_IS, AS_IS); return;
        default: ddp_double_unsimulated("NCCL: 8-bit floats");
    }
}

double read_scalar(const void *p, ncclDataType_t type) {
    switch (type) {
        case ncclFloat16: return float_of_half(*(const uint16_t *)p);
        case ncclBfloat16: return float_of_bf16(*(const uint16_t *)p);
        case ncclFloat32: return *(const float *)p;
        case ncclFloat64: return *(const double *)p;
        default: ddp_double_unsimulated("ncclRedOpCreatePreMulSum of integers");
    }
}

void scale_copy(void *to, const void *from, size_t n, ncclDataType_t type, double by) {
    for (size_t i = 0; i < n; i++) switch (type) {
            case ncclFloat16:
                ((uint16_t *)to)[i] = half_of_float(float_of_half(((const uint16_t *)from)[i]) * (float)by);
                break;
            case ncclBfloat16:
                ((uint16_t *)to)[i] = bf16_of_float(float_of_bf16(((const uint16_t *)from)[i]) * (float)by);
                break;
            case ncclFloat32: ((float *)to)[i] = ((const float *)from)[i] * (float)by; break;
            case ncclFloat64: ((double *)to)[i] = ((const double *)from)[i] * by; break;
            default: ddp_double_unsimulated("ncclRedOpCreatePreMulSum of integers");
        }
}
