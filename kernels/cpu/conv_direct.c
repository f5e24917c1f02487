/* conv_direct.c -- convolutions of any window, stride, padding and dilation as products over gathered rows: forward and the
 * gradient of x. For each pixel of the result and each tap there is a pointer to the row of channels that is read, or to
 * zeros; CONV_MR pixels by CONV_NR channels are computed in registers. Nothing is copied, but where channels are few (or
 * odd, in bf16): there a pixel's rows of all taps are laid side by side first.
 *
 * The gradient of x reads g where h + padding - r * dilation is a multiple of the stride: pixels go by their remainder
 * modulo the stride (a class), each with the taps that reach it, so that no product with an inserted zero is made.
 *
 * bf16 tensors: by AVX512_BF16's dot products of pairs of channels, summed in f32; without it rows are widened first. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=fast")
#endif
#include "conv.h"

enum { BLOCK = 8 * CONV_MR, MAX_TAPS = 128, FEW_CHANNELS = 16 };

/* The walk from result pixels to source pixels, along one dim. */
typedef struct along {
    int64_t out, in;  /* sizes of the result and the source */
    int64_t n;        /* taps */
    int64_t stride, padding, dilation;
    int64_t classes;  /* 1, or the stride for the gradient of x */
} along;

typedef struct direct {
    bool back; /* the gradient of x */
    along h, w;
    const char *in;
    char *out;
    int64_t N, C, K; /* channels read and written */
    const char *bias;
    void *u;      /* [panels][depth][CONV_NR] f32, or [panels][depth/2][CONV_NR][2] bf16 */
    int64_t depth; /* taps * C, rounded up to even for pairs */
    const char *zeros;
    bool bf16;    /* tensors */
    bool pairs;   /* products by pairs of bf16 */
    bool patches; /* rows of all taps side by side */
    bool *failed;
} direct;

/* Does tap r reach result positions of class k? Then position y of the class reads y * step + offset. */
static bool reaches(const direct *d, const along *a, int64_t k, int64_t r) {
    return !d->back || (k + a->padding - r * a->dilation) % a->stride == 0;
}
static int64_t offset_of(const direct *d, const along *a, int64_t k, int64_t r) {
    return d->back ? (k + a->padding - r * a->dilation) / a->stride : r * a->dilation - a->padding;
}

/* ---- register tiles ------------------------------------------------------------------------------------------------ */

/* Pixels of one block: their places in the result, and for each of n taps their rows. */
typedef struct block {
    int64_t n_pixels, n_taps, width; /* channels a row */
    char *to[BLOCK];
    const char *row[MAX_TAPS][BLOCK];
    int64_t tap[MAX_TAPS];           /* which taps */
    int64_t dh[MAX_TAPS], dw[MAX_TAPS]; /* their offsets; NOWHERE where a patch has a gap */
} block;
enum { NOWHERE = INT32_MIN };

CPU_INLINE void finish(const direct *d, int rows, char *const *to, int64_t k, cpu_vec acc[][2]) {
    int64_t bytes = d->bf16 ? 2 : 4, n = d->K - k;
    for (int j = 0; j < 2 && n > 0; j++, n -= CPU_W, k += CPU_W) {
        cpu_vec bias = d->bias ? conv_load(d->bias + k * bytes, d->bf16, n) : (cpu_vec){0};
        if (n >= CPU_W && !d->bf16)
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++) conv_store(to[i] + k * 4, false, CPU_W, acc[i][j] + bias);
        else if (n >= CPU_W)
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++) conv_store(to[i] + k * 2, true, CPU_W, acc[i][j] + bias);
        else
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++) conv_store(to[i] + k * bytes, d->bf16, n, acc[i][j] + bias);
    }
}

/* Pixels i0 .. i0 + rows, channels k .. k + CONV_NR, f32. u: this panel. */
CPU_INLINE void tile(const direct *d, const block *b, int rows, int64_t i0, int64_t k, const float *u) {
    cpu_vec acc[CONV_MR][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) acc[i][0] = acc[i][1] = (cpu_vec){0};
    for (int64_t t = 0; t < b->n_taps; t++) {
        const char *const *row = b->row[t] + i0;
        const float *w = u + b->tap[t] * b->width * CONV_NR;
        const float *x[CONV_MR];
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) x[i] = (const float *)(const void *)row[i];
        for (int64_t c = 0; c < b->width; c++, w += CONV_NR) {
            cpu_vec a0 = *(const cpu_vec *)w, a1 = *(const cpu_vec *)(w + CPU_W);
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++) {
                float v = x[i][c];
                acc[i][0] += v * a0;
                acc[i][1] += v * a1;
            }
        }
    }
    finish(d, rows, b->to + i0, k, acc);
}

static void tiles(const direct *d, const block *b, int64_t k, const float *u) {
    int64_t i = 0;
    for (; i + CONV_MR <= b->n_pixels; i += CONV_MR) tile(d, b, CONV_MR, i, k, u);
    for (; i + 4 <= b->n_pixels; i += 4) tile(d, b, 4, i, k, u);
    for (; i < b->n_pixels; i++) tile(d, b, 1, i, k, u);
}

#if defined(__AVX512F__)
#include <immintrin.h>
#define WITH_BF16 __attribute__((target("avx512bf16")))

/* The same by pairs of bf16 channels. width is even. */
WITH_BF16 CPU_INLINE void pair_tile(const direct *d, const block *b, int rows, int64_t i0, int64_t k, const uint32_t *u) {
    __m512 acc[CONV_MR][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) acc[i][0] = acc[i][1] = _mm512_setzero_ps();
    for (int64_t t = 0; t < b->n_taps; t++) {
        const char *const *row = b->row[t] + i0;
        const uint32_t *w = u + b->tap[t] * b->width / 2 * CONV_NR;
        const uint32_t *x[CONV_MR];
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) x[i] = (const uint32_t *)(const void *)row[i];
        for (int64_t c = 0; c < b->width / 2; c++, w += CONV_NR) {
            __m512bh a0 = (__m512bh)_mm512_loadu_si512(w), a1 = (__m512bh)_mm512_loadu_si512(w + CPU_W);
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++) {
                uint32_t pair;
                memcpy(&pair, x[i] + c, 4);
                __m512bh v = (__m512bh)_mm512_set1_epi32((int)pair);
                acc[i][0] = _mm512_dpbf16_ps(acc[i][0], v, a0);
                acc[i][1] = _mm512_dpbf16_ps(acc[i][1], v, a1);
            }
        }
    }
    finish(d, rows, b->to + i0, k, (cpu_vec(*)[2])(void *)acc);
}

WITH_BF16 static void pair_tiles(const direct *d, const block *b, int64_t k, const uint32_t *u) {
    int64_t i = 0;
    for (; i + CONV_MR <= b->n_pixels; i += CONV_MR) pair_tile(d, b, CONV_MR, i, k, u);
    for (; i + 4 <= b->n_pixels; i += 4) pair_tile(d, b, 4, i, k, u);
    for (; i < b->n_pixels; i++) pair_tile(d, b, 1, i, k, u);
}
static bool has_pairs(void) { return __builtin_cpu_supports("avx512bf16"); }
#else
static bool has_pairs(void) { return false; }
static void pair_tiles(const direct *d, const block *b, int64_t k, const uint32_t *u) {
    (void)d, (void)b, (void)k, (void)u;
}
#endif

/* ---- blocks of pixels -------------------------------------------------------------------------------------------------- */

/* One class of result pixels: rows k_h, k_h + classes, ... and columns likewise. */
typedef struct class_of_pixels {
    int64_t kh, kw, rows, cols;
} class_of_pixels;

static class_of_pixels class_at(const direct *d, int64_t i) {
    class_of_pixels k = {i / d->w.classes, i % d->w.classes, 0, 0};
    k.rows = (d->h.out - k.kh + d->h.classes - 1) / d->h.classes;
    k.cols = (d->w.out - k.kw + d->w.classes - 1) / d->w.classes;
    return k;
}

/* The taps that pixels of a class read; of patches all. */
static void find_taps(const direct *d, const class_of_pixels *k, block *b) {
    b->n_taps = 0;
    b->width = d->C;
    for (int64_t r = 0; r < d->h.n; r++)
        for (int64_t s = 0; s < d->w.n; s++) {
            bool there = reaches(d, &d->h, k->kh, r) && reaches(d, &d->w, k->kw, s);
            if (!there && !d->patches) continue;
            b->tap[b->n_taps] = r * d->w.n + s;
            b->dh[b->n_taps] = there ? offset_of(d, &d->h, k->kh, r) : NOWHERE;
            b->dw[b->n_taps++] = offset_of(d, &d->w, k->kw, s);
        }
}

/* Pixels first .. first + n of a class: where they go and the rows that they read. */
static void look_up(const direct *d, const class_of_pixels *k, int64_t first, int64_t n, block *b) {
    int64_t bytes = d->bf16 ? 2 : 4, row_in = d->C * bytes, row_out = d->K * bytes;
    int64_t step_h = d->back ? 1 : d->h.stride, step_w = d->back ? 1 : d->w.stride;
    int64_t image = first / (k->rows * k->cols), y = first / k->cols % k->rows, x = first % k->cols;
    b->n_pixels = n;
    find_taps(d, k, b);
    for (int64_t i = 0; i < n; i++) {
        int64_t h = k->kh + y * d->h.classes, w = k->kw + x * d->w.classes;
        const char *plane = d->in + image * d->h.in * d->w.in * row_in;
        b->to[i] = d->out + ((image * d->h.out + h) * d->w.out + w) * row_out;
        for (int64_t t = 0; t < b->n_taps; t++) {
            int64_t sh = y * step_h + b->dh[t], sw = x * step_w + b->dw[t];
            bool inside = sh >= 0 && sh < d->h.in && sw >= 0 && sw < d->w.in;
            b->row[t][i] = inside ? plane + (sh * d->w.in + sw) * row_in : d->zeros;
        }
        if (++x < k->cols) continue;
        x = 0;
        if (++y < k->rows) continue;
        y = 0;
        image++;
    }
}

/* n bytes, in steps of 16 where the source has room for it: what lies beyond is overwritten by the next row. */
CPU_INLINE void copy_row(char *to, const char *from, int64_t n, const char *end) {
    if (from + conv_round_up(n, 16) > end) memcpy(to, from, (size_t)n);
    else
        for (int64_t i = 0; i < n; i += 16) memcpy(to + i, from + i, 16);
}

/* The rows of all taps of each pixel side by side in `patch`, in the dtype of the products. */
static void lay_patches(const direct *d, block *b, char *patch) {
    int64_t bytes = d->pairs ? 2 : 4, taps = b->n_taps, used = taps * d->C;
    const char *end = d->in + d->N * d->h.in * d->w.in * d->C * bytes; /* zeros lie elsewhere, and have room */
    for (int64_t i = 0; i < b->n_pixels; i++) {
        char *to = patch + i * d->depth * bytes;
        for (int64_t t = 0; t < taps; t++, to += d->C * bytes) {
            const char *from = b->row[t][i];
            if (d->bf16 && !d->pairs) conv_widen(from, d->C, (float *)(void *)to);
            else copy_row(to, from, d->C * bytes, from == d->zeros ? from + d->C * bytes + 16 : end);
        }
        if (used < d->depth) memset(to, 0, (size_t)((d->depth - used) * bytes));
        b->row[0][i] = patch + i * d->depth * bytes;
    }
    b->n_taps = 1;
    b->tap[0] = 0;
    b->width = d->depth;
}

static int64_t block_pixels(const direct *d) {
    enum { NEAR = 512 << 10 };
    int64_t n = d->patches ? NEAR / (d->depth * 4) / CONV_MR * CONV_MR : BLOCK;
    return n < CONV_MR ? CONV_MR : n > BLOCK ? BLOCK : n;
}

static int64_t blocks_of(const direct *d, int64_t class) {
    class_of_pixels k = class_at(d, class);
    int64_t n = block_pixels(d);
    return (d->N * k.rows * k.cols + n - 1) / n;
}

/* Blocks [lo, hi), counted through all classes. */
static void run_blocks(const void *ctx, int64_t lo, int64_t hi) {
    const direct *d = ctx;
    int64_t size = block_pixels(d);
    size_t bytes = sizeof(block) + (d->patches ? (size_t)(size * d->depth) * 4 + 64 : 0);
    block *b = ddp__scratch_take(bytes);
    if (!b) {
        *d->failed = true;
        return;
    }
    int64_t before = 0;
    for (int64_t c = 0; c < d->h.classes * d->w.classes; before += blocks_of(d, c++)) {
        class_of_pixels k = class_at(d, c);
        int64_t n = blocks_of(d, c), pixels = d->N * k.rows * k.cols;
        for (int64_t i = lo > before ? lo - before : 0; i < n && i + before < hi; i++) {
            look_up(d, &k, i * size, pixels - i * size < size ? pixels - i * size : size, b);
            if (d->patches) lay_patches(d, b, (char *)(b + 1));
            for (int64_t p = 0; p * CONV_NR < d->K; p++) {
                if (d->pairs) pair_tiles(d, b, p * CONV_NR, (const uint32_t *)d->u + p * d->depth / 2 * CONV_NR);
                else tiles(d, b, p * CONV_NR, (const float *)d->u + p * d->depth * CONV_NR);
            }
        }
    }
    ddp__scratch_give(b, bytes);
}

/* ---- weights ------------------------------------------------------------------------------------------------------------- */

typedef struct packing {
    const float *w; /* [K, C, taps] as in the op */
    int64_t lanes, others, taps; /* channels written and read by the pass */
    int64_t lane_step, other_step;
    int64_t depth;
    void *u;
    bool pairs;
    bool *failed;
} packing;

/* u[(tap * others + o)][0..CONV_NR) = the weights of lanes k .. k + CONV_NR, 0 beyond; others of 8 lanes side by side turned
 * in registers where `taps` or channels lie together in memory. */
static void pack_panel(const packing *p, int64_t k, float *u) {
    int64_t n = p->lanes - k < CONV_NR ? p->lanes - k : CONV_NR;
    float turned[8][8];
    if (n < CONV_NR) memset(u, 0, (size_t)(p->depth * CONV_NR) * sizeof *u);
    for (int64_t l = 0; l < n; l += 8) {
        bool eight = l + 8 <= n;
        const float *w = p->w + (k + l) * p->lane_step;
        int64_t run = p->other_step == p->taps ? p->others * p->taps : p->taps; /* floats that lie together for one lane */
        for (int64_t o = 0; o < p->others * p->taps / run; o++) {
            const float *from = w + o * p->other_step;
            int64_t m = 0;
            for (; eight && m + 8 <= run; m += 8) {
                cpu_transpose8(from + m, p->lane_step, turned[0], 8);
                for (int64_t j = 0; j < 8; j++)
                    memcpy(u + ((m + j) % p->taps * p->others + o + (m + j) / p->taps) * CONV_NR + l, turned[j], 32);
            }
            for (; m < run; m++)
                for (int64_t i = 0; i < 8 && l + i < n; i++)
                    u[(m % p->taps * p->others + o + m / p->taps) * CONV_NR + l + i] = from[m + i * p->lane_step];
        }
    }
}

/* Rows 2j and 2j + 1 of a panel as pairs of bf16 (what is in them is bf16 already). */
static void to_pairs(const float *panel, int64_t depth, uint32_t *u) {
    const uint32_t *bits = (const uint32_t *)(const void *)panel;
    for (int64_t j = 0; j < depth / 2; j++, bits += 2 * CONV_NR, u += CONV_NR)
        for (int i = 0; i < CONV_NR; i++) u[i] = (bits[i] >> 16) | (bits[CONV_NR + i] & 0xffff0000u);
}

static void pack_panels(const void *ctx, int64_t lo, int64_t hi) {
    const packing *p = ctx;
    size_t bytes = (size_t)(p->depth * CONV_NR) * sizeof(float);
    float *panel = p->pairs ? ddp__scratch_take(bytes) : NULL;
    if (p->pairs && !panel) {
        *p->failed = true;
        return;
    }
    int64_t used = p->others * p->taps;
    for (int64_t i = lo; i < hi; i++) {
        float *to = panel ? panel : (float *)p->u + i * p->depth * CONV_NR;
        pack_panel(p, i * CONV_NR, to);
        if (used < p->depth) memset(to + used * CONV_NR, 0, (size_t)((p->depth - used) * CONV_NR) * sizeof *to);
        if (panel) to_pairs(panel, p->depth, (uint32_t *)p->u + i * p->depth / 2 * CONV_NR);
    }
    if (panel) ddp__scratch_give(panel, bytes);
}

/* ---- kernel -------------------------------------------------------------------------------------------------------------- */

const char *conv_direct_reject(const ddp_call *c) {
    conv_shape s = conv_shape_of(c);
    const char *why = conv_reject_common(&s);
    if (why) return why;
#if !defined(__AVX2__)
    return "needs AVX2";
#endif
    if (s.groups != 1) return "groups";
    if (s.R * s.S > MAX_TAPS) return "a window of more than 128 taps";
    return NULL;
}

static direct direct_of(const conv_shape *s) {
    bool back = s->pass == CONV_GRAD_INPUT;
    direct d = {.back = back,
                .h = {back ? s->H : s->Ho, back ? s->Ho : s->H, s->R, s->stride[0], s->padding[0], s->dilation[0], 1},
                .w = {back ? s->W : s->Wo, back ? s->Wo : s->W, s->S, s->stride[1], s->padding[1], s->dilation[1], 1},
                .in = ddp__ptr(back ? s->y : s->x),
                .out = ddp__ptr(back ? s->x : s->y),
                .N = s->N,
                .C = back ? s->K : s->C,
                .K = back ? s->C : s->K,
                .bias = s->bias ? ddp__ptr(s->bias) : NULL,
                .bf16 = s->bf16,
                .pairs = s->bf16 && has_pairs()};
    if (back) {
        d.h.classes = d.h.stride;
        d.w.classes = d.w.stride;
    }
    d.patches = (d.C < FEW_CHANNELS && s->R * s->S > 1) || (d.bf16 && !d.pairs) || (d.pairs && d.C % 2);
    d.depth = s->R * s->S * d.C;
    if (d.pairs) d.depth = conv_round_up(d.depth, 2);
    return d;
}

int conv_direct_run(const ddp_call *c) {
    conv_shape s = conv_shape_of(c);
    direct d = direct_of(&s);
    bool failed = false;
    int64_t panels = (d.K + CONV_NR - 1) / CONV_NR, u = panels * d.depth * CONV_NR / (d.pairs ? 2 : 1);
    int64_t wide = s.bf16 ? s.w->numel : 0, zeros = d.C + CPU_W, blocks = 0;
    size_t bytes = (size_t)(u + wide + zeros) * sizeof(float);
    float *scratch = ddp__scratch_take(bytes);
    if (!scratch) return ddp__pending();
    memset(scratch + u + wide, 0, (size_t)zeros * sizeof(float));
    d.u = scratch;
    d.zeros = (const char *)(scratch + u + wide);
    d.failed = &failed;
    if (wide) conv_widen(ddp__ptr(s.w), wide, scratch + u);
    int64_t taps = s.R * s.S;
    packing p = {wide ? scratch + u : cpu_f32(s.w), d.K, d.C, taps, d.back ? taps : s.C * taps,
                 d.back ? s.C * taps : taps, d.depth, d.u, d.pairs, &failed};
    cpu_share(panels, u, pack_panels, &p);
    for (int64_t i = 0; i < d.h.classes * d.w.classes; i++) blocks += blocks_of(&d, i);
    cpu_share(blocks, conv_work(&s), run_blocks, &d);
    ddp__scratch_give(scratch, bytes);
    return failed ? ddp__op_fail(c, DDP_ENOMEM, "out of memory") : 0;
}
