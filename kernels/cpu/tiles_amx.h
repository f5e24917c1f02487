/* tiles_amx.h -- the body of tiles.c's AMX products, included once for the processor's tiles and once for their emulation:
 * AMX_NAME(x), AMX_TARGET, AMX_BEGIN, AMX_END, AMX_ZERO(t), AMX_LOAD(t, p, step), AMX_STORE(t, p, step), AMX_DOT(c, a, b). */

/* out[32][CONV_NR] = 32 rows of `depth` bf16, `step` bytes apart, by u [depth / 2][CONV_NR][2]; depth a multiple of 32.
 * Tiles 0 to 3 hold the results of 16 x 16, 4 and 5 rows, 6 and 7 columns. */
AMX_TARGET static void AMX_NAME(square)(const char *rows, int64_t step, const uint32_t *u, int64_t depth, float *out) {
    enum { U_STEP = CONV_NR * 4 };
    AMX_ZERO(0);
    AMX_ZERO(1);
    AMX_ZERO(2);
    AMX_ZERO(3);
    for (int64_t d = 0; d < depth; d += 32, u += 16 * CONV_NR) {
        AMX_LOAD(4, rows + d * 2, step);
        AMX_LOAD(6, u, U_STEP);
        AMX_LOAD(7, u + 16, U_STEP);
        AMX_DOT(0, 4, 6);
        AMX_DOT(1, 4, 7);
        AMX_LOAD(5, rows + 16 * step + d * 2, step);
        AMX_DOT(2, 5, 6);
        AMX_DOT(3, 5, 7);
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
        AMX_NAME(square)(b->row[0][i], b->row_step, u, p->depth, out);
        for (int64_t j = 0; j < 32 && i + j < b->n; j++) {
            cpu_vec acc[1][2] = {{cpu_load(DDP_F32, out, j * CONV_NR), cpu_load(DDP_F32, out, j * CONV_NR + CPU_W)}};
            finish(p, 1, b->to + i + j, k, acc);
        }
    }
    AMX_END;
}
