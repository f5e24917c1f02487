/* layer_norm.cu -- layer normalisation of rows, and its gradients. Rows that fit in registers are read once:
 *   forward    x in, y out: one launch
 *   backward   g, x in, dx out; each block adds up dweight and dbias of its rows, which finish adds together: two launches
 * Longer rows are read twice, and once more, by columns, for dweight and dbias: three launches backward. */
#include "held.cuh"

/* v[k .. k + RUN) */
template <class T, int RUN>
static __device__ __forceinline__ void vector_run(const channel_vector &v, int64_t k, WIDE(T) absent, WIDE(T) * out) {
    typedef WIDE(T) A;
    if (!v.p) {
#pragma unroll
        for (int e = 0; e < RUN; e++) out[e] = absent;
    } else if (v.wide) {
        run<A, RUN> in = *(const run<A, RUN> *)((const A *)v.p + k);
#pragma unroll
        for (int e = 0; e < RUN; e++) out[e] = in.v[e];
    } else {
        run<T, RUN> in = *(const run<T, RUN> *)((const T *)v.p + k);
#pragma unroll
        for (int e = 0; e < RUN; e++) out[e] = widen(in.v[e]);
    }
}

/* ---- forward ---- */

template <class T> struct layer_norm_fn {
    typedef WIDE(T) A;
    /* y of RUN elements from k on. */
    template <int RUN>
    static __device__ __forceinline__ void put(const layer_norm_args &a, T *y, int64_t k, const A *x, A mean, A rstd) {
        A w[RUN], b[RUN];
        run<T, RUN> out;
        vector_run<T, RUN>(a.weight, k, 1, w);
        vector_run<T, RUN>(a.bias, k, 0, b);
#pragma unroll
        for (int e = 0; e < RUN; e++) out.v[e] = narrow<T>(FMA((x[e] - mean) * rstd, w[e], b[e]));
        *(run<T, RUN> *)(y + k) = out;
    }
    static __device__ __forceinline__ A keep(const layer_norm_args &a, int64_t row, bool speaks, A mean, A var) {
        A rstd = 1 / SQRT(var + (A)a.eps);
        if (speaks) {
            ((A *)a.mean)[row] = mean;
            ((A *)a.rstd)[row] = rstd;
        }
        return rstd;
    }
    template <int RUN, int HELD>
    static __device__ __forceinline__ void held(const layer_norm_args &a, const row_team &t, int64_t row, bool mine,
                                                A *slots) {
        const int64_t runs = a.n / RUN;
        A v[HELD * RUN], sum = 0, about = 0;
        load_line<T, RUN, HELD>((const T *)a.in[0] + row * a.n, 1, runs, t, mine, (A)0, v);
#pragma unroll
        for (int k = 0; k < HELD * RUN; k++) sum += v[k];
        A mean = t.over(sum, (A)0, add_op(), slots) / (A)a.n;
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            if (t.lane + (int64_t)k * t.size < runs)
#pragma unroll
                for (int e = k * RUN; e < (k + 1) * RUN; e++) about = FMA(v[e] - mean, v[e] - mean, about);
        }
        A rstd = keep(a, row, mine && t.lane == 0, mean, t.over(about, (A)0, add_op(), slots) / (A)a.n);
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            int64_t u = t.lane + (int64_t)k * t.size;
            if (mine && u < runs) put<RUN>(a, (T *)a.out + row * a.n, u * RUN, v + k * RUN, mean, rstd);
        }
    }
    /* Sums about the first element, so that a large mean costs no digits. */
    template <int RUN>
    static __device__ __forceinline__ void again(const layer_norm_args &a, const row_team &t, int64_t row, bool mine,
                                                 A *slots) {
        const T *x = (const T *)a.in[0] + row * a.n;
        int64_t runs = mine ? a.n / RUN : 0;
        A first = widen(x[0]), sum = 0, squares = 0;
        if (!is_finite(first)) first = 0;
#pragma unroll 1
        for (int64_t u = t.lane; u < runs; u += t.size) {
            run<T, RUN> in = *(const run<T, RUN> *)(x + u * RUN);
#pragma unroll
            for (int e = 0; e < RUN; e++) {
                A d = widen(in.v[e]) - first;
                sum += d;
                squares = FMA(d, d, squares);
            }
        }
        sum = t.over(sum, (A)0, add_op(), slots);
        squares = t.over(squares, (A)0, add_op(), slots);
        A m = sum / (A)a.n, var = (squares - sum * m) / (A)a.n, mean = first + m;
        A rstd = keep(a, row, mine && t.lane == 0, mean, var < 0 ? (A)0 : var);
#pragma unroll 1
        for (int64_t u = t.lane; u < runs; u += t.size) {
            run<T, RUN> in = *(const run<T, RUN> *)(x + u * RUN);
            A v[RUN];
#pragma unroll
            for (int e = 0; e < RUN; e++) v[e] = widen(in.v[e]);
            put<RUN>(a, (T *)a.out + row * a.n, u * RUN, v, mean, rstd);
        }
    }
    template <class TEAM, int RUN, int HELD>
    static __device__ __forceinline__ void go(const layer_norm_args &a, const TEAM &t, A *slots) {
        for (int64_t first = (int64_t)blockIdx.x * t.lines; first < a.rows; first += (int64_t)gridDim.x * t.lines) {
            bool mine = first + t.line < a.rows;
            int64_t row = mine ? first + t.line : 0;
            if constexpr (HELD > 0) held<RUN, HELD>(a, t, row, mine, slots);
            else again<RUN>(a, t, row, mine, slots);
        }
    }
};
template <class T> static __device__ void layer_norm_body(const layer_norm_args &a) {
    __shared__ WIDE(T) slots[32];
    by_rows<T, layer_norm_fn<T>, 16>(a, slots);
}
LINE_FLOATS(layer_norm, layer_norm_args, 3)

/* ---- gradients: dx = rstd (gw - mean(gw) - xhat mean(gw xhat)), gw = g weight ---- */

template <class T> struct layer_norm_grad_fn {
    typedef WIDE(T) A;
    /* A row's dx; dw += g xhat, db += g. */
    template <int RUN, int HELD>
    static __device__ __forceinline__ void held(const layer_norm_args &a, const row_team &t, int64_t row, bool mine,
                                                A *dw, A *db, A *slots) {
        const int64_t runs = a.n / RUN;
        A g[HELD * RUN], x[HELD * RUN], mean = ((const A *)a.mean)[row], rstd = ((const A *)a.rstd)[row], sum = 0,
                                        along = 0;
        load_line<T, RUN, HELD>((const T *)a.in[0] + row * a.n, 1, runs, t, mine, (A)0, g);
        load_line<T, RUN, HELD>((const T *)a.in[1] + row * a.n, 1, runs, t, mine, mean, x);
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            A w[RUN];
            int64_t u = t.lane + (int64_t)k * t.size;
            if (!mine || u >= runs) continue;
            vector_run<T, RUN>(a.weight, u * RUN, 1, w);
#pragma unroll
            for (int e = 0; e < RUN; e++) {
                A &of = g[k * RUN + e], &hat = x[k * RUN + e];
                hat = (hat - mean) * rstd;
                dw[k * RUN + e] = FMA(of, hat, dw[k * RUN + e]);
                db[k * RUN + e] += of;
                of *= w[e];
                sum += of;
                along = FMA(of, hat, along);
            }
        }
        sum = t.over(sum, (A)0, add_op(), slots) / (A)a.n;
        along = t.over(along, (A)0, add_op(), slots) / (A)a.n;
#pragma unroll
        for (int k = 0; k < HELD * RUN; k++) g[k] = rstd * (g[k] - sum - x[k] * along);
        store_line<T, RUN, HELD>((T *)a.out + row * a.n, 1, runs, t, mine, g);
    }
    template <int RUN>
    static __device__ __forceinline__ void again(const layer_norm_args &a, const row_team &t, int64_t row, bool mine,
                                                 A *slots) {
        typedef run<T, RUN> R;
        const T *g = (const T *)a.in[0] + row * a.n, *x = (const T *)a.in[1] + row * a.n;
        int64_t runs = mine ? a.n / RUN : 0;
        A mean = ((const A *)a.mean)[row], rstd = ((const A *)a.rstd)[row], sum = 0, along = 0, w[RUN];
#pragma unroll 1
        for (int64_t u = t.lane; u < runs; u += t.size) {
            R gs = *(const R *)(g + u * RUN), xs = *(const R *)(x + u * RUN);
            vector_run<T, RUN>(a.weight, u * RUN, 1, w);
#pragma unroll
            for (int e = 0; e < RUN; e++) {
                A of = (A)widen(gs.v[e]) * w[e];
                sum += of;
                along = FMA(of, ((A)widen(xs.v[e]) - mean) * rstd, along);
            }
        }
        sum = t.over(sum, (A)0, add_op(), slots) / (A)a.n;
        along = t.over(along, (A)0, add_op(), slots) / (A)a.n;
#pragma unroll 1
        for (int64_t u = t.lane; u < runs; u += t.size) {
            R gs = *(const R *)(g + u * RUN), xs = *(const R *)(x + u * RUN), out;
            vector_run<T, RUN>(a.weight, u * RUN, 1, w);
#pragma unroll
            for (int e = 0; e < RUN; e++) {
                A hat = ((A)widen(xs.v[e]) - mean) * rstd;
                out.v[e] = narrow<T>(rstd * ((A)widen(gs.v[e]) * w[e] - sum - hat * along));
            }
            *(R *)((T *)a.out + row * a.n + u * RUN) = out;
        }
    }
    /* What the block's rows add up to, into its part. */
    template <int RUN, int HELD>
    static __device__ __forceinline__ void park(const layer_norm_args &a, const row_team &t, A *v, A *part, A *slots) {
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            int64_t u = t.lane + (int64_t)k * t.size;
            if (t.lines > 1) column_sums<RUN>(v + k * RUN, t.size, slots);
            if (t.line != 0 || u >= a.n / RUN) continue;
#pragma unroll
            for (int e = 0; e < RUN; e++) part[u * RUN + e] = v[k * RUN + e];
        }
    }
    template <class TEAM, int RUN, int HELD>
    static __device__ __forceinline__ void go(const layer_norm_args &a, const TEAM &t, A *slots) {
        const int SUMS = HELD > 0 ? HELD * RUN : 1;
        A dw[SUMS], db[SUMS];
#pragma unroll
        for (int k = 0; k < SUMS; k++) dw[k] = db[k] = 0;
        for (int64_t first = (int64_t)blockIdx.x * t.lines; first < a.rows; first += (int64_t)gridDim.x * t.lines) {
            bool mine = first + t.line < a.rows;
            int64_t row = mine ? first + t.line : 0;
            if constexpr (HELD > 0) held<RUN, HELD>(a, t, row, mine, dw, db, slots);
            else again<RUN>(a, t, row, mine, slots);
        }
        if constexpr (HELD > 0) {
            A *part = (A *)a.part + (int64_t)blockIdx.x * 2 * a.n;
            park<RUN, HELD>(a, t, dw, part, slots);
            park<RUN, HELD>(a, t, db, part + a.n, slots);
        }
    }
};
template <class T> static __device__ void layer_norm_grad_body(const layer_norm_args &a) {
    __shared__ WIDE(T) slots[run_of<T>::n * LINE_THREADS];
    by_rows<T, layer_norm_grad_fn<T>, 8>(a, slots);
}
LINE_FLOATS(layer_norm_grad, layer_norm_args, 2)

/* Sums of g xhat and of g over the rows of a share: a.lanes columns of runs a block. */
template <class T, int RUN>
static __device__ __forceinline__ void columns_by(const layer_norm_args &a, WIDE(T) * slots) {
    typedef WIDE(T) A;
    typedef run<T, RUN> R;
    column_team t(a.lanes);
    int64_t k = ((int64_t)blockIdx.x * t.lines + t.line) * RUN;
    int64_t lo = blockIdx.y * a.share, hi = lo + a.share < a.rows ? lo + a.share : a.rows;
    A s[2 * RUN];
#pragma unroll
    for (int e = 0; e < 2 * RUN; e++) s[e] = 0;
    for (int64_t row = lo + t.lane; row < hi && k < a.n; row += t.size) {
        R g = *(const R *)((const T *)a.in[0] + row * a.n + k), x = *(const R *)((const T *)a.in[1] + row * a.n + k);
        A mean = ((const A *)a.mean)[row], rstd = ((const A *)a.rstd)[row];
#pragma unroll
        for (int e = 0; e < RUN; e++) {
            s[e] = FMA((A)widen(g.v[e]), ((A)widen(x.v[e]) - mean) * rstd, s[e]);
            s[RUN + e] += widen(g.v[e]);
        }
    }
    column_sums<2 * RUN>(s, t.lines, slots);
    if (t.lane != 0 || k >= a.n) return;
    A *part = (A *)a.part + (int64_t)blockIdx.y * 2 * a.n + k;
#pragma unroll
    for (int e = 0; e < RUN; e++) {
        part[e] = s[e];
        part[a.n + e] = s[RUN + e];
    }
}
template <class T> static __device__ void layer_norm_columns_body(const layer_norm_args &a) {
    __shared__ WIDE(T) slots[2 * run_of<T>::n * LINE_THREADS];
    if (a.packed) columns_by<T, run_of<T>::n>(a, slots);
    else columns_by<T, 1>(a, slots);
}
LINE_FLOATS(layer_norm_columns, layer_norm_args, 3)

/* dweight and dbias: the parts together, 8 columns a block. */
template <class T> static __device__ void layer_norm_finish_body(const layer_norm_args &a) {
    typedef WIDE(T) A;
    __shared__ A slots[LINE_THREADS];
    column_team t(8);
    int64_t k = (int64_t)blockIdx.x * t.lines + t.line;
    A s[1] = {0};
    for (int p = t.lane; p < a.parts && k < 2 * a.n; p += t.size) s[0] += ((const A *)a.part)[(int64_t)p * 2 * a.n + k];
    column_sums<1>(s, t.lines, slots);
    if (t.lane != 0 || k >= 2 * a.n) return;
    void *out = k < a.n ? a.dweight : a.dbias;
    if (k >= a.n) k -= a.n;
    if (a.sums_wide) ((A *)out)[k] = s[0];
    else ((T *)out)[k] = narrow<T>(s[0]);
}
DEFINE_FLOATS(layer_norm_finish, layer_norm_args)
