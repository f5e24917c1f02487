/* matmul.cu -- matrix products of every dtype and layout, for integers and where cuBLAS is not there; and what a linear map does
 * before and after cuBLAS's product. */
#define DDP_BOUNDS __launch_bounds__(256, 2) /* at most 128 registers: two blocks a multiprocessor */
#include "device.cuh"

/* What products of T are added up in. Integers wrap, so they go through unsigned types. */
template <class T> struct sum_of { typedef WIDE(T) type; };
template <> struct sum_of<long long> { typedef unsigned long long type; };
template <> struct sum_of<int> { typedef unsigned type; };
template <> struct sum_of<unsigned char> { typedef unsigned type; };
template <> struct sum_of<bool8> { typedef unsigned type; };
#define SUM(T) typename sum_of<T>::type

template <class T> struct from_sum {
    static __device__ __forceinline__ T get(SUM(T) s) { return narrow<T>(s); }
};
template <> struct from_sum<long long> {
    static __device__ __forceinline__ long long get(unsigned long long s) { return (long long)s; }
};
template <> struct from_sum<int> {
    static __device__ __forceinline__ int get(unsigned s) { return (int)s; }
};
template <> struct from_sum<unsigned char> {
    static __device__ __forceinline__ unsigned char get(unsigned s) { return (unsigned char)s; }
};

/* ---- activations: 0 none, 1 relu, 2 gelu, 3 gelu with tanh, as the ops of these names ---- */

template <class W> static __device__ __forceinline__ W activated(int act, W z) {
    if (act == 1) return z < 0 ? (W)0 : z;
    if (act == 2) return z * ((W)0.5 * (1 + ERF(z * (W)0.70710678118654752440)));
    if (act == 3) return (W)0.5 * z * (1 + TANH((W)0.79788456080286535588 * z * (1 + (W)0.044715 * z * z)));
    return z;
}

/* ---- products ----------------------------------------------------------------------------------------------------------------
 * A block makes a tile of 64 x 64 results, 16 of K at a time: a thread 4 x 4, 16 rows and columns apart. Each element of a is read
 * N / 64 times, each of b M / 64 times; y is written once. */

enum { TILE = PRODUCT_TILE, DEPTH = PRODUCT_DEPTH, APART = 16, EACH = TILE / APART, PAD = 1 };

/* to[k][r] = p[(first + r) * sr + (k0 + k) * sk], 0 outside. Neighbouring threads go along the denser of the two. */
template <class T>
static __device__ __forceinline__ void load_tile(SUM(T) (*to)[TILE + PAD], const T *p, int64_t first, int64_t rows,
                                                 int64_t sr, int64_t k0, int64_t K, int64_t sk) {
#pragma unroll
    for (int i = 0; i < TILE * DEPTH / PRODUCT_THREADS; i++) {
        int e = threadIdx.x + i * PRODUCT_THREADS;
        int k = sk == 1 ? e % DEPTH : e / TILE, r = sk == 1 ? e / DEPTH : e % TILE;
        bool inside = first + r < rows && k0 + k < K;
        to[k][r] = inside ? (SUM(T))widen(p[(first + r) * sr + (k0 + k) * sk]) : (SUM(T))0;
    }
}

/* y at (m, n), whose row-major place is i; LINEAR: with what follows the product. */
template <class T, bool LINEAR> struct put {
    static __device__ __forceinline__ void at(const matmul_args &, T *y, int64_t, int64_t, SUM(T) s) {
        *y = from_sum<T>::get(s);
    }
};
template <class T> struct put<T, true> {
    static __device__ __forceinline__ void at(const matmul_args &a, T *y, int64_t n, int64_t i, WIDE(T) z) {
        if (a.bias) z += widen(((const T *)a.bias)[n * a.bias_stride]);
        if (a.pre) ((T *)a.pre)[i] = narrow<T>(z);
        z = activated(a.act, z);
        if (a.residual) z += widen(((const T *)a.residual)[i]);
        *y = narrow<T>(z);
    }
};

template <class T, bool LINEAR> static __device__ void product(const matmul_args &a) {
    __shared__ SUM(T) left[DEPTH][TILE + PAD], right[DEPTH][TILE + PAD];
    const int64_t across = (a.N + TILE - 1) / TILE, per = across * ((a.M + TILE - 1) / TILE);
    enum { UNROLL = sizeof(SUM(T)) == 8 ? 2 : 4 };
    const int row = threadIdx.x / APART, column = threadIdx.x % APART;
    for (int64_t t = blockIdx.x; t < per * a.batches; t += gridDim.x) {
        const int64_t batch = t / per, tile = t - batch * per, m0 = tile / across * TILE, n0 = tile % across * TILE;
        int64_t at_a = 0, at_b = 0, at_y = 0, rest = batch;
        for (int d = a.batch_dims - 1; d >= 0; d--) {
            const int64_t i = rest % a.size[d];
            rest /= a.size[d];
            at_a += i * a.sa[d];
            at_b += i * a.sb[d];
            at_y += i * a.sy[d];
        }
        SUM(T) sum[EACH][EACH] = {};
        for (int64_t k0 = 0; k0 < a.K; k0 += DEPTH) {
            __syncthreads(); /* the tiles before were read */
            load_tile<T>(left, (const T *)a.a + at_a, m0, a.M, a.am, k0, a.K, a.ak);
            load_tile<T>(right, (const T *)a.b + at_b, n0, a.N, a.bn, k0, a.K, a.bk);
            __syncthreads();
#pragma unroll UNROLL
            for (int k = 0; k < DEPTH; k++) {
                SUM(T) x[EACH], z[EACH];
#pragma unroll
                for (int i = 0; i < EACH; i++) x[i] = left[k][row + i * APART];
#pragma unroll
                for (int j = 0; j < EACH; j++) z[j] = right[k][column + j * APART];
#pragma unroll
                for (int i = 0; i < EACH; i++)
#pragma unroll
                    for (int j = 0; j < EACH; j++) sum[i][j] += x[i] * z[j];
            }
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                const int64_t m = m0 + row + i * APART, n = n0 + column + j * APART;
                if (m < a.M && n < a.N)
                    put<T, LINEAR>::at(a, (T *)a.y + at_y + m * a.ym + n * a.yn, n, (batch * a.M + m) * a.N + n,
                                       sum[i][j]);
            }
        }
    }
}
template <class T> static __device__ void matmul_body(const matmul_args &a) { product<T, false>(a); }
template <class T> static __device__ void linear_body(const matmul_args &a) { product<T, true>(a); }
DEFINE_ALL(matmul, matmul_args)
DEFINE_FLOATS(linear, matmul_args)

/* ---- where the matrices of a batch begin, for cuBLAS ---- */

static __device__ void product_pointers_body(const product_pointers_args &a) {
    for (int64_t t = thread_index(); t < a.p.batches; t += thread_count()) {
        int64_t at_a = 0, at_b = 0, at_y = 0, rest = t;
        for (int d = a.p.batch_dims - 1; d >= 0; d--) {
            const int64_t i = rest % a.p.size[d];
            rest /= a.p.size[d];
            at_a += i * a.p.sa[d];
            at_b += i * a.p.sb[d];
            at_y += i * a.p.sy[d];
        }
        a.out[t] = (char *)a.p.b + at_b * a.in_bytes;
        a.out[t + a.p.batches] = (char *)a.p.a + at_a * a.in_bytes;
        a.out[t + 2 * a.p.batches] = (char *)a.p.y + at_y * a.y_bytes;
    }
}
DEFINE_KERNEL(product_pointers, product_pointers_args, product_pointers_body)

/* ---- bias, act, residual -----------------------------------------------------------------------------------------------------
 * One pass, 16 bytes of T a thread where `vector` says so: each operand is read once and y and pre are written once; bias comes out
 * of the caches. A thread's column moves by the same step each time, so there is no division in the loop. */

template <class T, int N, int ALIGN> struct alignas(ALIGN) group { T v[N]; };
template <int N, class T>
static __device__ __forceinline__ group<T, N, N == 1 ? sizeof(T) : 16> load_group(const void *p, int64_t i) {
    return ((const group<T, N, N == 1 ? sizeof(T) : 16> *)p)[i];
}

/* FILL: y = bias + residual, z is not there. */
template <class T, bool FILL, int PER> static __device__ void rows_of(const bias_args &a) {
    typedef group<T, PER, PER == 1 ? sizeof(T) : 16> groups;
    const int64_t columns = a.columns / PER, count = a.rows * columns, step = thread_count() % columns;
    int64_t n = thread_index() % columns;
    for (int64_t i = thread_index(); i < count; i += thread_count()) {
        WIDE(T) z[PER] = {};
        if (!FILL) {
            auto sums = load_group<PER, WIDE(T)>(a.z, i);
#pragma unroll
            for (int e = 0; e < PER; e++) z[e] = sums.v[e];
        }
        if (a.bias) {
            auto bias = load_group<PER, T>(a.bias, n * (PER == 1 ? a.bias_stride : 1));
#pragma unroll
            for (int e = 0; e < PER; e++) z[e] += widen(bias.v[e]);
        }
        groups out;
        if (!FILL && a.pre) {
#pragma unroll
            for (int e = 0; e < PER; e++) out.v[e] = narrow<T>(z[e]);
            ((groups *)a.pre)[i] = out;
        }
#pragma unroll
        for (int e = 0; e < PER; e++) z[e] = FILL ? z[e] : activated(a.act, z[e]);
        if (a.residual) {
            auto residual = load_group<PER, T>(a.residual, i);
#pragma unroll
            for (int e = 0; e < PER; e++) z[e] += widen(residual.v[e]);
        }
#pragma unroll
        for (int e = 0; e < PER; e++) out.v[e] = narrow<T>(z[e]);
        ((groups *)a.y)[i] = out;
        n += step;
        if (n >= columns) n -= columns;
    }
}
template <class T> static __device__ void bias_fill_body(const bias_args &a) {
    if (a.vector) rows_of<T, true, 16 / sizeof(T)>(a);
    else rows_of<T, true, 1>(a);
}
template <class T> static __device__ void bias_act_body(const bias_args &a) {
    if (a.vector) rows_of<T, false, 16 / sizeof(T)>(a);
    else rows_of<T, false, 1>(a);
}
DEFINE_FLOATS(bias_fill, bias_args)
DEFINE_FLOATS(bias_act, bias_args)
