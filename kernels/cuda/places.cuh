/* places.cuh -- positions over a shape (places of args.h), and a few elements at once. */
#ifndef DDP_CUDA_PLACES_CUH
#define DDP_CUDA_PLACES_CUH

#include "device.cuh"

/* n / d.by for n below 2^31. */
static __device__ __forceinline__ unsigned divide(const divider &d, unsigned n) {
    return (unsigned)(((uint64_t)n * d.times >> 32) + n) >> d.shift;
}

/* Where position i lies in each of K tensors. */
template <int K> static __device__ __forceinline__ void place_at(const places &p, int64_t i, int64_t *at) {
    for (int k = 0; k < K; k++) at[k] = 0;
    if (p.below_2_31) {
        unsigned rest = (unsigned)i;
        for (int d = 0; d < p.ndim; d++) {
            unsigned q = divide(p.by[d], rest), r = rest - q * p.by[d].by;
            rest = q;
            for (int k = 0; k < K; k++) at[k] += (int64_t)r * p.stride[k][d];
        }
    } else {
        for (int d = 0; d < p.ndim; d++) {
            int64_t q = i / p.size[d], r = i - q * p.size[d];
            i = q;
            for (int k = 0; k < K; k++) at[k] += r * p.stride[k][d];
        }
    }
}

/* V elements that lie side by side, loaded and stored as one. */
template <class T, int V> struct alignas(V * sizeof(T)) lanes { T v[V]; };
template <int V, class T> static __device__ __forceinline__ lanes<T, V> load_lanes(const T *p) {
    return *(const lanes<T, V> *)(const void *)p;
}
template <class T, int V> static __device__ __forceinline__ void store_lanes(T *p, const lanes<T, V> &x) {
    *(lanes<T, V> *)(void *)p = x;
}

#endif
