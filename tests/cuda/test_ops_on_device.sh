#!/bin/bash
# test_ops_on_device.sh -- the whole table of ops on the test double, every check of tests/ops.
cd "$(dirname "$0")/../.." || exit 2
B=${DDP_BUILD:-$PWD/build}
export DDP_CUDA_LIBS=$B/cuda-double DDP_DOUBLE_LEAKS=quiet DDP_TEST_DEVICE=cuda
luajit tests/ops/test_ops.lua
