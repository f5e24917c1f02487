/* device_coll.h -- what carries collectives between GPUs: a table that the plug-in fills (NCCL). It moves bytes in streams and
 * never blocks the host; ranks meet, are compared and are missed by the engine around it (gpu.c). */
#ifndef DDP_DEVICE_COLL_H
#define DDP_DEVICE_COLL_H

#include "engine.h"

enum { DDP_DEVICE_ID = 128 }; /* bytes by which ranks find one another */

typedef struct ddp_device_coll {
    const char *name;
    int (*make_id)(unsigned char id[DDP_DEVICE_ID]);
    /* Joins `size` ranks that have the id, this one with GPU gpu. Gives up after timeout seconds: DDP_ETIMEOUT. Then all together reduce a
     * small known vector, whose result is compared: DDP_ESTATE with what to try where it is wrong. */
    int (*join)(int gpu, int rank, int size, const unsigned char id[DDP_DEVICE_ID], double timeout, void **comm);
    /* Queues c behind what the compute stream has by now; beside what it gets later. With DDP_MEAN of floats the result is the sum over ranks of
     * weight_r * x_r / size. A weight of 0 contributes nothing, whatever lies in buf. */
    int (*post)(void *comm, const ddp_coll *c, void **ticket);
    int (*done)(const void *ticket); /* 1: it has ended on the GPU, 0: not yet; an error is told by health */
    /* What the compute stream gets from now on comes after it. Its result is multiplied by factor there, unless that is 1. */
    int (*after)(void *comm, const ddp_coll *c, void *ticket, double factor);
    void (*ticket_free)(void *comm, void *ticket);
    /* NULL, or what the communicator has run into since, in a sentence. Any thread. */
    const char *(*health)(void *comm, char *why, size_t n);
    void (*abort)(void *comm); /* any thread, once; may hang itself */
    void (*leave)(void *comm, int graceful);
    int (*alloc)(void *comm, int gpu, size_t bytes,
                 void **out); /* registered with the communicator where it can be; zeroed */
    void (*dealloc)(void *comm, int gpu, void *p, size_t bytes);
} ddp_device_coll;

#endif
