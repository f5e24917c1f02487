/* norm.cu -- batch normalisation of [outer, C, inner] (row-major) or [rows, C] (channels-last; inner is 1), with relu and a residual,
 * and its gradients. A training step is two passes over memory each way, with sums of a channel that many blocks share in between:
 *   forward    sums reads x; finish makes mean, rstd, running ones; apply reads x (and residual), writes y
 *   backward   grad_sums reads g, x (and y, and writes what relu let pass); grad_finish makes dweight, dbias and the coefficients
 *              of dx; grad_apply reads these and g, x, writes dx
 * Three launches each; with running statistics forward is one. */
#include "lines.cuh"

template <class T>
static __device__ __forceinline__ WIDE(T) at_channel(const channel_vector &v, int64_t c, WIDE(T) absent) {
    if (!v.p) return absent;
    if (v.wide) return ((const WIDE(T) *)v.p)[c * v.step];
    return widen(((const T *)v.p)[c * v.step]);
}

/* What forward and backward agree on to the last bit, so that relu's mask is found again. */
template <class A> struct affine {
    A mean, scale, shift;
    template <class T> __device__ __forceinline__ void set(const batch_norm_args &a, int64_t c, A m, A rstd) {
        mean = m;
        scale = rstd * at_channel<T>(a.weight, c, 1);
        shift = at_channel<T>(a.bias, c, 0);
    }
    __device__ __forceinline__ A of(A x) const { return FMA(x - mean, scale, shift); }
};

/* ---- what is done to an element, and what it adds to its channel's two sums ----
 * begin(a, c, at, speaks): of channel c, whose first element (of the block's share) lies at `at`; one thread a channel speaks;
 * item: in[] to out[], += s[2]. */

/* Sums about the first element, so that a large mean costs no digits. */
template <class T> struct sums_fn {
    typedef WIDE(T) A;
    static const int IN = 1, OUT = 0, SUMS = 2;
    A first = 0;
    __device__ __forceinline__ void begin(const batch_norm_args &a, int64_t, int64_t at, bool) {
        first = widen(((const T *)a.in[0])[at]);
        if (!is_finite(first)) first = 0;
    }
    __device__ __forceinline__ void item(const batch_norm_args &, const A *in, A *, A *s) const {
        A d = in[0] - first;
        s[0] += d;
        s[1] = FMA(d, d, s[1]);
    }
    /* The mean of n elements, and the sum of squares about it. */
    __device__ __forceinline__ void park(double *part, const A *s, double n) const {
        double m = (double)s[0] / n, about = (double)s[1] - (double)s[0] * m;
        part[0] = (double)first + m;
        part[1] = about < 0 ? 0 : about;
    }
};

template <class T> struct apply_fn {
    typedef WIDE(T) A;
    static const int IN = 2, OUT = 1, SUMS = 0;
    affine<A> f;
    __device__ __forceinline__ void begin(const batch_norm_args &a, int64_t c, int64_t, bool speaks) {
        A mean = ((const A *)a.mean.p)[c * a.mean.step], rstd = ((const A *)a.rstd.p)[c * a.rstd.step];
        if (a.running) rstd = 1 / SQRT(rstd + (A)a.eps); /* it is a variance */
        f.template set<T>(a, c, mean, rstd);
        if (a.running && speaks) {
            ((A *)a.mean_out)[c] = mean;
            ((A *)a.rstd_out)[c] = rstd;
        }
    }
    __device__ __forceinline__ void item(const batch_norm_args &a, const A *in, A *out, A *) const {
        A y = f.of(in[0]);
        if (a.in[1]) y += in[1];
        out[0] = a.relu && y < 0 ? (A)0 : y;
    }
    __device__ __forceinline__ void park(double *, const A *, double) const {}
};

/* in: g, x, y (of relu after a residual, or absent); out: what of g relu let pass, where y is there. */
template <class T> struct grad_sums_fn {
    typedef WIDE(T) A;
    static const int IN = 3, OUT = 1, SUMS = 2;
    affine<A> f;
    __device__ __forceinline__ void begin(const batch_norm_args &a, int64_t c, int64_t, bool) {
        f.template set<T>(a, c, ((const A *)a.mean.p)[c * a.mean.step], ((const A *)a.rstd.p)[c * a.rstd.step]);
    }
    __device__ __forceinline__ void item(const batch_norm_args &a, const A *in, A *out, A *s) const {
        A g = in[0];
        if (a.in[2] ? !(in[2] > 0) : a.relu && !(f.of(in[1]) > 0)) g = 0;
        s[0] += g;
        s[1] = FMA(g, in[1] - f.mean, s[1]);
        out[0] = g;
    }
    __device__ __forceinline__ void park(double *part, const A *s, double) const {
        part[0] = s[0];
        part[1] = s[1];
    }
};

/* dx = p g + q (x - mean) + s. */
template <class T> struct grad_apply_fn {
    typedef WIDE(T) A;
    static const int IN = 2, OUT = 1, SUMS = 0;
    affine<A> f;
    A p, q, s;
    __device__ __forceinline__ void begin(const batch_norm_args &a, int64_t c, int64_t, bool) {
        const A *by = (const A *)a.by;
        f.template set<T>(a, c, ((const A *)a.mean.p)[c * a.mean.step], ((const A *)a.rstd.p)[c * a.rstd.step]);
        p = by[c];
        q = by[a.channels + c];
        s = by[2 * a.channels + c];
    }
    __device__ __forceinline__ void item(const batch_norm_args &a, const A *in, A *out, A *) const {
        A g = in[0];
        if (a.relu && !(f.of(in[1]) > 0)) g = 0;
        out[0] = FMA(p, g, FMA(q, in[1] - f.mean, s));
    }
    __device__ __forceinline__ void park(double *, const A *, double) const {}
};

/* ---- over memory ---- */

/* RUN elements at `at` of all operands; fn[e * per] is element e's channel. s: its two sums, every second. */
template <class T, class FN, int RUN, int PER>
static __device__ __forceinline__ void items(const batch_norm_args &a, const FN *fn, int64_t at, WIDE(T) * s) {
    typedef run<T, RUN> R;
    R in[FN::IN], out;
#pragma unroll
    for (int k = 0; k < FN::IN; k++)
        if (a.in[k]) in[k] = *(const R *)((const T *)a.in[k] + at);
#pragma unroll
    for (int e = 0; e < RUN; e++) {
        WIDE(T) x[FN::IN], y[1];
#pragma unroll
        for (int k = 0; k < FN::IN; k++) x[k] = a.in[k] ? widen(in[k].v[e]) : (WIDE(T))0;
        fn[e * PER].item(a, x, y, s + 2 * e * PER);
        if (FN::OUT) out.v[e] = narrow<T>(y[0]);
    }
    if (FN::OUT && a.out) *(R *)((T *)a.out + at) = out;
}

/* [rows, C]: a.lanes runs of channels a block side by side, its other threads take other rows; rows are split over gridDim.y. */
template <class T, class FN, int RUN> static __device__ void by_columns(const batch_norm_args &a, WIDE(T) * slots) {
    typedef WIDE(T) A;
    column_team t(a.lanes);
    int64_t channel = ((int64_t)blockIdx.x * t.lines + t.line) * RUN;
    int64_t lo = blockIdx.y * a.share, hi = lo + a.share < a.outer ? lo + a.share : a.outer;
    FN fn[RUN];
    A s[2 * RUN];
#pragma unroll
    for (int e = 0; e < 2 * RUN; e++) s[e] = 0;
    if (channel < a.channels) {
#pragma unroll
        for (int e = 0; e < RUN; e++)
            fn[e].begin(a, channel + e, lo * a.channels + channel + e, blockIdx.y == 0 && t.lane == 0);
        for (int64_t r = lo + t.lane; r < hi; r += t.size) items<T, FN, RUN, 1>(a, fn, r * a.channels + channel, s);
    }
    if constexpr (FN::SUMS > 0) {
        column_sums<2 * RUN>(s, t.lines, slots);
        if (channel >= a.channels || t.lane != 0) return;
#pragma unroll
        for (int e = 0; e < RUN; e++)
            fn[e].park(a.part + 2 * ((channel + e) * a.splits + blockIdx.y), s + 2 * e, (double)(hi - lo));
    }
}

/* [outer, C, inner], sums: a.lanes threads a channel and share, shares of runs in gridDim.y. */
template <class T, class FN, int RUN> static __device__ void sums_by_rows(const batch_norm_args &a, WIDE(T) * slots) {
    typedef WIDE(T) A;
    row_team t(a.lanes);
    int64_t inner = a.inner / RUN, all = a.outer * inner, lo = blockIdx.y * a.share,
            hi = lo + a.share < all ? lo + a.share : all;
    for (int64_t first = (int64_t)blockIdx.x * t.lines; first < a.channels; first += (int64_t)gridDim.x * t.lines) {
        bool mine = first + t.line < a.channels;
        int64_t c = mine ? first + t.line : 0;
        FN fn;
        A s[2] = {0, 0};
        stride_walk head(lo, 0, inner);
        fn.begin(a, c, (head.segment * a.channels + c) * a.inner + head.place * RUN, false);
        if (mine && lo + t.lane < hi) {
            stride_walk w(lo + t.lane, t.size, inner);
            for (int64_t u = lo + t.lane; u < hi; u += t.size) {
                items<T, FN, RUN, 0>(a, &fn, (w.segment * a.channels + c) * a.inner + w.place * RUN, s);
                w.next();
            }
        }
        s[0] = t.over(s[0], (A)0, add_op(), slots);
        s[1] = t.over(s[1], (A)0, add_op(), slots);
        if (mine && t.lane == 0) fn.park(a.part + 2 * (c * a.splits + blockIdx.y), s, (double)(hi - lo) * RUN);
    }
}

/* [outer, C, inner], element by element: a.lanes threads a channel of one of `outer`. */
template <class T, class FN, int RUN> static __device__ void apply_by_rows(const batch_norm_args &a) {
    row_team t(a.lanes);
    int64_t inner = a.inner / RUN, all = a.outer * a.channels;
    for (int64_t r = (int64_t)blockIdx.x * t.lines + t.line; r < all; r += (int64_t)gridDim.x * t.lines) {
        FN fn;
        WIDE(T) s[2];
        fn.begin(a, all <= 0x7fffffff ? (unsigned)r % (unsigned)a.channels : r % a.channels, r * a.inner,
                 r < a.channels && t.lane == 0);
        for (int64_t i = t.lane; i < inner; i += t.size) items<T, FN, RUN, 0>(a, &fn, r * a.inner + i * RUN, s);
    }
}

template <class T, class FN, int RUN>
static __device__ __forceinline__ void over_runs(const batch_norm_args &a, WIDE(T) * slots) {
    if (a.inner == 1) by_columns<T, FN, RUN>(a, slots);
    else if constexpr (FN::SUMS > 0) sums_by_rows<T, FN, RUN>(a, slots);
    else apply_by_rows<T, FN, RUN>(a);
}
template <class T, class FN> static __device__ __forceinline__ void over_memory(const batch_norm_args &a) {
    __shared__ WIDE(T) slots[FN::SUMS > 0 ? 2 * run_of<T>::n * LINE_THREADS : 1];
    if (a.packed) over_runs<T, FN, run_of<T>::n>(a, slots);
    else over_runs<T, FN, 1>(a, slots);
}

template <class T> static __device__ void norm_sums_body(const batch_norm_args &a) { over_memory<T, sums_fn<T>>(a); }
template <class T> static __device__ void norm_apply_body(const batch_norm_args &a) { over_memory<T, apply_fn<T>>(a); }
template <class T> static __device__ void norm_grad_sums_body(const batch_norm_args &a) {
    over_memory<T, grad_sums_fn<T>>(a);
}
template <class T> static __device__ void norm_grad_apply_body(const batch_norm_args &a) {
    over_memory<T, grad_apply_fn<T>>(a);
}
LINE_FLOATS(norm_sums, batch_norm_args, 3)
LINE_FLOATS(norm_apply, batch_norm_args, 3)
LINE_FLOATS(norm_grad_sums, batch_norm_args, 2)
LINE_FLOATS(norm_grad_apply, batch_norm_args, 2)

/* ---- what the shares of a channel found, together: a warp a channel ---- */

/* Elements of share k. */
static __device__ __forceinline__ double elements_of(const batch_norm_args &a, int k) {
    int64_t all = a.outer * a.inner, each = a.inner == 1 ? a.share : a.share * a.run, lo = k * each;
    return (double)(lo + each < all ? each : all - lo);
}

/* Means and sums of squares of shares (Chan, Golub & LeVeque 1979), in double. */
template <class T> static __device__ void norm_finish_body(const batch_norm_args &a) {
    typedef WIDE(T) A;
    row_team t(32);
    double n = (double)(a.outer * a.inner);
    for (int64_t c = (int64_t)blockIdx.x * t.lines + t.line; c < a.channels; c += (int64_t)gridDim.x * t.lines) {
        const double *part = a.part + 2 * c * a.splits;
        double mean = 0, about = 0;
        for (int k = t.lane; k < a.splits; k += 32) mean += elements_of(a, k) * part[2 * k];
        mean = t.over(mean, 0.0, add_op(), (double *)0) / n;
        for (int k = t.lane; k < a.splits; k += 32) {
            double d = part[2 * k] - mean;
            about += part[2 * k + 1] + elements_of(a, k) * d * d;
        }
        about = t.over(about, 0.0, add_op(), (double *)0);
        if (t.lane != 0) continue;
        double var = about / n;
        ((A *)a.mean_out)[c] = (A)mean;
        ((A *)a.rstd_out)[c] = (A)(1 / sqrt(var + a.eps));
        if (!a.running_mean) continue;
        A *rm = (A *)a.running_mean + c * a.running_mean_step, *rv = (A *)a.running_var + c * a.running_var_step;
        *rm = (A)((1 - a.momentum) * *rm + a.momentum * mean);
        *rv = (A)((1 - a.momentum) * *rv + a.momentum * about / (n - 1));
    }
}
DEFINE_FLOATS(norm_finish, batch_norm_args)

/* by[3][C]: dx = w rstd (g - mean(g) - xhat mean(g xhat)) as p g + q (x - mean) + s; with constant statistics w rstd g. */
template <class T> static __device__ void norm_grad_finish_body(const batch_norm_args &a) {
    typedef WIDE(T) A;
    row_team t(32);
    double n = (double)(a.outer * a.inner);
    for (int64_t c = (int64_t)blockIdx.x * t.lines + t.line; c < a.channels; c += (int64_t)gridDim.x * t.lines) {
        const double *part = a.part + 2 * c * a.splits;
        double g = 0, gx = 0;
        for (int k = t.lane; k < a.splits; k += 32) {
            g += part[2 * k];
            gx += part[2 * k + 1];
        }
        g = t.over(g, 0.0, add_op(), (double *)0);
        gx = t.over(gx, 0.0, add_op(), (double *)0);
        if (t.lane != 0) continue;
        double rstd = ((const A *)a.rstd.p)[c * a.rstd.step], wr = rstd * (double)at_channel<T>(a.weight, c, 1);
        A *by = (A *)a.by;
        gx *= rstd;
        by[c] = (A)wr;
        by[a.channels + c] = a.training ? (A)(-wr * rstd * gx / n) : (A)0;
        by[2 * a.channels + c] = a.training ? (A)(-wr * g / n) : (A)0;
        if (a.sums_wide) {
            ((A *)a.dweight)[c] = (A)gx;
            ((A *)a.dbias)[c] = (A)g;
        } else {
            ((T *)a.dweight)[c] = narrow<T>((A)gx);
            ((T *)a.dbias)[c] = narrow<T>((A)g);
        }
    }
}
DEFINE_FLOATS(norm_grad_finish, batch_norm_args)
