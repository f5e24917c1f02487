/* lines.cuh -- threads that share a line of elements (a row, a column, a channel): how they are arranged, what they add up
 * together, and walks without division. */
#ifndef DDP_CUDA_LINES_CUH
#define DDP_CUDA_LINES_CUH

#include "device.cuh"

enum { LINE_THREADS = 256 }; /* of a block, in all kernels here */

/* Kernels of floats whose blocks are LINE_THREADS: as many registers as let `blocks` of them live on a multiprocessor, where bytes in
 * flight count for more than registers; of f64 2. */
#define LINE_KERNEL(name, args, blocks, call) \
    extern "C" __global__ void __launch_bounds__(256, blocks) name(const args a) { call(a); }
#define LINE_FLOATS(name, args, blocks)                       \
    LINE_KERNEL(name##_f32, args, blocks, name##_body<float>) \
    LINE_KERNEL(name##_f64, args, 2, name##_body<double>)     \
    LINE_KERNEL(name##_f16, args, blocks, name##_body<f16>)   \
    LINE_KERNEL(name##_bf16, args, blocks, name##_body<bf16>)

/* N elements that are loaded and stored as one: 16 bytes, of a byte's types 8. */
template <class T, int N> struct __align__(sizeof(T) * N) run { T v[N]; };
template <class T> struct run_of { static const int n = sizeof(T) == 1 ? 8 : 16 / (int)sizeof(T); };

static __device__ __forceinline__ float infinity_of(float) { return INFINITY; }
static __device__ __forceinline__ double infinity_of(double) { return (double)INFINITY; }
template <class A> static __device__ __forceinline__ bool is_finite(A x) { return x - x == 0; }
static __device__ __forceinline__ float FMA(float a, float b, float c) { return fmaf(a, b, c); }
static __device__ __forceinline__ double FMA(double a, double b, double c) { return fma(a, b, c); }

struct max_op { /* passes over NaN */
    template <class T> __device__ T operator()(T a, T b) const { return a < b ? b : a; }
};

/* ---- teams: the threads that share a line ------------------------------------------------------------------------- */

/* `size` threads side by side (a power of two up to 32, or the block): for lines whose elements lie side by side. All threads
 * of the block call over(); slots: shared, 32 of A. */
struct row_team {
    int size, lane, line, lines; /* threads, which of them; which of the block's lines, how many it has */
    __device__ row_team(int n) {
        size = n;
        lane = (int)threadIdx.x & (n - 1);
        line = (int)threadIdx.x / n;
        lines = (int)blockDim.x / n;
    }
    template <class A, class F> __device__ A over(A v, A none, F op, A *slots) const {
        if (size > 32) return block_reduce(v, none, op, slots);
        for (int step = size / 2; step > 0; step >>= 1) v = op(v, __shfl_xor_sync(0xffffffffu, v, step));
        return v;
    }
};

/* Every width-th thread: for lines that lie side by side, the elements of one far apart. slots: shared, one of A a thread. */
struct column_team {
    int size, lane, line, lines;
    __device__ column_team(int width) {
        lines = width;
        line = (int)threadIdx.x & (width - 1);
        lane = (int)threadIdx.x / width;
        size = (int)blockDim.x / width;
    }
    template <class A, class F> __device__ A over(A v, A, F op, A *slots) const {
        if (size == 1) return v;
        __syncthreads(); /* slots may be in use from before */
        slots[threadIdx.x] = v;
        for (int half = (int)blockDim.x / 2; half >= lines; half >>= 1) {
            __syncthreads();
            if ((int)threadIdx.x < half) slots[threadIdx.x] = op(slots[threadIdx.x], slots[threadIdx.x + half]);
        }
        __syncthreads();
        return slots[line];
    }
};

/* v[0..N) summed over a column of threads, each; valid on the first row. slots: shared, N of A a thread. */
template <int N, class A> static __device__ __forceinline__ void column_sums(A *v, int width, A *slots) {
    __syncthreads();
#pragma unroll
    for (int e = 0; e < N; e++) slots[e * LINE_THREADS + threadIdx.x] = v[e];
    for (int half = LINE_THREADS / 2; half >= width; half >>= 1) {
        __syncthreads();
        if ((int)threadIdx.x < half)
#pragma unroll
            for (int e = 0; e < N; e++)
                slots[e * LINE_THREADS + threadIdx.x] += slots[e * LINE_THREADS + threadIdx.x + half];
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < N; e++) v[e] = slots[e * LINE_THREADS + threadIdx.x];
}

/* ---- walks ---------------------------------------------------------------------------------------------------------- */

/* Position first, first + by, first + 2 by ... of segments of n places each, as (segment, place): divides once, at the start. */
struct stride_walk {
    int64_t n, segment, place, by_segment, by_place;
    __device__ stride_walk(int64_t first, int64_t by, int64_t length) {
        n = length;
        if (first <= 0x7fffffff && by <= 0x7fffffff && n <= 0x7fffffff) {
            segment = (unsigned)first / (unsigned)n;
            by_segment = (unsigned)by / (unsigned)n;
        } else {
            segment = first / n;
            by_segment = by / n;
        }
        place = first - segment * n;
        by_place = by - by_segment * n;
    }
    __device__ bool next() { /* is it another segment */
        int64_t was = segment;
        segment += by_segment;
        place += by_place;
        if (place >= n) {
            place -= n;
            segment++;
        }
        return segment != was;
    }
};

/* Where index i of `ndim` dims (innermost first) lies. */
static __device__ __forceinline__ int64_t place_of(int64_t i, int ndim, const int64_t *size, const int64_t *stride) {
    int64_t at = 0;
    for (int d = 0; d < ndim; d++) {
        int64_t q = 0;
        if (d + 1 < ndim) q = (i | size[d]) >> 32 ? i / size[d] : (int64_t)((unsigned)i / (unsigned)size[d]);
        at += (i - q * size[d]) * stride[d];
        i = q;
    }
    return at;
}

#endif
