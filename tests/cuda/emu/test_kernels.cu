/* Kernels for the emulator's own tests: what it must run, and bugs that it must catch. */
#include "test_args.h"
#define ENTRY(name, args) extern "C" __global__ void name(const args a)

static __device__ float warp_sum(float v) {
    for (int step = 16; step > 0; step >>= 1) v += __shfl_down_sync(0xffffffffu, v, step);
    return v;
}
static __device__ float own_sum(const reduce_args &a) {
    float v = 0;
    for (int c = threadIdx.x; c < a.cols; c += blockDim.x) v += a.x[(int64_t)blockIdx.x * a.cols + c];
    return v;
}
/* The sums of the warps of one block in slots, added up by warp 0. */
static __device__ void finish(const reduce_args &a, const float *slots, int warps) {
    int lane = threadIdx.x & 31;
    if (threadIdx.x < 32) {
        float v = warp_sum(lane < warps ? slots[lane] : 0.f);
        if (lane == 0) a.y[blockIdx.x] = v;
    }
}

ENTRY(scale, scale_args) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < a.n; i += (int64_t)gridDim.x * blockDim.x)
        a.y[i] = a.a * a.x[i] + a.b;
}

/* In a template, as most kernels: their shared variables must be found as well. */
template <class T> static __device__ void row_sum_body(const reduce_args &a) {
    __shared__ T slots[32];
    T v = warp_sum(own_sum(a));
    if ((threadIdx.x & 31) == 0) slots[threadIdx.x >> 5] = v;
    __syncthreads();
    finish(a, slots, blockDim.x >> 5);
}
ENTRY(row_sum, reduce_args) { row_sum_body<float>(a); }

ENTRY(row_softmax, reduce_args) {
    __shared__ float slots[32];
    const float *x = a.x + (int64_t)blockIdx.x * a.cols;
    float *y = a.y + (int64_t)blockIdx.x * a.cols;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    float top = -INFINITY, sum = 0;
    for (int c = threadIdx.x; c < a.cols; c += blockDim.x) top = fmaxf(top, x[c]);
    for (int step = 16; step; step >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    if (!lane) slots[warp] = top;
    __syncthreads();
    for (int i = 0; i < warps; i++) top = fmaxf(top, slots[i]);
    __syncthreads();
    for (int c = threadIdx.x; c < a.cols; c += blockDim.x) sum += expf(x[c] - top);
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
    if (!lane) slots[warp] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < warps; i++) sum += slots[i];
    for (int c = threadIdx.x; c < a.cols; c += blockDim.x) y[c] = expf(x[c] - top) / sum;
}

ENTRY(gemm, gemm_args) {
    DDP_DYNAMIC_SHARED(float, tiles);
    float *as = tiles, *bs = tiles + 256, sum = 0;
    int tx = threadIdx.x, ty = threadIdx.y, r = blockIdx.y * 16 + ty, c = blockIdx.x * 16 + tx;
    for (int k = 0; k < a.k; k += 16) {
        as[ty * 16 + tx] = r < a.m && k + tx < a.k ? a.a[(int64_t)r * a.k + k + tx] : 0.f;
        bs[ty * 16 + tx] = k + ty < a.k && c < a.n ? a.b[(int64_t)(k + ty) * a.n + c] : 0.f;
        __syncthreads();
        for (int i = 0; i < 16; i++) sum += as[ty * 16 + i] * bs[i * 16 + tx];
        __syncthreads();
    }
    if (r < a.m && c < a.n) a.c[(int64_t)r * a.n + c] = sum;
}

/* out[0..63]: ballots of even lanes, counts of the block; one warp operation inside a branch of whole warps. */
ENTRY(warp_ops, ints_args) {
    int t = threadIdx.x, lane = t & 31;
    unsigned even = __ballot_sync(~0u, lane % 2 == 0);
    int third = __syncthreads_count(t % 3 == 0);
    int any = __syncthreads_or(t == 5), all = __syncthreads_and(t < 1000);
    if (t < 32) {
        int up = __shfl_up_sync(~0u, t, 3);
        a.out[t] = up;
    } else {
        __syncwarp();
    }
    if (t == 32) a.out[32] = (int)even, a.out[33] = third, a.out[34] = any, a.out[35] = all;
}

ENTRY(votes, ints_args) {
    int t = threadIdx.x;
    int any = __any_sync(~0u, t == 7), all = __all_sync(~0u, t >= 0), no = __all_sync(~0u, t != 7);
    unsigned like = __match_any_sync(~0u, t % 4);
    a.out[t] = any | all << 1 | no << 2;
    a.out[32 + t] = (int)like;
}

/* Every type, every direction, with widths. */
template <class T> static __device__ int shuffled(T x) { return (int)(double)__shfl_sync(~0u, x, 5, 8); }
ENTRY(shuffles, ints_args) {
    int t = threadIdx.x;
    a.out[t] = shuffled((float)t);
    a.out[32 + t] = shuffled((double)t);
    a.out[64 + t] = shuffled((long long)t);
    a.out[96 + t] = shuffled((unsigned)t);
    a.out[128 + t] = (int)__half2float(__shfl_down_sync(~0u, __float2half((float)t), 1));
    a.out[160 + t] = (int)__bfloat162float(__shfl_xor_sync(~0u, __float2bfloat16((float)t), 1));
    a.out[192 + t] = __shfl_down_sync(~0u, t, 2, 4);
    a.out[224 + t] = __shfl_up_sync(~0u, t, 1, 16);
}

/* out: add, max, min, exchanged count, or, and; wide: add of 64 bits */
ENTRY(atomics, ints_args) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&a.out[0], 1);
    atomicMax(&a.out[1], t);
    atomicMin(&a.out[2], -t);
    atomicOr((unsigned *)&a.out[3], 1u << (t & 31));
    atomicAnd((unsigned *)&a.out[4], ~(1u << (t & 7)));
    if (atomicCAS(&a.out[5], 0, t + 1) == 0) atomicExch(&a.out[6], t + 1);
    atomicAdd((unsigned long long *)&a.wide[0], 1ull << 32);
    atomicAdd(&a.sum[0], 0.5f);
    atomicAdd((double *)&a.wide[1], 0.25);
}

/* The last block that comes adds up what all left: sum[0]. */
ENTRY(last_block, ints_args) {
    __shared__ int last;
    if (threadIdx.x == 0) {
        a.sum[1 + blockIdx.x] = (float)blockIdx.x;
        __threadfence();
        last = atomicAdd(&a.out[0], 1) == (int)gridDim.x - 1;
    }
    __syncthreads();
    if (!last || threadIdx.x) return;
    __threadfence();
    float v = 0;
    for (unsigned i = 0; i < gridDim.x; i++) v += a.sum[1 + i];
    a.sum[0] = v;
}

/* Two halves of a warp, each in an operation of its own; lanes that returned before do not count. */
ENTRY(half_warps, ints_args) {
    int t = threadIdx.x;
    if (t < 16) a.out[t] = __shfl_xor_sync(0x0000ffffu, t, 1);
    else if (t < 24) a.out[t] = __shfl_xor_sync(0x00ff0000u, t, 2);
    else return;
    if (t < 16) a.out[32 + t] = (int)__ballot_sync(0xff00ffffu, 1);
}

template <class T> static __device__ void twice_body(const scale_args &a) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.n) a.y[i] = 2 * (float)(T)a.x[i];
}
ENTRY(twice_f32, scale_args) { twice_body<float>(a); }
ENTRY(twice_f64, scale_args) { twice_body<double>(a); }
ENTRY(twice_f16, scale_args) { twice_body<__half>(a); }
ENTRY(twice_bf16, scale_args) { twice_body<__nv_bfloat16>(a); }

/* ---- bugs ------------------------------------------------------------------------------------------------------- */

ENTRY(bug_missing_barrier, reduce_args) {
    __shared__ float slots[32];
    float v = warp_sum(own_sum(a));
    if ((threadIdx.x & 31) == 0) slots[threadIdx.x >> 5] = v;
    finish(a, slots, blockDim.x >> 5);
}

/* A tile of 256 sums, cleared for the next round before all have read it. */
ENTRY(bug_write_after_read, reduce_args) {
    __shared__ float tile[256];
    float v = 0;
    for (int k = 0; k < 2; k++) {
        tile[threadIdx.x] = own_sum(a);
        __syncthreads();
        for (unsigned i = 0; i < blockDim.x; i++) v += tile[i];
        tile[threadIdx.x] = 0;
    }
    if (threadIdx.x == blockDim.x - 1) a.y[blockIdx.x] = v / 2;
}

ENTRY(bug_shared_overrun, reduce_args) {
    __shared__ float slots[8];
    float v = warp_sum(own_sum(a));
    if ((threadIdx.x & 31) == 0) slots[(threadIdx.x >> 5) + 7] = v;
    __syncthreads();
    finish(a, slots + 7, blockDim.x >> 5);
}

ENTRY(bug_dynamic_overrun, reduce_args) {
    DDP_DYNAMIC_SHARED(float, slots);
    slots[threadIdx.x + 16] = own_sum(a);
    a.y[blockIdx.x] = 0;
}

ENTRY(bug_dynamic_slack, reduce_args) {
    DDP_DYNAMIC_SHARED(float, slots);
    if (threadIdx.x == 0) slots[a.cols - 1] = 1;
    a.y[blockIdx.x] = 0;
}

ENTRY(bug_uninitialised, reduce_args) {
    __shared__ float slots[32];
    float v = warp_sum(own_sum(a));
    if ((threadIdx.x & 31) == 0) slots[threadIdx.x >> 5] = v;
    __syncthreads();
    finish(a, slots, (blockDim.x >> 5) + 1);
}

ENTRY(bug_divergent_barrier, reduce_args) {
    if (threadIdx.x < 10) return;
    __syncthreads();
    a.y[blockIdx.x] = 0;
}

ENTRY(bug_two_barriers, reduce_args) {
    if (threadIdx.x < 32) __syncthreads();
    else __syncthreads();
    a.y[blockIdx.x] = 0;
}

ENTRY(bug_partial_mask, reduce_args) {
    float v = own_sum(a);
    if ((threadIdx.x & 31) < 16) v = __shfl_down_sync(0x0000ffffu, v, 16);
    a.y[blockIdx.x] = v;
}

ENTRY(bug_absent_lane, reduce_args) { a.y[blockIdx.x] = warp_sum(own_sum(a)); }

ENTRY(bug_not_in_mask, reduce_args) { a.y[blockIdx.x] = __shfl_sync(0x0000ffffu, own_sum(a), 0); }

ENTRY(bug_deadlock, reduce_args) {
    if (threadIdx.x < 16) __shfl_sync(~0u, 1, 0);
    __syncthreads();
    a.y[blockIdx.x] = 0;
}

ENTRY(bug_flat_barrier, scale_args) {
    a.y[threadIdx.x] = a.x[threadIdx.x];
    __syncthreads();
}
ENTRY(bug_flat_shuffle, scale_args) { a.y[threadIdx.x] = __shfl_sync(~0u, a.x[threadIdx.x], 0); }
ENTRY(bug_flat_shared, scale_args) {
    __shared__ volatile float kept[4];
    kept[threadIdx.x & 3] = a.x[threadIdx.x];
    a.y[threadIdx.x] = kept[threadIdx.x & 3];
}
/* Each thread reads what its neighbour wrote. */
ENTRY(bug_flat_order, scale_args) {
    if (threadIdx.x == 0) a.y[0] = a.x[0];
    else a.y[threadIdx.x] = a.y[threadIdx.x - 1] + a.x[threadIdx.x];
}

ENTRY(bug_global_race, scale_args) {
    a.y[0] += a.x[threadIdx.x];
    __syncthreads();
}
