/* write.c -- writes a file of tensors so that at every moment the old one or the new one stands there, whole: a temporary
 * file in the same folder, fsync, rename, fsync of the folder. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io.h"

enum { PIECE = 4 << 20 }; /* bytes a write */

/* ---- the header's text ------------------------------------------------------------------------------------------- */

typedef struct text {
    char *p;
    size_t n, room;
    bool failed; /* out of memory */
} text;

static void add(text *t, const char *s, size_t n) {
    if (t->failed) return;
    if (t->n + n > t->room) {
        size_t room = (t->n + n) * 2 + 1024;
        char *p = realloc(t->p, room);
        if (!p) {
            t->failed = true;
            return;
        }
        t->p = p;
        t->room = room;
    }
    memcpy(t->p + t->n, s, n);
    t->n += n;
}
static void add_text(text *t, const char *s) { add(t, s, strlen(s)); }
static void add_number(text *t, uint64_t v) {
    char s[24];
    add(t, s, (size_t)snprintf(s, sizeof s, "%llu", (unsigned long long)v));
}

/* s as a JSON string. DDP_EINVAL unless it is UTF-8. */
static int add_string(text *t, const char *what, const char *s) {
    const char *end = s + strlen(s);
    add_text(t, "\"");
    for (size_t n; s < end; s += n) {
        if ((n = ddp__utf8(s, end)) == 0) return ddp__fail(DDP_EINVAL, "save: %s is not UTF-8", what);
        char escaped[8];
        if (*s == '"' || *s == '\\') snprintf(escaped, sizeof escaped, "\\%c", *s);
        else if ((unsigned char)*s < 0x20) snprintf(escaped, sizeof escaped, "\\u%04x", (unsigned)*s);
        else escaped[0] = 0;
        if (escaped[0]) add_text(t, escaped);
        else add(t, s, n);
    }
    add_text(t, "\"");
    return 0;
}

typedef struct entry {
    const char *name;
    const ddp_tensor *t;
} entry;

static int by_name(const void *a, const void *b) { return strcmp(((const entry *)a)->name, ((const entry *)b)->name); }

/* By falling size of elements, so that each tensor is aligned; then by name. */
static int by_width(const void *a, const void *b) {
    const entry *x = a, *y = b;
    int wide = ddp__dtype_bytes[y->t->m.dtype] - ddp__dtype_bytes[x->t->m.dtype];
    return wide ? wide : strcmp(x->name, y->name);
}

static int add_tensor(text *t, const entry *e, uint64_t *at) {
    const ddp_meta *m = &e->t->m;
    int st = add_string(t, "a tensor's name", e->name);
    add_text(t, ":{\"dtype\":\"");
    add_text(t, ddp__file_dtype[m->dtype]);
    add_text(t, "\",\"shape\":[");
    for (int d = 0; d < m->ndim; d++) {
        if (d > 0) add_text(t, ",");
        add_number(t, (uint64_t)m->size[d]);
    }
    add_text(t, "],\"data_offsets\":[");
    add_number(t, *at);
    add_text(t, ",");
    *at += (uint64_t)e->t->numel * ddp__dtype_bytes[m->dtype];
    add_number(t, *at);
    add_text(t, "]}");
    return st;
}

/* Length and header into t, padded so that the tensors begin at a multiple of 8. */
static int make_header(text *t, const entry *list, int n, const char *const *keys, const char *const *texts,
                       int n_texts) {
    uint64_t at = 0;
    int st = 0;
    add(t, "\0\0\0\0\0\0\0\0{", 9);
    if (n_texts > 0) add_text(t, "\"__metadata__\":{");
    for (int i = 0; i < n_texts && st == 0; i++) {
        if (i > 0) add_text(t, ",");
        if ((st = add_string(t, "a key of the metadata", keys[i])) < 0) break;
        add_text(t, ":");
        st = add_string(t, keys[i], texts[i]);
    }
    if (n_texts > 0) add_text(t, "}");
    for (int i = 0; i < n && st == 0; i++) {
        if (i > 0 || n_texts > 0) add_text(t, ",");
        st = add_tensor(t, &list[i], &at);
    }
    add_text(t, "}");
    while (t->n % 8 && !t->failed) add_text(t, " ");
    if (st < 0) return st;
    if (t->failed) return ddp__fail(DDP_ENOMEM, "save: out of memory for the header");
    if (t->n - 8 > DDP_HEADER_MAX)
        return ddp__fail(DDP_EINVAL, "save: a header of %zu bytes; the format allows %d", t->n - 8, DDP_HEADER_MAX);
    for (int i = 0; i < 8; i++) t->p[i] = (char)((uint64_t)(t->n - 8) >> 8 * i);
    return 0;
}

/* ---- the file ------------------------------------------------------------------------------------------------------ */

typedef struct writer {
    const char *path;          /* for messages */
    char folder[PATH_MAX];     /* where it goes */
    char target[NAME_MAX + 1]; /* the file's name in it */
    char name[NAME_MAX + 1];   /* of the temporary file in it; "" once it has gone to its place */
    int dir, fd;
} writer;

static int cannot(const writer *w, const char *what, int err) {
    return ddp__fail(DDP_EIO, "save: cannot %s %s: %s", what, w->path, strerror(err));
}

static int put(writer *w, const char *p, size_t n) {
    while (n > 0) {
        ssize_t k = write(w->fd, p, n < PIECE ? n : PIECE);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return cannot(w, "write", k < 0 ? errno : ENOSPC);
        p += k;
        n -= (size_t)k;
    }
    return 0;
}

/* Row-major, whatever the strides: gathered piece by piece. */
static int put_tensor(writer *w, const ddp_tensor *t) {
    size_t width = ddp__dtype_bytes[t->m.dtype], room = PIECE / 16 / width, have = 0;
    const char *base;
    void *owned;
    int st = ddp__host_view(t, &base, &owned);
    if (st == 0 && ddp__meta_is_rowmajor(&t->m)) st = put(w, base, (size_t)t->numel * width);
    char *piece = st == 0 && !ddp__meta_is_rowmajor(&t->m) ? malloc(room * width) : NULL;
    if (!piece) {
        free(owned);
        return st < 0 || ddp__meta_is_rowmajor(&t->m) ? st : ddp__fail(DDP_ENOMEM, "save: out of memory");
    }
    int64_t at[DDP_MAX_DIM] = {0}, place = 0;
    for (int64_t i = 0; i < t->numel && st == 0; i++) {
        memcpy(piece + have++ * width, base + place * (int64_t)width, width);
        if (have == room || i + 1 == t->numel) {
            st = put(w, piece, have * width);
            have = 0;
        }
        for (int d = t->m.ndim - 1; d >= 0; d--) {
            place += t->m.stride[d];
            if (++at[d] < t->m.size[d]) break;
            place -= t->m.stride[d] * t->m.size[d];
            at[d] = 0;
        }
    }
    free(piece);
    free(owned);
    return st;
}

/* ".name.xxxxxxxx.part": is `name` a temporary file of this target? */
static bool is_temporary(const writer *w, const char *name) {
    size_t n = strlen(w->target);
    if (strlen(name) != n + 15 || name[0] != '.' || strncmp(name + 1, w->target, n) != 0) return false;
    return name[n + 1] == '.' && strspn(name + n + 2, "0123456789abcdef") == 8 && strcmp(name + n + 10, ".part") == 0;
}

/* What killed writers of this target left: their locks are gone. */
static void remove_remains(const writer *w) {
    DIR *d = opendir(w->folder);
    if (!d) return;
    for (struct dirent *e; (e = readdir(d));) {
        if (!is_temporary(w, e->d_name)) continue;
        int fd = openat(w->dir, e->d_name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        if (fd < 0) continue;
        if (flock(fd, LOCK_EX | LOCK_NB) == 0) unlinkat(w->dir, e->d_name, 0);
        close(fd);
    }
    closedir(d);
}

/* A temporary file of a name that is free, locked. Another writer may have taken it for a remain before the lock. */
static int open_temporary(writer *w) {
    for (int attempt = 0; attempt < 100; attempt++) {
        uint32_t number = 0;
        struct stat st;
        if (getrandom(&number, sizeof number, 0) < 0) number = (uint32_t)getpid() + (uint32_t)attempt;
        if (snprintf(w->name, sizeof w->name, ".%s.%08x.part", w->target, number) >= (int)sizeof w->name)
            return cannot(w, "write", ENAMETOOLONG);
        w->fd = openat(w->dir, w->name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (w->fd < 0 && errno == EEXIST) continue;
        if (w->fd < 0) return cannot(w, "write", errno);
        /* Where there are no locks nobody removes remains either. */
        bool taken = flock(w->fd, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK;
        if (!taken && fstat(w->fd, &st) == 0 && st.st_nlink > 0) return 0;
        close(w->fd);
        w->fd = -1;
    }
    return cannot(w, "write", EEXIST);
}

/* The folder, open, and the name in it; through a link to where it leads. */
static int find_target(writer *w) {
    struct stat st;
    if (!realpath(w->path, w->folder)) { /* nothing is there yet */
        if (strlen(w->path) >= sizeof w->folder) return cannot(w, "write", ENAMETOOLONG);
        snprintf(w->folder, sizeof w->folder, "%s", w->path);
    }
    char *slash = strrchr(w->folder, '/');
    const char *name = slash ? slash + 1 : w->folder;
    if (strlen(name) > NAME_MAX) return cannot(w, "write", ENAMETOOLONG);
    if (!*name) return cannot(w, "write", EISDIR);
    memcpy(w->target, name, strlen(name) + 1);
    if (!slash) memcpy(w->folder, ".", 2);
    else slash[slash == w->folder] = 0; /* the root keeps its slash */
    w->dir = open(w->folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (w->dir < 0) return cannot(w, "write", errno);
    if (fstatat(w->dir, w->target, &st, 0) == 0 && S_ISDIR(st.st_mode)) return cannot(w, "write", EISDIR);
    return 0;
}

/* All of it on the disk, in its place. */
static int settle(writer *w) {
    struct stat st;
    if (fstatat(w->dir, w->target, &st, 0) == 0)
        (void)!fchmod(w->fd, st.st_mode & 07777); /* rights stay as they were */
    if (fsync(w->fd) < 0) return cannot(w, "write", errno);
    if (renameat(w->dir, w->name, w->dir, w->target) < 0) return cannot(w, "write", errno);
    w->name[0] = 0;
    if (fsync(w->dir) < 0 && errno != EINVAL)
        return cannot(w, "write", errno); /* EINVAL: a folder that knows no sync */
    return 0;
}

/* Opens a temporary file; end closes, and removes what was not settled. */
static int begin(writer *w) {
    w->dir = w->fd = -1;
    int st = find_target(w);
    if (st < 0) return st;
    remove_remains(w);
    return open_temporary(w);
}

static void end(writer *w) {
    if (w->fd >= 0 && w->name[0]) unlinkat(w->dir, w->name, 0);
    if (w->fd >= 0) close(w->fd);
    if (w->dir >= 0) close(w->dir);
}

static int write_file(const char *path, const text *header, const entry *list, int n) {
    writer w = {.path = path};
    int st = begin(&w);
    if (st == 0) st = put(&w, header->p, header->n);
    for (int i = 0; i < n && st == 0; i++) st = put_tensor(&w, list[i].t);
    if (st == 0) st = settle(&w);
    end(&w);
    return st;
}

/* What is written, in the order of the file. */
static int make_list(entry *list, int n, const char *const *names, ddp_tensor *const *tensors) {
    for (int i = 0; i < n; i++) {
        if (!names[i] || !tensors[i]) return ddp__fail(DDP_ENULL, "save: tensor %d or its name is NULL", i);
        if (strcmp(names[i], "__metadata__") == 0)
            return ddp__fail(DDP_EINVAL, "save: the format keeps the name __metadata__ for itself");
        list[i] = (entry){names[i], tensors[i]};
    }
    qsort(list, (size_t)n, sizeof *list, by_name);
    for (int i = 1; i < n; i++)
        if (by_name(&list[i - 1], &list[i]) == 0)
            return ddp__fail(DDP_EINVAL, "save: two tensors are called \"%.100s\"", list[i].name);
    qsort(list, (size_t)n, sizeof *list, by_width);
    return 0;
}

/* ---- files that others write ---------------------------------------------------------------------------------------- */

struct ddp_file_draft {
    writer w; /* w.path is a copy */
    char full[PATH_MAX + NAME_MAX + 2];
};

int ddp_file_draft_new(const char *path, ddp_file_draft **out) {
    if (ddp__pending()) return ddp__pending();
    if (!path || !*path || !out) return ddp__fail(DDP_ENULL, "replace_file: no path");
    ddp_file_draft *d = calloc(1, sizeof *d);
    char *copy = strdup(path);
    if (!d || !copy) {
        free(d);
        free(copy);
        return ddp__fail(DDP_ENOMEM, "replace_file: out of memory");
    }
    d->w.path = copy;
    int st = begin(&d->w);
    snprintf(d->full, sizeof d->full, "%s/%s", d->w.folder, d->w.name);
    if (st < 0) ddp_file_draft_free(d);
    else *out = d;
    return st;
}

const char *ddp_file_draft_name(const ddp_file_draft *d) { return d ? d->full : NULL; }

int ddp_file_draft_commit(ddp_file_draft *d) {
    if (ddp__pending()) return ddp__pending();
    if (!d || !d->w.name[0]) return ddp__fail(DDP_ESTATE, "replace_file: nothing to commit");
    /* Another file may stand there under the name by now: that one is meant. */
    int fd = openat(d->w.dir, d->w.name, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return cannot(&d->w, "write", errno);
    close(d->w.fd);
    d->w.fd = fd;
    return settle(&d->w);
}

void ddp_file_draft_free(ddp_file_draft *d) {
    if (!d) return;
    end(&d->w);
    free((char *)(uintptr_t)d->w.path);
    free(d);
}

/* ---- files of tensors -------------------------------------------------------------------------------------------------- */

int ddp_file_write(const char *path, int n, const char *const *names, ddp_tensor *const *tensors, int n_texts,
                   const char *const *keys, const char *const *texts) {
    if (ddp__pending()) return ddp__pending();
    if (!path || !*path) return ddp__fail(DDP_ENULL, "save: no path");
    text header = {0};
    int st = 0;
    entry *list = calloc((size_t)(n > 0 ? n : 1), sizeof *list);
    if (!list) return ddp__fail(DDP_ENOMEM, "save: out of memory");
    if ((st = make_list(list, n, names, tensors)) < 0) goto end;
    if ((st = make_header(&header, list, n, keys, texts, n_texts)) == 0) st = write_file(path, &header, list, n);
end:
    free(header.p);
    free(list);
    return st;
}
