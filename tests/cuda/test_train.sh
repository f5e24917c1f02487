#!/bin/bash
# test_train.sh -- the same training on GPUs (the test double) as on the CPU, in every order that streams may run in.
cd "$(dirname "$0")/../.." || exit 2
B=${DDP_BUILD:-$PWD/build}
RUN=$B/ddprun; TRAIN=tests/cuda/cases/train.lua
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT DDP_LIB LUA_PATH
export DDP_DOUBLE_LEAKS=quiet DDP_DOUBLE_CUDNN_CHECK=0
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
bad=0
ok() { echo "ok $1"; }
no() { echo "not ok $1: $(echo "$2" | tr '\n' '~' | cut -c1-600)"; bad=1; }
on_gpu() { DDP_CUDA_LIBS=$B/cuda-double timeout 120 "$@"; }
numbers() { sed -nE 's/.*(loss|logits) ([0-9.]+)$/\2/p' "$1"; }
# near A B LIMIT: as many numbers in both, at least nine, none apart by more
near() {
  paste <(numbers "$1") <(numbers "$2") | awk -v limit="$3" 'NF != 2 { exit 1 } { d = $1 - $2; if (d < 0) d = -d; if (!(d <= limit)) exit 1; n++ } END { exit n < 9 }'
}

timeout 120 "$RUN" -n 2 $TRAIN > "$tmp/cpu" 2>&1
on_gpu "$RUN" -n 2 $TRAIN > "$tmp/gpu" 2>&1
name="ResNet-20 on two GPUs has the losses of two CPU ranks to 1e-4"
near "$tmp/cpu" "$tmp/gpu" 1e-4 && grep -q "on cuda:0" "$tmp/gpu" && grep -q "on cpu" "$tmp/cpu" && ok "$name" || no "$name" "$(cat "$tmp/cpu" "$tmp/gpu")"
for mode in eager random; do
  for seed in 1 2; do
    [ $mode$seed = eager2 ] && continue
    name="streams that run $mode ($seed) change no bit of a training"
    DDP_DOUBLE_MODE=$mode DDP_DOUBLE_SEED=$seed on_gpu "$RUN" -n 2 $TRAIN > "$tmp/$mode" 2>&1
    [ "$(numbers "$tmp/gpu")" = "$(numbers "$tmp/$mode")" ] && [ -s "$tmp/$mode" ] && ok "$name" || no "$name" "$(cat "$tmp/$mode")"
  done
done
for amp in bf16 f16; do
  name="autocast in $amp on GPUs trains as in f32, about"
  on_gpu "$RUN" -n 2 $TRAIN $amp > "$tmp/$amp" 2>&1
  near "$tmp/cpu" "$tmp/$amp" 0.3 && ok "$name" || no "$name" "$(cat "$tmp/$amp")"
done
name="train_resnet.lua is the same script on GPUs"
out=$(on_gpu "$RUN" -n 2 scripts/train_resnet.lua --steps 12 --batch 8 --save "$tmp/run.safetensors" 2>&1) && case $out in *"loss"*"images/s on 2 ranks"*) ok "$name" ;; *) no "$name" "$out" ;; esac || no "$name" "$out"
name="K3 what GPUs saved goes on on the CPU, and the other way round"
out=$(timeout 120 "$RUN" -n 1 scripts/train_resnet.lua --steps 16 --batch 8 --resume "$tmp/run.safetensors" --save "$tmp/cpu.safetensors" 2>&1) &&
  out=$(on_gpu "$RUN" -n 2 scripts/train_resnet.lua --steps 20 --batch 8 --resume "$tmp/cpu.safetensors" 2>&1) && case $out in *"goes on after step 16"*) ok "$name" ;; *) no "$name" "$out" ;; esac || no "$name" "$out"
name="eight steps of train_resnet.lua read nothing from the GPU but their losses, after the last of them"
out=$(DDP_DOUBLE_LOG=$tmp/log on_gpu "$RUN" scripts/train_resnet.lua --steps 8 --batch 4 --synthetic 2>&1)
awk '/^launch/ { if (reads) early = 1; launches++ } /^cudaMemcpyAsync device to host/ { reads++ } END { exit !(launches > 800 && reads == 8 && !early) }' "$tmp/log" &&
  ok "$name" || no "$name" "$out $(grep -c 'device to host' "$tmp/log") reads"
name="DDP_DEVICE=cpu trains on the CPU where there are GPUs"
out=$(DDP_DEVICE=cpu on_gpu "$RUN" -n 2 $TRAIN 2>&1); case $out in *"on cpu"*) ok "$name" ;; *) no "$name" "$out" ;; esac
exit $bad
