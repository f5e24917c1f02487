/* capture.h -- work that is queued once and replayed as a CUDA graph. What a compiled step is made of; until there is one, tests. */
#ifndef DDP_CUDA_CAPTURE_H
#define DDP_CUDA_CAPTURE_H

#include "../../core/op/op.h"

/* What of a call a graph may hold. */
typedef enum ddp_captures {
    DDP_CAPTURE_AS_IS, /* the same kernels with the same arguments, whenever it runs */
    DDP_CAPTURE_ARGUMENTS, /* the same kernels, but an argument is of this call alone: a place in a stream of random numbers, a rate, the
                              number of a step: it is set anew before each replay */
    DDP_CAPTURE_NEVER /* the host takes part: copies between devices, collectives */
} ddp_captures;
DDP_API ddp_captures ddp__captures(int op);

typedef struct ddp_capture ddp_capture;
/* From here to capture_end work of this thread for GPU i is recorded, not run. Memory that it takes must be in the cache already (the step has
 * run before), and is the graph's as long as that lives: its tensors are kept. A status. */
DDP_API int ddp__capture_begin(int i);
/* [OUT] *out, or NULL with a status when something in between may not be recorded. */
DDP_API int ddp__capture_end(int i, ddp_capture **out);
/* Queues all of it on the compute stream. A status. */
DDP_API int ddp__capture_run(const ddp_capture *c);
DDP_API void ddp__capture_free(ddp_capture *c);

#endif
