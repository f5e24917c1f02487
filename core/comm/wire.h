/* wire.h -- an engine over a library of which one thing is asked: that it carries bytes between ranks. What a collective
 * is, adding up, weights, dtypes and the comparison of calls are wire.c's, so they are the same over every library. */
#ifndef DDP_WIRE_H
#define DDP_WIRE_H

#include "queue.h"

typedef struct ddp_part {
    int rank; /* whom it goes to or comes from */
    void *p;
    size_t n; /* bytes; 0: nothing is sent */
} ddp_part;

/* Parts between the same two ranks are matched in their order. All functions but stop are called on one thread. */
typedef struct ddp_wire {
    const char *name;
    int (*join)(void **self, const ddp_boot *b); /* all ranks are there and call it; obeys b->timeout */
    /* Blocks until all of `out` may be written again and all of `in` has come. Every rank calls it. A status with the
     * error set; DDP_EPEER and *lost when the connection to a rank broke (-1: unknown). */
    int (*exchange)(void *self, const ddp_part *out, int n_out, const ddp_part *in, int n_in, int *lost);
    void (*stop)(void *self);                /* from any thread: exchange returns soon */
    void (*leave)(void *self, int graceful); /* frees self */
} ddp_wire;

/* An engine's init over `w`. */
DDP_API int ddp__wire_init(ddp_comm **out, const ddp_boot *b, const ddp_wire *w);
/* For join: the job's store under the engine's prefix. Statuses as those of store.h. */
DDP_API int ddp__wire_set(const ddp_boot *b, const char *key, const void *value, size_t n);
DDP_API int ddp__wire_get(const ddp_boot *b, const char *key, double deadline, void **value, size_t *n);
DDP_API int ddp__wire_add(const ddp_boot *b, const char *key, int64_t by, int64_t *value);
/* For a thread that join starts: a copy with a connection of its own, which stays to the end. */
DDP_API int ddp__wire_again(ddp_boot *copy, const ddp_boot *b);
/* For join: DDP_IFACE, or "" and the address of this host that the others reach, as a number. */
DDP_API void ddp__wire_address(const ddp_boot *b, char *iface, size_t iface_n, char *address, size_t address_n);

#endif
