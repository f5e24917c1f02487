/* device.cuh -- what the kernels share. Compiled by nvcc, and by g++ on the emulator of tests/cuda/emu, which comes first and then
 * defines DDP_EMULATED. */
#ifndef DDP_CUDA_DEVICE_CUH
#define DDP_CUDA_DEVICE_CUH

#ifndef DDP_EMULATED
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef __CUDACC_RTC__ /* NVRTC knows these by itself */
#include <cuda_runtime.h>
#include <math.h>
#endif
#define DDP_DYNAMIC_SHARED(T, name)                                    \
    extern __shared__ __align__(16) unsigned char ddp_dynamic_shared[]; \
    T *name = (T *)ddp_dynamic_shared
#endif

#include "args.h"

typedef __half f16;
typedef __nv_bfloat16 bf16;
/* A bool's byte: 0 or 1. */
struct bool8 {
    unsigned char v;
};

/* ---- types: what arithmetic on T is done in (wide), how it is read and written -------------------------------------- */

template <class T> struct type {
    typedef T wide;
};
template <> struct type<f16> {
    typedef float wide;
};
template <> struct type<bf16> {
    typedef float wide;
};
template <> struct type<bool8> {
    typedef unsigned char wide;
};
#define WIDE(T) typename type<T>::wide

template <class T> static __device__ __forceinline__ T widen(T x) { return x; }
static __device__ __forceinline__ float widen(f16 x) { return __half2float(x); }
static __device__ __forceinline__ float widen(bf16 x) { return __bfloat162float(x); }
static __device__ __forceinline__ unsigned char widen(bool8 x) { return x.v; }

/* Floats to integers as the CPU does it: what an i64 does not hold saturates there, NaN is 0, and a narrower type takes the low
 * bits. */
static __device__ __forceinline__ int64_t whole_of(double v) {
    if (!(v > -9223372036854775808.0)) return v == v ? (int64_t)0x8000000000000000u : 0;
    return v >= 9223372036854775808.0 ? 0x7fffffffffffffff : (int64_t)v;
}
template <class T> struct is_whole {
    static const bool yes = false;
};
template <> struct is_whole<long long> {
    static const bool yes = true;
};
template <> struct is_whole<int> {
    static const bool yes = true;
};
template <> struct is_whole<unsigned char> {
    static const bool yes = true;
};

/* From what was computed to what is stored: rounded to nearest even; a bool is != 0. */
template <class T> struct store_as {
    template <class W> static __device__ __forceinline__ T from(W x) { return (T)x; }
    static __device__ __forceinline__ T from(float x) { return is_whole<T>::yes ? (T)whole_of(x) : (T)x; }
    static __device__ __forceinline__ T from(double x) { return is_whole<T>::yes ? (T)whole_of(x) : (T)x; }
};
template <> struct store_as<f16> {
    template <class W> static __device__ __forceinline__ f16 from(W x) { return __float2half_rn((float)x); }
};
template <> struct store_as<bf16> {
    template <class W> static __device__ __forceinline__ bf16 from(W x) { return __float2bfloat16_rn((float)x); }
};
template <> struct store_as<bool8> {
    template <class W> static __device__ __forceinline__ bool8 from(W x) {
        bool8 b = {(unsigned char)(x != 0)};
        return b;
    }
};
template <class T, class W> static __device__ __forceinline__ T narrow(W x) { return store_as<T>::from(x); }

/* ---- scalar functions, by type ---------------------------------------------------------------------------------------- */

static __device__ __forceinline__ float EXP(float x) { return expf(x); }
static __device__ __forceinline__ double EXP(double x) { return exp(x); }
static __device__ __forceinline__ float LOG(float x) { return logf(x); }
static __device__ __forceinline__ double LOG(double x) { return log(x); }
static __device__ __forceinline__ float SQRT(float x) { return sqrtf(x); }
static __device__ __forceinline__ double SQRT(double x) { return sqrt(x); }
static __device__ __forceinline__ float TANH(float x) { return tanhf(x); }
static __device__ __forceinline__ double TANH(double x) { return tanh(x); }
static __device__ __forceinline__ float ERF(float x) { return erff(x); }
static __device__ __forceinline__ double ERF(double x) { return erf(x); }

/* ---- entries -------------------------------------------------------------------------------------------------------------
 * The kernel `name` over the template name_body<T>(const args &). A .cu whose blocks need a bound on registers defines DDP_BOUNDS
 * before this header: __launch_bounds__(threads, blocks). */

#ifndef DDP_BOUNDS
#define DDP_BOUNDS
#endif
#define DEFINE_KERNEL(name, args, call) \
    extern "C" __global__ void DDP_BOUNDS name(const args a) { call(a); }
#define DEFINE_FLOATS(name, args)                       \
    DEFINE_KERNEL(name##_f32, args, name##_body<float>)  \
    DEFINE_KERNEL(name##_f64, args, name##_body<double>) \
    DEFINE_KERNEL(name##_f16, args, name##_body<f16>)    \
    DEFINE_KERNEL(name##_bf16, args, name##_body<bf16>)
#define DEFINE_ALL(name, args)                                     \
    DEFINE_FLOATS(name, args)                                      \
    DEFINE_KERNEL(name##_i64, args, name##_body<long long>)        \
    DEFINE_KERNEL(name##_i32, args, name##_body<int>)              \
    DEFINE_KERNEL(name##_u8, args, name##_body<unsigned char>)     \
    DEFINE_KERNEL(name##_bool, args, name##_body<bool8>)

/* ---- ids out of range ------------------------------------------------------------------------------------------------------
 * Only the kernel sees them: it calls this and goes on with an id in range; the host raises it at its next wait. word: of
 * ddp__cuda_fault_word; op: its id; expected were 0 to limit - 1. The first that comes is kept. */
static __device__ __forceinline__ void fault_at(int64_t *word, int op, int64_t value, int64_t limit) {
    if (atomicCAS((unsigned long long *)word, 0ull, (unsigned long long)(op + 1)) != 0) return;
    word[1] = value;
    word[2] = limit;
}

/* ---- walks over operands of one shape ------------------------------------------------------------------------------------ */

static __device__ __forceinline__ int64_t thread_index() { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }
static __device__ __forceinline__ int64_t thread_count() { return (int64_t)gridDim.x * blockDim.x; }

/* Where element i of the shape lies in each of K operands. 32-bit division where it is enough. */
template <int K> static __device__ __forceinline__ void walk_at(const walk_args &a, int64_t i, int64_t *at) {
    for (int k = 0; k < K; k++) at[k] = 0;
    if (a.n <= 0x7fffffff) {
        unsigned rest = (unsigned)i;
        for (int d = 0; d < a.ndim; d++) {
            unsigned size = (unsigned)a.size[d], q = rest / size, r = rest - q * size;
            rest = q;
            for (int k = 0; k < K; k++) at[k] += (int64_t)r * a.stride[k][d];
        }
    } else {
        for (int d = 0; d < a.ndim; d++) {
            int64_t q = i / a.size[d], r = i - q * a.size[d];
            i = q;
            for (int k = 0; k < K; k++) at[k] += r * a.stride[k][d];
        }
    }
}

/* The number that stands for operand k, in what T is computed in. */
template <class T> struct number_of {
    static __device__ __forceinline__ WIDE(T) get(const walk_args &a, int k) { return (WIDE(T))a.whole[k]; }
};
template <> struct number_of<float> {
    static __device__ __forceinline__ float get(const walk_args &a, int k) { return (float)a.number[k]; }
};
template <> struct number_of<double> {
    static __device__ __forceinline__ double get(const walk_args &a, int k) { return a.number[k]; }
};
template <> struct number_of<f16> {
    static __device__ __forceinline__ float get(const walk_args &a, int k) { return (float)a.number[k]; }
};
template <> struct number_of<bf16> {
    static __device__ __forceinline__ float get(const walk_args &a, int k) { return (float)a.number[k]; }
};

/* 16 bytes of elements, loaded and stored as one. */
template <class T> struct __align__(16) pack {
    T v[16 / sizeof(T)];
};

/* y[i] = f(operands at i): K operands of type T beside the result of type R. Dense ones go 16 bytes of T at a time. */
template <int K, class R, class T, class F> static __device__ __forceinline__ void walk(const walk_args &a, F f) {
    const int PER = 16 / sizeof(T);
    WIDE(T) x[K > 0 ? K : 1];
    if (a.ndim == 0) {
        int64_t packs = a.n / PER;
        for (int64_t i = thread_index(); i < packs; i += thread_count()) {
            pack<T> in[K > 0 ? K : 1];
            R out[PER];
#pragma unroll
            for (int k = 0; k < K; k++)
                if (a.p[k + 1]) in[k] = ((const pack<T> *)a.p[k + 1])[i];
#pragma unroll
            for (int e = 0; e < PER; e++) {
#pragma unroll
                for (int k = 0; k < K; k++) x[k] = a.p[k + 1] ? widen(in[k].v[e]) : number_of<T>::get(a, k + 1);
                out[e] = narrow<R>(f(x));
            }
            R *y = (R *)a.p[0] + i * PER;
            if (sizeof(R) == sizeof(T)) {
                pack<R> whole;
#pragma unroll
                for (int e = 0; e < PER; e++) whole.v[e] = out[e];
                *(pack<R> *)(void *)y = whole;
            } else {
#pragma unroll
                for (int e = 0; e < PER; e++) y[e] = out[e];
            }
        }
        for (int64_t i = packs * PER + thread_index(); i < a.n; i += thread_count()) {
            for (int k = 0; k < K; k++)
                x[k] = a.p[k + 1] ? widen(((const T *)a.p[k + 1])[i]) : number_of<T>::get(a, k + 1);
            ((R *)a.p[0])[i] = narrow<R>(f(x));
        }
        return;
    }
    for (int64_t i = thread_index(); i < a.n; i += thread_count()) {
        int64_t at[K + 1];
        walk_at<K + 1>(a, i, at);
        for (int k = 0; k < K; k++)
            x[k] = a.p[k + 1] ? widen(((const T *)a.p[k + 1])[at[k + 1]]) : number_of<T>::get(a, k + 1);
        ((R *)a.p[0])[at[0]] = narrow<R>(f(x));
    }
}

/* ---- Philox 4x32-10, as core/base/philox.c --------------------------------------------------------------------------------- */

static __device__ __forceinline__ void philox(uint64_t key, uint64_t lo, uint64_t hi, unsigned out[4]) {
    unsigned k0 = (unsigned)key, k1 = (unsigned)(key >> 32);
    unsigned c0 = (unsigned)lo, c1 = (unsigned)(lo >> 32), c2 = (unsigned)hi, c3 = (unsigned)(hi >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
        unsigned n0 = (unsigned)(b >> 32) ^ c1 ^ k0, n2 = (unsigned)(a >> 32) ^ c3 ^ k1;
        c1 = (unsigned)b;
        c3 = (unsigned)a;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* ---- reductions within a block ---------------------------------------------------------------------------------------------- */

/* The value of op over all threads of the block, on every thread; `slots` is shared, 32 of T. Blocks are whole warps. */
template <class T, class F> static __device__ __forceinline__ T block_reduce(T v, T none, F op, T *slots) {
    for (int step = 16; step > 0; step >>= 1) v = op(v, __shfl_xor_sync(0xffffffffu, v, step));
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    __syncthreads(); /* slots may be in use from before */
    if (lane == 0) slots[warp] = v;
    __syncthreads();
    v = lane < warps ? slots[lane] : none;
    for (int step = 16; step > 0; step >>= 1) v = op(v, __shfl_xor_sync(0xffffffffu, v, step));
    return v;
}
struct add_op {
    template <class T> __device__ T operator()(T a, T b) const { return a + b; }
};
template <class T> static __device__ __forceinline__ T block_sum(T v, T *slots) { return block_reduce(v, (T)0, add_op(), slots); }

#endif
