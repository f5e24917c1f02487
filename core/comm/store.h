/* store.h -- the job's key-value store over TCP: what ranks know of one another before an engine joins them.
 * The launcher serves it; in a world started by hand rank 0 does. Keys are text, values bytes. Every message carries a
 * token made of the job's name (NULL: none); others are not served. It keeps strangers' mistakes out, it is not encryption: whoever reads
 * the network can read it. */
#ifndef DDP_STORE_H
#define DDP_STORE_H

#include "../base/base.h"

typedef struct ddp_store ddp_store;               /* a client */
typedef struct ddp_store_server ddp_store_server; /* its own thread */

/* Serves on the listening socket `fd`, which it owns from now on, the job of this name. NULL with the error set. */
DDP_LOCAL ddp_store_server *ddp__store_serve(int fd, const char *job);
DDP_LOCAL void ddp__store_server_free(ddp_store_server *s);
/* The lowest rank that waits for a key now, -1 when none does. Any thread. */
DDP_LOCAL int ddp__store_server_waiting(const ddp_store_server *s);
/* A listening socket on the address of `host`; *port 0: the system chooses, and it is told. */
DDP_LOCAL int ddp__store_listen(const char *host, int *port);
/* Connects; tries again until the deadline (ddp__now seconds). NULL with DDP_ETIMEOUT or DDP_EIO set. */
DDP_LOCAL ddp_store *ddp__store_connect(const char *host, int port, const char *job, double deadline);
DDP_LOCAL void ddp__store_free(ddp_store *s);
/* Sets key. */
DDP_LOCAL int ddp__store_set(ddp_store *s, const char *key, const void *value, size_t n);
/* Waits for key until the deadline. *value is the caller's (free). DDP_ETIMEOUT, as an error too. */
DDP_LOCAL int ddp__store_get(ddp_store *s, const char *key, double deadline, void **value, size_t *n);
/* Asks for key once: 1 it is there (*value is the caller's), 0 it is not, or an error: DDP_ETIMEOUT when no answer came. */
DDP_LOCAL int ddp__store_try(ddp_store *s, const char *key, double deadline, void **value, size_t *n);
/* Sets key without waiting for the answer: where a server that hangs must not hold up a last word. */
DDP_LOCAL int ddp__store_tell(ddp_store *s, const char *key, const void *value, size_t n);
/* One more connection to the server of s, for another thread. */
DDP_LOCAL ddp_store *ddp__store_again(const ddp_store *s);
/* The address of this host on the way to the server, as a number: "10.0.0.2". "" when it has none. */
DDP_LOCAL void ddp__store_address(const ddp_store *s, char *text, size_t n);
/* Adds to a counter and returns the new value through *value. */
DDP_LOCAL int ddp__store_add(ddp_store *s, const char *key, int64_t by, int64_t *value);

#endif
