/* dnnl_util.c -- the cache of primitives, the workspace, and tensors as oneDNN sees them. */
#include "dnnl_util.h"

#include <omp.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { TABLE = 1024, MOST = 512 }; /* slots (a power of two), and entries before all are dropped */

typedef struct dnn_state {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    dnnl_primitive_attr_t attr;
    int threads, entries;
    dnn_entry *table[TABLE]; /* open addressing */
} dnn_state;

static _Thread_local dnn_state *mine;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t at_exit_of_thread;

/* ---- one thread's state ------------------------------------------------------------------------------------------ */

static void entry_free(dnn_entry *e) {
    for (int i = 0; i < e->n; i++) {
        if (e->slot[i].user) dnnl_memory_destroy(e->slot[i].user);
        if (e->slot[i].own) dnnl_memory_destroy(e->slot[i].own);
        if (e->slot[i].reorder) dnnl_primitive_destroy(e->slot[i].reorder);
    }
    if (e->scratch) dnnl_memory_destroy(e->scratch);
    if (e->prim) dnnl_primitive_destroy(e->prim);
    free(e);
}

static void drop_entries(dnn_state *s) {
    for (int i = 0; i < TABLE; i++) {
        if (s->table[i]) entry_free(s->table[i]);
        s->table[i] = NULL;
    }
    s->entries = 0;
}

static void state_free(void *p) {
    dnn_state *s = p;
    drop_entries(s);
    if (s->attr) dnnl_primitive_attr_destroy(s->attr);
    if (s->stream) dnnl_stream_destroy(s->stream);
    if (s->engine) dnnl_engine_destroy(s->engine);
    free(s);
}

static void make_thread_key(void) { pthread_key_create(&at_exit_of_thread, state_free); }

/* NULL with the error set. */
static dnn_state *state(void) {
    if (mine) return mine;
    dnn_state *s = calloc(1, sizeof *s);
    if (!s || dnnl_engine_create(&s->engine, dnnl_cpu, 0) != dnnl_success ||
        dnnl_stream_create(&s->stream, s->engine, dnnl_stream_default_flags) != dnnl_success ||
        dnnl_primitive_attr_create(&s->attr) != dnnl_success ||
        dnnl_primitive_attr_set_scratchpad_mode(s->attr, dnnl_scratchpad_mode_user) != dnnl_success) {
        if (s) state_free(s);
        ddp__fail(DDP_ENOMEM, "onednn: no engine");
        return NULL;
    }
    pthread_once(&once, make_thread_key);
    pthread_setspecific(at_exit_of_thread, s);
    mine = s;
    return s;
}

int dnn_threads(void) {
    int n = ddp_num_threads();
    if (!mine || mine->threads != n) {
        omp_set_num_threads(n);
        if (mine) mine->threads = n;
    }
    return n;
}

/* ---- keys -------------------------------------------------------------------------------------------------------- */

void dnn_key_start(dnn_key *k, int op) {
    k->n = 2;
    k->v[0] = op;
    k->v[1] = dnn_threads();
}

void dnn_key_add(dnn_key *k, int n, const int64_t *v) {
    if (k->n + n > DNN_KEY) abort(); /* a key too small would make two calls one */
    memcpy(k->v + k->n, v, (size_t)n * sizeof *v);
    k->n += n;
}

static uint64_t hash(const dnn_key *k) {
    uint64_t h = (uint64_t)k->n;
    for (int i = 0; i < k->n; i++) h = ddp__mix(h ^ (uint64_t)k->v[i], (uint64_t)i);
    return h;
}

static bool same(const dnn_key *a, const dnn_key *b) {
    return a->n == b->n && memcmp(a->v, b->v, (size_t)a->n * sizeof a->v[0]) == 0;
}

dnn_entry *dnn_find(const dnn_key *k, dnn_build_fn build, const void *ctx) {
    dnn_state *s = state();
    if (!s) return NULL;
    size_t i = hash(k) & (TABLE - 1);
    for (; s->table[i]; i = (i + 1) & (TABLE - 1))
        if (same(&s->table[i]->key, k)) return s->table[i];
    if (s->entries == MOST) {
        drop_entries(s);
        i = hash(k) & (TABLE - 1);
    }
    dnn_entry *e = calloc(1, sizeof *e);
    if (!e) {
        ddp__fail(DDP_ENOMEM, "onednn: out of memory");
        return NULL;
    }
    e->key = *k;
    e->why = build(e, ctx);
    s->table[i] = e;
    s->entries++;
    return e;
}

/* ---- building an entry ------------------------------------------------------------------------------------------- */

dnnl_primitive_desc_t dnn_desc(const void *op_desc, dnnl_primitive_desc_t hint) {
    dnn_state *s = state();
    dnnl_primitive_desc_t pd = NULL;
    if (!s || dnnl_primitive_desc_create(&pd, op_desc, s->attr, s->engine, hint) != dnnl_success) return NULL;
    return pd;
}

bool dnn_is_reference(dnnl_primitive_desc_t pd) {
    const char *name = "";
    dnnl_primitive_desc_query(pd, dnnl_query_impl_info_str, 0, (void *)&name);
    return strncmp(name, "ref", 3) == 0 || strncmp(name, "simple", 6) == 0;
}

static size_t rounded(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

/* Memory objects start without memory: dnn_run gives them theirs. */
static bool memory(dnnl_memory_t *m, const dnnl_memory_desc_t *md) {
    return dnnl_memory_create(m, md, mine->engine, DNNL_MEMORY_NONE) == dnnl_success;
}

static bool slot_make(dnn_slot *s, const dnn_use *u, const dnnl_memory_desc_t *want, size_t *workspace,
                      size_t *scratch) {
    s->arg = u->arg;
    s->out = u->out;
    if (!memory(&s->user, &u->user)) return false;
    if (dnnl_memory_desc_equal(&u->user, want)) return true;
    s->at = *workspace;
    *workspace += rounded(dnnl_memory_desc_get_size(want));
    const dnnl_memory_desc_t *from = u->out ? want : &u->user, *to = u->out ? &u->user : want;
    dnnl_primitive_desc_t pd = NULL;
    if (!memory(&s->own, want)) return false;
    if (dnnl_reorder_primitive_desc_create(&pd, from, mine->engine, to, mine->engine, mine->attr) != dnnl_success)
        return false;
    const dnnl_memory_desc_t *md = dnnl_primitive_desc_query_md(pd, dnnl_query_scratchpad_md, 0);
    size_t bytes = md ? dnnl_memory_desc_get_size(md) : 0;
    if (bytes > *scratch) *scratch = bytes;
    bool made = dnnl_primitive_create(&s->reorder, pd) == dnnl_success;
    dnnl_primitive_desc_destroy(pd);
    return made;
}

const char *dnn_entry_make(dnn_entry *e, dnnl_primitive_desc_t pd, int n, const dnn_use *use) {
    static const char *const no = "oneDNN could not make the primitive";
    const dnnl_memory_desc_t *md = dnnl_primitive_desc_query_md(pd, dnnl_query_scratchpad_md, 0);
    dnnl_memory_desc_t bytes_md;
    size_t scratch = md ? dnnl_memory_desc_get_size(md) : 0;
    bool made = dnnl_primitive_create(&e->prim, pd) == dnnl_success;
    e->n = n;
    for (int i = 0; i < n && made; i++) {
        const dnnl_memory_desc_t *want = dnnl_primitive_desc_query_md(pd, use[i].query, use[i].index);
        made = want && slot_make(&e->slot[i], &use[i], want, &e->workspace, &scratch);
    }
    dnnl_primitive_desc_destroy(pd);
    if (!made) return no;
    e->scratch_at = e->workspace;
    e->workspace += rounded(scratch);
    dnnl_dims_t size = {(int64_t)scratch};
    if (dnnl_memory_desc_init_by_tag(&bytes_md, 1, size, dnnl_u8, dnnl_a) != dnnl_success) return no;
    return memory(&e->scratch, &bytes_md) ? NULL : no;
}

/* ---- running ----------------------------------------------------------------------------------------------------- */

static bool reorder(const dnn_entry *e, const dnn_slot *s) {
    dnnl_exec_arg_t args[3] = {{DNNL_ARG_FROM, s->out ? s->own : s->user},
                               {DNNL_ARG_TO, s->out ? s->user : s->own},
                               {DNNL_ARG_SCRATCHPAD, e->scratch}};
    return dnnl_primitive_execute(s->reorder, mine->stream, 3, args) == dnnl_success;
}

static bool run_in(const dnn_entry *e, void *const *ptr, char *workspace) {
    dnnl_exec_arg_t args[DNN_SLOTS + 1];
    bool ok = dnnl_memory_set_data_handle(e->scratch, workspace + e->scratch_at) == dnnl_success;
    for (int i = 0; i < e->n && ok; i++) {
        const dnn_slot *s = &e->slot[i];
        args[i] = (dnnl_exec_arg_t){s->arg, s->own ? s->own : s->user};
        ok = dnnl_memory_set_data_handle(s->user, ptr[i]) == dnnl_success;
        if (ok && s->own) ok = dnnl_memory_set_data_handle(s->own, workspace + s->at) == dnnl_success;
        if (ok && s->own && !s->out) ok = reorder(e, s);
    }
    args[e->n] = (dnnl_exec_arg_t){DNNL_ARG_SCRATCHPAD, e->scratch};
    ok = ok && dnnl_primitive_execute(e->prim, mine->stream, e->n + 1, args) == dnnl_success;
    for (int i = 0; i < e->n && ok; i++)
        if (e->slot[i].own && e->slot[i].out) ok = reorder(e, &e->slot[i]);
    return dnnl_stream_wait(mine->stream) == dnnl_success && ok;
}

int dnn_run(const dnn_entry *e, const char *op, void *const *ptr) {
    dnn_threads();
    size_t bytes = e->workspace ? e->workspace : 64;
    char *workspace = ddp__mem_alloc(bytes);
    if (!workspace) return ddp__pending();
    bool ok = run_in(e, ptr, workspace);
    ddp__mem_free(workspace, bytes);
    return ok ? 0 : ddp__fail(DDP_ENOSUP, "%s: oneDNN failed to run", op);
}

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

static bool lies_as(const ddp_meta *m, const int *order) {
    int64_t s = 1;
    for (int k = 0; k < m->ndim; k++) {
        int i = order[k];
        if (m->size[i] != 1 && m->stride[i] != s) return false;
        s *= m->size[i];
    }
    return true;
}

dnn_layout dnn_layout_of(const ddp_meta *m) {
    static const int last[4] = {1, 3, 2, 0};
    int rows[DDP_MAX_DIM];
    if (m->ndim == 4 && lies_as(m, last)) return DNN_CHANNELS_LAST;
    for (int i = 0; i < m->ndim; i++) rows[i] = m->ndim - 1 - i;
    return lies_as(m, rows) ? DNN_ROWMAJOR : DNN_OTHER;
}

void dnn_strides(dnn_layout layout, const int64_t *size, int64_t *stride) {
    bool last = layout == DNN_CHANNELS_LAST;
    stride[3] = last ? size[1] : 1;
    stride[2] = stride[3] * size[3];
    stride[1] = last ? 1 : stride[2] * size[2];
    stride[0] = size[1] * size[2] * size[3];
}

bool dnn_md(dnnl_memory_desc_t *md, int n, const int64_t *size, const int64_t *stride) {
    return dnnl_memory_desc_init_by_strides(md, n, size, dnnl_f32, stride) == dnnl_success;
}

void dnn_temp_free(dnn_temp *t) {
    if (t->p) ddp__mem_free(t->p, t->bytes);
    t->p = NULL;
}

/* Four sizes; smaller tensors have leading ones. */
static void copy_4(float *to, const int64_t *ts, const float *from, const int64_t *fs, const int64_t *size) {
    bool last = ts[1] == 1 && size[1] != 1; /* the innermost of the target runs innermost */
    int in = last ? 1 : 3, mid = last ? 3 : 2, out = last ? 2 : 1;
    for (int64_t n = 0; n < size[0]; n++)
        for (int64_t a = 0; a < size[out]; a++)
            for (int64_t b = 0; b < size[mid]; b++) {
                float *t = to + n * ts[0] + a * ts[out] + b * ts[mid];
                const float *f = from + n * fs[0] + a * fs[out] + b * fs[mid];
                for (int64_t c = 0; c < size[in]; c++) t[c * ts[in]] = f[c * fs[in]];
            }
}

float *dnn_dense(const ddp_tensor *t, dnn_layout to, dnn_temp *temp) {
    if (dnn_layout_of(&t->m) != DNN_OTHER) return dnn_ptr(t);
    int64_t size[4] = {1, 1, 1, 1}, from[4] = {0, 0, 0, 0}, stride[4];
    int lead = 4 - t->m.ndim;
    for (int i = 0; i < t->m.ndim; i++) {
        size[lead + i] = t->m.size[i];
        from[lead + i] = t->m.stride[i];
    }
    dnn_strides(to, size, stride);
    temp->bytes = (size_t)t->numel * sizeof(float);
    temp->p = ddp__mem_alloc(temp->bytes);
    if (temp->p) copy_4(temp->p, stride, dnn_ptr(t), from, size);
    return temp->p;
}
