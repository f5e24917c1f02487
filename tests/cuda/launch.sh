#!/bin/bash
# launch.sh -- ranks a GPU, the doctor and the report where there are GPUs: on the double.
cd "$(dirname "$0")/../.." || exit 2
B=${DDP_BUILD:-$PWD/build}
RUN=$B/ddprun
export DDP_CUDA_LIBS=$B/cuda-double DDP_DOUBLE_LEAKS=quiet
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
bad=0
ok() { echo "ok $1"; }
no() { echo "not ok $1: $(echo "$2" | tr '\n' '~' | cut -c1-1500)"; bad=1; }
# says NAME STATUS PATTERN...: the last run ended so, and each extended regular expression is found in a line of it
says() {
  local name=$1 want=$2 p; shift 2
  [ $rc = "$want" ] || { no "$name" "status $rc, expected $want: $out"; return; }
  for p in "$@"; do echo "$out" | grep -qE -- "$p" || { no "$name" "no \"$p\" in: $out"; return; }; done
  ok "$name"
}
try() { out=$(timeout 60 "$@" 2>&1); rc=$?; }

echo 'local ddp = require "ddp"; ddp.init(); print(("rank %d of %d on %s"):format(ddp.rank(), ddp.world_size(), ddp.device()))' > "$tmp/where.lua"
try env DDP_DOUBLE_GPUS=3 "$RUN" -n gpu "$tmp/where.lua"; says "-n gpu starts a rank a GPU" 0 'rank 0 of 3 on cuda:0' 'rank 2 of 3 on cuda:2'
try env DDP_DOUBLE_GPUS=2 "$RUN" -n auto "$tmp/where.lua"; says "-n auto takes the GPUs" 0 'rank 1 of 2 on cuda:1'
try env DDP_DOUBLE_GPUS=4 CUDA_VISIBLE_DEVICES=1,3 "$RUN" -n gpu "$tmp/where.lua"; says "-n gpu heeds CUDA_VISIBLE_DEVICES" 0 'rank 1 of 2 on cuda:1'
try env DDP_DEVICE=cpu "$RUN" -n auto "$tmp/where.lua"; says "-n auto is one rank without a GPU" 0 'rank 0 of 1 on cpu'
try env DDP_DOUBLE_STATUS=100 "$RUN" -n gpu "$tmp/where.lua"; says "-n gpu without a GPU says why, status 2" 2 '-n gpu: no GPU is seen here: no GPU'
try env -u DDP_CUDA_LIBS DDP_DEVICE=cpu "$RUN" -n gpu "$tmp/where.lua"; says "-n gpu on the cpu is refused, status 2" 2 '-n gpu: no GPU is seen here'
try env DDP_DOUBLE_GPUS=2 "$RUN" -n 3 "$tmp/where.lua"; says "a rank more than GPUs is refused by name" 1 'rank 2 has no GPU: 2 here for 3 ranks' 'ddprun -n 2'

cat > "$tmp/half.lua" << 'LUA'
if os.getenv "RANK" == "1" then
  local ffi = require "ffi"
  ffi.cdef "int setenv(const char *, const char *, int);"
  ffi.C.setenv("DDP_DEVICE", "cpu", 1)
end
local ddp = require "ddp"
ddp.init()
ddp.DistributedDataParallel(ddp.nn.Linear(2, 2):to(ddp.device()))
LUA
try env DDP_DOUBLE_GPUS=2 "$RUN" -n 2 "$tmp/half.lua"
says "a rank without a GPU beside one with is named before anything is trained" 1 'all ranks need a GPU' 'rank [01] has its model on (a GPU|the cpu), rank [01] has its model on (a GPU|the cpu)'

try env DDP_DOUBLE_GPUS=2 "$RUN" doctor
[ -e "$B"/cuda-double/libcudnn.so ] && [ -e "$B"/cuda-double/libnvrtc.so ] || rc=0 # a double without these is broken as well
says "doctor lists the GPUs and what they are" 0 '^GPU +cuda:0 .*GB, compute capability [0-9]+\.[0-9], driver for CUDA' 'cuda:1 ' '^CUDA +1[0-9]\.[0-9], the driver' '^GPU to GPU' '^ranks .*-n gpu'
try env DDP_DOUBLE_STATUS=35 DDP_DOUBLE_DRIVER=12000 "$RUN" doctor; says "doctor says why there is none" 0 '^GPU +none: the NVIDIA driver is too old'
mkdir "$tmp/libs"; cp -a "$B"/cuda-double/libcudart.so* "$B"/cuda-double/libddp_emulated.so "$tmp/libs/"
try env DDP_CUDA_LIBS="$tmp/libs" "$RUN" doctor; says "doctor names libraries that are missing, and what to install, status 1" 1 '^broken +libcublas\.so\.[0-9]+ is not there: install cuBLAS' '^broken +libcudnn'

cat > "$tmp/report.lua" << 'LUA'
local ddp = require "ddp"
local w = ddp.randn(100, 100):to "cuda":requires_grad_(true)
for _ = 1, 5 do
  w.grad = nil
  (w * w):sum():backward()
end
ddp.report { batch = 1 }
LUA
try "$RUN" --report "$tmp/report.json" "$tmp/report.lua"
says "the report names the GPU and its memory" 0 '\| GPU, largest rank ' 'on 1 rank \(.*[A-Z]'
grep -qE '"device": ?"[^"]*[A-Z][^"]*"' "$tmp/report.json" && grep -q '"cuda": \?"1[0-9]\.[0-9]' "$tmp/report.json" && ok "and its JSON does, with the version of CUDA" || no "and its JSON does, with the version of CUDA" "$(cat "$tmp/report.json")"
exit $bad
