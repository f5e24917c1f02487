/* store.c -- the key-value store: a poll() server on a thread of its own, and its client.
 *
 * A request is a header {magic, op, seq, key length, value length, the job's token}, the key and the value; a reply {seq,
 * found, value length} and the value. Who sends another token or anything else is cut off at once, before it can make
 * the server keep a byte more. The server answers a GET when the key is there, a TRY at once. A new request of a connection replaces
 * one that still waits, and replies carry the request's number: so a client may give up waiting and go on with the same
 * connection. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "store.h"

enum { OP_HELLO, OP_SET, OP_GET, OP_ADD, OP_TRY };
enum { MAGIC = 0x31706464, KEY_MAX = 4096, VALUE_MAX = 64 << 20, READ_STEP = 64 << 10 };

typedef struct request_head {
    uint32_t magic, op, seq, key_len;
    uint64_t value_len;
    char token[16];
} request_head;

typedef struct reply_head {
    uint32_t seq, found; /* found: 0 says that a TRY met no such key */
    uint64_t value_len;
} reply_head;

/* What every message of a job carries: its name in 16 bytes (two FNV-1a hashes), zeros without one. */
static void job_token(const char *s, char out[16]) {
    uint64_t a = 0xcbf29ce484222325u, b = 0x9e3779b97f4a7c15u;
    memset(out, 0, 16);
    if (!s || !*s) return;
    for (; *s; s++) {
        a = (a ^ (unsigned char)*s) * 0x100000001b3u;
        b = (b ^ a) * 0x100000001b3u;
    }
    memcpy(out, &a, 8);
    memcpy(out + 8, &b, 8);
}

typedef struct bytes {
    char *p;
    size_t n, room;
} bytes;

static bool bytes_room(bytes *b, size_t more) {
    if (b->room - b->n >= more) return true;
    size_t room = b->room ? b->room : 1024;
    while (room - b->n < more) room *= 2;
    char *p = realloc(b->p, room);
    if (!p) return false;
    b->p = p;
    b->room = room;
    return true;
}

static bool bytes_add(bytes *b, const void *p, size_t n) {
    if (!bytes_room(b, n)) return false;
    if (n) memcpy(b->p + b->n, p, n);
    b->n += n;
    return true;
}

static void bytes_drop(bytes *b, size_t n) {
    b->n -= n;
    if (b->n) memmove(b->p, b->p + n, b->n);
}

/* ---- the server -----------------------------------------------------------------------------------------------------
 */

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

static void no_delay(int fd) {
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
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

/* One address of host; numbers are never looked up. */
static int resolve(const char *host, int port, struct sockaddr_storage *a, socklen_t *len) {
    struct sockaddr_in *v4 = (struct sockaddr_in *)a;
    memset(a, 0, sizeof *a);
    if (strcmp(host, "localhost") == 0) host = "127.0.0.1";
    if (inet_pton(AF_INET, host, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons((uint16_t)port);
        *len = sizeof *v4;
        return 0;
    }
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM}, *found = NULL;
    char text[16];
    snprintf(text, sizeof text, "%d", port);
    int err = getaddrinfo(host, text, &hints, &found);
    if (err) return err;
    memcpy(a, found->ai_addr, found->ai_addrlen);
    *len = found->ai_addrlen;
    freeaddrinfo(found);
    return 0;
}

int ddp__store_listen(const char *host, int *port) {
    struct sockaddr_storage a;
    socklen_t len;
    int on = 1, err = resolve(host, *port, &a, &len);
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

/* ---- the client ---- */

struct ddp_store {
    int fd;
    char token[16];
    bool answered; /* at least once */
    uint32_t seq;
    bool found; /* of the last reply */
    bytes in;
};

static int left_ms(double deadline) {
    double s = deadline - ddp__now();
    return s <= 0 ? 0 : s > 3600 ? 3600 * 1000 : (int)(s * 1000) + 1;
}

/* One try to connect; the socket, or -1 with errno. */
static int connect_once(const struct sockaddr_storage *a, socklen_t len, double deadline) {
    int fd = socket(a->ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), err = 0;
    socklen_t err_len = sizeof err;
    if (fd < 0) return -1;
    if (connect(fd, (const struct sockaddr *)a, len) == 0) return fd;
    if (errno == EINPROGRESS || errno == EINTR) {
        struct pollfd p = {.fd = fd, .events = POLLOUT};
        int k;
        while ((k = poll(&p, 1, left_ms(deadline))) < 0 && errno == EINTR) {
        }
        if (k > 0 && getsockopt(fd, SOL_SOCKET, SO_ERROR, &err, &err_len) == 0 && err == 0) return fd;
        errno = k == 0 ? ETIMEDOUT : err;
    }
    err = errno;
    close(fd);
    errno = err;
    return -1;
}

static int send_all(ddp_store *s, const void *p, size_t n, double deadline) {
    const char *at = p;
    while (n) {
        ssize_t k = send(s->fd, at, n, MSG_NOSIGNAL);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            struct pollfd w = {.fd = s->fd, .events = POLLOUT};
            if (poll(&w, 1, left_ms(deadline)) == 0) return ddp__fail(DDP_ETIMEOUT, "store: it takes no more requests");
            continue;
        }
        if (k < 0) return ddp__fail(DDP_EPEER, "peer: the store is gone: %s", strerror(errno));
        at += k;
        n -= (size_t)k;
    }
    return 0;
}

static int request(ddp_store *s, uint32_t op, const char *key, const void *value, size_t n, double deadline) {
    request_head h = {.magic = MAGIC, .op = op, .seq = ++s->seq, .key_len = (uint32_t)strlen(key), .value_len = n};
    memcpy(h.token, s->token, sizeof h.token);
    bytes b = {0};
    int st;
    if (h.key_len > KEY_MAX || n > VALUE_MAX)
        return ddp__fail(DDP_EINVAL, "store: a key has %u bytes and its value %zu, expected at most %d and %d",
                         h.key_len, n, KEY_MAX, VALUE_MAX);
    if (!bytes_add(&b, &h, sizeof h) || !bytes_add(&b, key, h.key_len) || !bytes_add(&b, value, n)) {
        st = ddp__fail(DDP_ENOMEM, "store: out of memory for %zu bytes", n);
        goto out;
    }
    st = send_all(s, b.p, b.n, deadline);
out:
    free(b.p);
    return st;
}

/* Takes the last request's reply out of what has arrived; 1: it is there, 0: not yet, or an error. */
static int take_reply(ddp_store *s, void **value, size_t *n) {
    for (;;) {
        reply_head h;
        if (s->in.n < sizeof h) return 0;
        memcpy(&h, s->in.p, sizeof h);
        if (s->in.n < sizeof h + h.value_len) return 0;
        bool mine = h.seq == s->seq;
        s->answered = true;
        if (mine) {
            char *v = malloc(h.value_len + 1);
            if (!v) return ddp__fail(DDP_ENOMEM, "store: out of memory for %zu bytes", (size_t)h.value_len);
            memcpy(v, s->in.p + sizeof h, h.value_len);
            v[h.value_len] = 0; /* text is text without a copy */
            *value = v;
            *n = h.value_len;
            s->found = h.found;
        }
        bytes_drop(&s->in, sizeof h + h.value_len);
        if (mine) return 1;
    }
}

/* Waits for the reply to the last request; 0, DDP_ETIMEOUT without an error set, or another error. */
static int reply(ddp_store *s, double deadline, void **value, size_t *n) {
    for (;;) {
        int st = take_reply(s, value, n);
        if (st != 0) return st < 0 ? st : 0;
        struct pollfd p = {.fd = s->fd, .events = POLLIN};
        st = poll(&p, 1, left_ms(deadline));
        if (st < 0 && errno == EINTR) continue;
        if (st == 0) {
            if (ddp__now() < deadline) continue;
            return DDP_ETIMEOUT;
        }
        if (!bytes_room(&s->in, READ_STEP)) return ddp__fail(DDP_ENOMEM, "store: out of memory");
        ssize_t k = recv(s->fd, s->in.p + s->in.n, READ_STEP, 0);
        if (k < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) continue;
        if (k <= 0 && !s->answered)
            return ddp__fail(DDP_EMISMATCH, "store: the connection was closed: it serves another job (DDP_JOB), or "
                                            "another version of ddp, or something else listens there");
        if (k <= 0)
            return ddp__fail(DDP_EPEER, "peer: the store is gone%s%s", k < 0 ? ": " : "", k < 0 ? strerror(errno) : "");
        s->in.n += (size_t)k;
    }
}

/* A client of the job with this token on the connected socket `fd`, which it owns. NULL with the error set. */
static ddp_store *new_client(int fd, const char token[16], double deadline) {
    no_delay(fd);
    ddp_store *s = calloc(1, sizeof *s);
    const char *rank = getenv("RANK");
    if (!s) {
        close(fd);
        ddp__fail(DDP_ENOMEM, "store: out of memory");
        return NULL;
    }
    s->fd = fd;
    memcpy(s->token, token, sizeof s->token);
    if (request(s, OP_HELLO, rank ? rank : "0", NULL, 0, deadline) < 0) {
        ddp__store_free(s);
        return NULL;
    }
    return s;
}

ddp_store *ddp__store_connect(const char *host, int port, const char *job, double deadline) {
    struct sockaddr_storage a;
    socklen_t len;
    int err = resolve(host, port, &a, &len), fd;
    if (err) {
        ddp__fail(DDP_EIO, "store: host %s: %s", host, gai_strerror(err));
        return NULL;
    }
    while ((fd = connect_once(&a, len, deadline)) < 0) {
        bool again = errno == ECONNREFUSED || errno == ETIMEDOUT || errno == ECONNRESET || errno == EHOSTUNREACH ||
                     errno == ENETUNREACH || errno == EAGAIN;
        if (!again || ddp__now() >= deadline) {
            ddp__fail(again ? DDP_ETIMEOUT : DDP_EIO, "store: cannot connect to %s port %d: %s", host, port,
                      strerror(errno));
            return NULL;
        }
        poll(NULL, 0, 20); /* rank 0 of a world started by hand may be late */
    }
    char token[16];
    job_token(job, token);
    return new_client(fd, token, deadline);
}

ddp_store *ddp__store_again(const ddp_store *s) {
    struct sockaddr_storage a = {0};
    socklen_t len = sizeof a;
    double deadline = ddp__now() + 30;
    int fd = getpeername(s->fd, (struct sockaddr *)&a, &len) == 0 ? connect_once(&a, len, deadline) : -1;
    if (fd >= 0) return new_client(fd, s->token, deadline);
    ddp__fail(DDP_EIO, "store: cannot connect once more: %s", strerror(errno));
    return NULL;
}

void ddp__store_address(const ddp_store *s, char *text, size_t n) {
    struct sockaddr_storage a;
    socklen_t len = sizeof a;
    if (getsockname(s->fd, (struct sockaddr *)&a, &len) != 0 ||
        getnameinfo((struct sockaddr *)&a, len, text, (socklen_t)n, NULL, 0, NI_NUMERICHOST) != 0)
        snprintf(text, n, "%s", "");
}

void ddp__store_free(ddp_store *s) {
    if (!s) return;
    close(s->fd);
    free(s->in.p);
    free(s);
}

/* SET and ADD are answered at once by a living server, so half a minute is a dead one. */
static double soon(void) { return ddp__now() + 30; }

/* What asking once more may add to a timeout. */
static const double LAST_ASK = 0.5;

int ddp__store_set(ddp_store *s, const char *key, const void *value, size_t n) {
    void *none = NULL;
    size_t none_n;
    int st = request(s, OP_SET, key, value, n, soon());
    if (st == 0) st = reply(s, soon(), &none, &none_n);
    free(none);
    return st == DDP_ETIMEOUT ? ddp__fail(st, "store: no answer to set %s", key) : st;
}

int ddp__store_get(ddp_store *s, const char *key, double deadline, void **value, size_t *n) {
    *value = NULL;
    *n = 0;
    int st = request(s, OP_GET, key, NULL, 0, soon());
    if (st < 0 || (st = reply(s, deadline, value, n)) != DDP_ETIMEOUT) return st;
    /* A deadline that is over says nothing about the key when the server had no time to answer: it is asked again. */
    st = request(s, OP_TRY, key, NULL, 0, ddp__now() + LAST_ASK);
    if (st == 0) st = reply(s, ddp__now() + LAST_ASK, value, n);
    if (st == 0 && s->found) return 0;
    free(*value);
    *value = NULL;
    return st < 0 && st != DDP_ETIMEOUT ? st : ddp__fail(DDP_ETIMEOUT, "store: nobody has set %s in time", key);
}

int ddp__store_try(ddp_store *s, const char *key, double deadline, void **value, size_t *n) {
    *value = NULL;
    *n = 0;
    int st = request(s, OP_TRY, key, NULL, 0, deadline);
    if (st == 0) st = reply(s, deadline, value, n);
    if (st == 0 && s->found) return 1;
    free(*value);
    *value = NULL;
    return st == DDP_ETIMEOUT ? ddp__fail(st, "store: no answer when asked for %s", key) : st;
}

int ddp__store_tell(ddp_store *s, const char *key, const void *value, size_t n) {
    return request(s, OP_SET, key, value, n, ddp__now() + .1);
}

int ddp__store_add(ddp_store *s, const char *key, int64_t by, int64_t *value) {
    void *sum = NULL;
    size_t n = 0;
    int st = request(s, OP_ADD, key, &by, sizeof by, soon());
    if (st == 0) st = reply(s, soon(), &sum, &n);
    if (st == DDP_ETIMEOUT) ddp__fail(st, "store: no answer to add to %s", key);
    if (st == 0 && n == sizeof *value) memcpy(value, sum, n);
    free(sum);
    return st;
}
