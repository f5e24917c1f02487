/* elementwise.cu -- every scalar function of elementwise.def, for every dtype, over operands of any layout. */
#include "scalar.cuh"

#define BODY(op, operands, result) \
    template <class T> static __device__ void op##_body(const walk_args &a) { walk<operands, result, T>(a, op##_fn()); }
#define DDP_BINARY(op, expr) BODY(op, 2, T) DEFINE_ALL(op, walk_args)
#define DDP_BINARY_FLOAT(op, expr) BODY(op, 2, T) DEFINE_FLOATS(op, walk_args)
#define DDP_COMPARE(op, expr) BODY(op, 2, bool8) DEFINE_ALL(op, walk_args)
#define DDP_UNARY(op, expr) BODY(op, 1, T) DEFINE_ALL(op, walk_args)
#define DDP_UNARY_FLOAT(op, expr) BODY(op, 1, T) DEFINE_FLOATS(op, walk_args)
#define DDP_VARIANT(op, expr) BODY(op, 1, T) DEFINE_FLOATS(op, walk_args)
#define DDP_VARIANT_2(op, expr) BODY(op, 2, T) DEFINE_FLOATS(op, walk_args)
#include "../elementwise.def"

/* attrs: min, max. NaN stays. */
struct clamp_fn {
    double min, max;
    template <class T> __device__ double operator()(const T *x) const {
        double v = (double)x[0];
        return v < min ? min : v > max ? max : v;
    }
    __device__ float operator()(const float *x) const {
        float v = x[0];
        return v < (float)min ? (float)min : v > (float)max ? (float)max : v;
    }
};
template <class T> static __device__ void clamp_body(const walk_args &a) {
    clamp_fn f = {a.attrs[0], a.attrs[1]};
    walk<1, T, T>(a, f);
}
DEFINE_ALL(clamp, walk_args)
