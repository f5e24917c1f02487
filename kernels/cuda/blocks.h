/* blocks.h -- segments of device memory cut into blocks: best fit, split, merged with what is free beside it. No CUDA in here, and no
 * locks: alloc.c holds one. */
#ifndef DDP_CUDA_BLOCKS_H
#define DDP_CUDA_BLOCKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { DDP_BLOCK_UNIT = 512, DDP_BLOCK_BINS = 256, DDP_BLOCK_USES = 4 };

struct ddp_block_pool;

/* Use of a block on another stream than its pool's. */
typedef struct ddp_block_use {
    struct ddp_block_pool *on;
    uint64_t number; /* of the use, counted on that stream */
    void *event;     /* a cudaEvent_t behind it, once the block was released */
} ddp_block_use;

typedef struct ddp_block {
    struct ddp_block *before, *after; /* beside it in the segment; NULL at its ends */
    struct ddp_block *next, *last;    /* free: in its bin; used: in the table by address (next alone) */
    struct ddp_block_pool *pool;
    char *p;
    size_t size;
    bool used, small;
    int gpu, n_uses;
    ddp_block_use use[DDP_BLOCK_USES];
} ddp_block;

/* The free blocks of one stream, in bins by size; those of small segments ([1]) apart from large ones ([0]). */
typedef struct ddp_block_pool {
    void *stream;
    uint64_t used, joined; /* uses of blocks of other pools on this stream; those that the compute stream waits for */
    ddp_block *bin[2][DDP_BLOCK_BINS];
    uint64_t filled[2][DDP_BLOCK_BINS / 64]; /* which bins are not empty */
} ddp_block_pool;

/* Takes the smallest free block of `size` bytes or more, cut to size; NULL: there is none, or (*failed) no memory for its rest. */
ddp_block *ddp__block_take(ddp_block_pool *q, bool small, size_t size, bool *failed);
/* b is free again; merged with its neighbours. */
void ddp__block_give(ddp_block *b);
/* A new segment at p as one free block of q; NULL when out of host memory. */
ddp_block *ddp__block_segment(ddp_block_pool *q, bool small, int gpu, void *p, size_t size);
/* The largest segment of q in which nothing is used, as its one block; NULL: none. */
ddp_block *ddp__block_idle(ddp_block_pool *q);
/* Takes such a block away; the caller frees p before and the block after. */
void ddp__block_remove(ddp_block *b);

#endif
