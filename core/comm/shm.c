/* shm.c -- the shared-memory engine: joining, bucket memory, the vtable. Segments are memfds, opened by the other ranks
 * through /proc: they have no name that could be left behind, whichever way a rank dies. */
#include "shm.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
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

/* What a segment is made with. */
typedef struct making {
    ddp_store *store;
    const char *key;
    int rank, size;
    size_t bytes;
    double deadline;
    char name[48]; /* in /dev/shm; "" for a memfd */
} making;

static int say(making *m, const char *what, const char *value) {
    char key[160];
    snprintf(key, sizeof key, "%s/%s", m->key, what);
    return ddp__store_set(m->store, key, value, strlen(value) + 1);
}

/* Waits for what `rank` says. */
static int hear(making *m, const char *what, int rank, char *out, size_t n) {
    char key[160];
    void *value = NULL;
    size_t len = 0;
    snprintf(key, sizeof key, "%s/%s", m->key, what);
    if (ddp__store_get(m->store, key, m->deadline, &value, &len) < 0) {
        if (ddp__pending() != DDP_ETIMEOUT) return ddp__pending();
        ddp_error_take(NULL);
        return ddp__fail(DDP_ETIMEOUT, "shm: rank %d has not joined in making a segment; rank %d waits for it", rank,
                         m->rank);
    }
    snprintf(out, n, "%.*s", (int)len, (const char *)value);
    free(value);
    return 0;
}

/* Hears from all others under `what`/rank; *no counts those that say "no". */
static int hear_all(making *m, const char *what, int *no) {
    for (int r = 1; r < m->size; r++) {
        char key[32], answer[8];
        snprintf(key, sizeof key, "%s/%d", what, r);
        int st = hear(m, key, r, answer, sizeof answer);
        if (st < 0) return st;
        *no += strcmp(answer, "no") == 0;
    }
    return 0;
}

static int named_segment(making *m, int flags) {
    int fd = shm_open(m->name, O_RDWR | O_CLOEXEC | flags, 0600);
    if (fd >= 0 && (flags & O_CREAT) && ftruncate(fd, (off_t)m->bytes) != 0) {
        close(fd);
        shm_unlink(m->name);
        fd = -1;
    }
    if (fd < 0) ddp__fail(DDP_EIO, "shm: rank %d: no segment %s: %s", m->rank, m->name, strerror(errno));
    return fd;
}

/* Rank 0: a memfd that the others open through this process's descriptors; where the system forbids that to one of
 * them, a name, for the moment until all have opened it. Returns the descriptor or -1. */
static int make_segment(making *m) {
    char where[64];
    uint64_t number;
    int no = 0, fd = memfd_create("ddp", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)m->bytes) != 0) {
        ddp__fail(DDP_ENOMEM, "shm: no segment of %zu bytes", m->bytes);
        goto fail;
    }
    snprintf(where, sizeof where, "%d %d", (int)getpid(), fd);
    if (m->size == 1) return fd;
    if (say(m, "where", where) < 0 || hear_all(m, "opened", &no) < 0) goto fail;
    if (no) {
        close(fd);
        if (getrandom(&number, sizeof number, 0) != (ssize_t)sizeof number) number = (uint64_t)getpid();
        snprintf(m->name, sizeof m->name, "/ddp-%016llx", (unsigned long long)number);
        fd = named_segment(m, O_CREAT | O_EXCL);
        if (fd < 0) return -1;
    }
    int st = say(m, "name", m->name);
    if (no) {
        if (st == 0) st = hear_all(m, "opened-name", &no);
        shm_unlink(m->name);
    }
    if (st == 0) return fd;
fail:
    if (fd >= 0) close(fd);
    return -1;
}

static int open_segment(making *m) {
    char where[64], path[96], key[32];
    int pid = 0, theirs = -1;
    if (hear(m, "where", 0, where, sizeof where) < 0) return -1;
    sscanf(where, "%d %d", &pid, &theirs);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, theirs);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    snprintf(key, sizeof key, "opened/%d", m->rank);
    if (say(m, key, fd >= 0 ? "yes" : "no") < 0 || hear(m, "name", 0, m->name, sizeof m->name) < 0) goto fail;
    if (!m->name[0]) return fd;
    if (fd >= 0) close(fd);
    fd = named_segment(m, 0);
    snprintf(key, sizeof key, "opened-name/%d", m->rank);
    if (fd < 0 || say(m, key, "yes") == 0) return fd;
fail:
    if (fd >= 0) close(fd);
    return -1;
}

/* A segment that all ranks have mapped, or NULL. No descriptor stays open. */
static void *shared_segment(const ddp_comm *c, const char *key, size_t bytes) {
    making m = {.store = c->store,
                .key = key,
                .rank = c->rank,
                .size = c->size,
                .bytes = bytes,
                .deadline = ddp__now() + c->timeout};
    int fd = c->rank == 0 ? make_segment(&m) : open_segment(&m);
    if (fd < 0) return NULL;
    void *p = map_fd(fd, bytes);
    close(fd);
    return p;
}

/* ---- joining ---- */

static double delay_from_env(void) {
    const char *f = getenv("DDP_FAULT");
    return f && strncmp(f, "delay:", 6) == 0 ? atof(f + 6) * 1e-3 : 0;
}

static int shm_init(ddp_comm **out, const ddp_boot *b) {
    if (b->size > SHM_MAX_RANKS)
        return ddp__fail(DDP_EINVAL, "shm: %d ranks on one host, at most %d", b->size, SHM_MAX_RANKS);
    if (b->local_size != b->size)
        return ddp__fail(DDP_ENOSUP, "shm: %d of %d ranks are on this host; across hosts take --engine hier or gloo",
                         b->local_size, b->size);
    int st = ddp__roll_call(b);
    if (st < 0) return st;
    ddp_comm *c = calloc(1, sizeof *c);
    if (!c) return ddp__fail(DDP_ENOMEM, "shm: out of memory");
    pthread_mutex_init(&c->death, NULL);
    c->boot = *b;
    c->rank = b->rank;
    c->size = b->size;
    c->timeout = b->timeout;
    c->store = b->store;
    c->spin = b->cores >= b->local_size; /* with fewer cores than ranks a spinner keeps its peer from running */
    c->delay = delay_from_env();
    snprintf(c->prefix, sizeof c->prefix, "%s", b->prefix);
    size_t head = (sizeof(shm_control) + 4095) & ~(size_t)4095;
    c->ctl_bytes = head + (size_t)b->size * SHM_SLOTS * SHM_CHUNK;
    char key[128];
    snprintf(key, sizeof key, "%s/control", b->prefix);
    c->ctl = shared_segment(c, key, c->ctl_bytes);
    if (!c->ctl) {
        free(c);
        return ddp__pending();
    }
    c->slots = (char *)c->ctl + head;
    struct stat space;
    shm_rank *me = &c->ctl->rank[c->rank];
    if (stat("/proc/self/ns/pid", &space) == 0) atomic_store(&me->pid_space, (unsigned long)space.st_ino);
    atomic_store(&me->pid, (int)getpid());
    *out = c;
    return 0;
}

static int shm_probe(char *why, size_t n) {
    int fd = memfd_create("ddp", MFD_CLOEXEC);
    if (fd < 0) {
        snprintf(why, n, "memfd_create: %s", strerror(errno));
        return DDP_ENOSUP;
    }
    close(fd);
    return 0;
}

static void shm_destroy(ddp_comm *c, int graceful) {
    if (!c) return;
    shm_leave(c, graceful ? SHM_LEFT : SHM_FAILED);
    ddp_saved_error e;
    ddp__error_save(&e);
    shm_die(c, DDP_ESTATE, "the communicator is closed");
    ddp_error_take(NULL);
    ddp__error_restore(&e);
    /* Bucket segments stay mapped until the process ends: gradients that a script still holds are views into them. */
    munmap(c->ctl, c->ctl_bytes);
    c->ctl = NULL;
    c->head = c->tail = NULL;
    if (c->n_reqs == 0) free(c); /* else the last request does, which its owner still has */
}

/* ---- bucket memory ---- */

static int shm_alloc(ddp_comm *c, size_t bytes, void **out) {
    int st = shm_health(c);
    if (st < 0) return st;
    if (c->n_segments == SHM_MAX_SEGMENTS)
        return ddp__fail(DDP_ENOMEM, "shm: %d segments, the most there are", SHM_MAX_SEGMENTS);
    int at = 0;
    while (at < c->n_segments && c->segments[at].base) at++;
    if (at == SHM_MAX_SEGMENTS) return ddp__fail(DDP_ENOMEM, "shm: %d segments, the most there are", SHM_MAX_SEGMENTS);
    shm_segment g = {.part = (bytes + 4095) & ~(size_t)4095, .serial = c->n_allocs++};
    char key[128];
    snprintf(key, sizeof key, "%s/segment/%lld", c->prefix, (long long)g.serial);
    g.base = shared_segment(c, key, g.part * (size_t)c->size);
    if (!g.base) { /* the others may have theirs, and will wait for this rank */
        shm_leave(c, SHM_FAILED);
        return ddp__pending();
    }
    c->segments[at] = g;
    if (at == c->n_segments) c->n_segments++;
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

static void shm_req_free(ddp_req *r) {
    if (!r) return;
    ddp_comm *c = r->comm;
    ddp_req *before = NULL;
    for (ddp_req *q = c->head; q; before = q, q = q->next) { /* after an error it is still on the list */
        if (q != r) continue;
        if (before) before->next = r->next;
        else c->head = r->next;
        if (c->tail == r) c->tail = before;
        break;
    }
    free(r);
    if (--c->n_reqs == 0 && !c->ctl) free(c);
}

static int shm_post(ddp_comm *c, const ddp_coll *coll, ddp_req **out) {
    int st = shm_health(c);
    if (st == 0) st = ddp__coll_check(coll);
    if (st < 0) return st;
    ddp_req *r = calloc(1, sizeof *r);
    if (!r) return ddp__fail(DDP_ENOMEM, "shm: out of memory");
    r->comm = c;
    r->coll = *coll;
    r->seq = ++c->next_seq;
    c->n_reqs++;
    if (c->tail) c->tail->next = r;
    else c->head = r;
    c->tail = r;
    st = shm_progress(c, false);
    if (st < 0) {
        shm_req_free(r);
        return st;
    }
    *out = r;
    return 0;
}

static int shm_test(ddp_req *r) {
    if (shm_finished(r)) return 1;
    int st = shm_progress(r->comm, true);
    if (st == 0 && !shm_finished(r)) st = shm_health(r->comm);
    return st < 0 ? st : shm_finished(r);
}

static double shm_weight_sum(const ddp_req *r) { return r->weight_sum; }

const ddp_engine ddp__engine_shm = {
    .size = sizeof(ddp_engine),
    .name = "shm",
    .caps = DDP_CAP_HOST | DDP_CAP_ABORTABLE | DDP_CAP_ALLOCATES | DDP_CAP_WEIGHTED,
    .probe = shm_probe,
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
