/* extremes_plain.h -- extremes of one type as plain loops; included by extremes_plain.c with T, NAME(x) and IS_NAN(v) defined. A value
 * stays where the new one is not beyond it, or it is NaN itself. */

CPU_INLINE bool NAME(stays)(T v, T best, bool least) { return (least ? v >= best : v <= best) || IS_NAN(best); }

/* The extreme of n neighbours. */
CPU_INLINE T NAME(run)(const T *x, int64_t n, bool least) {
    enum { BESIDE = 256 / sizeof(T) }; /* four vectors of AVX-512 */
    T best[BESIDE], top = x[0];
    int64_t k = 0;
    if (n >= BESIDE) {
        memcpy(best, x, sizeof best);
        for (k = BESIDE; k + BESIDE <= n; k += BESIDE) {
#pragma omp simd
            for (int j = 0; j < BESIDE; j++) best[j] = NAME(stays)(x[k + j], best[j], least) ? best[j] : x[k + j];
        }
        for (int j = 0; j < BESIDE; j++) top = NAME(stays)(best[j], top, least) ? top : best[j];
    }
    for (; k < n; k++) top = NAME(stays)(x[k], top, least) ? top : x[k];
    return top;
}
/* The first place of `best`, which is among n neighbours. */
CPU_INLINE int64_t NAME(find)(const T *x, int64_t n, T best) {
    enum { BLOCK = 64 };
    int64_t k = 0;
    for (int any = 0; k + BLOCK <= n; k += BLOCK) {
#pragma omp simd reduction(| : any)
        for (int j = 0; j < BLOCK; j++) any |= x[k + j] == best || (IS_NAN(x[k + j]) && IS_NAN(best));
        if (any) break;
    }
    while (x[k] != best && !(IS_NAN(x[k]) && IS_NAN(best))) k++;
    return k;
}
/* The extreme of n elements `stride` apart; its number goes into at where that is not NULL. */
static T NAME(line)(const T *x, int64_t stride, int64_t n, bool least, int64_t *at) {
    T best = x[0];
    if (stride == 1) {
        best = least ? NAME(run)(x, n, true) : NAME(run)(x, n, false);
        if (at) *at = NAME(find)(x, n, best);
        return best;
    }
    if (at) *at = 0;
    for (int64_t k = 1; k < n; k++) {
        if (NAME(stays)(x[k * stride], best, least)) continue;
        best = x[k * stride];
        if (at) *at = k;
    }
    return best;
}
/* Of n <= WIDTH neighbours the extreme of `rows` rows `stride` apart, numbered from `first`, into best and, where given, id. */
CPU_INLINE void NAME(take)(const T *x, int64_t stride, int64_t rows, int64_t n, int32_t first, bool least, T *best,
                           int32_t *id) {
    for (int64_t r = 0; r < rows; r++) {
        const T *row = x + r * stride;
        if (id) {
#pragma omp simd
            for (int64_t k = 0; k < n; k++) {
                bool stays = NAME(stays)(row[k], best[k], least);
                best[k] = stays ? best[k] : row[k];
                id[k] = stays ? id[k] : first + (int32_t)r;
            }
        } else {
#pragma omp simd
            for (int64_t k = 0; k < n; k++) best[k] = NAME(stays)(row[k], best[k], least) ? best[k] : row[k];
        }
    }
}

/* Results [lo, hi) whose elements lie together, or apart: line by line. Where places are wanted there is one line for each. */
static void NAME(lines)(const void *ctx, int64_t lo, int64_t hi) {
    const plain *p = ctx;
    const side *gone = &p->p.gone;
    const T *x = p->p.x;
    int64_t out, none, at, n = gone->n ? gone->size[0] : 1, stride = gone->n ? gone->in[0] : 1;
    for (int64_t k = lo; k < hi; k++) {
        const T *from = x + cpu_plan_place(&p->p.kept, 0, k, &out);
        T best = NAME(line)(from, stride, n, p->least, p->ids ? &at : NULL);
        for (int64_t l = 1; l < gone->count / n; l++) {
            T v = NAME(line)(from + cpu_plan_place(gone, 1, l, &none), stride, n, p->least, NULL);
            if (!NAME(stays)(v, best, p->least)) best = v;
        }
        if (p->p.y) ((T *)p->p.y)[out] = best;
        if (p->ids) p->ids[out] = at;
    }
}

/* Parts [lo, hi) of the one line there is. */
static void NAME(parts)(const void *ctx, int64_t lo, int64_t hi) {
    const plain *p = ctx;
    int64_t n = p->p.gone.count, stride = p->p.gone.in[0];
    for (int64_t k = lo; k < hi; k++) {
        int64_t from = n * k / PARTS, at = 0;
        const T *x = (const T *)p->p.x + from * stride;
        ((T *)p->part)[k] = NAME(line)(x, stride, n * (k + 1) / PARTS - from, p->least, p->ids ? &at : NULL);
        p->where[k] = from + at;
    }
}
static void NAME(long_line)(plain *p) {
    T part[PARTS];
    int64_t where[PARTS], top = 0;
    p->part = part;
    p->where = where;
    cpu_share(PARTS, p->p.gone.count, NAME(parts), p);
    for (int k = 1; k < PARTS; k++)
        if (!NAME(stays)(part[k], part[top], p->least)) top = k;
    if (p->p.y) *(T *)p->p.y = part[top];
    if (p->ids) *p->ids = where[top];
}

/* Groups [lo, hi) of at most WIDTH results that lie together, row by row. */
static void NAME(rows)(const void *ctx, int64_t lo, int64_t hi) {
    const plain *p = ctx;
    const side *kept = &p->p.kept, *gone = &p->p.gone;
    int64_t n = kept->size[0], groups = (n + WIDTH - 1) / WIDTH, even = gone->size[0], out, none;
    for (int64_t g = lo; g < hi; g++) {
        T best[WIDTH];
        int32_t id[WIDTH];
        int64_t k = g % groups * WIDTH, m = n - k < WIDTH ? n - k : WIDTH;
        const T *from = (const T *)p->p.x + cpu_plan_place(kept, 1, g / groups, &out) + k;
        memcpy(best, from, (size_t)m * sizeof(T));
        memset(id, 0, sizeof id);
        for (int64_t at = 0; at < gone->count; at += even) {
            const T *x = from + cpu_plan_place(gone, 0, at, &none);
            if (p->ids) NAME(take)(x, gone->in[0], even, m, (int32_t)at, p->least, best, id);
            else if (p->least) NAME(take)(x, gone->in[0], even, m, 0, true, best, NULL);
            else NAME(take)(x, gone->in[0], even, m, 0, false, best, NULL);
        }
        for (int64_t j = 0; j < m; j++) {
            int64_t to = out + (k + j) * kept->out[0];
            if (p->p.y) ((T *)p->p.y)[to] = best[j];
            if (p->ids) p->ids[to] = id[j];
        }
    }
}

static void NAME(extremes)(plain *p) {
    const side *kept = &p->p.kept, *gone = &p->p.gone;
    int64_t n = kept->n ? kept->size[0] : 1, work = kept->count * gone->count;
    if (kept->n && kept->in[0] == 1 && gone->count > 1)
        cpu_share(kept->count / n * ((n + WIDTH - 1) / WIDTH), work, NAME(rows), p);
    else if (kept->count == 1 && gone->n == 1 && gone->count >= BIG) NAME(long_line)(p);
    else cpu_share(kept->count, work, NAME(lines), p);
}
