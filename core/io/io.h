/* io.h -- files of tensors as the parts of this room see them. */
#ifndef DDP_IO_H
#define DDP_IO_H

#include <stdatomic.h>

#include "../tensor/tensor.h"

/* The longest header that is read and written: the format's own limit. */
enum { DDP_HEADER_MAX = 100 * 1000 * 1000 };

typedef struct ddp_file_text_pair {
    const char *key, *text;
} ddp_file_text_pair;

struct ddp_file {
    atomic_int refs; /* the handle, and tensors over the mapping */
    char *path;      /* for messages */
    char *map;       /* the whole file */
    size_t bytes;
    size_t data;   /* where the tensors begin */
    bool writable; /* the mapping; it is private */
    char *strings; /* what names and texts point into */
    struct ddp_file_item {
        ddp_file_entry e;
        uint64_t begin, end; /* from `data` */
        bool shown;          /* a tensor over its bytes was given out */
    } * item;                /* [n] by name */
    int n;
    ddp_file_text_pair *text; /* [n_texts] by key */
    int n_texts;
};

/* Reads and checks the header json[0..n) of a file whose tensors have `data_bytes` in all; fills strings, item and text of f.
 * A status. */
DDP_LOCAL int ddp__file_header(ddp_file *f, const char *json, size_t n, uint64_t data_bytes);

/* The format's names of dtypes, by ours. */
DDP_LOCAL extern const char *const ddp__file_dtype[DDP_DTYPES];
/* Bytes of the UTF-8 character at s, before end; 0 when there is none. */
DDP_LOCAL size_t ddp__utf8(const char *s, const char *end);

#endif
