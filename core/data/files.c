/* files.c -- images in files of fixed records: CIFAR-10's binary batches and the digits. Files are mapped and their
 * descriptors closed at once, so ranks of a host share the pages and a set holds no descriptor. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data.h"

/* Maps a whole file. A status. */
static int map_file(const char *what, const char *path, ddp_record_file *f) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return ddp__fail(DDP_EIO, "%s: cannot open %s: %s", what, path, strerror(errno));
    struct stat st;
    int bad = fstat(fd, &st) < 0 ? errno : S_ISDIR(st.st_mode) ? EISDIR : 0;
    void *map = NULL;
    if (!bad && st.st_size > 0) {
        map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (map == MAP_FAILED) bad = errno;
    }
    close(fd);
    if (bad) return ddp__fail(DDP_EIO, "%s: cannot read %s: %s", what, path, strerror(bad));
    *f = (ddp_record_file){.path = strdup(path), .map = map, .bytes = (size_t)st.st_size, .first = map};
    if (f->path) return 0;
    if (map) munmap(map, f->bytes);
    *f = (ddp_record_file){0};
    return ddp__fail(DDP_ENOMEM, "%s: out of memory", what);
}

void ddp__files_close(ddp_dataset *set) {
    for (int i = 0; i < set->n_files; i++) {
        if (set->file[i].map) munmap((void *)(uintptr_t)set->file[i].map, set->file[i].bytes);
        free(set->file[i].path);
    }
    set->n_files = 0;
}

const uint8_t *ddp__image_record(const ddp_dataset *set, int64_t i, const ddp_record_file **file, int64_t *record) {
    int k = 0;
    while (i >= set->file[k].n) i -= set->file[k++].n;
    *file = &set->file[k];
    *record = i;
    return set->file[k].first + i * (1 + (int64_t)set->channels * set->height * set->width);
}

/* ---- CIFAR-10 ------------------------------------------------------------------------------------------------- */

enum { CIFAR_RECORD = 1 + 3 * 32 * 32, CIFAR_RECORDS = 10000 };

static int add_cifar_file(ddp_dataset *set, const char *dir, const char *name) {
    char path[4096];
    if (snprintf(path, sizeof path, "%s/%s", dir, name) >= (int)sizeof path)
        return ddp__fail(DDP_EINVAL, "cifar10: the path of %s is too long", name);
    ddp_record_file *f = &set->file[set->n_files];
    if (map_file("cifar10", path, f) < 0) return ddp__pending();
    set->n_files++;
    f->n = (int64_t)(f->bytes / CIFAR_RECORD);
    if (f->bytes == 0 || f->bytes % CIFAR_RECORD != 0) {
        int64_t want = f->n < CIFAR_RECORDS ? CIFAR_RECORDS : f->n + 1;
        return ddp__fail(
            DDP_EIO, "cifar10: %s has %zu bytes, expected %lld (%lld records of %d): it ends inside record %lld", path,
            f->bytes, (long long)want * CIFAR_RECORD, (long long)want, CIFAR_RECORD, (long long)f->n);
    }
    if (f->n != CIFAR_RECORDS)
        ddp__log(DDP_LOG_WARN, "cifar10: %s has %lld records, not the %d of the original", path, (long long)f->n,
                 CIFAR_RECORDS);
    set->n += f->n;
    return 0;
}

/* dir, or its subfolder that has the files. */
static int find_cifar(const char *dir, const char *name, char *out, size_t n) {
    static const char *const sub[] = {"", "/cifar-10-batches-bin"};
    char path[4096];
    for (int i = 0; i < 2; i++) {
        snprintf(out, n, "%s%s", dir, sub[i]);
        snprintf(path, sizeof path, "%.3500s/%s", out, name);
        if (access(path, F_OK) == 0) return 0;
    }
    return ddp__fail(DDP_EIO,
                     "cifar10: no %s in %s or its cifar-10-batches-bin (expected: the binary version of CIFAR-10)",
                     name, dir);
}

ddp_dataset *ddp_dataset_cifar10(const char *dir, int train) {
    if (ddp__pending()) return NULL;
    if (!dir) {
        ddp__fail(DDP_ENULL, "cifar10: no folder");
        return NULL;
    }
    char at[4096], name[32];
    if (find_cifar(dir, train ? "data_batch_1.bin" : "test_batch.bin", at, sizeof at) < 0) return NULL;
    ddp_dataset *set = ddp__set_new(DDP_SET_IMAGES);
    if (!set) return NULL;
    set->what = "cifar10";
    set->channels = 3;
    set->height = set->width = 32;
    set->classes = 10;
    set->scale = 255;
    for (int i = 1; i <= (train ? 5 : 1); i++) {
        if (train) snprintf(name, sizeof name, "data_batch_%d.bin", i);
        else snprintf(name, sizeof name, "test_batch.bin");
        if (add_cifar_file(set, at, name) < 0) {
            ddp_dataset_free(set);
            return NULL;
        }
    }
    return set;
}

/* ---- digits --------------------------------------------------------------------------------------------------- */

/* The file's head, little-endian, 24 bytes; records of label and pixels follow, those for training first. */
typedef struct digits_head {
    uint8_t magic[8];
    uint16_t channels, height, width, top; /* top: the greatest value of a pixel */
    uint32_t train, test;
} digits_head;
_Static_assert(sizeof(digits_head) == 24, "the head has no padding");

static int read_digits(ddp_dataset *set, const char *path, int train) {
    ddp_record_file *f = &set->file[0];
    if (map_file("digits", path, f) < 0) return ddp__pending();
    set->n_files = 1;
    digits_head h;
    if (f->bytes < sizeof h)
        return ddp__fail(DDP_EIO, "digits: %s has %zu bytes, expected a head of %zu", path, f->bytes, sizeof h);
    memcpy(&h, f->map, sizeof h);
    if (memcmp(h.magic, "DDPIMG1\n", 8) != 0) return ddp__fail(DDP_EIO, "digits: %s does not begin with DDPIMG1", path);
    if (h.channels == 0 || h.height == 0 || h.width == 0 || h.top == 0)
        return ddp__fail(DDP_EIO, "digits: the head of %s says images of %dx%dx%d up to %d", path, h.channels, h.height,
                         h.width, h.top);
    uint64_t record = 1 + (uint64_t)h.channels * h.height * h.width, records = (uint64_t)h.train + h.test;
    uint64_t rest = f->bytes - sizeof h;
    if (rest / record < records || rest != records * record) {
        return ddp__fail(
            DDP_EIO, "digits: %s has %zu bytes, expected a head of 24 and %llu records of %llu: it ends at record %llu",
            path, f->bytes, (unsigned long long)records, (unsigned long long)record,
            (unsigned long long)(rest / record));
    }
    set->channels = h.channels;
    set->height = h.height;
    set->width = h.width;
    set->scale = h.top;
    f->first = f->map + sizeof h + (train ? 0 : h.train * record);
    set->n = f->n = train ? h.train : h.test;
    return 0;
}

ddp_dataset *ddp_dataset_digits(const char *path, int train) {
    if (ddp__pending()) return NULL;
    if (!path) {
        ddp__fail(DDP_ENULL, "digits: no file");
        return NULL;
    }
    ddp_dataset *set = ddp__set_new(DDP_SET_IMAGES);
    if (!set) return NULL;
    set->what = "digits";
    set->classes = 10;
    if (read_digits(set, path, train) == 0) return set;
    ddp_dataset_free(set);
    return NULL;
}
