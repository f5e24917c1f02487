/* plan_file.c -- what was chosen, in files: so that the next process neither asks cuDNN's heuristics nor compiles again. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "plan.h"

enum { PATH = 1024, FILE_MOST = 8 << 20 };

/* ---- names ------------------------------------------------------------------------------------------------------- */

static uint64_t hash(const char *p, size_t n) {
    uint64_t h = 0xcbf29ce484222325u; /* FNV-1a */
    for (size_t i = 0; i < n; i++) h = (h ^ (unsigned char)p[i]) * 0x100000001b3u;
    return h;
}

/* What the file must begin with: all that a choice depends on. */
static char *head_of(const plan_key *k, const char *device, size_t version) {
    char *s = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&s, &bytes);
    if (!f) return NULL;
    fprintf(f, "ddp cudnn plan 1\ncudnn %zu\ndevice %s\nkey", version, device);
    for (int i = 0; i < k->n; i++) fprintf(f, " %lld", (long long)k->v[i]);
    fputc('\n', f);
    if (fclose(f) == 0) return s;
    free(s);
    return NULL;
}

/* The folder, made where it is not there; false: none. */
static bool folder(char *path) {
    const char *own = getenv("DDP_CACHE"), *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int n = -1;
    if (own) {
        if (!*own) return false;
        n = snprintf(path, PATH, "%s", own);
    } else if (cache && *cache) n = snprintf(path, PATH, "%s/ddp", cache);
    else if (home && *home) n = snprintf(path, PATH, "%s/.cache/ddp", home);
    if (n < 0 || n >= PATH - 64) return false;
    for (char *p = path + 1; (p = strchr(p, '/')); p++) { /* its parents */
        *p = 0;
        mkdir(path, 0700);
        *p = '/';
    }
    return mkdir(path, 0700) == 0 || errno == EEXIST;
}

static bool path_of(const char *head, char *path) {
    if (!folder(path)) return false;
    size_t n = strlen(path);
    snprintf(path + n, PATH - n, "/cudnn-%016llx.plan", (unsigned long long)hash(head, strlen(head)));
    return true;
}

/* ---- reading ----------------------------------------------------------------------------------------------------- */

/* The whole file, ended by 0; NULL. */
static char *slurp(const char *path, size_t *bytes) {
    FILE *f = fopen(path, "re");
    struct stat st;
    char *s = NULL;
    if (!f) return NULL;
    if (fstat(fileno(f), &st) == 0 && st.st_size > 0 && st.st_size < FILE_MOST &&
        (s = malloc((size_t)st.st_size + 1))) {
        *bytes = fread(s, 1, (size_t)st.st_size, f);
        s[*bytes] = 0;
    }
    fclose(f);
    return s;
}

/* The last line holds the sum of all before it; it is cut off. */
static bool whole(char *s, size_t bytes) {
    static const char mark[] = "\nsum ";
    unsigned long long sum;
    if (bytes < 24 || strlen(s) != bytes) return false;
    char *end = s + bytes - 22; /* "\nsum ", 16 digits, "\n" */
    if (strncmp(end, mark, sizeof mark - 1) != 0 || sscanf(end + sizeof mark - 1, "%16llx", &sum) != 1) return false;
    end[1] = 0;
    return sum == hash(s, (size_t)(end + 1 - s));
}

/* "engine E measured M knobs N T=V ...\n" and, where it was compiled, its text. */
static bool parse(const char *s, plan_file *out) {
    long long engine, type, value;
    int measured, used = 0;
    if (sscanf(s, "engine %lld measured %d knobs %d%n", &engine, &measured, &out->choice.n_knobs, &used) != 3)
        return false;
    if (out->choice.n_knobs < 0 || out->choice.n_knobs > CG_KNOBS) return false;
    out->choice.engine = engine;
    out->measured = measured != 0;
    for (int i = 0; i < out->choice.n_knobs; i++) {
        s += used;
        if (sscanf(s, " %lld=%lld%n", &type, &value, &used) != 2) return false;
        out->choice.knob[i].type = type;
        out->choice.knob[i].value = value;
    }
    s += used;
    if (strncmp(s, "\ntext ", 6) == 0) out->text = strdup(s + 6);
    return true;
}

bool plan_file_read(const plan_key *k, const char *device, size_t version, plan_file *out) {
    char path[PATH];
    size_t bytes = 0;
    char *head = head_of(k, device, version), *s = NULL;
    bool found = false;
    memset(out, 0, sizeof *out);
    if (!head || !path_of(head, path)) goto done;
    s = slurp(path, &bytes);
    if (!s) goto done;
    found = whole(s, bytes) && strncmp(s, head, strlen(head)) == 0 && parse(s + strlen(head), out);
    if (!found) ddp__log(DDP_LOG_DEBUG, "cudnn: %s is damaged, or not ours: it is not used", path);
done:
    free(head);
    free(s);
    return found;
}

/* ---- writing ----------------------------------------------------------------------------------------------------- */

static char *text_of(const char *head, const plan_file *p) {
    char *s = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&s, &bytes);
    if (!f) return NULL;
    fprintf(f, "%sengine %lld measured %d knobs %d", head, (long long)p->choice.engine, p->measured, p->choice.n_knobs);
    for (int i = 0; i < p->choice.n_knobs; i++)
        fprintf(f, " %lld=%lld", (long long)p->choice.knob[i].type, (long long)p->choice.knob[i].value);
    if (p->text) fprintf(f, "\ntext %s", p->text);
    fputc('\n', f);
    fflush(f);
    fprintf(f, "sum %016llx\n", (unsigned long long)hash(s, bytes));
    if (fclose(f) == 0) return s;
    free(s);
    return NULL;
}

/* Under another name first: a reader sees the old file or the new one. */
static bool replace(const char *path, const char *s) {
    char temporary[PATH + 32];
    snprintf(temporary, sizeof temporary, "%s.%ld", path, (long)getpid());
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0) return false;
    size_t n = strlen(s);
    bool good = write(fd, s, n) == (ssize_t)n;
    good = close(fd) == 0 && good && rename(temporary, path) == 0;
    if (!good) unlink(temporary);
    return good;
}

void plan_file_write(const plan_key *k, const char *device, size_t version, const plan_file *p) {
    char path[PATH];
    char *head = head_of(k, device, version), *s = NULL;
    if (head && path_of(head, path)) s = text_of(head, p);
    if (s && !replace(path, s)) ddp__log(DDP_LOG_DEBUG, "cudnn: %s can't be written: %s", path, strerror(errno));
    free(head);
    free(s);
}
