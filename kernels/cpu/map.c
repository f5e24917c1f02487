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

void cpu_walk(const ddp_iter *it, ddp_run_fn fn, void *ctx) {
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
    else cpu_walk(&it, strided_run, &f);
}

void cpu_map(int k, ddp_tensor *const *t, cpu_loop loop, const void *ctx) { map(k, t, loop, ctx, false); }
void cpu_map_f32(int k, ddp_tensor *const *t, cpu_loop loop, const void *ctx) { map(k, t, loop, ctx, true); }
