/* pinned.c -- page-locked host memory: what cudaMallocHost gave and cudaHostRegister was told of. */
#include "state.h"

#include <stdlib.h>
#include <string.h>

enum { NEW_BYTE = 0xFF };
typedef struct pinned {
    char *at;
    size_t bytes;
    bool registered;
    struct pinned *next;
} pinned;
static pinned *list;

bool pinned_find(const void *p, void **at, size_t *bytes) {
    for (const pinned *q = list; q; q = q->next)
        if ((const char *)p >= q->at && (const char *)p < q->at + q->bytes) {
            *at = q->at;
            *bytes = q->bytes;
            return true;
        }
    return false;
}

int pinned_left(size_t *bytes) {
    int n = 0;
    *bytes = 0;
    for (const pinned *q = list; q; q = q->next) n++, *bytes += q->bytes;
    return n;
}

static void add(void *at, size_t bytes, bool registered) {
    pinned *q = malloc(sizeof *q);
    *q = (pinned){at, bytes, registered, list};
    list = q;
}

static cudaError_t alloc(void **out, size_t bytes) {
    if (!out) return leave(cudaErrorInvalidValue);
    *out = NULL;
    if (!bytes) return leave(cudaSuccess);
    void *at = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!at) return leave(cudaErrorMemoryAllocation);
    memset(at, NEW_BYTE, bytes);
    add(at, bytes, false);
    *out = at;
    return leave(cudaSuccess);
}
cudaError_t cudaMallocHost(void **out, size_t bytes) {
    cudaError_t e = enter("cudaMallocHost");
    return e ? e : alloc(out, bytes);
}
cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
    cudaError_t e = enter("cudaHostAlloc");
    if (e) return e;
    if (flags & ~(unsigned)(cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined))
        return leave(cudaErrorInvalidValue);
    return alloc(out, bytes);
}

/* Takes the entry that begins at p out of the list; the caller frees it. */
static pinned *take(const void *p) {
    for (pinned **q = &list; *q; q = &(*q)->next)
        if ((*q)->at == p) {
            pinned *found = *q;
            *q = found->next;
            return found;
        }
    return NULL;
}

/* Waits for the device, as the real one does. */
cudaError_t cudaFreeHost(void *p) {
    cudaError_t e = enter("cudaFreeHost");
    if (e) return e;
    if (!p) return leave(cudaSuccess);
    if ((e = refuse_in_any_capture())) return leave(e);
    for (int i = 0; i < config.devices; i++) wait_device(i);
    pinned *q = take(p);
    if (!q || q->registered)
        ddp_double_die("cudaFreeHost of %p, which cudaMallocHost did not give or which was freed before", p);
    free(q->at);
    free(q);
    return leave(cudaSuccess);
}

cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned flags) {
    cudaError_t e = enter("cudaHostRegister");
    if (e) return e;
    void *at;
    size_t n;
    if (!p || !bytes || (flags & cudaHostRegisterIoMemory)) return leave(cudaErrorInvalidValue);
    if (pinned_find(p, &at, &n) || pinned_find((char *)p + bytes - 1, &at, &n))
        return leave(cudaErrorHostMemoryAlreadyRegistered);
    add(p, bytes, true);
    return leave(cudaSuccess);
}
cudaError_t cudaHostUnregister(void *p) {
    cudaError_t e = enter("cudaHostUnregister");
    if (e) return e;
    for (int i = 0; i < config.devices; i++) wait_device(i);
    pinned *q = take(p);
    if (!q) return leave(cudaErrorHostMemoryNotRegistered);
    free(q);
    return leave(cudaSuccess);
}
cudaError_t cudaHostGetDevicePointer(void **out, void *p, unsigned flags) {
    cudaError_t e = enter("cudaHostGetDevicePointer");
    if (e) return e;
    void *at;
    size_t n;
    if (!out || flags || !pinned_find(p, &at, &n)) return leave(cudaErrorInvalidValue);
    *out = p;
    return leave(cudaSuccess);
}
