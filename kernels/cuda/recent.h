/* recent.h -- what was launched since the host last waited for the device: whose error it may be that comes out there. */
#ifndef DDP_CUDA_RECENT_H
#define DDP_CUDA_RECENT_H

#include <stddef.h>

/* Both strings stay. Any thread. */
void ddp__recent_add(const char *op, const char *kernel);
/* The host has waited and nothing had failed. */
void ddp__recent_clear(void);
/* "conv2d (a), add (b)": the latest few, the oldest first; "" when there are none. Returns text. */
const char *ddp__recent_text(char *text, size_t n);

#endif
