/* store_client.c -- the store as a rank and an agent see it. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <unistd.h>

#include "store_wire.h"

int ddp__store_resolve(const char *host, int port, struct sockaddr_storage *a, socklen_t *len) {
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
    int err = ddp__store_resolve(host, port, &a, &len), fd;
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
