/* reduce.cu -- sums and extremes of any dims. Each op reads its input once; where results are few, a result's elements are
 * split over blocks, whose partial results a second launch adds up: always in the same order. */
#include "lines.cuh"

/* ---- what is reduced to what ---- */

/* What T is added up in, and what a sum of it is. Integers wrap. */
template <class T> struct added {
    typedef unsigned long long wide;
    typedef long long result;
    static __device__ wide of(T x) { return (wide)(long long)widen(x); }
    static __device__ result done(wide v, double) { return (result)v; }
};
template <> struct added<float> {
    typedef float wide;
    typedef float result;
    static __device__ wide of(float x) { return x; }
    static __device__ result done(wide v, double count) { return v / (float)count; }
};
template <> struct added<double> {
    typedef double wide;
    typedef double result;
    static __device__ wide of(double x) { return x; }
    static __device__ result done(wide v, double count) { return v / count; }
};
template <> struct added<f16> {
    typedef float wide;
    typedef f16 result;
    static __device__ wide of(f16 x) { return widen(x); }
    static __device__ result done(wide v, double count) { return narrow<f16>(v / (float)count); }
};
template <> struct added<bf16> {
    typedef float wide;
    typedef bf16 result;
    static __device__ wide of(bf16 x) { return widen(x); }
    static __device__ result done(wide v, double count) { return narrow<bf16>(v / (float)count); }
};

template <class T> struct sum_of {
    typedef T elem;
    typedef typename added<T>::wide part;
    __device__ sum_of(const reduce_args &) {}
    __device__ part none() const { return 0; }
    __device__ void take(part &a, T x, int64_t) const { a += added<T>::of(x); }
    __device__ void merge(part &a, const part &b) const { a += b; }
    __device__ part across(const part &a, int step) const { return __shfl_xor_sync(0xffffffffu, a, step); }
    __device__ void keep(const reduce_args &g, int64_t at, const part &a) const {
        ((typename added<T>::result *)g.y)[at] = added<T>::done(a, g.count);
    }
    __device__ void park(const reduce_args &g, int64_t at, const part &a) const { ((part *)g.part)[at] = a; }
    __device__ part parked(const reduce_args &g, int64_t at) const { return ((const part *)g.part)[at]; }
};

template <class W> struct found {
    W value;
    long long at; /* position among those compared; -1: nothing yet */
};
/* The largest (or smallest) and its position: NaN beats all, of equals the first is taken. */
template <class T> struct extreme_of {
    typedef T elem;
    typedef WIDE(T) wide;
    typedef found<wide> part;
    bool smallest;
    __device__ extreme_of(const reduce_args &g) { smallest = g.smallest; }
    __device__ part none() const {
        part a = {0, -1};
        return a;
    }
    __device__ void take(part &a, T x, int64_t at) const {
        part b = {widen(x), (long long)at};
        merge(a, b);
    }
    __device__ void merge(part &a, const part &b) const {
        if (b.at < 0) return;
        bool nan_a = a.value != a.value, nan_b = b.value != b.value;
        bool beats = smallest ? b.value < a.value : b.value > a.value;
        bool equal = b.value == a.value || (nan_a && nan_b);
        if (a.at < 0 || (nan_b && !nan_a) || (beats && !nan_a) || (equal && b.at < a.at)) a = b;
    }
    __device__ part across(const part &a, int step) const {
        part b = {(wide)__shfl_xor_sync(0xffffffffu, a.value, step), __shfl_xor_sync(0xffffffffu, a.at, step)};
        return b;
    }
    __device__ void keep(const reduce_args &g, int64_t at, const part &a) const {
        if (g.y) ((T *)g.y)[at] = narrow<T>(a.value);
        if (g.ids) g.ids[at] = a.at;
    }
    __device__ void park(const reduce_args &g, int64_t at, const part &a) const { ((part *)g.part)[at] = a; }
    __device__ part parked(const reduce_args &g, int64_t at) const { return ((const part *)g.part)[at]; }
};

/* ---- the elements of one result ---- */

static __device__ __forceinline__ int64_t segment_at(const reduce_args &a, int64_t segment) {
    if (a.n_gone <= 2) return segment * a.gone_stride[1];
    return place_of(segment, a.n_gone - 1, a.gone_size + 1, a.gone_stride + 1);
}

/* into[e] takes element e of each of the runs lo + lane, lo + lane + lanes, ... below hi. x: the result's first element. RUN: of how
 * many elements; SPAN: how many of them belong to one result (side by side), the others to its neighbours. */
template <class R, int RUN, int SPAN>
static __device__ __forceinline__ void gather(const reduce_args &a, const R &r, const typename R::elem *x, int64_t lo,
                                              int64_t hi, int lane, int lanes, typename R::part *into) {
    typedef run<typename R::elem, RUN> pack_type;
    int64_t u = lo + lane;
    if (u >= hi) return;
    stride_walk w(u, lanes, a.gone_size[0] / SPAN);
    int64_t step = a.gone_stride[0] * SPAN, base = segment_at(a, w.segment);
    for (; u < hi; u += lanes) {
        pack_type in = *(const pack_type *)(x + base + w.place * step);
#pragma unroll
        for (int e = 0; e < RUN; e++) r.take(into[e], in.v[e], u * SPAN + (SPAN > 1 ? e : 0));
        if (w.next()) base = segment_at(a, w.segment);
    }
}

/* The share of this block, of `all` runs that are split over gridDim.y. */
static __device__ __forceinline__ void share(const reduce_args &a, int64_t all, int64_t *lo, int64_t *hi) {
    int64_t each = (all + a.splits - 1) / a.splits;
    *lo = blockIdx.y * each;
    *hi = *lo + each < all ? *lo + each : all;
}

template <class R>
static __device__ __forceinline__ void put(const reduce_args &a, const R &r, int64_t at, const typename R::part &v) {
    if (a.splits > 1) r.park(a, at * a.splits + blockIdx.y, v);
    else r.keep(a, at, v);
}

/* ---- a result's elements lie side by side: a.lanes threads a result (a power of two up to 32, or the block) ---- */

template <class R, int RUN> static __device__ void rows_by(const reduce_args &a, typename R::part *slots) {
    R r(a);
    row_team t(a.lanes);
    int64_t lo, hi;
    share(a, a.ins / RUN, &lo, &hi);
    for (int64_t first = (int64_t)blockIdx.x * t.lines; first < a.outs; first += (int64_t)gridDim.x * t.lines) {
        int64_t o = first + t.line;
        bool mine = o < a.outs;
        typename R::part v[RUN];
#pragma unroll
        for (int e = 0; e < RUN; e++) v[e] = r.none();
        if (mine) {
            const typename R::elem *x =
                (const typename R::elem *)a.x + place_of(o, a.n_kept, a.kept_size, a.kept_stride);
            gather<R, RUN, RUN>(a, r, x, lo, hi, t.lane, t.size, v);
        }
#pragma unroll
        for (int e = 1; e < RUN; e++) r.merge(v[0], v[e]);
        for (int step = (t.size < 32 ? t.size : 32) / 2; step > 0; step >>= 1) r.merge(v[0], r.across(v[0], step));
        if (t.size > 32) {
            __syncthreads();
            if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = v[0];
            __syncthreads();
            for (int k = 1; k < LINE_THREADS / 32; k++) r.merge(v[0], slots[k]); /* of use on the first thread */
        }
        if (mine && t.lane == 0) put(a, r, place_of(o, a.n_kept, a.kept_size, a.kept_at), v[0]);
    }
}
template <class R> static __device__ __forceinline__ void rows(const reduce_args &a) {
    __shared__ typename R::part slots[LINE_THREADS / 32];
    if (a.packed) rows_by<R, run_of<typename R::elem>::n>(a, slots);
    else rows_by<R, 1>(a, slots);
}

/* ---- results lie side by side: a.lanes columns of runs, the block's other threads take other elements of the same ---- */

template <class R, int RUN> static __device__ void columns_by(const reduce_args &a, typename R::part *slots) {
    R r(a);
    column_team t(a.lanes);
    int64_t column = (int64_t)blockIdx.x * t.lines + t.line, lo, hi, outer = a.outs / a.kept_size[0];
    bool mine = column < a.kept_size[0] / RUN;
    share(a, a.ins, &lo, &hi);
    for (int64_t b = blockIdx.z; b < outer; b += gridDim.z) {
        typename R::part v[RUN];
#pragma unroll
        for (int e = 0; e < RUN; e++) v[e] = r.none();
        if (mine) {
            int64_t from =
                place_of(b, a.n_kept - 1, a.kept_size + 1, a.kept_stride + 1) + column * RUN * a.kept_stride[0];
            gather<R, RUN, 1>(a, r, (const typename R::elem *)a.x + from, lo, hi, t.lane, t.size, v);
        }
        for (int half = t.size / 2; half > 0; half >>= 1) {
            __syncthreads();
#pragma unroll
            for (int e = 0; e < RUN; e++) slots[e * LINE_THREADS + threadIdx.x] = v[e];
            __syncthreads();
            if (t.lane < half)
#pragma unroll
                for (int e = 0; e < RUN; e++) r.merge(v[e], slots[e * LINE_THREADS + threadIdx.x + half * t.lines]);
        }
        if (!mine || t.lane != 0) continue;
        int64_t at = place_of(b, a.n_kept - 1, a.kept_size + 1, a.kept_at + 1);
#pragma unroll
        for (int e = 0; e < RUN; e++) put(a, r, at + (column * RUN + e) * a.kept_at[0], v[e]);
    }
}
template <class R> static __device__ __forceinline__ void columns(const reduce_args &a) {
    __shared__ typename R::part slots[run_of<typename R::elem>::n * LINE_THREADS];
    if (a.packed) columns_by<R, run_of<typename R::elem>::n>(a, slots);
    else columns_by<R, 1>(a, slots);
}

/* ---- what the splits of a result found: a warp a result ---- */

template <class R> static __device__ __forceinline__ void finish(const reduce_args &a) {
    R r(a);
    row_team t(32);
    for (int64_t o = (int64_t)blockIdx.x * t.lines + t.line; o < a.outs; o += (int64_t)gridDim.x * t.lines) {
        typename R::part v = r.none();
        for (int k = t.lane; k < a.splits; k += 32) r.merge(v, r.parked(a, o * a.splits + k));
        for (int step = 16; step > 0; step >>= 1) r.merge(v, r.across(v, step));
        if (t.lane == 0) r.keep(a, o, v);
    }
}

/* Bytes: x once, and the results; partial results are far fewer. Launches: 1, or 2 where results are few. */
template <class T> static __device__ void sum_rows_body(const reduce_args &a) { rows<sum_of<T>>(a); }
template <class T> static __device__ void sum_columns_body(const reduce_args &a) { columns<sum_of<T>>(a); }
template <class T> static __device__ void sum_finish_body(const reduce_args &a) { finish<sum_of<T>>(a); }
template <class T> static __device__ void extreme_rows_body(const reduce_args &a) { rows<extreme_of<T>>(a); }
template <class T> static __device__ void extreme_columns_body(const reduce_args &a) { columns<extreme_of<T>>(a); }
template <class T> static __device__ void extreme_finish_body(const reduce_args &a) { finish<extreme_of<T>>(a); }
DEFINE_ALL(sum_rows, reduce_args)
DEFINE_ALL(sum_columns, reduce_args)
DEFINE_ALL(sum_finish, reduce_args)
DEFINE_ALL(extreme_rows, reduce_args)
DEFINE_ALL(extreme_columns, reduce_args)
DEFINE_ALL(extreme_finish, reduce_args)
