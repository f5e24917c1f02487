/* list.c -- the list that the plug-in hands out. */
#include "dnnl_util.h"

static const ddp_kernel *by_op[DDP_OP_COUNT] = {
    [DDP_OP_conv2d] = dnn_conv2d,
    [DDP_OP_conv2d_grad_input] = dnn_conv2d_grad_input,
    [DDP_OP_conv2d_grad_weight] = dnn_conv2d_grad_weight,
    [DDP_OP_matmul] = dnn_matmul,
    [DDP_OP_linear] = dnn_linear,
    [DDP_OP_avg_pool2d] = dnn_avg_pool2d,
};

static const ddp_kernel_list list = {"onednn", by_op};

DDP_API const ddp_kernel_list *ddp_plugin_kernels(void);
const ddp_kernel_list *ddp_plugin_kernels(void) { return &list; }
