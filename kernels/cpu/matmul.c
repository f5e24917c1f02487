/* matmul.c -- f32 products for small matrices, any strides: the right side is packed into panels of two vectors a
 * row, a few rows are computed at a time in registers. Large ones are oneDNN's. The others, and f32 "high", are
 * matmul_half.c's. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=fast") /* a product and its sum in one instruction */
#endif
#include <string.h>

#include "../../core/mem/mem.h"
#include "matmul.h"
#include "tiles.h"

/* Rows a tile: as many accumulators as registers allow. */
#if defined(__AVX512F__)
enum { MR = 8 };
#elif defined(__AVX2__)
enum { MR = 6 };
#else
enum { MR = 4 };
#endif
enum { NR = 2 * CPU_W, STACK = 8192, BATCH_DIMS = DDP_MAX_DIM - 2 };

/* Columns n0 .. n0+n of b, rows `width` apart; what a row holds beyond n does not matter. */
static void pack(const gemm *g, int64_t n0, int64_t n, float *panel, int64_t width) {
    int64_t k8 = 0, j8 = 0, whole = 0;
    const float *from = (const float *)g->b + n0 * g->bn;
    if (g->bk == 1) { /* columns lie together: 8 x 8 at a time */
        k8 = g->K & ~(int64_t)7;
        j8 = n & ~(int64_t)7;
        for (int64_t k = 0; k < k8; k += 8)
            for (int64_t j = 0; j < j8; j += 8)
                cpu_transpose8(from + k + j * g->bn, g->bn, panel + k * width + j, width);
    }
    if (g->bn == 1 && g->bk > 0) { /* rows from which whole vectors stay inside b */
        whole = g->K - 1 - (width + g->bk - 1) / g->bk;
        for (int64_t k = 0; k < whole; k++)
            for (int64_t j = 0; j < width; j += CPU_W)
                *(cpu_vec *)(void *)(panel + k * width + j) = *(const cpu_vec *)(const void *)(from + k * g->bk + j);
        if (whole < 0) whole = 0;
    }
    for (int64_t k = whole; k < g->K; k++) {
        float *to = panel + k * width;
        const float *row = from + k * g->bk;
        int64_t j = k < k8 ? j8 : 0;
        for (; j < n; j++) to[j] = row[j * g->bn];
        for (; j < width; j++) to[j] = 0;
    }
}

/* m rows of v vectors, n <= v * CPU_W columns of them real; m and v are constants where this is inlined. b: rows bs
 * apart. */
static inline __attribute__((always_inline)) void tile(const gemm *g, int64_t m0, int m, int v, int64_t n0, int64_t n,
                                                       const float *b, int64_t bs) {
    cpu_vec acc[2 * MR][2];
    const float *a = (const float *)g->a + m0 * g->am;
    float *y = (float *)g->y + m0 * g->ys + n0;
    float bias[NR] = {0};
    for (int64_t j = 0; g->bias && j < n; j++) bias[j] = ((const float *)g->bias)[(n0 + j) * g->bias_stride];
    for (int i = 0; i < m; i++)
        for (int j = 0; j < v; j++) acc[i][j] = *(const cpu_vec *)(const void *)(bias + j * CPU_W);
    for (int64_t k = 0; k < g->K; k++, b += bs) {
        cpu_vec w[2];
        for (int j = 0; j < v; j++) w[j] = *(const cpu_vec *)(const void *)(b + j * CPU_W);
        for (int i = 0; i < m; i++) {
            float x = a[i * g->am + k * g->ak];
            for (int j = 0; j < v; j++) acc[i][j] += x * w[j];
        }
    }
    for (int i = 0; i < m; i++, y += g->ys) {
        if (n == v * CPU_W) {
            for (int j = 0; j < v; j++) *(cpu_vec *)(void *)(y + j * CPU_W) = acc[i][j];
        } else memcpy(y, acc[i], (size_t)n * sizeof *y);
    }
}

/* All rows of a panel. */
static void column(const gemm *g, int64_t n0, int64_t n, const float *b, int64_t bs) {
#define TILE(m)                                         \
    case m:                                             \
        if (n > CPU_W) tile(g, m0, m, 2, n0, n, b, bs); \
        else tile(g, m0, m, 1, n0, n, b, bs);           \
        break;
    int64_t m0 = 0;
    if (n <= CPU_W)
        for (; g->M - m0 >= 2 * MR; m0 += 2 * MR) tile(g, m0, 2 * MR, 1, n0, n, b, bs);
    for (; m0 < g->M; m0 += MR) {
        switch (g->M - m0) {
            default:
                if (n > CPU_W) tile(g, m0, MR, 2, n0, n, b, bs);
                else tile(g, m0, MR, 1, n0, n, b, bs);
                break;
                TILE(1)
                TILE(2)
                TILE(3)
#if defined(__AVX2__)
                TILE(4)
                TILE(5)
#endif
#if defined(__AVX512F__)
                TILE(6)
                TILE(7)
#endif
        }
    }
#undef TILE
}

static int run_gemm(const gemm *g) {
    float small[STACK] __attribute__((aligned(64))), *panel = small;
    size_t bytes = (size_t)(g->K > 0 ? g->K : 1) * NR * sizeof *panel;
    if (bytes > sizeof small && !(panel = ddp__scratch_take(bytes))) return ddp__pending();
    for (int64_t n0 = 0; n0 < g->N; n0 += NR) {
        int64_t n = g->N - n0 < NR ? g->N - n0 : NR;
        if (g->bn == 1 && n == NR && g->M <= 64) column(g, n0, n, (const float *)g->b + n0, g->bk); /* as it lies */
        else {
            int64_t width = n <= CPU_W ? CPU_W : NR;
            pack(g, n0, n, panel, width);
            column(g, n0, n, panel, width);
        }
    }
    if (panel != small) ddp__scratch_give(panel, bytes);
    return 0;
}

/* ---- matmul ---- */

static const char *reject_matmul(const ddp_call *c) {
    if (!cpu_f32_or_half(c->out[0])) return "f32, f16 and bf16 only";
    return c->in[0]->m.ndim < 1 || c->in[1]->m.ndim < 1 ? "a number" : NULL;
}

/* Offset of batch i of an operand whose last `own` dims are the matrix: broadcast dims do not move it. */
static int64_t batch_at(const ddp_meta *m, int own, const ddp_meta *y, int batch_dims, int64_t i) {
    int64_t at = 0;
    for (int d = batch_dims - 1; d >= 0; i /= y->size[d--]) {
        int k = d - (batch_dims - (m->ndim - own));
        if (k >= 0 && m->size[k] != 1) at += i % y->size[d] * m->stride[k];
    }
    return at;
}

static int matmul(const ddp_call *c, bool amx) {
    const ddp_meta *a = &c->in[0]->m, *b = &c->in[1]->m, *y = &c->out[0]->m;
    bool row = a->ndim == 1, col = b->ndim == 1;
    int batch_dims = y->ndim - !row - !col, st = 0;
    gemm g = {.dt = c->out[0]->m.dtype,
              .M = row ? 1 : a->size[a->ndim - 2],
              .N = col ? 1 : b->size[b->ndim - 1],
              .K = a->size[a->ndim - 1],
              .am = row ? 0 : a->stride[a->ndim - 2],
              .ak = a->stride[a->ndim - 1],
              .bk = b->stride[col ? 0 : b->ndim - 2],
              .bn = col ? 0 : b->stride[b->ndim - 1]};
    int64_t batches = g.M && g.N ? c->out[0]->numel / (g.M * g.N) : 0;
    g.ys = g.N;
    for (int64_t i = 0; i < batches && st == 0; i++) {
        g.a = cpu_at(g.dt, ddp__ptr(c->in[0]), batch_at(a, row ? 1 : 2, y, batch_dims, i));
        g.b = cpu_at(g.dt, ddp__ptr(c->in[1]), batch_at(b, col ? 1 : 2, y, batch_dims, i));
        g.y = cpu_at(g.dt, ddp__ptr(c->out[0]), i * g.M * g.N);
        st = g.dt == DDP_F32 && !amx ? run_gemm(&g) : cpu_half_gemm(&g, amx);
    }
    return st;
}

/* By AMX: bf16, and f32 "high" where it is worth the packing. */
static const char *reject_amx(const ddp_call *c, int64_t depth) {
    enum { WORTH = 1 << 20 };
    ddp_dtype dt = c->out[0]->m.dtype;
    const char *why = cpu_amx_reject(dt);
    if (why || dt != DDP_F32) return why;
    return c->out[0]->numel * depth < WORTH ? "too few products to gain by two parts" : NULL;
}
static const char *reject_matmul_amx(const ddp_call *c) {
    const char *why = reject_matmul(c);
    return why ? why : reject_amx(c, c->in[0]->m.size[c->in[0]->m.ndim - 1]);
}
static int run_matmul(const ddp_call *c) { return matmul(c, false); }
static int run_matmul_amx(const ddp_call *c) { return matmul(c, true); }
const ddp_kernel CPU_LOCAL(matmul)[] = {{"matmul.amx." CPU_TEXT(DDP_CPU_ISA), reject_matmul_amx, run_matmul_amx},
                                        {"matmul.cpu." CPU_TEXT(DDP_CPU_ISA), reject_matmul, run_matmul},
                                        {NULL, NULL, NULL}};

/* ---- linear ---- */

const char *cpu_reject_linear(const ddp_call *c) {
    if (!cpu_f32_or_half(c->out[0])) return "f32, f16 and bf16 only";
    if (c->in[0]->m.ndim == 2) return NULL;
    return ddp__meta_is_rowmajor(&c->in[0]->m) ? NULL : "x is neither a matrix nor row-major";
}

gemm cpu_linear_of(const ddp_call *c) {
    const ddp_meta *x = &c->in[0]->m, *w = &c->in[1]->m;
    const ddp_tensor *bias = c->in[2];
    bool matrix = x->ndim == 2;
    gemm g = {.dt = c->out[0]->m.dtype,
              .N = w->size[0],
              .K = w->size[1],
              .a = ddp__ptr(c->in[0]),
              .b = ddp__ptr(c->in[1]),
              .bias = bias ? ddp__ptr(bias) : NULL,
              .am = matrix ? x->stride[0] : w->size[1],
              .ak = matrix ? x->stride[1] : 1,
              .bk = w->stride[1],
              .bn = w->stride[0],
              .bias_stride = bias ? bias->m.stride[0] : 0,
              .y = ddp__ptr(c->out[0]),
              .ys = w->size[0]};
    g.M = g.N ? c->out[0]->numel / g.N : 0;
    return g;
}

static const char *reject_linear_amx(const ddp_call *c) {
    const char *why = cpu_reject_linear(c);
    return why ? why : reject_amx(c, c->in[1]->m.size[1]);
}
static int run_linear(const ddp_call *c) {
    gemm g = cpu_linear_of(c);
    return g.dt == DDP_F32 ? run_gemm(&g) : cpu_half_gemm(&g, false);
}
static int run_linear_amx(const ddp_call *c) {
    gemm g = cpu_linear_of(c);
    return cpu_half_gemm(&g, true);
}
const ddp_kernel CPU_LOCAL(linear)[] = {{"linear.amx." CPU_TEXT(DDP_CPU_ISA), reject_linear_amx, run_linear_amx},
                                        {"linear.cpu." CPU_TEXT(DDP_CPU_ISA), cpu_reject_linear, run_linear},
                                        {NULL, NULL, NULL}};
