/* test_blocks.c -- how segments of device memory are cut: no CUDA, no memory behind the addresses. */
#include "../../kernels/cuda/blocks.c"

#include <stdio.h>

static int bad;
static void check(const char *name, bool good) {
    printf("%s %s%s\n", good ? "ok" : "not ok", name, good ? "" : ": not so");
    bad |= !good;
}

enum { SEGMENTS = 3, SEGMENT = 64 * DDP_BLOCK_UNIT, MOST = 200 };

/* The blocks of a segment from its first: side by side, no two free ones together. How many; -1: not so. */
static int whole(const ddp_block *b, const char *end) {
    int n = 0;
    if (b->before) return -1;
    for (const ddp_block *next; b; b = next, n++) {
        next = b->after;
        if (next ? next->p != b->p + b->size || next->before != b || (!next->used && !b->used) : b->p + b->size != end)
            return -1;
    }
    return n;
}

static uint32_t state = 1;
static uint32_t draw(uint32_t n) {
    state = state * 1664525u + 1013904223u;
    return (state >> 8) % n;
}

static void random_use(void) {
    ddp_block_pool q = {0};
    ddp_block *first[SEGMENTS], *held[MOST];
    bool failed, good = true, best = true;
    int n = 0;
    for (int k = 0; k < SEGMENTS; k++)
        first[k] = ddp__block_segment(&q, false, 0, (char *)(uintptr_t)(0x10000000 * (k + 1)), SEGMENT);
    for (int step = 0; step < 20000; step++) {
        if (n < MOST && draw(2)) {
            size_t size = (1 + draw(12)) * DDP_BLOCK_UNIT, smallest = SIZE_MAX;
            for (int k = 0; k < SEGMENTS; k++)
                for (ddp_block *b = first[k]; b; b = b->after)
                    if (!b->used && b->size >= size && b->size < smallest) smallest = b->size;
            ddp_block *b = ddp__block_take(&q, false, size, &failed);
            best = best && !failed && (b != NULL) == (smallest != SIZE_MAX);
            if (!b) continue;
            size_t rest = b->after && !b->after->used ? b->after->size : 0;
            best = best && b->used && b->size == size && (smallest == size || rest == smallest - size);
            held[n++] = b;
        } else if (n) {
            int k = (int)draw((uint32_t)n);
            ddp__block_give(held[k]);
            held[k] = held[--n];
        }
        for (int k = 0; k < SEGMENTS; k++)
            good = good && whole(first[k], (char *)(uintptr_t)(0x10000000 * (k + 1)) + SEGMENT) > 0;
    }
    check("blocks lie side by side, and two free ones have become one", good);
    check("the smallest block that is large enough is taken, and its rest stays", best);
    while (n) ddp__block_give(held[--n]);
    int gone = 0;
    for (ddp_block *b; (b = ddp__block_idle(&q)); gone++) {
        good = good && b->size == SEGMENT;
        ddp__block_remove(b);
        free(b);
    }
    check("when all is given back, every segment is whole again and may go", good && gone == SEGMENTS);
}

static void kinds(void) {
    ddp_block_pool q = {0};
    bool failed;
    ddp__block_segment(&q, true, 0, (char *)0x1000, 4096);
    check("small and large segments are apart", !ddp__block_take(&q, false, 512, &failed) && !failed);
    ddp_block *b = ddp__block_take(&q, true, 4096, &failed);
    check("a block that fits is not cut", b && b->size == 4096 && !b->after && !ddp__block_idle(&q));
    ddp__block_give(b);
    b = ddp__block_idle(&q);
    check("and is idle afterwards", b && b->p == (char *)0x1000);
    ddp__block_remove(b);
    free(b);
}

int main(void) {
    random_use();
    kinds();
    return bad;
}
