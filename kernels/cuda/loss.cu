/* loss.cu -- cross-entropy against class numbers, and its gradient: lines are the logits of one target.
 * Forward reads the logits once (with label smoothing twice); one launch, and one more of one block for a sum of many lines. The
 * gradient reads them once where a line fits in registers, else twice, and writes once; one launch, and one more that counts what
 * is not ignored where a mean has many lines. */
#include "held.cuh"

/* The label of line l, in range whatever stands there; *kept: is it not ignored. One thread of a line says what is wrong. */
static __device__ __forceinline__ int64_t label_of(const loss_args &a, int64_t l, bool speaks, bool *kept) {
    int64_t label = a.target[place_of(l, a.ndim, a.size, a.stride[2])];
    *kept = label != a.ignore;
    if (!*kept || (label >= 0 && label < a.n)) return *kept ? label : 0;
    if (speaks) fault_at(a.fault, a.op, label, a.n);
    return label < 0 ? 0 : a.n - 1;
}

/* The sum or mean of losses, on the block's first thread. */
template <class T, class A>
static __device__ __forceinline__ void put_loss(const loss_args &a, A total, long long count) {
    if (threadIdx.x == 0) *(T *)a.out = narrow<T>(a.reduction == 1 ? total / (A)count : total);
}

/* ---- forward ---- */

template <class T> struct loss_fn {
    /* The loss of one line, on all its threads. */
    template <class TEAM, int RUN>
    static __device__ __forceinline__ WIDE(T)
        one(const loss_args &a, const TEAM &t, const T *x, bool mine, int64_t label, WIDE(T) * slots) {
        typedef WIDE(T) A;
        int64_t runs = mine ? a.n / RUN : 0;
        A top, sum;
        top_and_sum<T, RUN>(x, a.step[1], runs, t, slots, &top, &sum);
        A all = top + LOG(sum), s = (A)a.smoothing, loss = (1 - s) * (all - (A)widen(x[label * a.step[1]]));
        if (!(s > 0)) return loss;
        A rest = 0;
        for (int64_t u = t.lane; u < runs; u += t.size) {
            run<T, RUN> in = *(const run<T, RUN> *)(x + u * RUN * a.step[1]);
#pragma unroll
            for (int e = 0; e < RUN; e++) rest += all - (A)widen(in.v[e]);
        }
        return loss + s * t.over(rest, (A)0, add_op(), slots) / (A)a.n;
    }
    template <class TEAM, int RUN, int HELD>
    static __device__ __forceinline__ void go(const loss_args &a, const TEAM &t, WIDE(T) * slots) {
        typedef WIDE(T) A;
        __shared__ long long counts[32];
        A total = 0;
        long long count = 0;
        for (int64_t first = (int64_t)blockIdx.x * t.lines; first < a.lines; first += (int64_t)gridDim.x * t.lines) {
            bool mine = first + t.line < a.lines, kept;
            int64_t l = mine ? first + t.line : 0, label = label_of(a, l, mine && t.lane == 0, &kept);
            const T *x = (const T *)a.x + place_of(l, a.ndim, a.size, a.stride[1]);
            A loss = one<TEAM, RUN>(a, t, x, mine && kept, label, slots);
            if (!mine || t.lane != 0) continue;
            if (!kept) loss = 0;
            if (a.reduction == 0) ((T *)a.out)[place_of(l, a.ndim, a.size, a.stride[0])] = narrow<T>(loss);
            total += loss;
            count += kept;
        }
        if (a.reduction == 0) return;
        total = block_sum(total, slots);
        count = block_sum(count, counts);
        if (gridDim.x == 1) put_loss<T>(a, total, count);
        else if (threadIdx.x == 0) {
            ((A *)a.part)[blockIdx.x] = total;
            a.counts[blockIdx.x] = count;
        }
    }
};
template <class T> static __device__ void cross_entropy_body(const loss_args &a) { by_lines_again<T, loss_fn<T>>(a); }
LINE_FLOATS(cross_entropy, loss_args, 3)

/* One block: what the blocks of cross_entropy found. */
template <class T> static __device__ void cross_entropy_total_body(const loss_args &a) {
    typedef WIDE(T) A;
    __shared__ A slots[32];
    __shared__ long long counts[32];
    A total = 0;
    long long count = 0;
    for (int k = (int)threadIdx.x; k < a.parts; k += (int)blockDim.x) {
        total += ((const A *)a.part)[k];
        count += a.counts[k];
    }
    total = block_sum(total, slots);
    count = block_sum(count, counts);
    put_loss<T>(a, total, count);
}
DEFINE_FLOATS(cross_entropy_total, loss_args)

/* ---- gradient ---- */

static __device__ __forceinline__ long long kept_from(const loss_args &a, int64_t first, int64_t by) {
    long long n = 0;
    for (int64_t l = first; l < a.lines; l += by) n += a.target[place_of(l, a.ndim, a.size, a.stride[2])] != a.ignore;
    return n;
}

/* counts[block] = how many of its targets are not ignored. */
static __device__ void count_targets_body(const loss_args &a) {
    __shared__ long long counts[32];
    long long n = block_sum(kept_from(a, thread_index(), thread_count()), counts);
    if (threadIdx.x == 0) a.counts[blockIdx.x] = n;
}
DEFINE_KERNEL(count_targets, loss_args, count_targets_body)

/* What every element's gradient is multiplied by but for g: 1, or of a mean 1 / the targets that are not ignored. */
template <class A> static __device__ __forceinline__ A mean_scale(const loss_args &a) {
    if (a.reduction != 1) return 1;
    __shared__ long long counts[32];
    long long n = 0;
    if (a.parts == 0) n = kept_from(a, threadIdx.x, blockDim.x);
    for (int k = (int)threadIdx.x; k < a.parts; k += (int)blockDim.x) n += a.counts[k];
    return 1 / (A)block_sum(n, counts);
}

template <class T> struct loss_grad_fn {
    typedef WIDE(T) A;
    A scale;   /* mean_scale */
    A by;      /* of one line: scale g */
    A uniform; /* smoothing / classes */
    bool kept;
    int64_t label;

    __device__ void line(const loss_args &a, int64_t l, bool speaks) {
        label = label_of(a, l, speaks, &kept);
        A g = a.g ? (A)widen(((const T *)a.g)[a.reduction == 0 ? place_of(l, a.ndim, a.size, a.stride[3]) : 0])
                  : (A)a.g_number;
        by = scale * g;
    }
    /* Of class k, which has probability p. */
    __device__ A of(const loss_args &a, int64_t k, A p) const {
        return kept ? by * (p - ((k == label ? 1 - (A)a.smoothing : (A)0) + uniform)) : (A)0;
    }
    template <class TEAM, int RUN, int HELD>
    __device__ __forceinline__ void held(const loss_args &a, const TEAM &t, const T *x, T *dx, bool mine,
                                         A *slots) const {
        A v[HELD * RUN], top = -infinity_of((A)0), sum = 0;
        const int64_t runs = a.n / RUN;
        load_line<T, RUN, HELD>(x, a.step[1], runs, t, mine, -infinity_of((A)0), v);
#pragma unroll
        for (int k = 0; k < HELD * RUN; k++) top = max_op()(top, v[k]);
        top = t.over(top, -infinity_of((A)0), max_op(), slots);
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            if (mine && t.lane + (int64_t)k * t.size < runs)
#pragma unroll
                for (int e = k * RUN; e < (k + 1) * RUN; e++) sum += v[e] = EXP(v[e] - top);
        }
        sum = 1 / t.over(sum, (A)0, add_op(), slots);
#pragma unroll
        for (int k = 0; k < HELD * RUN; k++)
            v[k] = of(a, (t.lane + (int64_t)(k / RUN) * t.size) * RUN + k % RUN, v[k] * sum);
        store_line<T, RUN, HELD>(dx, a.step[0], runs, t, mine, v);
    }
    template <class TEAM, int RUN>
    __device__ __forceinline__ void again(const loss_args &a, const TEAM &t, const T *x, T *dx, bool mine,
                                          A *slots) const {
        int64_t runs = mine ? a.n / RUN : 0;
        A top, sum;
        top_and_sum<T, RUN>(x, a.step[1], runs, t, slots, &top, &sum);
        sum = 1 / sum;
        for (int64_t u = t.lane; u < runs; u += t.size) {
            run<T, RUN> in = *(const run<T, RUN> *)(x + u * RUN * a.step[1]), out;
#pragma unroll
            for (int e = 0; e < RUN; e++) out.v[e] = narrow<T>(of(a, u * RUN + e, EXP((A)widen(in.v[e]) - top) * sum));
            *(run<T, RUN> *)(dx + u * RUN * a.step[0]) = out;
        }
    }
    template <class TEAM, int RUN, int HELD>
    static __device__ __forceinline__ void go(const loss_args &a, const TEAM &t, A *slots) {
        loss_grad_fn f;
        f.scale = mean_scale<A>(a);
        f.uniform = (A)a.smoothing / (A)a.n;
        for (int64_t first = (int64_t)blockIdx.x * t.lines; first < a.lines; first += (int64_t)gridDim.x * t.lines) {
            bool mine = first + t.line < a.lines;
            int64_t l = mine ? first + t.line : 0;
            f.line(a, l, mine && t.lane == 0);
            const T *x = (const T *)a.x + place_of(l, a.ndim, a.size, a.stride[1]);
            T *dx = (T *)a.out + place_of(l, a.ndim, a.size, a.stride[0]);
            if constexpr (HELD > 0) f.template held<TEAM, RUN, HELD>(a, t, x, dx, mine, slots);
            else f.template again<TEAM, RUN>(a, t, x, dx, mine, slots);
        }
    }
};
template <class T> static __device__ void cross_entropy_grad_body(const loss_args &a) {
    by_lines<T, loss_grad_fn<T>, 8>(a);
}
LINE_FLOATS(cross_entropy_grad, loss_args, 2)
