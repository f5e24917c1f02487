/* queue.h -- an engine over something that blocks: requests wait in a queue, one thread runs them in the order they were
 * posted. Deadlines, the first error and the news of how others ended are the queue's; the work is a ddp_queue_ops. */
#ifndef DDP_QUEUE_H
#define DDP_QUEUE_H

#include "engine.h"

/* All but stop and missing are called on the queue's thread; errors are set there (ddp__fail). */
typedef struct ddp_queue_ops {
    int (*join)(void **self, const ddp_boot *b, const void *with); /* self: one block of malloc */
    /* One collective, from its signature to its end, the seq-th for errors; fills weight_sum. Status DDP_EPEER: a peer is lost; the text says
     * which, and the queue asks the store why. */
    int (*run)(void *self, ddp_coll *c, uint32_t seq);
    void (*leave)(void *self, int graceful); /* self itself is freed by the queue */
    /* From any thread: run comes back soon, if it can at all. */
    void (*stop)(void *self, const char *why);
    /* From any thread: the ranks that have not come to the collective that runs, "1, 3"; their number. NULL: run itself
     * sees ddp_coll.late and ends with the error that names them. */
    int (*missing)(void *self, char *who, size_t n);
    /* Bucket memory; NULL: the queue's own. On the caller's thread, while nothing runs. */
    int (*alloc)(void *self, size_t bytes, void **out);
    void (*dealloc)(void *self, void *p);
} ddp_queue_ops;

/* Makes the communicator: roll call, then ops->join on the new thread, `with` handed on. Collective; obeys the timeout. */
DDP_LOCAL int ddp__queue_init(ddp_comm **out, const ddp_boot *b, const char *name, const ddp_queue_ops *ops,
                              const void *with);
/* An engine of this name whose functions are the queue's; init is the caller's, and calls ddp__queue_init. */
DDP_API void ddp__queue_engine(ddp_engine *e, const char *name, int (*init)(ddp_comm **, const ddp_boot *));

#endif
