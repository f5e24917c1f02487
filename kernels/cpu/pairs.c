/* pairs.c -- see tiles.h: values as pairs of bf16 in words, floats split into two bf16. */
#include "tiles.h"

/* v rounded to bf16, to nearest even, as a float's bits: the lower half is 0. */
CPU_INLINE cpu_bits round_bits(cpu_vec v) {
    cpu_bits u = (cpu_bits)v, odd = cpu_upper(u) & 1;
    return cpu_either((cpu_bits)(v != v), u | 0x400000, u + (odd + 0x7fff)) & (cpu_bits)((cpu_bits){0} - 0x10000);
}
CPU_INLINE cpu_bits word(cpu_bits a, cpu_bits b) { return cpu_upper(a) | b; }
CPU_INLINE void put_bits(uint32_t *to, cpu_bits v) { *(cpu_vec *)(void *)to = (cpu_vec)v; }

/* n values at place i of a line, or zeros. */
CPU_INLINE cpu_vec load(ddp_dtype d, const char *line, int64_t i, int64_t n) {
    cpu_vec v = {0};
    if (line) v = conv_load(cpu_at(d, line, i), d, n);
    return v;
}

CPU_INLINE void pair_lines(ddp_dtype d, const char *a, const char *b, int64_t n, uint32_t *hi, uint32_t *lo) {
    for (int64_t i = 0; i < n; i += CPU_W) {
        cpu_vec x = load(d, a, i, n - i), y = load(d, b, i, n - i);
        if (d == DDP_BF16) {
            put_bits(hi + i, word((cpu_bits)x, (cpu_bits)y));
            continue;
        }
        cpu_bits rx = round_bits(x), ry = round_bits(y);
        put_bits(hi + i, word(rx, ry));
        put_bits(lo + i, word(round_bits(x - (cpu_vec)rx), round_bits(y - (cpu_vec)ry)));
    }
}

void cpu_pair_lines(ddp_dtype d, const char *a, const char *b, int64_t n, uint32_t *hi, uint32_t *lo) {
    if (d == DDP_BF16) pair_lines(DDP_BF16, a, b, n, hi, lo);
    else pair_lines(DDP_F32, a, b, n, hi, lo);
}

void cpu_pair_rows(const float *panel, int64_t depth, uint32_t *hi, uint32_t *lo) {
    const uint32_t *bits = (const uint32_t *)(const void *)panel;
    for (int64_t j = 0; j < depth / 2; j++, bits += 2 * CONV_NR, hi += CONV_NR) {
        if (lo) {
            pair_lines(DDP_F32, (const char *)bits, (const char *)(bits + CONV_NR), CONV_NR, hi, lo);
            lo += CONV_NR;
        } else
            for (int i = 0; i < CONV_NR; i++) hi[i] = (bits[i] >> 16) | (bits[CONV_NR + i] & 0xffff0000u);
    }
}

void cpu_split_line(const float *x, int64_t n, uint16_t *hi, uint16_t *lo) {
    for (int64_t i = 0; i < n; i += CPU_W) {
        cpu_vec v = conv_load(x + i, DDP_F32, n - i), r = (cpu_vec)round_bits(v);
        conv_store(hi + i, DDP_BF16, n - i, r);
        conv_store(lo + i, DDP_BF16, n - i, v - r);
    }
}

void cpu_transpose_words(const uint32_t *from, int64_t from_step, int64_t rows, int64_t cols, uint32_t *to,
                         int64_t to_step) {
    int64_t rows8 = rows & ~(int64_t)7, cols8 = cols & ~(int64_t)7;
    for (int64_t i = 0; i < rows8; i += 8)
        for (int64_t j = 0; j < cols8; j += 8)
            cpu_transpose8((const float *)(const void *)(from + i * from_step + j), from_step,
                           (float *)(void *)(to + j * to_step + i), to_step);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = i < rows8 ? cols8 : 0; j < cols; j++) to[j * to_step + i] = from[i * from_step + j];
}
