/* optim.cu -- what is done to many tensors in one launch: optimizer steps, and gradients before them. A block owns LIST_CHUNK elements
 * of one tensor; tensors that lie apart in memory go by walks of their own. */
#include "places.cuh"

#define DEFINE_TWO(name, args)                          \
    DEFINE_KERNEL(name##_f32, args, name##_body<float>) \
    DEFINE_KERNEL(name##_f64, args, name##_body<double>)

/* Where block b of a list works: elements [lo, hi) of tensor k. */
struct span {
    int k;
    int64_t lo, hi;
};
static __device__ __forceinline__ span span_of(const list_of_tensors &l, int b) {
    int lo = 0, hi = l.n; /* the last tensor that begins at b or before */
    while (hi - lo > 1) {
        int middle = (lo + hi) / 2;
        if (l.first[middle] <= b) lo = middle;
        else hi = middle;
    }
    span s = {lo, (int64_t)(b - l.first[lo]) * LIST_CHUNK, 0};
    s.hi = min(s.lo + LIST_CHUNK, l.numel[lo]);
    return s;
}

/* f(operands...) for each element of the span: PER at a time where all lie on 16 bytes. f has K pointers; it reads those of the bits
 * `reads` and writes those of the bits `writes`. */
template <class T, int K, class F>
static __device__ __forceinline__ void each_of_list(const list_of_tensors &l, unsigned reads, unsigned writes, F &f) {
    enum { PER = 16 / sizeof(T) };
    const span s = span_of(l, blockIdx.x);
    T *p[K];
#pragma unroll
    for (int k = 0; k < K; k++) p[k] = (T *)l.p[k][s.k];
    int64_t i = s.lo + threadIdx.x * PER;
    for (; l.vector && i + PER <= s.hi; i += blockDim.x * PER) {
        lanes<T, PER> x[K];
#pragma unroll
        for (int k = 0; k < K; k++)
            if (reads >> k & 1) x[k] = load_lanes<PER>(p[k] + i);
#pragma unroll
        for (int e = 0; e < PER; e++) {
            T v[K];
#pragma unroll
            for (int k = 0; k < K; k++) v[k] = reads >> k & 1 ? x[k].v[e] : 0;
            f(v);
#pragma unroll
            for (int k = 0; k < K; k++) x[k].v[e] = v[k];
        }
#pragma unroll
        for (int k = 0; k < K; k++)
            if (writes >> k & 1) store_lanes(p[k] + i, x[k]);
    }
    if (l.vector) i = s.hi / PER * PER + threadIdx.x; /* what is left of the tensor */
    else i = s.lo + threadIdx.x;
    for (; i < s.hi; i += blockDim.x) {
        T v[K];
#pragma unroll
        for (int k = 0; k < K; k++) v[k] = reads >> k & 1 ? p[k][i] : 0;
        f(v);
#pragma unroll
        for (int k = 0; k < K; k++)
            if (writes >> k & 1) p[k][i] = v[k];
    }
}
/* The same for tensors in any layout. */
template <class T, int K, class F>
static __device__ __forceinline__ void each_of_walk(const walk_args &a, unsigned reads, unsigned writes, F &f) {
    for (int64_t i = thread_index(); i < a.n; i += thread_count()) {
        int64_t at[K];
        T v[K];
#pragma unroll
        for (int k = 0; k < K; k++) at[k] = i;
        if (a.ndim) walk_at<K>(a, i, at);
#pragma unroll
        for (int k = 0; k < K; k++) v[k] = reads >> k & 1 ? ((const T *)a.p[k])[at[k]] : 0;
        f(v);
#pragma unroll
        for (int k = 0; k < K; k++)
            if (writes >> k & 1) ((T *)a.p[k])[at[k]] = v[k];
    }
}

/* ---- SGD: reads and writes the parameter and its buffer, reads the gradient (writes it where it is kept) ---- */

template <class T> struct sgd_fn {
    T lr, momentum, remains, decay, by;
    bool nesterov, first, has_momentum;
    unsigned reads, writes;
    __device__ sgd_fn(const sgd_numbers &n)
        : lr((T)n.lr), momentum((T)n.momentum), remains((T)n.remains), decay((T)n.decay), by((T)n.by),
          nesterov(n.nesterov != 0), first(n.first != 0), has_momentum(n.has_momentum != 0) {
        reads = 3u | (has_momentum && !first ? 4u : 0);
        writes = 1u | (n.keep ? 2u : 0) | (has_momentum ? 4u : 0);
    }
    /* parameter, gradient, buffer */
    __device__ void operator()(T *v) const {
        const T g = by * v[1];
        T d = g + decay * v[0];
        v[1] = g;
        if (has_momentum) {
            v[2] = first ? d : momentum * v[2] + remains * d;
            d = nesterov ? d + momentum * v[2] : v[2];
        }
        v[0] -= lr * d;
    }
};
template <class T> static __device__ void sgd_list_body(const sgd_args &a) {
    sgd_fn<T> f(a.by);
    each_of_list<T, 3>(a.list, f.reads, f.writes, f);
}
DEFINE_TWO(sgd_list, sgd_args)
template <class T> static __device__ void sgd_walk_body(const sgd_walk_args &a) {
    sgd_fn<T> f(a.by);
    each_of_walk<T, 3>(a.walk, f.reads, f.writes, f);
}
DEFINE_TWO(sgd_walk, sgd_walk_args)

/* ---- Adam: reads and writes the parameter and both moments, reads the gradient (writes it where it is kept) ---- */

template <class T> struct adam_fn {
    T b1, b2, r1, r2, rate, c2, eps, shrink, l2, by;
    __device__ adam_fn(const adam_numbers &n)
        : b1((T)n.b1), b2((T)n.b2), r1((T)n.r1), r2((T)n.r2), rate((T)n.rate), c2((T)n.c2), eps((T)n.eps),
          shrink((T)n.shrink), l2((T)n.l2), by((T)n.by) {}
    /* parameter, gradient, m, v */
    __device__ void operator()(T *x) const {
        const T own = by * x[1], g = own + l2 * x[0];
        x[1] = own;
        x[2] = b1 * x[2] + r1 * g;
        x[3] = b2 * x[3] + r2 * g * g;
        x[0] = x[0] * shrink - rate * x[2] / (SQRT(x[3]) * c2 + eps);
    }
};
template <class T> static __device__ void adam_list_body(const adam_args &a) {
    adam_fn<T> f(a.by);
    each_of_list<T, 4>(a.list, 15u, a.by.keep ? 15u : 13u, f);
}
DEFINE_TWO(adam_list, adam_args)
template <class T> static __device__ void adam_walk_body(const adam_walk_args &a) {
    adam_fn<T> f(a.by);
    each_of_walk<T, 4>(a.walk, 15u, a.by.keep ? 15u : 13u, f);
}
DEFINE_TWO(adam_walk, adam_walk_args)

/* ---- the sum of squares: reads each gradient once; a block writes its sum, and norm_of_sums adds those up in one order ---- */

static __device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= 3.402823466e+38f; }
static __device__ __forceinline__ bool is_finite(double x) { return fabs(x) <= 1.7976931348623157e+308; }

/* Squares in T over few elements; in double where one overflows f32. */
template <class T> struct squares_fn {
    T sum;
    double wide;
    bool bad;
    __device__ void operator()(T *v) {
        const T x = v[0], more = sum + x * x;
        bad |= !is_finite(x);
        if (is_finite(more)) sum = more;
        else wide += (double)x * (double)x;
    }
};
template <class T> static __device__ __forceinline__ void put_squares(const squares_fn<T> &f, double *sums) {
    __shared__ double slots[32];
    const double sum = block_sum((double)f.sum + f.wide, slots);
    const int bad = __syncthreads_or(f.bad);
    if (threadIdx.x) return;
    sums[2 * blockIdx.x] = sum;
    sums[2 * blockIdx.x + 1] = bad ? 1 : 0;
}
template <class T> static __device__ void squares_list_body(const gradients_args &a) {
    squares_fn<T> f = {0, 0, false};
    each_of_list<T, 1>(a.list, 1u, 0u, f);
    put_squares(f, a.by.sums);
}
DEFINE_TWO(squares_list, gradients_args)
template <class T> static __device__ void squares_walk_body(const gradients_walk_args &a) {
    squares_fn<T> f = {0, 0, false};
    each_of_walk<T, 1>(a.walk, 1u, 0u, f);
    put_squares(f, a.by.sums);
}
DEFINE_TWO(squares_walk, gradients_walk_args)

/* One block. */
static __device__ void norm_of_sums_body(const grad_norm_args &a) {
    __shared__ double slots[32];
    double sum = 0;
    int bad = 0;
    for (int64_t i = threadIdx.x; i < a.n; i += blockDim.x) {
        sum += a.sums[2 * i];
        bad |= a.sums[2 * i + 1] != 0;
    }
    sum = block_sum(sum, slots);
    bad = __syncthreads_or(bad);
    if (threadIdx.x) return;
    const double norm = sqrt(sum) * a.inv_scale;
    if (a.norm_f64) *(double *)a.norm = norm;
    else *(float *)a.norm = (float)norm;
    if (a.found) *a.found = bad ? 1.0f : 0.0f;
}
DEFINE_KERNEL(norm_of_sums, grad_norm_args, norm_of_sums_body)

/* ---- times a number: reads and writes each gradient; nothing where the norm is small enough ---- */

template <class T> struct scale_fn {
    T by;
    bool bad;
    __device__ void operator()(T *v) {
        bad |= !is_finite(v[0]);
        v[0] *= by;
    }
};
/* Whether there is anything to do; then f is ready. */
template <class T> static __device__ __forceinline__ bool scale_begins(const gradient_numbers &n, scale_fn<T> &f) {
    f.bad = false;
    f.by = (T)n.by;
    if (!n.norm) return true;
    const double norm = n.norm_f64 ? *(const double *)n.norm : (double)*(const float *)n.norm;
    const double by = n.max_norm / (norm + 1e-6);
    f.by = (T)by;
    return !(by >= 1); /* NaN scales too */
}
template <class T> static __device__ __forceinline__ void scale_ends(const gradient_numbers &n, const scale_fn<T> &f) {
    if (n.found && f.bad) atomicExch((unsigned *)n.found, 0x3f800000u); /* 1.0f, by whoever comes */
}
template <class T> static __device__ void scale_list_body(const gradients_args &a) {
    scale_fn<T> f;
    if (scale_begins(a.by, f)) each_of_list<T, 1>(a.list, 1u, 1u, f);
    scale_ends(a.by, f);
}
DEFINE_TWO(scale_list, gradients_args)
template <class T> static __device__ void scale_walk_body(const gradients_walk_args &a) {
    scale_fn<T> f;
    if (scale_begins(a.by, f)) each_of_walk<T, 1>(a.walk, 1u, 1u, f);
    scale_ends(a.by, f);
}
DEFINE_TWO(scale_walk, gradients_walk_args)
