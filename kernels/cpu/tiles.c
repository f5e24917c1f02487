/* tiles.c -- see tiles.h. bf16 by AVX512_BF16's dot products of pairs of channels where the processor has them. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=fast")
#endif
#include "tiles.h"

/* Columns k and on of the results, as many as there are. */
CPU_INLINE void finish_as(ddp_dtype dt, const tile_panels *p, int rows, char *const *to, int64_t k, cpu_vec acc[][2]) {
    for (int j = 0; j < 2 && k < p->columns; j++, k += CPU_W) {
        int64_t n = p->columns - k;
        cpu_vec bias = p->bias ? conv_load(cpu_at(dt, p->bias, k), dt, n) : (cpu_vec){0};
        if (n >= CPU_W)
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++) cpu_store(dt, to[i], k, acc[i][j] + bias);
        else
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++) conv_store(cpu_at(dt, to[i], k), dt, n, acc[i][j] + bias);
    }
}

/* The same with what p->more says, by way of z: activations are loops over what lies side by side. A row's two vectors are
 * written one after the other, since rows may lie so that they share few sets of a cache. */
CPU_INLINE void finish_more_as(ddp_dtype dt, const tile_panels *p, int rows, char *const *to, int64_t k, int64_t n,
                               cpu_vec acc[][2]) {
    const tile_more *m = p->more;
    float z[CONV_MR * CONV_NR] __attribute__((aligned(64)));
    cpu_vec bias[2] = {{0}, {0}};
    for (int j = 0; p->bias && j * CPU_W < n; j++)
        bias[j] = conv_load(cpu_at(dt, p->bias, k + j * CPU_W), dt, n - j * CPU_W);
    for (int i = 0; i < rows; i++) {
        cpu_vec *line = (cpu_vec *)(void *)(z + i * CONV_NR);
        line[0] = acc[i][0] + bias[0];
        line[1] = acc[i][1] + bias[1];
        if (!m->pre) continue;
        char *pre = cpu_at(dt, m->pre + (to[i] - m->y), k);
        for (int j = 0; j * CPU_W < n; j++) conv_store(cpu_at(dt, pre, j * CPU_W), dt, n - j * CPU_W, line[j]);
    }
    cpu_act(m->act, z, rows * CONV_NR);
    for (int i = 0; i < rows; i++) {
        const char *residual = m->residual ? cpu_at(dt, m->residual + (to[i] - m->y), k) : NULL;
        for (int j = 0; j * CPU_W < n; j++) {
            cpu_vec v = cpu_load(DDP_F32, z, i * CONV_NR + j * CPU_W);
            if (residual) v += conv_load(cpu_at(dt, residual, j * CPU_W), dt, n - j * CPU_W);
            conv_store(cpu_at(dt, to[i], k + j * CPU_W), dt, n - j * CPU_W, v);
        }
    }
}
/* Whole panels by constants. */
CPU_INLINE void finish_more_of(ddp_dtype dt, const tile_panels *p, int rows, char *const *to, int64_t k,
                               cpu_vec acc[][2]) {
    int64_t n = p->columns - k;
    if (n >= CONV_NR) finish_more_as(dt, p, rows, to, k, CONV_NR, acc);
    else finish_more_as(dt, p, rows, to, k, n, acc);
}
static void finish_more(const tile_panels *p, int rows, char *const *to, int64_t k, cpu_vec acc[][2]) {
    if (p->dt == DDP_BF16) finish_more_of(DDP_BF16, p, rows, to, k, acc);
    else if (p->dt == DDP_F16) finish_more_of(DDP_F16, p, rows, to, k, acc);
    else finish_more_of(DDP_F32, p, rows, to, k, acc);
}

/* The same with scale, all of it in registers. */
CPU_INLINE void finish_scaled_as(ddp_dtype dt, const tile_panels *p, int rows, char *const *to, int64_t k,
                                 cpu_vec acc[][2]) {
    const tile_more *m = p->more;
    cpu_vec scale[2] = {{0}, {0}}, shift[2] = {{0}, {0}};
    int64_t left = p->columns - k;
    int vectors = left > CPU_W ? 2 : 1;
    for (int j = 0; j < vectors; j++) {
        scale[j] = cpu_load(DDP_F32, m->scale, k + j * CPU_W);
        shift[j] = cpu_load(DDP_F32, m->shift, k + j * CPU_W);
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) {
            char *at = cpu_at(dt, to[i], k + j * CPU_W);
            int64_t n = left - j * CPU_W;
            conv_store(at, dt, n, conv_more(m, dt, n, acc[i][j], scale[j], shift[j], at));
        }
}
static void finish_scaled(const tile_panels *p, int rows, char *const *to, int64_t k, cpu_vec acc[][2]) {
    if (p->dt == DDP_BF16) finish_scaled_as(DDP_BF16, p, rows, to, k, acc);
    else if (p->dt == DDP_F16) finish_scaled_as(DDP_F16, p, rows, to, k, acc);
    else finish_scaled_as(DDP_F32, p, rows, to, k, acc);
}

CPU_INLINE void finish(const tile_panels *p, int rows, char *const *to, int64_t k, cpu_vec acc[][2]) {
    if (p->more && p->more->scale) finish_scaled(p, rows, to, k, acc);
    else if (p->more) finish_more(p, rows, to, k, acc);
    else if (p->dt == DDP_F32) finish_as(DDP_F32, p, rows, to, k, acc);
    else if (p->dt == DDP_BF16) finish_as(DDP_BF16, p, rows, to, k, acc);
    else finish_as(DDP_F16, p, rows, to, k, acc);
}

/* Rows i0 .. i0 + rows, columns k .. k + CONV_NR, f32. u: this panel. */
CPU_INLINE void tile(const tile_panels *p, const tile_rows *b, int rows, int64_t i0, int64_t k, const float *u) {
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
    finish(p, rows, b->to + i0, k, acc);
}

static void fetch_residual(const tile_panels *p, const tile_rows *b, int64_t i, int64_t k) {
    for (int64_t r = i; r < i + CONV_MR; r++)
        for (int64_t j = 0; j < CONV_NR * ddp__dtype_bytes[p->dt]; j += 64)
            __builtin_prefetch(p->more->residual + (b->to[r] - p->more->y) + k * ddp__dtype_bytes[p->dt] + j);
}

/* The lines that the tile at row i and column k will write and, of a residual, read, and its share of `next`. */
CPU_INLINE void fetch_lines(const tile_panels *p, const tile_rows *b, int64_t i, int64_t k) {
    for (int64_t r = i; r < i + CONV_MR; r++)
        for (int64_t j = 0; j < CONV_NR * ddp__dtype_bytes[p->dt]; j += 64)
            __builtin_prefetch(b->to[r] + k * ddp__dtype_bytes[p->dt] + j, 1);
    if (p->more && p->more->residual && p->more->residual != p->more->y) fetch_residual(p, b, i, k);
    int64_t tiles = b->n / CONV_MR, panels = (p->columns + CONV_NR - 1) / CONV_NR;
    int64_t part = k / CONV_NR * tiles + i / CONV_MR, lines = b->next_bytes / 64, parts = tiles * panels;
    for (int64_t l = lines * part / parts; l < lines * (part + 1) / parts; l++)
        __builtin_prefetch(b->next + l * 64, 0, 2);
}

static void tiles(const tile_panels *p, const tile_rows *b, int64_t k, const float *u) {
    int64_t i = 0;
    for (; i + CONV_MR <= b->n; i += CONV_MR) {
        fetch_lines(p, b, i, k);
        tile(p, b, CONV_MR, i, k, u);
    }
    for (; i + 4 <= b->n; i += 4) tile(p, b, 4, i, k, u);
    for (; i < b->n; i++) tile(p, b, 1, i, k, u);
}

#if defined(__AVX512F__)
#include <immintrin.h>
#define WITH_BF16 __attribute__((target("avx512bf16")))

/* The same by pairs of bf16 channels. width is even. */
WITH_BF16 CPU_INLINE void pair_tile(const tile_panels *p, const tile_rows *b, int rows, int64_t i0, int64_t k,
                                    const uint32_t *u) {
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
    finish(p, rows, b->to + i0, k, (cpu_vec(*)[2])(void *)acc);
}

WITH_BF16 static void pair_tiles(const tile_panels *p, const tile_rows *b, int64_t k, const uint32_t *u) {
    int64_t i = 0;
    for (; i + CONV_MR <= b->n; i += CONV_MR) {
        fetch_lines(p, b, i, k);
        pair_tile(p, b, CONV_MR, i, k, u);
    }
    for (; i + 4 <= b->n; i += 4) pair_tile(p, b, 4, i, k, u);
    for (; i < b->n; i++) pair_tile(p, b, 1, i, k, u);
}
bool cpu_has_pairs(void) { return __builtin_cpu_supports("avx512bf16"); }

/* ---- AMX: 16 x 32 by 32 x 16 at once ---- */

#include <cpuid.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Eight tiles of 16 rows of 64 bytes. */
typedef struct amx_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} amx_config;
static const amx_config eight_tiles = {
    .palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

/* The compiler does not know what these read and write: nothing is kept in registers across them. */
#define BARRIER __asm__ volatile("" ::: "memory")
#define AMX_NAME(x) amx_##x
#define AMX_TARGET __attribute__((target("amx-tile,amx-bf16")))
#define AMX_BEGIN                   \
    BARRIER;                        \
    _tile_loadconfig(&eight_tiles); \
    BARRIER
#define AMX_END _tile_release()
#define AMX_ZERO(t) _tile_zero(t)
#define AMX_LOAD(t, p, step) _tile_loadd(t, p, step)
#define AMX_DOT(c, a, b) _tile_dpbf16ps(c, a, b)
#define AMX_STORE(t, p, step) \
    _tile_stored(t, p, step); \
    BARRIER
#include "tiles_amx.h"
#undef AMX_NAME
#undef AMX_TARGET
#undef AMX_BEGIN
#undef AMX_END
#undef AMX_ZERO
#undef AMX_LOAD
#undef AMX_DOT
#undef AMX_STORE

/* The same tiles in memory, so that the loops are tested on processors without them. */
static _Thread_local uint32_t memory_tile[8][16][16];
static void memory_load(int t, const void *p, int64_t step) {
    for (int r = 0; r < 16; r++) memcpy(memory_tile[t][r], (const char *)p + r * step, 64);
}
static void memory_store(int t, void *p, int64_t step) {
    for (int r = 0; r < 16; r++) memcpy((char *)p + r * step, memory_tile[t][r], 64);
}
static float half_of(uint32_t pair, int high) { return ddp__bf16_to_f32((uint16_t)(high ? pair >> 16 : pair)); }
static void memory_dot(int c, int a, int b) {
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            float sum;
            memcpy(&sum, &memory_tile[c][m][n], 4);
            for (int k = 0; k < 16; k++) {
                uint32_t x = memory_tile[a][m][k], w = memory_tile[b][k][n];
                sum += half_of(x, 0) * half_of(w, 0) + half_of(x, 1) * half_of(w, 1);
            }
            memcpy(&memory_tile[c][m][n], &sum, 4);
        }
}
#define AMX_NAME(x) emulated_##x
#define AMX_TARGET
#define AMX_BEGIN
#define AMX_END
#define AMX_ZERO(t) memset(memory_tile[t], 0, sizeof memory_tile[t])
#define AMX_LOAD(t, p, step) memory_load(t, p, step)
#define AMX_DOT(c, a, b) memory_dot(c, a, b)
#define AMX_STORE(t, p, step) memory_store(t, p, step)
#include "tiles_amx.h"

static enum { NO_AMX, AMX, EMULATED_AMX } amx;
static pthread_once_t amx_once = PTHREAD_ONCE_INIT;

/* The processor has the instructions, and the kernel lends the registers. */
static bool amx_allowed(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18, AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24 };
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if (!(d & AMX_BF16) || !(d & AMX_TILE)) return false;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}

/* Whole numbers from -5 to 5 as bf16, so that the order of sums does not matter. */
static void fill_whole(uint16_t *to, int n) {
    for (int i = 0; i < n; i++) to[i] = ddp__f32_to_bf16((float)((i * 7 + i / 32 * 3) % 11 - 5));
}

/* A split square by tiles against the emulation. */
static bool squares_work(void) {
    uint16_t rows[32][64], u[2 * 32 * CONV_NR];
    float got[32 * CONV_NR], want[32 * CONV_NR];
    fill_whole(rows[0], 32 * 64);
    fill_whole(u, 2 * 32 * CONV_NR);
    const tile_panels p = {.u = u, .depth = 32, .columns = CONV_NR, .dt = DDP_F32, .pairs = true, .split = true};
    tile_rows *b = ddp__scratch_take(sizeof *b);
    if (!b) return false;
    b->n = 32;
    b->row_step = sizeof rows[0];
    b->row[0][0] = (const char *)rows[0];
    for (int i = 0; i < 32; i++) b->to[i] = (char *)(got + i * CONV_NR);
    amx_tiles(&p, b, 0, p.u);
    for (int i = 0; i < 32; i++) b->to[i] = (char *)(want + i * CONV_NR);
    emulated_tiles(&p, b, 0, p.u);
    ddp__scratch_give(b, sizeof *b);
    return memcmp(got, want, sizeof got) == 0;
}

/* A walk likewise. */
static bool walks_work(void) {
    uint32_t a[4 * TILE_WORDS], b[4 * TILE_WORDS];
    float got[4 * TILE_WORDS] = {1, 2, 3}, want[4 * TILE_WORDS] = {1, 2, 3};
    fill_whole((uint16_t *)(void *)a, 8 * TILE_WORDS);
    fill_whole((uint16_t *)(void *)b, 8 * TILE_WORDS);
    const tile_walk w = {.a = a,
                         .b = b,
                         .groups = 1,
                         .rows = 1,
                         .cols = 1,
                         .a_next = 2 * TILE_WORDS,
                         .b_next = 2 * TILE_WORDS,
                         .b_ring = 1,
                         .two_a = true,
                         .two_b = true,
                         .split = true};
    amx_walk(&w, got);
    emulated_walk(&w, want);
    return memcmp(got, want, sizeof got) == 0;
}

static void find_amx(void) {
    const char *isa = getenv("DDP_ISA"), *test = getenv("DDP_AMX");
    if (isa && *isa && strcmp(isa, "amx") != 0) return;
    if (test && strcmp(test, "emulate") == 0) amx = EMULATED_AMX;
    else if (amx_allowed()) amx = squares_work() && walks_work() ? AMX : NO_AMX;
}
bool cpu_has_amx(void) {
    pthread_once(&amx_once, find_amx);
    return amx != NO_AMX && cpu_has_pairs();
}
static void tiles_by_amx(const tile_panels *p, const tile_rows *b, int64_t k, const uint32_t *u) {
    if (amx == AMX) amx_tiles(p, b, k, u);
    else emulated_tiles(p, b, k, u);
}
void cpu_walk_tiles(const tile_walk *w, float *sum) {
    if (amx == AMX) amx_walk(w, sum);
    else emulated_walk(w, sum);
}
#else
bool cpu_has_pairs(void) { return false; }
bool cpu_has_amx(void) { return false; }
void cpu_walk_tiles(const tile_walk *w, float *sum) { (void)w, (void)sum; }
static void tiles_by_amx(const tile_panels *p, const tile_rows *b, int64_t k, const uint32_t *u) {
    (void)p, (void)b, (void)k, (void)u;
}
static void pair_tiles(const tile_panels *p, const tile_rows *b, int64_t k, const uint32_t *u) {
    (void)p, (void)b, (void)k, (void)u;
}
#endif

bool cpu_high_by_amx(void) { return ddp_float32_matmul_precision() == DDP_F32_HIGH && cpu_has_amx(); }

const char *cpu_amx_reject(ddp_dtype d) {
    if (d == DDP_F32 && ddp_float32_matmul_precision() != DDP_F32_HIGH) return "f32 precision is not high";
    if (d != DDP_F32 && d != DDP_BF16) return "AMX multiplies bf16 only";
    if (cpu_has_amx()) return NULL;
    return d == DDP_F32 ? "no AMX: three products of bf16 pairs cost more than one of f32" : "no AMX";
}

void cpu_tiles(const tile_panels *p, const tile_rows *rows, int64_t panel) {
    int64_t words = p->depth / 2 * CONV_NR * (p->split ? 2 : 1);
    if (p->amx) tiles_by_amx(p, rows, panel * CONV_NR, (const uint32_t *)p->u + panel * words);
    else if (p->pairs) pair_tiles(p, rows, panel * CONV_NR, (const uint32_t *)p->u + panel * words);
    else tiles(p, rows, panel * CONV_NR, (const float *)p->u + panel * p->depth * CONV_NR);
}
