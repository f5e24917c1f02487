/* map.c -- one elementwise loop over operands of any layout: as they lie where all lie alike, else with what is
 * broadcast or strided laid side by side in small buffers first. */
#include <string.h>

#include "cpu.h"

void cpu_share(int64_t n, int64_t work, cpu_body body, const void *ctx) {
    int threads = cpu_threads(work);
    if (threads <= 1) { /* a parallel region of one thread would cost more than many a call */
        body(ctx, 0, n);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        int t = omp_get_thread_num(), all = omp_get_num_threads();
        if (n * t / all < n * (t + 1) / all) body(ctx, n * t / all, n * (t + 1) / all);
    }
}

/* ---- operands in one run: each walks along, or repeats with a period ---- */

typedef struct flat {
    int k;
    char *p[CPU_MAP_MAX];
    int bytes[CPU_MAP_MAX];
    ddp_dtype half[CPU_MAP_MAX]; /* f16 or bf16 where the loop sees f32, else f32 */
    bool repeats[CPU_MAP_MAX];
    bool any_repeats, any_halves;
    int64_t period, n;
    cpu_loop loop;
    const void *ctx;
} flat;

/* to[0..n) = from[0..period) again and again. */
static void repeat(char *to, const char *from, int bytes, int64_t period, int64_t n) {
    size_t want = (size_t)n * (size_t)bytes, have = (size_t)period * (size_t)bytes;
    if (have > want) have = want;
    memcpy(to, from, have);
    for (; have < want; have *= 2) memcpy(to + have, to, have < want - have ? have : want - have);
}

typedef char buffers[CPU_MAP_MAX][CPU_CHUNK * 8 + 192] __attribute__((aligned(64))); /* not 4 KB apart */

/* Operand i, n elements of it at p, as the loop wants it: as it lies, or widened into its buffer. */
static char *seen(const flat *f, int i, char *p, char *buffer, int64_t n) {
    if (f->half[i] == DDP_F32) return p;
    if (i > 0) cpu_widen(f->half[i], p, 0, (float *)(void *)buffer, n);
    return buffer;
}

static void flat_range(const flat *f, int64_t lo, int64_t hi, int64_t chunk) {
    buffers buffer;
    char *p[CPU_MAP_MAX], *q[CPU_MAP_MAX];
    for (int i = 0; i < f->k; i++) {
        p[i] = q[i] = f->p[i] + lo * f->bytes[i];
        if (!f->repeats[i]) continue;
        char narrow[CPU_CHUNK * 2];
        int64_t n = hi - lo < chunk ? hi - lo : chunk;
        q[i] = f->half[i] == DDP_F32 ? buffer[i] : narrow;
        repeat(q[i], f->p[i], f->bytes[i], f->period, n);
        q[i] = seen(f, i, q[i], buffer[i], n);
    }
    if (!f->any_repeats && !f->any_halves) { /* chunks are whole vectors: seen at once they give the same */
        f->loop(f->ctx, p, hi - lo);
        return;
    }
    for (int64_t at = lo; at < hi; at += chunk) {
        int64_t n = hi - at < chunk ? hi - at : chunk;
        for (int i = 0; i < f->k; i++)
            if (!f->repeats[i]) q[i] = seen(f, i, p[i], buffer[i], n);
        f->loop(f->ctx, q, n);
        if (f->half[0] != DDP_F32) cpu_narrow(f->half[0], (const float *)(const void *)q[0], p[0], 0, n);
        for (int i = 0; i < f->k; i++) p[i] += chunk * f->bytes[i];
    }
}

/* Chunks [lo, hi). */
static void flat_chunks(const void *ctx, int64_t lo, int64_t hi) {
    const flat *f = ctx;
    int64_t chunk = CPU_CHUNK / f->period * f->period;
    flat_range(f, lo * chunk, hi * chunk < f->n ? hi * chunk : f->n, chunk);
}

static void flat_run(const flat *f) {
    int64_t chunk = CPU_CHUNK / f->period * f->period;
    if (!f->any_repeats && !f->any_halves && f->n < CPU_WORTH) f->loop(f->ctx, f->p, f->n);
    else cpu_share((f->n + chunk - 1) / chunk, f->n, flat_chunks, f);
}

/* All alike and dense, or single numbers: found without a walk over dims. */
static bool flat_fast(flat *f, ddp_tensor *const *t) {
    f->any_repeats = false;
    f->period = 1;
    if (!cpu_dense(t[0])) return false;
    for (int i = 0; i < f->k; i++) {
        f->repeats[i] = i > 0 && t[i]->numel == 1 && f->n != 1;
        f->any_repeats |= f->repeats[i];
        if (i > 0 && f->n != 1 && !f->repeats[i] && !cpu_alike(t[i], t[0])) return false;
        f->p[i] = ddp__ptr(t[i]);
        f->bytes[i] = ddp__dtype_bytes[t[i]->m.dtype];
    }
    return true;
}

/* The same from merged dims: rows of t[0] in one run, the others walking along or the same for each row. */
static bool flat_rows(flat *f, const ddp_iter *it) {
    if (it->ndim == 0 || it->ndim > 2 || it->stride[0][0] != 1) return false;
    f->any_repeats = false;
    f->period = it->ndim == 2 ? it->size[0] : 1;
    if (f->period > CPU_CHUNK / 2 || (it->ndim == 2 && it->stride[0][1] != f->period)) return false;
    for (int i = 0; i < f->k; i++) {
        int64_t s = it->stride[i][0], row = it->ndim == 2 ? it->stride[i][1] : 0;
        bool walks = s == 1 && (it->ndim == 1 || row == f->period);
        f->repeats[i] = !walks;
        f->any_repeats |= !walks;
        if (!walks && (row != 0 || s != (it->ndim == 2))) return false;
        f->p[i] = it->ptr[i];
        f->bytes[i] = it->elem[i];
    }
    return true;
}

/* ---- strided operands ---- */

#define MOVE(T, to_index, from_index) \
    for (int64_t i = 0; i < n; i++) ((T *)(void *)to)[to_index] = ((const T *)(const void *)from)[from_index]
static void gather(char *to, const char *from, int64_t s, int bytes, int64_t n) {
    if (s == 0) repeat(to, from, bytes, 1, n);
    else if (bytes == 4) MOVE(uint32_t, i, i * s);
    else if (bytes == 8) MOVE(uint64_t, i, i * s);
    else if (bytes == 2) MOVE(uint16_t, i, i * s);
    else MOVE(uint8_t, i, i * s);
}
static void scatter(char *to, const char *from, int64_t s, int bytes, int64_t n) {
    if (bytes == 4) MOVE(uint32_t, i * s, i);
    else if (bytes == 8) MOVE(uint64_t, i * s, i);
    else if (bytes == 2) MOVE(uint16_t, i * s, i);
    else MOVE(uint8_t, i * s, i);
}

static void strided_run(void *ctx, char *const *p, const int64_t *s, int64_t n) {
    const flat *f = ctx;
    buffers buffer, raw;
    char *q[CPU_MAP_MAX];
    for (int64_t at = 0; at < n; at += CPU_CHUNK) {
        int64_t m = n - at < CPU_CHUNK ? n - at : CPU_CHUNK;
        char *to = p[0] + at * s[0] * f->bytes[0], *line = s[0] == 1 || m == 1 ? to : raw[0];
        for (int i = 0; i < f->k; i++) {
            q[i] = p[i] + at * s[i] * f->bytes[i];
            if (s[i] != 1 && m != 1) {
                if (i > 0) gather(raw[i], q[i], s[i], f->bytes[i], m);
                q[i] = raw[i];
            }
            q[i] = seen(f, i, q[i], buffer[i], m);
        }
        f->loop(f->ctx, q, m);
        if (f->half[0] != DDP_F32) cpu_narrow(f->half[0], (const float *)(const void *)q[0], line, 0, m);
        if (line != to) scatter(to, line, s[0], f->bytes[0], m);
    }
}

/* The walk, dim d of it shared out among threads: whole inner runs each. */
typedef struct shared_walk {
    const ddp_iter *it;
    int d;
    ddp_run_fn fn;
    void *ctx;
} shared_walk;

static void walk_part(const void *ctx, int64_t lo, int64_t hi) {
    const shared_walk *w = ctx;
    ddp_iter part = *w->it;
    part.size[w->d] = hi - lo;
    part.numel = hi - lo; /* only its being 0 counts */
    for (int k = 0; k < part.n; k++) part.ptr[k] += lo * part.stride[k][w->d] * part.elem[k];
    ddp__iter_run(&part, w->fn, w->ctx);
}

static void walk(const ddp_iter *it, ddp_run_fn fn, void *ctx) {
    shared_walk w = {it, it->ndim - 1, fn, ctx};
    while (w.d > 1 && it->size[w.d] < 8) w.d--;
    if (w.d < 1) ddp__iter_run(it, fn, ctx);
    else cpu_share(it->size[w.d], it->numel, walk_part, &w);
}

static void map(int k, ddp_tensor *const *t, cpu_loop loop, const void *ctx, bool widen) {
    flat f = {.k = k, .n = t[0]->numel, .loop = loop, .ctx = ctx};
    if (f.n == 0) return;
    for (int i = 0; i < k; i++) {
        bool half = widen && ddp__is_half(t[i]->m.dtype);
        f.half[i] = half ? t[i]->m.dtype : DDP_F32;
        f.any_halves |= half;
    }
    if (flat_fast(&f, t)) {
        flat_run(&f);
        return;
    }
    ddp_iter it;
    ddp__iter_init(&it, k, t);
    for (int i = 0; i < k; i++) f.bytes[i] = it.elem[i];
    if (flat_rows(&f, &it)) flat_run(&f);
    else walk(&it, strided_run, &f);
}

void cpu_map(int k, ddp_tensor *const *t, cpu_loop loop, const void *ctx) { map(k, t, loop, ctx, false); }
void cpu_map_f32(int k, ddp_tensor *const *t, cpu_loop loop, const void *ctx) { map(k, t, loop, ctx, true); }

/* ---- copies ---- */

typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
#define HALVES(a, b, i, j) __builtin_shufflevector(a, b, i, i + 1, i + 2, i + 3, j, j + 1, j + 2, j + 3)
#define PAIRS(a, b, o) __builtin_shufflevector(a, b, o, o + 1, 8 + o, 9 + o, 4 + o, 5 + o, 12 + o, 13 + o)
#define SINGLES(a, b, o) __builtin_shufflevector(a, b, o, 8 + o, 1 + o, 9 + o, 4 + o, 12 + o, 5 + o, 13 + o)

void cpu_transpose8(const float *from, int64_t fs, float *to, int64_t ts) {
    v8 r[8], s[8], u[8];
    for (int i = 0; i < 8; i++) r[i] = *(const v8 *)(const void *)(from + i * fs);
    for (int i = 0; i < 8; i += 2) {
        s[i] = SINGLES(r[i], r[i + 1], 0);
        s[i + 1] = SINGLES(r[i], r[i + 1], 2);
    }
    for (int i = 0; i < 8; i += 4) {
        u[i] = PAIRS(s[i], s[i + 2], 0);
        u[i + 1] = PAIRS(s[i], s[i + 2], 2);
        u[i + 2] = PAIRS(s[i + 1], s[i + 3], 0);
        u[i + 3] = PAIRS(s[i + 1], s[i + 3], 2);
    }
    for (int i = 0; i < 4; i++) {
        *(v8 *)(void *)(to + i * ts) = HALVES(u[i], u[i + 4], 0, 8);
        *(v8 *)(void *)(to + (i + 4) * ts) = HALVES(u[i], u[i + 4], 4, 12);
    }
}

enum { TILE = 1024, LINE = 16 };

/* LINE x LINE floats: whole lines of the cache are read, and written, once, though rows 4 KB apart share few places in it. What
 * comes four blocks on is fetched (beyond the end that does nothing). */
static void transpose_lines(float *to, int64_t ts, const float *from, int64_t fs) {
    float near[LINE * LINE] __attribute__((aligned(64)));
    for (int j = 0; j < LINE; j++) {
        __builtin_prefetch(from + (j + 4 * LINE) * fs, 0, 2);
        __builtin_prefetch(to + j * ts + 4 * LINE, 1, 3);
        memcpy(near + j * LINE, from + j * fs, LINE * sizeof(float));
    }
    for (int i = 0; i < LINE; i += 8)
        for (int j = 0; j < LINE; j += 8) cpu_transpose8(near + j * LINE + i, LINE, to + i * ts + j, ts);
}

/* A tile of m rows of n: to[i * ts + j] = from[j * fs + i]. */
static void transpose_tile(float *to, int64_t ts, const float *from, int64_t fs, int64_t m, int64_t n) {
    int64_t whole_m = m & ~(int64_t)(LINE - 1), whole_n = n & ~(int64_t)(LINE - 1);
    for (int64_t i = 0; i < whole_m; i += LINE)
        for (int64_t j = 0; j < whole_n; j += LINE) transpose_lines(to + i * ts + j, ts, from + j * fs + i, fs);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = i < whole_m ? whole_n : 0; j < n; j++) to[i * ts + j] = from[j * fs + i];
}

/* The same of 16-bit elements. */
static void transpose_tile_2(uint16_t *to, int64_t ts, const uint16_t *from, int64_t fs, int64_t m, int64_t n) {
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) to[i * ts + j] = from[j * fs + i];
}

/* Dims a (dst side by side) and b (src side by side) of a walk. */
typedef struct turn {
    int64_t a_from, b_to, a_size, b_size;
    int bytes;
} turn;

static void turn_run(void *ctx, char *const *p, const int64_t *s, int64_t n) {
    const turn *t = ctx;
    for (int64_t k = 0; k < n; k++) {
        char *to = p[0] + k * s[0] * t->bytes, *from = p[1] + k * s[1] * t->bytes;
        for (int64_t i = 0; i < t->b_size; i += TILE)
            for (int64_t j = 0; j < t->a_size; j += TILE) {
                int64_t m = t->b_size - i < TILE ? t->b_size - i : TILE;
                int64_t w = t->a_size - j < TILE ? t->a_size - j : TILE;
                void *y = to + (i * t->b_to + j) * t->bytes, *x = from + (j * t->a_from + i) * t->bytes;
                if (t->bytes == 4) transpose_tile(y, t->b_to, x, t->a_from, m, w);
                else transpose_tile_2(y, t->b_to, x, t->a_from, m, w);
            }
    }
}

/* 2- and 4-byte elements where another dim than dst's innermost is src's: in tiles. Takes those two dims out of the walk. */
static bool turned(ddp_iter *it, turn *t) {
    int b = 1;
    if (it->ndim < 2 || (it->elem[0] != 4 && it->elem[0] != 2) || it->stride[0][0] != 1 || it->stride[1][0] == 0)
        return false;
    while (b < it->ndim && it->stride[1][b] != 1) b++;
    if (b == it->ndim || it->size[0] < 4 || it->size[b] < 4) return false;
    *t = (turn){it->stride[1][0], it->stride[0][b], it->size[0], it->size[b], it->elem[0]};
    int left = 0;
    for (int d = 1; d < it->ndim; d++) {
        if (d == b) continue;
        it->size[left] = it->size[d];
        for (int k = 0; k < 2; k++) it->stride[k][left] = it->stride[k][d];
        left++;
    }
    it->ndim = left;
    return true;
}

static void copy_loop(const void *ctx, char *const *p, int64_t n) {
    memcpy(p[0], p[1], (size_t)n * *(const uint8_t *)ctx);
}

void cpu_copy(ddp_tensor *dst, ddp_tensor *src) {
    ddp_tensor *t[2] = {dst, src};
    turn s;
    ddp_iter it;
    if (dst->numel == 0) return;
    if (!(cpu_alike(dst, src) && cpu_dense(dst)) && src->numel != 1) {
        ddp__iter_init(&it, 2, t);
        if (turned(&it, &s)) {
            walk(&it, turn_run, &s);
            return;
        }
    }
    cpu_map(2, t, copy_loop, &ddp__dtype_bytes[dst->m.dtype]);
}
