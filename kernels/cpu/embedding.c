/* embedding.c -- rows by number, and their gradients added up. */
#include <string.h>

#include "../../core/mem/mem.h"
#include "cpu.h"

static const int64_t *ids_of(const ddp_call *c) { return (const int64_t *)(const void *)ddp__ptr(c->in[1]); }

static const char *reject(const ddp_call *c) {
    return ddp__meta_is_rowmajor(&c->in[0]->m) && ddp__meta_is_rowmajor(&c->in[1]->m) ? NULL : "not row-major";
}

/* Ids [lo, hi). */
static void take_rows(const void *ctx, int64_t lo, int64_t hi) {
    const ddp_call *c = ctx;
    const int64_t *ids = ids_of(c);
    size_t bytes = (size_t)c->in[0]->m.size[1] * ddp__dtype_bytes[c->in[0]->m.dtype];
    for (int64_t i = lo; i < hi; i++)
        memcpy(ddp__ptr(c->out[0]) + (size_t)i * bytes, ddp__ptr(c->in[0]) + (size_t)ids[i] * bytes, bytes);
}

static int run_embedding(const ddp_call *c) {
    if (c->out[0]->numel) cpu_share(c->in[1]->numel, c->out[0]->numel, take_rows, c);
    return 0;
}
CPU_KERNEL(embedding, reject, run_embedding);

static const char *reject_grad(const ddp_call *c) {
    return cpu_f32_or_half(c->in[0]) ? reject(c) : "f32, f16 and bf16 only";
}

enum { COLUMNS = 64 };

typedef struct adding {
    const ddp_call *c;
    float *sums; /* [V, E] */
} adding;

/* Groups [lo, hi) of COLUMNS columns, all ids in order. */
static void add_columns(const void *ctx, int64_t lo, int64_t hi) {
    const adding *a = ctx;
    const ddp_tensor *g = a->c->in[0], *dw = a->c->out[0];
    const int64_t *ids = ids_of(a->c), V = dw->m.size[0], E = dw->m.size[1], n = a->c->in[1]->numel;
    float buffer[COLUMNS];
    for (int64_t k = lo * COLUMNS; k < hi * COLUMNS && k < E; k += COLUMNS) {
        int64_t m = E - k < COLUMNS ? E - k : COLUMNS;
        for (int64_t v = 0; v < V; v++) memset(a->sums + v * E + k, 0, (size_t)m * sizeof(float));
        for (int64_t i = 0; i < n; i++) {
            const float *from = cpu_source(g->m.dtype, ddp__ptr(g), i * E + k, buffer, m);
            float *to = a->sums + ids[i] * E + k;
#pragma omp simd
            for (int64_t j = 0; j < m; j++) to[j] += from[j];
        }
        if (dw->m.dtype == DDP_F32) continue;
        for (int64_t v = 0; v < V; v++) cpu_narrow(dw->m.dtype, a->sums + v * E + k, ddp__ptr(dw), v * E + k, m);
    }
}

/* 16-bit gradients are added up in f32 and rounded once. */
static int run_embedding_grad(const ddp_call *c) {
    ddp_tensor *dw = c->out[0];
    bool half = ddp__is_half(dw->m.dtype);
    size_t bytes = (size_t)dw->numel * sizeof(float);
    if (dw->numel == 0) return 0;
    adding a = {c, half ? ddp__scratch_take(bytes) : cpu_f32(dw)};
    if (!a.sums) return ddp__pending();
    cpu_share((dw->m.size[1] + COLUMNS - 1) / COLUMNS, dw->numel + c->in[0]->numel, add_columns, &a);
    if (half) ddp__scratch_give(a.sums, bytes);
    return 0;
}
CPU_KERNEL(embedding_grad, reject_grad, run_embedding_grad);
