/* history.h -- lines typed before, oldest first. */
#ifndef DDP_HOST_HISTORY_H
#define DDP_HOST_HISTORY_H

/* The n-th line from the end, 1 the last; NULL: there is none. */
__attribute__((visibility("hidden"))) const char *ddp__history_back(int n);
/* Keeps a line, here and in the file. */
__attribute__((visibility("hidden"))) void ddp__history_add(const char *line);

#endif
