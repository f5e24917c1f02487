/* list.c -- what cuDNN computes. */
#include "../cuda/lists.h"

extern const ddp_kernel ddp__cudnn_conv2d[], ddp__cudnn_conv2d_grad_input[], ddp__cudnn_conv2d_grad_weight[],
    ddp__cudnn_conv_bn_act[];

static const ddp_kernel *by_op[DDP_OP_COUNT] = {
    [DDP_OP_conv2d] = ddp__cudnn_conv2d,
    [DDP_OP_conv2d_grad_input] = ddp__cudnn_conv2d_grad_input,
    [DDP_OP_conv2d_grad_weight] = ddp__cudnn_conv2d_grad_weight,
    [DDP_OP_conv_bn_act] = ddp__cudnn_conv_bn_act,
};

const ddp_kernel_list ddp__cudnn_list = {"cudnn", by_op};
