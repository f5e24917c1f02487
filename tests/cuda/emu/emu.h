// The kernel emulator's side of a .cu file: what nvcc knows by itself, for g++, which is given it by -include. Threads of a block are fibers, one of them runs at a time; they meet at barriers and
// warp operations. What is not declared here is not simulated, and does not compile.
//
// A __shared__ variable is a static one: the object's .bss section is renamed to emu_shared by the build, so that all of
// them can be filled with NaN before a block. Device-wide variables (__device__ int x;) are therefore not allowed.
#pragma once
#define DDP_EMULATED
#ifdef __CUDACC__
#error "emu.h is for g++; nvcc has the real thing"
#endif
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector_types.h>
#include <vector_functions.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)

// T *name = the block's dynamic shared memory, 16-byte aligned.
#define DDP_DYNAMIC_SHARED(T, name) T *name = (T *)emu::dynamic_shared()

struct emu_dim3 {
    unsigned x, y, z;
};
extern uint3 threadIdx, blockIdx;
extern emu_dim3 blockDim, gridDim;
static const int warpSize = 32;

namespace emu {
enum warp_op { SHUFFLE, BALLOT, SYNC_WARP, MATCH };
enum barrier_kind { BARRIER, BARRIER_COUNT, BARRIER_OR, BARRIER_AND };
struct site { // where in the source a lane waits
    const char *file;
    int line;
};
void *dynamic_shared();
int lane(); // of its warp, 0 to 31
int barrier(barrier_kind kind, int predicate, site at);
// Waits for the lanes of mask. SHUFFLE: the bits that lane source brought; BALLOT, MATCH: a mask of lanes.
uint64_t warp(warp_op op, unsigned mask, uint64_t bits, int source, site at);
void fence();

template <class T> inline uint64_t to_bits(T v) {
    static_assert(sizeof(T) <= 8, "a shuffle moves 8 bytes at most");
    uint64_t bits = 0;
    memcpy(&bits, &v, sizeof v);
    return bits;
}
template <class T> inline T from_bits(uint64_t bits) {
    T v;
    memcpy((void *)&v, &bits, sizeof v);
    return v;
}
template <class T> inline T shuffle(unsigned mask, T v, int source, site at) {
    return from_bits<T>(warp(SHUFFLE, mask, to_bits(v), source, at));
}
template <class T> struct same { typedef T type; };
} // namespace emu

#define EMU_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define EMU_HERE \
    emu::site { file, line }

// ---- barriers and warps ---------------------------------------------------------------------------------------
static inline void __syncthreads(EMU_SITE) { emu::barrier(emu::BARRIER, 0, EMU_HERE); }
static inline int __syncthreads_count(int p, EMU_SITE) { return emu::barrier(emu::BARRIER_COUNT, p, EMU_HERE); }
static inline int __syncthreads_or(int p, EMU_SITE) { return emu::barrier(emu::BARRIER_OR, p, EMU_HERE); }
static inline int __syncthreads_and(int p, EMU_SITE) { return emu::barrier(emu::BARRIER_AND, p, EMU_HERE); }
static inline void __syncwarp(unsigned mask = ~0u, EMU_SITE) { emu::warp(emu::SYNC_WARP, mask, 0, 0, EMU_HERE); }
static inline unsigned __ballot_sync(unsigned mask, int p, EMU_SITE) {
    return (unsigned)emu::warp(emu::BALLOT, mask, p != 0, 0, EMU_HERE);
}
static inline int __any_sync(unsigned mask, int p, EMU_SITE) {
    return emu::warp(emu::BALLOT, mask, p != 0, 0, EMU_HERE) != 0;
}
static inline int __all_sync(unsigned mask, int p, EMU_SITE) // no lane of the mask says no
{
    return emu::warp(emu::BALLOT, mask, p == 0, 0, EMU_HERE) == 0;
}
template <class T> static inline unsigned __match_any_sync(unsigned mask, T v, EMU_SITE) {
    return (unsigned)emu::warp(emu::MATCH, mask, emu::to_bits(v), 0, EMU_HERE);
}

// Lanes are counted inside groups of width (a power of two); a source outside the group gives the lane's own value.
template <class T> static inline T __shfl_sync(unsigned mask, T v, int source, int width = 32, EMU_SITE) {
    int first = emu::lane() & ~(width - 1);
    return emu::shuffle(mask, v, first + (source & (width - 1)), EMU_HERE);
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32, EMU_SITE) {
    int me = emu::lane(), inside = (me & (width - 1)) + (int)by < width;
    return emu::shuffle(mask, v, inside ? me + (int)by : me, EMU_HERE);
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32, EMU_SITE) {
    int me = emu::lane(), inside = (me & (width - 1)) >= (int)by;
    return emu::shuffle(mask, v, inside ? me - (int)by : me, EMU_HERE);
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T v, int with, int width = 32, EMU_SITE) {
    int me = emu::lane(), source = me ^ with, inside = (source & ~(width - 1)) <= (me & ~(width - 1));
    return emu::shuffle(mask, v, inside ? source : me, EMU_HERE);
}

static inline void __threadfence() { emu::fence(); }
static inline void __threadfence_block() { emu::fence(); }
static inline void __threadfence_system() { emu::fence(); }

// ---- atomics: relaxed, as on the device -----------------------------------------------------------------------
// Replaces *p by next(*p) and returns what was there.
template <class T, class F> static inline T emu_atomic(T *p, F next) {
    typedef typename std::conditional<sizeof(T) == 8, uint64_t, uint32_t>::type word;
    static_assert(sizeof(T) == sizeof(word), "atomics are of 4 or 8 bytes");
    word old = __atomic_load_n((word *)p, __ATOMIC_RELAXED), now;
    T value, changed;
    do {
        memcpy((void *)&value, &old, sizeof value);
        changed = next(value);
        memcpy(&now, &changed, sizeof now);
    } while (!__atomic_compare_exchange_n((word *)p, &old, now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return value;
}
template <class T> using emu_arg = typename emu::same<T>::type;
template <class T> static inline T atomicAdd(T *p, emu_arg<T> v) {
    return emu_atomic(p, [v](T x) { return (T)(x + v); });
}
template <class T> static inline T atomicSub(T *p, emu_arg<T> v) {
    return emu_atomic(p, [v](T x) { return (T)(x - v); });
}
template <class T> static inline T atomicMax(T *p, emu_arg<T> v) {
    return emu_atomic(p, [v](T x) { return x < v ? v : x; });
}
template <class T> static inline T atomicMin(T *p, emu_arg<T> v) {
    return emu_atomic(p, [v](T x) { return v < x ? v : x; });
}
template <class T> static inline T atomicExch(T *p, emu_arg<T> v) {
    return emu_atomic(p, [v](T) { return v; });
}
template <class T> static inline T atomicOr(T *p, emu_arg<T> v) {
    return emu_atomic(p, [v](T x) { return (T)(x | v); });
}
template <class T> static inline T atomicAnd(T *p, emu_arg<T> v) {
    return emu_atomic(p, [v](T x) { return (T)(x & v); });
}
template <class T> static inline T atomicXor(T *p, emu_arg<T> v) {
    return emu_atomic(p, [v](T x) { return (T)(x ^ v); });
}
template <class T> static inline T atomicCAS(T *p, emu_arg<T> expected, emu_arg<T> v) {
    return emu_atomic(p, [expected, v](T x) { return x == expected ? v : x; });
}
static inline unsigned atomicInc(unsigned *p, unsigned top) {
    return emu_atomic(p, [top](unsigned x) { return x >= top ? 0 : x + 1; });
}

#include "emu_math.h"
