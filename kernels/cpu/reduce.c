/* reduce.c -- sums and means of f32, f16 and bf16 of any layout. Along the side that lies together in memory the loops are vectors:
 * lines that become one number, or rows that are added up. Added in f32 over short blocks, then in double; in parts
 * whose number does not depend on the threads. */
#include <string.h>

#include "../../core/mem/mem.h"
#include "reduce.h"

enum { BLOCK = 64, WIDTH = 1024, FEW = 8 };

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

void cpu_plan_make(const ddp_tensor *t, const ddp_ints *dims, plan *p) {
    const ddp_meta *x = &t->m;
    bool gone[DDP_MAX_DIM];
    int64_t out = 1;
    for (int d = 0; d < x->ndim; d++) gone[d] = dims->n <= 0;
    for (int64_t i = 0; i < dims->n && x->ndim; i++) gone[dims->v[i] < 0 ? dims->v[i] + x->ndim : dims->v[i]] = true;
    p->d = x->dtype;
    p->x = ddp__ptr(t);
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
    return cpu_f32_or_half(c->in[0]) && c->in[0]->numel > 0 ? NULL : "f32, f16 or bf16 that is not empty only";
}

int64_t cpu_plan_place(const side *s, int first, int64_t i, int64_t *out) {
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

/* Lines [lo, hi) of one result, which begins at place `from`. */
static double add_lines(const plan *p, int64_t from, int64_t lo, int64_t hi) {
    const side *gone = &p->gone;
    int64_t none, n = gone->n ? gone->size[0] : 1, stride = gone->n ? gone->in[0] : 1;
    double s = 0;
    for (int64_t l = lo; l < hi; l++) s += cpu_row_sum(p->d, p->x, from + cpu_plan_place(gone, 1, l, &none), stride, n);
    return s;
}

/* One result of very many elements in one line: in parts. */
static double add_long_line(const plan *p, int64_t from, int64_t stride, int64_t n) {
    double part[PARTS], total = 0;
    int threads = cpu_threads(n);
    int64_t step = (n + PARTS - 1) / PARTS;
    step = (step + 1023) & ~(int64_t)1023;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int k = 0; k < PARTS; k++) {
        int64_t lo = k * step, hi = lo + step < n ? lo + step : n;
        part[k] = lo < hi ? cpu_row_sum(p->d, p->x, from + lo * stride, stride, hi - lo) : 0;
    }
    for (int k = 0; k < PARTS; k++) total += part[k];
    return total;
}

/* Results [lo, hi) by lines. */
static void line_results(const void *ctx, int64_t lo, int64_t hi) {
    const plan *p = ctx;
    int64_t out, n = p->gone.n ? p->gone.size[0] : 1, lines = p->gone.count / n;
    for (int64_t k = lo; k < hi; k++) {
        int64_t from = cpu_plan_place(&p->kept, 0, k, &out);
        double sum = lines == 1 && n >= BIG ? add_long_line(p, from, p->gone.in[0], n) : add_lines(p, from, 0, lines);
        cpu_put(p->d, p->y, out, (float)(sum * p->scale));
    }
}

static void by_lines(const plan *p) {
    bool long_line = p->gone.n == 1 && p->gone.count >= BIG;
    if (p->kept.count == 1 || long_line) line_results(p, 0, p->kept.count);
    else cpu_share(p->kept.count, p->kept.count * p->gone.count, line_results, p);
}

/* ---- rows: the dims that stay lie together ---- */

/* block[0..n) = the sum of `rows` rows from place `from`: FEW at a time, so that they are read in the order of memory. */
CPU_INLINE void add_block_of(ddp_dtype d, const void *x, int64_t from, int64_t stride, int64_t rows, int64_t n,
                             float *block) {
    memset(block, 0, (size_t)n * sizeof *block);
    for (int64_t r = 0; r < rows; r += FEW, from += FEW * stride) {
        int64_t k = 0, m = rows - r < FEW ? rows - r : FEW;
        for (; m == FEW && k + CPU_W <= n; k += CPU_W) {
            cpu_vec s = cpu_load(DDP_F32, block, k);
            for (int i = 0; i < FEW; i++) s += cpu_load(d, x, from + i * stride + k);
            cpu_store(DDP_F32, block, k, s);
        }
        for (; k + CPU_W <= n; k += CPU_W) {
            cpu_vec s = cpu_load(DDP_F32, block, k);
            for (int64_t i = 0; i < m; i++) s += cpu_load(d, x, from + i * stride + k);
            cpu_store(DDP_F32, block, k, s);
        }
        for (; k < n; k++)
            for (int64_t i = 0; i < m; i++) block[k] += cpu_get(d, x, from + i * stride + k);
    }
}
static void add_block(const plan *p, int64_t from, int64_t rows, int64_t n, float *block) {
    int64_t stride = p->gone.in[0];
    if (p->d == DDP_BF16) add_block_of(DDP_BF16, p->x, from, stride, rows, n, block);
    else if (p->d == DDP_F16) add_block_of(DDP_F16, p->x, from, stride, rows, n, block);
    else add_block_of(DDP_F32, p->x, from, stride, rows, n, block);
}

/* total[0..n) += rows [lo, hi), n <= WIDTH; rows of the innermost dim that goes are evenly apart. */
static void add_rows(const plan *p, int64_t from, int64_t n, int64_t lo, int64_t hi, double *total) {
    float block[WIDTH];
    int64_t none, even = p->gone.size[0];
    for (int64_t at = lo; at < hi;) {
        int64_t m = even - at % even;
        if (m > BLOCK) m = BLOCK;
        if (m > hi - at) m = hi - at;
        add_block(p, from + cpu_plan_place(&p->gone, 0, at, &none), m, n, block);
#pragma omp simd
        for (int64_t k = 0; k < n; k++) total[k] += block[k];
        at += m;
    }
}

/* n neighbours kept from place `from` on, into places `to`, ...; all rows, cut into PARTS where there are many. */
static int row_results(const plan *p, int64_t from, int64_t n, int64_t to) {
    int64_t rows = p->gone.count, out = p->kept.out[0];
    int threads = cpu_threads(rows * n), parts = rows * n < BIG ? 1 : PARTS;
    double one[WIDTH];
    size_t bytes = (size_t)parts * WIDTH * sizeof(double);
    double *part = parts == 1 ? one : ddp__scratch_take(bytes);
    if (!part) return ddp__pending();
    memset(part, 0, parts == 1 ? sizeof(double) * (size_t)n : bytes);
    if (parts == 1) add_rows(p, from, n, 0, rows, part);
    else {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (int i = 0; i < PARTS; i++)
            add_rows(p, from, n, rows * i / PARTS, rows * (i + 1) / PARTS, part + (size_t)i * WIDTH);
    }
    for (int i = 1; i < parts; i++)
        for (int64_t k = 0; k < n; k++) part[k] += part[(size_t)i * WIDTH + (size_t)k];
    for (int64_t k = 0; k < n; k++) cpu_put(p->d, p->y, to + k * out, (float)(part[k] * p->scale));
    if (part != one) ddp__scratch_give(part, bytes);
    return 0;
}

static int by_rows(const plan *p) {
    int64_t n = p->kept.size[0], others = p->kept.count / n, out;
    for (int64_t o = 0; o < others; o++) {
        int64_t from = cpu_plan_place(&p->kept, 1, o, &out);
        for (int64_t k = 0; k < n; k += WIDTH) {
            int st = row_results(p, from + k, n - k < WIDTH ? n - k : WIDTH, out + k * p->kept.out[0]);
            if (st < 0) return st;
        }
    }
    return 0;
}

static int reduce(const ddp_call *c, bool mean) {
    plan p;
    cpu_plan_make(c->in[0], &((const ddp_sum_attrs *)c->attrs)->dim, &p); /* mean has the same */
    p.y = ddp__ptr(c->out[0]);
    p.scale = mean ? 1 / (double)p.gone.count : 1;
    if (p.kept.n && p.kept.in[0] == 1 && p.gone.count > 1) return by_rows(&p);
    by_lines(&p);
    return 0;
}

static int run_sum(const ddp_call *c) { return reduce(c, false); }
CPU_KERNEL(sum, reject, run_sum);
static int run_mean(const ddp_call *c) { return reduce(c, true); }
CPU_KERNEL(mean, reject, run_mean);
