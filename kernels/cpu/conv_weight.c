/* conv_weight.c -- the gradient of w for any window, stride, padding and dilation: dw[k][c][tap] is the sum over pixels of
 * y's gradient times the row of x under that tap. Images go in blocks. A block of x is laid out by groups of channels
 * [C/ROWS][image][H][W][ROWS], one of g by panels [K/CONV_NR][image][Ho][Wo][CONV_NR], so that a register tile of
 * ROWS x CONV_NR weights walks along rows of pixels with both operands side by side. Few channels: a pixel's rows of all
 * taps are laid side by side first, and count as the channels of a 1x1 window.
 *
 * f32 of whole groups and panels is read where it lies instead, from L2: the next block is fetched there meanwhile.
 *
 * bf16: two images share a word (image n in the low half, n + 1 in the high one), so that AVX512_BF16 multiplies pairs of
 * pixels whatever the shift of the tap; without it, and in f16, both are widened. Sums are f32. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=fast")
#endif
#include "tiles.h"

#if defined(__AVX512F__)
enum { ROWS = 8 };
#else
enum { ROWS = 4 };
#endif
enum { FEW_CHANNELS = 8 };

typedef struct grad {
    conv_shape s;
    int64_t H, W, C, R, S, stride[2], padding[2], dilation[2]; /* as the products see them: of patches, 1x1 */
    int64_t step[2], shift[2]; /* row h laid out is row h * step - shift of x: 1x1 windows skip what they do not see */
    bool patches, pairs, in_place; /* in_place: x and g are read where they lie */
    int64_t groups, panels;        /* of ROWS channels, of CONV_NR */
    int64_t images;                /* words a block: images, or pairs of them */
    int64_t first, n;              /* this block */
    uint32_t *x;                   /* [groups][images][H][W][ROWS], or [images][H][W][C] in place */
    uint32_t *g;                   /* [panels][images][Ho][Wo][CONV_NR], or [images][Ho][Wo][K] */
    int64_t x_group, x_pixel;      /* words from one group to the next, and from one pixel */
    int64_t g_panel, g_pixel;      /* likewise panels */
    float *sum;                    /* [panels][taps][groups * ROWS][CONV_NR] */
} grad;

/* ---- laying out ------------------------------------------------------------------------------------------------------ */

/* n values of the two rows as the products want them: floats of a, or bf16 of a and b in one word. b NULL: zeros. */
CPU_INLINE void put(const grad *q, const char *a, const char *b, int64_t n, uint32_t *to) {
    const uint16_t *lo = (const uint16_t *)(const void *)a, *hi = (const uint16_t *)(const void *)b;
    if (q->s.dt == DDP_F32) memcpy(to, a, (size_t)n * 4);
    else if (!q->pairs) cpu_widen(q->s.dt, a, 0, (float *)(void *)to, n);
    else if (hi)
        for (int64_t i = 0; i < n; i++) to[i] = lo[i] | (uint32_t)hi[i] << 16;
    else
        for (int64_t i = 0; i < n; i++) to[i] = lo[i];
}

/* The image(s) of word i of this block in a tensor of `size` elements an image; *second NULL where there is none. */
static const char *image_of(const grad *q, const ddp_tensor *t, int64_t size, int64_t i, const char **second) {
    int64_t bytes = ddp__dtype_bytes[q->s.dt], n = (q->first + i) * (q->pairs ? 2 : 1);
    const char *p = ddp__ptr(t) + n * size * bytes;
    *second = q->pairs && n + 1 < q->s.N ? p + size * bytes : NULL;
    return p;
}

/* Row h of image i of x. */
static void lay_x_row(const grad *q, int64_t i, int64_t h) {
    const char *second, *p = image_of(q, q->s.x, q->s.H * q->s.W * q->s.C, i, &second);
    int64_t pixel = q->C * ddp__dtype_bytes[q->s.dt], group_bytes = ROWS * ddp__dtype_bytes[q->s.dt];
    int64_t sh = h * q->step[0] - q->shift[0];
    uint32_t *to = q->x + (i * q->H + h) * q->W * ROWS;
    for (int64_t w = 0; w < q->W; w++, to += ROWS) {
        int64_t sw = w * q->step[1] - q->shift[1], group = 0, at = (sh * q->s.W + sw) * pixel;
        if (sh < 0 || sh >= q->s.H || sw < 0 || sw >= q->s.W) {
            for (; group < q->groups; group++) memset(to + group * q->x_group, 0, ROWS * 4);
            continue;
        }
        for (; (group + 1) * ROWS <= q->C; group++, at += group_bytes)
            put(q, p + at, second ? second + at : NULL, ROWS, to + group * q->x_group);
        if (group == q->groups) continue;
        memset(to + group * q->x_group, 0, ROWS * 4);
        put(q, p + at, second ? second + at : NULL, q->C - group * ROWS, to + group * q->x_group);
    }
}

/* Row h of image i of patches: for pixel (h, w) of y the rows of x under all taps, side by side. */
static void lay_patch_row(const grad *q, int64_t i, int64_t h) {
    const conv_shape *s = &q->s;
    const char *second, *p = image_of(q, s->x, s->H * s->W * s->C, i, &second);
    int64_t bytes = ddp__dtype_bytes[s->dt];
    uint32_t *to = q->x + (i * q->H + h) * q->W * ROWS;
    for (int64_t w = 0; w < q->W; w++, to += ROWS) {
        uint32_t line[FEW_CHANNELS * TILES_TAPS + ROWS];
        memset(line, 0, (size_t)(q->groups * ROWS) * 4);
        for (int64_t r = 0; r < s->R; r++) {
            int64_t sh = h * s->stride[0] - s->padding[0] + r * s->dilation[0];
            if (sh < 0 || sh >= s->H) continue;
            for (int64_t t = 0; t < s->S; t++) {
                int64_t sw = w * s->stride[1] - s->padding[1] + t * s->dilation[1];
                if (sw < 0 || sw >= s->W) continue;
                int64_t at = (sh * s->W + sw) * s->C * bytes;
                put(q, p + at, second ? second + at : NULL, s->C, line + (r * s->S + t) * s->C);
            }
        }
        for (int64_t k = 0; k < q->groups; k++) memcpy(to + k * q->x_group, line + k * ROWS, ROWS * 4);
    }
}

/* Rows [lo, hi) of all images of the block. */
static void lay_x(const void *ctx, int64_t lo, int64_t hi) {
    const grad *q = ctx;
    for (int64_t i = lo; i < hi; i++) {
        if (q->patches) lay_patch_row(q, i / q->H, i % q->H);
        else lay_x_row(q, i / q->H, i % q->H);
    }
}

/* Rows [lo, hi) of all images of the block: pixel by pixel, as they lie in memory. */
static void lay_g(const void *ctx, int64_t lo, int64_t hi) {
    const grad *q = ctx;
    int64_t K = q->s.K, bytes = ddp__dtype_bytes[q->s.dt], whole = K / CONV_NR;
    for (int64_t row = lo; row < hi; row++) {
        int64_t i = row / q->s.Ho, h = row % q->s.Ho;
        const char *second, *p = image_of(q, q->s.y, q->s.Ho * q->s.Wo * K, i, &second);
        for (int64_t w = h * q->s.Wo; w < (h + 1) * q->s.Wo; w++) {
            uint32_t *to = q->g + (i * q->s.Ho * q->s.Wo + w) * CONV_NR;
            int64_t at = w * K * bytes;
            for (int64_t k = 0; k < whole; k++, at += CONV_NR * bytes, to += q->g_panel)
                put(q, p + at, second ? second + at : NULL, CONV_NR, to);
            if (whole == q->panels) continue;
            memset(to, 0, CONV_NR * 4);
            put(q, p + at, second ? second + at : NULL, K % CONV_NR, to);
        }
    }
}

/* ---- products ---------------------------------------------------------------------------------------------------------- */

/* The rows of y that tap (r, t) reaches, and of each the columns [w0, w1). */
typedef struct reach {
    int64_t h0, h1, w0, w1;
} reach;

static int64_t ceil_div(int64_t a, int64_t b) { return a <= 0 ? 0 : (a + b - 1) / b; }

static reach reach_of(const grad *q, int64_t r, int64_t t) {
    int64_t dh = r * q->dilation[0] - q->padding[0], dw = t * q->dilation[1] - q->padding[1];
    reach e = {ceil_div(-dh, q->stride[0]), ceil_div(q->H - dh, q->stride[0]), ceil_div(-dw, q->stride[1]),
               ceil_div(q->W - dw, q->stride[1])};
    if (e.h1 > q->s.Ho) e.h1 = q->s.Ho;
    if (e.w1 > q->s.Wo) e.w1 = q->s.Wo;
    return e;
}

/* Where the walk of a tap begins in x and g, and its steps, in words. */
typedef struct walk {
    const uint32_t *x, *g;
    int64_t images, rows, cols;
    int64_t x_image, x_row, x_col, g_image, g_row, g_col;
} walk;

static walk walk_of(const grad *q, int64_t panel, int64_t group, int64_t tap) {
    int64_t r = tap / q->S, t = tap % q->S;
    reach e = reach_of(q, r, t);
    int64_t h = e.h0 * q->stride[0] - q->padding[0] + r * q->dilation[0];
    int64_t w = e.w0 * q->stride[1] - q->padding[1] + t * q->dilation[1];
    walk k = {.images = q->n,
              .rows = e.h1 - e.h0,
              .cols = e.w1 - e.w0,
              .x_image = q->H * q->W * q->x_pixel,
              .x_row = q->stride[0] * q->W * q->x_pixel,
              .x_col = q->stride[1] * q->x_pixel,
              .g_image = q->s.Ho * q->s.Wo * q->g_pixel,
              .g_row = q->s.Wo * q->g_pixel,
              .g_col = q->g_pixel};
    if (k.rows <= 0 || k.cols <= 0) return (walk){0};
    k.x = q->x + group * q->x_group + (h * q->W + w) * q->x_pixel;
    k.g = q->g + panel * q->g_panel + (e.h0 * q->s.Wo + e.w0) * q->g_pixel;
    return k;
}

/* sum[ROWS][CONV_NR] += over the walk, which is added up by itself: long sums lose fewer digits in parts. */
static void accumulate(const walk *k, float *sum) {
    cpu_vec acc[ROWS][2];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < 2; j++) acc[i][j] = (cpu_vec){0};
    for (int64_t n = 0; n < k->images; n++)
        for (int64_t h = 0; h < k->rows; h++) {
            const float *x = (const float *)(const void *)(k->x + n * k->x_image + h * k->x_row);
            const float *g = (const float *)(const void *)(k->g + n * k->g_image + h * k->g_row);
            for (int64_t w = 0; w < k->cols; w++, x += k->x_col, g += k->g_col) {
                cpu_vec a = *(const cpu_vec *)g, b = *(const cpu_vec *)(g + CPU_W);
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; i++) {
                    acc[i][0] += x[i] * a;
                    acc[i][1] += x[i] * b;
                }
            }
        }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < 2; j++) *(cpu_vec *)(sum + i * CONV_NR + j * CPU_W) += acc[i][j];
}

#if defined(__AVX512F__)
#include <immintrin.h>
/* The same, each word a pair of bf16. */
__attribute__((target("avx512bf16"))) static void accumulate_pairs(const walk *k, float *sum) {
    __m512 acc[ROWS][2];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < 2; j++) acc[i][j] = _mm512_setzero_ps();
    for (int64_t n = 0; n < k->images; n++)
        for (int64_t h = 0; h < k->rows; h++) {
            const uint32_t *x = k->x + n * k->x_image + h * k->x_row, *g = k->g + n * k->g_image + h * k->g_row;
            for (int64_t w = 0; w < k->cols; w++, x += k->x_col, g += k->g_col) {
                __m512bh a = (__m512bh)_mm512_loadu_si512(g), b = (__m512bh)_mm512_loadu_si512(g + CPU_W);
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; i++) {
                    __m512bh v = (__m512bh)_mm512_set1_epi32((int)x[i]);
                    acc[i][0] = _mm512_dpbf16_ps(acc[i][0], v, a);
                    acc[i][1] = _mm512_dpbf16_ps(acc[i][1], v, b);
                }
            }
        }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < 2; j++) {
            float *to = sum + i * CONV_NR + j * CPU_W;
            _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), acc[i][j]));
        }
}
#else
static void accumulate_pairs(const walk *k, float *sum) { (void)k, (void)sum; }
#endif

/* Part i of n of the block after this one: q->images images of `image` words from p on, of which `left` are there. */
static void fetch_part(const uint32_t *p, int64_t image, int64_t images, int64_t left, int64_t i, int64_t n) {
    int64_t words = (left < images ? left : images) * image;
    for (int64_t w = words * i / n & ~15; w < words * (i + 1) / n; w += 16) __builtin_prefetch(p + w, 0, 2);
}

/* Items [lo, hi): panel by panel, tap by tap. */
static void products(const void *ctx, int64_t lo, int64_t hi) {
    const grad *q = ctx;
    int64_t taps = q->R * q->S, parts = q->panels * taps * q->groups, left = q->s.N - q->first - q->n;
    int64_t x = q->H * q->W * q->x_pixel, g = q->s.Ho * q->s.Wo * q->g_pixel;
    for (int64_t i = lo; i < hi; i++)
        for (int64_t group = 0; group < q->groups; group++) {
            walk k = walk_of(q, i / taps, group, i % taps);
            if (q->in_place && left > 0) {
                fetch_part(q->x + q->n * x, x, q->images, left, i * q->groups + group, parts);
                fetch_part(q->g + q->n * g, g, q->images, left, i * q->groups + group, parts);
            }
            float *sum = q->sum + (i * q->groups + group) * ROWS * CONV_NR;
            if (q->pairs) accumulate_pairs(&k, sum);
            else accumulate(&k, sum);
        }
}

/* ---- the result ---------------------------------------------------------------------------------------------------------- */

/* dw[k .. k + lanes][place .. place + n) from n rows of sum, `step` floats apart. */
static void put_rows(const grad *q, int64_t k, int64_t lanes, int64_t place, const float *sum, int64_t step,
                     int64_t n) {
    int64_t row = q->s.C * q->s.R * q->s.S, m = 0;
    void *dw = ddp__ptr(q->s.w);
    float turned[8][8];
    for (; lanes == 8 && m + 8 <= n; m += 8) {
        cpu_transpose8(sum + m * step, step, turned[0], 8);
        for (int64_t i = 0; i < 8; i++) {
            int64_t at = (k + i) * row + place + m;
            if (q->s.dt == DDP_F32) memcpy((float *)dw + at, turned[i], sizeof turned[i]);
            else cpu_narrow(q->s.dt, turned[i], dw, at, 8);
        }
    }
    for (; m < n; m++)
        for (int64_t i = 0; i < lanes; i++) cpu_put(q->s.dt, dw, (k + i) * row + place + m, sum[m * step + i]);
}

/* dw[k][..] of panels [lo, hi). One tap: channels follow each other in sum and in dw; else taps do, for each channel. Of
 * patches a row of sum is (tap, channel). */
static void finish(const void *ctx, int64_t lo, int64_t hi) {
    const grad *q = ctx;
    int64_t C = q->s.C, taps = q->s.R * q->s.S, rows = q->groups * ROWS;
    for (int64_t k = lo * CONV_NR; k < hi * CONV_NR && k < q->s.K; k += 8) {
        const float *sum = q->sum + k / CONV_NR * q->R * q->S * rows * CONV_NR + k % CONV_NR;
        int64_t lanes = q->s.K - k < 8 ? q->s.K - k : 8, tap_step = q->patches ? C : rows;
        if (taps == 1) put_rows(q, k, lanes, 0, sum, CONV_NR, C);
        else
            for (int64_t c = 0; c < C; c++)
                put_rows(q, k, lanes, c * taps, sum + c * CONV_NR, tap_step * CONV_NR, taps);
    }
}

/* A 1x1 window that sees every pixel does not care where an image ends: bands of rows stay nearer. */
static void cut_into_bands(conv_shape *s) {
    enum { PIXELS = 256 };
    for (int i = 0; i < 2; i++)
        if (s->stride[i] != 1 || s->padding[i] != 0) return;
    int64_t rows = s->H;
    while (rows * s->W > PIXELS && rows % 2 == 0) rows /= 2;
    s->N *= s->H / rows;
    s->H = s->Ho = rows;
}

static grad grad_of(const ddp_call *c) {
    conv_shape s = conv_shape_of(c);
    if (s.R == 1 && s.S == 1) cut_into_bands(&s);
    grad q = {.s = s, .H = s.H, .W = s.W, .C = s.C, .R = s.R, .S = s.S};
    bool one = s.R == 1 && s.S == 1;
    q.patches = s.C < FEW_CHANNELS && !one;
    int64_t most = s.C > s.K ? s.C : s.K; /* pixels further apart share the sets of a cache */
    q.in_place = s.dt == DDP_F32 && s.C % ROWS == 0 && s.K % CONV_NR == 0 && most <= (one ? 512 : 128);
    bool gathered = q.patches || (one && !q.in_place); /* what is laid out is what the products see */
    for (int i = 0; i < 2; i++) {
        q.step[i] = one ? s.stride[i] : 1;
        q.shift[i] = one ? s.padding[i] : 0;
        q.stride[i] = gathered ? 1 : s.stride[i];
        q.padding[i] = gathered ? 0 : s.padding[i];
        q.dilation[i] = gathered ? 1 : s.dilation[i];
    }
    if (gathered) {
        q.H = s.Ho;
        q.W = s.Wo;
        q.C = s.C * s.R * s.S;
        q.R = q.S = 1;
    }
    q.pairs = s.dt == DDP_BF16 && cpu_has_pairs();
    q.groups = (q.C + ROWS - 1) / ROWS;
    q.panels = (s.K + CONV_NR - 1) / CONV_NR;
    q.x_pixel = q.in_place ? s.C : ROWS;
    q.g_pixel = q.in_place ? s.K : CONV_NR;
    return q;
}

/* The block that begins at q->first: laid out, or found. */
static void find_block(grad *q, int64_t x, int64_t g) {
    if (q->in_place) {
        q->x = (uint32_t *)(void *)ddp__ptr(q->s.x) + q->first * x;
        q->g = (uint32_t *)(void *)ddp__ptr(q->s.y) + q->first * g;
        return;
    }
    cpu_share(q->n * q->H, q->n * (x + g), lay_x, q);
    cpu_share(q->n * q->s.Ho, q->n * (x + g), lay_g, q);
}

int conv_weight_run(const ddp_call *c) {
    enum { NEAR = 1 << 20, NEAR_IN_PLACE = 384 << 10 }; /* in place, the next block is in L2 too */
    grad q = grad_of(c);
    int64_t words = q.pairs ? (q.s.N + 1) / 2 : q.s.N;
    int64_t x = q.groups * q.H * q.W * ROWS, g = q.panels * q.s.Ho * q.s.Wo * CONV_NR;
    q.images = (q.in_place ? NEAR_IN_PLACE : NEAR) / ((x + g) * 4);
    if (q.images < 1) q.images = 1;
    int64_t pixels = q.s.Ho * q.s.Wo; /* 256 of them: a panel of g fills half of L1 */
    if (q.images * pixels < 256) q.images = (256 + pixels - 1) / pixels;
    if (q.images > words) q.images = words;
    /* A line more than the group holds, against conflicts. */
    q.x_group = q.in_place ? ROWS : q.images * q.H * q.W * ROWS + 16;
    q.g_panel = q.in_place ? CONV_NR : q.images * q.s.Ho * q.s.Wo * CONV_NR;
    int64_t sums = q.panels * q.R * q.S * q.groups * ROWS * CONV_NR;
    int64_t laid = q.in_place ? 0 : q.groups * q.x_group + q.images * g;
    size_t bytes = (size_t)(sums + laid) * 4;
    q.sum = ddp__scratch_take(bytes);
    if (!q.sum) return ddp__pending();
    q.x = (uint32_t *)(void *)(q.sum + sums);
    q.g = q.x + q.groups * q.x_group;
    memset(q.sum, 0, (size_t)sums * 4);
    for (q.first = 0; q.first < words; q.first += q.images) {
        q.n = words - q.first < q.images ? words - q.first : q.images;
        find_block(&q, x, g);
        cpu_share(q.panels * q.R * q.S, conv_work(&q.s), products, &q);
    }
    cpu_share(q.panels, sums, finish, &q);
    ddp__scratch_give(q.sum, bytes);
    return 0;
}
