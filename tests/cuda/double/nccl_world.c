/* nccl_world.c -- how ranks meet. */
#include "nccl_world.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

/* What a unique id says: whose file it is. */
typedef struct address {
    char magic[16];
    int32_t pid, file;
    uint64_t nonce;
} address;
static const char magic[16] = "ddp nccl double";
static char last_error[500];

void set_last_error(const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(last_error, sizeof last_error, format, list);
    va_end(list);
}
const char *ncclGetLastError(ncclComm_t comm) {
    (void)comm;
    return last_error;
}

ncclResult_t world_name(ncclUniqueId *id) {
    address a = {.pid = (int32_t)getpid()};
    memcpy(a.magic, magic, sizeof magic);
    a.file = memfd_create("ddp-nccl-double", MFD_CLOEXEC);
    if (a.file < 0 || ftruncate(a.file, sizeof(world)) || getrandom(&a.nonce, sizeof a.nonce, 0) != sizeof a.nonce ||
        pwrite(a.file, &a.nonce, sizeof a.nonce, offsetof(world, nonce)) != sizeof a.nonce) {
        set_last_error("the double cannot make its memory file");
        return ncclSystemError;
    }
    memset(id, 0, sizeof *id);
    memcpy(id->internal, &a, sizeof a);
    return ncclSuccess;
}

static world *open_world(const address *a) {
    char path[100];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", a->pid, a->file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return NULL;
    world *w = mmap(NULL, sizeof *w, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (w == MAP_FAILED) return NULL;
    if (w->nonce == a->nonce) return w;
    munmap(w, sizeof *w);
    return NULL;
}

static ncclResult_t take_seat(world *w, int ranks, int rank, int device) {
    uint32_t nobody = 0;
    int free_seat = 0;
    struct cudaDeviceProp p;
    if (!atomic_compare_exchange_strong(&w->ranks, &nobody, (uint32_t)ranks) && nobody != (uint32_t)ranks) {
        set_last_error("rank %d says %d ranks, another said %u", rank, ranks, nobody);
        return ncclInvalidUsage;
    }
    if (!atomic_compare_exchange_strong(&w->rank[rank].pid, &free_seat, (int)getpid())) {
        set_last_error("two ranks say that they are rank %d", rank);
        return ncclInvalidUsage;
    }
    if (cudaGetDeviceProperties(&p, device)) return ncclUnhandledCudaError;
    ddp_double_uuid(device, w->rank[rank].uuid);
    w->rank[rank].bus = p.pciBusID;
    atomic_fetch_add(&w->joined, 1);
    return ncclSuccess;
}

ncclResult_t world_join(const ncclUniqueId *id, int ranks, int rank, int device, world **out) {
    address a;
    memcpy(&a, id->internal, sizeof a);
    if (memcmp(a.magic, magic, sizeof magic)) {
        set_last_error("this is no unique id");
        return ncclInvalidArgument;
    }
    if (ranks > MOST_RANKS) ddp_double_unsimulated("NCCL with more than 16 ranks");
    *out = open_world(&a);
    if (!*out) {
        set_last_error("the process that made the unique id is gone");
        return ncclRemoteError;
    }
    ncclResult_t status = take_seat(*out, ranks, rank, device);
    if (status) {
        world_leave(*out);
        *out = NULL;
    }
    return status;
}

bool world_is_complete(const world *w) { return atomic_load(&w->joined) == atomic_load(&w->ranks); }

ncclResult_t world_check(const world *w) {
    int n = (int)atomic_load(&w->ranks);
    for (int a = 0; a < n; a++)
        for (int b = a + 1; b < n; b++)
            if (!memcmp(w->rank[a].uuid, w->rank[b].uuid, 16)) {
                set_last_error("Duplicate GPU detected : rank %d and rank %d both on CUDA device %lx", a, b,
                               (long)w->rank[a].bus << 12);
                return ncclInvalidUsage;
            }
    return ncclSuccess;
}

void world_leave(world *w) {
    if (w) munmap(w, sizeof *w);
}
