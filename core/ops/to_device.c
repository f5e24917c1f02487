/* to_device.c -- between devices. */
#include "../mem/device.h"
#include "ops.h"

static int to_device_infer(const ddp_call *c, ddp_meta *out) {
    const ddp_to_device_attrs *a = c->attrs;
    ddp__out_like(c, 0, c->in[0]->m.dtype, out);
    out->device = (int)a->device;
    if (a->device != DDP_CPU && !ddp__device((int)a->device, "to")) return ddp__pending();
    return 0;
}

static int to_device_vjp(ddp_vjp *v) {
    v->grad_in[0] = ddp_to_device(v->grad_out[0], v->in_meta[0].device);
    return v->grad_in[0] ? 0 : ddp__pending();
}

const ddp_op_rules ddp__to_device_rules = {.infer = to_device_infer, .vjp = to_device_vjp};

ddp_tensor *ddp_to_device_later(ddp_tensor *t, int device) {
    ddp__copies_later = true;
    ddp_tensor *there = ddp_to_device(t, device);
    ddp__copies_later = false;
    return there;
}

ddp_tensor *ddp_pin_memory(ddp_tensor *t, int device) {
    if (ddp__pending()) return NULL;
    if (!t) ddp__fail(DDP_ENULL, "pin_memory: no tensor");
    else if (t->m.device != DDP_CPU)
        ddp__fail(DDP_EINVAL, "pin_memory: the tensor is on %s, pinned memory is the host's",
                  DDP_DEVICE_TEXT(t->m.device));
    else if (t->node || t->requires_grad)
        ddp__fail(DDP_EINVAL, "pin_memory: the tensor has a gradient or history: x:detach() first");
    else if (device == DDP_CPU) ddp__fail(DDP_EDEVICE, "pin_memory: for a GPU; \"cpu\" is none");
    if (ddp__pending()) return NULL;
    if (t->storage->pinned) return ddp__scope_own(ddp_retain(t));
    ddp_meta m = t->m;
    if (!ddp__meta_is_dense(&m)) ddp__meta_rowmajor(&m);
    m.offset = 0;
    ddp_tensor *p = ddp__tensor_pinned(&m, device);
    if (p && ddp_copy_(p, t) < 0) {
        ddp__drop(p);
        return NULL;
    }
    return ddp__scope_own(p);
}

int ddp_move_(ddp_tensor *t, int device) {
    if (ddp__pending()) return ddp__pending();
    if (!t) return ddp__fail(DDP_ENULL, "to: no tensor");
    if (t->m.device == device) return 0;
    if (t->node)
        return ddp__fail(DDP_EINVAL, "to: a tensor with history is not moved in place; its copy is: x:to(device)");
    ddp_tensor *there = ddp_keep(ddp_to_device(t, device));
    if (!there) return ddp__pending();
    ddp_storage *old = t->storage;
    ddp_meta meta = t->m;
    t->storage = there->storage;
    t->m = there->m;
    there->storage = old; /* goes with it */
    there->m = meta;
    ddp__drop(there);
    return t->grad ? ddp_move_(t->grad, device) : 0;
}
