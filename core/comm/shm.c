/* shm.c -- the shared-memory engine: joining, bucket memory, the vtable. Segments are memfds, opened by the other ranks
 * through /proc: they have no name that could be left behind, whichever way a rank dies. */
#include "shm.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- segments ---- */

static void *map_fd(int fd, size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) {
        ddp__fail(DDP_ENOMEM, "shm: no memory for a segment of %zu bytes", bytes);
        return NULL;
    }
    madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

/* Rank 0 makes a segment and tells the others where under `key`; all map it. */
static void *shared_segment(ddp_store *store, const char *key, int rank, size_t bytes, double timeout) {
    char where[64], path[96];
    void *p = NULL;
    int fd;
    if (rank == 0) {
        fd = memfd_create("ddp", MFD_CLOEXEC);
        if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0) {
            ddp__fail(DDP_ENOMEM, "shm: no segment of %zu bytes", bytes);
            goto done;
        }
        p = map_fd(fd, bytes);
        snprintf(where, sizeof where, "%d %d", (int)getpid(), fd);
        if (p && ddp__store_set(store, key, where, strlen(where) + 1) < 0) p = NULL;
        return p; /* fd stays open: the others open it through this process, whenever they come */
    }
    void *value = NULL;
    size_t n;
    if (ddp__store_get(store, key, ddp__now() + timeout, &value, &n) < 0) return NULL;
    int pid = 0, their_fd = -1;
    sscanf(value, "%d %d", &pid, &their_fd);
    free(value);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, their_fd);
    fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        ddp__fail(DDP_EIO, "shm: rank %d cannot open rank 0's segment through %s", rank, path);
        return NULL;
    }
    p = map_fd(fd, bytes);
done:
    if (fd >= 0) close(fd);
    return p;
}

/* ---- joining ---- */

/* Every rank says that it is here and what world it thinks it is in; then all look at all. */
static int roll_call(const ddp_boot *b) {
    char key[128], mine[64];
    int64_t times;
    snprintf(key, sizeof key, "%s/count/%d", b->prefix, b->rank);
    if (ddp__store_add(b->store, key, 1, &times) < 0) return ddp__pending();
    if (times > 1) return ddp__fail(DDP_EMISMATCH, "init: two processes say they are rank %d", b->rank);
    snprintf(key, sizeof key, "%s/rank/%d", b->prefix, b->rank);
    snprintf(mine, sizeof mine, "%d", b->size);
    if (ddp__store_set(b->store, key, mine, strlen(mine) + 1) < 0) return ddp__pending();
    double deadline = ddp__now() + b->timeout;
    char missing[256] = "";
    size_t at = 0;
    int n = 0;
    for (int r = 0; r < b->size; r++) {
        void *value = NULL;
        size_t len;
        snprintf(key, sizeof key, "%s/rank/%d", b->prefix, r);
        if (ddp__store_get(b->store, key, n ? ddp__now() : deadline, &value, &len) < 0) {
            if (ddp__pending() != DDP_ETIMEOUT) return ddp__pending();
            ddp_error_take(NULL);
            if (at < sizeof missing)
                at += (size_t)snprintf(missing + at, sizeof missing - at, "%s%d", n ? ", " : "", r);
            n++;
            continue;
        }
        int theirs = atoi(value);
        free(value);
        if (theirs != b->size)
            return ddp__fail(DDP_EMISMATCH, "init: rank %d is in a world of %d, rank %d in one of %d", r, theirs,
                             b->rank, b->size);
    }
    if (n)
        return ddp__fail(DDP_ETIMEOUT, "init: missing: rank%s %s of %d, after %.1f s", n == 1 ? "" : "s", missing,
                         b->size, b->timeout);
    return 0;
}

static double delay_from_env(void) {
    const char *f = getenv("DDP_FAULT");
    return f && strncmp(f, "delay:", 6) == 0 ? atof(f + 6) * 1e-3 : 0;
}

static int shm_init(ddp_comm **out, const ddp_boot *b) {
    if (b->size > SHM_MAX_RANKS)
        return ddp__fail(DDP_EINVAL, "shm: %d ranks on one host, at most %d", b->size, SHM_MAX_RANKS);
    if (b->local_size != b->size)
        return ddp__fail(DDP_ENOSUP, "shm: %d of %d ranks are on this host; several hosts are not built yet",
                         b->local_size, b->size);
    int st = roll_call(b);
    if (st < 0) return st;
    ddp_comm *c = calloc(1, sizeof *c);
    if (!c) return ddp__fail(DDP_ENOMEM, "shm: out of memory");
    c->rank = b->rank;
    c->size = b->size;
    c->timeout = b->timeout;
    c->store = b->store;
    c->spin = b->cores >= b->local_size
                  ? 4000
                  : 0; /* about 50 us; with fewer cores than ranks a spinner keeps its peer from running */
    c->delay = delay_from_env();
    snprintf(c->prefix, sizeof c->prefix, "%s", b->prefix);
    size_t head = (sizeof(shm_control) + 4095) & ~(size_t)4095;
    c->ctl_bytes = head + (size_t)b->size * 2 * SHM_CHUNK;
    char key[128];
    snprintf(key, sizeof key, "%s/control", b->prefix);
    c->ctl = shared_segment(b->store, key, b->rank, c->ctl_bytes, b->timeout);
    if (!c->ctl) {
        st = ddp__pending();
        free(c);
        return st;
    }
    c->slots = (char *)c->ctl + head;
    atomic_store(&c->ctl->rank[c->rank].pid, (int)getpid());
    *out = c;
    return 0;
}

static void shm_destroy(ddp_comm *c, int graceful) {
    if (!c) return;
    if (graceful) {
        atomic_store(&c->ctl->rank[c->rank].left, 1);
        for (int r = 0; r < c->size; r++) /* one that waits for us must look */
            if (r != c->rank) atomic_fetch_add(&c->ctl->rank[r].bell, 1);
        shm_ring(c);
    }
    while (c->head) {
        ddp_req *r = c->head;
        c->head = r->next;
        free(r);
    }
    /* Bucket segments stay mapped until the process ends: gradients that a script still holds are views into them. */
    munmap(c->ctl, c->ctl_bytes);
    free(c);
}

/* ---- bucket memory ---- */

static int shm_alloc(ddp_comm *c, size_t bytes, void **out) {
    int st = shm_health(c);
    if (st < 0) return st;
    if (c->n_segments == SHM_MAX_SEGMENTS)
        return ddp__fail(DDP_ENOMEM, "shm: %d segments, the most there are", SHM_MAX_SEGMENTS);
    shm_segment g = {.part = (bytes + 4095) & ~(size_t)4095};
    char key[128];
    snprintf(key, sizeof key, "%s/segment/%d", c->prefix, c->n_segments);
    g.base = shared_segment(c->store, key, c->rank, g.part * (size_t)c->size, c->timeout);
    if (!g.base) return ddp__pending();
    c->segments[c->n_segments++] = g;
    *out = g.base + g.part * (size_t)c->rank;
    return 0;
}

static void shm_dealloc(ddp_comm *c, void *p) {
    for (int s = 0; s < c->n_segments; s++) {
        shm_segment *g = &c->segments[s];
        if (!g->base || g->base + g->part * (size_t)c->rank != (char *)p) continue;
        munmap(g->base, g->part * (size_t)c->size);
        g->base = NULL;
    }
}

/* ---- requests ---- */

static int shm_post(ddp_comm *c, const ddp_coll *coll, ddp_req **out) {
    int st = shm_health(c);
    if (st < 0) return st;
    ddp_req *r = calloc(1, sizeof *r);
    if (!r) return ddp__fail(DDP_ENOMEM, "shm: out of memory");
    r->comm = c;
    r->coll = *coll;
    r->seq = ++c->next_seq;
    if (c->tail) c->tail->next = r;
    else c->head = r;
    c->tail = r;
    st = shm_progress(c);
    if (st < 0) return st;
    *out = r;
    return 0;
}

static int shm_test(ddp_req *r) {
    int st = shm_progress(r->comm);
    if (st == 0) st = shm_health(r->comm);
    return st < 0 ? st : r->state == SHM_DONE && r->comm->head != r;
}

static double shm_weight_sum(const ddp_req *r) { return r->weight_sum; }

static void shm_req_free(ddp_req *r) {
    if (!r) return;
    ddp_comm *c = r->comm;
    for (ddp_req **p = &c->head; *p; p = &(*p)->next) { /* after an error it is still on the list */
        if (*p != r) continue;
        *p = r->next;
        break;
    }
    c->tail = c->head;
    while (c->tail && c->tail->next) c->tail = c->tail->next;
    free(r);
}

const ddp_engine ddp__engine_shm = {
    .size = sizeof(ddp_engine),
    .name = "shm",
    .caps = DDP_CAP_HOST | DDP_CAP_ABORTABLE | DDP_CAP_ALLOCATES | DDP_CAP_WEIGHTED,
    .init = shm_init,
    .alloc = shm_alloc,
    .dealloc = shm_dealloc,
    .post = shm_post,
    .test = shm_test,
    .wait = shm_wait,
    .weight_sum = shm_weight_sum,
    .req_free = shm_req_free,
    .health = shm_health,
    .abort = shm_abort,
    .destroy = shm_destroy,
};
