/* line.c -- a line editor: arrows, Home, End, Delete, Ctrl-A E K U L, history. One row; a longer line moves under it. */
#include "line.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include "history.h"

typedef struct editor {
    const char *prompt;
    char *text; /* UTF-8, NUL-terminated */
    size_t n, room, at;
    int back;     /* lines back in the history; 0: the new one */
    char *parked; /* the new line while an older one is shown */
} editor;

bool ddp__line_at_terminal(void) {
    const char *term = getenv("TERM");
    return isatty(0) && isatty(1) && !(term && strcmp(term, "dumb") == 0);
}

/* ---- UTF-8: a character is a first byte and those of the form 10xxxxxx after it ---- */

static bool inside(char c) { return ((unsigned char)c & 0xc0) == 0x80; }

static size_t next(const editor *e, size_t i) {
    do i += i < e->n;
    while (i < e->n && inside(e->text[i]));
    return i;
}

static size_t previous(const editor *e, size_t i) {
    do i -= i > 0;
    while (i > 0 && inside(e->text[i]));
    return i;
}

static size_t characters(const char *s, size_t n) {
    size_t k = 0;
    for (size_t i = 0; i < n; i++) k += !inside(s[i]);
    return k;
}

/* ---- the row ---- */

static void put(const char *s, size_t n) {
    while (n) {
        ssize_t k = write(1, s, n);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return;
        s += k;
        n -= (size_t)k;
    }
}

static void draw(const editor *e) {
    struct winsize w;
    size_t cols = ioctl(1, TIOCGWINSZ, &w) == 0 && w.ws_col > 0 ? w.ws_col : 80, from = 0, to;
    size_t used = characters(e->prompt, strlen(e->prompt)), room = cols > used + 2 ? cols - used - 1 : 1;
    while (characters(e->text + from, e->at - from) >= room) from = next(e, from);
    for (to = from; to < e->n && characters(e->text + from, to - from) < room;) to = next(e, to);
    char cursor[32];
    int n = snprintf(cursor, sizeof cursor, "\033[K\r\033[%zuC", used + characters(e->text + from, e->at - from));
    put("\r", 1);
    put(e->prompt, strlen(e->prompt));
    put(e->text + from, to - from);
    put(cursor, (size_t)n);
}

/* ---- changing the text ---- */

static void insert(editor *e, const char *s, size_t n) {
    if (e->n + n + 1 > e->room) {
        size_t room = 2 * (e->n + n + 64);
        char *grown = realloc(e->text, room);
        if (!grown) return;
        e->text = grown;
        e->room = room;
    }
    memmove(e->text + e->at + n, e->text + e->at, e->n - e->at + 1);
    memcpy(e->text + e->at, s, n);
    e->at += n;
    e->n += n;
}

static void cut(editor *e, size_t from, size_t to) {
    memmove(e->text + from, e->text + to, e->n - to + 1);
    e->n -= to - from;
    e->at = from;
}

/* Shows the line `by` further back, or forward again. */
static void browse(editor *e, int by) {
    int back = e->back + by;
    const char *line = back == 0 ? e->parked : ddp__history_back(back);
    if (back < 0 || !line) return;
    if (e->back == 0) {
        free(e->parked);
        e->parked = strdup(e->text);
        line = ddp__history_back(back);
    }
    e->back = back;
    cut(e, 0, e->n);
    insert(e, line, strlen(line));
}

/* ---- keys ---- */

/* The next byte; -1 at the end or when a signal came. With `soon`: -1 when it is not there at once. */
static int get(bool soon) {
    unsigned char c;
    struct pollfd p = {.fd = 0, .events = POLLIN};
    if (soon && poll(&p, 1, 50) <= 0) return -1;
    return read(0, &c, 1) == 1 ? c : -1;
}

/* What follows an escape: "[A" or "OA" for an arrow, "[3~" for a numbered key. */
static void escape(editor *e) {
    int kind = get(true), number = 0, c = -1;
    if (kind != '[' && kind != 'O') return;
    while ((c = get(true)) >= 0 && (c < 0x40 || c > 0x7e))
        if (c >= '0' && c <= '9') number = number * 10 % 1000 + c - '0';
    if (c == 'A') browse(e, 1);
    else if (c == 'B') browse(e, -1);
    else if (c == 'C') e->at = next(e, e->at);
    else if (c == 'D') e->at = previous(e, e->at);
    else if (c == 'H' || (c == '~' && (number == 1 || number == 7))) e->at = 0;
    else if (c == 'F' || (c == '~' && (number == 4 || number == 8))) e->at = e->n;
    else if (c == '~' && number == 3) cut(e, e->at, next(e, e->at));
}

enum {
    CTRL_A = 1,
    CTRL_C = 3,
    CTRL_D,
    CTRL_E,
    CTRL_H = 8,
    TAB,
    CTRL_K = 11,
    CTRL_L,
    ENTER,
    CTRL_U = 21,
    ESCAPE = 27,
    DELETE = 127
};

static void press(editor *e, int c) {
    char byte = (char)c;
    if (c == CTRL_A) e->at = 0;
    else if (c == CTRL_E) e->at = e->n;
    else if (c == CTRL_H || c == DELETE) cut(e, previous(e, e->at), e->at);
    else if (c == CTRL_D) cut(e, e->at, next(e, e->at));
    else if (c == CTRL_K) cut(e, e->at, e->n);
    else if (c == CTRL_U) cut(e, 0, e->at);
    else if (c == CTRL_L) put("\033[H\033[2J", 7);
    else if (c == ESCAPE) escape(e);
    else if (c == TAB) insert(e, "  ", 2);
    else if (c >= ' ') insert(e, &byte, 1);
}

static line_end edit(editor *e) {
    for (;;) {
        struct pollfd more = {.fd = 0, .events = POLLIN};
        if (poll(&more, 1, 0) <= 0) draw(e); /* not after each byte of a text that is pasted */
        errno = 0;
        int c = get(false);
        if (c == '\n' || c == ENTER) {
            e->at = e->n;
            draw(e);
            return LINE_READ;
        }
        if (c == CTRL_C || (c < 0 && errno == EINTR)) return LINE_INTERRUPTED;
        if (c < 0 || (c == CTRL_D && e->n == 0)) return LINE_END;
        press(e, c);
    }
}

static line_end read_edited(const char *prompt, char **line) {
    struct termios before, raw;
    editor e = {.prompt = prompt, .text = calloc(1, 64), .room = 64};
    if (!e.text || tcgetattr(0, &before) < 0) {
        free(e.text);
        return LINE_END;
    }
    raw = before;
    raw.c_iflag &= ~(tcflag_t)(IXON | ICRNL | INLCR | ISTRIP);
    raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO | ISIG | IEXTEN);
    raw.c_cc[VMIN] = 1;
    raw.c_cc[VTIME] = 0;
    tcsetattr(0, TCSADRAIN, &raw);
    line_end end = edit(&e);
    tcsetattr(0, TCSADRAIN, &before);
    put("\n", 1);
    free(e.parked);
    if (end == LINE_READ) {
        ddp__history_add(e.text);
        *line = e.text;
    } else {
        free(e.text);
    }
    return end;
}

line_end ddp__line_read(const char *prompt, char **line) {
    *line = NULL;
    fflush(stdout);
    if (ddp__line_at_terminal()) return read_edited(prompt, line);
    size_t room = 0;
    if (isatty(0) && isatty(1)) put(prompt, strlen(prompt));
    errno = 0;
    ssize_t n = getline(line, &room, stdin);
    if (n > 0) {
        if ((*line)[n - 1] == '\n') (*line)[n - 1] = 0;
        return LINE_READ;
    }
    bool interrupted = errno == EINTR;
    clearerr(stdin);
    free(*line);
    *line = NULL;
    return interrupted ? LINE_INTERRUPTED : LINE_END;
}
