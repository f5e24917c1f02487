/* act.cu -- what of linear_act's gradient comes before the products: the slope of the activation, and the bias's gradient. */
#include "places.cuh"

/* linear_act's own numbers: 1 relu, 2 gelu, 3 gelu with tanh. */
template <class W> static __device__ __forceinline__ W slope_of(int act, W x) {
    if (act == 1) return x > 0 ? (W)1 : (W)0;
    if (act == 2) {
        const W below = (W)0.5 * (1 + ERF(x * (W)0.70710678118654752440));
        return below + x * (W)0.39894228040143267794 * EXP((W)-0.5 * x * x);
    }
    const W t = TANH((W)0.79788456080286535588 * x * (1 + (W)0.044715 * x * x));
    return (W)0.5 * (1 + t + x * (1 - t * t) * (W)0.79788456080286535588 * (1 + (W)0.134145 * x * x));
}

/* A block of 32 x 8 threads for 32 packs of columns and one part of the rows, whose sums are added in one order. blockIdx.x: columns,
 * blockIdx.y: parts. Reads g and from once, writes dz once and a row of sums a part, which act_grad_sums adds up (one part: that is
 * dbias). */
enum { ACROSS = 32, DOWN = 8 };
template <class T, int V> static __device__ __forceinline__ void act_grad_packs(const act_grad_args &a) {
    __shared__ WIDE(T) slots[DOWN * ACROSS * V];
    const int lane = threadIdx.x % ACROSS, strip = threadIdx.x / ACROSS;
    const int64_t packs = a.columns / V, pack = (int64_t)blockIdx.x * ACROSS + lane;
    const bool mine = pack < packs;
    const int64_t first = blockIdx.y * a.part, end = min(first + a.part, a.rows);
    WIDE(T) sum[V];
#pragma unroll
    for (int e = 0; e < V; e++) sum[e] = 0;
    for (int64_t r = first + strip; mine && r < end; r += DOWN) {
        const int64_t at = r * a.columns + pack * V;
        const lanes<T, V> g = load_lanes<V>((const T *)a.g + at), from = load_lanes<V>((const T *)a.from + at);
        lanes<T, V> out;
#pragma unroll
        for (int e = 0; e < V; e++) {
            const WIDE(T) x = widen(from.v[e]), own = widen(g.v[e]);
            const WIDE(T) dz = a.act == 1 ? (x > 0 ? own : 0) : own * slope_of(a.act, x);
            sum[e] += dz;
            out.v[e] = narrow<T>(dz);
        }
        store_lanes((T *)a.dz + at, out);
    }
#pragma unroll
    for (int e = 0; e < V; e++) slots[e * DOWN * ACROSS + threadIdx.x] = sum[e];
    for (int half = DOWN / 2; half > 0; half /= 2) {
        __syncthreads();
        if (strip >= half) continue;
#pragma unroll
        for (int e = 0; e < V; e++) {
            const int to = e * DOWN * ACROSS + threadIdx.x;
            slots[to] += slots[to + half * ACROSS];
        }
    }
    if (strip || !mine) return;
#pragma unroll
    for (int e = 0; e < V; e++) {
        const WIDE(T) all = slots[e * DOWN * ACROSS + lane];
        if (a.parts > 1) ((WIDE(T) *)a.sums)[blockIdx.y * a.columns + pack * V + e] = all;
        else ((T *)a.dbias)[pack * V + e] = narrow<T>(all);
    }
}
template <class T> static __device__ void act_grad_body(const act_grad_args &a) {
    if (a.vector) act_grad_packs<T, 16 / sizeof(T)>(a);
    else act_grad_packs<T, 1>(a);
}
DEFINE_FLOATS(act_grad, act_grad_args)

/* A thread a column. */
template <class T> static __device__ void act_grad_sums_body(const act_grad_args &a) {
    for (int64_t i = thread_index(); i < a.columns; i += thread_count()) {
        WIDE(T) sum = 0;
        for (int64_t p = 0; p < a.parts; p++) sum += ((const WIDE(T) *)a.sums)[p * a.columns + i];
        ((T *)a.dbias)[i] = narrow<T>(sum);
    }
}
DEFINE_FLOATS(act_grad_sums, act_grad_args)
