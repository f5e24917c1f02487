/* held.cuh -- lines whose elements stay on the threads that share them, or are read again: which of these suits a call, and what
 * softmax and cross-entropy find out of a line. */
#ifndef DDP_CUDA_HELD_CUH
#define DDP_CUDA_HELD_CUH

#include "lines.cuh"

/* v[k RUN ..] = run lane + k size of x, step elements from one to the next; `none` where there is none. */
template <class T, int RUN, int HELD, class TEAM>
static __device__ __forceinline__ void load_line(const T *x, int64_t step, int64_t runs, const TEAM &t, bool mine,
                                                 WIDE(T) none, WIDE(T) * v) {
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        int64_t u = t.lane + (int64_t)k * t.size;
        if (mine && u < runs) {
            run<T, RUN> in = *(const run<T, RUN> *)(x + u * RUN * step);
#pragma unroll
            for (int e = 0; e < RUN; e++) v[k * RUN + e] = widen(in.v[e]);
        } else {
#pragma unroll
            for (int e = 0; e < RUN; e++) v[k * RUN + e] = none;
        }
    }
}
template <class T, int RUN, int HELD, class TEAM>
static __device__ __forceinline__ void store_line(T *y, int64_t step, int64_t runs, const TEAM &t, bool mine,
                                                  const WIDE(T) * v) {
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        int64_t u = t.lane + (int64_t)k * t.size;
        if (!mine || u >= runs) continue;
        run<T, RUN> out;
#pragma unroll
        for (int e = 0; e < RUN; e++) out.v[e] = narrow<T>(v[k * RUN + e]);
        *(run<T, RUN> *)(y + u * RUN * step) = out;
    }
}

/* A line's largest element and the sum of e^(x - largest), in one read (Milakov & Gimelshein 2018): a larger element scales
 * the sum so far. Elements equal to the largest count 1 also where it is -inf, until a finite one comes; a line whose largest is
 * infinite has the sum NaN, as inf - inf gives it. */
template <class T, int RUN, class TEAM>
static __device__ __forceinline__ void top_and_sum(const T *x, int64_t step, int64_t runs, const TEAM &t,
                                                   WIDE(T) * slots, WIDE(T) * top_out, WIDE(T) * sum_out) {
    typedef WIDE(T) A;
    A top = -infinity_of((A)0), sum = 0;
    for (int64_t u = t.lane; u < runs; u += t.size) {
        run<T, RUN> in = *(const run<T, RUN> *)(x + u * RUN * step);
        A best = top;
#pragma unroll
        for (int e = 0; e < RUN; e++) best = max_op()(best, (A)widen(in.v[e]));
        if (best > top) sum *= EXP(top - best);
        top = best;
#pragma unroll
        for (int e = 0; e < RUN; e++) {
            A v = widen(in.v[e]);
            sum += v == top ? (A)1 : EXP(v - top);
        }
    }
    A all = t.over(top, -infinity_of((A)0), max_op(), slots);
    if (top != all) sum *= EXP(top - all);
    sum = t.over(sum, (A)0, add_op(), slots);
    *top_out = all;
    *sum_out = is_finite(all) ? sum : all - all;
}

/* The lines of a call by the team that suits them; VALUES of them (of 4 bytes; 8 where runs do not fit) stay on a thread
 * at most. FN::go<TEAM, RUN, HELD>:
 * HELD runs of RUN elements a thread; HELD 0: lines are too long for that. */
template <class T, class FN, int VALUES, class ARGS>
static __device__ __forceinline__ void by_rows(const ARGS &a, WIDE(T) * slots) {
    const int RUN = run_of<T>::n, HELD = VALUES * 4 / (int)sizeof(WIDE(T)) / RUN;
    const int SINGLE = 8 * 4 / (int)sizeof(WIDE(T));
    row_team t(a.lanes);
    if (a.packed) {
        if (a.n <= (int64_t)RUN * t.size) FN::template go<row_team, RUN, 1>(a, t, slots);
        else if (a.n <= (int64_t)HELD * RUN * t.size) FN::template go<row_team, RUN, HELD>(a, t, slots);
        else FN::template go<row_team, RUN, 0>(a, t, slots);
    } else {
        if (a.n <= (int64_t)t.size) FN::template go<row_team, 1, 1>(a, t, slots);
        else if (a.n <= SINGLE * (int64_t)t.size) FN::template go<row_team, 1, SINGLE>(a, t, slots);
        else FN::template go<row_team, 1, 0>(a, t, slots);
    }
}
template <class T, class FN, int VALUES, class ARGS> static __device__ __forceinline__ void by_lines(const ARGS &a) {
    __shared__ WIDE(T) slots[LINE_THREADS];
    if (!a.across) {
        by_rows<T, FN, VALUES>(a, slots);
        return;
    }
    column_team t(a.lanes);
    if (a.n <= 8 * (int64_t)t.size) FN::template go<column_team, 1, 8>(a, t, slots);
    else FN::template go<column_team, 1, 0>(a, t, slots);
}

/* The same where lines are not held anyway. */
template <class T, class FN, class ARGS> static __device__ __forceinline__ void by_lines_again(const ARGS &a) {
    __shared__ WIDE(T) slots[LINE_THREADS];
    if (a.across) FN::template go<column_team, 1, 0>(a, column_team(a.lanes), slots);
    else if (a.packed) FN::template go<row_team, run_of<T>::n, 0>(a, row_team(a.lanes), slots);
    else FN::template go<row_team, 1, 0>(a, row_team(a.lanes), slots);
}

#endif
