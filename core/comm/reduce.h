/* reduce.h -- adding up what the ranks have. */
#ifndef DDP_REDUCE_H
#define DDP_REDUCE_H

#include "../tensor/tensor.h"

enum { DDP_REDUCE_MAX = 1024 }; /* inputs at most */

/* out[k][i] = reduce over r of in[r][i], for all n_out outputs; inputs in rank order. weights [n_in]: the mean is
 * sum(w * x) / sum(w); to the others a weight of 0 contributes nothing. Without any contribution the result is 0.
 * Outputs may be the inputs. */
DDP_LOCAL void ddp__reduce(ddp_dtype dtype, int reduce, int n_in, const void *const *in, const double *weights,
                           int n_out, void *const *out, int64_t n);

#endif
