/* softmax.cu -- softmax and its logarithm along any dim, and their gradients. A line's elements stay in registers where they
 * fit (one read, one write); longer lines are read twice, the second time mostly out of the cache. One launch each. */
#include "held.cuh"

/* ---- forward: bytes: x, y ---- */

/* HELD runs of RUN elements stay on each thread. */
template <class T, class TEAM, int RUN, int HELD>
static __device__ void softmax_held(const lines_args &a, const TEAM &t, WIDE(T) * slots) {
    typedef WIDE(T) A;
    const int64_t runs = a.n / RUN;
    for (int64_t first = (int64_t)blockIdx.x * t.lines; first < a.lines; first += (int64_t)gridDim.x * t.lines) {
        bool mine = first + t.line < a.lines;
        int64_t l = mine ? first + t.line : 0;
        const T *x = (const T *)a.in[0] + place_of(l, a.ndim, a.size, a.stride[1]);
        T *y = (T *)a.out + place_of(l, a.ndim, a.size, a.stride[0]);
        A v[HELD * RUN], top = -infinity_of((A)0), sum = 0;
        load_line<T, RUN, HELD>(x, a.step[1], runs, t, mine, -infinity_of((A)0), v);
#pragma unroll
        for (int k = 0; k < HELD * RUN; k++) top = max_op()(top, v[k]);
        top = t.over(top, -infinity_of((A)0), max_op(), slots);
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            if (mine && t.lane + (int64_t)k * t.size < runs)
#pragma unroll
                for (int e = k * RUN; e < (k + 1) * RUN; e++) {
                    A d = v[e] - top, ex = EXP(d);
                    v[e] = a.logarithm ? d : ex;
                    sum += ex;
                }
        }
        sum = t.over(sum, (A)0, add_op(), slots);
        A by = a.logarithm ? LOG(sum) : 1 / sum;
#pragma unroll
        for (int k = 0; k < HELD * RUN; k++) v[k] = a.logarithm ? v[k] - by : v[k] * by;
        store_line<T, RUN, HELD>(y, a.step[0], runs, t, mine, v);
    }
}

template <class T, class TEAM, int RUN>
static __device__ void softmax_long(const lines_args &a, const TEAM &t, WIDE(T) * slots) {
    typedef WIDE(T) A;
    for (int64_t first = (int64_t)blockIdx.x * t.lines; first < a.lines; first += (int64_t)gridDim.x * t.lines) {
        bool mine = first + t.line < a.lines;
        int64_t l = mine ? first + t.line : 0, runs = mine ? a.n / RUN : 0;
        const T *x = (const T *)a.in[0] + place_of(l, a.ndim, a.size, a.stride[1]);
        T *y = (T *)a.out + place_of(l, a.ndim, a.size, a.stride[0]);
        A top, sum;
        top_and_sum<T, RUN>(x, a.step[1], runs, t, slots, &top, &sum);
        A by = a.logarithm ? LOG(sum) : 1 / sum;
        for (int64_t u = t.lane; u < runs; u += t.size) {
            run<T, RUN> in = *(const run<T, RUN> *)(x + u * RUN * a.step[1]), out;
#pragma unroll
            for (int e = 0; e < RUN; e++) {
                A d = widen(in.v[e]) - top;
                out.v[e] = narrow<T>(a.logarithm ? d - by : EXP(d) * by);
            }
            *(run<T, RUN> *)(y + u * RUN * a.step[0]) = out;
        }
    }
}

template <class T> struct softmax_fn {
    template <class TEAM, int RUN, int HELD>
    static __device__ __forceinline__ void go(const lines_args &a, const TEAM &t, WIDE(T) * slots) {
        if constexpr (HELD > 0) softmax_held<T, TEAM, RUN, HELD>(a, t, slots);
        else softmax_long<T, TEAM, RUN>(a, t, slots);
    }
};
template <class T> static __device__ void softmax_body(const lines_args &a) { by_lines<T, softmax_fn<T>, 16>(a); }
LINE_FLOATS(softmax, lines_args, 2)

/* ---- gradients: in[0] g, in[1] y; bytes: g, y, dx ---- */

template <class A> static __device__ __forceinline__ A grad_of(const lines_args &a, A g, A y, A sum) {
    return a.logarithm ? g - EXP(y) * sum : y * (g - sum);
}

template <class T, class TEAM, int RUN, int HELD>
static __device__ void softmax_grad_held(const lines_args &a, const TEAM &t, WIDE(T) * slots) {
    typedef WIDE(T) A;
    const int64_t runs = a.n / RUN;
    for (int64_t first = (int64_t)blockIdx.x * t.lines; first < a.lines; first += (int64_t)gridDim.x * t.lines) {
        bool mine = first + t.line < a.lines;
        int64_t l = mine ? first + t.line : 0;
        A g[HELD * RUN], y[HELD * RUN], sum = 0;
        load_line<T, RUN, HELD>((const T *)a.in[0] + place_of(l, a.ndim, a.size, a.stride[1]), a.step[1], runs, t, mine,
                                (A)0, g);
        load_line<T, RUN, HELD>((const T *)a.in[1] + place_of(l, a.ndim, a.size, a.stride[2]), a.step[2], runs, t, mine,
                                (A)0, y);
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            if (mine && t.lane + (int64_t)k * t.size < runs)
#pragma unroll
                for (int e = k * RUN; e < (k + 1) * RUN; e++) sum += a.logarithm ? g[e] : g[e] * y[e];
        }
        sum = t.over(sum, (A)0, add_op(), slots);
#pragma unroll
        for (int k = 0; k < HELD * RUN; k++) g[k] = grad_of(a, g[k], y[k], sum);
        store_line<T, RUN, HELD>((T *)a.out + place_of(l, a.ndim, a.size, a.stride[0]), a.step[0], runs, t, mine, g);
    }
}

template <class T, class TEAM, int RUN>
static __device__ void softmax_grad_long(const lines_args &a, const TEAM &t, WIDE(T) * slots) {
    typedef WIDE(T) A;
    typedef run<T, RUN> R;
    for (int64_t first = (int64_t)blockIdx.x * t.lines; first < a.lines; first += (int64_t)gridDim.x * t.lines) {
        bool mine = first + t.line < a.lines;
        int64_t l = mine ? first + t.line : 0, runs = mine ? a.n / RUN : 0;
        const T *g = (const T *)a.in[0] + place_of(l, a.ndim, a.size, a.stride[1]);
        const T *y = (const T *)a.in[1] + place_of(l, a.ndim, a.size, a.stride[2]);
        T *dx = (T *)a.out + place_of(l, a.ndim, a.size, a.stride[0]);
        A sum = 0;
        for (int64_t u = t.lane; u < runs; u += t.size) {
            R gs = *(const R *)(g + u * RUN * a.step[1]), ys = *(const R *)(y + u * RUN * a.step[2]);
#pragma unroll
            for (int e = 0; e < RUN; e++) sum += a.logarithm ? widen(gs.v[e]) : widen(gs.v[e]) * widen(ys.v[e]);
        }
        sum = t.over(sum, (A)0, add_op(), slots);
        for (int64_t u = t.lane; u < runs; u += t.size) {
            R gs = *(const R *)(g + u * RUN * a.step[1]), ys = *(const R *)(y + u * RUN * a.step[2]), out;
#pragma unroll
            for (int e = 0; e < RUN; e++) out.v[e] = narrow<T>(grad_of(a, (A)widen(gs.v[e]), (A)widen(ys.v[e]), sum));
            *(R *)(dx + u * RUN * a.step[0]) = out;
        }
    }
}

template <class T> struct softmax_grad_fn {
    template <class TEAM, int RUN, int HELD>
    static __device__ __forceinline__ void go(const lines_args &a, const TEAM &t, WIDE(T) * slots) {
        if constexpr (HELD > 0) softmax_grad_held<T, TEAM, RUN, HELD>(a, t, slots);
        else softmax_grad_long<T, TEAM, RUN>(a, t, slots);
    }
};
template <class T> static __device__ void softmax_grad_body(const lines_args &a) {
    by_lines<T, softmax_grad_fn<T>, 8>(a);
}
LINE_FLOATS(softmax_grad, lines_args, 2)
