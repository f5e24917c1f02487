/* index.cu -- picking by ids and adding back, joining, laying into zeros. Ids out of range are noted (fault_at), and taken as the
 * nearest that is in range. */
#include "places.cuh"

struct alignas(16) sixteen {
    unsigned long long v[2];
};

#define DEFINE_UNITS(name, args)                                    \
    DEFINE_KERNEL(name##_1, args, name##_units<unsigned char>)      \
    DEFINE_KERNEL(name##_2, args, name##_units<unsigned short>)     \
    DEFINE_KERNEL(name##_4, args, name##_units<unsigned>)           \
    DEFINE_KERNEL(name##_8, args, name##_units<unsigned long long>) \
    DEFINE_KERNEL(name##_16, args, name##_units<sixteen>)

/* ids[at], in range. */
static __device__ __forceinline__ int64_t id_of(const int64_t *ids, int64_t at, int64_t limit, int64_t *fault,
                                                int64_t op) {
    int64_t id = ids[at];
    if (id >= 0 && id < limit) return id;
    fault_at(fault, (int)op, id, limit);
    return id < 0 ? 0 : limit - 1;
}

/* ---- picking: one launch; reads what is picked once and its ids (a row's threads read the same one), writes y once ---- */

template <class U> static __device__ void take_units(const take_args &a) {
    for (int64_t i = thread_index(); i < a.at.n; i += thread_count()) {
        int64_t at[2];
        place_at<2>(a.at, i, at);
        int64_t id = id_of(a.ids, at[1], a.limit, a.fault, a.op);
        ((U *)a.y)[i] = ((const U *)a.x)[at[0] + id * a.step];
    }
}
DEFINE_UNITS(take, take_args)

/* ---- x laid into zeros: one launch; reads x once, writes y once ---- */

template <class U> static __device__ void lay_units(const lay_args &a) {
    for (int64_t i = thread_index(); i < a.at.n; i += thread_count()) {
        int64_t rest = i, at = 0;
        bool inside = true;
        for (int d = 0; d < a.at.ndim; d++) {
            int64_t q = a.at.below_2_31 ? divide(a.at.by[d], (unsigned)rest) : rest / a.at.size[d];
            int64_t r = rest - q * a.at.size[d];
            rest = q;
            at += r * a.at.stride[0][d];
            if (d != a.dim) continue;
            inside = r >= a.start && r < a.stop;
            if (inside && a.every > 1) {
                int64_t k = (unsigned)(r - a.start) / (unsigned)a.every;
                inside = (r - a.start) == k * a.every;
                at += k * a.step;
            } else {
                at += (r - a.start) * a.step;
            }
        }
        U out;
        memset(&out, 0, sizeof out);
        if (inside) out = ((const U *)a.x)[at];
        ((U *)a.y)[i] = out;
    }
}
DEFINE_UNITS(lay, lay_args)

/* ---- joining: one launch for up to JOIN_MAX tensors, blockIdx.y says which; each is read once and written once ---- */

template <class U> static __device__ void join_units(const join_args &a) {
    const U *x = (const U *)a.in[blockIdx.y].x;
    const int64_t n = a.in[blockIdx.y].n, piece = a.in[blockIdx.y].piece, x_row = a.in[blockIdx.y].x_row;
    U *y = (U *)a.y + a.in[blockIdx.y].to;
    if (piece == 0) return;
    /* Where a thread is goes on by one step, in rows and units, instead of being divided for each. */
    const int64_t step = thread_count(), step_row = step / piece, step_unit = step - step_row * piece;
    int64_t i = thread_index(), row = i / piece, unit = i - row * piece;
    for (; i < n; i += step) {
        y[row * a.y_row + unit] = x[row * x_row + unit];
        row += step_row;
        unit += step_unit;
        if (unit < piece) continue;
        unit -= piece;
        row++;
    }
}
DEFINE_UNITS(join, join_args)

/* ---- a stable sort of (key, value) by 8 bits of the key: sort_keys or sort_count, then sort_pass; each reads its pairs once ---- */

static __device__ __forceinline__ unsigned digit_of(const sort_args &a, uint32_t key) {
    return key >> a.shift & (SORT_DIGITS - 1);
}

/* Pairs of the tile that begins at `first` counted by digit; key(i) is that of pair i. */
template <class F> static __device__ __forceinline__ void count_tile(const sort_args &a, int64_t first, F key) {
    __shared__ unsigned count[SORT_DIGITS];
    count[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t i = first + threadIdx.x; i < first + SORT_TILE && i < a.n; i += SORT_THREADS)
        atomicAdd(&count[digit_of(a, key(i))], 1u);
    __syncthreads();
    a.counts[blockIdx.x * SORT_DIGITS + threadIdx.x] = count[threadIdx.x];
}

struct made_key {
    const sort_args &a;
    __device__ uint32_t operator()(int64_t i) const {
        int64_t at[3];
        place_at<3>(a.at, i, at);
        uint32_t key = (uint32_t)(at[2] + id_of(a.ids, at[0], a.limit, a.fault, a.op) * a.step);
        a.keys_out[i] = key;
        a.values_out[i] = at[1];
        return key;
    }
};
struct read_key {
    const sort_args &a;
    __device__ uint32_t operator()(int64_t i) const { return a.keys[i]; }
};
static __device__ void sort_keys_body(const sort_args &a) {
    made_key key = {a};
    count_tile(a, (int64_t)blockIdx.x * SORT_TILE, key);
}
DEFINE_KERNEL(sort_keys, sort_args, sort_keys_body)
static __device__ void sort_count_body(const sort_args &a) {
    read_key key = {a};
    count_tile(a, (int64_t)blockIdx.x * SORT_TILE, key);
}
DEFINE_KERNEL(sort_count, sort_args, sort_count_body)

/* Where pairs of digit threadIdx.x of this tile begin: behind all of smaller digits, and those of this one in earlier tiles. */
static __device__ __forceinline__ unsigned digit_begins(const sort_args &a, unsigned *slots) {
    unsigned before = 0, all = 0;
    for (unsigned t = 0; t < gridDim.x; t++) {
        unsigned n = a.counts[t * SORT_DIGITS + threadIdx.x];
        if (t < blockIdx.x) before += n;
        all += n;
    }
    unsigned sum = all; /* over the digits up to this one: within the warp, then over warps */
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int step = 1; step < 32; step *= 2) {
        unsigned v = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += v;
    }
    if (lane == 31) slots[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; w++) sum += slots[w];
    return sum - all + before;
}

static __device__ void sort_pass_body(const sort_args &a) {
    enum { WARPS = SORT_THREADS / 32 };
    __shared__ unsigned slots[WARPS], count[WARPS * SORT_DIGITS];
    const unsigned d = threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    unsigned begins = digit_begins(a, slots); /* of digit d: where its next pairs go */
    const int64_t first = (int64_t)blockIdx.x * SORT_TILE;
    for (int64_t from = first; from < first + SORT_TILE && from < a.n;
         from += SORT_THREADS) { /* in order: it stays stable */
        const int64_t i = from + threadIdx.x;
        const bool there = i < a.n;
        const uint32_t key = there ? a.keys[i] : 0;
        const unsigned digit = there ? digit_of(a, key) : (unsigned)SORT_DIGITS;
        for (int w = 0; w < WARPS; w++) count[w * SORT_DIGITS + d] = 0;
        __syncthreads();
        const unsigned same = __match_any_sync(0xffffffffu, digit);
        const unsigned rank = __popc(same & ((1u << lane) - 1));
        if (there && rank == 0) count[warp * SORT_DIGITS + digit] = __popc(same);
        __syncthreads();
        for (int w = 0; w < WARPS; w++) { /* each warp's behind the earlier warps' */
            unsigned n = count[w * SORT_DIGITS + d];
            count[w * SORT_DIGITS + d] = begins;
            begins += n;
        }
        __syncthreads();
        if (there) {
            const unsigned to = count[warp * SORT_DIGITS + digit] + rank;
            a.keys_out[to] = key;
            a.values_out[to] = a.values[i];
        }
        __syncthreads();
    }
}
DEFINE_KERNEL(sort_pass, sort_args, sort_pass_body)

/* ---- sorted rows added up: reads each row of g once, writes each row of dx that gets one once; and, of what spans chunks, a row
 * of sums each, which the second launch adds up ---- */

template <class T, int V> static __device__ __forceinline__ void put_sums(T *p, const WIDE(T) * sum) {
    lanes<T, V> out;
#pragma unroll
    for (int e = 0; e < V; e++) out.v[e] = narrow<T>(sum[e]);
    store_lanes(p, out);
}

template <class T, int V> static __device__ __forceinline__ void add_rows_packs(const add_rows_args &a) {
    enum { AHEAD = 4 };
    const int64_t columns = a.columns.n;
    for (int64_t t = thread_index(); t < a.chunks * columns; t += thread_count()) {
        const int64_t c = t / columns, q = t - c * columns, first = c * a.chunk, end = min(first + a.chunk, a.n);
        int64_t at[2];
        place_at<2>(a.columns, q, at);
        const T *g = (const T *)a.g + at[0];
        T *dx = (T *)a.dx + at[1];
        WIDE(T) *partial = (WIDE(T) *)a.partial + (2 * c * columns + q) * V;
        uint32_t key = a.keys[first];
        bool begun = first > 0 && a.keys[first - 1] == key; /* before this chunk */
        WIDE(T) sum[V];
#pragma unroll
        for (int e = 0; e < V; e++) sum[e] = 0;
        for (int64_t i = first; i < end; i += AHEAD) {
            lanes<T, V> in[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; k++)
                if (i + k < end) in[k] = load_lanes<V>(g + a.values[i + k]);
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                if (i + k >= end) break;
                const uint32_t next = a.keys[i + k];
                if (next != key) {
                    if (begun) put_sums<WIDE(T), V>(partial, sum);
                    else put_sums<T, V>(dx + (int64_t)key * a.row, sum);
#pragma unroll
                    for (int e = 0; e < V; e++) sum[e] = 0;
                    key = next;
                    begun = false;
                }
#pragma unroll
                for (int e = 0; e < V; e++) sum[e] += widen(in[k].v[e]);
            }
        }
        const bool goes_on = end < a.n && a.keys[end] == key;
        if (begun) put_sums<WIDE(T), V>(partial, sum);
        else if (goes_on) put_sums<WIDE(T), V>(partial + columns * V, sum);
        else put_sums<T, V>(dx + (int64_t)key * a.row, sum);
    }
}

/* Of each place that begins in a chunk and goes on after it: the chunks' sums, in order. */
template <class T, int V> static __device__ __forceinline__ void add_rows_rest_packs(const add_rows_args &a) {
    const int64_t columns = a.columns.n;
    for (int64_t t = thread_index(); t < (a.chunks - 1) * columns; t += thread_count()) {
        int64_t c = t / columns, q = t - c * columns, first = c * a.chunk, end = first + a.chunk;
        const uint32_t key = a.keys[end - 1];
        if (a.keys[end] != key || (first > 0 && a.keys[first - 1] == key && a.keys[first] == key)) continue;
        int64_t at[2];
        place_at<2>(a.columns, q, at);
        WIDE(T) sum[V];
        const WIDE(T) *partial = (const WIDE(T) *)a.partial + q * V;
#pragma unroll
        for (int e = 0; e < V; e++) sum[e] = partial[(2 * c + 1) * columns * V + e];
        do { /* the next chunk begins with this place */
            c++;
#pragma unroll
            for (int e = 0; e < V; e++) sum[e] += partial[2 * c * columns * V + e];
            end = min(end + a.chunk, a.n);
        } while (end < a.n && a.keys[end - 1] == key && a.keys[end] == key);
        put_sums<T, V>((T *)a.dx + at[1] + (int64_t)key * a.row, sum);
    }
}

#define DEFINE_ADDS(name)                                                           \
    template <class T> static __device__ void name##_body(const add_rows_args &a) { \
        if (a.vector) name##_packs<T, 16 / sizeof(T)>(a);                           \
        else name##_packs<T, 1>(a);                                                 \
    }                                                                               \
    DEFINE_ALL(name, add_rows_args)
DEFINE_ADDS(add_rows)
DEFINE_ADDS(add_rows_rest)

/* ---- few ids a column: the first element of those with one id adds them all up; one launch ---- */

template <class T> static __device__ void add_few_body(const add_few_args &a) {
    for (int64_t t = thread_index(); t < a.at.n * a.count; t += thread_count()) {
        const int64_t j = t / a.at.n, column = t - j * a.at.n;
        int64_t at[3];
        place_at<3>(a.at, column, at);
        const int64_t *ids = a.ids + at[1];
        const T *g = (const T *)a.g + at[0];
        const int64_t id = id_of(ids, j * a.id_step, a.limit, a.fault, a.op);
        bool first = true;
        WIDE(T) sum = 0;
        for (int64_t k = 0; k < a.count; k++) {
            const int64_t other = ids[k * a.id_step], near = other < 0 ? 0 : other < a.limit ? other : a.limit - 1;
            if (near != id) continue;
            if (k < j) first = false;
            if (k < j) break;
            sum += widen(g[k * a.g_step]);
        }
        if (first) ((T *)a.dx)[at[2] + id * a.dx_step] = narrow<T>(sum);
    }
}
DEFINE_ALL(add_few, add_few_args)
