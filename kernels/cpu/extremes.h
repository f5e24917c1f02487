/* extremes.h -- what extremes.c leaves to extremes_plain.c. */
#ifndef DDP_CPU_EXTREMES_H
#define DDP_CPU_EXTREMES_H

#include "reduce.h"

/* The largest (or least) of each result of p, of dtype f64, i64, i32, u8 or bool, into p->y unless that is NULL, and its place
 * into ids unless that is: the first of several; NaN beats all. */
#define cpu_extremes_plain CPU_LOCAL(extremes_plain)
DDP_LOCAL void cpu_extremes_plain(const plan *p, bool least, int64_t *ids);

#endif
