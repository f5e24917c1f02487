/* cuda.h -- what the host side of the GPU shares: devices, streams, launches of our own kernels, scratch. */
#ifndef DDP_CUDA_H
#define DDP_CUDA_H

#include "../../core/mem/device.h"
#include "../../core/op/op.h"
#include "api.h"
#include "args.h"

/* ---- devices (device.c) -------------------------------------------------------------------------------------------------- */

typedef struct ddp_gpu {
    int index;
    struct cudaDeviceProp prop;
    cudaStream_t compute, copy;   /* the copies that run ahead; neither waits for the legacy stream */
    cudaEvent_t computed, copied; /* between the two */
    _Atomic(int64_t *) fault;     /* ddp__cuda_fault_word; NULL until a kernel needs it */
} ddp_gpu;

/* GPU i, made ready on first use and selected on this thread; NULL with the error set. */
DDP_LOCAL ddp_gpu *ddp__gpu(int i);
/* GPU i selected on this thread and nothing more: for calls that may set no error. */
DDP_LOCAL cudaError_t ddp__gpu_select(int i);
/* The GPU that c computes on, likewise. */
DDP_LOCAL ddp_gpu *ddp__gpu_of(const ddp_call *c);
/* Waits for the compute stream; a status. What failed in ops queued before comes out here: `what` is what the host waits for. */
DDP_LOCAL int ddp__gpu_wait(ddp_gpu *g, const char *what);
/* Four int64 that kernels of c's GPU and the host both see, for fault_at (device.cuh) with c->op->id: a kernel that meets an id out of
 * range notes it there and goes on with one in range; the next ddp__gpu_wait raises "OP: id V, expected 0 to L-1". NULL with the
 * error set. */
DDP_LOCAL int64_t *ddp__cuda_fault_word(const ddp_call *c);
/* 0, or DDP_EDEVICE with what failed, NVIDIA's name and text of it, the ops that were launched since the last synchronisation (an error of one
 * of them comes out later, anywhere) and what to try; out of memory is DDP_ENOMEM. `what`: "cudaMalloc", "add (kernel add_f32)". */
DDP_LOCAL int ddp__cuda_check(cudaError_t e, const char *what);

/* ---- memory (alloc.c, pinned.c) --------------------------------------------------------------------------------------------- */

/* Bytes for work that is queued on the compute stream; NULL with the error set. Given back at any time after that work is queued. */
DDP_LOCAL void *ddp__gpu_alloc(int i, size_t bytes);
DDP_LOCAL void ddp__gpu_release(int i, void *p, size_t bytes);
/* The same for work on another stream of GPU i, at most seven; released in the same way. */
DDP_LOCAL void *ddp__gpu_alloc_on(int i, cudaStream_t stream, size_t bytes);
/* What is queued on `stream` by now uses the block that begins at p, on another stream than it was made for: once released, it is
 * given out again only when that has passed. Nothing for other memory. Called after the work was queued. */
DDP_LOCAL void ddp__gpu_block_used_on(const void *p, cudaStream_t stream);
/* The compute stream of GPU i now waits for what is queued on `stream`: such uses need no more care. */
DDP_LOCAL void ddp__gpu_stream_joined(int i, cudaStream_t stream);
/* Scratch of one call, on the compute stream. */
DDP_LOCAL void *ddp__cuda_scratch_take(const ddp_call *c, size_t bytes);
DDP_LOCAL void ddp__cuda_scratch_give(const ddp_call *c, void *p, size_t bytes);
DDP_LOCAL void ddp__gpu_stats(int i, ddp_memory *out);
DDP_LOCAL void ddp__gpu_reset_peak(int i);
DDP_LOCAL void ddp__gpu_empty_cache(int i);
/* The host has waited for the compute stream: a good time to give back what is not to be cached. */
DDP_LOCAL void ddp__gpu_waited(int i);
/* Pinned host memory for copies to GPU i; released while copies still read it, it is given out again when they have. */
DDP_LOCAL void *ddp__pinned_alloc(int i, size_t bytes);
DDP_LOCAL void ddp__pinned_release(void *p);
/* A copy that reads the block at or around p was queued on `stream` of the GPU selected on this thread. A status. */
DDP_LOCAL int ddp__pinned_read_by(const void *p, cudaStream_t stream);
DDP_LOCAL void ddp__pinned_empty(void);

/* ---- launches (launch.c) ----------------------------------------------------------------------------------------------------- */

typedef enum ddp_cuda_kernel {
#define FAMILY(f) DDP_K_family_##f,
#define KERNEL(name, args, flags) DDP_K_##name,
#define KERNEL_FLOATS(name, args, flags) DDP_K_##name, DDP_K_##name##_last = DDP_K_##name + 3,
#define KERNEL_ALL(name, args, flags) DDP_K_##name, DDP_K_##name##_last = DDP_K_##name + 7,
#include "kernels.def"
    DDP_K_COUNT
} ddp_cuda_kernel;

typedef struct ddp_grid {
    unsigned x, y, z; /* blocks */
    unsigned threads; /* of a block, in x */
    unsigned shared;  /* dynamic shared memory, bytes */
} ddp_grid;
/* Threads for n items, `per` of them each, in blocks of 256; as many blocks as fill the largest GPU a few times at most: kernels
 * stride over the grid. */
DDP_LOCAL ddp_grid ddp__grid(int64_t n, int per);
/* One block of `threads` for each of n rows. */
DDP_LOCAL ddp_grid ddp__grid_rows(int64_t n, unsigned threads);
/* DDP_SYNC=1: the host waits for each launch, so that an error is told by the op that made it. */
DDP_LOCAL bool ddp__cuda_synchronous(void);
/* Queues kernel k with its one argument, for c; a status. Nothing when the grid is empty. */
DDP_LOCAL int ddp__cuda_launch(const ddp_call *c, int k, const void *args, ddp_grid g);
/* The same where there is no call: on a GPU, for `op` (a string that stays). */
DDP_LOCAL int ddp__cuda_launch_on(ddp_gpu *gpu, const char *op, int k, const void *args, ddp_grid g);
/* What a launch answered, e, as a status; with DDP_SYNC=1 its work is waited for, so that its own errors come out here. */
DDP_LOCAL int ddp__cuda_launched(ddp_gpu *gpu, const char *op, const char *kernel, cudaError_t e);

/* ddp__launch_<name>(c, [dtype,] args, grid), typed. */
#define FAMILY(f)
#define KERNEL(name, args, flags)                                                        \
    static inline int ddp__launch_##name(const ddp_call *c, const args *a, ddp_grid g) { \
        return ddp__cuda_launch(c, DDP_K_##name, a, g);                                  \
    }
#define KERNEL_FLOATS(name, args, flags)                                                              \
    static inline int ddp__launch_##name(const ddp_call *c, ddp_dtype d, const args *a, ddp_grid g) { \
        return ddp__cuda_launch(c, DDP_K_##name + (int)d, a, g);                                      \
    }
#define KERNEL_ALL(name, args, flags) KERNEL_FLOATS(name, args, flags)
#include "kernels.def"

/* ---- what is there (libraries.c): see core/mem/device.h ---- */
DDP_LOCAL int ddp__cuda_library(int k, bool open, const char **name, char *text, size_t n);
DDP_LOCAL bool ddp__cuda_peer(int i, int j);

/* ---- lists -------------------------------------------------------------------------------------------------------------------- */

#define DDP_CUDA_KERNEL(op, reject, run) \
    const ddp_kernel ddp__cuda_##op[] = {{#op ".cuda", reject, run}, {NULL, NULL, NULL}}

/* Operands side by side: t[0] the result; the others broadcast to it, numbers stay numbers. `vector` bytes of alignment where dense. */
DDP_LOCAL void ddp__cuda_walk(walk_args *a, int n, ddp_tensor *const *t);
/* dst = src, broadcast, in dst's dtype and layout: one launch. */
DDP_LOCAL int ddp__cuda_copy(const ddp_call *c, ddp_tensor *dst, const ddp_tensor *src);

/* device.h's count_bad (check.c). */
DDP_LOCAL int ddp__gpu_count_bad(const ddp_call *c, const ddp_tensor *t, int64_t count[2]);

#endif
