/* history.c -- the prompt's history: $XDG_STATE_HOME/ddp/history, else ~/.local/state/ddp/history. */
#include "history.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "line.h"

/* Lines kept; a file of more than FILE_LINES is cut back to those. */
enum { KEEP = 1000, FILE_LINES = 4000 };
static char *lines[KEEP]; /* a ring */
static long count;        /* ever added */
static char path[4096];   /* "": none */

const char *ddp__history_back(int n) { return n < 1 || n > count || n > KEEP ? NULL : lines[(count - n) % KEEP]; }

static void keep(const char *line) {
    char *copy = strdup(line);
    if (!copy) return;
    free(lines[count % KEEP]);
    lines[count++ % KEEP] = copy;
}

/* The file's name, with the folders above it made. False: no place for it. */
static bool find_place(void) {
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    int n = -1;
    if (state && *state) n = snprintf(path, sizeof path, "%s/ddp/history", state);
    else if (home && *home) n = snprintf(path, sizeof path, "%s/.local/state/ddp/history", home);
    if (n < 0 || n >= (int)sizeof path - 8) path[0] = 0;
    for (char *s = path[0] ? strchr(path + 1, '/') : NULL; s; s = strchr(s + 1, '/')) {
        *s = 0;
        mkdir(path, 0700);
        *s = '/';
    }
    return path[0] != 0;
}

/* Puts the lines kept into the file's place. */
static void rewrite(void) {
    char new[sizeof path + 8];
    snprintf(new, sizeof new, "%s.new", path);
    int fd = open(new, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    FILE *f = fd >= 0 ? fdopen(fd, "w") : NULL;
    if (!f) return;
    for (int n = KEEP; n > 0; n--)
        if (ddp__history_back(n)) fprintf(f, "%s\n", ddp__history_back(n));
    if (fclose(f) == 0) rename(new, path);
}

void ddp__history_open(void) {
    char *line = NULL;
    size_t room = 0;
    ssize_t n;
    FILE *f = find_place() ? fopen(path, "re") : NULL;
    if (!f) return;
    while ((n = getline(&line, &room, f)) > 0) {
        if (line[n - 1] == '\n') line[n - 1] = 0;
        keep(line);
    }
    free(line);
    fclose(f);
    if (count > FILE_LINES) rewrite();
}

void ddp__history_add(const char *line) {
    const char *last = ddp__history_back(1);
    if (!*line || (last && strcmp(last, line) == 0)) return;
    keep(line);
    int fd = path[0] ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (fd < 0) return;
    dprintf(fd, "%s\n", line);
    close(fd);
}
