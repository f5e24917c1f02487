/* autocast.c -- inputs cast by the op's policy, and the cache of cast weights.
 *
 * The cache holds bytes, never history: each use of a weight is a tensor of its own over the cached storage, with a cast
 * recorded for it. So a backward may free its graph without touching the next, and a cast made under no_grad serves
 * training too. */
#include <stdlib.h>
#include <string.h>

#include "../op/op.h"

typedef struct entry {
    ddp_storage *from, *bytes; /* of the weight and of its cast; a reference to each */
    uint64_t version;          /* of `from` when it was cast */
    ddp_meta from_meta, meta;
} entry;

static _Thread_local struct {
    entry *entries;
    int n, room;
    int depth, elsewhere; /* open regions: of the code that runs, and of code that was left inside of them */
} cache;

static void drop_entry(int i) {
    ddp__storage_release(cache.entries[i].from);
    ddp__storage_release(cache.entries[i].bytes);
    cache.entries[i] = cache.entries[--cache.n];
}

/* Where no region is open. */
static void clear_cache(void) {
    if (cache.depth > 0 || cache.elsewhere > 0) return;
    while (cache.n > 0) drop_entry(cache.n - 1);
    free(cache.entries);
    cache.entries = NULL;
    cache.room = 0;
}

static bool same_place(const ddp_meta *a, const ddp_meta *b) {
    return a->dtype == b->dtype && a->offset == b->offset && ddp__meta_same_size(a, b) &&
           memcmp(a->stride, b->stride, sizeof *a->stride * (size_t)a->ndim) == 0;
}

/* The entry of x in `to`, or NULL. What was cast from an older version of its storage goes. */
static const entry *find(const ddp_tensor *x, ddp_dtype to) {
    uint64_t version = atomic_load_explicit(&x->storage->version, memory_order_relaxed);
    for (int i = 0; i < cache.n; i++) {
        const entry *e = &cache.entries[i];
        if (e->from != x->storage) continue;
        if (e->version != version) drop_entry(i--);
        else if (e->meta.dtype == to && same_place(&e->from_meta, &x->m)) return e;
    }
    return NULL;
}

/* Notes that y is the cast of x. Without memory for it the next use casts again. */
static void remember(const ddp_tensor *x, const ddp_tensor *y) {
    if (cache.n == cache.room) {
        int room = cache.room ? 2 * cache.room : 64;
        entry *more = realloc(cache.entries, (size_t)room * sizeof *more);
        if (!more) return;
        cache.entries = more;
        cache.room = room;
    }
    atomic_fetch_add_explicit(&x->storage->refs, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&y->storage->refs, 1, memory_order_relaxed);
    cache.entries[cache.n++] =
        (entry){x->storage, y->storage, atomic_load_explicit(&x->storage->version, memory_order_relaxed), x->m, y->m};
}

/* Another tensor over the cached bytes, recorded as a cast of x. */
static ddp_tensor *use_again(const entry *e, ddp_tensor *x) {
    ddp_tensor *y = ddp__tensor_over(e->bytes, &e->meta);
    if (!y) return NULL;
    ddp_cast_attrs attrs = {.dtype = e->meta.dtype};
    ddp_call c = {.op = &ddp__ops[DDP_OP_cast], .attrs = &attrs, .n_in = 1, .in = &x, .out = {y}};
    if (ddp__slots.record && ddp__slots.record(&c, false) < 0) {
        ddp__drop(y);
        return NULL;
    }
    return y;
}

/* x in `to`; a new reference that no scope owns. */
static ddp_tensor *cast(ddp_tensor *x, ddp_dtype to) {
    bool weight = x->requires_grad && !x->node && !ddp__slots.capture; /* a plan must see every cast */
    const entry *e = weight ? find(x, to) : NULL;
    if (e) return use_again(e, x);
    ddp_tensor *y = ddp_keep(ddp_cast(x, (int)to));
    if (y && weight) remember(x, y);
    return y;
}

/* Does autocast touch it? f64, integers, and numbers that take the other operand's dtype stay. */
static bool eligible(const ddp_tensor *x) {
    return x && !x->is_number && ddp__is_float(x->m.dtype) && x->m.dtype != DDP_F64;
}

static ddp_dtype target(const ddp_op_def *op, int n_in, ddp_tensor *const *in) {
    if (op->flags & DDP_OPF_AMP_LOW) return (ddp_dtype)ddp__autocast;
    if (op->flags & DDP_OPF_AMP_F32) return DDP_F32;
    int widest = -1;
    for (int i = 0; i < n_in; i++)
        if (in[i] && ddp__is_float(in[i]->m.dtype))
            widest = widest < 0 ? (int)in[i]->m.dtype : (int)ddp__promote((ddp_dtype)widest, in[i]->m.dtype);
    return widest < 0 ? DDP_F32 : (ddp_dtype)widest;
}

static int cast_inputs(const ddp_op_def *op, int n_in, ddp_tensor **in, ddp_tensor **owned) {
    ddp_dtype to = target(op, n_in, in);
    for (int i = 0; i < n_in; i++) {
        if (!eligible(in[i]) || in[i]->m.dtype == to) continue;
        if ((op->flags & DDP_OPF_AMP_KEEP_VECTORS) && in[i]->m.ndim == 1) continue;
        ddp_tensor *y = cast(in[i], to);
        if (!y) return ddp__pending();
        ddp__drop(owned[i]);
        owned[i] = in[i] = y;
    }
    return 0;
}

/* ---- regions ---- */

int ddp_autocast_begin(int dtype, int *before) {
    if (ddp__pending()) return ddp__pending();
    if (dtype != DDP_F16 && dtype != DDP_BF16 && dtype != DDP_AUTOCAST_OFF)
        return ddp__fail(DDP_EDTYPE, "autocast: %s; f16 and bf16 are possible", ddp_dtype_name(dtype));
    *before = ddp__autocast;
    ddp__autocast = dtype;
    cache.depth++;
    return 0;
}

void ddp_autocast_end(int before) {
    ddp__autocast = before;
    if (cache.depth > 0) cache.depth--;
    clear_cache();
}

void ddp_autocast_swap(ddp_autocast_state *s) {
    ddp_autocast_state now = {ddp__autocast, cache.depth};
    cache.elsewhere += now.regions - s->regions;
    ddp__autocast = s->dtype;
    cache.depth = s->regions;
    *s = now;
}

void ddp_autocast_abandon(ddp_autocast_state *s) {
    cache.elsewhere -= s->regions;
    s->regions = 0;
    clear_cache();
}

int ddp_autocast_dtype(void) { return ddp__autocast; }

__attribute__((constructor)) static void fill_slots(void) { ddp__slots.cast = cast_inputs; }
