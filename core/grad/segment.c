/* segment.c -- stretches of the tape that keep nothing. The nodes recorded in an open segment have edges and metas but no
 * saved tensors. Where a backward meets the first of them it stops and asks the host to run the stretch again; that run
 * records nodes of its own, which keep what they save, and what they saved is handed to the first ones, one by one in
 * the order of recording. So leaves, edges and the order of adding are those of a stretch that was never dropped, and
 * whoever counts uses of a parameter (reducers) sees nothing unusual.
 *
 * Segments nest. One that lies in another is run again by the host only after that one was: the outer run makes a new
 * inner segment, whose host function (it holds the inner inputs) goes to the old one. */
#include <pthread.h>
#include <stdlib.h>

#include "tape.h"

struct ddp_segment {
    atomic_int refs;     /* its nodes, inner segments, and being open */
    int64_t id;          /* the host function that runs it again */
    bool filled;         /* its nodes have what they save */
    bool again;          /* a second run: owns its nodes and inner segments until it ends */
    ddp_segment *outer;  /* owned; NULL: none */
    ddp_segment *below;  /* open before this one was; borrowed */
    int index;           /* in outer's list */
    ddp_node **nodes;    /* [n] NULL where gone */
    ddp_segment **inner; /* [n_inner] NULL where gone */
    int n, room, n_inner, room_inner;
};

static _Thread_local ddp_segment *open_segment;

/* ---- host functions that nothing needs any more ------------------------------------------------------------------ */

static struct {
    pthread_mutex_t lock;
    int64_t *ids;
    int n, room;
    atomic_int count; /* n, to be read without the lock */
} dead = {.lock = PTHREAD_MUTEX_INITIALIZER};

enum { BLOCK_SHIFT = 32 };

int64_t ddp_host_ids(void) {
    static atomic_int_fast64_t block = 1;
    return (int64_t)atomic_fetch_add(&block, 1) << BLOCK_SHIFT;
}

void ddp__host_dead(int64_t id) {
    if (id >> BLOCK_SHIFT == 0) return;
    pthread_mutex_lock(&dead.lock);
    if (dead.n == dead.room) {
        int room = dead.room ? 2 * dead.room : 64;
        int64_t *ids = realloc(dead.ids, (size_t)room * sizeof *ids);
        if (ids) {
            dead.ids = ids;
            dead.room = room;
        }
    }
    if (dead.n < dead.room) dead.ids[dead.n++] = id; /* else the host keeps a function too long */
    atomic_store(&dead.count, dead.n);
    pthread_mutex_unlock(&dead.lock);
}

int64_t ddp_host_dead(int64_t first) {
    int64_t found = -1;
    if (atomic_load_explicit(&dead.count, memory_order_relaxed) == 0) return -1;
    pthread_mutex_lock(&dead.lock);
    for (int i = dead.n - 1; i >= 0 && found < 0; i--) {
        if (dead.ids[i] >> BLOCK_SHIFT != first >> BLOCK_SHIFT) continue;
        found = dead.ids[i];
        dead.ids[i] = dead.ids[--dead.n];
    }
    atomic_store(&dead.count, dead.n);
    pthread_mutex_unlock(&dead.lock);
    return found;
}

/* ---- life -------------------------------------------------------------------------------------------------------- */

static void drop(ddp_segment *s) {
    while (s && atomic_fetch_sub_explicit(&s->refs, 1, memory_order_acq_rel) == 1) {
        ddp_segment *outer = s->outer;
        if (outer && outer->inner[s->index] == s) outer->inner[s->index] = NULL;
        ddp__host_dead(s->id);
        free(s->nodes);
        free(s->inner);
        free(s);
        s = outer;
    }
}

static void *grow(void *v, int n, int *room) {
    if (n < *room) return v;
    int more = *room ? 2 * *room : 32;
    void *p = realloc(v, (size_t)more * sizeof(void *));
    if (!p) ddp__fail(DDP_ENOMEM, "checkpoint: out of memory");
    else *room = more;
    return p;
}

static ddp_segment *new_segment(int64_t id, ddp_segment *outer, bool again) {
    ddp_segment *s = calloc(1, sizeof *s);
    if (!s) {
        ddp__fail(DDP_ENOMEM, "checkpoint: out of memory");
        return NULL;
    }
    s->refs = 1;
    s->id = id;
    s->filled = s->again = again;
    s->below = open_segment;
    if (!outer) return s;
    ddp_segment **inner = grow(outer->inner, outer->n_inner, &outer->room_inner);
    if (!inner) {
        free(s);
        return NULL;
    }
    outer->inner = inner;
    s->index = outer->n_inner++;
    inner[s->index] = s;
    if (outer->again) s->refs++;
    outer->refs++;
    s->outer = outer;
    return s;
}

int ddp_segment_open(void) { return !open_segment ? 0 : open_segment->again ? 2 : 1; }

int ddp_segment_begin(int64_t id) {
    if (ddp__pending()) return ddp__pending();
    ddp_segment *s = new_segment(id, open_segment, false);
    if (!s) return ddp__pending();
    open_segment = s;
    return 0;
}

int ddp_segment_end(void) {
    ddp_segment *s = open_segment;
    if (!s || s->again) return ddp__fail(DDP_ESTATE, "checkpoint: no segment is open");
    int held = s->n + s->n_inner;
    open_segment = s->below;
    drop(s);
    return held;
}

/* ---- nodes come and go ------------------------------------------------------------------------------------------- */

bool ddp__segment_keeps(void) { return !open_segment || open_segment->again; }

int ddp__segment_add(ddp_node *n) {
    ddp_segment *s = open_segment;
    if (!s) return 0;
    ddp_node **nodes = grow(s->nodes, s->n, &s->room);
    if (!nodes) return ddp__pending();
    s->nodes = nodes;
    nodes[s->n] = n;
    if (s->again) {
        atomic_fetch_add(&n->refs, 1);
    } else {
        n->segment = s;
        n->place = s->n;
        s->refs++;
    }
    s->n++;
    return 0;
}

void ddp__segment_forget(ddp_node *n) {
    if (!n->segment) return;
    n->segment->nodes[n->place] = NULL;
    drop(n->segment);
}

static ddp_segment *missing(const ddp_node *n) {
    ddp_segment *first = NULL;
    for (ddp_segment *s = n->segment; s; s = s->outer)
        if (!s->filled) first = s;
    return first;
}

int64_t ddp__segment_missing(const ddp_node *n) {
    ddp_segment *s = n->freed ? NULL : missing(n);
    return s ? s->id : 0;
}

/* ---- the second run ---------------------------------------------------------------------------------------------- */

int ddp__segment_again(void) {
    ddp_segment *s = new_segment(0, NULL, true);
    if (!s) return ddp__pending();
    open_segment = s;
    return 0;
}

static const char *name_of(const ddp_node *n) { return n->kind == DDP_NODE_OP ? n->op->name : "a host function"; }

/* Hands to the node `to` what `from` saved. */
static int refill(ddp_node *to, ddp_node *from, int place) {
    if (to->kind != from->kind || to->op != from->op || to->n_in != from->n_in || to->n_out != from->n_out)
        return ddp__fail(DDP_ESTATE,
                         "checkpoint: its function did something else when it ran again: call %d was %s, then %s",
                         place + 1, name_of(to), name_of(from));
    for (int i = 0; i < to->n_in + to->n_out && !to->freed; i++) {
        ddp__drop(to->saved[i]);
        to->saved[i] = ddp_retain(from->saved[i]);
        to->version[i] = from->version[i];
    }
    int64_t id = to->host_id;
    to->host_id = from->host_id;
    from->host_id = id;
    return 0;
}

static int refill_all(ddp_segment *to, ddp_segment *from) {
    if (to->n != from->n || to->n_inner != from->n_inner)
        return ddp__fail(DDP_ESTATE, "checkpoint: its function did something else when it ran again: %d calls, then %d",
                         to->n, from->n);
    for (int i = 0; i < to->n; i++) {
        int st = to->nodes[i] ? refill(to->nodes[i], from->nodes[i], i) : 0;
        if (st < 0) return st;
    }
    for (int i = 0; i < to->n_inner; i++) {
        if (!to->inner[i]) continue;
        int64_t id = to->inner[i]->id;
        to->inner[i]->id = from->inner[i]->id;
        from->inner[i]->id = id;
    }
    to->filled = true;
    return 0;
}

int ddp__segment_filled(const ddp_node *node, bool ok) {
    ddp_segment *from = open_segment, *to = missing(node);
    if (!from || !from->again) return ddp__fail(DDP_ESTATE, "checkpoint: no second run is open");
    open_segment = from->below;
    int st = ok && to ? refill_all(to, from) : 0;
    for (int i = 0; i < from->n; i++) ddp__node_release(from->nodes[i]);
    for (int i = 0; i < from->n_inner; i++) {
        ddp_segment *inner = from->inner[i];
        from->inner[i] = NULL;
        drop(inner);
    }
    drop(from);
    return st;
}
