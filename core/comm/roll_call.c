/* roll_call.c -- the ranks find one another before an engine joins them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"

int ddp__roll_call(const ddp_boot *b) {
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
