#!/bin/bash
# cudnn.sh -- convolutions where cuDNN is not what it should be: on a GPU of compute capability 7.5, where it has no bf16 and compiles
# nothing; too old; not there; short of memory.
cd "$(dirname "$0")/../.." || exit 2
[ -e "$DDP_BUILD/cuda-double/driver/libcuda.so.1" ] || { echo "skip cuDNN on a T4, too old, missing: no CUDA toolkit"; exit 0; }
export DDP_CUDA_LIBS=$DDP_BUILD/cuda-double DDP_CACHE=''
DDP_DOUBLE_PROFILE=t4 luajit tests/cuda/test_conv.lua 2>/dev/null | sed 's/cuDNN: /cuDNN on a T4: /'

work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
cat > "$work/conv.lua" <<'LUA'
local ddp = require "ddp"
local x, w = ddp.randn({ 2, 64, 8, 8 }):to "cuda", ddp.randn({ 64, 64, 3, 3 }):to "cuda"
local y = ddp.nn.functional.conv2d(x, w)
print("sum is a number: " .. tostring(y:sum():item() == y:sum():item()))
LUA
says() { # says NAME TEXT: the last run printed TEXT
  if grep -qF -- "$2" "$work/out"; then echo "ok $1"; else echo "not ok $1: $(head -c 400 "$work/out" | tr '\n' ' ')"; fi
}

DDP_DOUBLE_CUDNN=90700 luajit "$work/conv.lua" > "$work/out" 2>&1
says "cuDNN: a version too old is named" "cuDNN is version 90700, at least 9.8"

mkdir "$work/libs"
for f in "$DDP_BUILD"/cuda-double/*.so*; do case $f in *libcudnn*) ;; *) ln -s "$f" "$work/libs/" ;; esac; done
DDP_CUDA_LIBS=$work/libs luajit "$work/conv.lua" > "$work/out" 2>&1
says "cuDNN: a library that is not there is named, with the remedy" "libcudnn.so.9 is not there: install cuDNN 9"

DDP_DOUBLE_FAIL=cudnnBackendExecute:1 luajit "$work/conv.lua" > "$work/out" 2>&1
says "cuDNN: a run that fails names the op and what cuDNN said" "conv2d: cuDNN: run: CUDNN_STATUS_EXECUTION_FAILED: the double was told to fail"

DDP_DOUBLE_FAIL=cudnnCreate:1 luajit "$work/conv.lua" > "$work/out" 2>&1
says "cuDNN: a handle that can't be made is told" "conv2d: cuDNN: make a handle: "

DDP_CUDNN_WORKSPACE_MB=0 DDP_DOUBLE_LOG=$work/log luajit "$work/conv.lua" > "$work/out" 2>&1
says "cuDNN: DDP_CUDNN_WORKSPACE_MB=0 still computes" "sum is a number: true"
if grep -q '^cudnn convolution .*workspace 0$' "$work/log"; then echo "ok cuDNN: and takes no workspace"; else echo "not ok cuDNN: and takes no workspace: $(grep cudnn "$work/log" | head -3)"; fi
