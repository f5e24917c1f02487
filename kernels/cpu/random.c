/* random.c -- f32 draws in row-major order: the words of random.h, a block at a time, shaped by vector functions. */
#include "../random.h"

#include "cpu.h"

#pragma omp declare simd notinbranch
extern float logf(float);
#pragma omp declare simd notinbranch
extern float cosf(float);
#pragma omp declare simd notinbranch
extern float sinf(float);

enum { CHUNK = 256 };

static const char *reject(const ddp_call *c) {
    return c->out[0]->m.dtype == DDP_F32 && ddp__meta_is_rowmajor(&c->out[0]->m) ? NULL : "row-major f32 only";
}

/* u[0..CHUNK) of the elements from `first` (a multiple of 4). */
static void units(ddp_rng rng, int64_t first, float *u) {
    for (int64_t i = 0; i < CHUNK; i += 4) ddp__draw_f32(rng, (first + i) / 4, u + i);
}

static int fill(const ddp_call *c, bool normal, float scale, float shift) {
    float *y = cpu_f32(c->out[0]), u[CHUNK], v[CHUNK];
    for (int64_t at = 0; at < c->out[0]->numel; at += CHUNK) {
        int64_t n = c->out[0]->numel - at < CHUNK ? c->out[0]->numel - at : CHUNK;
        units(c->rng, at, u);
        if (normal) {
#pragma omp simd
            for (int i = 0; i < CHUNK / 2; i++) {
                float radius = sqrtf(-2 * logf(1 - u[2 * i])), angle = 6.28318530717958647692f * u[2 * i + 1];
                v[2 * i] = radius * cosf(angle);
                v[2 * i + 1] = radius * sinf(angle);
            }
        }
        const float *from = normal ? v : u;
        for (int64_t i = 0; i < n; i++) y[at + i] = from[i] * scale + shift;
    }
    return 0;
}

static int run_rand(const ddp_call *c) { return fill(c, false, 1, 0); }
CPU_KERNEL(rand, reject, run_rand);
static int run_randn(const ddp_call *c) { return fill(c, true, 1, 0); }
CPU_KERNEL(randn, reject, run_randn);
static int run_uniform_(const ddp_call *c) {
    const ddp_uniform__attrs *a = c->attrs;
    return fill(c, false, (float)(a->hi - a->lo), (float)a->lo);
}
CPU_KERNEL(uniform_, reject, run_uniform_);
static int run_normal_(const ddp_call *c) {
    const ddp_normal__attrs *a = c->attrs;
    return fill(c, true, (float)a->std, (float)a->mean);
}
CPU_KERNEL(normal_, reject, run_normal_);
