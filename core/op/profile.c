/* profile.c -- time by kernel and shape: what run_call hands over while a profile is on. Rows are found by a hash of
 * kernel, dtypes and sizes; the text of a row is written once, when its first call comes. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "op_build.h"

atomic_bool ddp__profile_on;
static unsigned watched_by; /* DDP_WATCH_*, set by the compute thread */

typedef struct row {
    uint64_t key;
    ddp_profile_row out;
    char shape[160];
} row;

static struct {
    pthread_t thread; /* the one that started it: only its calls count */
    row *rows;
    int64_t n, room;
    int32_t *slots; /* [2 * room] open addressing: 1 + a row's index; 0: free */
} p;

void ddp__watch_calls(unsigned who, bool on) {
    watched_by = on ? watched_by | who : watched_by & ~who;
    if (on) p.thread = pthread_self();
    atomic_store(&ddp__profile_on, watched_by != 0);
}

int ddp_profile_start(void) {
    if (ddp__pending()) return ddp__pending();
    p.n = 0;
    if (p.slots) memset(p.slots, 0, 2 * (size_t)p.room * sizeof *p.slots);
    ddp__watch_calls(DDP_WATCH_PROFILE, true);
    return 0;
}

void ddp_profile_stop(void) { ddp__watch_calls(DDP_WATCH_PROFILE, false); }

int ddp_profile_read(int64_t i, ddp_profile_row *out) {
    if (i < 0 || i >= p.n) return DDP_EINVAL;
    *out = p.rows[i].out;
    out->shape = p.rows[i].shape; /* rows move while the table grows */
    return 0;
}

/* ---- what a call is ---- */

static void mix(uint64_t *h, uint64_t v) { *h = ddp__mix(*h ^ v, 0); }

static void mix_meta(uint64_t *h, const ddp_tensor *t) {
    if (!t) {
        mix(h, 0);
        return;
    }
    mix(h, (uint64_t)t->m.dtype << 8 | (uint64_t)t->m.ndim << 1 | 1);
    for (int i = 0; i < t->m.ndim; i++) mix(h, (uint64_t)t->m.size[i]);
}

static uint64_t key_of(const ddp_kernel *k, const ddp_call *c) {
    uint64_t h = (uint64_t)(uintptr_t)k->name;
    mix(&h, (uint64_t)c->op->id);
    for (int i = 0; i < c->n_in; i++) mix_meta(&h, c->in[i]);
    for (int i = 0; i < c->op->n_out; i++) mix_meta(&h, c->out[i]);
    return h;
}

/* "64x64x32x32", with the dtype before it unless that is f32. */
static size_t meta_text(char *buf, size_t n, const ddp_meta *m) {
    size_t at = 0;
    buf[0] = 0;
    if (m->dtype != DDP_F32) at += (size_t)snprintf(buf, n, "%s ", ddp_dtype_name((int)m->dtype));
    for (int i = 0; i < m->ndim && at + 1 < n; i++)
        at += (size_t)snprintf(buf + at, n - at, "%s%lld", i ? "x" : "", (long long)m->size[i]);
    if (m->ndim == 0 && at + 1 < n) at += (size_t)snprintf(buf + at, n - at, "1");
    return at < n ? at : n - 1;
}

/* "64x64x32x32 w 128x64x3x3 -> 64x128x32x32": the first input, the others by name (vectors and numbers left out), the
 * result where its sizes are others. A list: "62 tensors, 11173962 elements". */
static void shape_text(const ddp_call *c, char *buf, size_t n) {
    size_t at = 0;
    const ddp_tensor *first = c->n_in ? c->in[0] : NULL, *out = c->op->n_out ? c->out[0] : NULL;
    if (c->op->lists) {
        int64_t numel = 0;
        int count = c->n_in / c->op->n_in;
        for (int i = 0; i < count; i++) numel += c->in[i]->numel;
        snprintf(buf, n, "%d tensors, %lld elements", count, (long long)numel);
        return;
    }
    if (first) at = meta_text(buf, n, &first->m);
    for (int i = 1; i < c->n_in && at + 8 < n; i++) {
        const ddp_tensor *t = c->in[i];
        if (!t || (t->m.ndim < 2 && first->m.ndim > 1) || ddp__meta_same_size(&t->m, &first->m)) continue;
        at += (size_t)snprintf(buf + at, n - at, " %s ", c->op->in_names[i]);
        if (at < n) at += meta_text(buf + at, n - at, &t->m);
    }
    if (!out || at + 8 >= n || (first && ddp__meta_same_size(&out->m, &first->m) && out->m.dtype == first->m.dtype))
        return;
    at += (size_t)snprintf(buf + at, n - at, "%s-> ", at ? " " : "");
    if (at < n) meta_text(buf + at, n - at, &out->m);
}

/* Bytes of t's elements; those repeated by a stride of 0 count once. */
double ddp__tensor_bytes(const ddp_tensor *t) {
    double n = ddp__dtype_bytes[t->m.dtype];
    for (int i = 0; i < t->m.ndim; i++)
        if (t->m.stride[i] != 0) n *= (double)t->m.size[i];
    return t->numel ? n : 0;
}

/* The same stretch of the same storage as an earlier one of t[0..i). */
static bool seen(ddp_tensor *const *t, int i) {
    for (int k = 0; k < i; k++)
        if (t[k] && t[k]->storage == t[i]->storage && t[k]->m.offset == t[i]->m.offset) return true;
    return false;
}

/* Inputs read plus results written, each distinct stretch of memory once each way. Ops that pick by index count their
 * whole input. Of ops that only exist in place the target is not read, unless they are steps (WRITES). */
double ddp__call_bytes(const ddp_call *c) {
    double bytes = 0;
    bool only_writes = (c->op->flags & DDP_OPF_ONLY_IN_PLACE) && !(c->op->flags & DDP_OPF_WRITES);
    for (int i = 0; i < c->n_in; i++) {
        if (!c->in[i] || (i < 64 && seen(c->in, i))) continue; /* the tensors of long lists are distinct */
        if (i > 0 || !only_writes) bytes += ddp__tensor_bytes(c->in[i]);
        if ((c->op->flags & DDP_OPF_WRITES) && c->op->rules->writes(c, i)) bytes += ddp__tensor_bytes(c->in[i]);
    }
    for (int i = 0; i < c->op->n_out; i++) {
        bool counted =
            (c->op->flags & DDP_OPF_WRITES) && c->in[0] && c->out[i] && c->out[i]->storage == c->in[0]->storage;
        if (c->out[i] && !counted && !seen(c->out, i)) bytes += ddp__tensor_bytes(c->out[i]);
    }
    return bytes;
}

/* ---- the table ---- */

static int64_t place_of(uint64_t key) {
    int64_t mask = 2 * p.room - 1, i = (int64_t)(key & (uint64_t)mask);
    while (p.slots[i] && p.rows[p.slots[i] - 1].key != key) i = (i + 1) & mask;
    return i;
}

static bool grow(void) {
    int64_t room = p.room ? 2 * p.room : 256; /* a power of two */
    row *rows = realloc(p.rows, (size_t)room * sizeof *rows);
    if (!rows) return false;
    p.rows = rows;
    int32_t *slots = calloc(2 * (size_t)room, sizeof *slots);
    if (!slots) return false;
    free(p.slots);
    p.slots = slots;
    p.room = room;
    for (int64_t i = 0; i < p.n; i++) p.slots[place_of(p.rows[i].key)] = (int32_t)i + 1;
    return true;
}

/* The row of this call; NULL when memory is gone: the profile stops counting new shapes, the program does not stop. */
static row *row_of(const ddp_kernel *k, const ddp_call *c) {
    if (p.n == p.room && !grow()) return NULL;
    uint64_t key = key_of(k, c);
    int64_t at = place_of(key);
    if (p.slots[at]) return &p.rows[p.slots[at] - 1];
    row *r = &p.rows[p.n++];
    p.slots[at] = (int32_t)p.n;
    *r = (row){.key = key, .out = {.kernel = k->name, .op = c->op->name}};
    shape_text(c, r->shape, sizeof r->shape);
    return r;
}

int ddp__profile_run(const ddp_kernel *k, const ddp_call *c) {
    if (!pthread_equal(p.thread, pthread_self())) return k->run(c);
    ddp__trace_begin(k, c);
    double begin = ddp__now();
    int st = k->run(c);
    double seconds = ddp__now() - begin;
    ddp__trace_end(seconds);
    row *r = st < 0 || !(watched_by & DDP_WATCH_PROFILE) ? NULL : row_of(k, c);
    if (!r) return st;
    r->out.calls++;
    r->out.seconds += seconds;
    r->out.flops += ddp__call_flops(c);
    r->out.bytes += ddp__call_bytes(c);
    return st;
}
