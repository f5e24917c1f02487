/* lines.h -- what the host sides of reductions, softmax and norms share: dims of operands, threads for lines, operands laid
 * out alike. */
#ifndef DDP_CUDA_LINES_H
#define DDP_CUDA_LINES_H

#include "cuda.h"

enum {
    LINE_THREADS = 256, /* of a block */
    FULL_GPU = 528      /* blocks that keep the largest GPU (132 multiprocessors) busy */
};

/* Elements of dtype d that kernels read as one (run_of in lines.cuh). */
static inline int ddp__run_of(ddp_dtype d) { return ddp__dtype_bytes[d] == 1 ? 8 : 16 / ddp__dtype_bytes[d]; }

static inline int64_t ddp__ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* The smallest power of two that is at least n, at most `most` (a power of two). */
static inline int ddp__power_of_two(int64_t n, int most) {
    int p = 1;
    while (p < most && p < n) p *= 2;
    return p;
}

/* Threads for a line of n runs: a power of two up to 32, or the block. */
static inline int ddp__line_lanes(int64_t n) { return n >= 512 ? LINE_THREADS : ddp__power_of_two(n, 32); }

/* Columns a block where n lines of `length` elements lie side by side; the block's other threads share the lines. */
static inline int ddp__line_columns(int64_t n, int64_t length) {
    int width = ddp__power_of_two(n, 32);
    while (width < LINE_THREADS && width < n && LINE_THREADS / width > length) width *= 2;
    return width;
}

/* Numbers stay in host memory: kernels that read through pointers do not take them. */
DDP_LOCAL const char *ddp__cuda_no_numbers(const ddp_call *c);

/* A tensor with the strides that a kernel wants: the caller's, or a copy in scratch. */
typedef struct ddp_laid {
    void *p;   /* its first element */
    void *own; /* the copy, or NULL */
    size_t bytes;
} ddp_laid;
/* t (or NULL: p is NULL) as `like`, a dense layout of its sizes, has it; a status. One launch where it is copied. */
DDP_LOCAL int ddp__cuda_lay(const ddp_call *c, ddp_tensor *t, const ddp_meta *like, ddp_laid *out);
DDP_LOCAL int ddp__cuda_lay_rows(const ddp_call *c, ddp_tensor *t, ddp_laid *out); /* row-major */
DDP_LOCAL void ddp__cuda_unlay(const ddp_call *c, ddp_laid *l);

#endif
