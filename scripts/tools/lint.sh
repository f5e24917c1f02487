#!/bin/bash
# lint.sh BUILD -- clang-format and clang-tidy over C, luacheck over Lua. CUDA_CFLAGS: how the host side of GPUs is compiled; empty: it is not.
cd "$(dirname "$0")/../.." || exit 2
B=${1:-build}; bad=0
clang-format --dry-run -Werror $(git ls-files 'core/*.c' 'core/*.h' 'kernels/*.c' 'kernels/*.h' 'kernels/*.cc' 'tests/*.c' 'scripts/*.c') || bad=1
lua_inc=$(pkg-config --cflags luajit)
mpi_inc=$(pkg-config --cflags mpich 2>/dev/null || pkg-config --cflags ompi-c 2>/dev/null)
git ls-files 'core/*.c' 'kernels/*.c' | grep -v '^kernels/cpu/' | if [ -n "$mpi_inc" ]; then cat; else grep -v '^kernels/mpi/mpi.c'; fi |
  if [ -n "$CUDA_CFLAGS" ]; then cat; else grep -vE '^kernels/(cuda|cudnn|cublas|nccl)/'; fi | xargs -P2 -n8 sh -c 'clang-tidy --quiet "$@" -- -std=c11 -D_GNU_SOURCE -Icore -I'"$B"'/gen '"$lua_inc $mpi_inc $CUDA_CFLAGS"' 2>/dev/null' _ | grep -E 'warning:|error:' && bad=1
luacheck -q --no-color $(git ls-files '*.lua') || bad=1
exit $bad
