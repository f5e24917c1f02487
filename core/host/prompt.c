/* prompt.c -- `ddprun -i`: the terminal, Ctrl-C and lines for lua/ddp/prompt.lua, which runs them. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "host.h"
#include "line.h"

/* ---- Ctrl-C ---- */

/* The state whose chunk runs; NULL while none does. */
static lua_State *volatile running;

static void stop(lua_State *L, lua_Debug *at) {
    (void)at;
    lua_sethook(L, NULL, 0, 0);
    luaL_error(L, "interrupted");
}

/* The hook is the one thing of Lua's that a signal's handler may set. A second Ctrl-C, which comes when the chunk is
 * long in a call of C, ends the process. */
static void on_interrupt(int sig) {
    if (!running) return;
    signal(sig, SIG_DFL);
    lua_sethook(running, stop, LUA_MASKCALL | LUA_MASKRET | LUA_MASKCOUNT, 1);
}

static void catch_interrupts(void) {
    struct sigaction a = {.sa_handler = on_interrupt}; /* no SA_RESTART: a read at the prompt ends */
    sigaction(SIGINT, &a, NULL);
}

/* run(true) before a chunk, run(false) after it. */
static int set_running(lua_State *L) {
    bool on = lua_toboolean(L, 1);
    running = on ? L : NULL;
    if (on) return 0;
    lua_sethook(L, NULL, 0, 0);
    if (ddp__line_at_terminal()) catch_interrupts();
    return 0;
}

/* ---- lines ---- */

/* read(prompt): a line; nil when there are no more; false after Ctrl-C. */
static int read_line(lua_State *L) {
    char *line;
    line_end end = ddp__line_read(luaL_checkstring(L, 1), &line);
    if (end == LINE_READ) lua_pushstring(L, line);
    else if (end == LINE_INTERRUPTED) lua_pushboolean(L, 0);
    else lua_pushnil(L);
    free(line);
    return 1;
}

/* ---- the terminal ---- */

/* ddprun lets us lead the terminal's foreground group, which it leads itself; else a read would stop us. */
static int take_terminal(void) {
    signal(SIGTTOU, SIG_IGN); /* for the call below; and output to the terminal never stops us */
    signal(SIGTSTP, SIG_IGN); /* ddprun would go on, and with it the shell would wait */
    if (!isatty(0) || tcgetpgrp(0) == getpgrp()) return 0;
    if (tcgetpgrp(0) == getpgid(getppid()) && tcsetpgrp(0, getpgrp()) == 0) return 0;
    fprintf(stderr, "-i: the terminal belongs to another job; start it in the foreground\n");
    return 1;
}

int ddp_host_prompt(const char *script, int argc, char **argv) {
    static const luaL_Reg functions[] = {{"read", read_line}, {"running", set_running}, {NULL, NULL}};
    const char *why = "";
    if (take_terminal() != 0) return 1;
    ddp_host *h = ddp_host_new(NULL);
    if (h && script && ddp_host_run_file(h, script, argc, argv) < 0) {
        ddp_error_take(&why);
        printf("%s\n", why);
    }
    if (ddp__line_at_terminal()) {
        ddp__history_open();
        catch_interrupts();
    }
    if (h) {
        luaL_register(h->L, "ddp.terminal", functions);
        lua_pushboolean(h->L, ddp__line_at_terminal());
        lua_setfield(h->L, -2, "typed");
        lua_pop(h->L, 1);
    }
    if (h && ddp_host_run_text(h, "require('ddp.prompt').run()", "=ddprun") == 0) {
        ddp_finish();
        ddp_host_free(h);
        return 0;
    }
    ddp_error_take(&why);
    fprintf(stderr, "%s\n", why);
    return 1;
}
