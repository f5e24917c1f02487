/* cudnn_node.c -- descriptors as records: their attributes, their owners, and graphs as text. */
#include "cudnn_double.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static atomic_long alive;
long nodes_alive(void) { return atomic_load(&alive); }

node *node_new(int type) {
    node *n = calloc(1, sizeof *n);
    if (!n) abort();
    n->magic = NODE;
    n->type = type;
    atomic_store(&n->refs, 1);
    atomic_fetch_add(&alive, 1);
    return n;
}

void node_keep(node *n) {
    if (n) atomic_fetch_add(&n->refs, 1);
}

static void attribute_free(attribute *a) {
    if (a->type == CUDNN_TYPE_BACKEND_DESCRIPTOR)
        for (int64_t i = 0; i < a->n; i++) node_drop(((node **)a->value)[i]);
    free(a->value);
    free(a);
}

void node_drop(node *n) {
    if (!n || atomic_fetch_sub(&n->refs, 1) > 1) return;
    while (n->attributes) {
        attribute *a = n->attributes;
        n->attributes = a->next;
        attribute_free(a);
    }
    if (n->real) real()->destroy(n->real);
    node_drop(n->graph);
    n->magic = 0;
    free(n);
    atomic_fetch_sub(&alive, 1);
}

node *node_of(cudnnBackendDescriptor_t d) {
    node *n = d;
    return n && n->magic == NODE ? n : NULL;
}

size_t type_bytes(int type) {
    switch (type) {
        case CUDNN_TYPE_INT64:
        case CUDNN_TYPE_DOUBLE:
        case CUDNN_TYPE_VOID_PTR:
        case CUDNN_TYPE_HANDLE:
        case CUDNN_TYPE_BACKEND_DESCRIPTOR: return 8;
        case CUDNN_TYPE_FRACTION: return sizeof(cudnnFraction_t);
        case CUDNN_TYPE_BOOLEAN:
        case CUDNN_TYPE_CHAR: return 1;
        default: return 4;
    }
}

void node_set(node *n, int name, int type, int64_t count, const void *v) {
    attribute *a = calloc(1, sizeof *a);
    size_t bytes = type_bytes(type) * (size_t)count;
    if (!a || !(a->value = malloc(bytes + 1))) abort();
    memcpy(a->value, v, bytes);
    a->name = name;
    a->type = type;
    a->n = count;
    a->bytes = bytes;
    if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR)
        for (int64_t i = 0; i < count; i++) node_keep(((node **)a->value)[i]);
    for (attribute **at = &n->attributes; *at; at = &(*at)->next)
        if ((*at)->name == name) {
            attribute *old = *at;
            *at = old->next;
            attribute_free(old);
            break;
        }
    a->next = n->attributes;
    n->attributes = a;
}

const attribute *node_get(const node *n, int name) {
    for (const attribute *a = n ? n->attributes : NULL; a; a = a->next)
        if (a->name == name) return a;
    return NULL;
}

node *node_child(const node *n, int name) {
    const attribute *a = node_get(n, name);
    return a && a->type == CUDNN_TYPE_BACKEND_DESCRIPTOR && a->n ? *(node **)a->value : NULL;
}

int64_t node_int(const node *n, int name, int64_t otherwise) {
    const attribute *a = node_get(n, name);
    return a && a->n ? *(int64_t *)a->value : otherwise;
}

int node_enum(const node *n, int name, int otherwise) {
    const attribute *a = node_get(n, name);
    return a && a->n && a->bytes >= 4 ? *(int *)a->value : otherwise;
}

/* ---- text: "(TYPE NAME,TYPE,COUNT=HEX; ...)", descriptors nested ----------------------------------------------------------- */

static void put(FILE *f, const node *n) {
    fprintf(f, "(%d", n->type);
    for (const attribute *a = n->attributes; a; a = a->next) {
        fprintf(f, " %d,%d,%lld=", a->name, a->type, (long long)a->n);
        for (int64_t i = 0; a->type == CUDNN_TYPE_BACKEND_DESCRIPTOR && i < a->n; i++) put(f, ((node **)a->value)[i]);
        for (size_t i = 0; a->type != CUDNN_TYPE_BACKEND_DESCRIPTOR && i < a->bytes; i++)
            fprintf(f, "%02x", ((unsigned char *)a->value)[i]);
    }
    fputc(')', f);
}

char *node_text(const node *n) {
    char *s = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&s, &bytes);
    if (!f) abort();
    put(f, n);
    fclose(f);
    return s;
}

enum { MOST_VALUES = 256 };

static node *take(const char **s);

/* One attribute at *s, after its space. False where it is none. */
static bool take_attribute(const char **s, node *n) {
    int name, type, used = 0;
    long long count;
    _Alignas(16) unsigned char value[MOST_VALUES * 16];
    if (sscanf(*s, " %d,%d,%lld=%n", &name, &type, &count, &used) != 3 || !used || count < 0 || count > MOST_VALUES)
        return false;
    *s += used;
    bool descriptors = type == CUDNN_TYPE_BACKEND_DESCRIPTOR, good = true;
    size_t bytes = type_bytes(type) * (size_t)count;
    for (size_t i = 0; !descriptors && i < bytes; i++, *s += 2) {
        unsigned byte;
        if (sscanf(*s, "%2x", &byte) != 1) return false;
        value[i] = (unsigned char)byte;
    }
    long long have = 0;
    for (; descriptors && have < count && good; have++) {
        node *child = take(s);
        good = child != NULL;
        ((node **)(void *)value)[have] = child;
    }
    if (good) node_set(n, name, type, count, value);
    for (long long i = 0; descriptors && i < have; i++) node_drop(((node **)(void *)value)[i]); /* n has its own */
    return good;
}

static node *take(const char **s) {
    int type, used = 0;
    if (sscanf(*s, "(%d%n", &type, &used) != 1 || !used) return NULL;
    *s += used;
    node *n = node_new(type);
    n->final = true;
    while (**s == ' ')
        if (!take_attribute(s, n)) goto bad;
    if (*(*s)++ == ')') return n;
bad:
    node_drop(n);
    return NULL;
}

node *node_from_text(const char *s) { return take(&s); }
