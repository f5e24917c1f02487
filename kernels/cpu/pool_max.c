/* pool_max.c -- the largest of windows of channels-last f32, f16 and bf16, and the gradient: cells of a window are compared
 * in vectors of channels, which stay in registers with their places. */
#include <math.h>
#include <string.h>

#include "pool.h"
#include "vectors.h"

typedef struct job {
    const char *in;
    char *out;
    int64_t *ids; /* written forward, read backward */
    ddp_dtype d;
    grid g;
    float *images; /* of gradients from anywhere: f32 of dx from image `first` on */
    int64_t first;
} job;

static const char *reject_max(const ddp_call *c) {
    const ddp_tensor *x = c->n_in == 1 ? c->in[0] : c->out[0];
    if (c->n_in == 1 && !ddp__meta_is_channels_last(&c->out[1]->m)) return "a result that is not channels-last";
    return x->m.size[2] * x->m.size[3] > INT32_MAX ? "an image of more than 2^31 cells" : pool_reject(c);
}

/* ---- forward ---- */

/* A lane each as 64 bits. */
CPU_INLINE void put_places(int64_t *ids, cpu_bits place) {
#if defined(__AVX512F__)
    _mm512_storeu_si512(ids, _mm512_cvtepi32_epi64(_mm512_castsi512_si256((__m512i)place)));
    _mm512_storeu_si512(ids + 8, _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64((__m512i)place, 1)));
#elif defined(__AVX2__)
    _mm256_storeu_si256((void *)ids, _mm256_cvtepi32_epi64(_mm256_castsi256_si128((__m256i)place)));
    _mm256_storeu_si256((void *)(ids + 4), _mm256_cvtepi32_epi64(_mm256_extracti128_si256((__m256i)place, 1)));
#else
    _mm_storeu_si128((void *)ids, _mm_cvtepi32_epi64((__m128i)place));
    _mm_storeu_si128((void *)(ids + 2), _mm_cvtepi32_epi64(_mm_srli_si128((__m128i)place, 8)));
#endif
}

/* A vector of channels of the window of H x W cells whose first is number `cell` and begins at place x: the largest, and its
 * place, into place y. */
CPU_INLINE void max_with_nan(const job *j, ddp_dtype d, int32_t cell, int64_t x, int64_t y, int64_t H, int64_t W) {
    const int64_t C = j->g.C, row = j->g.x[1];
    cpu_vec best = cpu_load(d, j->in, x);
    cpu_bits place = (cpu_bits){0} + cell;
    for (int64_t h = 0; h < H; h++)
        for (int64_t w = 0; w < W; w++) {
            cpu_vec v = cpu_load(d, j->in, x + (h * row + w) * C);
            lanes larger = takes(v, best);
            best = (cpu_vec)pick(larger, (cpu_bits)v, (cpu_bits)best);
            place = pick(larger, (cpu_bits){0} + (int32_t)(cell + h * row + w), place);
        }
    cpu_store(d, j->out, y, best);
    put_places(j->ids + y, place);
}
static __attribute__((noinline)) void max_any_nan(const job *j, int32_t cell, int64_t x, int64_t y, int64_t H,
                                                  int64_t W) {
    if (j->d == DDP_BF16) max_with_nan(j, DDP_BF16, cell, x, y, H, W);
    else if (j->d == DDP_F16) max_with_nan(j, DDP_F16, cell, x, y, H, W);
    else max_with_nan(j, DDP_F32, cell, x, y, H, W);
}

/* V such vectors. The sum of the cells tells whether a NaN is among them (or infinities of both signs): then once more. */
CPU_INLINE void max_window(const job *j, ddp_dtype d, int32_t cell, int64_t x, int64_t y, const int64_t H,
                           const int64_t W, const int V) {
    const int64_t C = j->g.C, row = j->g.x[1];
    cpu_vec best[2], sum[2];
    cpu_bits place[2];
    for (int v = 0; v < V; v++) {
        best[v] = cpu_load(d, j->in, x + v * CPU_W);
        place[v] = (cpu_bits){0} + cell;
        sum[v] = (cpu_vec){0};
    }
    for (int64_t h = 0; h < H; h++)
        for (int64_t w = 0; w < W; w++) {
            const cpu_bits here = (cpu_bits){0} + (int32_t)(cell + h * row + w);
            for (int v = 0; v < V; v++) {
                cpu_vec value = cpu_load(d, j->in, x + (h * row + w) * C + v * CPU_W);
                place[v] = pick(above(value, best[v]), here, place[v]);
                best[v] = most(value, best[v]);
                sum[v] += value;
            }
        }
    for (int v = 0; v < V; v++) {
        if (__builtin_expect(bits_of(is_nan(sum[v])) != 0, 0)) {
            max_any_nan(j, cell, x + v * CPU_W, y + v * CPU_W, H, W);
            continue;
        }
        cpu_store(d, j->out, y + v * CPU_W, best[v]);
        put_places(j->ids + y + v * CPU_W, place[v]);
    }
}

/* The same for fewer channels than a vector has. */
static void max_few(const job *j, int32_t cell, int64_t x, int64_t y, int64_t H, int64_t W) {
    const int64_t C = j->g.C, row = j->g.x[1];
    for (int64_t k = 0; k < C; k++) {
        float best = cpu_get(j->d, j->in, x + k);
        int64_t place = 0;
        for (int64_t h = 0; h < H; h++)
            for (int64_t w = 0; w < W; w++) {
                float v = cpu_get(j->d, j->in, x + (h * row + w) * C + k);
                if (best != best || v <= best) continue;
                best = v;
                place = h * row + w;
            }
        cpu_put(j->d, j->out, y + k, best);
        j->ids[y + k] = cell + place;
    }
}

/* All channels; H and W are constants where this is inlined. */
CPU_INLINE void max_channels(const job *j, ddp_dtype d, int32_t cell, int64_t x, int64_t y, int64_t H, int64_t W) {
    const int64_t C = j->g.C;
    int64_t k = 0;
    if (C < CPU_W) {
        max_few(j, cell, x, y, H, W);
        return;
    }
    for (; k + 2 * CPU_W <= C; k += 2 * CPU_W) max_window(j, d, cell, x + k, y + k, H, W, 2);
    for (; k + CPU_W <= C; k += CPU_W) max_window(j, d, cell, x + k, y + k, H, W, 1);
    if (k < C) max_window(j, d, cell, x + C - CPU_W, y + C - CPU_W, H, W, 1); /* some once more */
}

/* Rows [lo, hi) of windows, of all images. */
CPU_INLINE void max_rows(const job *j, ddp_dtype d, int64_t lo, int64_t hi) {
    const grid *g = &j->g;
    for (int64_t r = lo; r < hi; r++) {
        const span h = span_of(g, 0, r % g->y[0]);
        const int64_t image = r / g->y[0] * g->x[0] * g->x[1] * g->C, H = h.hi - h.lo;
        for (int64_t wo = 0; wo < g->y[1]; wo++) {
            const span w = span_of(g, 1, wo);
            const int64_t cell = h.lo * g->x[1] + w.lo, W = w.hi - w.lo;
            const int64_t x = image + cell * g->C, y = (r * g->y[1] + wo) * g->C;
            fetch_below(g, d, j->in, image, h, w);
            if (H == 2 && W == 2) max_channels(j, d, (int32_t)cell, x, y, 2, 2);
            else if (H == 3 && W == 3) max_channels(j, d, (int32_t)cell, x, y, 3, 3);
            else max_channels(j, d, (int32_t)cell, x, y, H, W);
        }
    }
}
static void max_any(const void *ctx, int64_t lo, int64_t hi) {
    const job j = *(const job *)ctx; /* a copy: nothing that is written can be part of it */
    if (j.d == DDP_BF16) max_rows(&j, DDP_BF16, lo, hi);
    else if (j.d == DDP_F16) max_rows(&j, DDP_F16, lo, hi);
    else max_rows(&j, DDP_F32, lo, hi);
}

static int64_t *ids_of(const ddp_tensor *t) { return (int64_t *)(void *)ddp__ptr(t); }

static int run_max_pool2d(const ddp_call *c) {
    const ddp_max_pool2d_attrs *a = c->attrs;
    job j = {.in = ddp__ptr(c->in[0]), .out = ddp__ptr(c->out[0]), .ids = ids_of(c->out[1]), .d = c->in[0]->m.dtype};
    j.g = grid_of(&c->in[0]->m, &c->out[0]->m, a->kernel, a->stride, a->padding);
    cpu_share(j.g.N * j.g.y[0], c->in[0]->numel, max_any, &j);
    return 0;
}
CPU_KERNEL(max_pool2d, reject_max, run_max_pool2d);

/* ---- backward, where the windows are known: each cell of dx asks those over it ---- */

/* The lanes whose place is `cell`. */
CPU_INLINE lanes places_at(const int64_t *ids, int64_t cell) {
#if defined(__AVX512F__)
    const __m512i want = _mm512_set1_epi64(cell);
    __mmask8 low = _mm512_cmpeq_epi64_mask(_mm512_loadu_si512(ids), want);
    return _mm512_kunpackb(_mm512_cmpeq_epi64_mask(_mm512_loadu_si512(ids + 8), want), low);
#elif defined(__AVX2__)
    const __m256i want = _mm256_set1_epi64x(cell);
    __m256i low = _mm256_cmpeq_epi64(_mm256_loadu_si256((const void *)ids), want);
    __m256i up = _mm256_cmpeq_epi64(_mm256_loadu_si256((const void *)(ids + 4)), want);
    __m256 both = _mm256_shuffle_ps(_mm256_castsi256_ps(low), _mm256_castsi256_ps(up), 0x88);
    return (lanes)_mm256_permute4x64_epi64(_mm256_castps_si256(both), 0xd8);
#else
    const __m128i want = _mm_set1_epi64x(cell);
    __m128i low = _mm_cmpeq_epi64(_mm_loadu_si128((const void *)ids), want);
    __m128i up = _mm_cmpeq_epi64(_mm_loadu_si128((const void *)(ids + 2)), want);
    return (lanes)_mm_castps_si128(_mm_shuffle_ps(_mm_castsi128_ps(low), _mm_castsi128_ps(up), 0x88));
#endif
}
CPU_INLINE cpu_vec add_where(lanes l, cpu_vec sum, cpu_vec v) {
#if defined(__AVX512F__)
    return (cpu_vec)_mm512_mask_add_ps((__m512)sum, l, (__m512)sum, (__m512)v);
#else
    return sum + (cpu_vec)((cpu_bits)v & l);
#endif
}

/* V vectors of channels of cell number `cell`, at place x; H x W windows are over it, the first at place y. */
CPU_INLINE void back_vectors(const job *j, ddp_dtype d, int64_t cell, int64_t y, int64_t x, const int64_t H,
                             const int64_t W, const int V) {
    const int64_t C = j->g.C, row = j->g.y[1] * C;
    cpu_vec sum[4] = {{0}};
    for (int64_t h = 0; h < H; h++)
        for (int64_t w = 0; w < W; w++)
            for (int v = 0; v < V; v++) {
                const int64_t at = y + h * row + w * C + v * CPU_W;
                sum[v] = add_where(places_at(j->ids + at, cell), sum[v], cpu_load(d, j->in, at));
            }
    for (int v = 0; v < V; v++) cpu_store(d, j->out, x + v * CPU_W, sum[v]);
}
/* All channels; H and W are constants where this is inlined. */
CPU_INLINE void back_cell(const job *j, ddp_dtype d, int64_t cell, int64_t y, int64_t x, int64_t H, int64_t W) {
    const int64_t C = j->g.C;
    int64_t k = 0;
    for (; k + 4 * CPU_W <= C; k += 4 * CPU_W) back_vectors(j, d, cell, y + k, x + k, H, W, 4);
    for (; k + CPU_W <= C; k += CPU_W) back_vectors(j, d, cell, y + k, x + k, H, W, 1);
    if (k < C) back_vectors(j, d, cell, y + C - CPU_W, x + C - CPU_W, H, W, 1);
}

/* Rows [lo, hi) of dx, of all images. */
CPU_INLINE void back_rows(const job *j, ddp_dtype d, int64_t lo, int64_t hi) {
    const grid *g = &j->g;
    const int64_t C = g->C;
    for (int64_t r = lo; r < hi; r++) {
        const int64_t image = r / g->x[0] * g->y[0] * g->y[1] * C, at = r % g->x[0];
        const cover h = g->cover[0][at];
        const bool fresh = at == 0 || g->cover[0][at - 1].hi != h.hi; /* of the rows under h.hi the first */
        for (int64_t w = 0; w < g->x[1]; w++) {
            const cover c = g->cover[1][w];
            const int64_t y = image + (h.lo * g->y[1] + c.lo) * C, x = (r * g->x[1] + w) * C, cell = at * g->x[1] + w;
            const int64_t H = h.hi - h.lo + 1, W = c.hi - c.lo + 1;
            if (fresh && (w == 0 || g->cover[1][w - 1].hi != c.hi)) {
                const int64_t below = image + ((h.hi + 1) * g->y[1] + c.hi) * C;
                cpu_fetch(d, j->in, below, C);
                cpu_fetch(DDP_I64, j->ids, below, C);
            }
            if (H == 1 && W == 1) back_cell(j, d, cell, y, x, 1, 1);
            else if (H == 1 && W == 2) back_cell(j, d, cell, y, x, 1, 2);
            else if (H == 2 && W == 1) back_cell(j, d, cell, y, x, 2, 1);
            else if (H == 2 && W == 2) back_cell(j, d, cell, y, x, 2, 2);
            else back_cell(j, d, cell, y, x, H, W);
        }
    }
}
static void back_any(const void *ctx, int64_t lo, int64_t hi) {
    const job j = *(const job *)ctx; /* a copy: nothing that is written can be part of it */
    if (j.d == DDP_BF16) back_rows(&j, DDP_BF16, lo, hi);
    else if (j.d == DDP_F16) back_rows(&j, DDP_F16, lo, hi);
    else back_rows(&j, DDP_F32, lo, hi);
}

static int from_windows(job *j) {
    int st = grid_take(&j->g);
    if (st < 0) return st;
    cpu_share(j->g.N * j->g.x[0], j->g.N * j->g.x[0] * j->g.x[1] * j->g.C, back_any, j);
    grid_give(&j->g);
    return 0;
}

/* ---- backward, from anywhere, and few channels: added up where the places say ---- */

enum { SCRATCH = 1 << 18 };

/* Images first + [lo, hi). */
static void add_images(const void *ctx, int64_t lo, int64_t hi) {
    const job *j = ctx;
    const grid *g = &j->g;
    const int64_t area = g->x[0] * g->x[1], C = g->C, cells = g->y[0] * g->y[1];
    for (int64_t n = lo; n < hi; n++) {
        float *image = j->images + n * area * C;
        memset(image, 0, (size_t)(area * C) * sizeof *image);
        for (int64_t i = 0; i < cells; i++) {
            const int64_t at = ((n + j->first) * cells + i) * C;
            for (int64_t k = 0; k < C; k++) {
                int64_t id = j->ids[at + k];
                if (id >= 0 && id < area) image[id * C + k] += cpu_get(j->d, j->in, at + k);
            }
        }
        cpu_narrow(j->d, image, j->out, (n + j->first) * area * C, area * C);
    }
}

/* As f32: where they lie, or 16-bit ones, so that what is added up is rounded once, some images at a time in scratch. */
static int from_anywhere(job *j) {
    const int64_t N = j->g.N, image = j->g.x[0] * j->g.x[1] * j->g.C;
    if (j->d == DDP_F32) {
        j->images = (float *)(void *)j->out;
        cpu_share(N, N * image, add_images, j);
        return 0;
    }
    int64_t group = least(N, SCRATCH / image + 8);
    size_t bytes = (size_t)(group * image) * sizeof(float);
    if (!(j->images = ddp__scratch_take(bytes))) return ddp__pending();
    for (j->first = 0; j->first < N; j->first += group) {
        int64_t n = least(group, N - j->first);
        cpu_share(n, n * image, add_images, j);
    }
    ddp__scratch_give(j->images, bytes);
    return 0;
}

static int run_max_pool2d_grad(const ddp_call *c) {
    const ddp_max_pool2d_grad_attrs *a = c->attrs;
    job j = {.in = ddp__ptr(c->in[0]), .out = ddp__ptr(c->out[0]), .ids = ids_of(c->in[1]), .d = c->in[0]->m.dtype};
    j.g = grid_of(&c->out[0]->m, &c->in[0]->m, a->kernel, a->stride, a->padding);
    return a->kernel[0] && j.g.C >= CPU_W ? from_windows(&j) : from_anywhere(&j);
}
CPU_KERNEL(max_pool2d_grad, reject_max, run_max_pool2d_grad);
