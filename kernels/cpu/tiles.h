/* tiles.h -- products of gathered rows with packed panels: y[i][k] = sum over taps t and channels c of row[t][i][c] u[t][c][k].
 * Convolutions and 16-bit matrix products are made of them. CONV_MR rows by CONV_NR columns are computed in registers, summed
 * in f32 over all taps at once. And sums of outer products by AMX, for gradients of weights (outer.c).
 *
 * f32 "high": each float is hi + lo, hi the float rounded to bf16 and lo what remains, rounded; x y = hi hi + hi lo + lo hi, and
 * lo lo, 2^-16 of it, is left out. An Inf, or more than bf16's largest number, leaves a NaN: its lo is Inf - Inf. */
#ifndef DDP_CPU_TILES_H
#define DDP_CPU_TILES_H

#include "conv.h"

enum { TILES_ROWS = 8 * CONV_MR, TILES_TAPS = 128 };

/* Up to TILES_ROWS rows of the result: where they go, and for each tap the rows that they read, `width` channels each. What
 * is laid out behind it in one workspace begins a cache line. */
typedef struct __attribute__((aligned(64))) tile_rows {
    int64_t n, n_taps, width;
    char *to[TILES_ROWS];
    const char *row[TILES_TAPS][TILES_ROWS];
    int64_t tap[TILES_TAPS]; /* which of the panel's taps */
    int64_t row_step;        /* with amx: bytes from row[0][i] to row[0][i + 1] */
    const char *next;        /* what the next rows read, fetched into L2 meanwhile: next_bytes from here */
    int64_t next_bytes;
} tile_rows;

/* What they are multiplied with.
 *   f32     u [panels][depth][CONV_NR] of f32, rows of f32
 *   pairs   u [panels][depth / 2][CONV_NR][2] of bf16, rows of bf16, width even
 *   amx     as pairs; one tap, depth a multiple of 32, rows evenly apart, 32 of them readable from every 32nd on
 *   split   as amx, of f32: a row is `depth` his and then as many los; a panel likewise, depth / 2 rows of pairs each */
typedef struct tile_panels {
    void *u;
    int64_t depth;    /* taps * width */
    int64_t columns;  /* of the result; panels cover them, CONV_NR each */
    const char *bias; /* [columns] of dt, or NULL */
    ddp_dtype dt;     /* of the result */
    bool pairs;
    bool amx;
    bool split;
    const tile_more *more; /* or NULL */
} tile_panels;

/* All rows, columns panel * CONV_NR and on. */
#define cpu_tiles CPU_LOCAL(tiles)
DDP_LOCAL void cpu_tiles(const tile_panels *p, const tile_rows *rows, int64_t panel);
/* Does the processor multiply pairs of bf16 (AVX512_BF16), in this instruction set? */
#define cpu_has_pairs CPU_LOCAL(has_pairs)
DDP_LOCAL bool cpu_has_pairs(void);
/* Does it have AMX tiles for bf16, and the system lends them? DDP_AMX=emulate: yes, by loops, for tests. */
#define cpu_has_amx CPU_LOCAL(has_amx)
DDP_LOCAL bool cpu_has_amx(void);
/* Does f32 "high" multiply in two parts: the precision asks for it and there is AMX? */
#define cpu_high_by_amx CPU_LOCAL(high_by_amx)
DDP_LOCAL bool cpu_high_by_amx(void);
/* What AMX needs of a call of dtype d: a reason, or NULL. */
#define cpu_amx_reject CPU_LOCAL(amx_reject)
DDP_LOCAL const char *cpu_amx_reject(ddp_dtype d);

/* ---- outer products: sum[m][n] += a[p][m] b[p][n] over pixels p, 32 of them in a tile of each --------------------------- */

enum { TILE_WORDS = 16 * 16 };

/* A walk over tiles, in words: a's tiles are [16 m][16 pairs of p], b's [16 pairs of p][16 n]; split: the los follow each. */
typedef struct tile_walk {
    const uint32_t *a, *b;
    int64_t groups, rows, cols;
    int64_t a_group, a_row, a_col, a_next; /* next: to the tile of the following 16 m */
    int64_t b_group, b_row, b_col, b_next;
    int64_t b_first, b_step, b_ring; /* row h reads row (b_first + h * b_step) mod b_ring of b */
    bool two_a, two_b;               /* 32 m, 32 n; else 16 */
    bool split;
} tile_walk;
/* sum [2][2][16][16]: of m, of n. */
#define cpu_walk_tiles CPU_LOCAL(walk_tiles)
DDP_LOCAL void cpu_walk_tiles(const tile_walk *w, float *sum);

/* ---- words: pairs of bf16 (pairs.c) ------------------------------------------------------------------------------------- */

/* Rows 2j and 2j + 1 of a panel of floats as pairs: bf16 in value where lo is NULL, else split. */
#define cpu_pair_rows CPU_LOCAL(pair_rows)
DDP_LOCAL void cpu_pair_rows(const float *panel, int64_t depth, uint32_t *hi, uint32_t *lo);
/* hi[i] = a[i] | b[i] << 16 for n values of bf16, or of f32, whose los go to lo. NULL: zeros. hi and lo have room for n rounded up
 * to 16. */
#define cpu_pair_lines CPU_LOCAL(pair_lines)
DDP_LOCAL void cpu_pair_lines(ddp_dtype d, const char *a, const char *b, int64_t n, uint32_t *hi, uint32_t *lo);
/* n floats as his and los. */
#define cpu_split_line CPU_LOCAL(split_line)
DDP_LOCAL void cpu_split_line(const float *x, int64_t n, uint16_t *hi, uint16_t *lo);
/* to[j * to_step + i] = from[i * from_step + j] for i < rows, j < cols. */
#define cpu_transpose_words CPU_LOCAL(transpose_words)
DDP_LOCAL void cpu_transpose_words(const uint32_t *from, int64_t from_step, int64_t rows, int64_t cols, uint32_t *to,
                                   int64_t to_step);

#endif
