/* norm_passes.c -- see norm_passes.h. Several rows go side by side, so that what belongs to a channel is read once for all of
 * them; f32 from memory one by one, for there fewer streams count more (measured: 40 to 44 GB/s against 32 to 36). What comes
 * AHEAD bytes later is fetched meanwhile: there is too much arithmetic between two reads for the processor to look that far. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=fast")
#endif
#include "norm_passes.h"

#include <string.h>

#include "../../core/mem/mem.h"

enum { PARTS = 16, BLOCK = 64, SPAN = 64, SIDE = 4, AHEAD = 8192 };

/* Few channels are seen as more, several rows side by side, so that loops over channels are long. */
static int64_t fold_of(int64_t C, int64_t rows) {
    int64_t f = C >= SPAN ? 1 : SPAN / C;
    return f < rows ? f : 1;
}

/* to[0..fold * C) = from[0..C) again and again; NULL of NULL. */
static const float *tiled(const float *from, int64_t C, int64_t fold, float *to) {
    if (!from || fold == 1) return from;
    for (int64_t f = 0; f < fold; f++) memcpy(to + f * C, from, (size_t)C * sizeof *to);
    return to;
}

/* The same rows, `fold` of them as one; the rows left over. wide: room for six vectors of fold * C. */
static norm_rows folded(const norm_rows *n, int64_t fold, float *wide, norm_rows *rest) {
    norm_rows f = *n;
    const float **v[6] = {&f.mean, &f.scale, &f.shift, &f.p, &f.q, &f.s};
    f.C = fold * n->C;
    f.rows = n->rows / fold;
    for (int i = 0; i < 6; i++) *v[i] = tiled(*v[i], n->C, fold, wide + i * f.C);
    *rest = *n;
    rest->rows = n->rows - f.rows * fold;
    int64_t done = f.rows * f.C;
    const void **t[4] = {&rest->x, &rest->g, &rest->y, &rest->residual};
    for (int i = 0; i < 4; i++)
        if (*t[i]) *t[i] = cpu_at(n->d, *t[i], done);
    if (n->masked) rest->masked = cpu_at(n->d, n->masked, done);
    if (n->out) rest->out = cpu_at(n->d, n->out, done);
    return f;
}

static bool one_by_one(const norm_rows *n) {
    enum { L3_FLOATS = 4 << 20 };
    return n->d == DDP_F32 && n->rows * n->C >= L3_FLOATS;
}

/* Place i of p, and the line AHEAD of it on its way. */
CPU_INLINE cpu_vec read(ddp_dtype dt, const void *p, int64_t i) {
    __builtin_prefetch(cpu_at(dt, p, i) + AHEAD);
    return cpu_load(dt, p, i);
}

CPU_INLINE cpu_vec where_positive(cpu_vec condition, cpu_vec v) {
    return (cpu_vec)((cpu_bits)(condition > 0) & (cpu_bits)v);
}

/* ---- sums --------------------------------------------------------------------------------------------------------- */

typedef enum sums_of { OF_X, OF_G, OF_G_RELU, OF_G_Y } sums_of;

/* What one place adds to the two sums: *u, and *u times d, the distance from mean. */
CPU_INLINE void sum_one(sums_of kind, const norm_rows *n, int64_t k, int64_t i, float *u, float *d) {
    *d = cpu_get(n->d, n->x, i) - n->mean[k];
    *u = kind == OF_X ? *d : cpu_get(n->d, n->g, i);
    if (kind == OF_G_RELU && !(*d * n->scale[k] + n->shift[k] > 0)) *u = 0;
    if (kind != OF_G_Y) return;
    if (!(cpu_get(n->d, n->y, i) > 0)) *u = 0;
    cpu_put(n->d, n->masked, i, *u);
}

/* `side` rows from r on: s1, s2 [C] +=. */
CPU_INLINE void sum_rows(ddp_dtype dt, sums_of kind, int side, const norm_rows *n, int64_t r, float *s1, float *s2) {
    int64_t C = n->C, k = 0;
    for (; k + CPU_W <= C; k += CPU_W) {
        cpu_vec a = cpu_load(DDP_F32, s1, k), b = cpu_load(DDP_F32, s2, k), mean = cpu_load(DDP_F32, n->mean, k);
        cpu_vec scale = {0}, shift = {0};
        if (kind == OF_G_RELU) {
            scale = cpu_load(DDP_F32, n->scale, k);
            shift = cpu_load(DDP_F32, n->shift, k);
        }
#pragma GCC unroll 4
        for (int j = 0; j < side; j++) {
            int64_t i = (r + j) * C + k;
            cpu_vec d = read(dt, n->x, i) - mean, u = kind == OF_X ? d : read(dt, n->g, i);
            if (kind == OF_G_RELU) u = where_positive(d * scale + shift, u);
            if (kind == OF_G_Y) {
                u = where_positive(read(dt, n->y, i), u);
                cpu_store(dt, n->masked, i, u);
            }
            a += u;
            b += u * d;
        }
        cpu_store(DDP_F32, s1, k, a);
        cpu_store(DDP_F32, s2, k, b);
    }
    for (; k < C; k++)
        for (int j = 0; j < side; j++) {
            float u, d;
            sum_one(kind, n, k, (r + j) * C + k, &u, &d);
            s1[k] += u;
            s2[k] += u * d;
        }
}

CPU_INLINE void sum_block_of(ddp_dtype dt, sums_of kind, const norm_rows *n, int64_t lo, int64_t hi, float *s1,
                             float *s2) {
    int64_t r = lo;
    for (; !one_by_one(n) && r + SIDE <= hi; r += SIDE) sum_rows(dt, kind, SIDE, n, r, s1, s2);
    for (; r < hi; r++) sum_rows(dt, kind, 1, n, r, s1, s2);
}
CPU_INLINE void sum_block_as(ddp_dtype dt, const norm_rows *n, int64_t lo, int64_t hi, float *s1, float *s2) {
    if (!n->g) sum_block_of(dt, OF_X, n, lo, hi, s1, s2);
    else if (n->y) sum_block_of(dt, OF_G_Y, n, lo, hi, s1, s2);
    else if (n->relu) sum_block_of(dt, OF_G_RELU, n, lo, hi, s1, s2);
    else sum_block_of(dt, OF_G, n, lo, hi, s1, s2);
}
static void sum_block(const norm_rows *n, int64_t lo, int64_t hi, float *s1, float *s2) {
    if (n->d == DDP_F32) sum_block_as(DDP_F32, n, lo, hi, s1, s2);
    else if (n->d == DDP_BF16) sum_block_as(DDP_BF16, n, lo, hi, s1, s2);
    else sum_block_as(DDP_F16, n, lo, hi, s1, s2);
}

/* Rows [lo, hi) in blocks: s [2C] +=. block: 2C floats. */
static void sum_part(const norm_rows *n, int64_t lo, int64_t hi, double *s, float *block) {
    for (int64_t at = lo; at < hi; at += BLOCK) {
        memset(block, 0, (size_t)n->C * 2 * sizeof *block);
        sum_block(n, at, at + BLOCK < hi ? at + BLOCK : hi, block, block + n->C);
        for (int64_t k = 0; k < 2 * n->C; k++) s[k] += block[k];
    }
}

int cpu_norm_sums(const norm_rows *n, double *total) {
    int64_t C = n->C, fold = fold_of(C, n->rows), W = fold * C;
    int parts = n->rows * C < 65536 ? 1 : PARTS, threads = cpu_threads(n->rows * C);
    size_t doubles = 2 * (size_t)W * (size_t)parts, floats = doubles + 6 * (size_t)W;
    size_t bytes = doubles * sizeof(double) + floats * sizeof(float);
    double *part = ddp__scratch_take(bytes);
    if (!part) return ddp__pending();
    float *block = (float *)(void *)(part + doubles);
    memset(part, 0, doubles * sizeof *part);
    norm_rows rest, wide = folded(n, fold, block + doubles, &rest);
    if (parts == 1) sum_part(&wide, 0, wide.rows, part, block);
    else {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (int p = 0; p < PARTS; p++)
            sum_part(&wide, wide.rows * p / PARTS, wide.rows * (p + 1) / PARTS, part + 2 * W * p, block + 2 * W * p);
    }
    memset(total, 0, 2 * (size_t)C * sizeof *total);
    sum_part(&rest, 0, rest.rows, total, block);
    for (int64_t s = 0; s < 2 * parts * fold; s++) { /* s counts runs of C */
        double *to = total + (s / fold % 2 ? C : 0);
        for (int64_t k = 0; k < C; k++) to[k] += part[s * C + k];
    }
    ddp__scratch_give(part, bytes);
    return 0;
}

/* ---- the result --------------------------------------------------------------------------------------------------- */

typedef enum result_of { FORWARD, FORWARD_RELU, FORWARD_ADD_RELU, BACK, BACK_RELU } result_of;

CPU_INLINE float result_one(result_of kind, const norm_rows *n, int64_t k, int64_t i) {
    float d = cpu_get(n->d, n->x, i) - n->mean[k], v = d * n->q[k] + n->s[k];
    if (kind == BACK || kind == BACK_RELU) {
        bool passes = kind == BACK || d * n->scale[k] + n->shift[k] > 0;
        return passes ? v + cpu_get(n->d, n->g, i) * n->p[k] : v;
    }
    if (kind == FORWARD_ADD_RELU) v += cpu_get(n->d, n->residual, i);
    return kind != FORWARD && v < 0 ? 0 : v;
}

CPU_INLINE void result_rows(ddp_dtype dt, result_of kind, int side, const norm_rows *n, int64_t r) {
    int64_t C = n->C, k = 0;
    for (; k + CPU_W <= C; k += CPU_W) {
        cpu_vec mean = cpu_load(DDP_F32, n->mean, k), q = cpu_load(DDP_F32, n->q, k), s = cpu_load(DDP_F32, n->s, k);
        cpu_vec p = {0}, scale = {0}, shift = {0};
        if (kind == BACK || kind == BACK_RELU) p = cpu_load(DDP_F32, n->p, k);
        if (kind == BACK_RELU) {
            scale = cpu_load(DDP_F32, n->scale, k);
            shift = cpu_load(DDP_F32, n->shift, k);
        }
#pragma GCC unroll 4
        for (int j = 0; j < side; j++) {
            int64_t i = (r + j) * C + k;
            cpu_vec d = read(dt, n->x, i) - mean, v = d * q + s;
            __builtin_prefetch(cpu_at(dt, n->out, i) + AHEAD, 1);
            if (kind == BACK) v += read(dt, n->g, i) * p;
            if (kind == BACK_RELU) v += where_positive(d * scale + shift, read(dt, n->g, i)) * p;
            if (kind == FORWARD_ADD_RELU) v += read(dt, n->residual, i);
            if (kind == FORWARD_RELU || kind == FORWARD_ADD_RELU) v = (cpu_vec)(~(cpu_bits)(v < 0) & (cpu_bits)v);
            cpu_store(dt, n->out, i, v);
        }
    }
    for (; k < C; k++)
        for (int j = 0; j < side; j++) cpu_put(dt, n->out, (r + j) * C + k, result_one(kind, n, k, (r + j) * C + k));
}

CPU_INLINE void result_of_rows(ddp_dtype dt, result_of kind, const norm_rows *n, int64_t lo, int64_t hi) {
    int64_t r = lo;
    for (; !one_by_one(n) && r + SIDE <= hi; r += SIDE) result_rows(dt, kind, SIDE, n, r);
    for (; r < hi; r++) result_rows(dt, kind, 1, n, r);
}
CPU_INLINE void result_as(ddp_dtype dt, const norm_rows *n, int64_t lo, int64_t hi) {
    if (n->g && n->relu) result_of_rows(dt, BACK_RELU, n, lo, hi);
    else if (n->g) result_of_rows(dt, BACK, n, lo, hi);
    else if (n->residual) result_of_rows(dt, FORWARD_ADD_RELU, n, lo, hi);
    else if (n->relu) result_of_rows(dt, FORWARD_RELU, n, lo, hi);
    else result_of_rows(dt, FORWARD, n, lo, hi);
}
static void result_part(const norm_rows *n, int64_t lo, int64_t hi) {
    if (n->d == DDP_F32) result_as(DDP_F32, n, lo, hi);
    else if (n->d == DDP_BF16) result_as(DDP_BF16, n, lo, hi);
    else result_as(DDP_F16, n, lo, hi);
}

void cpu_norm_result(const norm_rows *n) {
    float room[6 * 2 * SPAN]; /* fold * C < 2 * SPAN where rows are folded */
    norm_rows rest, wide = folded(n, fold_of(n->C, n->rows), room, &rest);
    int threads = cpu_threads(n->rows * n->C);
    if (threads <= 1) result_part(&wide, 0, wide.rows);
    else {
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int p = 0; p < PARTS; p++) result_part(&wide, wide.rows * p / PARTS, wide.rows * (p + 1) / PARTS);
    }
    result_part(&rest, 0, rest.rows);
}
