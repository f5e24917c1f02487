/* conv_wino_s2.c -- 3x3 convolutions of stride 2, all three passes. Along a line, y[i] = x[2i] w0 + x[2i+1] w1 + x[2i+2] w2: a
 * window of two taps (w0, w2) over the even places of x, which Winograd's F(4, 2) does with 5 products for 4 results, and one
 * tap over the odd ones, 4 more. In two dims 81 products make 4x4 results where the direct way needs 144. They are with 36
 * matrices only: the 4 odd places of a line share one.
 *
 * The gradient of x reads 5x5 of g and makes 8x8 of x, even places by F(4, 2) with the taps turned around, odd ones by w1.
 * The gradient of w is the transposed chain. Tiles, chunks and panels go as in conv_wino.c. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=fast")
#endif
#include "conv_wino.h"
#include "tiles.h"

enum { EVEN = 5, LINE = EVEN + 4, POINTS = LINE * LINE, KINDS = EVEN + 1, MATRICES = KINDS * KINDS, TILE = 4 };

/* Which matrix point p is multiplied with. */
static int matrix_of(int p) {
    int r = p / LINE, s = p % LINE;
    return (r < EVEN ? r : EVEN) * KINDS + (s < EVEN ? s : EVEN);
}

/* ---- the transforms of one line of a tile --------------------------------------------------------------------------- */

/* B^T of F(4, 2): 5 from 5; rows are the coefficients of M(x)/(x - p), the last of M(x) = (x^2 - 1/2) (x^2 - 2). */
CPU_INLINE void line_even(const cpu_vec *d, int64_t s, cpu_vec *o, int64_t t) {
    cpu_vec a = d[3 * s] - 2 * d[s], b = d[2 * s] - 2 * d[0];
    cpu_vec c = d[3 * s] - 0.5f * d[s], e = d[2 * s] - 0.5f * d[0];
    o[0] = a + HALF_SQ2 * b;
    o[t] = a - HALF_SQ2 * b;
    o[2 * t] = c + SQ2 * e;
    o[3 * t] = c - SQ2 * e;
    o[4 * t] = d[0] + d[4 * s] - 2.5f * d[2 * s];
}

/* 9 from 9 places of x, forward. */
CPU_INLINE void line_in(const cpu_vec *d, int64_t s, cpu_vec *o, int64_t t) {
    line_even(d, 2 * s, o, t);
    for (int i = 0; i < 4; i++) o[(EVEN + i) * t] = d[(2 * i + 1) * s];
}

/* 9 from 5 places of g, for the gradient of x; odd: its tile begins with an odd place. */
CPU_INLINE void line_in_back(bool odd, const cpu_vec *d, int64_t s, cpu_vec *o, int64_t t) {
    line_even(d, s, o, t);
    for (int i = 0; i < 4; i++) o[(EVEN + i) * t] = odd ? d[i * s] : d[(i + 1) * s];
}

/* A^T of F(4, 2): 4 from 5; columns are the powers of the points. */
CPU_INLINE void line_four(const cpu_vec *m, int64_t s, cpu_vec *o) {
    cpu_vec a = m[0] + m[s], b = m[0] - m[s], c = m[2 * s] + m[3 * s], d = m[2 * s] - m[3 * s];
    o[0] = a + c;
    o[1] = HALF_SQ2 * b + SQ2 * d;
    o[2] = 0.5f * a + 2 * c;
    o[3] = m[4 * s] + 0.5f * HALF_SQ2 * b + 2 * SQ2 * d;
}

/* 4 places of y from 9, forward. */
CPU_INLINE void line_out(const cpu_vec *m, int64_t s, cpu_vec *o, int64_t t) {
    cpu_vec e[4];
    line_four(m, s, e);
    for (int i = 0; i < 4; i++) o[i * t] = e[i] + m[(EVEN + i) * s];
}

/* 8 places of the gradient of x from 9. */
CPU_INLINE void line_out_back(bool odd, const cpu_vec *m, int64_t s, cpu_vec *o, int64_t t) {
    cpu_vec e[4];
    line_four(m, s, e);
    for (int i = 0; i < 4; i++) {
        o[2 * i * t] = odd ? m[(EVEN + i) * s] : e[i];
        o[(2 * i + 1) * t] = odd ? e[i] : m[(EVEN + i) * s];
    }
}

/* 9 from 4 places of g, for the gradient of w. */
CPU_INLINE void line_back(const cpu_vec *g, int64_t s, cpu_vec *o, int64_t t) {
    cpu_vec a = g[0] + 0.5f * g[2 * s], b = HALF_SQ2 * (g[s] + 0.5f * g[3 * s]);
    cpu_vec c = g[0] + 2 * g[2 * s], d = SQ2 * (g[s] + 2 * g[3 * s]);
    o[0] = a + b;
    o[t] = a - b;
    o[2 * t] = c + d;
    o[3 * t] = c - d;
    o[4 * t] = g[3 * s];
    for (int i = 0; i < 4; i++) o[(EVEN + i) * t] = g[i * s];
}

/* G: 6 kinds from 3 taps; rows are the powers of the points over the products of their distances. */
CPU_INLINE void line_weight(const cpu_vec *w, int64_t s, cpu_vec *o, int64_t t) {
    cpu_vec a = SQ2 / 3 * w[0], b = SQ2 / 6 * w[0], c = 1.0f / 3 * w[2 * s];
    o[0] = -a - c;
    o[t] = a - c;
    o[2 * t] = b + c;
    o[3 * t] = c - b;
    o[4 * t] = w[2 * s];
    o[5 * t] = w[s];
}

/* G^T: 3 taps from 6. */
CPU_INLINE void line_weight_back(const cpu_vec *u, int64_t s, cpu_vec *o, int64_t t) {
    o[0] = SQ2 / 3 * (u[s] - u[0]) + SQ2 / 6 * (u[2 * s] - u[3 * s]);
    o[t] = u[5 * s];
    o[2 * t] = 1.0f / 3 * (u[2 * s] + u[3 * s] - u[0] - u[s]) + u[4 * s];
}

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

/* x [N, H, W, C] is what the forward pass reads, y [N, Ho, Wo, K] its result. A tile is 4x4 of y from (4i, 4j) on and the 9x9
 * of x under it, from (8i - pad, 8j - pad) on; for the gradient of x, 8x8 of x from (8i, 8j) on and the 5x5 of y that reach it,
 * from 4i - 1 on with padding 0, else from 4i. Place 0 of such a tile is even but with padding 1. */
typedef struct wino2 {
    char *x, *y;
    ddp_tensor *w_tensor;
    const float *w; /* element (c, k, tap) is the c * wc + k * wk + tap-th: c read, k written by this pass */
    int64_t wc, wk;
    const char *bias;
    const tile_more *more;
    int64_t N, C, K, H, W, Ho, Wo, pad[2];
    int64_t reads, writes; /* channels of this pass: C and K, or K and C */
    bool back;             /* the gradient of x */
    bool odd[2];           /* its tiles begin with an odd place */
    int64_t th, tw, tiles, chunk;
    const char *zeros;
    ddp_dtype dt;
    float *u; /* [panels][MATRICES][reads][CONV_NR], point_step apart; or, or besides where it was kept, */
    float *V; /* [POINTS][tiles][reads] of all tiles */
    bool *failed;
    /* the gradient of w: V [POINTS][chunk][Cp], Z [POINTS][chunk][kp], U [MATRICES][Cp][kp] of channels k0 .. k0 + kn */
    float *Z, *U;
    int64_t vs, zs, us, Cp, k0, kn, kp, first, n;
    bool begin, with_v;
} wino2;

/* From one matrix of u to the next: off the powers of two, at which the lines would share one set of a cache. */
static int64_t point_step(const wino2 *v) { return v->reads * CONV_NR + CONV_NR; }

/* The size x size pixels of tile t: of x, or of y. */
static void tile_pixels(const wino2 *v, int64_t t, bool of_x, int size, const char *outside, const char **p) {
    int64_t n = t / (v->th * v->tw), at[2] = {t / v->tw % v->th * TILE, t % v->tw * TILE};
    int64_t bytes = ddp__dtype_bytes[v->dt];
    for (int i = 0; i < 2; i++) {
        if (of_x) at[i] = 2 * at[i] - (v->back ? 0 : v->pad[i]);
        else if (v->back && v->pad[i] == 0) at[i]--;
    }
    if (of_x) pixels(v->x + n * v->H * v->W * v->C * bytes, v->H, v->W, v->C * bytes, at[0], at[1], size, outside, p);
    else pixels(v->y + n * v->Ho * v->Wo * v->K * bytes, v->Ho, v->Wo, v->K * bytes, at[0], at[1], size, outside, p);
}

/* The transforms of a tile along both dims: of `size` x `size` vectors by `line`, rows after columns. */
typedef enum tile_kind { IN, IN_BACK, BACK } tile_kind;

/* to[point][0 .. CPU_W) from n <= CPU_W channels of the pixels p; points `step` floats apart. ahead: how many bytes from here
 * the next tile's are. */
CPU_INLINE void tile_in(tile_kind kind, const bool *odd, const char *const *p, int64_t offset, int64_t ahead,
                        ddp_dtype dt, int64_t n, float *to, int64_t step) {
    const int size = kind == IN ? 9 : kind == IN_BACK ? 5 : 4;
    cpu_vec d[9], t[POINTS], o[LINE];
    for (int i = 0; i < size * size; i++) __builtin_prefetch(p[i] + offset + ahead);
    for (int s = 0; s < size; s++) {
#pragma GCC unroll 9
        for (int r = 0; r < size; r++) d[r] = conv_load(p[r * size + s] + offset, dt, n);
        if (kind == IN) line_in(d, 1, t + s, size);
        else if (kind == IN_BACK) line_in_back(odd[0], d, 1, t + s, size);
        else line_back(d, 1, t + s, size);
    }
    for (int r = 0; r < LINE; r++) {
        if (kind == IN) line_in(t + size * r, 1, o, 1);
        else if (kind == IN_BACK) line_in_back(odd[1], t + size * r, 1, o, 1);
        else line_back(t + size * r, 1, o, 1);
#pragma GCC unroll 9
        for (int s = 0; s < LINE; s++) *(cpu_vec *)(to + (LINE * r + s) * step) = o[s];
    }
}

/* Channels k0 .. k0 + kn of tile t. */
CPU_INLINE void tiles_in(tile_kind kind, const wino2 *v, ddp_dtype dt, int64_t t, int64_t k0, int64_t kn, float *to,
                         int64_t step) {
    const char *p[81];
    int64_t bytes = ddp__dtype_bytes[dt], k = 0;
    int64_t ahead = kind == IN ? 2 * TILE * v->C * bytes : TILE * v->K * bytes;
    tile_pixels(v, t, kind == IN, kind == IN ? 9 : kind == IN_BACK ? 5 : 4, v->zeros, p);
    for (; k + CPU_W <= kn; k += CPU_W) tile_in(kind, v->odd, p, (k0 + k) * bytes, ahead, dt, CPU_W, to + k, step);
    if (k < kn) tile_in(kind, v->odd, p, (k0 + k) * bytes, 0, dt, kn - k, to + k, step);
}
static void tiles_in_as(tile_kind kind, const wino2 *v, int64_t t, int64_t k0, int64_t kn, float *to, int64_t step) {
#define AS(dt)                                                               \
    if (kind == IN) tiles_in(IN, v, dt, t, k0, kn, to, step);                \
    else if (kind == IN_BACK) tiles_in(IN_BACK, v, dt, t, k0, kn, to, step); \
    else tiles_in(BACK, v, dt, t, k0, kn, to, step)
    if (v->dt == DDP_F32) {
        AS(DDP_F32);
    } else if (v->dt == DDP_BF16) {
        AS(DDP_BF16);
    } else {
        AS(DDP_F16);
    }
}

/* All channels that this pass reads. */
static void transform_in(const wino2 *v, int64_t t, float *to, int64_t step) {
    tiles_in_as(v->back ? IN_BACK : IN, v, t, 0, v->reads, to, step);
}

/* n <= CPU_W channels of the pixels q (NULL: outside), 4x4 of y or 8x8 of x, from M, points `step` floats apart: with shift, a
 * bias, added or, where there is more, as that says. */
CPU_INLINE void tile_out(bool back, const bool *odd, const float *m, int64_t step, const tile_more *more, cpu_vec scale,
                         cpu_vec shift, const char *const *q, int64_t offset, int64_t ahead, ddp_dtype dt, int64_t n) {
    const int size = back ? 8 : 4;
    cpu_vec d[LINE], t[8 * LINE], o[8];
    for (int i = 0; i < size * size; i++)
        if (q[i]) __builtin_prefetch(q[i] + offset + ahead, 1);
    for (int i = 0; more && more->residual && i < size * size; i++)
        if (q[i]) __builtin_prefetch(more->residual + (q[i] - more->y) + offset + ahead);
    for (int s = 0; s < LINE; s++) {
#pragma GCC unroll 9
        for (int r = 0; r < LINE; r++) d[r] = *(const cpu_vec *)(m + (LINE * r + s) * step);
        if (back) line_out_back(odd[0], d, 1, t + s, LINE);
        else line_out(d, 1, t + s, LINE);
    }
    for (int r = 0; r < size; r++) {
        if (back) line_out_back(odd[1], t + LINE * r, 1, o, 1);
        else line_out(t + LINE * r, 1, o, 1);
#pragma GCC unroll 8
        for (int s = 0; s < size; s++) {
            char *to = (char *)(uintptr_t)q[size * r + s];
            if (!to) continue;
            to += offset;
            cpu_vec v = more ? conv_more(more, dt, n, o[s], scale, shift, to) : (cpu_vec)(o[s] + shift);
            conv_store(to, dt, n, v);
        }
    }
}

/* Channels k .. k + CONV_NR of tile t, from m [POINTS][..][CONV_NR]. */
CPU_INLINE void tiles_out(bool back, const wino2 *v, const tile_more *more, ddp_dtype dt, int64_t t, int64_t k,
                          const float *m, int64_t step) {
    const char *q[64];
    int64_t bytes = ddp__dtype_bytes[dt], ahead = (back ? 2 * TILE : TILE) * v->writes * bytes;
    tile_pixels(v, t, back, back ? 8 : 4, NULL, q);
    for (int64_t j = 0; j < CONV_NR && k + j < v->writes; j += CPU_W) {
        int64_t n = v->writes - k - j < CPU_W ? v->writes - k - j : CPU_W, offset = (k + j) * bytes;
        cpu_vec scale = {0}, shift = v->bias ? conv_load(v->bias + offset, dt, n) : (cpu_vec){0};
        if (more) {
            scale = cpu_load(DDP_F32, more->scale, k + j);
            shift = cpu_load(DDP_F32, more->shift, k + j);
        }
        if (n < CPU_W) tile_out(back, v->odd, m + j, step, more, scale, shift, q, offset, 0, dt, n);
        else tile_out(back, v->odd, m + j, step, more, scale, shift, q, offset, ahead, dt, CPU_W);
    }
}
static void transform_out(const wino2 *v, int64_t t, int64_t k, const float *m, int64_t step) {
#define OUT_AS(dt)                                            \
    if (v->back) tiles_out(true, v, NULL, dt, t, k, m, step); \
    else tiles_out(false, v, NULL, dt, t, k, m, step)
    if (v->dt == DDP_F32) {
        OUT_AS(DDP_F32);
    } else if (v->dt == DDP_BF16) {
        OUT_AS(DDP_BF16);
    } else {
        OUT_AS(DDP_F16);
    }
}

/* Forward, where there is more. */
static void transform_out_more(const wino2 *v, int64_t t, int64_t k, const float *m, int64_t step) {
    if (v->dt == DDP_F32) tiles_out(false, v, v->more, DDP_F32, t, k, m, step);
    else if (v->dt == DDP_BF16) tiles_out(false, v, v->more, DDP_BF16, t, k, m, step);
    else tiles_out(false, v, v->more, DDP_F16, t, k, m, step);
}

/* ---- forward and gradient of x ------------------------------------------------------------------------------------ */

/* The 36 matrices of channels k .. k + CONV_NR into u [MATRICES][reads][CONV_NR]. */
static void pack_panel(const wino2 *v, int64_t k, float *u) {
    for (int64_t c = 0; c < v->reads; c++)
        for (int half = 0; half < 2; half++) {
            float raw[9][CPU_W] __attribute__((aligned(64)));
            cpu_vec t[3 * KINDS], o[KINDS];
            int64_t first = k + half * CPU_W;
            gather_taps(v->w + c * v->wc + first * v->wk, v->wk, v->writes - first, v->back, raw);
            const cpu_vec *w = (const cpu_vec *)(const void *)raw;
            for (int s = 0; s < 3; s++) line_weight(w + s, 3, t + s, 3);
            float *to = u + c * CONV_NR + half * CPU_W;
            for (int r = 0; r < KINDS; r++) {
                line_weight(t + 3 * r, 1, o, 1);
                for (int s = 0; s < KINDS; s++) *(cpu_vec *)(to + (KINDS * r + s) * point_step(v)) = o[s];
            }
        }
}

/* Channels k .. k + CONV_NR of tiles first .. first + n: from V and a panel of u through M. */
static void panel(const wino2 *v, int64_t k, const float *u, int64_t first, int64_t n, const float *V, int64_t vs,
                  float *M, int64_t ms) {
    int64_t Cp = conv_round_up(v->reads, CPU_W);
    for (int p = 0; p < POINTS; p++)
        products(n, V + p * vs, Cp, u + matrix_of(p) * point_step(v), v->reads, M + p * ms);
    for (int64_t t = 0; t < n; t++) {
        if (v->more) transform_out_more(v, first + t, k, M + t * CONV_NR, ms);
        else transform_out(v, first + t, k, M + t * CONV_NR, ms);
    }
}

static void *scratch(const wino2 *v, size_t floats) {
    void *p = ddp__scratch_take(floats * sizeof(float));
    if (!p) *v->failed = true;
    return p;
}

/* Many tiles: chunks [lo, hi) of them, each with all panels of the packed u. */
static void run_chunks(const void *ctx, int64_t lo, int64_t hi) {
    const wino2 *v = ctx;
    int64_t Cp = conv_round_up(v->reads, CPU_W), vs = v->chunk * Cp + CPU_W, ms = v->chunk * CONV_NR + CPU_W;
    size_t floats = (size_t)(POINTS * (vs + ms));
    float *V = scratch(v, floats);
    if (!V) return;
    for (int64_t i = lo; i < hi; i++) {
        int64_t first = i * v->chunk, n = v->tiles - first < v->chunk ? v->tiles - first : v->chunk;
        for (int64_t t = 0; t < n; t++) transform_in(v, first + t, V + t * Cp, vs);
        for (int64_t k = 0; k < v->writes; k += CONV_NR)
            panel(v, k, v->u + k / CONV_NR * MATRICES * point_step(v), first, n, V, vs, V + POINTS * vs, ms);
    }
    ddp__scratch_give(V, floats * sizeof(float));
}

/* Few tiles, many channels: V of all tiles is there; panels [lo, hi) of u are packed one by one and used at once, where they
 * were not kept. */
static void run_panels(const void *ctx, int64_t lo, int64_t hi) {
    const wino2 *v = ctx;
    int64_t Cp = conv_round_up(v->reads, CPU_W), vs = v->tiles * Cp + CPU_W, ms = v->chunk * CONV_NR + CPU_W;
    size_t floats = (size_t)(MATRICES * point_step(v) + POINTS * ms);
    float *u = scratch(v, floats);
    if (!u) return;
    for (int64_t i = lo; i < hi; i++) {
        const float *kept = v->u ? v->u + i * MATRICES * point_step(v) : u;
        if (!v->u) pack_panel(v, i * CONV_NR, u);
        for (int64_t first = 0; first < v->tiles; first += v->chunk)
            panel(v, i * CONV_NR, kept, first, v->tiles - first < v->chunk ? v->tiles - first : v->chunk,
                  v->V + first * Cp, vs, u + MATRICES * point_step(v), ms);
    }
    ddp__scratch_give(u, floats * sizeof(float));
}

static void pack_panels(const void *ctx, int64_t lo, int64_t hi) {
    const wino2 *v = ctx;
    for (int64_t i = lo; i < hi; i++) pack_panel(v, i * CONV_NR, v->u + i * MATRICES * point_step(v));
}

static void transform_all(const void *ctx, int64_t lo, int64_t hi) {
    const wino2 *v = ctx;
    int64_t Cp = conv_round_up(v->reads, CPU_W);
    for (int64_t t = lo; t < hi; t++) transform_in(v, t, v->V + t * Cp, v->tiles * Cp + CPU_W);
}

/* Tiles a chunk: V of it within L2, but enough of them that a panel of u is not the bottleneck. */
static int64_t chunk_of(int64_t tiles, int64_t C, int threads) {
    enum { L2 = 500 << 10 };
    int64_t t = L2 / (POINTS * 4 * C) / CONV_MR * CONV_MR;
    if (t < 24) t = 24;
    if (t > 96) t = 96;
    int64_t share = conv_round_up((tiles + threads - 1) / threads, CONV_MR);
    return t < share ? t : share;
}

/* ---- gradient of w --------------------------------------------------------------------------------------------------- */

static void back_transforms(const void *ctx, int64_t lo, int64_t hi) {
    const wino2 *b = ctx;
    for (int64_t t = lo; t < hi; t++) {
        if (b->with_v) tiles_in_as(IN, b, b->first + t, 0, b->C, b->V + t * b->Cp, b->vs);
        tiles_in_as(BACK, b, b->first + t, b->k0, b->kn, b->Z + t * b->kp, b->zs);
    }
}

/* Items [lo, hi): panel by panel, matrix by matrix; the points of a matrix are added up. */
static void back_products(const void *ctx, int64_t lo, int64_t hi) {
    const wino2 *b = ctx;
    for (int64_t i = lo; i < hi; i++) {
        int matrix = (int)(i % MATRICES);
        int64_t k = i / MATRICES * CONV_NR;
        bool begin = b->begin;
        for (int p = 0; p < POINTS; p++) {
            if (matrix_of(p) != matrix) continue;
            back_panel(b->V + p * b->vs, b->Cp, b->Z + p * b->zs, b->kp, k, b->n, b->U + matrix * b->us, begin);
            begin = false;
        }
    }
}

/* dw[k0 ..][c][3][3] of channels c in [lo, hi) from U. */
static void back_finish(const void *ctx, int64_t lo, int64_t hi) {
    const wino2 *b = ctx;
    for (int64_t k = 0; k < b->kn; k += CPU_W)
        for (int64_t c = lo; c < hi; c++) {
            const float *u = b->U + c * b->kp + k;
            cpu_vec d[KINDS], t[3 * KINDS], o[9];
            for (int p = 0; p < MATRICES; p++) __builtin_prefetch(u + b->kp + p * b->us); /* the next c's */
            for (int s = 0; s < KINDS; s++) {
                for (int r = 0; r < KINDS; r++) d[r] = *(const cpu_vec *)(u + (KINDS * r + s) * b->us);
                line_weight_back(d, 1, t + s, KINDS);
            }
            for (int r = 0; r < 3; r++) line_weight_back(t + KINDS * r, 1, o + 3 * r, 1);
            put_taps(b->w_tensor, b->k0 + k, b->kn - k < CPU_W ? b->kn - k : CPU_W, b->C, c, o);
        }
}

/* ---- kernels ------------------------------------------------------------------------------------------------------------ */

static wino2 wino2_of(const conv_shape *s) {
    wino2 v = {.x = ddp__ptr(s->x),
               .y = ddp__ptr(s->y),
               .w_tensor = s->w,
               .N = s->N,
               .C = s->C,
               .K = s->K,
               .H = s->H,
               .W = s->W,
               .Ho = s->Ho,
               .Wo = s->Wo,
               .pad = {s->padding[0], s->padding[1]},
               .back = s->pass == CONV_GRAD_INPUT,
               .odd = {s->padding[0] == 1, s->padding[1] == 1},
               .dt = s->dt};
    /* tiles cover y or, for its gradient, x */
    v.th = v.back ? (v.H + 2 * TILE - 1) / (2 * TILE) : (v.Ho + TILE - 1) / TILE;
    v.tw = v.back ? (v.W + 2 * TILE - 1) / (2 * TILE) : (v.Wo + TILE - 1) / TILE;
    v.tiles = v.N * v.th * v.tw;
    return v;
}

const char *conv_wino_s2_reject(const ddp_call *c) {
    conv_shape s = conv_shape_of(c);
    const char *why = conv_reject_wide(&s);
    if (why) return why;
    if (s.dt == DDP_F32 && ddp_float32_matmul_precision() == DDP_F32_EXACT) return "f32 precision is exact";
    if (s.R != 3 || s.S != 3) return "not a 3x3 window";
    for (int i = 0; i < 2; i++)
        if (s.stride[i] != 2 || s.dilation[i] != 1 || s.padding[i] > 2) return "stride, dilation or padding";
    if (s.C < 16 || s.K < 16) return "too few channels to gain by it";
    if (s.dt == DDP_BF16 && cpu_has_pairs()) return "pairs of bf16 go faster directly";
    /* 36 matrices are read where the direct way reads 9 taps: measured at 128 to 512 channels */
    return wino2_of(&s).tiles < (s.pass == CONV_GRAD_WEIGHT ? 24 : 4) ? "too few tiles to gain by it" : NULL;
}

/* Forward, and the gradient of x. */
int conv_wino_s2_run(const ddp_call *c, const conv_shape *s) {
    enum { FEW_BYTES = 12 << 20 }; /* what stays in L3 */
    wino2 v = wino2_of(s);
    v.bias = s->bias ? ddp__ptr(s->bias) : NULL;
    v.more = s->more;
    v.reads = v.back ? s->K : s->C;
    v.writes = v.back ? s->C : s->K;
    v.wc = v.back ? s->C * 9 : 9;
    v.wk = v.back ? 9 : s->C * 9;
    int threads = cpu_threads(conv_work(s));
    v.chunk = chunk_of(v.tiles, v.reads, threads);
    int64_t Cp = conv_round_up(v.reads, CPU_W), panels = (v.writes + CONV_NR - 1) / CONV_NR, zeros = v.reads + CPU_W;
    int64_t all_v = POINTS * v.tiles * Cp, all_u = MATRICES * panels * point_step(&v);
    bool failed = false, few = all_v * 4 <= FEW_BYTES && all_v < all_u;
    ddp_packed *kept = conv_packed(s, CONV_PACK_WINO_S2, (size_t)all_u * sizeof(float));
    int64_t own = few ? all_v + POINTS * CPU_W : kept ? 0 : all_u;
    int64_t wide = s->dt != DDP_F32 ? s->w->numel : 0; /* w in f32 */
    size_t bytes = (size_t)(own + zeros + wide) * sizeof(float);
    float *block = ddp__scratch_take(bytes);
    if (!block) {
        ddp__packed_give(kept, false);
        return ddp__pending();
    }
    memset(block + own, 0, (size_t)zeros * sizeof(float));
    v.zeros = (const char *)(block + own);
    v.w = wide ? block + own + zeros : cpu_f32(s->w);
    if (wide) cpu_widen(s->dt, ddp__ptr(s->w), 0, block + own + zeros, wide);
    v.failed = &failed;
    v.V = block;
    v.u = kept ? kept->bytes : few ? NULL : block;
    if (kept ? !kept->ready : !few) cpu_share(panels, all_u, pack_panels, &v);
    if (few) {
        cpu_share(v.tiles, v.tiles * v.reads * 16, transform_all, &v);
        cpu_share(panels, conv_work(s), run_panels, &v);
    } else {
        cpu_share((v.tiles + v.chunk - 1) / v.chunk, conv_work(s), run_chunks, &v);
    }
    ddp__scratch_give(block, bytes);
    ddp__packed_give(kept, true);
    return failed ? ddp__op_fail(c, DDP_ENOMEM, "out of memory") : 0;
}

int conv_wino_s2_weight(const ddp_call *c) {
    conv_shape s = conv_shape_of(c);
    enum { U_BYTES = 5 << 20, V_BYTES = 3 << 20 };
    wino2 b = wino2_of(&s);
    b.Cp = conv_round_up(s.C, CPU_W);
    int64_t Kp = conv_round_up(s.K, CPU_W), chunk = V_BYTES / (POINTS * 4 * b.Cp), kb = U_BYTES / (MATRICES * 4 * b.Cp);
    kb = kb / CONV_NR * CONV_NR < CONV_NR ? CONV_NR : kb / CONV_NR * CONV_NR;
    if (kb > Kp) kb = Kp;
    if (chunk < 32) chunk = 32;
    if (chunk > b.tiles) chunk = b.tiles;
    b.vs = chunk * b.Cp + CPU_W;
    b.zs = chunk * kb + CPU_W;
    b.us = b.Cp * kb + CPU_W;
    int64_t u = MATRICES * b.us, zeros = (s.C > s.K ? s.C : s.K) + CPU_W;
    size_t bytes = (size_t)(POINTS * (b.vs + b.zs) + u + zeros) * sizeof(float);
    b.V = ddp__scratch_take(bytes);
    if (!b.V) return ddp__pending();
    b.Z = b.V + POINTS * b.vs;
    b.U = b.Z + POINTS * b.zs;
    memset(b.U + u, 0, (size_t)zeros * sizeof(float));
    b.zeros = (const char *)(b.U + u);
    for (b.k0 = 0; b.k0 < s.K; b.k0 += kb) {
        b.kn = s.K - b.k0 < kb ? s.K - b.k0 : kb;
        b.kp = conv_round_up(b.kn, CPU_W);
        for (b.first = 0; b.first < b.tiles; b.first += chunk) {
            b.n = b.tiles - b.first < chunk ? b.tiles - b.first : chunk;
            b.begin = b.first == 0;
            b.with_v = b.k0 == 0 || chunk < b.tiles;
            cpu_share(b.n, b.n * b.Cp * 16, back_transforms, &b);
            cpu_share((b.kp + CONV_NR - 1) / CONV_NR * MATRICES, conv_work(&s), back_products, &b);
        }
        cpu_share(s.C, b.Cp * b.kp * MATRICES, back_finish, &b);
    }
    ddp__scratch_give(b.V, bytes);
    return 0;
}
