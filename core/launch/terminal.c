/* terminal.c -- with -i the rank leads the terminal's foreground group; afterwards the terminal is ours again, as it was. */
#include <signal.h>
#include <termios.h>
#include <unistd.h>

#include "launch.h"

static struct termios before;
static bool kept;

void terminal_keep(void) {
    kept = tcgetattr(0, &before) == 0 && tcgetpgrp(0) == getpgrp();
    if (kept) signal(SIGTTOU, SIG_IGN); /* our messages, and what terminal_restore does, from behind the rank */
}

void terminal_restore(void) {
    if (!kept) return;
    tcsetpgrp(0, getpgrp());
    tcsetattr(0, TCSADRAIN, &before);
}
