#!/bin/bash
# gpu_check.sh [--double] [RESULTS] -- all that can be checked of the CUDA side, on this machine's GPU, in under 8 minutes: each part with a time
# limit of its own, its output in RESULTS/PART.txt, and one table at the end. Builds when build/ is not there. --double: the same on the
# test double, small, without a GPU; its timings say nothing of one. Environment: B (build folder), PYTHON (one with torch), PARTS (of the
# first column of the table: these alone). Status 1 when a part failed.
cd "$(dirname "$0")/.." || exit 2
double="" results=""
for a in "$@"; do
  case $a in
    --double) double=1 ;;
    -*) sed -n '2,5s/^# //p' "$0"; exit 2 ;;
    *) results=$a ;;
  esac
done
B=$PWD/${B:-build} PY=${PYTHON:-python3} began=$SECONDS
LIMIT=$([ -n "$double" ] && echo 170 || echo 470) # seconds for all
results=${results:-$(mktemp -d /tmp/ddp_gpu_check.XXXXXX)}
mkdir -p "$results" || exit 2
[ -e "$B/libddp.so" ] && [ -e "$B/libddp_cuda.so" ] && [ -e "$B/gpu_dump" ] || make -j"$(nproc)" all gpu-dump || exit 2
[ -e "$B/cuda-double/libcudart.so" ] || make -j"$(nproc)" cuda-double || echo "gpu_check: no test double: nothing on paper"
unset DDP_LIB LUA_PATH RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT DDP_DEVICE
eval "$("$B/ddprun" --env)"
export DDP_BUILD=$B DDP_LIB=$B LUA_PATH="$PWD/tests/lua/?.lua;$PWD/tests/harness/?.lua;$PWD/tests/ops/?.lua;$LUA_PATH"
if [ -n "$double" ]; then
  export DDP_CUDA_LIBS=$B/cuda-double DDP_DOUBLE_LEAKS=quiet DDP_DOUBLE_CUDNN_CHECK=0 DDP_CACHE=$results/cache
  mkdir -p "$DDP_CACHE"
fi
rows=() failed=0
background=""
trap '[ -n "$background" ] && kill "$background" 2> /dev/null' EXIT

# Is it wanted?
wanted() { [ -z "$PARTS" ] || [[ " $PARTS " == *" $1 "* ]] || [[ " $PARTS " == *" ${1%%_*} "* ]]; }
left() { echo $((LIMIT - (SECONDS - began))); }
row() { rows+=("$(printf '%-24s %-8s %4s s  %s' "$@")"); }
skip() { wanted "$1" || return; row "$1" "-" 0 "not run: $2"; echo "-- $1: not run: $2"; }

# part NAME SECONDS COMMAND...: its output in NAME.txt. Sets status, took and file; false when it failed.
part() {
  name=$1 file=$results/$1.txt; local most=$2 t=$SECONDS; shift 2
  [ "$most" -gt "$(left)" ] && most=$(left)
  status=125 took=0
  if [ "$most" -lt 3 ]; then echo "no time was left" > "$file"; return 1; fi
  timeout -k 3 "$most" "$@" > "$file" 2>&1 < /dev/null
  status=$? took=$((SECONDS - t))
  return $status
}
verdict() { case $status in 0) echo ok ;; 124|137) echo "TIMEOUT" ;; 125) echo "NO TIME" ;; *) echo FAILED ;; esac; }
# told SUMMARY: the row of the part that just ran
told() {
  [ "$status" = 0 ] || failed=1
  row "$name" "$(verdict)" "$took" "${1:-$(tail -1 "$file" | cut -c1-150)}"
  echo "-- ${rows[-1]}"
}
# counted NAME SECONDS COMMAND...: of lines `ok`, `not ok`, `skip`
counted() {
  wanted "$1" || return
  part "$@"
  local p f s
  p=$(grep -c '^ok ' "$file"); f=$(grep -c '^not ok ' "$file"); s=$(grep -c '^skip ' "$file")
  [ "$status" = 0 ] && [ $((p + s)) = 0 ] && status=1
  [ "$f" -gt 0 ] && [ "$status" = 0 ] && status=1
  told "$p ok, $f not ok, $s skipped$([ "$f" -gt 0 ] && grep -m1 '^not ok ' "$file" | cut -c1-110 | sed 's/^/; first: /')"
}
simple() { wanted "$1" && { part "$@"; told; }; }

# ---- what is here -----------------------------------------------------------------------------------------------------------
here() {
  if command -v nvidia-smi > /dev/null; then nvidia-smi -q; nvidia-smi topo -m; else echo "no nvidia-smi"; fi
  uname -a; grep -m1 'model name' /proc/cpuinfo; "$B/ddprun" --version
  env -u DDP_DOUBLE_CUDNN_CHECK "$B/gpu_dump" "$results"
}
export -f here; export B results
part device 30 bash -c here
gpu=$(sed -n 's/^GPU 0: //p' "$file" | head -1) gpus=$(sed -n 's/^\([0-9]*\) GPUs$/\1/p' "$file")
told "${gpu:-no GPU answers} ${gpus:+($gpus), $(grep -E '^(driver|cudart|cuBLAS|cuDNN|NCCL|NVRTC)' "$file" | sed 's/driver is for CUDA/driver/' | tr '\n' ' ' | tr -d ':')}"
if [ -z "$gpus" ]; then
  printf '%s\n' "" "results in $results" "${rows[@]}"
  echo "gpu_check: no GPU answers; see $results/device.txt, and \`$B/ddprun doctor\`"
  exit 1
fi
case $gpu in *H200*) sheet=h200 ;; *A100*) sheet=a100 ;; *L40S*) sheet=l40s ;; *"RTX 3090"*) sheet=rtx3090 ;; *) sheet="" ;; esac
[ -n "$double" ] && sheet=h200

# ---- the limits of the steps that are timed, on paper, while the tests run ----------------------------------------------------------
#        model    stem     batch amp
if [ -n "$double" ]; then cases="resnet20 cifar 2 none
resnet20 cifar 2 bf16
toy cifar 8 none"; else cases="resnet50 imagenet 128 none
resnet50 imagenet 128 tf32
resnet50 imagenet 128 bf16
resnet50 cifar 256 none
resnet50 cifar 256 tf32
resnet50 cifar 256 bf16
resnet18 cifar 256 bf16
toy cifar 64 none"; fi
paper() { # lines `MODEL STEM BATCH AMP: limit_ms ...`
  local model stem batch amp
  while read -r model stem batch amp; do
    echo "$model $stem $batch $amp: $(timeout 60 nice luajit tests/bench/roofline_gpu.lua --device "$1" --double "$B/cuda-double" --model "$model" --stem "$stem" --batch "$batch" --amp "$amp" --brief 2>&1 | tail -1)"
  done <<< "$cases"
}
if wanted step && [ -n "$sheet" ] && [ -e "$B/cuda-double/libcudart.so" ]; then
  paper "$sheet" > "$results/paper.txt" 2>&1 &
  background=$!
fi

# ---- is it right ------------------------------------------------------------------------------------------------------------
if [ -n "$double" ]; then
  counted ops 60 env DDP_TEST_DEVICE=cuda DDP_TEST_OPS=add,relu_grad,sum,softmax luajit tests/ops/test_ops.lua
else
  counted ops 110 env DDP_TEST_DEVICE=cuda luajit tests/ops/test_ops.lua
  counted convolutions 45 env DDP_TEST_DEVICE=cuda luajit tests/ops/test_conv.lua
  counted conv_bn_act 20 env DDP_TEST_DEVICE=cuda luajit tests/ops/test_conv_bn_act.lua
fi
counted errors 30 luajit tests/bench/gpu/errors.lua
simple network 30 luajit tests/bench/gpu/subset.lua
checker=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2> /dev/null)
for tool in memcheck racecheck initcheck synccheck; do
  if [ -n "$double" ]; then skip "$tool" "the test double is no GPU"
  elif [ -z "$checker" ]; then skip "$tool" "no compute-sanitizer (it comes with the CUDA toolkit)"
  elif wanted "$tool"; then
    part "$tool" 20 "$checker" --tool "$tool" --error-exitcode 9 luajit tests/bench/gpu/subset.lua
    told "$(grep -E 'SUMMARY' "$file" | tail -1 | sed 's/=* *//')"
  fi
done
simple nccl_1 30 bash -c '"$B/gpu_dump" --nccl && "$B/ddprun" -n 1 --timeout 20 tests/bench/gpu/ranks.lua'
if [ "$gpus" -ge 2 ]; then simple nccl_2 30 "$B/ddprun" -n 2 --timeout 20 tests/bench/gpu/ranks.lua; else skip nccl_2 "one GPU"; fi

# ---- how fast is it -----------------------------------------------------------------------------------------------------------
while [ -n "$background" ] && kill -0 "$background" 2> /dev/null && [ "$(left)" -gt $((LIMIT / 2)) ]; do sleep 1; done
[ -n "$background" ] && kill "$background" 2> /dev/null
background=""
[ -n "$double" ] && export DDP_DOUBLE_MODE=dry
if wanted micro; then
  part micro 30 luajit tests/bench/gpu/micro.lua --scale "$([ -n "$double" ] && echo 0.0001 || echo 1)" --sheet "$sheet"
  [ "$status" = 0 ] && told "$(wc -l < "$file") numbers, below" || told
fi
torch=$("$PY" -c 'import torch; print(torch.__version__ if torch.cuda.is_available() else "")' 2> /dev/null)
[ -n "$double" ] && torch=""
value() { sed -nE "s/.*\b$2 ([0-9.]+).*/\1/p" <<< "$1"; }
timings=("$(printf '%-30s %10s %9s %9s %9s %8s %9s %10s %8s' step "images/s" "step ms" "host ms" "MB" launches "limit ms" "of limit" "PyTorch")")
while wanted step && read -r model stem batch amp; do
  part "step_${model}_${stem}_$amp" 20 luajit tests/bench/gpu/step.lua --model "$model" --stem "$stem" --batch "$batch" --amp "$amp" --steps "$([ -n "$double" ] && echo 2 || echo 20)"
  mine=$(tail -1 "$file") limit=$(grep -s "^$model $stem $batch $amp: limit_ms" "$results/paper.txt")
  [ "$status" = 0 ] && ! grep -q '^step_ms' <<< "$mine" && status=1
  told
  theirs=""
  if [ -n "$torch" ]; then
    part "torch_${model}_${stem}_$amp" 25 "$PY" tests/bench/gpu/torch_steps.py "$model" "$stem" "$batch" "$amp" && theirs=$(tail -1 "$file")
    echo "-- PyTorch, $model $stem $batch $amp: $(tail -1 "$file")"
  fi
  ms=$(value "$mine" step_ms) most=$(value "$limit" limit_ms)
  timings+=("$(printf '%-30s %10s %9s %9s %9s %8s %9s %10s %8s' "$model $stem $batch $amp" "$(value "$mine" images_per_s)" "$ms" "$(value "$mine" host_ms)" "$(value "$mine" peak_mb)" \
    "$([ -n "$limit" ] && echo $(($(value "$limit" own) + $(value "$limit" library))))" "$most" "$([ -n "$ms" ] && [ -n "$most" ] && awk "BEGIN { printf \"%.0f %%\", 100 * $most / $ms }")" "$(value "$theirs" images_per_s)")")
done <<< "$cases"

# ---- the table ------------------------------------------------------------------------------------------------------------------
{
  echo
  echo "gpu_check: $gpu, $gpus GPU(s), $((SECONDS - began)) s, $(date -u +%F)${double:+; THE TEST DOUBLE, NOT A GPU: timings say nothing}"
  printf '%s\n' "${rows[@]}"
  echo
  wanted micro && echo "${double:+NOT A GPU: }$(cat "$results/micro.txt")" && echo
  wanted step && printf '%s\n' "${timings[@]}"
  wanted step && echo "limit: what the data sheet of ${sheet:-an unknown GPU} allows for what a step queues (make roofline DEVICE=...); PyTorch: ${torch:-not here}, images/s${double:+; NOT A GPU}"
  echo "results in $results"
  echo "gpu_check: $([ $failed = 0 ] && echo "all parts passed" || echo "a part failed")"
} | tee "$results/table.txt"
exit $failed
