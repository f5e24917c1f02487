/* linear_act.c -- a linear map with activation and residual; what its gradient does before the products. */
#include <string.h>

#include "../../core/mem/mem.h"
#include "matmul.h"
#include "tiles.h"

/* 16 bits: all of it where tiles leave the registers. */
static int run_half(const ddp_call *c, void *pre) {
    ddp_tensor *y = c->out[0], *residual = c->in[3];
    gemm g = cpu_linear_of(c);
    g.act = (int)((const ddp_linear_act_attrs *)c->attrs)->act;
    g.pre = pre;
    if (residual && ddp__meta_is_rowmajor(&residual->m)) g.residual = ddp__ptr(residual);
    else if (residual) { /* brought into y's layout, where it is read before y is written */ cpu_copy(y, residual);
        g.residual = g.y;
    }
    return cpu_half_gemm(&g, g.dt == DDP_BF16 && cpu_has_amx());
}

/* p[0] = act(p[1]) + p[2], the last where there is a residual; p[0] may be p[1]. */
static void act_loop(const void *ctx, char *const *p, int64_t n) {
    float *y = (float *)(void *)p[0];
    const int *act = ctx;
    if (p[1] != p[0]) memcpy(y, p[1], (size_t)n * sizeof *y);
    cpu_act(act[0], y, n);
    if (!act[1]) return;
    const float *r = (const float *)(const void *)p[2];
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] += r[i];
}

/* f32: the product by linear's fastest kernel, into y or where pre is kept; then one pass. */
static int run_f32(const ddp_call *c, ddp_tensor *pre) {
    ddp_tensor *y = c->out[0], *z = pre ? pre : y;
    ddp_call linear = {.op = &ddp__ops[DDP_OP_linear], .n_in = 3, .in = c->in, .out = {z}};
    const ddp_kernel *k = ddp__pick_kernel(&linear);
    int st = k ? k->run(&linear) : ddp__pending();
    int act[2] = {(int)((const ddp_linear_act_attrs *)c->attrs)->act, c->in[3] != NULL};
    if (st < 0 || (!act[0] && !act[1])) return st;
    cpu_map(act[1] ? 3 : 2, (ddp_tensor *[]){y, z, c->in[3]}, act_loop, act);
    return 0;
}

static int run_linear_act(const ddp_call *c) {
    ddp_tensor *y = c->out[0], *pre = c->out[1];
    if (y->numel == 0) return 0;
    if (pre->m.ndim != y->m.ndim || pre->numel != y->numel) pre = NULL;
    return y->m.dtype == DDP_F32 ? run_f32(c, pre) : run_half(c, pre ? ddp__ptr(pre) : NULL);
}
CPU_KERNEL(linear_act, cpu_reject_linear, run_linear_act);

/* ---- gradient ---- */

/* Rows are cut into parts, whose sums are added in order: the number of threads changes nothing. A part's columns are added up in
 * f32 over RUN rows, in double over those. */
enum { MOST_PARTS = 64, PART = 32, RUN = 64 };

typedef struct slopes {
    ddp_dtype dt;
    int act;
    const void *g, *from;
    void *dz;
    int64_t rows, columns, part;
    double *sums; /* [parts][columns] */
    bool failed;
} slopes;

/* Row r: dz, added to run[columns]. */
static void slope_row(const slopes *s, int64_t r, float *run) {
    float g_buffer[CPU_CHUNK], from_buffer[CPU_CHUNK], dz_buffer[CPU_CHUNK];
    const int64_t piece = s->dt == DDP_F32 ? 4 * CPU_CHUNK : CPU_CHUNK; /* f32 needs no buffers */
    for (int64_t k = 0; k < s->columns; k += piece, run += piece) {
        int64_t at = r * s->columns + k, n = s->columns - k < piece ? s->columns - k : piece;
        const float *g = cpu_source(s->dt, s->g, at, g_buffer, n);
        const float *from = cpu_source(s->dt, s->from, at, from_buffer, n);
        float *dz = cpu_target(s->dt, s->dz, at, dz_buffer);
        cpu_act_grad(s->act, g, from, dz, n);
#pragma omp simd
        for (int64_t i = 0; i < n; i++) run[i] += dz[i];
        cpu_narrow(s->dt, dz, s->dz, at, n);
    }
}

static void slope_parts(const void *ctx, int64_t lo, int64_t hi) {
    slopes *s = (slopes *)(uintptr_t)ctx;
    size_t bytes = (size_t)s->columns * sizeof(float);
    float *run = ddp__scratch_take(bytes);
    if (!run) {
        s->failed = true;
        return;
    }
    for (int64_t p = lo; p < hi; p++) {
        int64_t end = (p + 1) * s->part < s->rows ? (p + 1) * s->part : s->rows;
        double *sums = s->sums + p * s->columns;
        memset(sums, 0, (size_t)s->columns * sizeof *sums);
        for (int64_t r = p * s->part; r < end;) {
            int64_t stop = end - r < RUN ? end : r + RUN;
            memset(run, 0, bytes);
            for (; r < stop; r++) slope_row(s, r, run);
            for (int64_t i = 0; i < s->columns; i++) sums[i] += run[i];
        }
    }
    ddp__scratch_give(run, bytes);
}

static const char *reject_linear_act_grad(const ddp_call *c) {
    if (!cpu_f32_or_half(c->in[0])) return "f32, f16 and bf16 only";
    return ddp__meta_is_rowmajor(&c->in[0]->m) && ddp__meta_is_rowmajor(&c->in[1]->m) ? NULL : "not row-major";
}

static int run_linear_act_grad(const ddp_call *c) {
    ddp_tensor *dz = c->out[0], *dbias = c->out[1];
    slopes s = {.dt = dz->m.dtype,
                .act = (int)((const ddp_linear_act_grad_attrs *)c->attrs)->act,
                .g = ddp__ptr(c->in[0]),
                .from = ddp__ptr(c->in[1]),
                .dz = ddp__ptr(dz),
                .columns = dbias->numel};
    if (s.columns == 0) return 0;
    s.rows = dz->numel / s.columns;
    s.part = (s.rows + MOST_PARTS - 1) / MOST_PARTS;
    if (s.part < PART) s.part = PART;
    int64_t parts = (s.rows + s.part - 1) / s.part;
    size_t bytes = (size_t)((parts > 0 ? parts : 1) * s.columns) * sizeof *s.sums;
    if (!(s.sums = ddp__scratch_take(bytes))) return ddp__pending();
    if (parts == 0) memset(s.sums, 0, bytes);
    cpu_share(parts, dz->numel * (s.act == DDP_ACT_RELU ? 1 : 8), slope_parts, &s);
    for (int64_t p = 1; p < parts; p++)
        for (int64_t i = 0; i < s.columns; i++) s.sums[i] += s.sums[p * s.columns + i];
    for (int64_t i = 0; i < s.columns; i++) cpu_put(s.dt, ddp__ptr(dbias), i, (float)s.sums[i]);
    ddp__scratch_give(s.sums, bytes);
    return s.failed ? ddp__fail(DDP_ENOMEM, "linear_act_grad: out of memory") : 0;
}
CPU_KERNEL(linear_act_grad, reject_linear_act_grad, run_linear_act_grad);
