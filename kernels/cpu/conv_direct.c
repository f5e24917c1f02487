/* conv_direct.c -- convolutions of any window, stride, padding and dilation as products over gathered rows: forward and the
 * gradient of x. For each pixel of the result and each tap there is a pointer to the row of channels that is read, or to
 * zeros; the products are tiles.h's. Nothing is copied, but where channels are few (or odd, in bf16), and for AMX: there a
 * pixel's rows of all taps are laid side by side first.
 *
 * The gradient of x reads g where h + padding - r * dilation is a multiple of the stride: pixels go by their remainder
 * modulo the stride (a class), each with the taps that reach it, so that no product with an inserted zero is made.
 *
 * 16-bit rows are widened first, but for bf16 where the processor multiplies pairs of it; f32 "high" is split (tiles.h). */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=fast")
#endif
#include "tiles.h"

enum { FEW_CHANNELS = 16 };

/* The walk from result pixels to source pixels, along one dim. */
typedef struct along {
    int64_t out, in; /* sizes of the result and the source */
    int64_t n;       /* taps */
    int64_t stride, padding, dilation;
    int64_t classes; /* 1; for the gradient of x the stride, or one a position where that is fewer */
} along;

typedef struct direct {
    bool back; /* the gradient of x */
    along h, w;
    const char *in;
    char *out;
    int64_t N, C, K;    /* channels read and written */
    tile_panels panels; /* depth: taps * C, rounded up to even for pairs */
    const char *zeros;
    ddp_dtype dt;
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

/* The rows of one block, and the taps' offsets; NOWHERE where a patch has a gap. */
enum { NOWHERE = INT32_MIN };
typedef struct block {
    tile_rows rows;
    int64_t dh[TILES_TAPS], dw[TILES_TAPS];
} block;

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
    b->rows.n_taps = 0;
    b->rows.width = d->C;
    for (int64_t r = 0; r < d->h.n; r++)
        for (int64_t s = 0; s < d->w.n; s++) {
            bool there = reaches(d, &d->h, k->kh, r) && reaches(d, &d->w, k->kw, s);
            if (!there && !d->patches) continue;
            b->rows.tap[b->rows.n_taps] = r * d->w.n + s;
            b->dh[b->rows.n_taps] = there ? offset_of(d, &d->h, k->kh, r) : NOWHERE;
            b->dw[b->rows.n_taps++] = offset_of(d, &d->w, k->kw, s);
        }
}

/* Pixels first .. first + n of a class: where they go and the rows that they read. */
static void look_up(const direct *d, const class_of_pixels *k, int64_t first, int64_t n, block *b) {
    int64_t bytes = ddp__dtype_bytes[d->dt], row_in = d->C * bytes, row_out = d->K * bytes;
    int64_t step_h = d->back ? 1 : d->h.stride, step_w = d->back ? 1 : d->w.stride;
    int64_t image = first / (k->rows * k->cols), y = first / k->cols % k->rows, x = first % k->cols;
    b->rows.n = n;
    find_taps(d, k, b);
    int64_t pixels = k->rows * k->cols, source = d->h.in * d->w.in * row_in; /* of an image */
    int64_t from = (first + n) * source / pixels, to = (first + 2 * n) * source / pixels, end = d->N * source;
    b->rows.next = d->in + from;
    b->rows.next_bytes = (to < end ? to : end) - (from < end ? from : end);
    for (int64_t i = 0; i < n; i++) {
        int64_t h = k->kh + y * d->h.classes, w = k->kw + x * d->w.classes;
        const char *plane = d->in + image * d->h.in * d->w.in * row_in;
        b->rows.to[i] = d->out + ((image * d->h.out + h) * d->w.out + w) * row_out;
        for (int64_t t = 0; t < b->rows.n_taps; t++) {
            int64_t sh = y * step_h + b->dh[t], sw = x * step_w + b->dw[t];
            bool inside = sh >= 0 && sh < d->h.in && sw >= 0 && sw < d->w.in;
            b->rows.row[t][i] = inside ? plane + (sh * d->w.in + sw) * row_in : d->zeros;
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

/* How many taps from t on read rows that lie together: a line of the window, away from borders. */
CPU_INLINE int64_t neighbours(const direct *d, const block *b, int64_t t, int64_t i) {
    int64_t n = d->w.n, row = d->C * ddp__dtype_bytes[d->dt];
    if (t % n || n == 1) return 1;
    for (int64_t k = 1; k < n; k++)
        if (b->rows.row[t + k][i] != b->rows.row[t][i] + k * row) return 1;
    return n;
}

/* The rows as one tap, `step` bytes apart. */
static void one_tap(const direct *d, block *b, const char *patch, int64_t step) {
    for (int64_t i = 0; i < b->rows.n; i++) b->rows.row[0][i] = patch + i * step;
    b->rows.n_taps = 1;
    b->rows.tap[0] = 0;
    b->rows.width = d->panels.depth;
    b->rows.row_step = step;
}

/* lay_patches of f32 in two parts: `depth` his, then as many los, a pixel. */
static void lay_split(const direct *d, block *b, uint16_t *patch) {
    int64_t depth = d->panels.depth, taps = b->rows.n_taps, rest = depth - taps * d->C;
    for (int64_t i = 0; i < b->rows.n; i++) {
        uint16_t *hi = patch + 2 * i * depth, *lo = hi + depth;
        for (int64_t t = 0, run; t < taps; t += run, hi += run * d->C, lo += run * d->C) {
            run = neighbours(d, b, t, i);
            cpu_split_line((const float *)(const void *)b->rows.row[t][i], run * d->C, hi, lo);
        }
        memset(hi, 0, (size_t)rest * sizeof *hi);
        memset(lo, 0, (size_t)rest * sizeof *lo);
    }
    one_tap(d, b, (const char *)patch, depth * 4);
}

/* The rows of all taps of each pixel side by side in `patch`, in the dtype of the products. */
static void lay_patches(const direct *d, block *b, char *patch) {
    if (d->panels.split) return lay_split(d, b, (uint16_t *)(void *)patch);
    int64_t bytes = d->panels.pairs ? 2 : 4, taps = b->rows.n_taps, used = taps * d->C;
    const char *end = d->in + d->N * d->h.in * d->w.in * d->C * bytes; /* zeros lie elsewhere, and have room */
    for (int64_t i = 0; i < b->rows.n; i++) {
        char *to = patch + i * d->panels.depth * bytes;
        for (int64_t t = 0, run; t < taps; t += run, to += run * d->C * bytes) {
            const char *from = b->rows.row[t][i];
            run = neighbours(d, b, t, i);
            if (d->dt != DDP_F32 && !d->panels.pairs) cpu_widen(d->dt, from, 0, (float *)(void *)to, run * d->C);
            else copy_row(to, from, run * d->C * bytes, from == d->zeros ? from + d->C * bytes + 16 : end);
        }
        if (used < d->panels.depth) memset(to, 0, (size_t)((d->panels.depth - used) * bytes));
    }
    one_tap(d, b, patch, d->panels.depth * bytes);
}

static int64_t block_pixels(const direct *d) {
    enum { NEAR = 512 << 10 };
    int64_t unit = d->panels.amx ? 32 : CONV_MR, row = d->panels.depth * (d->dt != DDP_F32 && d->panels.pairs ? 2 : 4);
    int64_t n = d->patches ? NEAR / row / unit * unit : TILES_ROWS;
    return n < unit ? unit : n > TILES_ROWS ? TILES_ROWS : n;
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
    size_t bytes = sizeof(block) + (d->patches ? (size_t)(conv_round_up(size, 32) * d->panels.depth) * 4 + 64 : 0);
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
            for (int64_t p = 0; p * CONV_NR < d->K; p++) cpu_tiles(&d->panels, &b->rows, p);
        }
    }
    ddp__scratch_give(b, bytes);
}

/* ---- weights ------------------------------------------------------------------------------------------------------------- */

typedef struct packing {
    const float *w;              /* [K, C, taps] as in the op */
    int64_t lanes, others, taps; /* channels written and read by the pass */
    int64_t lane_step, other_step;
    int64_t depth;
    void *u;
    bool pairs, split;
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
        int64_t run =
            p->other_step == p->taps ? p->others * p->taps : p->taps; /* floats that lie together for one lane */
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
        int64_t words = p->depth / 2 * CONV_NR;
        uint32_t *u = (uint32_t *)p->u + i * words * (p->split ? 2 : 1);
        if (panel) cpu_pair_rows(panel, p->depth, u, p->split ? u + words : NULL);
    }
    if (panel) ddp__scratch_give(panel, bytes);
}

/* ---- kernel -------------------------------------------------------------------------------------------------------------- */

const char *conv_direct_reject(const ddp_call *c) {
    conv_shape s = conv_shape_of(c);
    const char *why = conv_reject_wide(&s);
    if (why) return why;
    return s.R * s.S > TILES_TAPS ? "a window of more than 128 taps" : NULL;
}

static direct direct_of(const conv_shape *s, bool amx) {
    bool back = s->pass == CONV_GRAD_INPUT;
    direct d = {.back = back,
                .h = {back ? s->H : s->Ho, back ? s->Ho : s->H, s->R, s->stride[0], s->padding[0], s->dilation[0], 1},
                .w = {back ? s->W : s->Wo, back ? s->Wo : s->W, s->S, s->stride[1], s->padding[1], s->dilation[1], 1},
                .in = ddp__ptr(back ? s->y : s->x),
                .out = ddp__ptr(back ? s->x : s->y),
                .N = s->N,
                .C = back ? s->K : s->C,
                .K = back ? s->C : s->K,
                .dt = s->dt};
    d.panels.columns = d.K;
    d.panels.bias = s->bias ? ddp__ptr(s->bias) : NULL;
    d.panels.dt = d.dt;
    d.panels.more = s->more;
    d.panels.split = amx && d.dt == DDP_F32;
    d.panels.pairs = d.panels.split || (d.dt == DDP_BF16 && cpu_has_pairs());
    if (back) {
        d.h.classes = d.h.stride < d.h.out ? d.h.stride : d.h.out;
        d.w.classes = d.w.stride < d.w.out ? d.w.stride : d.w.out;
    }
    d.patches =
        (d.C < FEW_CHANNELS && s->R * s->S > 1) || (d.dt != DDP_F32 && !d.panels.pairs) || (d.panels.pairs && d.C % 2);
    d.panels.depth = s->R * s->S * d.C;
    if (d.panels.pairs) d.panels.depth = conv_round_up(d.panels.depth, amx ? 32 : 2);
    d.panels.amx = amx;
    d.patches |= amx;
    return d;
}

static int run_as(const ddp_call *c, const conv_shape *s, bool amx) {
    direct d = direct_of(s, amx);
    bool failed = false;
    int64_t panels = (d.K + CONV_NR - 1) / CONV_NR, u = panels * d.panels.depth * CONV_NR;
    if (d.panels.pairs && !d.panels.split) u /= 2; /* words */
    int64_t wide = s->dt != DDP_F32 ? s->w->numel : 0, zeros = d.C + CPU_W, blocks = 0;
    ddp_packed *kept = conv_packed(s,
                                   amx              ? CONV_PACK_AMX
                                   : d.panels.pairs ? CONV_PACK_PAIRS
                                                    : CONV_PACK_DIRECT,
                                   (size_t)u * sizeof(float));
    size_t bytes = (size_t)(u + wide + zeros) * sizeof(float);
    float *scratch = ddp__scratch_take(bytes);
    if (!scratch) {
        ddp__packed_give(kept, false);
        return ddp__pending();
    }
    memset(scratch + u + wide, 0, (size_t)zeros * sizeof(float));
    d.panels.u = kept ? kept->bytes : scratch;
    d.zeros = (const char *)(scratch + u + wide);
    d.failed = &failed;
    if (wide && !(kept && kept->ready)) cpu_widen(s->dt, ddp__ptr(s->w), 0, scratch + u, wide);
    int64_t taps = s->R * s->S;
    packing p = {wide ? scratch + u : cpu_f32(s->w),
                 d.K,
                 d.C,
                 taps,
                 d.back ? taps : s->C * taps,
                 d.back ? s->C * taps : taps,
                 d.panels.depth,
                 d.panels.u,
                 d.panels.pairs,
                 d.panels.split,
                 &failed};
    if (!kept || !kept->ready) cpu_share(panels, u, pack_panels, &p);
    bool packed = !failed;
    for (int64_t i = 0; i < d.h.classes * d.w.classes; i++) blocks += blocks_of(&d, i);
    cpu_share(blocks, conv_work(s), run_blocks, &d);
    ddp__scratch_give(scratch, bytes);
    ddp__packed_give(kept, packed);
    return failed ? ddp__op_fail(c, DDP_ENOMEM, "out of memory") : 0;
}

int conv_direct_run(const ddp_call *c, const conv_shape *s) { return run_as(c, s, false); }

const char *conv_amx_reject(const ddp_call *c) {
    const char *why = cpu_amx_reject(c->in[0]->m.dtype);
    return why ? why : conv_direct_reject(c);
}

int conv_amx_run(const ddp_call *c, const conv_shape *s) { return run_as(c, s, true); }
