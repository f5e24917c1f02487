/* turn.c -- transposing: blocks of one line of the cache each way, turned in registers.
 *
 * A block has B = 64 / bytes rows of 64 bytes. Its rows are read whole into a small buffer, for rows a power of two apart
 * share few places in the cache. A register then takes 16 bytes, E = 16 / bytes elements, of rows E apart in its lanes;
 * log2(E) rounds of interleaving registers turn E of them within each lane: each is then a stretch of a row of the result. */
#include <string.h>

#include "cpu.h"

enum { LINE = 64, REG = CPU_W * 4 };

#if defined(__AVX512F__)
typedef __m512i reg;
#define OF(name) _mm512_##name
#define STORE _mm512_storeu_si512
#define STREAM _mm512_stream_si512
#elif defined(__AVX2__)
typedef __m256i reg;
#define OF(name) _mm256_##name
#define STORE _mm256_storeu_si256
#define STREAM _mm256_stream_si256
#else
typedef __m128i reg;
#define OF(name) _mm_##name
#define STORE _mm_storeu_si128
#define STREAM _mm_stream_si128
#endif

/* Elements of the lower (upper) halves of a's and b's lanes in turns. */
CPU_INLINE reg zip_lower(int bytes, reg a, reg b) {
    if (bytes == 1) return OF(unpacklo_epi8)(a, b);
    if (bytes == 2) return OF(unpacklo_epi16)(a, b);
    return bytes == 4 ? OF(unpacklo_epi32)(a, b) : OF(unpacklo_epi64)(a, b);
}
CPU_INLINE reg zip_upper(int bytes, reg a, reg b) {
    if (bytes == 1) return OF(unpackhi_epi8)(a, b);
    if (bytes == 2) return OF(unpackhi_epi16)(a, b);
    return bytes == 4 ? OF(unpackhi_epi32)(a, b) : OF(unpackhi_epi64)(a, b);
}

/* 16 bytes of p, of p + step, ... as the lanes of a register. */
CPU_INLINE reg lanes_of(const char *p, int64_t step) {
#define PART(k) _mm_load_si128((const __m128i *)(const void *)(p + (k)*step))
#if defined(__AVX512F__)
    reg r = _mm512_inserti32x4(_mm512_castsi128_si512(PART(0)), PART(1), 1);
    return _mm512_inserti32x4(_mm512_inserti32x4(r, PART(2), 2), PART(3), 3);
#elif defined(__AVX2__)
    return _mm256_inserti128_si256(_mm256_castsi128_si256(PART(0)), PART(1), 1);
#else
    (void)step;
    return PART(0);
#endif
#undef PART
}

/* E registers, in each lane of which E x E elements are turned. */
CPU_INLINE void turn_lanes(int bytes, reg *r) {
    const int E = 16 / bytes;
    reg s[16];
#pragma GCC unroll 4
    for (int round = 1; round < E; round *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < E / 2; i++) {
            s[2 * i] = zip_lower(bytes, r[i], r[i + E / 2]);
            s[2 * i + 1] = zip_upper(bytes, r[i], r[i + E / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < E; i++) r[i] = s[i];
    }
}

/* The block whose rows lie in near[B][LINE] into rows of `to`. */
CPU_INLINE void turn_near(int bytes, const char *near, char *to, int64_t ts, bool stream) {
    const int E = 16 / bytes;
    for (int c = 0; c < 4; c++)
        for (int part = 0; part < LINE; part += REG) {
            reg r[16];
#pragma GCC unroll 16
            for (int e = 0; e < E; e++) r[e] = lanes_of(near + (part / bytes + e) * LINE + c * 16, E * LINE);
            turn_lanes(bytes, r);
#pragma GCC unroll 16
            for (int e = 0; e < E; e++) {
                void *line = to + (c * E + e) * ts + part;
                if (stream) STREAM(line, r[e]);
                else STORE(line, r[e]);
            }
        }
}

/* A whole block; `next` is the one to be read after it, `later` one to be written soon (NULL: none). */
CPU_INLINE void turn_block(int bytes, char *to, int64_t ts, const char *from, int64_t fs, const char *next, char *later,
                           bool stream) {
    char near[LINE / bytes * LINE] __attribute__((aligned(64)));
    for (int k = 0; k < LINE / bytes; k++) {
        __builtin_prefetch(next + k * fs, 0, 2);
        if (later) __builtin_prefetch(later + k * ts, 1, 3);
        memcpy(near + k * LINE, from + k * fs, LINE);
    }
    turn_near(bytes, near, to, ts, stream);
}

/* A block of m x n elements at an edge: as whole ones, by way of buffers, where that is worth it. */
CPU_INLINE void turn_edge(int bytes, char *to, int64_t ts, const char *from, int64_t fs, int64_t m, int64_t n) {
    char near[LINE / bytes * LINE] __attribute__((aligned(64))), out[LINE / bytes * LINE] __attribute__((aligned(64)));
    if (m * n <= 64) {
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < n; j++) memcpy(to + i * ts + j * bytes, from + j * fs + i * bytes, (size_t)bytes);
        return;
    }
    for (int64_t j = 0; j < n; j++) memcpy(near + j * LINE, from + j * fs, (size_t)(m * bytes));
    turn_near(bytes, near, out, LINE, false);
    for (int64_t i = 0; i < m; i++) memcpy(to + i * ts, out + i * LINE, (size_t)(n * bytes));
}

/* Along rows of `to`, one block wide; four where stores go past the caches: rows of `from` are read in longer pieces. */
CPU_INLINE void turn(int bytes, char *to, int64_t ts, const char *from, int64_t fs, int64_t m, int64_t n, bool stream) {
    const int64_t B = LINE / bytes, wide = stream ? 4 * B : B;
    for (int64_t left = 0; left < m; left += wide)
        for (int64_t j = 0; j < n; j += B)
            for (int64_t i = left; i < left + wide && i < m; i += B) {
                char *y = to + i * ts + j * bytes, *later = stream || j + 5 * B > n ? NULL : y + 4 * LINE;
                const char *x = from + j * fs + i * bytes;
                const char *next = j + 2 * B <= n ? x + B * fs : from + (i + wide) * bytes;
                int64_t h = m - i < B ? m - i : B, w = n - j < B ? n - j : B;
                if (h < B || w < B) turn_edge(bytes, y, ts, x, fs, h, w);
                else if (stream) turn_block(bytes, y, ts, x, fs, next, NULL, true);
                else turn_block(bytes, y, ts, x, fs, next, later, false);
            }
}

void cpu_turn(int bytes, char *to, int64_t ts, const char *from, int64_t fs, int64_t m, int64_t n, bool stream) {
    stream &= (uintptr_t)to % LINE == 0 && ts % LINE == 0;
    if (bytes == 1) turn(1, to, ts, from, fs, m, n, stream);
    else if (bytes == 2) turn(2, to, ts, from, fs, m, n, stream);
    else if (bytes == 4) turn(4, to, ts, from, fs, m, n, stream);
    else turn(8, to, ts, from, fs, m, n, stream);
}

typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
#define HALVES(a, b, i, j) __builtin_shufflevector(a, b, i, i + 1, i + 2, i + 3, j, j + 1, j + 2, j + 3)
#define PAIRS(a, b, o) __builtin_shufflevector(a, b, o, o + 1, 8 + o, 9 + o, 4 + o, 5 + o, 12 + o, 13 + o)
#define SINGLES(a, b, o) __builtin_shufflevector(a, b, o, 8 + o, 1 + o, 9 + o, 4 + o, 12 + o, 5 + o, 13 + o)

void cpu_transpose8(const float *from, int64_t fs, float *to, int64_t ts) {
    v8 r[8], s[8], u[8];
    for (int i = 0; i < 8; i++) r[i] = *(const v8 *)(const void *)(from + i * fs);
    for (int i = 0; i < 8; i += 2) {
        s[i] = SINGLES(r[i], r[i + 1], 0);
        s[i + 1] = SINGLES(r[i], r[i + 1], 2);
    }
    for (int i = 0; i < 8; i += 4) {
        u[i] = PAIRS(s[i], s[i + 2], 0);
        u[i + 1] = PAIRS(s[i], s[i + 2], 2);
        u[i + 2] = PAIRS(s[i + 1], s[i + 3], 0);
        u[i + 3] = PAIRS(s[i + 1], s[i + 3], 2);
    }
    for (int i = 0; i < 4; i++) {
        *(v8 *)(void *)(to + i * ts) = HALVES(u[i], u[i + 4], 0, 8);
        *(v8 *)(void *)(to + (i + 4) * ts) = HALVES(u[i], u[i + 4], 4, 12);
    }
}
