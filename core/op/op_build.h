/* op_build.h -- what the generated op functions stand on. */
#ifndef DDP_OP_BUILD_H
#define DDP_OP_BUILD_H

#include "op.h"

/* Copies n values into a list attribute; n < 0 means none. */
DDP_LOCAL int ddp__ints_set(const char *op, const char *attr, ddp_ints *out, int n, const int64_t *v);
/* lists[0..k) of n tensors each, one after the other; the caller frees. NULL with the error set. */
DDP_LOCAL ddp_tensor **ddp__join_lists(int k, int n, ddp_tensor *const *const *lists);

/* ---- profiles (profile.c) ---- */
DDP_LOCAL extern atomic_bool ddp__profile_on;
/* k->run(c), counted. */
DDP_LOCAL int ddp__profile_run(const ddp_kernel *k, const ddp_call *c);
/* Who wants to see the calls of this thread, from now on or no more. */
enum { DDP_WATCH_PROFILE = 1, DDP_WATCH_TRACE = 2 };
DDP_LOCAL void ddp__watch_calls(unsigned who, bool on);
/* Bytes of t's elements; those repeated by a stride of 0 count once. */
DDP_LOCAL double ddp__tensor_bytes(const ddp_tensor *t);
/* Inputs read plus results written, each distinct stretch of memory once each way. */
DDP_LOCAL double ddp__call_bytes(const ddp_call *c);
/* Useful operations of a call: rules->flops, else one an element of the first result. */
DDP_LOCAL double ddp__call_flops(const ddp_call *c);

/* ---- traces (trace.c); nothing happens while none is on ---- */
DDP_LOCAL void ddp__trace_begin(const ddp_kernel *k, const ddp_call *c);
DDP_LOCAL void ddp__trace_end(double seconds);

#endif
