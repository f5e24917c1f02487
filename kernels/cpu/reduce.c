/* reduce.c -- f32 sums and means of any layout. Along the side that lies together in memory the loops are vectors:
 * lines that become one number, or rows that are added up. Added in f32 over short blocks, then in double; in parts
 * whose number does not depend on the threads. */
#include <string.h>

#include "../../core/mem/mem.h"
#include "cpu.h"

enum { BLOCK = 64, WIDTH = 512, PARTS = 16, BIG = 1 << 17 };

/* Dims of one side, innermost first. */
typedef struct side {
    int n;
    int64_t size[DDP_MAX_DIM], in[DDP_MAX_DIM], out[DDP_MAX_DIM]; /* strides in x and y; out 0 of dims that go */
    int64_t count;
} side;
typedef struct plan {
    side kept, gone;
} plan;

/* Sorted by stride in x, merged. */
static void add_dim(side *s, int64_t size, int64_t in, int64_t out) {
    int at = s->n++;
    s->count *= size;
    for (; at > 0 && s->in[at - 1] > in; at--) {
        s->size[at] = s->size[at - 1];
        s->in[at] = s->in[at - 1];
        s->out[at] = s->out[at - 1];
    }
    s->size[at] = size;
    s->in[at] = in;
    s->out[at] = out;
}
static void merge(side *s) {
    int d = 0;
    for (int e = 1; e < s->n; e++) {
        if (s->in[e] == s->in[d] * s->size[d] && s->out[e] == s->out[d] * s->size[d]) {
            s->size[d] *= s->size[e];
            continue;
        }
        d++;
        s->size[d] = s->size[e];
        s->in[d] = s->in[e];
        s->out[d] = s->out[e];
    }
    s->n = s->n ? d + 1 : 0;
}

static void make_plan(const ddp_call *c, plan *p) {
    const ddp_sum_attrs *a = c->attrs; /* mean has the same */
    const ddp_meta *x = &c->in[0]->m;
    bool gone[DDP_MAX_DIM];
    int64_t out = 1;
    for (int d = 0; d < x->ndim; d++) gone[d] = a->dim.n <= 0;
    for (int64_t i = 0; i < a->dim.n && x->ndim; i++)
        gone[a->dim.v[i] < 0 ? a->dim.v[i] + x->ndim : a->dim.v[i]] = true;
    p->kept.n = p->gone.n = 0;
    p->kept.count = p->gone.count = 1;
    for (int d = x->ndim - 1; d >= 0; d--) {
        if (x->size[d] != 1) add_dim(gone[d] ? &p->gone : &p->kept, x->size[d], x->stride[d], gone[d] ? 0 : out);
        if (!gone[d]) out *= x->size[d];
    }
    merge(&p->kept);
    merge(&p->gone);
}

_Static_assert(sizeof(ddp_sum_attrs) == sizeof(ddp_mean_attrs), "mean has the attributes of sum");

static const char *reject(const ddp_call *c) {
    return c->in[0]->m.dtype == DDP_F32 && c->in[0]->numel > 0 ? NULL : "f32 that is not empty only";
}

/* Offsets of the i-th of the dims from `first` on. */
static int64_t place(const side *s, int first, int64_t i, int64_t *out) {
    int64_t at = 0;
    *out = 0;
    for (int d = first; d < s->n; d++) {
        int64_t k = i % s->size[d];
        at += k * s->in[d];
        *out += k * s->out[d];
        i /= s->size[d];
    }
    return at;
}

/* ---- lines: the dims that go lie together ---- */

/* Lines [lo, hi) of one result. */
static double add_lines(const float *x, const side *gone, int64_t lo, int64_t hi) {
    int64_t none, n = gone->n ? gone->size[0] : 1, stride = gone->n ? gone->in[0] : 1;
    double s = 0;
    for (int64_t l = lo; l < hi; l++) s += cpu_row_sum(x + place(gone, 1, l, &none), stride, n);
    return s;
}

/* One result of very many elements in one line: in parts. */
static double add_long_line(const float *x, int64_t stride, int64_t n) {
    double part[PARTS], total = 0;
    int threads = cpu_threads(n);
    int64_t step = (n + PARTS - 1) / PARTS;
    step = (step + 1023) & ~(int64_t)1023;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int p = 0; p < PARTS; p++) {
        int64_t lo = p * step, hi = lo + step < n ? lo + step : n;
        part[p] = lo < hi ? cpu_row_sum(x + lo * stride, stride, hi - lo) : 0;
    }
    for (int p = 0; p < PARTS; p++) total += part[p];
    return total;
}

static void by_lines(const plan *p, const float *x, float *y, double scale) {
    int64_t out, n = p->gone.n ? p->gone.size[0] : 1, lines = p->gone.count / n;
    if (lines == 1 && n >= BIG) {
        for (int64_t k = 0; k < p->kept.count; k++) {
            int64_t at = place(&p->kept, 0, k, &out);
            y[out] = (float)(add_long_line(x + at, p->gone.in[0], n) * scale);
        }
        return;
    }
    int threads = p->kept.count > 1 ? cpu_threads(p->kept.count * p->gone.count) : 1;
    if (threads <= 1) {
        for (int64_t k = 0; k < p->kept.count; k++) {
            int64_t at = place(&p->kept, 0, k, &out);
            y[out] = (float)(add_lines(x + at, &p->gone, 0, lines) * scale);
        }
        return;
    }
#pragma omp parallel for schedule(static) num_threads(threads) private(out)
    for (int64_t k = 0; k < p->kept.count; k++) {
        int64_t at = place(&p->kept, 0, k, &out);
        y[out] = (float)(add_lines(x + at, &p->gone, 0, lines) * scale);
    }
}

/* ---- rows: the dims that stay lie together ---- */

/* block[0..V vectors) = the sum of `rows` rows. */
static inline __attribute__((always_inline)) void add_span(const float *x, int64_t stride, int64_t rows, int V,
                                                           float *block) {
    cpu_vec s[4];
    for (int v = 0; v < V; v++) s[v] = (cpu_vec){0};
    for (int64_t r = 0; r < rows; r++, x += stride)
        for (int v = 0; v < V; v++) s[v] += *(const cpu_vec *)(const void *)(x + v * CPU_W);
    for (int v = 0; v < V; v++) *(cpu_vec *)(void *)(block + v * CPU_W) = s[v];
}

static void add_block(const float *x, int64_t stride, int64_t rows, int64_t n, float *block) {
    int64_t k = 0;
    for (; k + 4 * CPU_W <= n; k += 4 * CPU_W) add_span(x + k, stride, rows, 4, block + k);
    for (; k + CPU_W <= n; k += CPU_W) add_span(x + k, stride, rows, 1, block + k);
    if (k == n) return;
    for (int64_t j = k; j < n; j++) block[j] = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = k; j < n; j++) block[j] += x[r * stride + j];
}

/* total[0..n) += rows [lo, hi), n <= WIDTH; rows of the innermost dim that goes are evenly apart. */
static void add_rows(const float *x, const side *gone, int64_t n, int64_t lo, int64_t hi, double *total) {
    float block[WIDTH];
    int64_t none, even = gone->size[0];
    for (int64_t at = lo; at < hi;) {
        int64_t m = even - at % even;
        if (m > BLOCK) m = BLOCK;
        if (m > hi - at) m = hi - at;
        add_block(x + place(gone, 0, at, &none), gone->in[0], m, n, block);
#pragma omp simd
        for (int64_t k = 0; k < n; k++) total[k] += block[k];
        at += m;
    }
}

/* n neighbours kept, all rows; cut into PARTS where there are many. */
static int row_results(const plan *p, const float *x, int64_t n, float *y, double scale) {
    int64_t rows = p->gone.count, out = p->kept.out[0];
    int threads = cpu_threads(rows * n), parts = rows * n < BIG ? 1 : PARTS;
    double one[WIDTH];
    size_t bytes = (size_t)parts * WIDTH * sizeof(double);
    double *part = parts == 1 ? one : ddp__mem_alloc(bytes);
    if (!part) return ddp__pending();
    memset(part, 0, parts == 1 ? sizeof(double) * (size_t)n : bytes);
    if (parts == 1) add_rows(x, &p->gone, n, 0, rows, part);
    else {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (int i = 0; i < PARTS; i++)
            add_rows(x, &p->gone, n, rows * i / PARTS, rows * (i + 1) / PARTS, part + (size_t)i * WIDTH);
    }
    for (int i = 1; i < parts; i++)
        for (int64_t k = 0; k < n; k++) part[k] += part[(size_t)i * WIDTH + (size_t)k];
    for (int64_t k = 0; k < n; k++) y[k * out] = (float)(part[k] * scale);
    if (part != one) ddp__mem_free(part, bytes);
    return 0;
}

static int by_rows(const plan *p, const float *x, float *y, double scale) {
    int64_t n = p->kept.size[0], others = p->kept.count / n, out;
    for (int64_t o = 0; o < others; o++) {
        int64_t at = place(&p->kept, 1, o, &out);
        for (int64_t k = 0; k < n; k += WIDTH) {
            int st = row_results(p, x + at + k, n - k < WIDTH ? n - k : WIDTH, y + out + k * p->kept.out[0], scale);
            if (st < 0) return st;
        }
    }
    return 0;
}

static int reduce(const ddp_call *c, bool mean) {
    plan p;
    make_plan(c, &p);
    const float *x = cpu_f32(c->in[0]);
    float *y = cpu_f32(c->out[0]);
    double scale = mean ? 1 / (double)p.gone.count : 1;
    if (p.kept.n && p.kept.in[0] == 1 && p.gone.count > 1) return by_rows(&p, x, y, scale);
    by_lines(&p, x, y, scale);
    return 0;
}

static int run_sum(const ddp_call *c) { return reduce(c, false); }
CPU_KERNEL(sum, reject, run_sum);
static int run_mean(const ddp_call *c) { return reduce(c, true); }
CPU_KERNEL(mean, reject, run_mean);
