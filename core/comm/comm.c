/* comm.c -- collectives on tensors and bytes: what is the same for every engine. */
#include "comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fault.h"
#include "flight.h"

static _Thread_local char where[96];

void ddp_set_where(const char *w) { snprintf(where, sizeof where, "%s", w ? w : ""); }

int ddp_set_solo(int on) {
    int before = ddp__job.solo;
    ddp__job.solo = on != 0;
    return before;
}

int ddp__job_ready(const char *what) {
    int st = ddp_init(NULL);
    if (st == 0 && ddp__job.solo)
        st = ddp__fail(DDP_ESTATE, "%s: a collective inside rank0, where the other ranks do not come", what);
    if (st == 0 && ddp__job.size > 1 && !ddp__job.comm) st = ddp__fail(DDP_ESTATE, "%s: after finish", what);
    if (st == 0 && ddp__job.group) st = ddp__place_here(what, "rank", ddp__job.rank);
    return st < 0 ? st : 0;
}

/* ---- running one ---------------------------------------------------------------------------------------------------
 */

ddp_coll ddp__coll(ddp_coll_kind kind, const void *in, void *buf, int64_t count, ddp_dtype dtype, const char *name) {
    ddp_coll c = {.in = in, .buf = buf, .count = count, .dtype = dtype, .weight = 1, .deadline_s = ddp__job.timeout};
    c.sig.kind = (int32_t)kind;
    c.sig.dtype = (int32_t)dtype;
    c.sig.count = count;
    snprintf(c.sig.name, sizeof c.sig.name, "%s", name ? name : "");
    return c;
}

/* A call that DDP_FAULT leaves out, or an error that it throws. */
static int skipped(int status, ddp_req **req) {
    if (req) *req = NULL;
    return status;
}

/* Waits for r and changes a bit of its result. */
static int flipped(ddp_coll *coll, ddp_req *r, ddp_req **req) {
    int st = ddp__coll_wait(r, &coll->weight_sum);
    if (st == 0) ddp__fault_flip(coll->buf, (size_t)coll->count * ddp__dtype_bytes[coll->dtype]);
    return skipped(st, req);
}

int ddp__coll_run(ddp_coll *coll, ddp_req **req) {
    const ddp_engine *e = ddp__job.engine;
    ddp_req *r = NULL;
    coll->sig.reduce = coll->reduce;
    coll->sig.root = coll->root;
    coll->sig.on_device = coll->device != DDP_CPU;
    if (coll->device != DDP_CPU && !(e->caps & DDP_CAP_DEVICE))
        return ddp__fail(
            DDP_EDEVICE,
            "collective on %s: engine %s moves host memory only; start with --engine nccl (or auto), or move it "
            "with :to(\"cpu\")",
            DDP_DEVICE_TEXT(coll->device), e->name);
    memcpy(coll->sig.where, where, sizeof where);
    ddp_fault_do fault = DDP_FAULT_NONE;
    int st = ddp__fault_at_collective(&coll->sig, &fault);
    if (st < 0 || fault == DDP_FAULT_SKIP) return skipped(st, req);
    bool world = ddp__comm_here() == ddp__job.comm; /* the record counts what all ranks call */
    uint32_t seq = world ? ddp__flight_post(&coll->sig, coll->deadline_s <= 0) : 0;
    ddp_phase phase = ddp__phase_enter(DDP_PHASE_COMM);
    st = e->post(ddp__comm_here(), coll, &r);
    ddp__phase_enter(phase);
    if (st < 0) return ddp__group_note(st);
    if (world) ddp__flight_req(seq, r);
    if (fault == DDP_FAULT_FLIP) return flipped(coll, r, req);
    if (!req) return ddp__group_note(ddp__coll_wait(r, &coll->weight_sum));
    *req = r;
    return 0;
}

int ddp__coll_wait(ddp_req *req, double *weight_sum) {
    const ddp_engine *e = ddp__job.engine;
    ddp_phase phase = ddp__phase_enter(DDP_PHASE_COMM);
    ddp__flight_wait(req);
    int st = e->wait(req);
    ddp__flight_end(st);
    if (st == 0 && weight_sum && e->weight_sum) *weight_sum = e->weight_sum(req);
    e->req_free(req);
    ddp__phase_enter(phase);
    return st;
}

/* ---- tensors ---- */

struct ddp_work {
    ddp_req *req;
    ddp_tensor *t;     /* the user's */
    ddp_tensor *in;    /* what is read besides; or NULL */
    ddp_tensor *dense; /* what is reduced; t itself, or a dense copy that goes back */
    int status;        /* after the end */
};

static bool one_block(const ddp_tensor *t) { return ddp__meta_is_dense(&t->m); }

static int finish_work(ddp_work *w) {
    if (w->req) {
        w->status = ddp__coll_wait(w->req, NULL);
        w->req = NULL;
    }
    if (w->dense != w->t && w->dense && w->status == 0) {
        int mode = ddp_set_grad_mode(0);
        w->status = ddp_copy_(w->t, w->dense);
        ddp_set_grad_mode(mode);
    }
    if (w->dense != w->t) ddp__drop(w->dense);
    if (w->status == 0) ddp_mark_written(w->t);
    ddp__drop(w->t);
    ddp__drop(w->in);
    w->t = w->dense = w->in = NULL;
    return w->status;
}

int ddp_work_wait(ddp_work *w) {
    if (ddp__pending()) return ddp__pending();
    if (!w) return ddp__fail(DDP_ENULL, "wait: no handle");
    return w->t ? finish_work(w) : w->status;
}

int ddp_work_test(ddp_work *w) {
    if (ddp__pending()) return ddp__pending();
    if (!w) return ddp__fail(DDP_ENULL, "test: no handle");
    if (!w->t) return w->status < 0 ? w->status : 1;
    int st = w->req ? ddp__job.engine->test(w->req) : 1;
    if (st == 1) st = finish_work(w) < 0 ? w->status : 1;
    return st;
}

void ddp_work_free(ddp_work *w) {
    if (!w) return;
    ddp_saved_error e;
    ddp__error_save(&e);
    if (w->t) finish_work(w);
    ddp_error_take(NULL);
    ddp__error_restore(&e);
    free(w);
}

int ddp__in_place(ddp_coll_kind kind, const char *what, ddp_tensor *t, int reduce, int root, const char *name,
                  ddp_work **out) {
    if (ddp__pending()) return ddp__pending();
    if (!t) return ddp__fail(DDP_ENULL, "%s: no tensor", what);
    int st = ddp__job_ready(what);
    if (st < 0) return st;
    if (ddp__grad_on && ddp__wants_grad(t))
        return ddp__fail(DDP_ESTATE, "%s: not differentiable; detach the tensor, or do it inside no_grad", what);
    ddp_work *w = calloc(1, sizeof *w);
    if (!w) return ddp__fail(DDP_ENOMEM, "%s: out of memory", what);
    w->t = ddp_retain(t);
    w->dense = one_block(t) ? t : ddp_keep(ddp_clone(t, 0));
    if (!w->dense) st = ddp__pending();
    if (st == 0 && ddp__size_here() > 1) {
        ddp_coll c = ddp__coll(kind, NULL, ddp__ptr(w->dense), t->numel, t->m.dtype, name);
        c.device = t->m.device;
        c.reduce = reduce;
        c.root = root;
        st = ddp__coll_run(&c, &w->req);
    }
    w->status = st;
    if (st == 0 && out) {
        *out = w;
        return 0;
    }
    st = finish_work(w);
    free(w);
    return st;
}

static int check_op(const char *what, const ddp_tensor *t, int op) {
    if (op < DDP_SUM || op > DDP_MAX)
        return ddp__fail(DDP_EINVAL, "%s: op %d, expected sum, mean, min or max", what, op);
    if (t && op == DDP_MEAN && !ddp__is_float(t->m.dtype))
        return ddp__fail(DDP_EDTYPE, "%s: the mean of %s; cast to f32, or sum", what, ddp_dtype_name(t->m.dtype));
    return 0;
}

int ddp_all_reduce(ddp_tensor *t, int op, const char *name, ddp_work **work) {
    int st = ddp__pending() ? ddp__pending() : check_op("all_reduce", t, op);
    return st < 0 ? st : ddp__in_place(DDP_COLL_ALL_REDUCE, "all_reduce", t, op, 0, name, work);
}

int ddp_broadcast(ddp_tensor *t, int root, const char *name, ddp_work **work) {
    if (ddp__pending()) return ddp__pending();
    if (root < 0 || root >= ddp_world_size())
        return ddp__fail(DDP_EINVAL, "broadcast: root %d in a world of %d", root, ddp_world_size());
    int place = ddp__place_here("broadcast", "root", root);
    return place < 0 ? place : ddp__in_place(DDP_COLL_BROADCAST, "broadcast", t, 0, place, name, work);
}

int ddp_barrier(void) {
    if (ddp__pending()) return ddp__pending();
    int st = ddp__job_ready("barrier");
    if (st < 0 || ddp__size_here() == 1) return st;
    ddp_coll c = ddp__coll(DDP_COLL_BARRIER, NULL, NULL, 0, DDP_U8, NULL);
    return ddp__coll_run(&c, NULL);
}

/* Collective ops with results, from the call path. */
static int run_op(const ddp_call *c) {
    int st = ddp__job_ready(c->op->name);
    if (st < 0) return st;
    if (c->op->id == DDP_OP_all_reduce_)
        return ddp_all_reduce(c->out[0], (int)((const ddp_all_reduce__attrs *)c->attrs)->op, NULL, NULL);
    if (c->op->id == DDP_OP_broadcast_)
        return ddp_broadcast(c->out[0], (int)((const ddp_broadcast__attrs *)c->attrs)->root, NULL, NULL);
    if (ddp__size_here() == 1) {
        const ddp_kernel *k = ddp__pick_kernel(c);
        return k ? k->run(c) : ddp__pending();
    }
    ddp_tensor *in = ddp__meta_is_rowmajor(&c->in[0]->m) ? ddp_retain(c->in[0]) : ddp_keep(ddp_clone(c->in[0], 0));
    if (!in) return ddp__pending();
    bool gather = c->op->id == DDP_OP_all_gather;
    ddp_coll coll = ddp__coll(gather ? DDP_COLL_ALL_GATHER : DDP_COLL_REDUCE_SCATTER, ddp__ptr(in), ddp__ptr(c->out[0]),
                              gather ? in->numel : c->out[0]->numel, in->m.dtype, NULL);
    if (!gather) coll.reduce = (int)((const ddp_reduce_scatter_attrs *)c->attrs)->op;
    coll.device = in->m.device;
    st = ddp__coll_run(&coll, NULL);
    ddp__drop(in);
    return st;
}

__attribute__((constructor)) static void fill_slot(void) { ddp__slots.collective = run_op; }

/* With a work of its own: `in` is read, `out` is written. */
static int start(ddp_coll *c, ddp_tensor *in, ddp_tensor *out, ddp_work **work) {
    ddp_work *w = calloc(1, sizeof *w);
    if (!w) return ddp__fail(DDP_ENOMEM, "collective: out of memory");
    w->t = w->dense = ddp_retain(out);
    w->in = ddp__meta_is_rowmajor(&in->m) ? ddp_retain(in) : ddp_keep(ddp_clone(in, 0));
    c->in = w->in ? ddp__ptr(w->in) : NULL;
    c->device = out->m.device;
    w->status = !w->in ? ddp__pending() : ddp__size_here() > 1 ? ddp__coll_run(c, &w->req) : ddp_copy_(out, w->in);
    if (w->status == 0 && work) {
        *work = w;
        return 0;
    }
    int st = finish_work(w);
    free(w);
    return st;
}

/* x is `more` times as large as y, or as often the other way round; both of one dtype, y's memory in order. */
static int check_into(const char *what, const ddp_tensor *out, const ddp_tensor *x, int64_t parts_out,
                      int64_t parts_x) {
    if (ddp__pending()) return ddp__pending();
    if (!out || !x) return ddp__fail(DDP_ENULL, "%s: no tensor", what);
    int st = ddp__job_ready(what);
    if (st < 0) return st;
    if (out->m.device != x->m.device)
        return ddp__fail(DDP_EDEVICE, "%s: out is on %s, x on %s", what, DDP_DEVICE_TEXT(out->m.device),
                         DDP_DEVICE_TEXT(x->m.device));
    if (out->m.dtype != x->m.dtype)
        return ddp__fail(DDP_EDTYPE, "%s: out is %s, x %s", what, ddp_dtype_name(out->m.dtype),
                         ddp_dtype_name(x->m.dtype));
    if (out->numel * parts_x != x->numel * parts_out || !ddp__meta_is_rowmajor(&out->m))
        return ddp__fail(DDP_ESHAPE, "%s: out is %s%s, x %s, with %d ranks", what, DDP_SHAPE_TEXT(&out->m),
                         ddp__meta_is_rowmajor(&out->m) ? "" : " (not contiguous)", DDP_SHAPE_TEXT(&x->m),
                         ddp__size_here());
    return 0;
}

int ddp_all_gather_into(ddp_tensor *out, ddp_tensor *x, const char *name, ddp_work **work) {
    int st = check_into("all_gather", out, x, ddp__size_here(), 1);
    if (st < 0) return st;
    ddp_coll c = ddp__coll(DDP_COLL_ALL_GATHER, NULL, ddp__ptr(out), x->numel, x->m.dtype, name);
    return start(&c, x, out, work);
}

int ddp_reduce_scatter_into(ddp_tensor *out, ddp_tensor *x, int op, const char *name, ddp_work **work) {
    int st = check_op("reduce_scatter", x, op);
    if (st == 0) st = check_into("reduce_scatter", out, x, 1, ddp__size_here());
    if (st < 0) return st;
    ddp_coll c = ddp__coll(DDP_COLL_REDUCE_SCATTER, NULL, ddp__ptr(out), out->numel, x->m.dtype, name);
    c.reduce = op;
    return start(&c, x, out, work);
}

/* ---- bytes ---- */

void ddp_bytes_free(void *p) { free(p); }

static int broadcast_bytes(void **data, int64_t *n, int root, double deadline) {
    if (ddp__pending()) return ddp__pending();
    bool mine = ddp_rank() == root;
    int st = ddp__job_ready("broadcast_object");
    if (st < 0 || ddp__size_here() == 1) return st;
    if ((root = ddp__place_here("broadcast_object", "root", root)) < 0) return root;
    int64_t len = mine ? *n : 0;
    ddp_coll c = ddp__coll(DDP_COLL_BROADCAST, NULL, &len, 1, DDP_I64, "object size");
    c.root = root;
    c.deadline_s = deadline;
    if ((st = ddp__coll_run(&c, NULL)) < 0) return st;
    void *buf = mine ? *data : malloc((size_t)len + 1);
    if (!buf) return ddp__fail(DDP_ENOMEM, "broadcast_object: %lld bytes", (long long)len);
    if (len > 0) {
        c = ddp__coll(DDP_COLL_BROADCAST, NULL, buf, len, DDP_U8, "object");
        c.root = root;
        st = ddp__coll_run(&c, NULL);
    }
    if (mine) return st;
    if (st < 0) {
        free(buf);
        return st;
    }
    ((char *)buf)[len] = 0;
    *data = buf;
    *n = len;
    return 0;
}

int ddp_broadcast_bytes(void **data, int64_t *n, int root) { return broadcast_bytes(data, n, root, ddp__job.timeout); }
int ddp_broadcast_bytes_patient(void **data, int64_t *n, int root) { return broadcast_bytes(data, n, root, 0); }

int ddp_all_gather_bytes(const void *data, int64_t n, void **out, int64_t *n_out) {
    if (ddp__pending()) return ddp__pending();
    int st = ddp__job_ready("all_gather_object");
    if (st < 0) return st;
    int size = ddp__size_here();
    n_out[0] = n;
    if (size > 1) {
        ddp_coll c = ddp__coll(DDP_COLL_ALL_GATHER, &n, n_out, 1, DDP_I64, "object sizes");
        if ((st = ddp__coll_run(&c, NULL)) < 0) return st;
    }
    int64_t most = 0, total = 0;
    for (int r = 0; r < size; r++) {
        if (n_out[r] > most) most = n_out[r];
        total += n_out[r];
    }
    char *all = malloc((size_t)total + 1), *padded = malloc((size_t)most * ((size_t)size + 1) + 1);
    if (!all || !padded) {
        st = ddp__fail(DDP_ENOMEM, "all_gather_object: out of memory");
        goto fail;
    }
    char *mine = padded + most * size;
    memset(mine, 0, (size_t)most);
    if (n > 0) memcpy(mine, data, (size_t)n);
    if (size == 1) {
        memcpy(padded, mine, (size_t)most);
    } else if (most > 0) {
        ddp_coll c = ddp__coll(DDP_COLL_ALL_GATHER, mine, padded, most, DDP_U8, "objects");
        if ((st = ddp__coll_run(&c, NULL)) < 0) goto fail;
    }
    char *to = all;
    for (int r = 0; r < size; r++) {
        memcpy(to, padded + most * r, (size_t)n_out[r]);
        to += n_out[r];
    }
    free(padded);
    *out = all;
    return 0;
fail:
    free(all);
    free(padded);
    return st;
}
