/* device.h -- kinds of devices beside the CPU. The core knows this table alone; a plug-in (libddp_cuda.so, loaded when a device
 * of its kind is first asked for) fills it. Device 0 is the CPU, 1 + i is GPU i.
 *
 * Work on a device is queued on its compute stream, in the order of the calls; nothing here waits for the device but what
 * says so. Functions set the error and return its status. Any thread, unless said otherwise. */
#ifndef DDP_DEVICE_H
#define DDP_DEVICE_H

#include "../base/base.h"

struct ddp_kernel_list; /* op/op.h */
struct ddp_call;        /* op/op.h */
struct ddp_tensor;      /* tensor/tensor.h */
struct ddp_device_coll; /* comm/device_coll.h */

typedef struct ddp_device_type {
    unsigned size; /* sizeof(ddp_device_type): both sides agree */
    const char *name;
    int count;                                  /* devices, at least 1 */
    const struct ddp_kernel_list *const *lists; /* in order of preference, NULL at the end */

    /* Bytes for work on the compute stream, 256-byte aligned; NULL with the error set. release may come while work on them is
     * still queued: they are given out again only to work that is queued behind it. */
    void *(*alloc)(int i, size_t bytes);
    void (*release)(int i, void *p, size_t bytes);
    /* dst and src on device i or in host memory, dst_device and src_device say which (0: host). A copy out of host memory has read
     * it when this returns; a copy into host memory has arrived when this returns. */
    int (*copy)(void *dst, int dst_device, const void *src, int src_device, size_t bytes);
    int (*zero)(int i, void *p, size_t bytes);
    /* Waits for all that is queued on device i. Failures of work queued earlier come out here, with the op's name. */
    int (*wait)(int i);

    /* Pinned host memory for copies to device i, which may read it while the host goes on. host_release may come at any time, also
     * before they have. Page-aligned; NULL with the error set. */
    void *(*host_alloc)(int i, size_t bytes);
    void (*host_release)(void *p);
    /* Pinned host memory to device i, queued on the compute stream: src must stay as it is until then. */
    int (*copy_later)(int i, void *dst, const void *src, size_t bytes);
    /* The same on the copy stream: behind what the compute stream has queued by now, and beside what it queues later. Whoever uses dst
     * (the start of an alloc) calls copies_join first, from when on the compute stream waits for all such copies. dst may be
     * released at any time. */
    int (*copy_ahead)(int i, void *dst, const void *src, size_t bytes);
    int (*copies_join)(int i);

    void (*stats)(int i, ddp_memory *out);
    void (*reset_peak)(int i);
    void (*empty_cache)(int i);
    int64_t (*memory)(int i); /* bytes that the device has */
    /* NaN and infinities among the elements of t, which is floating and was made by or given to c. Waits for the device. */
    int (*count_bad)(const struct ddp_call *c, const struct ddp_tensor *t, int64_t count[2]);
    /* What GPU i is, in words ("NVIDIA H200, 141 GB, driver 580.65, CUDA 13.0"); returns text. */
    const char *(*describe)(int i, char *text, size_t n);
    /* Library k of the vendor's, from 0: 1 and its version in text, 0 and why it is not there; -1 past the last. open: it is opened when it
     * was not yet; else that counts as not there, with no text. Sets no error. */
    int (*vendor_library)(int k, bool open, const char **name, char *text, size_t n);
    bool (*peer)(int i, int j); /* GPU i can read GPU j's memory without the host */
    /* 16 bytes that no other GPU has; a status. */
    int (*uuid)(int i, unsigned char uuid[16]);
    /* From now on every wait for GPU i fails with this: what is queued there can give no right result. text is copied. */
    void (*poison)(int i, int status, const char *text);
    const struct ddp_device_coll *coll; /* what carries collectives between GPUs */
} ddp_device_type;

/* What a plug-in exports as ddp_plugin_device: the table, or NULL with a reason in why. `code`: 0, or the runtime's status. */
typedef const ddp_device_type *(*ddp_plugin_device_fn)(char *why, size_t n, int *code);

/* The table of a device (not the CPU), loading the plug-in; NULL with DDP_EDEVICE set and a sentence with cause and remedy, which
 * begins with `what`. */
DDP_LOCAL const ddp_device_type *ddp__device(int device, const char *what);
/* The same for a device of which a tensor exists: never NULL, never fails. */
DDP_API const ddp_device_type *ddp__device_of(int device);
/* Set: this thread's copies from pinned memory to a device do not wait (ddp_to_device_later). */
DDP_LOCAL extern _Thread_local bool ddp__copies_later;
/* GPUs that this process can use, 0 when there are none; why not, when asked for. DDP_DEVICE=cpu: 0. */
DDP_API int ddp__gpus(char *why, size_t n);

#endif
