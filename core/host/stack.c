/* stack.c -- on SIGUSR1 a rank writes to stderr where it is: the C stack, then the Lua stack where that can be read.
 *
 * The Lua stack is whole while Lua has called C, a collective that waits say: it is read at once. In the midst of the
 * interpreter a hook reads it at the next instruction. Code that LuaJIT has compiled keeps it in registers, and the unwinder of C
 * ends the process when it meets such code: there only the innermost C function is told, and the Lua stack when that code is left. */
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

#include "host.h"

enum { FRAMES = 48 };

static lua_State *state;    /* the rank's */
static uintptr_t stack_end; /* of the thread that runs it */

static void write_lua(lua_State *L) {
    lua_Debug d;
    dprintf(2, "where this rank is, in Lua:\n");
    for (int level = 0; level < FRAMES && lua_getstack(L, level, &d); level++) {
        if (!lua_getinfo(L, "nSl", &d)) break;
        if (d.currentline > 0) dprintf(2, "    %s:%d: in %s\n", d.short_src, d.currentline, d.name ? d.name : d.what);
        else dprintf(2, "    [C]: in %s\n", d.name ? d.name : "?");
    }
}

static void hook(lua_State *L, lua_Debug *d) {
    (void)d;
    lua_sethook(L, NULL, 0, 0);
    write_lua(L);
}

#if defined(__x86_64__)
static uintptr_t counter_of(const ucontext_t *c) { return (uintptr_t)c->uc_mcontext.gregs[REG_RIP]; }
static uintptr_t stack_of(const ucontext_t *c) { return (uintptr_t)c->uc_mcontext.gregs[REG_RSP]; }
#elif defined(__aarch64__)
static uintptr_t counter_of(const ucontext_t *c) { return (uintptr_t)c->uc_mcontext.pc; }
static uintptr_t stack_of(const ucontext_t *c) { return (uintptr_t)c->uc_mcontext.sp; }
#endif

/* ---- code that lies in no file ---- */

enum { AREAS = 64 };
typedef struct area {
    uintptr_t from, to;
} area;

/* Executable memory without a name, from /proc/self/maps, by calls that a handler may make. */
static int nameless_code(area *found) {
    static char text[256 << 10];
    size_t n = 0;
    ssize_t k;
    int count = 0, fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    while (fd >= 0 && (k = read(fd, text + n, sizeof text - 1 - n)) > 0) n += (size_t)k;
    if (fd >= 0) close(fd);
    text[n] = 0;
    for (char *line = text, *eol; (eol = strchr(line, '\n')) && count < AREAS; line = eol + 1) {
        *eol = 0;
        char *dash = strchr(line, '-'), *space = strchr(line, ' ');
        if (!dash || !space || space[3] != 'x' || strchr(line, '/') || strchr(line, '[')) continue;
        found[count++] = (area){strtoull(line, NULL, 16), strtoull(dash + 1, NULL, 16)};
    }
    return count;
}

/* Is some of it running, or to be returned to? Reads the whole stack, whatever stands there. */
__attribute__((no_sanitize("address"))) static bool runs_compiled(uintptr_t counter, uintptr_t stack) {
    static area a[AREAS];
    int n = nameless_code(a);
    for (int i = 0; i < n; i++)
        if (counter >= a[i].from && counter < a[i].to) return true;
    for (uintptr_t at = stack & ~(uintptr_t)7; at < stack_end; at += sizeof at)
        for (int i = 0; i < n; i++) {
            uintptr_t word = *(const uintptr_t *)at;
            if (word >= a[i].from && word < a[i].to) return true;
        }
    return false;
}

/* Was the processor outside of LuaJIT, which had called what it was in? */
static bool in_called_library(uintptr_t counter) {
    Dl_info at, lua;
    void *known = (void *)(uintptr_t)&lua_getstack;
    return dladdr((void *)counter, &at) && dladdr(known, &lua) && strcmp(at.dli_fname, lua.dli_fname) != 0;
}

static void on_signal(int sig, siginfo_t *info, void *context) {
    (void)sig;
    (void)info;
    uintptr_t counter = counter_of(context);
    bool compiled = runs_compiled(counter, stack_of(context));
    void *frame[FRAMES] = {(void *)counter};
    int first = 0, n = 1;
    if (!compiled) {
        first = 2; /* this function and the signal's frame */
        n = backtrace(frame, FRAMES);
    }
    dprintf(2, "where this rank is, in C:\n");
    backtrace_symbols_fd(frame + first, n - first, 2);
    if (!compiled && in_called_library(counter)) {
        write_lua(state);
        return;
    }
    if (compiled) dprintf(2, "where this rank is, in Lua: told when code that LuaJIT has compiled is left\n");
    lua_sethook(state, hook, LUA_MASKCOUNT, 1);
}

void ddp__host_show_stack(lua_State *L) {
    void *frame[4];
    struct sigaction a = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_RESTART};
    state = L;
    stack_end = (uintptr_t)__builtin_frame_address(0);
    backtrace(frame, 4); /* loads what it needs now: in a handler it could not */
    sigaction(SIGUSR1, &a, NULL);
}
