/* cudart_memory.c -- allocations, copies and fills of cudart. */
#include "state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- allocations --------------------------------------------------------------------------------------------------- */
static cudaError_t alloc(void **out, size_t bytes, int device, const char *function, const void *caller) {
    if (!out) return leave(cudaErrorInvalidValue);
    *out = NULL;
    if (!bytes) return leave(cudaSuccess);
    *out = device_alloc(device, bytes, function, caller);
    ddp_double_log("%s %zu bytes on device %d: %s", function, bytes, device, *out ? "done" : "out of memory");
    return leave(*out ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaMalloc(void **out, size_t bytes) {
    cudaError_t e = enter("cudaMalloc");
    if (e) return e;
    if ((e = refuse_in_any_capture())) return leave(e);
    return alloc(out, bytes, current_device, "cudaMalloc", __builtin_return_address(0));
}

cudaError_t cudaFree(void *p) {
    cudaError_t e = enter("cudaFree");
    if (e) return e;
    if (!p) return leave(cudaSuccess);
    if ((e = refuse_in_any_capture())) return leave(e);
    int device = device_of_pointer(p);
    if (device < 0) return leave(cudaErrorInvalidValue);
    wait_device(device);
    device_free(p, "cudaFree");
    return leave(ddp_double_stuck(device));
}

cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream) {
    cudaError_t e = enter("cudaMallocAsync");
    if (e) return e;
    struct CUstream_st *s = stream_of(stream);
    if (!is_stream(s)) return leave(cudaErrorInvalidResourceHandle);
    if (s->capture) ddp_double_unsimulated("cudaMallocAsync in a capture");
    return alloc(out, bytes, s->device, "cudaMallocAsync", __builtin_return_address(0));
}

static void run_free(void *p) { device_free(p, "cudaFreeAsync"); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t stream) {
    cudaError_t e = enter("cudaFreeAsync");
    if (e) return e;
    struct CUstream_st *s = stream_of(stream);
    if (!is_stream(s)) return leave(cudaErrorInvalidResourceHandle);
    if (s->capture) ddp_double_unsimulated("cudaFreeAsync in a capture");
    if (device_of_pointer(p) < 0) return leave(cudaErrorInvalidValue);
    if (config.mode == DRY) device_free(p, "cudaFreeAsync");
    else ddp_double_enqueue(stream, run_free, NULL, p, "cudaFreeAsync");
    return leave(cudaSuccess);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    cudaError_t e = enter("cudaMemGetInfo");
    if (e) return e;
    if (free_bytes) *free_bytes = config.memory - device_used(current_device);
    if (total) *total = config.memory;
    return leave(cudaSuccess);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *p) {
    cudaError_t e = enter("cudaPointerGetAttributes");
    if (e) return e;
    if (!out) return leave(cudaErrorInvalidValue);
    char *at;
    void *host;
    size_t bytes;
    memset(out, 0, sizeof *out);
    out->type = cudaMemoryTypeUnregistered;
    out->device = -2; /* cudaInvalidDeviceId */
    if (find_allocation(p, &at, &bytes)) {
        out->type = cudaMemoryTypeDevice;
        out->device = device_of_pointer(p);
        out->devicePointer = (void *)p;
    } else if (pinned_find(p, &host, &bytes)) {
        out->type = cudaMemoryTypeHost;
        out->device = current_device;
        out->devicePointer = out->hostPointer = (void *)p;
    } else {
        out->hostPointer = (void *)p;
    }
    return leave(cudaSuccess);
}

/* ---- copies -------------------------------------------------------------------------------------------------------- */
typedef struct copy {
    char *to, *from, *staged; /* staged: what pageable memory held at the call */
    size_t width, rows, to_pitch, from_pitch;
    bool guard_to, guard_from; /* pinned: nobody else may write it until the copy is done */
    uint64_t hash_to, hash_from;
    int number;
    struct copy *next; /* of those in flight */
} copy;
static copy *in_flight;

static size_t extent(size_t pitch, const copy *c) { return c->rows ? (c->rows - 1) * pitch + c->width : 0; }
static bool overlap(const char *a, size_t n, const char *b, size_t m) { return a < b + m && b < a + n; }

static uint64_t hash(const char *p, size_t n) {
    uint64_t h = n;
    for (; n >= 8; p += 8, n -= 8) {
        uint64_t w;
        memcpy(&w, p, 8);
        h = (h ^ w) * 0x9E3779B97F4A7C15u;
        h ^= h >> 29;
    }
    while (n--) h = (h ^ (unsigned char)*p++) * 0x100000001B3u;
    return h;
}

static void hash_guards(copy *c) {
    if (c->guard_to) c->hash_to = hash(c->to, extent(c->to_pitch, c));
    if (c->guard_from) c->hash_from = hash(c->from, extent(c->from_pitch, c));
}

static void check_guards(const copy *c) {
    if (c->guard_from && c->hash_from != hash(c->from, extent(c->from_pitch, c)))
        ddp_double_die("pinned memory at %p, %zu bytes, was written while copy %d from it was in flight",
                       (void *)c->from, extent(c->from_pitch, c), c->number);
    if (c->guard_to && c->hash_to != hash(c->to, extent(c->to_pitch, c)))
        ddp_double_die("pinned memory at %p, %zu bytes, was written while copy %d into it was in flight", (void *)c->to,
                       extent(c->to_pitch, c), c->number);
}

/* This copy wrote host memory: copies that come later in the queues see what it left. */
static void renew_guards(const copy *done) {
    for (copy *c = in_flight; c; c = c->next) {
        bool touched = overlap(done->to, extent(done->to_pitch, done), c->to, extent(c->to_pitch, c)) ||
                       overlap(done->to, extent(done->to_pitch, done), c->from, extent(c->from_pitch, c));
        if (c != done && touched) hash_guards(c);
    }
}

static void forget(copy *c) {
    for (copy **p = &in_flight; *p; p = &(*p)->next)
        if (*p == c) {
            *p = c->next;
            return;
        }
}

static void run_copy(void *ctx) {
    copy *c = ctx;
    const char *from = c->staged ? c->staged : c->from;
    check_guards(c);
    for (size_t r = 0; r < c->rows; r++) memmove(c->to + r * c->to_pitch, from + r * c->from_pitch, c->width);
    forget(c);
    if (!ddp_double_is_device(c->to)) renew_guards(c);
    c->guard_to = c->guard_from = false; /* a graph copies again, and makes no promise about host memory */
}
static void drop_copy(void *ctx) {
    copy *c = ctx;
    forget(c);
    free(c->staged);
    free(c);
}

static bool is_pinned(const void *p) {
    void *at;
    size_t n;
    return pinned_find(p, &at, &n);
}

/* What the host reads before the copy into it is done is NaN, unless a copy in flight needs what is there. */
static void spoil_target(const copy *c) {
    for (const copy *q = in_flight; q; q = q->next)
        if (overlap(c->to, extent(c->to_pitch, c), q->to, extent(q->to_pitch, q)) ||
            overlap(c->to, extent(c->to_pitch, c), q->from, extent(q->from_pitch, q)))
            return;
    for (size_t r = 0; r < c->rows; r++) memset(c->to + r * c->to_pitch, 0xFF, c->width);
}

static void guard(copy *c, bool to_device, bool from_device) {
    if (config.mode == DRY || config.mode == EAGER) return;
    c->guard_to = !to_device;
    c->guard_from = !from_device && !c->staged;
    if (c->guard_to) spoil_target(c);
    hash_guards(c);
    c->next = in_flight;
    in_flight = c;
}

static bool kind_fits(enum cudaMemcpyKind kind, bool to_device, bool from_device) {
    switch (kind) {
        case cudaMemcpyHostToHost: return !to_device && !from_device;
        case cudaMemcpyHostToDevice: return to_device && !from_device;
        case cudaMemcpyDeviceToHost: return !to_device && from_device;
        case cudaMemcpyDeviceToDevice: return to_device && from_device;
        case cudaMemcpyDefault: return true;
    }
    return false;
}

static bool stream_is_done(void *s) { return run_until(s, NULL); }

/* Under the lock; `wait`: until it is done. Host memory that is not pinned is read at the call, and written before it returns. */
static cudaError_t start_copy(const char *function, const copy *what, enum cudaMemcpyKind kind, cudaStream_t stream,
                              bool wait) {
    static int number;
    char text[100];
    struct CUstream_st *s = stream_of(stream);
    if (!is_stream(s)) return leave(cudaErrorInvalidResourceHandle);
    if (!what->width || !what->rows) return leave(cudaSuccess);
    bool to_device = ddp_double_is_device(what->to), from_device = ddp_double_is_device(what->from);
    if (!what->to || !what->from || !kind_fits(kind, to_device, from_device)) return leave(cudaErrorInvalidValue);
    snprintf(text, sizeof text, "%s: target", function);
    if (to_device) ddp_double_check_range(what->to, extent(what->to_pitch, what), text);
    snprintf(text, sizeof text, "%s: source", function);
    if (from_device) ddp_double_check_range(what->from, extent(what->from_pitch, what), text);
    bool pageable_to = !to_device && !is_pinned(what->to), pageable_from = !from_device && !is_pinned(what->from);
    if (s->capture && (pageable_to || pageable_from || wait)) return leave(refuse_in_capture(s));
    copy *c = malloc(sizeof *c);
    *c = *what;
    c->number = ++number;
    if (pageable_from) {
        c->staged = malloc(extent(c->from_pitch, c));
        memcpy(c->staged, c->from, extent(c->from_pitch, c));
    }
    if (!pageable_to && !wait && !s->capture) guard(c, to_device, from_device);
    ddp_double_log("%s %s to %s %zu bytes, stream %d", function, from_device ? "device" : "host",
                   to_device ? "device" : "host", c->width * c->rows, s->id);
    ddp_double_enqueue(stream, run_copy, drop_copy, c, function);
    if (wait || pageable_to) wait_until(stream_is_done, s);
    return leave(wait || pageable_to ? ddp_double_stuck(s->device) : cudaSuccess);
}

static copy flat(void *to, const void *from, size_t bytes) {
    return (copy){.to = to, .from = (char *)from, .width = bytes, .rows = 1, .to_pitch = bytes, .from_pitch = bytes};
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    cudaError_t e = enter("cudaMemcpyAsync");
    copy c = flat(to, from, bytes);
    return e ? e : start_copy("cudaMemcpyAsync", &c, kind, stream, false);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    cudaError_t e = enter("cudaMemcpy");
    copy c = flat(to, from, bytes);
    return e ? e : start_copy("cudaMemcpy", &c, kind, NULL, true);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                cudaStream_t stream) {
    cudaError_t e = enter("cudaMemcpyPeerAsync");
    if (e) return e;
    copy c = flat(to, from, bytes);
    if (device_of_pointer(to) != to_device || device_of_pointer(from) != from_device)
        return leave(cudaErrorInvalidValue);
    return start_copy("cudaMemcpyPeerAsync", &c, cudaMemcpyDeviceToDevice, stream, false);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t rows,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
    cudaError_t e = enter("cudaMemcpy2DAsync");
    if (e) return e;
    if (width > to_pitch || width > from_pitch) return leave(cudaErrorInvalidPitchValue);
    copy c = {
        .to = to, .from = (char *)from, .width = width, .rows = rows, .to_pitch = to_pitch, .from_pitch = from_pitch};
    return start_copy("cudaMemcpy2DAsync", &c, kind, stream, false);
}

/* ---- fills --------------------------------------------------------------------------------------------------------- */
typedef struct fill {
    char *to;
    int value;
    size_t width, rows, pitch;
} fill;
static void run_fill(void *ctx) {
    fill *f = ctx;
    for (size_t r = 0; r < f->rows; r++) memset(f->to + r * f->pitch, f->value, f->width);
}
static cudaError_t start_fill(const char *function, fill what, cudaStream_t stream) {
    struct CUstream_st *s = stream_of(stream);
    if (!is_stream(s)) return leave(cudaErrorInvalidResourceHandle);
    if (!what.width || !what.rows) return leave(cudaSuccess);
    if (ddp_double_is_device(what.to))
        ddp_double_check_range(what.to, (what.rows - 1) * what.pitch + what.width, function);
    else if (!is_pinned(what.to)) return leave(cudaErrorInvalidValue);
    fill *f = malloc(sizeof *f);
    *f = what;
    ddp_double_log("%s %zu bytes, stream %d", function, what.width * what.rows, s->id);
    ddp_double_enqueue(stream, run_fill, free, f, function);
    return leave(cudaSuccess);
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    cudaError_t e = enter("cudaMemsetAsync");
    return e ? e : start_fill("cudaMemsetAsync", (fill){to, value, bytes, 1, bytes}, stream);
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    cudaError_t e = enter("cudaMemset");
    return e ? e : start_fill("cudaMemset", (fill){to, value, bytes, 1, bytes}, NULL);
}
cudaError_t cudaMemset2DAsync(void *to, size_t pitch, int value, size_t width, size_t rows, cudaStream_t stream) {
    cudaError_t e = enter("cudaMemset2DAsync");
    return e ? e : start_fill("cudaMemset2DAsync", (fill){to, value, width, rows, pitch}, stream);
}
