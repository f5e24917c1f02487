/* cache.c -- files by key: a header, the key, the data. */
#include "cache.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct head {
    char magic[8];
    uint64_t key_bytes, bytes, sum; /* sum: of key and data */
} head;
static const char magic[8] = "ddpcach1";

/* FNV-1a, 64 bits. */
static uint64_t hash(uint64_t h, const void *data, size_t n) {
    const unsigned char *p = data;
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001b3u;
    return h;
}
static const uint64_t hash_start = 0xcbf29ce484222325u;

static bool folder(char *path, size_t n) {
    const char *own = getenv("DDP_CACHE"), *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (own) return *own && (size_t)snprintf(path, n, "%s", own) < n;
    if (cache && *cache) return (size_t)snprintf(path, n, "%s/ddp", cache) < n;
    if (!home || !*home) return false;
    return (size_t)snprintf(path, n, "%s/.cache/ddp", home) < n;
}

static bool file_of(char *path, size_t n, const char *kind, const void *key, size_t key_bytes) {
    char dir[1000];
    if (!folder(dir, sizeof dir)) return false;
    uint64_t h = hash(hash(hash_start, kind, strlen(kind)), key, key_bytes);
    return (size_t)snprintf(path, n, "%s/%s-%016llx", dir, kind, (unsigned long long)h) < n;
}

static void *whole_file(const char *path, size_t *bytes) {
    FILE *f = fopen(path, "rb");
    char *data = NULL;
    struct stat st;
    if (!f) return NULL;
    if (fstat(fileno(f), &st) == 0 && (data = malloc((size_t)st.st_size + 1))) {
        *bytes = (size_t)st.st_size;
        if (fread(data, 1, *bytes, f) != *bytes) {
            free(data);
            data = NULL;
        }
    }
    fclose(f);
    return data;
}

void *ddp__cache_read(const char *kind, const void *key, size_t key_bytes, size_t *bytes) {
    char path[1100];
    size_t n = 0;
    head h;
    if (!file_of(path, sizeof path, kind, key, key_bytes)) return NULL;
    char *file = whole_file(path, &n);
    if (!file) return NULL;
    if (n >= sizeof h) memcpy(&h, file, sizeof h);
    bool good = n >= sizeof h && memcmp(h.magic, magic, sizeof magic) == 0 && h.key_bytes == key_bytes &&
                h.bytes == n - sizeof h - key_bytes && memcmp(file + sizeof h, key, key_bytes) == 0 &&
                h.sum == hash(hash_start, file + sizeof h, n - sizeof h);
    if (!good) {
        ddp__log(DDP_LOG_DEBUG, "%s is damaged or of something else: it is made anew", path);
        free(file);
        return NULL;
    }
    *bytes = (size_t)h.bytes;
    memmove(file, file + sizeof h + key_bytes, *bytes);
    return file;
}

/* Makes the folders above path. */
static void make_folders(const char *path) {
    char part[1100];
    for (const char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        snprintf(part, sizeof part, "%.*s", (int)(slash - path), path);
        mkdir(part, 0777);
    }
}

void ddp__cache_write(const char *kind, const void *key, size_t key_bytes, const void *data, size_t bytes) {
    char path[1100], beside[1200];
    head h = {.key_bytes = key_bytes, .bytes = bytes};
    memcpy(h.magic, magic, sizeof magic);
    h.sum = hash(hash(hash_start, key, key_bytes), data, bytes);
    if (!file_of(path, sizeof path, kind, key, key_bytes)) return;
    make_folders(path);
    snprintf(beside, sizeof beside, "%s.XXXXXX", path);
    int fd = mkstemp(beside);
    FILE *f = fd < 0 ? NULL : fdopen(fd, "wb");
    if (!f) {
        ddp__log(DDP_LOG_DEBUG, "%s: %s: nothing is kept there", path, strerror(errno));
        if (fd >= 0) close(fd);
        return;
    }
    bool done = fwrite(&h, sizeof h, 1, f) == 1 && fwrite(key, 1, key_bytes, f) == key_bytes &&
                fwrite(data, 1, bytes, f) == bytes;
    if (fclose(f) != 0) done = false;
    if (done) done = rename(beside, path) == 0;
    if (!done) {
        ddp__log(DDP_LOG_DEBUG, "%s: %s: nothing is kept there", path, strerror(errno));
        unlink(beside);
    }
}
