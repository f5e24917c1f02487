/* extremes.c -- the largest and smallest elements of any dtype and layout, and where they are: the first of several; f32, f16
 * and bf16 here, the others in extremes_plain.c. NaN beats all. The smallest is the largest with signs turned. The extreme of extremes is the extreme: results do
 * not depend on how the work is cut. */
#include "../../core/mem/mem.h"
#include "extremes.h"
#include "vectors.h"

enum { WIDTH = 1024 };

typedef struct job {
    plan p;
    int32_t flip; /* the sign bit for the smallest, else 0 */
    int64_t *ids; /* NULL: only values; p.y NULL: only places */
} job;

static inline float get(const job *j, int64_t i) {
    float v = cpu_get(j->p.d, j->p.x, i);
    return j->flip ? -v : v;
}
static inline bool beats(float v, float best) { return v > best || (v != v && best == best); }

/* ---- lines: the dims that go lie together ---- */

enum { BESIDE = 4 };
/* Vector v of those beside each other taken in: the largest of each lane, none of them NaN, and where places are wanted the
 * number of the first element of the vectors it came with. */
CPU_INLINE void take(cpu_vec x, cpu_vec *best, bool places, cpu_bits now, cpu_bits *from) {
    if (places) *from = pick(above(x, *best), now, *from);
    *best = most(x, *best);
}
/* The largest of the lanes of BESIDE vectors and, where places are wanted, the first place of it. */
CPU_INLINE float run_end(const cpu_vec *best, bool places, const cpu_bits *from, int64_t *at) {
    static const int32_t lane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float top = lanes_most(most(most(best[0], best[1]), most(best[2], best[3])));
    if (!places) return top;
    const cpu_bits count = (cpu_bits)cpu_load(DDP_F32, lane, 0), none = (cpu_bits){0} + INT32_MAX;
    cpu_bits least[BESIDE];
    for (int v = 0; v < BESIDE; v++) least[v] = pick(equal(best[v], all_of(top)), from[v] + (count + v * CPU_W), none);
    *at = lanes_fewest(fewest(fewest(least[0], least[1]), fewest(least[2], least[3])));
    return top;
}
/* The first NaN from place i on: there is one. */
CPU_INLINE int64_t find_nan(ddp_dtype d, const void *x, int64_t i) {
    int64_t k = 0;
    while (cpu_get(d, x, i + k) == cpu_get(d, x, i + k)) k++;
    return k;
}
/* The largest of n < 2^31 neighbours from place i. */
CPU_INLINE float span_max(ddp_dtype d, const void *x, int64_t i, int64_t n, int32_t flip, bool places, int64_t *at) {
    const cpu_vec low = all_of(-__builtin_inff());
    cpu_vec best[BESIDE];
    cpu_bits from[BESIDE], now = {0};
    lanes nan = is_nan(low);
    int64_t k = 0;
    for (int v = 0; v < BESIDE; v++) {
        best[v] = low;
        from[v] = now;
    }
    for (; k + BESIDE * CPU_W <= n; k += BESIDE * CPU_W, now += BESIDE * CPU_W) {
        cpu_vec u[BESIDE];
        for (int v = 0; v < BESIDE; v++) u[v] = load(d, x, i + k + v * CPU_W, flip);
        nan = either(nan, either(one_is_nan(u[0], u[1]), one_is_nan(u[2], u[3])));
        for (int v = 0; v < BESIDE; v++) take(u[v], &best[v], places, now, &from[v]);
    }
    for (; k < n; k += CPU_W, now += CPU_W) {
        float rest = flip ? __builtin_inff() : -__builtin_inff();
        cpu_vec u = load_some(d, x, i + k, n - k < CPU_W ? n - k : CPU_W, rest);
        u = (cpu_vec)((cpu_bits)u ^ flip);
        nan = either(nan, is_nan(u));
        take(u, &best[0], places, now, &from[0]);
    }
    if (__builtin_expect(!bits_of(nan), 1)) return run_end(best, places, from, at);
    if (places) *at = find_nan(d, x, i);
    return __builtin_nanf("");
}

/* Places are wanted of the largest only. */
CPU_INLINE float run_best_of(ddp_dtype d, const job *j, int64_t i, int64_t n, int64_t *at) {
    if (j->ids) return span_max(d, j->p.x, i, n, 0, true, at);
    return j->flip ? span_max(d, j->p.x, i, n, INT32_MIN, false, at) : span_max(d, j->p.x, i, n, 0, false, at);
}
static float run_best(const job *j, int64_t i, int64_t n, int64_t *at) {
    if (j->p.d == DDP_BF16) return run_best_of(DDP_BF16, j, i, n, at);
    if (j->p.d == DDP_F16) return run_best_of(DDP_F16, j, i, n, at);
    return run_best_of(DDP_F32, j, i, n, at);
}

/* The largest of n elements from place i, `stride` apart; its number goes into at. */
static float line_best(const job *j, int64_t i, int64_t stride, int64_t n, int64_t *at) {
    float best = get(j, i);
    *at = 0;
    if (stride != 1) {
        for (int64_t k = 1; k < n; k++) {
            float v = get(j, i + k * stride);
            if (!beats(v, best)) continue;
            best = v;
            *at = k;
        }
        return best;
    }
    return run_best(j, i, n, at);
}

/* One line of very many elements: in parts. */
static float long_line(const job *j, int64_t i, int64_t stride, int64_t n, int64_t *at) {
    float part[PARTS], best;
    int64_t where[PARTS];
    int threads = cpu_threads(n);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int k = 0; k < PARTS; k++) {
        int64_t lo = n * k / PARTS;
        part[k] = line_best(j, i + lo * stride, stride, n * (k + 1) / PARTS - lo, &where[k]);
        where[k] += lo;
    }
    best = part[0];
    *at = where[0];
    for (int k = 1; k < PARTS; k++)
        if (beats(part[k], best)) {
            best = part[k];
            *at = where[k];
        }
    return best;
}

static void give(const job *j, int64_t out, float best, int64_t at) {
    if (j->p.y) cpu_put(j->p.d, j->p.y, out, j->flip ? -best : best);
    if (j->ids) j->ids[out] = at;
}

/* Results [lo, hi). Where ids are wanted there is one line for each. */
static void line_results(const void *ctx, int64_t lo, int64_t hi) {
    const job *j = ctx;
    const side *gone = &j->p.gone;
    int64_t out, none, at, other, n = gone->n ? gone->size[0] : 1, stride = gone->n ? gone->in[0] : 1;
    for (int64_t k = lo; k < hi; k++) {
        int64_t from = cpu_plan_place(&j->p.kept, 0, k, &out);
        if (n >= BIG && gone->n == 1) {
            float best = long_line(j, from, stride, n, &at);
            give(j, out, best, at);
            continue;
        }
        float best = line_best(j, from, stride, n, &at);
        for (int64_t l = 1; l < gone->count / n; l++) {
            float v = line_best(j, from + cpu_plan_place(gone, 1, l, &none), stride, n, &other);
            if (beats(v, best)) best = v;
        }
        give(j, out, best, at);
    }
}

/* ---- rows: the dims that stay lie together ---- */

/* best[0..CPU_W) and, where it is given, id[0..CPU_W): rows from place `from`, `stride` apart, numbered from `first`, taken in. */
CPU_INLINE void take_vector(ddp_dtype d, const void *x, int64_t from, int64_t stride, int64_t rows, int32_t first,
                            int32_t flip, float *best, int32_t *id) {
    cpu_vec b = cpu_load(DDP_F32, best, 0);
    if (!id) {
        for (int64_t r = 0; r < rows; r++) b = larger(load(d, x, from + r * stride, flip), b);
    } else {
        cpu_bits at = (cpu_bits)cpu_load(DDP_F32, id, 0);
        for (int64_t r = 0; r < rows; r++) {
            cpu_vec v = load(d, x, from + r * stride, flip);
            lanes l = takes(v, b);
            b = (cpu_vec)pick(l, (cpu_bits)v, (cpu_bits)b);
            at = pick(l, (cpu_bits){0} + (first + (int32_t)r), at);
        }
        cpu_store(DDP_F32, id, 0, (cpu_vec)at);
    }
    cpu_store(DDP_F32, best, 0, b);
}
/* The same of TOGETHER rows, which are read in the order of memory. Where they hold no NaN fewer comparisons do: one that best
 * holds stays, nothing is above it. */
enum { TOGETHER = 8 };
CPU_INLINE void take_vectors(ddp_dtype d, const void *x, int64_t from, int64_t stride, int32_t first, int32_t flip,
                             float *best, int32_t *id) {
    cpu_vec u[TOGETHER], b = cpu_load(DDP_F32, best, 0);
    for (int r = 0; r < TOGETHER; r++) u[r] = load(d, x, from + r * stride, flip);
    lanes nan = either(either(one_is_nan(u[0], u[1]), one_is_nan(u[2], u[3])),
                       either(one_is_nan(u[4], u[5]), one_is_nan(u[6], u[7])));
    if (__builtin_expect(bits_of(nan), 0)) {
        take_vector(d, x, from, stride, TOGETHER, first, flip, best, id);
        return;
    }
    if (!id) {
        for (int r = 0; r < 4; r++) u[r] = most(u[r], u[r + 4]);
        cpu_store(DDP_F32, best, 0, most(most(most(u[0], u[1]), most(u[2], u[3])), b));
        return;
    }
    cpu_bits at = (cpu_bits)cpu_load(DDP_F32, id, 0);
    for (int r = 0; r < TOGETHER; r++) {
        lanes l = above(u[r], b);
        b = (cpu_vec)pick(l, (cpu_bits)u[r], (cpu_bits)b);
        at = pick(l, (cpu_bits){0} + (first + r), at);
    }
    cpu_store(DDP_F32, best, 0, b);
    cpu_store(DDP_F32, id, 0, (cpu_vec)at);
}
CPU_INLINE void take_rows_of(ddp_dtype d, const job *j, int64_t from, int64_t stride, int64_t rows, int64_t n,
                             int32_t first, float *best, int32_t *id) {
    for (int64_t r = 0; r < rows; r += TOGETHER) {
        int64_t m = rows - r < TOGETHER ? rows - r : TOGETHER, place = from + r * stride;
        for (int64_t k = 0; k < n; k = k + 2 * CPU_W <= n || k + CPU_W == n ? k + CPU_W : n - CPU_W) {
            int32_t *ids = id ? id + k : NULL;
            if (m == TOGETHER) take_vectors(d, j->p.x, place + k, stride, first + (int32_t)r, j->flip, best + k, ids);
            else take_vector(d, j->p.x, place + k, stride, m, first + (int32_t)r, j->flip, best + k, ids);
        }
    }
}
static void take_rows(const job *j, int64_t from, int64_t stride, int64_t rows, int64_t n, int32_t first, float *best,
                      int32_t *id) {
    if (n < CPU_W) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = 0; k < n; k++) {
                float v = get(j, from + r * stride + k);
                if (!beats(v, best[k])) continue;
                best[k] = v;
                if (id) id[k] = first + (int32_t)r;
            }
    } else if (j->p.d == DDP_BF16) take_rows_of(DDP_BF16, j, from, stride, rows, n, first, best, id);
    else if (j->p.d == DDP_F16) take_rows_of(DDP_F16, j, from, stride, rows, n, first, best, id);
    else take_rows_of(DDP_F32, j, from, stride, rows, n, first, best, id);
}

/* Of n <= WIDTH neighbours from place `from`: the best of rows [lo, hi). */
static void some_rows(const job *j, int64_t from, int64_t n, int64_t lo, int64_t hi, float *best, int32_t *id) {
    const side *gone = &j->p.gone;
    int64_t none, even = gone->size[0], begin = from + cpu_plan_place(gone, 0, lo, &none);
    for (int64_t k = 0; k < n; k++) {
        best[k] = get(j, begin + k);
        if (id) id[k] = (int32_t)lo;
    }
    for (int64_t at = lo, m; at < hi; at += m) {
        m = even - at % even < hi - at ? even - at % even : hi - at;
        take_rows(j, from + cpu_plan_place(gone, 0, at, &none), gone->in[0], m, n, (int32_t)at, best, id);
    }
}

/* n neighbours kept from place `from` on, into places `to`, ...; parts of the rows by several threads. */
static void row_results(const job *j, int64_t from, int64_t n, int64_t to, int parts) {
    float best[PARTS][WIDTH];
    int32_t id[PARTS][WIDTH];
    int64_t rows = j->p.gone.count;
    int threads = parts > 1 ? cpu_threads(rows * n) : 1;
    if (parts == 1) some_rows(j, from, n, 0, rows, best[0], j->ids ? id[0] : NULL);
    else {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (int i = 0; i < PARTS; i++)
            some_rows(j, from, n, rows * i / PARTS, rows * (i + 1) / PARTS, best[i], j->ids ? id[i] : NULL);
    }
    for (int64_t k = 0; k < n; k++) {
        int top = 0;
        for (int i = 1; i < parts; i++)
            if (beats(best[i][k], best[top][k])) top = i;
        give(j, to + k * j->p.kept.out[0], best[top][k], j->ids ? id[top][k] : 0);
    }
}

/* Lines [lo, hi) of results. */
static void row_groups(const void *ctx, int64_t lo, int64_t hi) {
    const job *j = ctx;
    const side *kept = &j->p.kept;
    int64_t n = kept->size[0], rows = j->p.gone.count, out;
    for (int64_t o = lo; o < hi; o++) {
        int64_t from = cpu_plan_place(kept, 1, o, &out);
        for (int64_t k = 0; k < n; k += WIDTH) {
            int64_t m = n - k < WIDTH ? n - k : WIDTH;
            bool cut = rows * m >= BIG && rows >= PARTS && cpu_threads(rows * m) > 1;
            row_results(j, from + k, m, out + k * kept->out[0], cut ? PARTS : 1);
        }
    }
}

/* ---- the ops ---- */

static int extremes(const ddp_call *c, const ddp_ints *dims, int sign, ddp_tensor *y, ddp_tensor *ids) {
    job j = {.flip = sign < 0 ? INT32_MIN : 0, .ids = ids ? (int64_t *)(void *)ddp__ptr(ids) : NULL};
    plan *p = &j.p;
    cpu_plan_make(c->in[0], dims, p);
    p->y = y ? ddp__ptr(y) : NULL;
    if (!cpu_f32_or_half(c->in[0])) {
        cpu_extremes_plain(p, sign < 0, j.ids);
        return 0;
    }
    int64_t n = p->kept.n ? p->kept.size[0] : 1, work = p->kept.count * p->gone.count;
    if (p->kept.n && p->kept.in[0] == 1 && p->gone.count > 1) {
        if (p->gone.count * n >= BIG) row_groups(&j, 0, p->kept.count / n); /* each by several threads */
        else cpu_share(p->kept.count / n, work, row_groups, &j);
    } else if (p->kept.count == 1 || p->gone.count >= BIG) line_results(&j, 0, p->kept.count);
    else cpu_share(p->kept.count, work, line_results, &j);
    return 0;
}

static const char *reject(const ddp_call *c) { return c->in[0]->numel > 0 ? NULL : "x is empty"; }
static const char *reject_places(const ddp_call *c) {
    if (c->in[0]->numel > INT32_MAX) return "more than 2^31 elements";
    return reject(c);
}
static const char *reject_argmax(const ddp_call *c) {
    if (((const ddp_argmax_attrs *)c->attrs)->flat && !ddp__meta_is_rowmajor(&c->in[0]->m))
        return "flat, and x is not row-major";
    return reject_places(c);
}

static int run_amax(const ddp_call *c) {
    return extremes(c, &((const ddp_amax_attrs *)c->attrs)->dim, 1, c->out[0], NULL);
}
CPU_KERNEL(amax, reject, run_amax);
static int run_amin(const ddp_call *c) {
    return extremes(c, &((const ddp_amin_attrs *)c->attrs)->dim, -1, c->out[0], NULL);
}
CPU_KERNEL(amin, reject, run_amin);
static int run_max_dim(const ddp_call *c) {
    ddp_ints dims = {1, {((const ddp_max_dim_attrs *)c->attrs)->dim}};
    return extremes(c, &dims, 1, c->out[0], c->out[1]);
}
CPU_KERNEL(max_dim, reject_places, run_max_dim);
static int run_argmax(const ddp_call *c) {
    const ddp_argmax_attrs *a = c->attrs;
    ddp_ints dims = {a->flat ? -1 : 1, {a->dim}};
    return extremes(c, &dims, 1, NULL, c->out[0]);
}
CPU_KERNEL(argmax, reject_argmax, run_argmax);
