/* random.cu -- draws (kernels/random.h) and dropout: the numbers of the CPU, element by element. Each kernel is one launch that writes
 * its results once; dropout reads x once and writes y and a byte of mask. */
#include "places.cuh"

static __device__ __forceinline__ float unit_f32(unsigned w) { return (float)(w >> 8) * 0x1p-24f; }
static __device__ __forceinline__ double unit_f64(unsigned hi, unsigned lo) {
    return (double)((((uint64_t)hi << 32) | lo) >> 11) * 0x1p-53;
}

/* Sine and cosine of an angle in [0, 2 pi], within a unit in the last place and without the tables that sin and cos need for large
 * angles: x / pi as a sum hi + lo, sin and cos of pi hi, and their slope. */
static __device__ __forceinline__ void sin_cos(float x, float *s, float *c) {
    const float part = 0.31830987334251404f, rest = 1.28412766e-8f; /* 1 / pi */
    float hi = __fmul_rn(x, part), lo = fmaf(x, part, -hi) + x * rest, sine, cosine;
    sincospif(hi, &sine, &cosine);
    lo *= 3.14159265358979324f;
    *s = sine + lo * cosine;
    *c = cosine - lo * sine;
}
static __device__ __forceinline__ void sin_cos(double x, double *s, double *c) {
    const double part = 0.31830988618379069, rest = -1.9678676675182486e-17;
    double hi = __dmul_rn(x, part), lo = fma(x, part, -hi) + x * rest, sine, cosine;
    sincospi(hi, &sine, &cosine);
    lo *= 3.14159265358979324;
    *s = sine + lo * cosine;
    *c = cosine - lo * sine;
}
/* Two uniforms become two normals (Box-Muller). */
static __device__ __forceinline__ void normal_pair(float *v) {
    float radius = sqrtf(-2 * logf(1 - v[0])), s, c;
    sin_cos(__fmul_rn(6.28318530717958647692f, v[1]), &s, &c);
    v[0] = radius * c;
    v[1] = radius * s;
}
static __device__ __forceinline__ void normal_pair(double *v) {
    double radius = sqrt(-2 * log(1 - v[0])), s, c;
    sin_cos(__dmul_rn(6.28318530717958647692, v[1]), &s, &c);
    v[0] = radius * c;
    v[1] = radius * s;
}

/* The first bits of u, as many as T has: rounding does not make it 1. */
template <class T> static __device__ __forceinline__ WIDE(T) unit_in(WIDE(T) u) { return u; }
template <> __device__ __forceinline__ float unit_in<bf16>(float u) { return floorf(u * 0x1p8f) * 0x1p-8f; }
template <> __device__ __forceinline__ float unit_in<f16>(float u) { return floorf(u * 0x1p11f) * 0x1p-11f; }

/* The PER draws of one Philox block. */
template <class T> struct drawn {
    enum { PER = 4 };
    static __device__ __forceinline__ void uniform(const draw_args &a, int64_t block, float *v) {
        unsigned w[4];
        philox(a.key, (uint64_t)block, a.call, w);
#pragma unroll
        for (int k = 0; k < 4; k++) v[k] = unit_f32(w[k]);
    }
};
template <> struct drawn<double> {
    enum { PER = 2 };
    static __device__ __forceinline__ void uniform(const draw_args &a, int64_t block, double *v) {
        unsigned w[4];
        philox(a.key, (uint64_t)block, a.call, w);
        v[0] = unit_f64(w[0], w[1]);
        v[1] = unit_f64(w[2], w[3]);
    }
};
template <class T> static __device__ __forceinline__ void draw_block(const draw_args &a, int64_t block, WIDE(T) * v) {
    enum { PER = drawn<T>::PER };
    drawn<T>::uniform(a, block, v);
#pragma unroll
    for (int k = 0; k < PER; k += 2) {
        if (a.normal) normal_pair(v + k);
        else {
            v[k] = unit_in<T>(v[k]);
            v[k + 1] = unit_in<T>(v[k + 1]);
        }
    }
    if (a.scale == 1 && a.shift == 0) return;
#pragma unroll
    for (int k = 0; k < PER; k++)
        v[k] = (WIDE(T))__dadd_rn(__dmul_rn((double)v[k], a.scale), a.shift); /* as the CPU does */
}

/* v[k], without an index that the machine must compute. */
template <int N, class W> static __device__ __forceinline__ W chosen(const W *v, int k) {
    W r = v[0];
#pragma unroll
    for (int i = 1; i < N; i++) r = k == i ? v[i] : r;
    return r;
}

template <class T> static __device__ void draw_body(const draw_args &a) {
    enum { V = 16 / sizeof(T), PER = drawn<T>::PER };
    if (a.at.ndim == 0) {
        for (int64_t i = thread_index(); i * V < a.at.n; i += thread_count()) {
            WIDE(T) v[V];
            lanes<T, V> out;
#pragma unroll
            for (int b = 0; b < V / PER; b++) draw_block<T>(a, i * (V / PER) + b, v + b * PER);
#pragma unroll
            for (int e = 0; e < V; e++) out.v[e] = narrow<T>(v[e]);
            T *y = (T *)a.y + i * V;
            if ((i + 1) * V <= a.at.n) store_lanes(y, out);
            else
#pragma unroll
                for (int e = 0; e < V; e++)
                    if (i * V + e < a.at.n) y[e] = out.v[e];
        }
        return;
    }
    for (int64_t i = thread_index(); i < a.at.n; i += thread_count()) {
        int64_t at[2];
        place_at<2>(a.at, i, at);
        WIDE(T) v[PER];
        draw_block<T>(a, at[0] / PER, v);
        ((T *)a.y)[at[1]] = narrow<T>(chosen<PER>(v, (int)(at[0] % PER)));
    }
}
DEFINE_FLOATS(draw, draw_args)

/* ---- choices: by the word that f32 takes, whatever the dtype ---- */

/* The words of elements i V to i V + V - 1. */
template <int V> static __device__ __forceinline__ void words_of(const draw_args &a, int64_t i, unsigned *w) {
    if (V < 4) {
        unsigned all[4];
        philox(a.key, (uint64_t)(i / 2), a.call, all);
        w[0] = i % 2 ? all[2] : all[0];
        w[V - 1] = i % 2 ? all[3] : all[1];
        return;
    }
#pragma unroll
    for (int b = 0; b < V / 4; b++) philox(a.key, (uint64_t)(i * (V / 4) + b), a.call, w + 4 * b);
}
static __device__ __forceinline__ unsigned word_of(const draw_args &a, int64_t i) {
    unsigned w[4];
    philox(a.key, (uint64_t)(i / 4), a.call, w);
    return chosen<4>(w, (int)(i % 4));
}
static __device__ __forceinline__ bool falls_below(const draw_args &a, unsigned w) { return w >> 8 < a.below; }

template <class T> static __device__ void draw_choice_body(const draw_args &a) {
    enum { V = 16 / sizeof(T) };
    if (a.at.ndim == 0) {
        for (int64_t i = thread_index(); i * V < a.at.n; i += thread_count()) {
            unsigned w[V];
            lanes<T, V> out;
            words_of<V>(a, i, w);
#pragma unroll
            for (int e = 0; e < V; e++) out.v[e] = narrow<T>(falls_below(a, w[e]) ? 1 : 0);
            T *y = (T *)a.y + i * V;
            if ((i + 1) * V <= a.at.n) store_lanes(y, out);
            else
#pragma unroll
                for (int e = 0; e < V; e++)
                    if (i * V + e < a.at.n) y[e] = out.v[e];
        }
        return;
    }
    for (int64_t i = thread_index(); i < a.at.n; i += thread_count()) {
        int64_t at[2];
        place_at<2>(a.at, i, at);
        ((T *)a.y)[at[1]] = narrow<T>(falls_below(a, word_of(a, at[0])) ? 1 : 0);
    }
}
DEFINE_ALL(draw_choice, draw_args)

template <class T> static __device__ __forceinline__ T whole(int64_t v) { return narrow<T>((double)v); }
template <> __device__ __forceinline__ long long whole<long long>(int64_t v) { return v; }

/* lo + [0, below) of 64 bits an element; y is row-major. */
template <class T> static __device__ void draw_whole_body(const draw_args &a) {
    for (int64_t i = thread_index(); i < a.at.n; i += thread_count()) {
        unsigned w[4];
        philox(a.key, (uint64_t)i, a.call, w);
        uint64_t n = __umul64hi(((unsigned long long)w[0] << 32) | w[1], a.below);
        ((T *)a.y)[i] = whole<T>((int64_t)((uint64_t)a.lo + n));
    }
}
DEFINE_ALL(draw_whole, draw_args)

/* ---- dropout ---- */

template <class T> static __device__ void dropout_body(const draw_args &a) {
    enum { V = 16 / sizeof(T) };
    const WIDE(T) scale = (WIDE(T))a.scale;
    const int64_t packs = a.at.ndim == 0 ? a.at.n / V : 0;
    for (int64_t i = thread_index(); i < packs; i += thread_count()) {
        unsigned w[V];
        words_of<V>(a, i, w);
        const lanes<T, V> in = load_lanes<V>((const T *)a.x + i * V);
        lanes<T, V> out;
        lanes<unsigned char, V> mask;
#pragma unroll
        for (int e = 0; e < V; e++) {
            const bool keep = !falls_below(a, w[e]);
            out.v[e] = narrow<T>(keep ? widen(in.v[e]) * scale : 0);
            mask.v[e] = keep;
        }
        store_lanes((T *)a.y + i * V, out);
        store_lanes(a.mask + i * V, mask);
    }
    for (int64_t i = packs * V + thread_index(); i < a.at.n; i += thread_count()) {
        int64_t at[3] = {i, i, i};
        if (a.at.ndim) place_at<3>(a.at, i, at);
        const bool keep = !falls_below(a, word_of(a, at[0]));
        ((T *)a.y)[at[1]] = narrow<T>(keep ? widen(((const T *)a.x)[at[2]]) * scale : 0);
        a.mask[at[1]] = keep;
    }
}
DEFINE_FLOATS(dropout, draw_args)

/* Operand 0 dx, 1 g, 2 the mask; attrs[0] the scale. NaN stays where it is dropped. */
template <class T> static __device__ void dropout_grad_body(const walk_args &a) {
    enum { V = 16 / sizeof(T) };
    const WIDE(T) scale = (WIDE(T))a.attrs[0];
    const int64_t packs = a.ndim == 0 ? a.n / V : 0;
    for (int64_t i = thread_index(); i < packs; i += thread_count()) {
        const lanes<T, V> g = load_lanes<V>((const T *)a.p[1] + i * V);
        const lanes<unsigned char, V> mask = load_lanes<V>((const unsigned char *)a.p[2] + i * V);
        lanes<T, V> out;
#pragma unroll
        for (int e = 0; e < V; e++) out.v[e] = narrow<T>(widen(g.v[e]) * (mask.v[e] ? scale : 0));
        store_lanes((T *)a.p[0] + i * V, out);
    }
    for (int64_t i = packs * V + thread_index(); i < a.n; i += thread_count()) {
        int64_t at[3] = {i, i, i};
        if (a.ndim) walk_at<3>(a, i, at);
        const bool keep = ((const unsigned char *)a.p[2])[at[2]] != 0;
        ((T *)a.p[0])[at[0]] = narrow<T>(widen(((const T *)a.p[1])[at[1]]) * (keep ? scale : 0));
    }
}
DEFINE_FLOATS(dropout_grad, walk_args)

/* ---- numbers in order ---- */

template <class T> static __device__ void arange_body(const count_args &a) {
    for (int64_t i = thread_index(); i < a.n; i += thread_count())
        ((T *)a.y)[i] = narrow<T>(__dadd_rn(a.start, __dmul_rn((double)i, a.step)));
}
DEFINE_ALL(arange, count_args)

template <class T> static __device__ void eye_body(const count_args &a) {
    for (int64_t i = thread_index(); i < a.n; i += thread_count()) {
        const int64_t row = i / (a.columns + 1);
        ((T *)a.y)[i] = narrow<T>(row < a.columns && row * (a.columns + 1) == i ? 1 : 0);
    }
}
DEFINE_ALL(eye, count_args)
