#!/bin/bash
# cudnn_t4.sh -- convolutions on a GPU of compute capability 7.5, where cuDNN has no bf16 and compiles nothing: the ways around.
cd "$(dirname "$0")/../.." || exit 2
[ -e "$DDP_BUILD/cuda-double/driver/libcuda.so.1" ] || { echo "skip cuDNN on a T4: no CUDA toolkit"; exit 0; }
DDP_CUDA_LIBS=$DDP_BUILD/cuda-double DDP_DOUBLE_PROFILE=t4 DDP_CACHE='' luajit tests/cuda/test_conv.lua | sed 's/cuDNN: /cuDNN on a T4: /'
