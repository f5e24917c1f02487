/* socket_wire.h -- the smallest ddp_wire: sockets between all ranks of this host. What wire.c and queue.c do is tested over
 * it, so without any library. */
#ifndef SOCKET_WIRE_H
#define SOCKET_WIRE_H

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <sys/socket.h>

#include "comm/wire.h"
#include "shm_common.h"

typedef struct socket_wire {
    int rank, size;
    int fd[MAX_P]; /* to each rank; -1 to itself */
    atomic_int stopped;
} socket_wire;

static int socket_to(int port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    inet_pton(AF_INET, "127.0.0.1", &a.sin_addr);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    return connect(fd, (struct sockaddr *)&a, sizeof a) == 0 ? fd : -1;
}

/* Each connects to those before it, and accepts those after it. */
static int socket_join(void **self, const ddp_boot *b) {
    socket_wire *s = calloc(1, sizeof *s);
    char key[32];
    int port = 0, listener = ddp__store_listen("127.0.0.1", &port);
    s->rank = b->rank;
    s->size = b->size;
    s->fd[b->rank] = -1;
    fcntl(listener, F_SETFL, 0); /* accept waits */
    snprintf(key, sizeof key, "port/%d", b->rank);
    CHECK(ddp__wire_set(b, key, &port, sizeof port) == 0);
    for (int r = 0; r < b->rank; r++) {
        void *value;
        size_t n;
        snprintf(key, sizeof key, "port/%d", r);
        CHECK(ddp__wire_get(b, key, ddp__now() + 10, &value, &n) == 0);
        s->fd[r] = socket_to(*(int *)value);
        free(value);
        CHECK(s->fd[r] >= 0 && write(s->fd[r], &b->rank, sizeof b->rank) == sizeof b->rank);
    }
    for (int r = b->rank + 1; r < b->size; r++) {
        int who, fd = accept(listener, NULL, NULL);
        CHECK(read(fd, &who, sizeof who) == sizeof who);
        s->fd[who] = fd;
    }
    close(listener);
    for (int r = 0; r < b->size; r++)
        if (s->fd[r] >= 0) fcntl(s->fd[r], F_SETFL, O_NONBLOCK);
    *self = s;
    return 0;
}

/* The first part for `rank` that has not moved whole; `at`: bytes of it that have. */
static int next_part(const ddp_part *part, int n, const size_t *at, int rank) {
    for (int i = 0; i < n; i++)
        if (part[i].rank == rank && at[i] < part[i].n) return i;
    return -1;
}

static bool move_part(int fd, const ddp_part *part, size_t *at, bool receive) {
    char *p = (char *)part->p + *at;
    ssize_t k = receive ? recv(fd, p, part->n - *at, 0) : send(fd, p, part->n - *at, MSG_NOSIGNAL);
    if (k > 0) *at += (size_t)k;
    return k > 0 || (k < 0 && errno == EAGAIN);
}

static int socket_exchange(void *self, const ddp_part *out, int n_out, const ddp_part *in, int n_in, int *lost) {
    socket_wire *s = self;
    size_t out_at[2 * MAX_P] = {0}, in_at[2 * MAX_P] = {0};
    for (;;) {
        struct pollfd p[MAX_P];
        bool more = false;
        for (int r = 0; r < s->size; r++) {
            int i = next_part(in, n_in, in_at, r), o = next_part(out, n_out, out_at, r);
            p[r] = (struct pollfd){.fd = i < 0 && o < 0 ? -1 : s->fd[r],
                                   .events = (short)((i >= 0 ? POLLIN : 0) | (o >= 0 ? POLLOUT : 0))};
            more |= i >= 0 || o >= 0;
        }
        if (!more) return 0;
        if (atomic_load(&s->stopped)) return ddp__fail(DDP_EPEER, "stopped");
        poll(p, (nfds_t)s->size, 10);
        for (int r = 0; r < s->size; r++) {
            int i = next_part(in, n_in, in_at, r), o = next_part(out, n_out, out_at, r);
            *lost = r;
            if (p[r].fd >= 0 && (p[r].revents & (POLLIN | POLLHUP)) && i >= 0 &&
                !move_part(s->fd[r], &in[i], &in_at[i], true))
                return ddp__fail(DDP_EPEER, "a socket");
            if (p[r].fd >= 0 && (p[r].revents & POLLOUT) && o >= 0 && !move_part(s->fd[r], &out[o], &out_at[o], false))
                return ddp__fail(DDP_EPEER, "a socket");
        }
    }
}

static void socket_stop(void *self) { atomic_store(&((socket_wire *)self)->stopped, 1); }

static void socket_leave(void *self, int graceful) {
    socket_wire *s = self;
    (void)graceful;
    for (int r = 0; r < s->size; r++)
        if (s->fd[r] >= 0) close(s->fd[r]);
    free(s);
}

static int socket_init(ddp_comm **out, const ddp_boot *b) {
    static const ddp_wire wire = {"sockets", socket_join, socket_exchange, socket_stop, socket_leave};
    return ddp__wire_init(out, b, &wire);
}

#endif
