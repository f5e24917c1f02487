/* copy.c -- copies of one dtype between any layouts: as they lie, run by run, or turned where another dim is innermost. */
#include <string.h>

#include "cpu.h"

enum { STRIP = 1 << 16, STREAM_FROM = 4 << 20 }; /* bytes */

/* m rows of n elements for each place of the dims in `rest`: to[i * ts + j] from[i * fs + j], or, turned, from[j * fs + i]. */
typedef struct job {
    ddp_iter rest;
    int64_t m, n, ts, fs, strip, strips; /* strip: rows that one thread copies at a time */
    int bytes;
    bool stream;
} job;

/* Takes dim 0, of n elements, and dim b, of m, out of the walk. */
static job job_of(const ddp_iter *it, int b, int64_t ts, int64_t fs) {
    job t = {.rest = *it, .m = it->size[b], .n = it->size[0], .ts = ts, .fs = fs, .bytes = it->elem[0]};
    t.rest.ndim = 0;
    for (int d = 1; d < it->ndim; d++) {
        if (d == b) continue;
        t.rest.size[t.rest.ndim] = it->size[d];
        for (int k = 0; k < 2; k++) t.rest.stride[k][t.rest.ndim] = it->stride[k][d];
        t.rest.ndim++;
    }
    t.strip = STRIP / (t.n * t.bytes) / 128 * 128 + 128;
    t.strips = (t.m + t.strip - 1) / t.strip;
    t.stream = it->numel * t.bytes >= STREAM_FROM;
    return t;
}
static void run(const job *t, cpu_body strips) {
    int64_t places = 1;
    for (int d = 0; d < t->rest.ndim; d++) places *= t->rest.size[d];
    cpu_share(places * t->strips, places * t->m * t->n, strips, t);
}

/* ---- turned ---- */

/* n side by side in `to`, from n runs; and the other way. n is a constant. */
#define FEW(T)                                                                                              \
    CPU_INLINE void zip_##T(T *restrict to, const T *restrict from, int64_t fs, int64_t m, const int n) {   \
        for (int64_t i = 0; i < m; i++)                                                                     \
            for (int c = 0; c < n; c++) to[i * n + c] = from[c * fs + i];                                   \
    }                                                                                                       \
    CPU_INLINE void unzip_##T(T *restrict to, int64_t ts, const T *restrict from, int64_t m, const int n) { \
        for (int64_t i = 0; i < m; i++)                                                                     \
            for (int c = 0; c < n; c++) to[c * ts + i] = from[i * n + c];                                   \
    }                                                                                                       \
    static void zip_few_##T(T *to, const T *from, int64_t fs, int64_t m, int64_t n) {                       \
        if (n == 2) zip_##T(to, from, fs, m, 2);                                                            \
        else if (n == 3) zip_##T(to, from, fs, m, 3);                                                       \
        else zip_##T(to, from, fs, m, 4);                                                                   \
    }                                                                                                       \
    static void unzip_few_##T(T *to, int64_t ts, const T *from, int64_t m, int64_t n) {                     \
        if (n == 2) unzip_##T(to, ts, from, m, 2);                                                          \
        else if (n == 3) unzip_##T(to, ts, from, m, 3);                                                     \
        else unzip_##T(to, ts, from, m, 4);                                                                 \
    }
FEW(uint8_t)
FEW(uint16_t)
FEW(uint32_t)
FEW(uint64_t)

/* Up to four planes into pixels, or back: false where the pixels do not lie side by side. */
static bool turn_few(int bytes, void *to, int64_t ts, const void *from, int64_t fs, int64_t m, int64_t n) {
    if (n <= 4 && ts == n) {
        if (bytes == 1) zip_few_uint8_t(to, from, fs, m, n);
        else if (bytes == 2) zip_few_uint16_t(to, from, fs, m, n);
        else if (bytes == 4) zip_few_uint32_t(to, from, fs, m, n);
        else zip_few_uint64_t(to, from, fs, m, n);
    } else if (m <= 4 && fs == m) {
        if (bytes == 1) unzip_few_uint8_t(to, ts, from, n, m);
        else if (bytes == 2) unzip_few_uint16_t(to, ts, from, n, m);
        else if (bytes == 4) unzip_few_uint32_t(to, ts, from, n, m);
        else unzip_few_uint64_t(to, ts, from, n, m);
    } else return false;
    return true;
}

/* Where strip u begins in both tensors; the first of its rows. */
static int64_t strip_at(const job *t, int64_t u, char **p) {
    const ddp_iter *it = &t->rest;
    int64_t place = u / t->strips, row = u % t->strips * t->strip;
    for (int k = 0; k < 2; k++) p[k] = it->ptr[k];
    for (int d = 0; d < it->ndim; d++) {
        for (int k = 0; k < 2; k++) p[k] += place % it->size[d] * it->stride[k][d] * t->bytes;
        place /= it->size[d];
    }
    return row;
}

/* Strips [lo, hi) of all matrices. */
static void turn_strips(const void *ctx, int64_t lo, int64_t hi) {
    const job *t = ctx;
    for (int64_t u = lo; u < hi; u++) {
        char *p[2];
        int64_t row = strip_at(t, u, p), m = t->m - row < t->strip ? t->m - row : t->strip;
        p[0] += row * t->ts * t->bytes;
        p[1] += row * t->bytes;
        if (!turn_few(t->bytes, p[0], t->ts, p[1], t->fs, m, t->n))
            cpu_turn(t->bytes, p[0], t->ts * t->bytes, p[1], t->fs * t->bytes, m, t->n, t->stream);
    }
    if (t->stream) cpu_streamed();
}

/* The dim that is src's innermost where another is dst's, else 0. */
static int turned_dim(const ddp_iter *it) {
    if (it->ndim < 2 || it->stride[0][0] != 1 || it->stride[1][0] <= 1) return 0;
    for (int b = 1; b < it->ndim; b++)
        if (it->stride[1][b] == 1) return b;
    return 0;
}

/* ---- runs ---- */

/* Rows of neighbours; those that follow are brought near, for they may lie far apart. */
static void copy_strips(const void *ctx, int64_t lo, int64_t hi) {
    enum { AHEAD = 8 };
    const job *t = ctx;
    const int64_t bytes = t->n * t->bytes, near = bytes < 1024 ? bytes : 1024;
    for (int64_t u = lo; u < hi; u++) {
        char *p[2];
        int64_t row = strip_at(t, u, p), end = t->m - row < t->strip ? t->m : row + t->strip;
        for (; row < end; row++) {
            const char *from = p[1] + row * t->fs * t->bytes;
            for (int64_t k = 0; k < near; k += 64) __builtin_prefetch(from + AHEAD * t->fs * t->bytes + k);
            memcpy(p[0] + row * t->ts * t->bytes, from, (size_t)bytes);
        }
    }
}

#define MOVE(T) \
    for (int64_t i = 0; i < n; i++) ((T *)(void *)to)[i * s[0]] = ((const T *)(const void *)from)[i * s[1]]
/* Element by element. */
static void copy_apart(void *ctx, char *const *p, const int64_t *s, int64_t n) {
    const int bytes = *(const int *)ctx;
    char *to = p[0];
    const char *from = p[1];
    if (bytes == 4) MOVE(uint32_t);
    else if (bytes == 8) MOVE(uint64_t);
    else if (bytes == 2) MOVE(uint16_t);
    else MOVE(uint8_t);
}

static void copy_loop(const void *ctx, char *const *p, int64_t n) {
    memcpy(p[0], p[1], (size_t)n * *(const uint8_t *)ctx);
}

/* What always lies together, 8 bytes at most, is one element. */
static void widen_elements(ddp_iter *it) {
    int64_t n = it->size[0], bytes = n * it->elem[0];
    if (it->ndim < 2 || it->stride[0][0] != 1 || it->stride[1][0] != 1 || (bytes != 2 && bytes != 4 && bytes != 8))
        return;
    for (int k = 0; k < 2; k++) {
        if ((uintptr_t)it->ptr[k] % (size_t)bytes) return;
        for (int d = 1; d < it->ndim; d++)
            if (it->stride[k][d] % n) return;
    }
    it->ndim--;
    it->numel /= n;
    for (int d = 0; d < it->ndim; d++) it->size[d] = it->size[d + 1];
    for (int k = 0; k < 2; k++) {
        it->elem[k] = (int)bytes;
        for (int d = 0; d < it->ndim; d++) it->stride[k][d] = it->stride[k][d + 1] / n;
    }
}

void cpu_copy(ddp_tensor *dst, ddp_tensor *src) {
    ddp_tensor *t[2] = {dst, src};
    ddp_iter it;
    if (dst->numel == 0) return;
    if (src->numel == 1 || (cpu_alike(dst, src) && cpu_dense(dst))) {
        cpu_map(2, t, copy_loop, &ddp__dtype_bytes[dst->m.dtype]);
        return;
    }
    ddp__iter_init(&it, 2, t);
    widen_elements(&it);
    const int b = turned_dim(&it);
    if (b) {
        job turned = job_of(&it, b, it.stride[0][b], it.stride[1][0]);
        run(&turned, turn_strips);
    } else if (it.ndim >= 2 && it.stride[0][0] == 1 && it.stride[1][0] == 1) {
        job rows = job_of(&it, 1, it.stride[0][1], it.stride[1][1]);
        run(&rows, copy_strips);
    } else cpu_walk(&it, copy_apart, &it.elem[0]);
}
