/* norm.h -- a convolution whose batch statistics come with it, for the batch norm that follows. */
#ifndef DDP_CUDNN_NORM_H
#define DDP_CUDNN_NORM_H

#include "../../core/op/op.h"

/* c: a conv2d without bias. y = conv2d(x, w) as c says and, of y as it was rounded, sum and square [K] f32 of the device: the sums
 * over N, Ho, Wo of y and of y^2, made while y is written, so that no pass reads it for them. Sums of squares lose digits where
 * |mean| is far above the deviation: f32 keeps 7 digits of mean^2.
 * Reject: NULL, or why cuDNN does not (f32 without TF32, f64, GPUs before 8.0). Run: queued; a status. */
DDP_LOCAL const char *ddp__cudnn_conv_statistics_reject(const ddp_call *c);
DDP_LOCAL int ddp__cudnn_conv_statistics(const ddp_call *c, float *sum, float *square);

#endif
