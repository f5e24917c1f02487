/* group.c -- groups of ranks, each with a communicator of its own, and what is built on groups of two: send, recv and
 * all_to_all. A message between two ranks is a broadcast in the group of the two, so that it works on every engine. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../mem/device.h"
#include "comm.h"

static ddp_group *all_groups;

/* ---- the one in force ---- */

ddp_comm *ddp__comm_here(void) { return ddp__job.group ? ddp__job.group->comm : ddp__job.comm; }
int ddp__size_here(void) { return ddp__job.group ? ddp__job.group->n : ddp_world_size(); }

static int place_of(const ddp_group *g, int rank) {
    for (int i = 0; i < g->n; i++)
        if (g->ranks[i] == rank) return i;
    return -1;
}

int ddp__place_here(const char *what, const char *who, int rank) {
    const ddp_group *g = ddp__job.group;
    int place = g ? place_of(g, rank) : rank;
    if (place < 0) return ddp__fail(DDP_EINVAL, "%s: %s %d is not in the group %s", what, who, rank, g->text);
    return place;
}

int ddp__group_note(int st) {
    if (st >= 0 || !ddp__job.group) return st;
    const char *text;
    char copy[900];
    st = ddp_error_take(&text);
    snprintf(copy, sizeof copy, "%s", text);
    return ddp__fail(st, "%s (ranks by their place in the group %s)", copy, ddp__job.group->text);
}

int ddp_group_rank(const ddp_group *g) {
    if (!g) g = ddp__job.group;
    return g ? g->rank : ddp_rank();
}
int ddp_group_size(const ddp_group *g) { return g ? g->n : ddp__size_here(); }

ddp_group *ddp_group_use(ddp_group *g) {
    ddp_group *before = ddp__job.group;
    ddp__job.group = g;
    return before;
}

/* ---- making ---- */

static void describe(ddp_group *g) {
    size_t at = (size_t)snprintf(g->text, sizeof g->text, "{");
    for (int i = 0; i < g->n && at < sizeof g->text - 8; i++)
        at += (size_t)snprintf(g->text + at, sizeof g->text - at, "%s%d", i ? ", " : "", g->ranks[i]);
    snprintf(g->text + (at < sizeof g->text - 8 ? at : sizeof g->text - 8), 8, "}");
}

static ddp_group *new_group(const int *ranks, int n) {
    ddp_group *g = calloc(1, sizeof *g);
    if (g) g->ranks = malloc((size_t)n * sizeof *g->ranks);
    if (!g || !g->ranks) {
        free(g);
        ddp__fail(DDP_ENOMEM, "group: out of memory");
        return NULL;
    }
    memcpy(g->ranks, ranks, (size_t)n * sizeof *g->ranks);
    g->n = n;
    g->rank = place_of(g, ddp__job.rank);
    describe(g);
    g->next = all_groups;
    all_groups = g;
    return g;
}

/* Its members open a communicator. hosts [size of the job]: a number for each rank's host. */
static int open_comm(ddp_group *g, const int *hosts) {
    if (g->rank < 0 || g->n == 1) return 0;
    ddp_boot b = ddp__job.boot;
    b.rank = g->rank;
    b.size = g->n;
    b.prefix = g->prefix;
    b.local_rank = b.local_size = 0;
    for (int i = 0; i < g->n; i++) {
        if (hosts[g->ranks[i]] != hosts[ddp__job.rank]) continue;
        b.local_rank += i < g->rank;
        b.local_size++;
    }
    return ddp__job.engine->init(&g->comm, &b);
}

void ddp_group_free(ddp_group *g) {
    if (!g) return;
    for (ddp_group **p = &all_groups; *p; p = &(*p)->next) {
        if (*p != g) continue;
        *p = g->next;
        break;
    }
    if (ddp__job.group == g) ddp__job.group = NULL;
    ddp_saved_error e;
    ddp__error_save(&e);
    if (g->comm) ddp__job.engine->destroy(g->comm, ddp__job.engine->health(g->comm) == 0);
    ddp_error_take(NULL);
    ddp__error_restore(&e);
    free(g->ranks);
    free(g);
}

/* What each rank says when a group is made: its host and the list. `all` is [size] of these, each of `bytes`. */
static int compare(const int *all, int words, int n, const int *ranks) {
    for (int r = 0; r < ddp__job.size; r++) {
        const int *theirs = all + (size_t)r * (size_t)words;
        if (theirs[1] == n && memcmp(theirs + 2, ranks, (size_t)n * sizeof *ranks) == 0) continue;
        int i = 0;
        while (i < n && i < theirs[1] && theirs[2 + i] == ranks[i]) i++;
        char mine[16] = "nothing", other[16] = "nothing";
        if (i < n) snprintf(mine, sizeof mine, "%d", ranks[i]);
        if (i < theirs[1]) snprintf(other, sizeof other, "%d", theirs[2 + i]);
        return ddp__fail(DDP_EMISMATCH, "new_group: member %d is %s on rank %d, %s on rank %d", i + 1, mine,
                         ddp__job.rank, other, r);
    }
    return 0;
}

static int check_ranks(const int *ranks, int n) {
    if (n < 1 || n > ddp__job.size)
        return ddp__fail(DDP_EINVAL, "new_group: %d ranks in a world of %d", n, ddp__job.size);
    for (int i = 0; i < n; i++) {
        if (ranks[i] < 0 || ranks[i] >= ddp__job.size)
            return ddp__fail(DDP_EINVAL, "new_group: rank %d in a world of %d", ranks[i], ddp__job.size);
        if (i && ranks[i] <= ranks[i - 1])
            return ddp__fail(DDP_EINVAL, "new_group: rank %d after rank %d, expected each once, ascending", ranks[i],
                             ranks[i - 1]);
    }
    return 0;
}

/* The hosts of all ranks, and whether all make this group. */
static int meet(const int *ranks, int n, int *hosts) {
    int size = ddp__job.size, words = size + 2, st;
    int *mine = calloc((size_t)words * (size_t)(size + 1), sizeof *mine), *all = mine + words;
    if (!mine) return ddp__fail(DDP_ENOMEM, "new_group: out of memory");
    mine[0] = ddp__job.rank - ddp__job.local_rank;
    mine[1] = n;
    memcpy(mine + 2, ranks, (size_t)n * sizeof *ranks);
    ddp_coll c = ddp__coll(DDP_COLL_ALL_GATHER, mine, all, words, DDP_I32, "group");
    st = ddp__coll_run(&c, NULL);
    if (st == 0) st = compare(all, words, n, ranks);
    for (int r = 0; r < size && st == 0; r++) hosts[r] = all[r * words];
    free(mine);
    return st;
}

int ddp_group_new(const int *ranks, int n, ddp_group **out) {
    static int made; /* alike on all ranks */
    if (ddp__pending()) return ddp__pending();
    int st = ddp__job_ready("new_group");
    if (st == 0 && ddp__job.group) st = ddp__fail(DDP_ESTATE, "new_group: inside a group; all ranks make it together");
    if (st == 0) st = check_ranks(ranks, n);
    if (st < 0) return st;
    int *hosts = calloc((size_t)ddp__job.size, sizeof *hosts);
    ddp_group *g = hosts ? new_group(ranks, n) : NULL;
    if (!g) {
        free(hosts);
        return ddp__pending() ? ddp__pending() : ddp__fail(DDP_ENOMEM, "new_group: out of memory");
    }
    snprintf(g->prefix, sizeof g->prefix, "group/%d", ++made);
    if (ddp__job.size > 1 && (st = meet(ranks, n, hosts)) == 0) st = open_comm(g, hosts);
    free(hosts);
    if (st == 0) *out = g;
    else {
        ddp_saved_error e;
        ddp__error_save(&e);
        ddp_group_free(g);
        ddp__error_restore(&e);
    }
    return st;
}

void ddp__groups_abort(const char *why) {
    for (ddp_group *g = all_groups; g; g = g->next)
        if (g->comm) ddp__job.engine->abort(g->comm, why);
}

void ddp__groups_leave(void) {
    for (ddp_group *g = all_groups; g; g = g->next) {
        if (!g->comm) continue;
        ddp__job.engine->destroy(g->comm, ddp__job.engine->health(g->comm) == 0);
        g->comm = NULL;
    }
}

/* ---- two ranks ---- */

/* The group of this rank and `peer`, made when it is first needed: by these two alone. */
static ddp_group *pair_with(const char *what, int peer) {
    int me = ddp__job.rank, ranks[2] = {me < peer ? me : peer, me < peer ? peer : me};
    if (peer < 0 || peer >= ddp__job.size || peer == me) {
        ddp__fail(DDP_EINVAL, "%s: rank %d on rank %d in a world of %d", what, peer, me, ddp__job.size);
        return NULL;
    }
    char prefix[64];
    snprintf(prefix, sizeof prefix, "pair/%d-%d", ranks[0], ranks[1]);
    for (ddp_group *g = all_groups; g; g = g->next)
        if (strcmp(g->prefix, prefix) == 0) return g;
    ddp_group *g = new_group(ranks, 2);
    int *hosts = calloc((size_t)ddp__job.size, sizeof *hosts);
    if (!g || !hosts) {
        free(hosts);
        ddp_group_free(g);
        return NULL;
    }
    snprintf(g->prefix, sizeof g->prefix, "%s", prefix);
    /* Hosts have equally many ranks, in order. */
    for (int r = 0; r < ddp__job.size; r++) hosts[r] = r / ddp__job.local_size;
    ddp_group *before = ddp_group_use(g);
    int st = ddp__group_note(open_comm(g, hosts));
    ddp_group_use(before);
    free(hosts);
    if (st == 0) return g;
    ddp_saved_error e;
    ddp__error_save(&e);
    ddp_group_free(g);
    ddp__error_restore(&e);
    return NULL;
}

static int message(const char *what, ddp_tensor *t, int peer, int from, const char *name, ddp_work **work) {
    if (ddp__pending()) return ddp__pending();
    int st = ddp__job_ready(what);
    ddp_group *g = st < 0 ? NULL : pair_with(what, peer);
    if (!g) return ddp__pending();
    ddp_group *before = ddp_group_use(g);
    st = ddp__in_place(DDP_COLL_BROADCAST, what, t, 0, place_of(g, from), name ? name : "message", work);
    ddp_group_use(before);
    return st;
}

int ddp_send(ddp_tensor *t, int to, const char *name, ddp_work **work) {
    return message("send", t, to, ddp__job.rank, name, work);
}
int ddp_recv(ddp_tensor *t, int from, const char *name, ddp_work **work) {
    return message("recv", t, from, from, name, work);
}

/* A part each way: both are posted before either is waited for. */
static int swap_with(int peer, void *mine, void *theirs, int64_t n, const ddp_meta *m, const char *name) {
    ddp_group *g = pair_with("all_to_all", peer);
    if (!g) return ddp__pending();
    ddp_group *before = ddp_group_use(g);
    ddp_req *req[2] = {NULL, NULL};
    int st = 0;
    for (int root = 0; root < 2 && st == 0; root++) {
        ddp_coll c = ddp__coll(DDP_COLL_BROADCAST, NULL, root == g->rank ? mine : theirs, n, m->dtype, name);
        c.root = root;
        c.device = m->device;
        st = ddp__coll_run(&c, &req[root]);
    }
    for (int i = 0; i < 2; i++) {
        int one = req[i] ? ddp__coll_wait(req[i], NULL) : 0;
        if (st == 0) st = one;
    }
    ddp_group_use(before);
    return st;
}

/* Each rank takes its peers in ascending order: of all pairs that have not finished, the first has both its ranks there. */
int ddp_all_to_all_into(ddp_tensor *out, ddp_tensor *x, const char *name) {
    if (ddp__pending()) return ddp__pending();
    if (!out || !x) return ddp__fail(DDP_ENULL, "all_to_all: no tensor");
    int st = ddp__job_ready("all_to_all"), size = ddp__size_here(), me = ddp_group_rank(NULL);
    if (st < 0) return st;
    if (x->m.ndim == 0 || x->m.size[0] % size)
        return ddp__fail(DDP_ESHAPE, "all_to_all: x is %s: its first size must divide into %d ranks",
                         DDP_SHAPE_TEXT(&x->m), size);
    if (out->m.device != x->m.device)
        return ddp__fail(DDP_EDEVICE, "all_to_all: out is on %s, x on %s", DDP_DEVICE_TEXT(out->m.device),
                         DDP_DEVICE_TEXT(x->m.device));
    if (out->m.dtype != x->m.dtype || !ddp__meta_same_size(&out->m, &x->m) || !ddp__meta_is_rowmajor(&out->m))
        return ddp__fail(DDP_ESHAPE, "all_to_all: out is %s %s, x %s %s, expected alike, out contiguous",
                         ddp_dtype_name(out->m.dtype), DDP_SHAPE_TEXT(&out->m), ddp_dtype_name(x->m.dtype),
                         DDP_SHAPE_TEXT(&x->m));
    ddp_tensor *in = ddp__meta_is_rowmajor(&x->m) ? ddp_retain(x) : ddp_keep(ddp_clone(x, 0));
    if (!in) return ddp__pending();
    int64_t n = x->numel / size, bytes = n * ddp__dtype_bytes[x->m.dtype];
    char *from = ddp__ptr(in), *to = ddp__ptr(out);
    int device = x->m.device;
    if (n > 0 && device == DDP_CPU) memcpy(to + me * bytes, from + me * bytes, (size_t)bytes);
    else if (n > 0)
        st = ddp__device_of(device)->copy(to + me * bytes, device, from + me * bytes, device, (size_t)bytes);
    for (int p = 0; p < size && st == 0 && n > 0; p++) {
        int peer = ddp__job.group ? ddp__job.group->ranks[p] : p;
        if (p != me) st = swap_with(peer, from + p * bytes, to + p * bytes, n, &in->m, name ? name : "all_to_all");
    }
    ddp__drop(in);
    if (st == 0) ddp_mark_written(out);
    return st;
}
