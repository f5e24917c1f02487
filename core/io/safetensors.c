/* safetensors.c -- an open file of tensors: mapped, its tensors over the mapping or copied out of it. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io.h"

static void unref(void *ctx) {
    ddp_file *f = ctx;
    if (!f || atomic_fetch_sub(&f->refs, 1) > 1) return;
    if (f->map) munmap(f->map, f->bytes);
    free(f->path);
    free(f->strings);
    free(f->item);
    free(f->text);
    free(f);
}

void ddp_file_free(ddp_file *f) { unref(f); }

/* Maps the file read-only, for this process alone. */
static int map(ddp_file *f) {
    int fd = open(f->path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd < 0) return ddp__fail(DDP_EIO, "load: cannot open %s: %s", f->path, strerror(errno));
    struct stat st;
    int err = fstat(fd, &st) < 0 ? errno : S_ISDIR(st.st_mode) ? EISDIR : !S_ISREG(st.st_mode) ? EINVAL : 0;
    if (!err && st.st_size >= 8) {
        f->bytes = (size_t)st.st_size;
        f->map = mmap(NULL, f->bytes, PROT_READ, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
        if (f->map == MAP_FAILED) {
            err = errno;
            f->map = NULL;
        }
    }
    close(fd);
    if (err) return ddp__fail(DDP_EIO, "load: cannot read %s: %s", f->path, strerror(err));
    if (!f->map)
        return ddp__fail(DDP_EIO, "load: %s has %lld bytes: no safetensors file", f->path, (long long)st.st_size);
    return 0;
}

static int read_header(ddp_file *f) {
    uint64_t n = 0;
    for (int i = 0; i < 8; i++) n |= (uint64_t)(unsigned char)f->map[i] << 8 * i;
    if (n > DDP_HEADER_MAX || n > f->bytes - 8)
        return ddp__fail(DDP_EIO,
                         "load: %s: a header of %llu bytes in a file of %zu: no safetensors file, or a part of one",
                         f->path, (unsigned long long)n, f->bytes);
    f->data = 8 + (size_t)n;
    return ddp__file_header(f, f->map + 8, (size_t)n, f->bytes - f->data);
}

int ddp_file_open(const char *path, ddp_file **out) {
    if (ddp__pending()) return ddp__pending();
    if (!path || !out) return ddp__fail(DDP_ENULL, "load: no path");
    ddp_file *f = calloc(1, sizeof *f);
    if (!f || !(f->path = strdup(path))) {
        free(f);
        return ddp__fail(DDP_ENOMEM, "load: out of memory");
    }
    f->refs = 1;
    int st = map(f);
    if (st == 0) st = read_header(f);
    if (st < 0) unref(f);
    else *out = f;
    return st;
}

/* ---- what is in it ---------------------------------------------------------------------------------------------- */

int ddp_file_len(const ddp_file *f) { return f ? f->n : 0; }

int ddp_file_find(const ddp_file *f, const char *name) {
    int lo = 0, hi = f && name ? f->n : 0;
    while (lo < hi) {
        int mid = lo + (hi - lo) / 2, order = strcmp(f->item[mid].e.name, name);
        if (order == 0) return mid;
        if (order < 0) lo = mid + 1;
        else hi = mid;
    }
    return -1;
}

int ddp_file_at(const ddp_file *f, int i, ddp_file_entry *out) {
    if (!f || i < 0 || i >= f->n) return DDP_EINVAL;
    *out = f->item[i].e;
    return 0;
}

int ddp_file_texts(const ddp_file *f) { return f ? f->n_texts : 0; }
const char *ddp_file_text_key(const ddp_file *f, int i) {
    return f && i >= 0 && i < f->n_texts ? f->text[i].key : NULL;
}
const char *ddp_file_text(const ddp_file *f, const char *key) {
    for (int i = 0; f && key && i < f->n_texts; i++)
        if (strcmp(f->text[i].key, key) == 0) return f->text[i].text;
    return NULL;
}

uint64_t ddp_file_digest(const ddp_file *f) {
    uint64_t h = f ? f->bytes : 0;
    for (size_t i = 0; f && i < f->data; i++) h = (h ^ (unsigned char)f->map[i]) * 0x100000001b3u;
    return h;
}

/* ---- its tensors ------------------------------------------------------------------------------------------------- */

static struct ddp_file_item *item_at(ddp_file *f, int i) {
    if (ddp__pending()) return NULL;
    if (f && i >= 0 && i < f->n) {
        struct ddp_file_item *x = &f->item[i];
        if (x->e.dtype != DDP_BOOL) return x;
        const unsigned char *p = (const unsigned char *)f->map + f->data;
        for (uint64_t k = x->begin; k < x->end; k++)
            if (p[k] > 1) {
                ddp__fail(DDP_EIO, "load: %s: tensor \"%.100s\" is BOOL and has a byte of %d", f->path, x->e.name,
                          p[k]);
                return NULL;
            }
        return x;
    }
    ddp__fail(DDP_EINVAL, "load: tensor %d of %d", i, ddp_file_len(f));
    return NULL;
}

/* Over the mapping; where a foreign file laid it at an odd place, a copy. */
static ddp_tensor *over(ddp_file *f, const struct ddp_file_item *x) {
    char *at = f->map + f->data + x->begin;
    if ((uintptr_t)at % ddp__dtype_bytes[x->e.dtype])
        return ddp_from_data(at, x->e.ndim, x->e.size, x->e.dtype, DDP_CPU);
    ddp_tensor *t = ddp_from_blob(at, x->e.ndim, x->e.size, NULL, x->e.dtype, DDP_CPU, unref, f);
    if (t) atomic_fetch_add(&f->refs, 1);
    return t;
}

ddp_tensor *ddp_file_tensor(ddp_file *f, int i) {
    struct ddp_file_item *x = item_at(f, i);
    if (!x) return NULL;
    if (!f->writable && mprotect(f->map, f->bytes, PROT_READ | PROT_WRITE) < 0) {
        ddp__fail(DDP_ENOMEM, "load: %s: %s", f->path, strerror(errno));
        return NULL;
    }
    f->writable = x->shown = true;
    return over(f, x);
}

/* The pages that hold no more than what was read: their memory goes back. */
static void forget(const ddp_file *f, const struct ddp_file_item *x) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), base = (uintptr_t)f->map + f->data;
    uintptr_t from = (base + x->begin) / page * page, to = (base + x->end) / page * page;
    if (to > from) madvise(f->map + (from - (uintptr_t)f->map), to - from, MADV_DONTNEED);
}

int ddp_file_read(ddp_file *f, int i, ddp_tensor *t) {
    struct ddp_file_item *x = item_at(f, i);
    if (!x) return ddp__pending();
    if (!t) return ddp__fail(DDP_ENULL, "load: no tensor to read \"%.100s\" into", x->e.name);
    bool same = t->m.ndim == x->e.ndim;
    for (int d = 0; same && d < t->m.ndim; d++) same = t->m.size[d] == x->e.size[d];
    if (!same)
        return ddp__fail(DDP_ESHAPE, "load: %.100s is %s here, %s in %s", x->e.name, DDP_SHAPE_TEXT(&t->m),
                         DDP_SHAPE_TEXT(&x->e), f->path);
    ddp_tensor *from = ddp_keep(over(f, x));
    int mode = ddp_set_grad_mode(0);
    int st = from ? ddp_copy_(t, from) : ddp__pending();
    ddp_set_grad_mode(mode);
    ddp__drop(from);
    if (!x->shown) forget(f, x);
    return st;
}

void ddp_file_forget(ddp_file *f, int i) {
    if (f && i >= 0 && i < f->n) forget(f, &f->item[i]);
}
