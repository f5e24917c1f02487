/* line.h -- one line from whoever types, with editing and a history where there is a terminal. */
#ifndef DDP_HOST_LINE_H
#define DDP_HOST_LINE_H

#include <stdbool.h>

typedef enum line_end { LINE_READ, LINE_END, LINE_INTERRUPTED } line_end;

/* Reads a line without its newline into *line, the caller's (free); LINE_END: there are no more; LINE_INTERRUPTED: Ctrl-C.
 * The prompt is shown where stdin and stdout are a terminal. */
__attribute__((visibility("hidden"))) line_end ddp__line_read(const char *prompt, char **line);
/* Whether somebody types at a terminal. */
__attribute__((visibility("hidden"))) bool ddp__line_at_terminal(void);
/* Reads the history that earlier sessions left in the user's state folder. */
__attribute__((visibility("hidden"))) void ddp__history_open(void);

#endif
