/* pool.cu -- pooling over [N, C, H, W], results channels-last. Each kernel is one launch; a thread owns a pack of its result, 16
 * bytes of channels where x is channels-last too (else one element), and reads what belongs to it: backward too, so that nothing is
 * added up by atomics. */
#include "places.cuh"

/* Which element of y a pack begins with. */
struct cell {
    int n, c, h, w;
};
template <int V> static __device__ __forceinline__ cell cell_of(const pool_args &a, unsigned i) {
    cell at;
    unsigned rest = divide(a.by_c, i);
    at.c = (int)(i - rest * a.by_c.by) * V;
    unsigned next = divide(a.by_w, rest);
    at.w = (int)(rest - next * a.by_w.by);
    rest = divide(a.by_h, next);
    at.h = (int)(next - rest * a.by_h.by);
    at.n = (int)rest;
    return at;
}
#define EACH_PACK(i) for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < a.n; i += gridDim.x * blockDim.x)

/* Both widths of a kernel: what it is launched for chooses. */
#define DEFINE_WIDTHS(name)                                                     \
    template <class T> static __device__ void name##_body(const pool_args &a) { \
        if (a.vector) name##_packs<T, 16 / sizeof(T)>(a);                       \
        else name##_packs<T, 1>(a);                                             \
    }                                                                           \
    DEFINE_FLOATS(name, pool_args)

/* V places, 16 bytes at a time. */
template <int V> static __device__ __forceinline__ void store_places(int64_t *p, const int *place) {
    if (V == 1) {
        *p = place[0];
        return;
    }
#pragma unroll
    for (int e = 0; e + 1 < V; e += 2) {
        lanes<long long, 2> two = {{place[e], place[e + 1]}};
        store_lanes((long long *)p + e, two);
    }
}
template <int V> static __device__ __forceinline__ void load_places(const int64_t *p, long long *place) {
    if (V == 1) {
        place[0] = *p;
        return;
    }
#pragma unroll
    for (int e = 0; e + 1 < V; e += 2) {
        lanes<long long, 2> two = load_lanes<2>((const long long *)p + e);
        place[e] = two.v[0];
        place[e + 1] = two.v[1];
    }
}

/* ---- windows ---- */

/* Real elements [h0, h1) x [w0, w1) of an image, and what a mean's sum is divided by. */
struct window {
    int h0, h1, w0, w1, area;
};
static __device__ __forceinline__ window window_of(const pool_args &a, int ho, int wo) {
    window v;
    if (a.adaptive) {
        v.h0 = (int)((unsigned)(ho * a.H) / (unsigned)a.Ho);
        v.h1 = (int)((unsigned)((ho + 1) * a.H + a.Ho - 1) / (unsigned)a.Ho);
        v.w0 = (int)((unsigned)(wo * a.W) / (unsigned)a.Wo);
        v.w1 = (int)((unsigned)((wo + 1) * a.W + a.Wo - 1) / (unsigned)a.Wo);
        v.area = (v.h1 - v.h0) * (v.w1 - v.w0);
        return v;
    }
    int h0 = ho * a.stride[0] - a.padding[0], w0 = wo * a.stride[1] - a.padding[1];
    int h1 = min(h0 + a.kernel[0], a.H + a.padding[0]), w1 = min(w0 + a.kernel[1], a.W + a.padding[1]);
    v.h0 = max(h0, 0);
    v.h1 = min(h1, a.H);
    v.w0 = max(w0, 0);
    v.w1 = min(w1, a.W);
    v.area = a.include ? (h1 - h0) * (w1 - w0) : (v.h1 - v.h0) * (v.w1 - v.w0);
    return v;
}

/* The windows [first, last] along one dim that h lies in. */
struct span {
    int first, last;
};
static __device__ __forceinline__ span span_of(const pool_args &a, int d, int h, int size, int windows) {
    span s = {0, windows - 1};
    if (a.adaptive) {
        s.first = (int)((unsigned)(h * windows) / (unsigned)size);
        s.last = (int)((unsigned)((h + 1) * windows - 1) / (unsigned)size);
    } else if (!a.anywhere) {
        int at = h + a.padding[d], past = at - a.kernel[d];
        s.last = min(s.last, (int)divide(a.by_stride[d], (unsigned)at));
        if (past >= 0) s.first = (int)divide(a.by_stride[d], (unsigned)past) + 1;
    }
    return s;
}

/* ---- max: reads x once from memory (windows that overlap come out of the caches), writes y and 8 bytes of place each ---- */

template <class T, int V> static __device__ __forceinline__ void max_pool_packs(const pool_args &a) {
    EACH_PACK(i) {
        const cell at = cell_of<V>(a, i);
        const T *x = (const T *)a.x + at.n * a.xs[0] + at.c * a.xs[1];
        const window v = window_of(a, at.h, at.w);
        WIDE(T) best[V];
        int place[V];
#pragma unroll
        for (int e = 0; e < V; e++) {
            best[e] = (WIDE(T)) - INFINITY;
            place[e] = -1;
        }
        for (int h = v.h0; h < v.h1; h++) {
            for (int w = v.w0; w < v.w1; w++) {
                const lanes<T, V> in = load_lanes<V>(x + h * a.xs[2] + w * a.xs[3]);
                const int here = h * a.W + w;
#pragma unroll
                for (int e = 0; e < V; e++) { /* the first of equals; NaN wins, the first of those */
                    const WIDE(T) value = widen(in.v[e]);
                    const bool better = value > best[e] || place[e] < 0 || (value != value && best[e] == best[e]);
                    if (better) best[e] = value;
                    if (better) place[e] = here;
                }
            }
        }
        lanes<T, V> out;
#pragma unroll
        for (int e = 0; e < V; e++) out.v[e] = narrow<T>(best[e]);
        store_lanes((T *)a.y + (int64_t)i * V, out);
        store_places<V>(a.place + (int64_t)i * V, place);
    }
}
DEFINE_WIDTHS(max_pool)

/* Reads g and its places once from memory, writes the image's gradient once: what each element won, in the order of the windows. */
template <class T, int V> static __device__ __forceinline__ void max_pool_grad_packs(const pool_args &a) {
    EACH_PACK(i) {
        const cell at = cell_of<V>(a, i);
        const T *g = (const T *)a.x + at.n * a.xs[0] + at.c * a.xs[1];
        const int64_t *p = a.place + at.n * a.ps[0] + at.c * a.ps[1];
        const span hs = span_of(a, 0, at.h, a.H, a.Ho), ws = span_of(a, 1, at.w, a.W, a.Wo);
        const long long here = at.h * a.W + at.w;
        WIDE(T) sum[V];
#pragma unroll
        for (int e = 0; e < V; e++) sum[e] = 0;
        for (int h = hs.first; h <= hs.last; h++) {
            for (int w = ws.first; w <= ws.last; w++) {
                const lanes<T, V> in = load_lanes<V>(g + h * a.xs[2] + w * a.xs[3]);
                long long place[V];
                load_places<V>(p + h * a.ps[2] + w * a.ps[3], place);
#pragma unroll
                for (int e = 0; e < V; e++)
                    if (place[e] == here) sum[e] += widen(in.v[e]);
            }
        }
        lanes<T, V> out;
#pragma unroll
        for (int e = 0; e < V; e++) out.v[e] = narrow<T>(sum[e]);
        store_lanes((T *)a.y + (int64_t)i * V, out);
    }
}
DEFINE_WIDTHS(max_pool_grad)

/* ---- mean: reads x once from memory, writes y ---- */

template <class T, int V> static __device__ __forceinline__ void mean_pool_packs(const pool_args &a) {
    EACH_PACK(i) {
        const cell at = cell_of<V>(a, i);
        const T *x = (const T *)a.x + at.n * a.xs[0] + at.c * a.xs[1];
        const window v = window_of(a, at.h, at.w);
        WIDE(T) sum[V];
#pragma unroll
        for (int e = 0; e < V; e++) sum[e] = 0;
        for (int h = v.h0; h < v.h1; h++) {
            for (int w = v.w0; w < v.w1; w++) {
                const lanes<T, V> in = load_lanes<V>(x + h * a.xs[2] + w * a.xs[3]);
#pragma unroll
                for (int e = 0; e < V; e++) sum[e] += widen(in.v[e]);
            }
        }
        lanes<T, V> out;
#pragma unroll
        for (int e = 0; e < V; e++) out.v[e] = narrow<T>(sum[e] / (WIDE(T))v.area);
        store_lanes((T *)a.y + (int64_t)i * V, out);
    }
}
DEFINE_WIDTHS(mean_pool)

/* Few and large windows: a block of 256 for each window and `lanes` packs of channels; its threads lie side by side over the channels
 * and one behind the other over the window's elements, whose sums are added at the end in one order. */
template <class T, int V> static __device__ __forceinline__ void mean_pool_wide_packs(const pool_args &a) {
    __shared__ WIDE(T) sums[256 * V];
    const int lane = (int)threadIdx.x & (a.lanes - 1), strip = (int)threadIdx.x / a.lanes, strips = 256 / a.lanes;
    const unsigned groups = (a.by_c.by + a.lanes - 1) / a.lanes, blocks = a.n / a.by_c.by * groups;
    for (unsigned b = blockIdx.x; b < blocks; b += gridDim.x) {
        const unsigned cell_number = b / groups, pack = (b - cell_number * groups) * a.lanes + lane;
        const bool mine = pack < a.by_c.by;
        const unsigned i = cell_number * a.by_c.by + (mine ? pack : 0);
        const cell at = cell_of<V>(a, i);
        const T *x = (const T *)a.x + at.n * a.xs[0] + at.c * a.xs[1];
        const window v = window_of(a, at.h, at.w);
        const int width = v.w1 - v.w0, step_h = width > 0 ? strips / width : 0, step_w = strips - step_h * width;
        WIDE(T) sum[V];
#pragma unroll
        for (int e = 0; e < V; e++) sum[e] = 0;
        if (mine && width > 0) {
            int h = v.h0 + strip / width, w = strip % width;
            while (h < v.h1) {
                const lanes<T, V> in = load_lanes<V>(x + h * a.xs[2] + (v.w0 + w) * a.xs[3]);
#pragma unroll
                for (int e = 0; e < V; e++) sum[e] += widen(in.v[e]);
                h += step_h;
                w += step_w;
                if (w >= width) {
                    w -= width;
                    h++;
                }
            }
        }
        __syncthreads(); /* sums are read no more */
#pragma unroll
        for (int e = 0; e < V; e++) sums[e * 256 + threadIdx.x] = sum[e];
        for (int half = strips / 2; half > 0; half /= 2) {
            __syncthreads();
            if (strip >= half) continue;
#pragma unroll
            for (int e = 0; e < V; e++) sums[e * 256 + threadIdx.x] += sums[e * 256 + threadIdx.x + half * a.lanes];
        }
        if (strip || !mine) continue;
        lanes<T, V> out;
#pragma unroll
        for (int e = 0; e < V; e++) out.v[e] = narrow<T>(sums[e * 256 + threadIdx.x] / (WIDE(T))v.area);
        store_lanes((T *)a.y + (int64_t)i * V, out);
    }
}
DEFINE_WIDTHS(mean_pool_wide)

/* Reads g once from memory, writes the image's gradient once: its share of each window it lies in. */
template <class T, int V> static __device__ __forceinline__ void mean_pool_grad_packs(const pool_args &a) {
    EACH_PACK(i) {
        const cell at = cell_of<V>(a, i);
        const T *g = (const T *)a.x + at.n * a.xs[0] + at.c * a.xs[1];
        const span hs = span_of(a, 0, at.h, a.H, a.Ho), ws = span_of(a, 1, at.w, a.W, a.Wo);
        WIDE(T) sum[V];
#pragma unroll
        for (int e = 0; e < V; e++) sum[e] = 0;
        for (int h = hs.first; h <= hs.last; h++) {
            for (int w = ws.first; w <= ws.last; w++) {
                const lanes<T, V> in = load_lanes<V>(g + h * a.xs[2] + w * a.xs[3]);
                const WIDE(T) share = 1 / (WIDE(T))window_of(a, h, w).area;
#pragma unroll
                for (int e = 0; e < V; e++) sum[e] += widen(in.v[e]) * share;
            }
        }
        lanes<T, V> out;
#pragma unroll
        for (int e = 0; e < V; e++) out.v[e] = narrow<T>(sum[e]);
        store_lanes((T *)a.y + (int64_t)i * V, out);
    }
}
DEFINE_WIDTHS(mean_pool_grad)
