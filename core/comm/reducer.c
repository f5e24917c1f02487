/* reducer.c -- gradients of a model, reduced in buckets while backward runs.
 *
 * Parameters stand in buckets in reverse order, so that the last layers' gradients, which come first, go first. A
 * bucket is one block of memory (the engine's, so that reducing needs no copy): the gradients one behind the other,
 * each a view (p.grad), then one number a parameter that says whether this rank touched it. Buckets are posted in their
 * order, the same on every rank. The order stays that of construction: on one host reduction is work of the same cores,
 * so an order by arrival has little to gain. */
#include "reducer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

ddp_reducer *ddp__reducers;

/* ---- gradients come in ----------------------------------------------------------------------------------------------
 */

/* A backward will give leaf a gradient: *round (NULL at its first) is the one that this leads to. */
static int take_part(ddp_reduction **round, int64_t *number, ddp_tensor *leaf, double weight) {
    ddp_reducer *r = ((slot *)leaf->leaf->bucket_slot)->reducer;
    if (*number == 0) *number = ddp__round_count();
    if (r->last == *number) return 0;
    r->last = *number;
    if (!r->sync) return 0;
    if (!*round && !(*round = ddp__round_new(weight))) return ddp__pending();
    return ddp__round_add(*round, r);
}

static int accumulate(ddp_tensor *leaf, ddp_tensor *grad) {
    slot *s = leaf->leaf->bucket_slot;
    ddp_reducer *r = s->reducer;
    int st;
    if (!leaf->grad) {
        st = ddp_copy_(s->view, grad);
        if (st == 0) leaf->grad = ddp_retain(s->view);
    } else {
        st = s->reduced && r->reduce == DDP_SUM ? ddp__round_divide(leaf->grad) : 0;
        if (st == 0) st = ddp_add_(leaf->grad, grad);
    }
    if (st < 0) return st;
    s->reduced = false;
    r->unreduced = true;
    if (!r->round || r->round->ended) return 0;
    bucket *b = &r->buckets[s->bucket];
    if (!s->ready) b->n_ready++;
    s->ready = true;
    st = ddp__round_post(r->round, false, false);
    const bucket *latest = r->n_posted > r->n_buckets ? &r->flags : r->n_posted ? &r->buckets[r->n_posted - 1] : NULL;
    if (st == 0 && latest && latest->req) {
        ddp_phase phase = ddp__phase_enter(DDP_PHASE_COMM);
        st = ddp__job.engine->test(latest->req);
        ddp__phase_enter(phase);
    }
    return st < 0 ? st : 0;
}

/* Between two nodes: does a bucket's hook want to run? */
static int ask(ddp_reduction *round, int64_t *id) {
    int st = round->hooked ? ddp__round_post(round, false, true) : 0;
    if (st == 1) *id = ddp_reduction_host_id();
    return st;
}

static int backward_end(ddp_reduction *round, int64_t *id) {
    int st = ddp__round_finish(round);
    if (st == 1) *id = ddp_reduction_host_id();
    return st;
}

static int set_grad(ddp_tensor *leaf, ddp_tensor *grad) {
    slot *s = leaf->leaf->bucket_slot;
    int st = 0;
    if (grad && grad != s->view) {
        int mode = ddp_set_grad_mode(0);
        st = ddp_copy_(s->view, grad);
        ddp_set_grad_mode(mode);
        if (st < 0) return st;
    }
    ddp_tensor *old = leaf->grad;
    leaf->grad = grad ? ddp_retain(s->view) : NULL;
    ddp__grad_forget(leaf);
    ddp__drop(old);
    return 0;
}

int ddp_reducer_finish(ddp_reducer *r) {
    if (ddp__pending()) return ddp__pending();
    if (!r) return ddp__fail(DDP_ENULL, "reducer: none");
    return r->unreduced && r->sync ? ddp__round_alone(r, 1) : 0;
}

int ddp_reducer_set_sync(ddp_reducer *r, int sync) {
    if (ddp__pending()) return ddp__pending();
    if (!r) return ddp__fail(DDP_ENULL, "reducer: none");
    r->sync = sync != 0;
    return 0;
}

int ddp_reducer_set_weighted(ddp_reducer *r, int weighted) {
    if (ddp__pending()) return ddp__pending();
    if (!r) return ddp__fail(DDP_ENULL, "reducer: none");
    r->weighted = weighted != 0 && r->reduce == DDP_MEAN;
    return 0;
}

int ddp_reducer_reduce(ddp_reducer *r) { return ddp_reducer_reduce_weighted(r, 1); }

int ddp_reducer_reduce_weighted(ddp_reducer *r, double weight) {
    if (ddp__pending()) return ddp__pending();
    if (!r) return ddp__fail(DDP_ENULL, "reducer: none");
    if (!(weight >= 0))
        return ddp__fail(DDP_EINVAL, "reduce_gradients: weight is %g, expected a number from 0", weight);
    int st = ddp__job_ready("reduce_gradients");
    return st < 0 || r->n_buckets == 0 ? st : ddp__round_alone(r, weight);
}

int ddp_reducer_skip(ddp_reducer *r) {
    if (ddp__pending()) return ddp__pending();
    if (!r) return ddp__fail(DDP_ENULL, "reducer: none");
    int st = ddp__job_ready("skip");
    return st < 0 || r->n_buckets == 0 ? st : ddp__round_alone(r, 0);
}

int ddp_is_reduced(const ddp_tensor *t) { return t && t->leaf && t->leaf->bucket_slot; }

int64_t ddp_reducer_last(const ddp_reducer *r) { return r ? r->last : 0; }

int ddp_reducer_touched(const ddp_reducer *r, int i) {
    if (!r || i < 0 || i >= r->n) return 0;
    return r->n_buckets ? r->slots[i].touched : r->slots[i].param->grad != NULL;
}

int ddp_reducer_seen(const ddp_reducer *r) { return r && r->seen; }
int ddp_reducer_used(const ddp_reducer *r, int i) { return r && i >= 0 && i < r->n && r->slots[i].used; }

/* ---- hooks ---- */

static int make_flags(ddp_reducer *r) {
    if (r->flags.mem) return 0;
    r->flags = (bucket){.count = r->n + TAIL_MORE, .dtype = DDP_F32};
    r->flags.mem = calloc((size_t)r->flags.count, sizeof(float));
    return r->flags.mem ? 0 : ddp__fail(DDP_ENOMEM, "reducer: out of memory");
}

int ddp_reducer_set_hook(ddp_reducer *r, int64_t id) {
    if (ddp__pending()) return ddp__pending();
    if (!r) return ddp__fail(DDP_ENULL, "reducer: none");
    if (r->round) return ddp__fail(DDP_ESTATE, "reducer: a hook comes between reductions");
    if (r->buckets && r->buckets[0].narrow) return ddp__fail(DDP_ENOSUP, "reducer: a hook besides compression");
    int st = make_flags(r);
    if (st == 0) r->hook = id;
    return st;
}

int ddp_reducer_hook_bucket(const ddp_reducer *r) { return r ? r->hook_bucket : -1; }
int ddp_reducer_n_buckets(const ddp_reducer *r) { return r ? r->n_buckets : 0; }

ddp_tensor *ddp_reducer_bucket(const ddp_reducer *r, int k) {
    if (ddp__pending()) return NULL;
    if (!r || k < 0 || k >= r->n_buckets) {
        ddp__fail(DDP_EINVAL, "reducer: bucket %d of %d", k, r ? r->n_buckets : 0);
        return NULL;
    }
    const bucket *b = &r->buckets[k];
    return ddp_from_blob(b->mem, 1, (int64_t[]){b->tail}, NULL, (int)b->dtype, r->device, NULL, NULL);
}

/* ---- construction ---- */

/* "w f32 [3,4]" a line: what all ranks must agree on. The caller frees. */
static char *describe(ddp_tensor *const *params, int n, const char *const *names) {
    size_t room = 256 * (size_t)n + 64, at = 0;
    char *text = malloc(room);
    if (!text) {
        ddp__fail(DDP_ENOMEM, "reducer: out of memory");
        return NULL;
    }
    text[0] = 0;
    for (int i = 0; i < n; i++) {
        char number[24];
        snprintf(number, sizeof number, "parameter %d", i + 1);
        at += (size_t)snprintf(text + at, room - at, "%.80s %s %s\n", names ? names[i] : number,
                               ddp_dtype_name(params[i]->m.dtype), DDP_SHAPE_TEXT(&params[i]->m));
    }
    return text;
}

/* The first line in which `mine` differs from rank 0's; false when none does. */
static bool first_difference(const char *mine, const char *theirs, char *out, size_t n) {
    for (int line = 1; *mine || *theirs; line++) {
        size_t a = strcspn(mine, "\n"), b = strcspn(theirs, "\n");
        if (a != b || memcmp(mine, theirs, a) != 0) {
            snprintf(out, n, "parameter %d is %.*s on rank %d, %.*s on rank 0", line, a ? (int)a : 7,
                     a ? mine : "missing", ddp__job.rank, b ? (int)b : 7, b ? theirs : "missing");
            return true;
        }
        mine += a + (mine[a] != 0);
        theirs += b + (theirs[b] != 0);
    }
    return false;
}

static int compare_models(ddp_tensor *const *params, int n, const char *const *names) {
    char *mine = describe(params, n, names), diff[512] = "";
    if (!mine) return ddp__pending();
    int st, size = ddp__job.size;
    void *data = mine, *all = NULL;
    int64_t len = (int64_t)strlen(mine), *lens = calloc((size_t)size, sizeof *lens);
    if (!lens) {
        st = ddp__fail(DDP_ENOMEM, "reducer: out of memory");
        goto done;
    }
    if ((st = ddp_broadcast_bytes(&data, &len, 0)) < 0) goto done;
    first_difference(mine, data, diff, sizeof diff);
    if (data != mine) free(data);
    if ((st = ddp_all_gather_bytes(diff, (int64_t)strlen(diff), &all, lens)) < 0) goto done;
    const char *at = all;
    for (int r = 0; r < size && st == 0; at += lens[r++])
        if (lens[r]) st = ddp__fail(DDP_EMISMATCH, "the ranks' models differ: %.*s", (int)lens[r], at);
done:
    free(mine);
    free(all);
    free(lens);
    return st;
}

/* Fills b with parameters from `i` down, of one dtype, up to `limit` bytes. Returns the next one down. */
static int fill_bucket(ddp_reducer *r, int i, size_t limit, bucket *b) {
    b->slots = calloc((size_t)r->n, sizeof *b->slots);
    if (!b->slots) return ddp__fail(DDP_ENOMEM, "reducer: out of memory");
    b->dtype = r->slots[i].param->m.dtype;
    for (; i >= 0; i--) {
        slot *s = &r->slots[i];
        size_t bytes = (size_t)(b->count + s->param->numel) * ddp__dtype_bytes[b->dtype];
        if (s->param->m.dtype != b->dtype || (b->n && bytes > limit)) break;
        s->bucket = r->n_buckets;
        s->index = b->n;
        b->slots[b->n++] = s;
        b->count += (s->param->numel + 15) / 16 * 16; /* views begin on cache lines */
    }
    b->tail = b->count;
    if (r->device == DDP_CPU) b->count += b->n + (r->n_buckets == 0 ? TAIL_MORE : 0);
    return i;
}

static void *element(const bucket *b, int64_t i) { return (char *)b->mem + i * ddp__dtype_bytes[b->dtype]; }

static int make_views(bucket *b, int device) {
    int64_t at = 0;
    for (int i = 0; i < b->n; i++) {
        slot *s = b->slots[i];
        ddp_meta m = s->param->m;
        if (!ddp__meta_is_dense(&m)) ddp__meta_rowmajor(&m);
        s->view = ddp_keep(ddp_from_blob(element(b, at), m.ndim, m.size, m.stride, (int)b->dtype, device, NULL, NULL));
        if (!s->view) return ddp__pending();
        at += (s->param->numel + 15) / 16 * 16;
        ddp_leaf_info *info = ddp__leaf_info(s->param);
        if (!info) return ddp__pending();
        if (info->bucket_slot) return ddp__fail(DDP_ESTATE, "reducer: a parameter belongs to another reducer already");
        info->bucket_slot = s;
    }
    return 0;
}

/* Memory that the engine reduces without a copy. */
static int bucket_alloc(int device, size_t bytes, void **out) {
    const ddp_engine *e = ddp__job.engine;
    if (device == DDP_CPU) return e->alloc(ddp__job.comm, bytes, out);
    if (!e->alloc_on)
        return ddp__fail(
            DDP_EDEVICE,
            "reducer: the model is on %s, but engine %s moves host memory only; start with --engine nccl (or auto)",
            DDP_DEVICE_TEXT(device), e->name);
    return e->alloc_on(ddp__job.comm, device, bytes, out);
}

static void bucket_free(const ddp_reducer *r, void *mem, size_t bytes) {
    if (!mem || !ddp__job.comm) return;
    if (r->device == DDP_CPU) ddp__job.engine->dealloc(ddp__job.comm, mem);
    else ddp__job.engine->dealloc_on(ddp__job.comm, r->device, mem, bytes);
}

/* What travels in place of b's f32 numbers. */
static int make_narrow(bucket *b, int device, ddp_dtype dtype, bool feedback) {
    int st = bucket_alloc(device, (size_t)b->count * ddp__dtype_bytes[dtype], &b->narrow_mem);
    if (st < 0) return st;
    b->wide = ddp_keep(ddp_from_blob(b->mem, 1, &b->count, NULL, (int)b->dtype, device, NULL, NULL));
    b->narrow = ddp_keep(ddp_from_blob(b->narrow_mem, 1, &b->count, NULL, (int)dtype, device, NULL, NULL));
    if (feedback) b->rest = ddp_keep(ddp_full(1, &b->count, 0, DDP_F32, device));
    return ddp__pending();
}

static int make_buckets(ddp_reducer *r, double bucket_mb, int compression, bool feedback) {
    /* An engine that goes on by itself overlaps: smaller buckets leave less for the end. On two hosts at 2 Gbit/s a ResNet-18 step
     * took 1.21 of its slower part with 25 MB, 1.08 with 8. */
    bool overlaps = (ddp__job.engine->caps & DDP_CAP_SELF_PROGRESS) && r->device == DDP_CPU;
    size_t limit = (size_t)((bucket_mb > 0 ? bucket_mb : overlaps ? 8 : 25) * (1 << 20));
    r->buckets = calloc((size_t)r->n, sizeof *r->buckets);
    if (!r->buckets) return ddp__fail(DDP_ENOMEM, "reducer: out of memory");
    for (int i = r->n - 1; i >= 0;) {
        bucket *b = &r->buckets[r->n_buckets];
        i = fill_bucket(r, i, limit, b);
        if (ddp__pending()) return ddp__pending();
        r->n_buckets++;
        int st = bucket_alloc(r->device, (size_t)b->count * ddp__dtype_bytes[b->dtype], &b->mem);
        if (st < 0 || (st = make_views(b, r->device)) < 0) return st;
        if (compression && b->dtype == DDP_F32)
            st = make_narrow(b, r->device, compression == DDP_COMPRESSION_BF16 ? DDP_BF16 : DDP_F16, feedback);
        if (st < 0) return st;
    }
    return 0;
}

static int broadcast_params(ddp_tensor *const *params, int n) {
    int mode = ddp_set_grad_mode(0), st = 0;
    for (int i = 0; i < n && st == 0; i++) st = ddp_broadcast(params[i], 0, "parameters", NULL);
    ddp_set_grad_mode(mode);
    return st;
}

int ddp_reducer_new(ddp_tensor *const *params, int n, const ddp_reducer_opts *opts, ddp_reducer **out) {
    int st = ddp__job_ready("reducer");
    if (st < 0) return st;
    int compression = opts ? opts->compression : 0;
    if (compression < DDP_COMPRESSION_NONE || compression > DDP_COMPRESSION_F16)
        return ddp__fail(DDP_EINVAL, "reducer: compression is %d, expected none, bf16 or f16", compression);
    for (int i = 1; i < n; i++)
        if (params[i] && params[0] && params[i]->m.device != params[0]->m.device)
            return ddp__fail(DDP_EDEVICE,
                             "reducer: parameter 1 is on %s, parameter %d on %s; move the model with :to()",
                             DDP_DEVICE_TEXT(params[0]->m.device), i + 1, DDP_DEVICE_TEXT(params[i]->m.device));
    for (int i = 0; i < n; i++)
        if (!params[i] || params[i]->node)
            return ddp__fail(DDP_EINVAL, "reducer: parameter %d is %s", i + 1,
                             params[i] ? "a result of ops, not a leaf" : "missing");
    ddp_reducer *r = calloc(1, sizeof *r);
    if (!r || !(r->slots = calloc((size_t)n + 1, sizeof *r->slots))) {
        free(r);
        return ddp__fail(DDP_ENOMEM, "reducer: out of memory");
    }
    static int64_t made;
    r->serial = ++made;
    r->n = n;
    r->device = n ? params[0]->m.device : DDP_CPU;
    r->sync = true;
    r->reduce = opts && opts->sum ? DDP_SUM : DDP_MEAN;
    r->weighted = opts && opts->weighted;
    for (int i = 0; i < n; i++) r->slots[i] = (slot){.reducer = r, .param = ddp_retain(params[i])};
    r->next = ddp__reducers;
    ddp__reducers = r;
    if (ddp__job.size > 1) {
        st = compare_models(params, n, opts ? opts->names : NULL);
        if (st == 0) st = broadcast_params(params, n);
        if (st == 0 && r->device != DDP_CPU) st = make_flags(r);
        if (st == 0) st = make_buckets(r, opts ? opts->bucket_mb : 0, compression, opts && opts->error_feedback);
    }
    if (st < 0) {
        ddp_saved_error e;
        ddp__error_save(&e);
        ddp_reducer_free(r);
        ddp__error_restore(&e);
        return st;
    }
    *out = r;
    return 0;
}

void ddp_reducer_free(ddp_reducer *r) {
    if (!r) return;
    ddp__round_forget(r);
    for (ddp_reducer **p = &ddp__reducers; *p; p = &(*p)->next) {
        if (*p != r) continue;
        *p = r->next;
        break;
    }
    for (int i = 0; i < r->n; i++) {
        slot *s = &r->slots[i];
        if (s->param->leaf && s->param->leaf->bucket_slot == s) s->param->leaf->bucket_slot = NULL;
        if (s->view && s->param->grad == s->view) { /* the bucket goes; the gradient stays, in memory of its own */
            ddp_saved_error e;
            ddp__error_save(&e);
            ddp__grad_settle(s->param);
            ddp__drop(s->param->grad);
            s->param->grad = ddp_keep(ddp_clone(s->view, 1));
            ddp_error_take(NULL);
            ddp__error_restore(&e);
        }
        ddp__drop(s->view);
        ddp__drop(s->param);
    }
    for (int k = 0; k < r->n_buckets; k++) {
        bucket *b = &r->buckets[k];
        ddp__drop(b->wide);
        ddp__drop(b->narrow);
        ddp__drop(b->rest);
        if (b->narrow_mem) bucket_free(r, b->narrow_mem, (size_t)b->count * 2);
        bucket_free(r, b->mem, (size_t)b->count * ddp__dtype_bytes[b->dtype]);
        free(b->slots);
    }
    free(r->flags.mem);
    free(r->buckets);
    free(r->slots);
    free(r);
}

__attribute__((constructor)) static void fill_slots(void) {
    ddp__grad_slots.take_part = take_part;
    ddp__grad_slots.accumulate = accumulate;
    ddp__grad_slots.ask = ask;
    ddp__grad_slots.backward_end = backward_end;
    ddp__grad_slots.round_free = ddp_reduction_free;
    ddp__grad_slots.set_grad = set_grad;
}
