/* signature.c -- what a rank is about to do, in words and for comparison. */
#include <stdio.h>
#include <string.h>

#include "../tensor/tensor.h"
#include "engine.h"

const char *ddp__signature_text(const ddp_signature *s, char *text, size_t n) {
    static const char *const kinds[] = {"all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier"};
    static const char *const reduces[] = {"sum", "mean", "min", "max"};
    const char *kind = s->kind >= 0 && s->kind <= DDP_COLL_BARRIER ? kinds[s->kind] : "?";
    char how[32] = "", name[64] = "";
    if (s->kind == DDP_COLL_ALL_REDUCE || s->kind == DDP_COLL_REDUCE_SCATTER)
        snprintf(how, sizeof how, " %s", s->reduce >= 0 && s->reduce <= DDP_MAX ? reduces[s->reduce] : "?");
    if (s->kind == DDP_COLL_BROADCAST) snprintf(how, sizeof how, " from %d", s->root);
    bool own = strncmp(s->name, "bucket ", 7) == 0; /* not the user's word */
    if (s->name[0]) snprintf(name, sizeof name, own ? ", %.47s" : ", \"%.47s\"", s->name);
    const char *comma = s->where[0] ? ", " : "";
    if (s->kind != DDP_COLL_BARRIER)
        snprintf(text, n, "%s%s (%s x %lld%s%s%s%.95s)", kind, how, ddp_dtype_name(s->dtype), (long long)s->count,
                 s->on_device ? " on cuda" : "", name, comma, s->where);
    else if (s->where[0]) snprintf(text, n, "%s (%.95s)", kind, s->where);
    else snprintf(text, n, "%s", kind);
    return text;
}

bool ddp__signature_equal(const ddp_signature *a, const ddp_signature *b) {
    return a->kind == b->kind && a->reduce == b->reduce && a->root == b->root && a->dtype == b->dtype &&
           a->count == b->count && a->on_device == b->on_device && strncmp(a->name, b->name, sizeof a->name) == 0;
}

const char *ddp__signature_call(const ddp_signature *s, uint32_t seq, char *text, size_t n) {
    char plain[256];
    ddp__signature_text(s, plain, sizeof plain);
    int word = (int)strcspn(plain, " ");
    snprintf(text, n, "%.*s #%u%s", word, plain, seq, plain + word);
    return text;
}

int ddp__coll_check(const ddp_coll *c) {
    bool adds = c->sig.kind == DDP_COLL_ALL_REDUCE || c->sig.kind == DDP_COLL_REDUCE_SCATTER;
    if (!adds || c->reduce != DDP_MEAN || ddp__is_float(c->dtype)) return 0;
    return ddp__fail(DDP_EDTYPE, "%s: the mean of %s; cast to f32, or sum", c->sig.name, ddp_dtype_name(c->dtype));
}
