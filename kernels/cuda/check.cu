/* check.cu -- NaN and infinities counted: one launch that reads each element once. Sums of whole numbers: their order is all one. */
#include "places.cuh"

template <class T> static __device__ void census_body(const census_args &a) {
    enum { V = 16 / sizeof(T) };
    const walk_args &w = a.walk;
    unsigned nan = 0, inf = 0; /* a thread sees fewer than 2^32 */
    const int64_t packs = w.ndim == 0 ? w.n / V : 0;
    for (int64_t i = thread_index(); i < packs; i += thread_count()) {
        const lanes<T, V> x = load_lanes<V>((const T *)w.p[0] + i * V);
#pragma unroll
        for (int e = 0; e < V; e++) {
            const WIDE(T) v = widen(x.v[e]);
            nan += v != v;
            inf += v == v && v - v != 0;
        }
    }
    for (int64_t i = packs * V + thread_index(); i < w.n; i += thread_count()) {
        int64_t at[1] = {i};
        if (w.ndim) walk_at<1>(w, i, at);
        const WIDE(T) v = widen(((const T *)w.p[0])[at[0]]);
        nan += v != v;
        inf += v == v && v - v != 0;
    }
    if (!__syncthreads_or(nan | inf)) return;
    __shared__ unsigned slots[32];
    nan = block_sum(nan, slots);
    inf = block_sum(inf, slots);
    if (threadIdx.x) return;
    if (nan) atomicAdd((unsigned long long *)&a.count[0], (unsigned long long)nan);
    if (inf) atomicAdd((unsigned long long *)&a.count[1], (unsigned long long)inf);
}
DEFINE_FLOATS(census, census_args)
