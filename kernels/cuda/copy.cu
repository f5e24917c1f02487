/* copy.cu -- copies between layouts, casts, fills, where. */
#include "device.cuh"

/* ---- as they are ---- */

struct same_fn {
    template <class T> __device__ T operator()(const T *x) const { return x[0]; }
};
template <class T> static __device__ void copy_body(const walk_args &a) { walk<1, T, T>(a, same_fn()); }
DEFINE_KERNEL(copy_1, walk_args, copy_body<unsigned char>)
DEFINE_KERNEL(copy_2, walk_args, copy_body<unsigned short>)
DEFINE_KERNEL(copy_4, walk_args, copy_body<unsigned>)
DEFINE_KERNEL(copy_8, walk_args, copy_body<unsigned long long>)

/* ---- to another dtype: attr says which one it comes from, in the order of ddp_dtype ---- */

/* Out of floats into integers as C does it for values that fit. */
template <class T, class S> static __device__ void cast_from(const walk_args &a) { walk<1, T, S>(a, same_fn()); }
template <class T> static __device__ void cast_body(const walk_args &a) {
    switch (a.attr) {
        case 0: cast_from<T, float>(a); break;
        case 1: cast_from<T, double>(a); break;
        case 2: cast_from<T, f16>(a); break;
        case 3: cast_from<T, bf16>(a); break;
        case 4: cast_from<T, long long>(a); break;
        case 5: cast_from<T, int>(a); break;
        case 6: cast_from<T, unsigned char>(a); break;
        default: cast_from<T, bool8>(a); break;
    }
}
DEFINE_ALL(cast, walk_args)

/* ---- one value: attrs[0] ---- */

struct fill_fn {
    double value;
    template <class T> __device__ double operator()(const T *) const { return value; }
};
template <class T> static __device__ void fill_body(const walk_args &a) {
    fill_fn f = {a.attrs[0]};
    walk<0, T, T>(a, f);
}
DEFINE_ALL(fill, walk_args)

/* ---- where: operand 1 chooses between 2 and 3 ---- */

template <class T> static __device__ void where_body(const walk_args &a) {
    for (int64_t i = thread_index(); i < a.n; i += thread_count()) {
        int64_t at[4] = {i, i, i, i};
        if (a.ndim) walk_at<4>(a, i, at);
        T *y = (T *)a.p[0] + at[0]; /* no index that is chosen at run time: arrays stay in registers */
        if (a.p[1] ? ((const unsigned char *)a.p[1])[at[1]] != 0 : a.whole[1] != 0)
            *y = a.p[2] ? ((const T *)a.p[2])[at[2]] : narrow<T>(number_of<T>::get(a, 2));
        else *y = a.p[3] ? ((const T *)a.p[3])[at[3]] : narrow<T>(number_of<T>::get(a, 3));
    }
}
DEFINE_ALL(where, walk_args)
