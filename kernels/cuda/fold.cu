/* fold.cu -- batch norm by running statistics, folded into what follows a convolution. */
#include "device.cuh"

/* A vector's element i, in what W is. */
template <class W> static __device__ __forceinline__ W element(const fold_vector &v, int64_t i, W none) {
    if (!v.p) return none;
    i *= v.stride;
    switch (v.dtype) {
    case 0: return (W)((const float *)v.p)[i];
    case 1: return (W)((const double *)v.p)[i];
    case 2: return (W)widen(((const f16 *)v.p)[i]);
    default: return (W)widen(((const bf16 *)v.p)[i]);
    }
}

template <class W> static __device__ void fold_body(const fold_args &a) {
    for (int64_t i = thread_index(); i < a.channels; i += thread_count()) {
        W scale = element<W>(a.weight, i, 1) / SQRT(element<W>(a.var, i, 1) + (W)a.eps);
        ((W *)a.scale)[i] = scale;
        ((W *)a.shift)[i] =
            (element<W>(a.conv_bias, i, 0) - element<W>(a.mean, i, 0)) * scale + element<W>(a.bias, i, 0);
    }
}
DEFINE_KERNEL(fold_f32, fold_args, fold_body<float>)
DEFINE_KERNEL(fold_f64, fold_args, fold_body<double>)

/* Written in order; reads of neighbours are r*s apart, within the caches: weights are small. */
static __device__ void fold_weight_body(const fold_weight_args &a) {
    int64_t n = a.size[0] * a.size[1] * a.size[2] * a.size[3];
    for (int64_t i = thread_index(); i < n; i += thread_count()) {
        int64_t c = i % a.size[1], rest = i / a.size[1], s = rest % a.size[3];
        rest /= a.size[3];
        int64_t r = rest % a.size[2], k = rest / a.size[2];
        a.out[i] = a.w[k * a.stride[0] + c * a.stride[1] + r * a.stride[2] + s * a.stride[3]] * a.scale[k];
    }
}
DEFINE_KERNEL(fold_weight, fold_weight_args, fold_weight_body)

template <class T> static __device__ void fold_apply_body(const fold_apply_args &a) {
    T *y = (T *)a.y;
    const T *residual = (const T *)a.residual;
    const WIDE(T) *scale = (const WIDE(T) *)a.scale, *shift = (const WIDE(T) *)a.shift;
    for (int64_t i = thread_index(); i < a.n; i += thread_count()) {
        int64_t k = i % a.channels;
        WIDE(T) v = widen(y[i]) * scale[k] + shift[k];
        if (residual) v += widen(residual[i]);
        y[i] = narrow<T>(a.relu && v < 0 ? (WIDE(T))0 : v);
    }
}
DEFINE_FLOATS(fold_apply, fold_apply_args)
