#!/bin/bash
# gpu_check.sh -- scripts/gpu_check.sh runs to its table on the test double, and a part that fails stops no other.
tmp=$(mktemp -d) || exit 2
trap 'rm -rf "$tmp"' EXIT
unset LUA_PATH DDP_LIB DDP_CUDA_LIBS
B=${DDP_BUILD##*/}; export B
bad=0
ok() { echo "ok $1"; }
no() { echo "not ok $1: $2"; bad=1; }
# check SENTENCE CONDITION...: with the table's end when it does not hold
check() { local what=$1; shift; if "$@"; then ok "$what"; else no "$what" "$(tail -45 "$tmp/out" | head -c 3000)"; fi; }
says() { grep -qE "$1" "$tmp/out"; }

scripts/gpu_check.sh --double "$tmp/all" > "$tmp/out" 2>&1; status=$?
check "every part passes on the double" [ $status = 0 ]
check "the last line says so" test "$(tail -1 "$tmp/out")" = "gpu_check: all parts passed"
check "it is said that this is no GPU" says 'THE TEST DOUBLE, NOT A GPU'
for part in device ops errors network nccl_1 nccl_2 micro step_toy_cifar_none; do
  check "part $part has a row and its output" eval "says '^$part +ok +[0-9]+ s ' && [ -s '$tmp/all/$part.txt' ]"
done
check "what cannot run here is named with its reason" says '^memcheck +- +0 s  not run: the test double is no GPU'
check "the table is kept" grep -q '^nccl_1 ' "$tmp/all/table.txt"
if grep -q "cuDNN gives no profile" "$tmp/all/device.txt"; then echo "skip cuDNN's own profile of each GPU is kept: no real cuDNN is here"
else check "cuDNN's own profile of each GPU is kept" grep -q deviceName "$tmp/all/cudnn_profile_0.json"; fi
check "a step has its limit on paper" says '^toy cifar 8 none +[0-9.]+ +[0-9.]+ +[0-9.]+ +[0-9]+ +[1-9][0-9]* +0\.[0-9]+'

PARTS="device nccl_2 micro" DDP_DOUBLE_FAIL=ncclAllReduce:1 scripts/gpu_check.sh --double "$tmp/fails" > "$tmp/out" 2>&1; status=$?
check "a part that fails ends it with status 1" [ $status = 1 ]
check "the part that failed is named" says '^nccl_2 +FAILED'
check "and those behind it run" says '^micro +ok'

DDP_DOUBLE_STATUS=100 scripts/gpu_check.sh --double "$tmp/none" > "$tmp/out" 2>&1; status=$?
check "without a GPU it says so at once, with status 1" eval "[ $status = 1 ] && says 'gpu_check: no GPU answers'"
exit $bad
