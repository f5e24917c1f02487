/* conv_wino.c -- 3x3 convolutions of stride 1 by Winograd's F(4x4, 3x3), all three passes (Lavin & Gray, "Fast algorithms
 * for convolutional neural networks", 2016). y = A^T [(G w G^T) . (B^T d B)] A for each 4x4 tile of y over a 6x6 tile d of x.
 * The product at each of the 36 points is a matrix product over channels: a quarter of the direct multiplications.
 * The gradient of w is the transposed chain: dw = G^T [sum over tiles (B^T d B) . (A g A^T)] G.
 *
 * Forward and gradient of x: tiles go in chunks; a chunk's transformed input V stays in L2 (L3 for many channels), then for
 * each panel of CONV_NR output channels the 36 products are made into a small M, which is transformed while it is near.
 * 16-bit tensors are widened as they are read and rounded as they are written: the arithmetic is f32 throughout. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=fast")
#endif
#include "conv_wino.h"

enum { POINTS = 36, TILE = 4 };

/* A plane of tiles: of the image that is read (6x6 windows, `pad` in) and of the one that is written. */
typedef struct wino {
    const char *in; /* channels-last, C channels */
    char *out;      /* channels-last, K channels */
    const float *w; /* element (c, k, tap) is the c * wc + k * wk + tap-th, taps from the end where `flip` is set */
    int64_t wc, wk;
    float *u;         /* [panels][POINTS][C][CONV_NR], points point_step apart; or, or besides where it was kept, */
    float *V;         /* [POINTS][tiles][C] of all tiles */
    const char *bias; /* as `in`, or NULL */
    const tile_more *more;
    int64_t N, C, K, H, W, Ho, Wo, pad[2];
    int64_t th, tw, tiles, chunk;
    const char *zeros; /* a row of channels */
    ddp_dtype dt;
    bool flip;
    bool *failed; /* set by any thread */
} wino;

/* ---- the transforms of one line of a tile --------------------------------------------------------------------------- */

/* B^T d: 6 from 6; rows are the coefficients of M(x)/(x - p), M(x) = x (x^2 - 1/2) (x^2 - 2). */
CPU_INLINE void line_in(const cpu_vec *d, int64_t s, cpu_vec *o, int64_t t) {
    cpu_vec a = d[4 * s] - 2 * d[2 * s], b = d[3 * s] - 2 * d[s];
    cpu_vec c = d[4 * s] - 0.5f * d[2 * s], e = d[3 * s] - 0.5f * d[s];
    o[0] = d[0] + d[4 * s] - 2.5f * d[2 * s];
    o[t] = a + HALF_SQ2 * b;
    o[2 * t] = a - HALF_SQ2 * b;
    o[3 * t] = c + SQ2 * e;
    o[4 * t] = c - SQ2 * e;
    o[5 * t] = d[s] + d[5 * s] - 2.5f * d[3 * s];
}

/* A^T m: 4 from 6; columns are the powers of the points. */
CPU_INLINE void line_out(const cpu_vec *m, int64_t s, cpu_vec *o, int64_t t) {
    cpu_vec a = m[s] + m[2 * s], b = m[s] - m[2 * s], c = m[3 * s] + m[4 * s], d = m[3 * s] - m[4 * s];
    o[0] = m[0] + a + c;
    o[t] = HALF_SQ2 * b + SQ2 * d;
    o[2 * t] = 0.5f * a + 2 * c;
    o[3 * t] = m[5 * s] + 0.5f * HALF_SQ2 * b + 2 * SQ2 * d;
}

/* A g: 6 from 4. */
CPU_INLINE void line_back(const cpu_vec *g, int64_t s, cpu_vec *o, int64_t t) {
    cpu_vec a = g[0] + 0.5f * g[2 * s], b = HALF_SQ2 * (g[s] + 0.5f * g[3 * s]);
    cpu_vec c = g[0] + 2 * g[2 * s], d = SQ2 * (g[s] + 2 * g[3 * s]);
    o[0] = g[0];
    o[t] = a + b;
    o[2 * t] = a - b;
    o[3 * t] = c + d;
    o[4 * t] = c - d;
    o[5 * t] = g[3 * s];
}

/* G w: 6 from 3; rows are the powers of the points over the products of their distances. */
CPU_INLINE void line_weight(const cpu_vec *w, int64_t s, cpu_vec *o, int64_t t) {
    cpu_vec a = -2.0f / 3 * w[0] - 1.0f / 3 * w[2 * s], b = SQ2 / 3 * w[s];
    cpu_vec c = 1.0f / 6 * w[0] + 1.0f / 3 * w[2 * s], d = SQ2 / 6 * w[s];
    o[0] = w[0];
    o[t] = a - b;
    o[2 * t] = a + b;
    o[3 * t] = c + d;
    o[4 * t] = c - d;
    o[5 * t] = w[2 * s];
}

/* G^T u: 3 from 6. */
CPU_INLINE void line_weight_back(const cpu_vec *u, int64_t s, cpu_vec *o, int64_t t) {
    cpu_vec a = u[s] + u[2 * s], b = u[s] - u[2 * s], c = u[3 * s] + u[4 * s], d = u[3 * s] - u[4 * s];
    o[0] = u[0] - 2.0f / 3 * a + 1.0f / 6 * c;
    o[t] = SQ2 / 6 * d - SQ2 / 3 * b;
    o[2 * t] = 1.0f / 3 * (c - a) + u[5 * s];
}

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

/* From one point of u to the next: off the powers of two, at which 36 lines would share one set of a cache. */
static int64_t point_step(const wino *v) { return v->C * CONV_NR + CONV_NR; }

/* Where tile t of a plane begins: image, and its first row and column (of the written image). */
typedef struct place {
    int64_t n, h, w;
} place;

static place place_of(const wino *v, int64_t t) {
    return (place){t / (v->th * v->tw), t / v->tw % v->th * TILE, t % v->tw * TILE};
}

/* V[point][c .. c + CPU_W) of one tile from its 36 pixels; points `step` floats apart. */
CPU_INLINE void tile_in(const char *const *p, int64_t offset, int64_t ahead, ddp_dtype dt, int64_t n, float *to,
                        int64_t step) {
    cpu_vec d[6], t[POINTS], o[6];
    for (int r = 0; r < 6; r++)
        for (int s = 2; s < 6; s++) __builtin_prefetch(p[r * 6 + s] + offset + ahead);
#pragma GCC unroll 6
    for (int s = 0; s < 6; s++) {
#pragma GCC unroll 6
        for (int r = 0; r < 6; r++) d[r] = conv_load(p[r * 6 + s] + offset, dt, n);
        line_in(d, 1, t + s, 6);
    }
#pragma GCC unroll 6
    for (int r = 0; r < 6; r++) {
        line_in(t + 6 * r, 1, o, 1);
#pragma GCC unroll 6
        for (int s = 0; s < 6; s++) *(cpu_vec *)(to + (6 * r + s) * step) = o[s];
    }
}

/* Whole vectors of channels; how many. The next tile's pixels are on their way meanwhile. */
CPU_INLINE int64_t tiles_in(const char *const *p, ddp_dtype dt, int64_t C, float *to, int64_t step) {
    int64_t bytes = ddp__dtype_bytes[dt], c = 0;
    for (; c + CPU_W <= C; c += CPU_W) tile_in(p, c * bytes, TILE * C * bytes, dt, CPU_W, to + c, step);
    return c;
}

/* All channels of tile t of the read image. */
static void transform_in(const wino *v, int64_t t, float *to, int64_t step) {
    const char *p[POINTS];
    place at = place_of(v, t);
    int64_t bytes = ddp__dtype_bytes[v->dt], c = 0;
    pixels(v->in + at.n * v->H * v->W * v->C * bytes, v->H, v->W, v->C * bytes, at.h - v->pad[0], at.w - v->pad[1], 6,
           v->zeros, p);
    if (v->dt == DDP_F32) c = tiles_in(p, DDP_F32, v->C, to, step);
    else if (v->dt == DDP_BF16) c = tiles_in(p, DDP_BF16, v->C, to, step);
    else c = tiles_in(p, DDP_F16, v->C, to, step);
    if (c < v->C) tile_in(p, c * bytes, 0, v->dt, v->C - c, to + c, step);
}

/* n <= CPU_W channels of the 16 pixels q (NULL: outside) from M, points `step` floats apart: with shift, a bias, added or,
 * where there is more, as that says. */
CPU_INLINE void tile_out(const float *m, int64_t step, const tile_more *more, cpu_vec scale, cpu_vec shift,
                         char *const *q, int64_t offset, int64_t ahead, ddp_dtype dt, int64_t n) {
    cpu_vec d[6], t[24], o[4];
    for (int i = 0; i < 16; i++)
        if (q[i]) __builtin_prefetch(q[i] + offset + ahead, 1);
    for (int i = 0; more && more->residual && i < 16; i++)
        if (q[i]) __builtin_prefetch(more->residual + (q[i] - more->y) + offset + ahead);
#pragma GCC unroll 6
    for (int s = 0; s < 6; s++) {
#pragma GCC unroll 6
        for (int r = 0; r < 6; r++) d[r] = *(const cpu_vec *)(m + (6 * r + s) * step);
        line_out(d, 1, t + s, 6);
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
        line_out(t + 6 * r, 1, o, 1);
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++) {
            char *to = q[4 * r + s];
            if (!to) continue;
            to += offset;
            cpu_vec v = more ? conv_more(more, dt, n, o[s], scale, shift, to) : (cpu_vec)(o[s] + shift);
            conv_store(to, dt, n, v);
        }
    }
}

/* Channels k .. k + CONV_NR of tile t of the written image, from m [POINTS][..][CONV_NR]. */
CPU_INLINE void transform_out_as(const wino *v, const tile_more *more, int64_t t, int64_t k, const float *m,
                                 int64_t step) {
    const char *q[16];
    place at = place_of(v, t);
    int64_t bytes = ddp__dtype_bytes[v->dt];
    pixels(v->out + at.n * v->Ho * v->Wo * v->K * bytes, v->Ho, v->Wo, v->K * bytes, at.h, at.w, 4, NULL, q);
    for (int64_t j = 0; j < CONV_NR && k + j < v->K; j += CPU_W) {
        int64_t n = v->K - k - j < CPU_W ? v->K - k - j : CPU_W;
        char *const *to = (char *const *)q;
        int64_t offset = (k + j) * bytes, ahead = TILE * v->K * bytes;
        cpu_vec scale = {0}, shift = v->bias ? conv_load(v->bias + offset, v->dt, n) : (cpu_vec){0};
        if (more) {
            scale = cpu_load(DDP_F32, more->scale, k + j);
            shift = cpu_load(DDP_F32, more->shift, k + j);
        }
        if (n < CPU_W) tile_out(m + j, step, more, scale, shift, to, offset, 0, v->dt, n);
        else if (v->dt == DDP_F32) tile_out(m + j, step, more, scale, shift, to, offset, ahead, DDP_F32, CPU_W);
        else if (v->dt == DDP_BF16) tile_out(m + j, step, more, scale, shift, to, offset, ahead, DDP_BF16, CPU_W);
        else tile_out(m + j, step, more, scale, shift, to, offset, ahead, DDP_F16, CPU_W);
    }
}
static void transform_out(const wino *v, int64_t t, int64_t k, const float *m, int64_t step) {
    transform_out_as(v, NULL, t, k, m, step);
}
static void transform_out_more(const wino *v, int64_t t, int64_t k, const float *m, int64_t step) {
    transform_out_as(v, v->more, t, k, m, step);
}

/* ---- weights --------------------------------------------------------------------------------------------------------- */

/* G w G^T of channels k .. k + CONV_NR into u [POINTS][C][CONV_NR]. */
static void pack_panel(const wino *v, int64_t k, float *u) {
    for (int64_t c = 0; c < v->C; c++)
        for (int half = 0; half < 2; half++) {
            float raw[9][CPU_W] __attribute__((aligned(64)));
            cpu_vec t[18], o[6];
            int64_t first = k + half * CPU_W;
            gather_taps(v->w + c * v->wc + first * v->wk, v->wk, v->K - first, v->flip, raw);
            const cpu_vec *w = (const cpu_vec *)(const void *)raw;
#pragma GCC unroll 3
            for (int s = 0; s < 3; s++) line_weight(w + s, 3, t + s, 3);
            float *to = u + c * CONV_NR + half * CPU_W;
#pragma GCC unroll 6
            for (int r = 0; r < 6; r++) {
                line_weight(t + 3 * r, 1, o, 1);
#pragma GCC unroll 6
                for (int s = 0; s < 6; s++) *(cpu_vec *)(to + (6 * r + s) * point_step(v)) = o[s];
            }
        }
}

/* ---- forward and gradient of x ------------------------------------------------------------------------------------ */

/* Channels k .. k + CONV_NR of tiles first .. first + n: from V and a panel of u through M into y. */
static void panel(const wino *v, int64_t k, const float *u, int64_t first, int64_t n, const float *V, int64_t vs,
                  float *M, int64_t ms) {
    int64_t Cp = conv_round_up(v->C, CPU_W);
    for (int p = 0; p < POINTS; p++) products(n, V + p * vs, Cp, u + p * point_step(v), v->C, M + p * ms);
    for (int64_t t = 0; t < n; t++) {
        if (v->more) transform_out_more(v, first + t, k, M + t * CONV_NR, ms);
        else transform_out(v, first + t, k, M + t * CONV_NR, ms);
    }
}

static void *scratch(const wino *v, size_t floats) {
    void *p = ddp__scratch_take(floats * sizeof(float));
    if (!p) *v->failed = true;
    return p;
}

/* Many tiles: chunks [lo, hi) of them, each with all panels of the packed u. */
static void run_chunks(const void *ctx, int64_t lo, int64_t hi) {
    const wino *v = ctx;
    int64_t Cp = conv_round_up(v->C, CPU_W), vs = v->chunk * Cp + CPU_W, ms = v->chunk * CONV_NR + CPU_W;
    size_t floats = (size_t)(POINTS * (vs + ms));
    float *V = scratch(v, floats);
    if (!V) return;
    for (int64_t i = lo; i < hi; i++) {
        int64_t first = i * v->chunk, n = v->tiles - first < v->chunk ? v->tiles - first : v->chunk;
        for (int64_t t = 0; t < n; t++) transform_in(v, first + t, V + t * Cp, vs);
        for (int64_t k = 0; k < v->K; k += CONV_NR)
            panel(v, k, v->u + k / CONV_NR * POINTS * point_step(v), first, n, V, vs, V + POINTS * vs, ms);
    }
    ddp__scratch_give(V, floats * sizeof(float));
}

/* Few tiles, many channels: V of all tiles is there; panels [lo, hi) of u are packed one by one and used at once, where they
 * were not kept. */
static void run_panels(const void *ctx, int64_t lo, int64_t hi) {
    const wino *v = ctx;
    int64_t Cp = conv_round_up(v->C, CPU_W), vs = v->tiles * Cp + CPU_W, ms = v->chunk * CONV_NR + CPU_W;
    size_t floats = (size_t)(POINTS * (point_step(v) + ms));
    float *u = scratch(v, floats);
    if (!u) return;
    for (int64_t i = lo; i < hi; i++) {
        const float *kept = v->u ? v->u + i * POINTS * point_step(v) : u;
        if (!v->u) pack_panel(v, i * CONV_NR, u);
        for (int64_t first = 0; first < v->tiles; first += v->chunk)
            panel(v, i * CONV_NR, kept, first, v->tiles - first < v->chunk ? v->tiles - first : v->chunk,
                  v->V + first * Cp, vs, u + POINTS * point_step(v), ms);
    }
    ddp__scratch_give(u, floats * sizeof(float));
}

static void pack_panels(const void *ctx, int64_t lo, int64_t hi) {
    const wino *v = ctx;
    for (int64_t i = lo; i < hi; i++) pack_panel(v, i * CONV_NR, v->u + i * POINTS * point_step(v));
}

static void transform_all(const void *ctx, int64_t lo, int64_t hi) {
    const wino *v = ctx;
    int64_t Cp = conv_round_up(v->C, CPU_W);
    for (int64_t t = lo; t < hi; t++) transform_in(v, t, v->V + t * Cp, v->tiles * Cp + CPU_W);
}

/* Tiles a chunk: V of it within L2, enough of them that a panel of u is not the bottleneck, shared among threads. */
static int64_t chunk_of(int64_t tiles, int64_t C, int threads) {
    enum { L2 = 700 << 10 };
    int64_t t = L2 / (POINTS * 4 * C) / CONV_MR * CONV_MR;
    if (t < 48) t = 48;
    if (t > 144) t = 144;
    int64_t share = conv_round_up((tiles + threads - 1) / threads, CONV_MR);
    return t < share ? t : share;
}

/* ---- gradient of w --------------------------------------------------------------------------------------------------- */

/* dU[C][K'] += V[T][C] Z[T][K'] at each point, K' channels of g from k0 on. */
typedef struct wino_back {
    wino x, g;            /* read through transform_in; and the plane of g */
    int64_t k0, kn, kp;   /* channels of this block, and rounded up */
    int64_t Cp, first, n; /* of this chunk of tiles */
    float *V, *Z, *U;     /* [POINTS][chunk][Cp], [POINTS][chunk][kp], [POINTS][Cp][kp] */
    int64_t vs, zs, us;   /* from one point to the next */
    bool begin;           /* the first chunk overwrites U */
    ddp_tensor *dw;
    bool with_v;
} wino_back;

/* Z[point][k .. k + CPU_W) of one tile from its 16 pixels. */
CPU_INLINE void tile_back(const char *const *p, int64_t offset, int64_t ahead, ddp_dtype dt, int64_t n, float *to,
                          int64_t step) {
    cpu_vec d[4], t[24], o[6];
    for (int i = 0; i < 16; i++) __builtin_prefetch(p[i] + offset + ahead);
#pragma GCC unroll 4
    for (int s = 0; s < 4; s++) {
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) d[r] = conv_load(p[r * 4 + s] + offset, dt, n);
        line_back(d, 1, t + s, 4);
    }
#pragma GCC unroll 6
    for (int r = 0; r < 6; r++) {
        line_back(t + 4 * r, 1, o, 1);
#pragma GCC unroll 6
        for (int s = 0; s < 6; s++) *(cpu_vec *)(to + (6 * r + s) * step) = o[s];
    }
}

/* Whole vectors of this block's channels; how many. */
CPU_INLINE int64_t tiles_back(const wino_back *b, const char *const *p, ddp_dtype dt, float *to) {
    int64_t bytes = ddp__dtype_bytes[dt], k = 0;
    for (; k + CPU_W <= b->kn; k += CPU_W)
        tile_back(p, (b->k0 + k) * bytes, TILE * b->g.C * bytes, dt, CPU_W, to + k, b->zs);
    return k;
}

static void transform_back(const wino_back *b, int64_t t, float *to) {
    const char *p[16];
    const wino *g = &b->g;
    place at = place_of(&b->x, t);
    int64_t bytes = ddp__dtype_bytes[g->dt], k = 0;
    pixels(g->in + at.n * g->H * g->W * g->C * bytes, g->H, g->W, g->C * bytes, at.h, at.w, 4, g->zeros, p);
    if (g->dt == DDP_F32) k = tiles_back(b, p, DDP_F32, to);
    else if (g->dt == DDP_BF16) k = tiles_back(b, p, DDP_BF16, to);
    else k = tiles_back(b, p, DDP_F16, to);
    if (k < b->kn) tile_back(p, (b->k0 + k) * bytes, 0, g->dt, b->kn - k, to + k, b->zs);
}

static void back_transforms(const void *ctx, int64_t lo, int64_t hi) {
    const wino_back *b = ctx;
    for (int64_t t = lo; t < hi; t++) {
        if (b->with_v) transform_in(&b->x, b->first + t, b->V + t * b->Cp, b->vs);
        transform_back(b, b->first + t, b->Z + t * b->kp);
    }
}

/* Points [lo, hi). */
static void back_products(const void *ctx, int64_t lo, int64_t hi) {
    const wino_back *b = ctx;
    for (int64_t p = lo; p < hi; p++)
        for (int64_t k = 0; k < b->kp; k += CONV_NR)
            back_panel(b->V + p * b->vs, b->Cp, b->Z + p * b->zs, b->kp, k, b->n, b->U + p * b->us, b->begin);
}

/* dw[k0 ..][c][3][3] of channels c in [lo, hi) from U. */
static void back_finish(const void *ctx, int64_t lo, int64_t hi) {
    const wino_back *b = ctx;
    int64_t step = b->us, C = b->x.C;
    for (int64_t k = 0; k < b->kn; k += CPU_W)
        for (int64_t c = lo; c < hi; c++) {
            const float *u = b->U + c * b->kp + k;
            cpu_vec d[6], t[18], o[9];
            for (int p = 0; p < POINTS; p++) __builtin_prefetch(u + b->kp + p * step); /* the next c's */
            for (int s = 0; s < 6; s++) {
                for (int r = 0; r < 6; r++) d[r] = *(const cpu_vec *)(u + (6 * r + s) * step);
                line_weight_back(d, 1, t + s, 6);
            }
            for (int r = 0; r < 3; r++) line_weight_back(t + 6 * r, 1, o + 3 * r, 1);
            put_taps(b->dw, b->k0 + k, b->kn - k < CPU_W ? b->kn - k : CPU_W, C, c, o);
        }
}

/* ---- kernels ------------------------------------------------------------------------------------------------------------ */

/* Of the plane that this pass writes. */
static int64_t tiles_of(const conv_shape *s) {
    bool back = s->pass == CONV_GRAD_INPUT;
    int64_t H = back ? s->H : s->Ho, W = back ? s->W : s->Wo;
    return s->N * ((H + TILE - 1) / TILE) * ((W + TILE - 1) / TILE);
}

const char *conv_wino_reject(const ddp_call *c) {
    conv_shape s = conv_shape_of(c);
    const char *why = conv_reject_wide(&s);
    if (why) return why;
    if (s.dt == DDP_F32 && ddp_float32_matmul_precision() == DDP_F32_EXACT) return "f32 precision is exact";
    if (s.R != 3 || s.S != 3) return "not a 3x3 window";
    for (int i = 0; i < 2; i++)
        if (s.stride[i] != 1 || s.dilation[i] != 1 || s.padding[i] > 2) return "stride, dilation or padding";
    if (s.C < 16 || s.K < 16) return "too few channels to gain by it";
    /* 36 matrices are read where the direct way reads 9 taps: measured at 256 and 512 channels */
    return tiles_of(&s) < (s.pass == CONV_GRAD_WEIGHT ? 6 : 3) ? "too few tiles to gain by it" : NULL;
}

static void set_plane(wino *v, int64_t Ho, int64_t Wo) {
    v->th = (Ho + TILE - 1) / TILE;
    v->tw = (Wo + TILE - 1) / TILE;
    v->tiles = v->N * v->th * v->tw;
}

/* Forward; and the gradient of x, which is the forward of g with C and K exchanged and w turned around. */
int conv_wino_run(const ddp_call *c, const conv_shape *s) {
    bool back = s->pass == CONV_GRAD_INPUT;
    enum { FEW_BYTES = 10 << 20 }; /* what stays in L3 */
    wino v = {.N = s->N, .dt = s->dt, .bias = s->bias ? ddp__ptr(s->bias) : NULL, .more = s->more};
    v.in = ddp__ptr(back ? s->y : s->x);
    v.out = ddp__ptr(back ? s->x : s->y);
    v.C = back ? s->K : s->C;
    v.K = back ? s->C : s->K;
    v.wc = back ? s->C * 9 : 9;
    v.wk = back ? 9 : s->C * 9;
    v.flip = back;
    v.H = back ? s->Ho : s->H;
    v.W = back ? s->Wo : s->W;
    v.Ho = back ? s->H : s->Ho;
    v.Wo = back ? s->W : s->Wo;
    for (int i = 0; i < 2; i++) v.pad[i] = back ? 2 - s->padding[i] : s->padding[i];
    set_plane(&v, v.Ho, v.Wo);
    int threads = cpu_threads(conv_work(s));
    v.chunk = chunk_of(v.tiles, v.C, threads);
    bool failed = false, few = POINTS * 4 * v.tiles * conv_round_up(v.C, CPU_W) <= FEW_BYTES;
    int64_t panels = (v.K + CONV_NR - 1) / CONV_NR, zeros = v.C + CPU_W;
    int64_t all = POINTS * panels * point_step(&v);
    ddp_packed *kept = conv_packed(s, CONV_PACK_WINO, (size_t)all * sizeof(float));
    int64_t own = few ? POINTS * (v.tiles * conv_round_up(v.C, CPU_W) + CPU_W) : kept ? 0 : all;
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
    if (kept ? !kept->ready : !few) cpu_share(panels, all, pack_panels, &v);
    if (few) {
        cpu_share(v.tiles, v.tiles * v.C * 16, transform_all, &v);
        cpu_share(panels, conv_work(s), run_panels, &v);
    } else {
        cpu_share((v.tiles + v.chunk - 1) / v.chunk, conv_work(s), run_chunks, &v);
    }
    ddp__scratch_give(block, bytes);
    ddp__packed_give(kept, true);
    return failed ? ddp__op_fail(c, DDP_ENOMEM, "out of memory") : 0;
}

int conv_wino_weight(const ddp_call *c) {
    conv_shape s = conv_shape_of(c);
    enum { U_BYTES = 5 << 20, V_BYTES = 2 << 20 };
    wino_back b = {.dw = s.w, .Cp = conv_round_up(s.C, CPU_W)};
    b.x = (wino){.in = ddp__ptr(s.x), .N = s.N, .C = s.C, .H = s.H, .W = s.W, .dt = s.dt};
    b.g = (wino){.in = ddp__ptr(s.y), .N = s.N, .C = s.K, .H = s.Ho, .W = s.Wo, .dt = s.dt};
    for (int i = 0; i < 2; i++) b.x.pad[i] = s.padding[i];
    set_plane(&b.x, s.Ho, s.Wo);
    int64_t Kp = conv_round_up(s.K, CPU_W), chunk = V_BYTES / (POINTS * 4 * b.Cp), kb = U_BYTES / (POINTS * 4 * b.Cp);
    kb = kb / CONV_NR * CONV_NR < CONV_NR ? CONV_NR : kb / CONV_NR * CONV_NR;
    if (kb > Kp) kb = Kp;
    if (chunk < 64) chunk = 64;
    if (chunk > b.x.tiles) chunk = b.x.tiles;
    b.vs = chunk * b.Cp + CPU_W;
    b.zs = chunk * kb + CPU_W;
    b.us = b.Cp * kb + CPU_W;
    int64_t u = POINTS * b.us, zeros = (s.C > s.K ? s.C : s.K) + CPU_W;
    size_t bytes = (size_t)(POINTS * (b.vs + b.zs) + u + zeros) * sizeof(float);
    b.V = ddp__scratch_take(bytes);
    if (!b.V) return ddp__pending();
    b.Z = b.V + POINTS * b.vs;
    b.U = b.Z + POINTS * b.zs;
    memset(b.U + u, 0, (size_t)zeros * sizeof(float));
    b.x.zeros = b.g.zeros = (const char *)(b.U + u);
    for (b.k0 = 0; b.k0 < s.K; b.k0 += kb) {
        b.kn = s.K - b.k0 < kb ? s.K - b.k0 : kb;
        b.kp = conv_round_up(b.kn, CPU_W);
        for (b.first = 0; b.first < b.x.tiles; b.first += chunk) {
            b.n = b.x.tiles - b.first < chunk ? b.x.tiles - b.first : chunk;
            b.begin = b.first == 0;
            b.with_v = b.k0 == 0 || chunk < b.x.tiles;
            cpu_share(b.n, b.n * b.Cp * 16, back_transforms, &b);
            cpu_share(POINTS, conv_work(&s), back_products, &b);
        }
        cpu_share(s.C, b.Cp * b.kp * POINTS, back_finish, &b);
    }
    ddp__scratch_give(b.V, bytes);
    return 0;
}
