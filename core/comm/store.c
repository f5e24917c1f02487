/* store.c -- the key-value store: a poll() server on a thread of its own. */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "store_wire.h"

typedef struct entry {
    char *key;
    bytes value;
} entry;

typedef struct client {
    int fd;
    int rank; /* what it said of itself, -1 unknown */
    bytes in, out;
    char *waits;  /* the key of a GET that is not answered yet */
    uint32_t seq; /* of that GET */
} client;

struct ddp_store_server {
    pthread_t thread;
    int fd, wake;
    char token[16];
    entry *entries;
    size_t n_entries;
    client *clients;
    size_t n_clients;
    struct pollfd *polls;
    atomic_int waiting; /* the lowest rank that waits for a key, -1: none */
};

static entry *entry_find(ddp_store_server *s, const char *key) {
    for (size_t i = 0; i < s->n_entries; i++)
        if (strcmp(s->entries[i].key, key) == 0) return &s->entries[i];
    return NULL;
}

static entry *entry_make(ddp_store_server *s, const char *key) {
    entry *e = entry_find(s, key);
    if (e) return e;
    entry *all = realloc(s->entries, (s->n_entries + 1) * sizeof *all);
    if (!all) return NULL;
    s->entries = all;
    e = &all[s->n_entries];
    *e = (entry){.key = strdup(key)};
    if (!e->key) return NULL;
    s->n_entries++;
    return e;
}

static bool answer(client *c, uint32_t seq, const void *value, size_t n) {
    reply_head h = {.seq = seq, .found = 1, .value_len = n};
    return bytes_add(&c->out, &h, sizeof h) && bytes_add(&c->out, value, n);
}

/* Answers those who waited for e. */
static void answer_waiting(ddp_store_server *s, const entry *e) {
    for (size_t i = 0; i < s->n_clients; i++) {
        client *c = &s->clients[i];
        if (!c->waits || strcmp(c->waits, e->key) != 0) continue;
        free(c->waits);
        c->waits = NULL;
        answer(c, c->seq, e->value.p, e->value.n); /* out of memory: that client runs into its deadline */
    }
}

static bool serve_add(ddp_store_server *s, client *c, const request_head *h, entry *e, const char *value) {
    int64_t by, sum = 0;
    if (h->value_len != sizeof by) return false;
    memcpy(&by, value, sizeof by);
    if (e->value.n == sizeof sum) memcpy(&sum, e->value.p, sizeof sum);
    sum += by;
    e->value.n = 0;
    if (!bytes_add(&e->value, &sum, sizeof sum)) return false;
    answer_waiting(s, e);
    return answer(c, h->seq, &sum, sizeof sum);
}

/* One request; false: the connection is to be closed. */
static bool serve(ddp_store_server *s, client *c, const request_head *h, const char *key, const char *value) {
    free(c->waits);
    c->waits = NULL;
    if (h->op == OP_HELLO) {
        c->rank = atoi(key);
        return true;
    }
    if (h->op == OP_GET || h->op == OP_TRY) {
        const entry *e = entry_find(s, key);
        const reply_head nothing = {.seq = h->seq};
        if (e) return answer(c, h->seq, e->value.p, e->value.n);
        if (h->op == OP_TRY) return bytes_add(&c->out, &nothing, sizeof nothing);
        c->seq = h->seq;
        return (c->waits = strdup(key)) != NULL;
    }
    if (h->op != OP_SET && h->op != OP_ADD) return false;
    entry *e = entry_make(s, key);
    if (!e) return false;
    if (h->op == OP_ADD) return serve_add(s, c, h, e, value);
    e->value.n = 0;
    if (!bytes_add(&e->value, value, h->value_len)) return false;
    answer_waiting(s, e);
    return answer(c, h->seq, NULL, 0);
}

/* Serves what has arrived whole; false: not one of ours. */
static bool serve_arrived(ddp_store_server *s, client *c) {
    for (;;) {
        request_head h;
        char key[KEY_MAX + 1];
        if (c->in.n < sizeof h) return true;
        memcpy(&h, c->in.p, sizeof h);
        if (h.magic != MAGIC || h.key_len > KEY_MAX || h.value_len > VALUE_MAX) return false;
        if (memcmp(h.token, s->token, sizeof h.token) != 0) return false;
        size_t whole = sizeof h + h.key_len + h.value_len;
        if (c->in.n < whole) return true;
        memcpy(key, c->in.p + sizeof h, h.key_len);
        key[h.key_len] = 0;
        if (!serve(s, c, &h, key, c->in.p + sizeof h + h.key_len)) return false;
        bytes_drop(&c->in, whole);
    }
}

/* Reads what is there; false: the client left. */
static bool client_read(ddp_store_server *s, client *c) {
    for (;;) {
        if (!bytes_room(&c->in, READ_STEP)) return false;
        ssize_t k = recv(c->fd, c->in.p + c->in.n, READ_STEP, MSG_DONTWAIT);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
        if (k <= 0) return false;
        c->in.n += (size_t)k;
        if (!serve_arrived(s, c)) return false;
    }
}

static bool client_write(client *c) {
    while (c->out.n) {
        ssize_t k = send(c->fd, c->out.p, c->out.n, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
        if (k <= 0) return false;
        bytes_drop(&c->out, (size_t)k);
    }
    return true;
}

static void client_close(client *c) {
    close(c->fd);
    free(c->in.p);
    free(c->out.p);
    free(c->waits);
}

static void accept_one(ddp_store_server *s) {
    int fd = accept4(s->fd, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0) return;
    client *all = realloc(s->clients, (s->n_clients + 1) * sizeof *all);
    if (all) s->clients = all;
    struct pollfd *polls = realloc(s->polls, (s->n_clients + 3) * sizeof *polls);
    if (polls) s->polls = polls;
    if (!all || !polls) {
        close(fd);
        return;
    }
    no_delay(fd);
    s->clients[s->n_clients++] = (client){.fd = fd, .rank = -1};
}

/* Closes client i and moves the last one into its place. */
static void drop_client(ddp_store_server *s, size_t i) {
    client_close(&s->clients[i]);
    s->clients[i] = s->clients[--s->n_clients];
}

static void note_waiting(ddp_store_server *s) {
    int low = -1;
    for (size_t i = 0; i < s->n_clients; i++) {
        const client *c = &s->clients[i];
        if (c->waits && c->rank >= 0 && (low < 0 || c->rank < low)) low = c->rank;
    }
    atomic_store(&s->waiting, low);
}

static void *server_main(void *arg) {
    ddp_store_server *s = arg;
    for (;;) {
        size_t n = s->n_clients;
        s->polls[0] = (struct pollfd){.fd = s->wake, .events = POLLIN};
        s->polls[1] = (struct pollfd){.fd = s->fd, .events = POLLIN};
        for (size_t i = 0; i < n; i++) {
            short events = s->clients[i].out.n ? POLLIN | POLLOUT : POLLIN;
            s->polls[i + 2] = (struct pollfd){.fd = s->clients[i].fd, .events = events};
        }
        if (poll(s->polls, n + 2, -1) < 0 && errno != EINTR) break;
        if (s->polls[0].revents) break;
        for (size_t i = n; i-- > 0;) { /* from the back: what moves into the place of a closed one has been served */
            if (s->polls[i + 2].revents && !client_read(s, &s->clients[i])) drop_client(s, i);
        }
        for (size_t i = s->n_clients; i-- > 0;)
            if (!client_write(&s->clients[i])) drop_client(s, i);
        if (s->polls[1].revents) accept_one(s);
        note_waiting(s);
    }
    return NULL;
}

ddp_store_server *ddp__store_serve(int fd, const char *job) {
    ddp_store_server *s = calloc(1, sizeof *s);
    int err;
    if (!s) {
        close(fd);
        ddp__fail(DDP_ENOMEM, "store: out of memory");
        return NULL;
    }
    s->fd = fd;
    job_token(job, s->token);
    s->waiting = -1;
    s->wake = eventfd(0, EFD_CLOEXEC);
    s->polls = calloc(2, sizeof *s->polls);
    if (s->wake < 0 || !s->polls) {
        ddp__fail(DDP_EIO, "store: %s", strerror(errno));
        goto fail;
    }
    if ((err = pthread_create(&s->thread, NULL, server_main, s)) != 0) {
        ddp__fail(DDP_EIO, "store: cannot start its thread: %s", strerror(err));
        goto fail;
    }
    return s;
fail:
    close(fd);
    if (s->wake >= 0) close(s->wake);
    free(s->polls);
    free(s);
    return NULL;
}

int ddp__store_server_waiting(const ddp_store_server *s) { return s ? atomic_load(&s->waiting) : -1; }

void ddp__store_server_free(ddp_store_server *s) {
    if (!s) return;
    uint64_t one = 1;
    while (write(s->wake, &one, sizeof one) < 0 && errno == EINTR) {
    }
    pthread_join(s->thread, NULL);
    for (size_t i = 0; i < s->n_clients; i++) client_close(&s->clients[i]);
    for (size_t i = 0; i < s->n_entries; i++) {
        free(s->entries[i].key);
        free(s->entries[i].value.p);
    }
    close(s->fd);
    close(s->wake);
    free(s->clients);
    free(s->entries);
    free(s->polls);
    free(s);
}

int ddp__store_listen(const char *host, int *port) {
    struct sockaddr_storage a;
    socklen_t len;
    int on = 1, err = ddp__store_resolve(host, *port, &a, &len);
    if (err) return ddp__fail(DDP_EIO, "store: host %s: %s", host, gai_strerror(err));
    int fd = socket(a.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return ddp__fail(DDP_EIO, "store: socket: %s", strerror(errno));
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&a, len) < 0 || listen(fd, 1024) < 0 ||
        getsockname(fd, (struct sockaddr *)&a, &len) < 0) {
        int st = ddp__fail(DDP_EIO, "store: cannot listen on port %d of %s: %s%s", *port, host, strerror(errno),
                           errno == EADDRNOTAVAIL ? "; the host that serves must have this address" : "");
        close(fd);
        return st;
    }
    *port =
        ntohs(a.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&a)->sin6_port : ((struct sockaddr_in *)&a)->sin_port);
    return fd;
}
