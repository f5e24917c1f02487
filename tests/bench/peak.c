/* peak.c -- what one core of this machine can do at most, as `name value` lines: GFLOP/s of multiply-adds held in
 * registers (f32; bf16 products summed in f32 by `pairs`, AVX512_BF16, and by `amx` where they are) and GB/s of copying, bytes
 * read plus bytes written, by the size of source and destination together. Instructions that DDP_ISA leaves out are left out
 * of the products. Best of several runs; nothing is timed on zeros. */
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static volatile float sink;
static float values[1024]; /* around 1, all different */

enum { CHAINS = 16, ROUNDS = 200000, RUNS = 6 }; /* chains: latency times ports, and room for bad luck */

/* x = x a + b, 16 chains; returns operations. */
__attribute__((target("avx512f"), noinline)) static double fma_512(void) {
    __m512 x[CHAINS], a = _mm512_loadu_ps(values), b = _mm512_loadu_ps(values + 16);
    for (int i = 0; i < CHAINS; i++) x[i] = _mm512_loadu_ps(values + 32 + i);
    for (int r = 0; r < ROUNDS; r++) {
#pragma GCC unroll 16
        for (int i = 0; i < CHAINS; i++) x[i] = _mm512_fmadd_ps(x[i], a, b);
    }
    for (int i = 1; i < CHAINS; i++) x[0] = _mm512_add_ps(x[0], x[i]);
    sink = _mm512_reduce_add_ps(x[0]);
    return 2.0 * 16 * CHAINS * ROUNDS;
}

__attribute__((target("avx2,fma"), noinline)) static double fma_256(void) {
    enum { N = 12 }; /* 16 registers: 12 chains and two factors */
    __m256 x[N], a = _mm256_loadu_ps(values), b = _mm256_loadu_ps(values + 16);
    for (int i = 0; i < N; i++) x[i] = _mm256_loadu_ps(values + 32 + i);
    for (int r = 0; r < ROUNDS; r++) {
#pragma GCC unroll 12
        for (int i = 0; i < N; i++) x[i] = _mm256_fmadd_ps(x[i], a, b);
    }
    float out[8];
    for (int i = 1; i < N; i++) x[0] = _mm256_add_ps(x[0], x[i]);
    _mm256_storeu_ps(out, x[0]);
    sink = out[0];
    return 2.0 * 8 * N * ROUNDS;
}

/* Without either: a multiply and an add on four floats. */
__attribute__((noinline)) static double fma_128(void) {
    enum { N = 12 };
    __m128 x[N], a = _mm_loadu_ps(values), b = _mm_loadu_ps(values + 16);
    for (int i = 0; i < N; i++) x[i] = _mm_loadu_ps(values + 32 + i);
    for (int r = 0; r < ROUNDS; r++) {
#pragma GCC unroll 12
        for (int i = 0; i < N; i++) x[i] = _mm_add_ps(_mm_mul_ps(x[i], a), b);
    }
    for (int i = 1; i < N; i++) x[0] = _mm_add_ps(x[0], x[i]);
    sink = _mm_cvtss_f32(x[0]);
    return 2.0 * 4 * N * ROUNDS;
}

/* Pairs of bf16 products added to f32. */
__attribute__((target("avx512f,avx512bf16"), noinline)) static double dot_bf16_512(void) {
    __m512 x[CHAINS];
    __m512bh a = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(values), _mm512_loadu_ps(values + 16));
    __m512bh b = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(values + 32), _mm512_loadu_ps(values + 48));
    for (int i = 0; i < CHAINS; i++) x[i] = _mm512_loadu_ps(values + 64 + i);
    for (int r = 0; r < ROUNDS; r++) {
#pragma GCC unroll 16
        for (int i = 0; i < CHAINS; i++) x[i] = _mm512_dpbf16_ps(x[i], a, b);
        __asm__ volatile("" : "+x"(a)); /* each round computes anew */
    }
    for (int i = 1; i < CHAINS; i++) x[0] = _mm512_add_ps(x[0], x[i]);
    sink = _mm512_reduce_add_ps(x[0]);
    return 2.0 * 32 * CHAINS * ROUNDS;
}

/* Intel's tiles: 16x32 times 32x16, four results at once. Linux lends them on request. */
static int tiles_granted(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}

__attribute__((target("amx-tile,amx-bf16"), noinline)) static double tiles_bf16(void) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) config = {.palette = 1};
    static uint16_t block[16 * 32]; /* bf16: the upper halves of the values */
    static float out[16 * 16];
    for (int i = 0; i < 16 * 32; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i % 1024], sizeof bits);
        block[i] = (uint16_t)(bits >> 16);
    }
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
    _tile_loadconfig(&config);
    _tile_loadd(4, block, 64);
    _tile_loadd(5, block, 64);
    _tile_loadd(6, block, 64);
    _tile_loadd(7, block, 64);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int r = 0; r < ROUNDS / 4; r++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, 64);
    _tile_release();
    sink = out[0];
    return 2.0 * 16 * 16 * 32 * 4 * (ROUNDS / 4);
}

static double best_rate(double (*work)(void)) {
    double best = 0;
    for (int i = 0; i < RUNS; i++) {
        double begin = now(), flops = work(), rate = flops / (now() - begin);
        if (rate > best) best = rate;
    }
    return best / 1e9;
}

/* Four ways of copying, n a multiple of 256: the C library's, and vector loops with plain and with streaming stores. */
static void copy_libc(char *to, const char *from, size_t n) { memcpy(to, from, n); }

__attribute__((target("avx512f"))) static void copy_512(char *to, const char *from, size_t n) {
    for (size_t i = 0; i < n; i += 64)
        _mm512_store_si512((void *)(to + i), _mm512_load_si512((const void *)(from + i)));
}
__attribute__((target("avx512f"))) static void copy_512_streaming(char *to, const char *from, size_t n) {
    for (size_t i = 0; i < n; i += 64)
        _mm512_stream_si512((void *)(to + i), _mm512_load_si512((const void *)(from + i)));
    _mm_sfence();
}
__attribute__((target("avx"))) static void copy_256_streaming(char *to, const char *from, size_t n) {
    for (size_t i = 0; i < n; i += 32)
        _mm256_stream_si256((void *)(to + i), _mm256_load_si256((const void *)(from + i)));
    _mm_sfence();
}

/* GB/s of copying half of `bytes` into the other half, the best way; each way has about .05 s, at least three copies. */
static double copy_rate(size_t bytes) {
    size_t n = bytes / 2 / 256 * 256, page = (size_t)2 << 20;
    size_t room = (2 * n + page - 1) / page * page;
    char *p = aligned_alloc(page, room);
    if (!p) return 0;
    madvise(p, room, MADV_HUGEPAGE); /* as the engine's allocator does */
    for (size_t i = 0; i < 2 * n; i++) p[i] = (char)(i * 2654435761u >> 13);
    void (*ways[4])(char *, const char *, size_t) = {copy_libc};
    int n_ways = 1, reps = n < ((size_t)2 << 20) ? (int)(((size_t)16 << 20) / n) : 1;
    if (__builtin_cpu_supports("avx")) ways[n_ways++] = copy_256_streaming;
    if (__builtin_cpu_supports("avx512f")) ways[n_ways++] = copy_512, ways[n_ways++] = copy_512_streaming;
    double best = 0;
    for (int way = 0; way < n_ways; way++) {
        double spent = 0;
        for (int run = 0; run < 3 || (spent < .05 && run < 100); run++) {
            double begin = now();
            for (int r = 0; r < reps; r++) {
                ways[way](p + n, p, n);
                __asm__ volatile("" ::"r"(p) : "memory");
            }
            double took = now() - begin, rate = 2.0 * (double)n * reps / took;
            if (rate > best) best = rate;
            spent += took;
        }
    }
    free(p);
    return best / 1e9;
}

/* The place of DDP_ISA's value among these; all, where it says nothing. */
static int allowed(void) {
    static const char *const names[] = {"sse", "avx2", "avx512"};
    const char *isa = getenv("DDP_ISA");
    int i = 0;
    while (i < 3 && (!isa || strcmp(isa, names[i]) != 0)) i++;
    return i;
}

/* peak [BYTES...]: with sizes only copying is measured, at these. */
int main(int argc, char **argv) {
    __builtin_cpu_init();
    for (int i = 1; i < argc; i++) printf("copy %s %.1f\n", argv[i], copy_rate(strtoull(argv[i], NULL, 10)));
    if (argc > 1) return 0;
    for (int i = 0; i < 1024; i++) values[i] = .5f + (float)((unsigned)i * 2654435761u >> 8) * 0x1p-25f;
    int cap = allowed();
    double (*fma)(void) = fma_128;
    if (cap >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) fma = fma_256;
    if (cap >= 2 && __builtin_cpu_supports("avx512f")) fma = fma_512;
    best_rate(fma); /* the clock settles */
    printf("f32 %.1f\n", best_rate(fma));
    if (cap >= 2 && __builtin_cpu_supports("avx512bf16")) printf("pairs %.1f\n", best_rate(dot_bf16_512));
    if (cap >= 3 && __builtin_cpu_supports("amx-bf16") && tiles_granted()) printf("amx %.1f\n", best_rate(tiles_bf16));
    const size_t sizes[] = {16u << 10, 1u << 20, 64u << 20, 512u << 20};
    for (int i = 0; i < 4; i++) printf("copy %zu %.1f\n", sizes[i], copy_rate(sizes[i]));
    return 0;
}
