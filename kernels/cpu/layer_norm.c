/* layer_norm.c -- layer normalisation and its gradient on rows that lie together, f32 or 16-bit. Rows are taken several at a
 * time, as many as stay in the nearest cache between the passes over them: their sums across vectors are made side by side. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=fast")
#endif
#include <math.h>
#include <string.h>

#include "../../core/mem/mem.h"
#include "vectors.h"

enum { PARTS = 16, NEAR = 12 << 10, BLOCK = 64, FLUSH = 128 };

static const char *reject(const ddp_call *c) {
    for (int i = 0; i < c->n_in; i++)
        if (c->in[i] && !ddp__meta_is_rowmajor(&c->in[i]->m)) return "not row-major";
    if (!cpu_f32_or_half(c->in[0]) || c->in[0]->numel == 0) return "f32, f16 or bf16 that is not empty only";
    return NULL;
}

/* rows of n elements: y from x; backward dx from g and x. */
typedef struct layer {
    ddp_dtype d;
    const void *g, *x;
    void *y;
    int64_t rows, n, near; /* near: rows at a time */
    const float *w, *b;    /* [n], then 0 up to a whole vector */
    float *mean, *rstd;    /* [rows] */
    float eps;
    double *sums; /* backward: [PARTS][2][n], dweight and dbias of the parts' rows, */
    float *some;  /* and [PARTS][2][whole(n)] of the last FLUSH rows */
} layer;

static int64_t whole(int64_t n) { return (n + CPU_W - 1) / CPU_W * CPU_W; }

/* ---- vectors at a row's end: m < CPU_W elements ---- */

CPU_INLINE cpu_vec first_lanes(cpu_vec v, int64_t m) {
    static const int32_t keep[32] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    return (cpu_vec)((cpu_bits)v & (cpu_bits)cpu_load(DDP_F32, keep, 16 - m));
}
/* The elements, then 0. What follows them belongs to the next row; the last row is read by way of a buffer. */
CPU_INLINE cpu_vec load_end(const layer *l, ddp_dtype d, const void *p, int64_t i, int64_t m) {
    float last[CPU_W] = {0};
    if (i + CPU_W <= l->rows * l->n) return first_lanes(cpu_load(d, p, i), m);
    memcpy(last, cpu_at(d, p, i), (size_t)m * ddp__dtype_bytes[d]);
    return cpu_load(d, last, 0);
}
CPU_INLINE void store_end(ddp_dtype d, void *p, int64_t i, cpu_vec v, int64_t m) {
    float last[CPU_W];
#if defined(__AVX512F__)
    if (d == DDP_F32) {
        _mm512_mask_storeu_ps((float *)p + i, (__mmask16)((1u << m) - 1), (__m512)v);
        return;
    }
#endif
    cpu_store(d, last, 0, v);
    memcpy(cpu_at(d, p, i), last, (size_t)m * ddp__dtype_bytes[d]);
}

/* Lane r: the sum of v[r]. Overwrites v. */
CPU_INLINE cpu_vec sums_of(cpu_vec *v) {
    static const int32_t lane[16] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    const cpu_bits even = (cpu_bits)cpu_load(DDP_F32, lane, 0);
#pragma GCC unroll 4
    for (int n = CPU_W / 2; n > 0; n /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < n; i++)
            v[i] =
                __builtin_shuffle(v[2 * i], v[2 * i + 1], even) + __builtin_shuffle(v[2 * i], v[2 * i + 1], even + 1);
    return v[0];
}

/* ---- forward ---- */

/* x, or (x - mean)^2. */
CPU_INLINE cpu_vec term(cpu_vec x, cpu_vec mean, bool squared) {
    if (squared) return (x - mean) * (x - mean);
    return x;
}

/* The sum over a row, spread over the lanes. */
CPU_INLINE cpu_vec row_sums(const layer *l, ddp_dtype d, int64_t row, float mean, bool squared) {
    const cpu_vec shift = all_of(mean);
    const int64_t end = row + l->n;
    cpu_vec sum = {0};
    int64_t i = row;
    while (i + CPU_W <= end) {
        cpu_vec s[4] = {{0}};
        const int64_t stop = end - i < BLOCK * CPU_W ? end : i + BLOCK * CPU_W;
        for (; i + 4 * CPU_W <= stop; i += 4 * CPU_W)
            for (int v = 0; v < 4; v++) s[v] += term(cpu_load(d, l->x, i + v * CPU_W), shift, squared);
        for (; i + CPU_W <= stop; i += CPU_W) s[0] += term(cpu_load(d, l->x, i), shift, squared);
        sum += (s[0] + s[1]) + (s[2] + s[3]);
    }
    if (i < end) sum += first_lanes(term(load_end(l, d, l->x, i, end - i), shift, squared), end - i);
    return sum;
}

CPU_INLINE cpu_vec normal(cpu_vec x, cpu_vec mean, cpu_vec rstd, const float *w, const float *b) {
    return (x - mean) * rstd * cpu_load(DDP_F32, w, 0) + cpu_load(DDP_F32, b, 0);
}
CPU_INLINE void normalise(const layer *l, ddp_dtype d, int64_t row, float mean, float rstd) {
    const cpu_vec m = all_of(mean), s = all_of(rstd);
    int64_t k = 0;
    for (; k + CPU_W <= l->n; k += CPU_W)
        cpu_store(d, l->y, row + k, normal(cpu_load(d, l->x, row + k), m, s, l->w + k, l->b + k));
    if (k == l->n) return;
    cpu_vec y = normal(load_end(l, d, l->x, row + k, l->n - k), m, s, l->w + k, l->b + k);
    store_end(d, l->y, row + k, y, l->n - k);
}

/* `rows` rows, CPU_W at most, from the r-th on. */
CPU_INLINE void forward_rows(const layer *l, ddp_dtype d, int64_t r, int64_t rows) {
    cpu_vec sum[CPU_W] = {{0}};
    float mean[CPU_W], rstd[CPU_W];
    const float n = (float)l->n;
    for (int64_t k = 0; k < rows; k++) {
        cpu_fetch(d, l->x, (r + rows + k) * l->n, l->n);
        sum[k] = row_sums(l, d, (r + k) * l->n, 0, false);
    }
    cpu_store(DDP_F32, mean, 0, sums_of(sum) / n);
    for (int64_t k = 0; k < rows; k++) sum[k] = row_sums(l, d, (r + k) * l->n, mean[k], true);
    cpu_store(DDP_F32, rstd, 0, sums_of(sum) / n + l->eps);
#pragma omp simd
    for (int k = 0; k < CPU_W; k++) rstd[k] = 1 / sqrtf(rstd[k]);
    for (int64_t k = 0; k < rows; k++) {
        l->mean[r + k] = mean[k];
        l->rstd[r + k] = rstd[k];
        normalise(l, d, (r + k) * l->n, mean[k], rstd[k]);
    }
}

/* Groups [lo, hi) of `near` rows. */
static void forward(const void *ctx, int64_t lo, int64_t hi) {
    const layer l = *(const layer *)ctx;
    for (int64_t r = lo * l.near; r < hi * l.near && r < l.rows; r += l.near) {
        int64_t rows = l.rows - r < l.near ? l.rows - r : l.near;
        if (l.d == DDP_BF16) forward_rows(&l, DDP_BF16, r, rows);
        else if (l.d == DDP_F16) forward_rows(&l, DDP_F16, r, rows);
        else forward_rows(&l, DDP_F32, r, rows);
    }
}

/* t, or n times `none`, as floats at `to`, then 0 up to a whole vector. */
static const float *vector(const ddp_tensor *t, float none, float *to, int64_t n) {
    memset(to, 0, (size_t)whole(n) * sizeof *to);
    if (t) cpu_widen(t->m.dtype, ddp__ptr(t), 0, to, n);
    else
        for (int64_t k = 0; k < n; k++) to[k] = none;
    return to;
}
/* Rows at a time: so many that `bytes` an element come to NEAR. */
static int64_t near_rows(int64_t n, int64_t bytes) {
    int64_t rows = NEAR / (n * bytes);
    return rows < 1 ? 1 : rows > CPU_W ? CPU_W : rows;
}

static int run_layer_norm(const ddp_call *c) {
    const ddp_tensor *x = c->in[0];
    int64_t rows = c->out[1]->numel, n = x->numel / rows;
    size_t bytes = 2 * (size_t)whole(n) * sizeof(float);
    float *scratch = ddp__scratch_take(bytes);
    if (!scratch) return ddp__pending();
    layer l = {.d = x->m.dtype, .x = ddp__ptr(x), .y = ddp__ptr(c->out[0]), .rows = rows, .n = n};
    l.near = near_rows(n, 6); /* y too */
    l.eps = (float)((const ddp_layer_norm_attrs *)c->attrs)->eps;
    l.w = vector(c->in[1], 1, scratch, n);
    l.b = vector(c->in[2], 0, scratch + whole(n), n);
    l.mean = cpu_f32(c->out[1]);
    l.rstd = cpu_f32(c->out[2]);
    cpu_share((rows + l.near - 1) / l.near, x->numel, forward, &l);
    ddp__scratch_give(scratch, bytes);
    return 0;
}
CPU_KERNEL(layer_norm, reject, run_layer_norm);

/* ---- backward: dx = rstd (g w - mean(g w) - xhat mean(g w xhat)), dweight = sum of g xhat, dbias = sum of g ---- */

/* m elements of row r from the k-th on: along the row g w and g w xhat are added to a and b, down the columns g xhat and g to
 * dw and db. */
CPU_INLINE void grad_vector(const layer *l, ddp_dtype d, int64_t r, int64_t k, int64_t m, float *dw, float *db,
                            cpu_vec *a, cpu_vec *b) {
    const int64_t i = r * l->n + k;
    const cpu_vec g = m == CPU_W ? cpu_load(d, l->g, i) : load_end(l, d, l->g, i, m);
    const cpu_vec x = m == CPU_W ? cpu_load(d, l->x, i) : load_end(l, d, l->x, i, m);
    const cpu_vec xhat = (x - l->mean[r]) * l->rstd[r], u = g * cpu_load(DDP_F32, l->w, k);
    *a += u;
    *b += u * xhat;
    cpu_store(DDP_F32, dw, k, cpu_load(DDP_F32, dw, k) + g * xhat);
    cpu_store(DDP_F32, db, k, cpu_load(DDP_F32, db, k) + g);
}
CPU_INLINE void grad_sums(const layer *l, ddp_dtype d, int64_t r, float *dw, float *db, cpu_vec *along,
                          cpu_vec *across) {
    cpu_vec a[2] = {{0}}, b[2] = {{0}};
    int64_t k = 0;
    for (; k + 2 * CPU_W <= l->n; k += 2 * CPU_W)
        for (int v = 0; v < 2; v++) grad_vector(l, d, r, k + v * CPU_W, CPU_W, dw, db, a + v, b + v);
    for (; k + CPU_W <= l->n; k += CPU_W) grad_vector(l, d, r, k, CPU_W, dw, db, a, b);
    if (k < l->n) grad_vector(l, d, r, k, l->n - k, dw, db, a, b);
    *along = a[0] + a[1];
    *across = b[0] + b[1];
}

CPU_INLINE void grad_row(const layer *l, ddp_dtype d, int64_t r, float all, float along) {
    const cpu_vec mean = all_of(l->mean[r]), rstd = all_of(l->rstd[r]), a = all_of(all), b = all_of(along);
    const int64_t row = r * l->n;
    for (int64_t k = 0; k < l->n; k += CPU_W) {
        const bool end = k + CPU_W > l->n;
        const cpu_vec g = end ? load_end(l, d, l->g, row + k, l->n - k) : cpu_load(d, l->g, row + k);
        const cpu_vec x = end ? load_end(l, d, l->x, row + k, l->n - k) : cpu_load(d, l->x, row + k);
        const cpu_vec y = rstd * ((g * cpu_load(DDP_F32, l->w, k) - a) - (x - mean) * rstd * b);
        if (end) store_end(d, l->y, row + k, y, l->n - k);
        else cpu_store(d, l->y, row + k, y);
    }
}

CPU_INLINE void backward_rows(const layer *l, ddp_dtype d, int64_t r, int64_t rows, float *dw, float *db) {
    cpu_vec a[CPU_W] = {{0}}, b[CPU_W] = {{0}};
    float all[CPU_W], along[CPU_W];
    for (int64_t k = 0; k < rows; k++) grad_sums(l, d, r + k, dw, db, a + k, b + k);
    cpu_store(DDP_F32, all, 0, sums_of(a) / (float)l->n);
    cpu_store(DDP_F32, along, 0, sums_of(b) / (float)l->n);
    for (int64_t k = 0; k < rows; k++) grad_row(l, d, r + k, all[k], along[k]);
}

/* Parts [lo, hi) of the rows: as many whatever the threads. */
static void backward_parts(const void *ctx, int64_t lo, int64_t hi) {
    const layer l = *(const layer *)ctx;
    const int64_t wide = whole(l.n);
    for (int64_t p = lo; p < hi; p++) {
        float *some = l.some + 2 * p * wide;
        double *sums = l.sums + 2 * p * l.n;
        const int64_t end = l.rows * (p + 1) / PARTS;
        memset(sums, 0, 2 * (size_t)l.n * sizeof *sums);
        for (int64_t r = l.rows * p / PARTS; r < end;) {
            const int64_t stop = end - r < FLUSH ? end : r + FLUSH;
            memset(some, 0, 2 * (size_t)wide * sizeof *some);
            for (int64_t rows; r < stop; r += rows) {
                rows = stop - r < l.near ? stop - r : l.near;
                if (l.d == DDP_BF16) backward_rows(&l, DDP_BF16, r, rows, some, some + wide);
                else if (l.d == DDP_F16) backward_rows(&l, DDP_F16, r, rows, some, some + wide);
                else backward_rows(&l, DDP_F32, r, rows, some, some + wide);
            }
            for (int64_t k = 0; k < l.n; k++) {
                sums[k] += some[k];
                sums[l.n + k] += some[wide + k];
            }
        }
    }
}

static int run_layer_norm_grad(const ddp_call *c) {
    const ddp_tensor *x = c->in[1];
    int64_t rows = c->in[3]->numel, n = x->numel / rows;
    size_t doubles = 2 * PARTS * (size_t)n, floats = (2 * PARTS + 1) * (size_t)whole(n);
    size_t bytes = doubles * sizeof(double) + floats * sizeof(float);
    double *sums = ddp__scratch_take(bytes);
    if (!sums) return ddp__pending();
    layer l = {.d = x->m.dtype, .x = ddp__ptr(x), .y = ddp__ptr(c->out[0]), .rows = rows, .n = n, .sums = sums};
    l.g = ddp__ptr(c->in[0]);
    l.near = near_rows(n, 16); /* more would leave memory idle during a pass, as measured */
    l.some = (float *)(void *)(sums + doubles);
    l.w = vector(c->in[2], 1, l.some + 2 * PARTS * whole(n), n);
    l.mean = cpu_f32(c->in[3]);
    l.rstd = cpu_f32(c->in[4]);
    cpu_share(PARTS, x->numel, backward_parts, &l);
    for (int o = 0; o < 2; o++)
        for (int64_t k = 0; k < n; k++) {
            double sum = 0;
            for (int p = 0; p < PARTS; p++) sum += sums[(2 * p + o) * n + k];
            cpu_put(c->out[1 + o]->m.dtype, ddp__ptr(c->out[1 + o]), k, (float)sum);
        }
    ddp__scratch_give(sums, bytes);
    return 0;
}
CPU_KERNEL(layer_norm_grad, reject, run_layer_norm_grad);
