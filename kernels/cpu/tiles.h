/* tiles.h -- products of gathered rows with packed panels: y[i][k] = sum over taps t and channels c of row[t][i][c] u[t][c][k].
 * Convolutions and 16-bit matrix products are made of them. CONV_MR rows by CONV_NR columns are computed in registers, summed
 * in f32 over all taps at once. */
#ifndef DDP_CPU_TILES_H
#define DDP_CPU_TILES_H

#include "conv.h"

enum { TILES_ROWS = 8 * CONV_MR, TILES_TAPS = 128 };

/* Up to TILES_ROWS rows of the result: where they go, and for each tap the rows that they read, `width` channels each. */
typedef struct tile_rows {
    int64_t n, n_taps, width;
    char *to[TILES_ROWS];
    const char *row[TILES_TAPS][TILES_ROWS];
    int64_t tap[TILES_TAPS]; /* which of the panel's taps */
    int64_t row_step;        /* with amx: bytes from row[0][i] to row[0][i + 1] */
    const char *next;        /* what the next rows read, fetched into L2 meanwhile: next_bytes from here */
    int64_t next_bytes;
} tile_rows;

/* What is done to results besides adding the bias: y = act(sums + bias) + residual. */
typedef struct tile_more {
    int act;              /* DDP_ACT_* */
    const char *y;        /* of all rows; what follows is laid out as it is, of its dtype */
    const char *residual; /* or NULL; may be y */
    char *pre;            /* gets sums + bias; or NULL */
} tile_more;

/* What they are multiplied with.
 *   f32     u [panels][depth][CONV_NR] of f32, rows of f32
 *   pairs   u [panels][depth / 2][CONV_NR][2] of bf16, rows of bf16, width even
 *   amx     as pairs; one tap, depth a multiple of 32, rows evenly apart, 32 of them readable from every 32nd on */
typedef struct tile_panels {
    void *u;
    int64_t depth;    /* taps * width */
    int64_t columns;  /* of the result; panels cover them, CONV_NR each */
    const char *bias; /* [columns] of dt, or NULL */
    ddp_dtype dt;     /* of the result */
    bool pairs;
    bool amx;
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
/* Rows 2j and 2j + 1 of a panel of floats, which are bf16 in value, as pairs. */
#define cpu_pair_rows CPU_LOCAL(pair_rows)
DDP_LOCAL void cpu_pair_rows(const float *panel, int64_t depth, uint32_t *u);

#endif
