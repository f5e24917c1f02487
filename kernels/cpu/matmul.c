/* matmul.c -- f32 products for small matrices, any strides: the right side is packed into panels of 32 columns, four rows
 * are computed at a time in registers. Large ones are oneDNN's. */
#include <string.h>

#include "../../core/mem/mem.h"
#include "cpu.h"

enum { NR = 32, MR = 4, STACK = 8192 };

/* y[M, N] = a[M, K] b[K, N] + bias[N]; strides in elements; y row-major with row stride ys. */
typedef struct gemm {
    int64_t M, N, K;
    const float *a, *b, *bias;
    int64_t am, ak, bk, bn, bias_stride;
    float *y;
    int64_t ys;
} gemm;

static void pack(const gemm *g, int64_t n0, float *panel) {
    int64_t n = g->N - n0 < NR ? g->N - n0 : NR;
    for (int64_t k = 0; k < g->K; k++) {
        const float *from = g->b + k * g->bk + n0 * g->bn;
        float *to = panel + k * NR;
        if (g->bn == 1 && n == NR) {
            memcpy(to, from, NR * sizeof *to);
            continue;
        }
        for (int64_t j = 0; j < n; j++) to[j] = from[j * g->bn];
        for (int64_t j = n; j < NR; j++) to[j] = 0;
    }
}

static void tile(const gemm *g, int64_t m0, int64_t m, int64_t n0, const float *panel) {
    float acc[MR][NR] = {{0}};
    int64_t n = g->N - n0 < NR ? g->N - n0 : NR;
    const float *a[MR];
    for (int64_t i = 0; i < MR; i++) a[i] = g->a + (m0 + (i < m ? i : 0)) * g->am; /* short tiles compute row 0 again */
    for (int64_t k = 0; k < g->K; k++) {
        const float *b = panel + k * NR;
        for (int i = 0; i < MR; i++) {
            float x = a[i][k * g->ak];
#pragma omp simd
            for (int j = 0; j < NR; j++) acc[i][j] += x * b[j];
        }
    }
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++)
            g->y[(m0 + i) * g->ys + n0 + j] = acc[i][j] + (g->bias ? g->bias[(n0 + j) * g->bias_stride] : 0);
}

static int run_gemm(const gemm *g) {
    float small[STACK], *panel = small;
    size_t bytes = (size_t)(g->K > 0 ? g->K : 1) * NR * sizeof *panel;
    if (bytes > sizeof small && !(panel = ddp__mem_alloc(bytes))) return ddp__pending();
    for (int64_t n0 = 0; n0 < g->N; n0 += NR) {
        pack(g, n0, panel);
        for (int64_t m0 = 0; m0 < g->M; m0 += MR) tile(g, m0, g->M - m0 < MR ? g->M - m0 : MR, n0, panel);
    }
    if (panel != small) ddp__mem_free(panel, bytes);
    return 0;
}

static const char *reject_matmul(const ddp_call *c) {
    if (c->out[0]->m.dtype != DDP_F32) return "f32 only";
    if (c->in[0]->m.ndim != 2 || c->in[1]->m.ndim != 2) return "two matrices only";
    return NULL;
}

static int run_matmul(const ddp_call *c) {
    const ddp_meta *a = &c->in[0]->m, *b = &c->in[1]->m;
    gemm g = {a->size[0], b->size[1],         a->size[1],   cpu_f32(c->in[0]), cpu_f32(c->in[1]),
              NULL,       a->stride[0],       a->stride[1], b->stride[0],      b->stride[1],
              0,          cpu_f32(c->out[0]), b->size[1]};
    return run_gemm(&g);
}
CPU_KERNEL(matmul, reject_matmul, run_matmul);

static const char *reject_linear(const ddp_call *c) {
    if (c->out[0]->m.dtype != DDP_F32) return "f32 only";
    if (c->in[0]->m.ndim == 2) return NULL;
    return ddp__meta_is_rowmajor(&c->in[0]->m) ? NULL : "x is neither a matrix nor row-major";
}

static int run_linear(const ddp_call *c) {
    const ddp_meta *x = &c->in[0]->m, *w = &c->in[1]->m;
    int last = x->ndim - 1;
    int64_t K = w->size[1], N = w->size[0], M = N ? c->out[0]->numel / N : 0;
    gemm g = {M,
              N,
              K,
              cpu_f32(c->in[0]),
              cpu_f32(c->in[1]),
              c->in[2] ? cpu_f32(c->in[2]) : NULL,
              x->ndim == 2 ? x->stride[0] : K,
              x->ndim == 2 ? x->stride[last] : 1,
              w->stride[1],
              w->stride[0],
              c->in[2] ? c->in[2]->m.stride[0] : 0,
              cpu_f32(c->out[0]),
              N};
    return run_gemm(&g);
}
CPU_KERNEL(linear, reject_linear, run_linear);
