/* store_wire.h -- what the two sides of the store share: messages, a growing buffer, addresses.
 *
 * A request is a header {magic, op, seq, key length, value length, the job's token}, the key and the value; a reply {seq,
 * found, value length} and the value. Who sends another token or anything else is cut off at once, before it can make
 * the server keep a byte more. The server answers a GET when the key is there, a TRY at once. A new request of a connection replaces
 * one that still waits, and replies carry the request's number: so a client may give up waiting and go on with the same
 * connection. */
#ifndef DDP_STORE_WIRE_H
#define DDP_STORE_WIRE_H

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

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
static inline void job_token(const char *s, char out[16]) {
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

static inline bool bytes_room(bytes *b, size_t more) {
    if (b->room - b->n >= more) return true;
    size_t room = b->room ? b->room : 1024;
    while (room - b->n < more) room *= 2;
    char *p = realloc(b->p, room);
    if (!p) return false;
    b->p = p;
    b->room = room;
    return true;
}

static inline bool bytes_add(bytes *b, const void *p, size_t n) {
    if (!bytes_room(b, n)) return false;
    if (n) memcpy(b->p + b->n, p, n);
    b->n += n;
    return true;
}

static inline void bytes_drop(bytes *b, size_t n) {
    b->n -= n;
    if (b->n) memmove(b->p, b->p + n, b->n);
}

/* ---- sockets ---- */

static inline void no_delay(int fd) {
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

/* store_client.c: one address of host; numbers are never looked up. 0, or what gai_strerror explains. */
DDP_LOCAL int ddp__store_resolve(const char *host, int port, struct sockaddr_storage *a, socklen_t *len);

#endif
