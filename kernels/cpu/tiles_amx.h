/* tiles_amx.h -- the body of tiles.c's AMX products, included once for the processor's tiles and once for their emulation:
 * AMX_NAME(x), AMX_TARGET, AMX_BEGIN, AMX_END, AMX_ZERO(t), AMX_LOAD(t, p, step), AMX_STORE(t, p, step), AMX_DOT(c, a, b). */

/* Sapphire Rapids stalls at the first tile store after about 2,000 cycles without one: a store that nobody reads, of tile 7. */
AMX_TARGET static void AMX_NAME(stay_awake)(void) {
    uint32_t spare[TILE_WORDS] __attribute__((aligned(64)));
    AMX_STORE(7, spare, 64);
}

/* The four products of tiles 4 and 5 (rows) by 6 and 7 (columns), into 0 to 3. */
#define FOUR_DOTS     \
    AMX_DOT(0, 4, 6); \
    AMX_DOT(1, 4, 7); \
    AMX_DOT(2, 5, 6); \
    AMX_DOT(3, 5, 7)

/* out[32][CONV_NR] = 32 rows of p->depth bf16, `step` bytes apart, by u [depth / 2][CONV_NR][2]; depth a multiple of 32.
 * Tiles 0 to 3 hold the results of 16 x 16, 4 and 5 rows, 6 and 7 columns. Split: hi hi, then hi lo, then lo hi. */
AMX_TARGET static void AMX_NAME(square)(const tile_panels *p, const char *rows, int64_t step, const uint32_t *u,
                                        float *out) {
    enum { U_STEP = CONV_NR * 4 };
    const char *rows_lo = rows + p->depth * 2;
    const uint32_t *u_lo = u + p->depth / 2 * CONV_NR;
    AMX_ZERO(0);
    AMX_ZERO(1);
    AMX_ZERO(2);
    AMX_ZERO(3);
    for (int64_t d = 0; d < p->depth; d += 32, u += 16 * CONV_NR, u_lo += 16 * CONV_NR) {
        AMX_LOAD(4, rows + d * 2, step);
        AMX_LOAD(6, u, U_STEP);
        AMX_LOAD(7, u + 16, U_STEP);
        AMX_LOAD(5, rows + 16 * step + d * 2, step);
        FOUR_DOTS;
        if (p->split) {
            AMX_LOAD(6, u_lo, U_STEP);
            AMX_LOAD(7, u_lo + 16, U_STEP);
            FOUR_DOTS;
            AMX_LOAD(4, rows_lo + d * 2, step);
            AMX_LOAD(6, u, U_STEP);
            AMX_LOAD(7, u + 16, U_STEP);
            AMX_LOAD(5, rows_lo + 16 * step + d * 2, step);
            FOUR_DOTS;
        }
        if (d % 256 == 224) AMX_NAME(stay_awake)();
    }
    AMX_STORE(0, out, U_STEP);
    AMX_STORE(1, out + 16, U_STEP);
    AMX_STORE(2, out + 16 * CONV_NR, U_STEP);
    AMX_STORE(3, out + 16 * CONV_NR + 16, U_STEP);
}

/* All rows of a block; results go by way of a square that stays in L1. */
AMX_TARGET static void AMX_NAME(tiles)(const tile_panels *p, const tile_rows *b, int64_t k, const uint32_t *u) {
    float out[32 * CONV_NR] __attribute__((aligned(64)));
    AMX_BEGIN;
    for (int64_t i = 0; i < b->n; i += 32) {
        AMX_NAME(square)(p, b->row[0][i], b->row_step, u, out);
        for (int64_t j = 0; j < 32 && i + j < b->n; j++) {
            cpu_vec acc[1][2] = {{cpu_load(DDP_F32, out, j * CONV_NR), cpu_load(DDP_F32, out, j * CONV_NR + CPU_W)}};
            finish(p, 1, b->to + i + j, k, acc);
        }
    }
    AMX_END;
}

/* The products of a place of a walk: 16 or 32 m by 16 or 32 n. */
AMX_TARGET static void AMX_NAME(place)(const tile_walk *w, const uint32_t *a, const uint32_t *b) {
    AMX_LOAD(4, a, 64);
    AMX_LOAD(6, b, 64);
    AMX_DOT(0, 4, 6);
    if (w->two_b) {
        AMX_LOAD(7, b + w->b_next, 64);
        AMX_DOT(1, 4, 7);
    }
    if (!w->two_a) return;
    AMX_LOAD(5, a + w->a_next, 64);
    AMX_DOT(2, 5, 6);
    if (w->two_b) AMX_DOT(3, 5, 7);
}

AMX_TARGET static void AMX_NAME(walk)(const tile_walk *w, float *sum) {
    int64_t places = 0;
    AMX_BEGIN;
    AMX_LOAD(0, sum, 64);
    AMX_LOAD(1, sum + TILE_WORDS, 64);
    AMX_LOAD(2, sum + 2 * TILE_WORDS, 64);
    AMX_LOAD(3, sum + 3 * TILE_WORDS, 64);
    for (int64_t g = 0; g < w->groups; g++)
        for (int64_t h = 0; h < w->rows; h++) {
            const uint32_t *a = w->a + g * w->a_group + h * w->a_row;
            const uint32_t *b = w->b + g * w->b_group + (w->b_first + h * w->b_step) % w->b_ring * w->b_row;
            for (int64_t i = 0; i < w->cols; i++, a += w->a_col, b += w->b_col) {
                AMX_NAME(place)(w, a, b);
                if (w->split) {
                    AMX_NAME(place)(w, a, b + TILE_WORDS);
                    AMX_NAME(place)(w, a + TILE_WORDS, b);
                }
                if (++places % 8 == 0) AMX_NAME(stay_awake)();
            }
        }
    AMX_STORE(0, sum, 64);
    AMX_STORE(1, sum + TILE_WORDS, 64);
    AMX_STORE(2, sum + 2 * TILE_WORDS, 64);
    AMX_STORE(3, sum + 3 * TILE_WORDS, 64);
    AMX_END;
}
#undef FOUR_DOTS
