#!/bin/bash
# run.sh BUILD [table|conv|memory|steps|comm|link|all] -- ours beside PyTorch's in one run: same model, batch, draws' kind and
# optimizer; nothing is timed on zeros. PYTHON names a python with torch (default python3); without one only ours is shown.
# table (the default): the README's; conv: every convolution of ResNet-18 and 50; memory: ops that memory bounds, beside a
# copy; steps: whole training steps; comm: an all-reduce by each engine, and what a step of 2 ranks waits for; link: a step of
# two hosts over a slow line (needs root). BENCH_ARGS
# goes to conv.lua, memory.lua, comm.lua or both sides of steps.
cd "$(dirname "$0")/../.." || exit 2
B=$PWD/${1:-build}; PY=${PYTHON:-python3}; WHAT=${2:-table}
unset DDP_LIB LUA_PATH RANK WORLD_SIZE
torch=""; "$PY" -c 'import torch' 2>/dev/null && torch=$("$PY" -c 'import torch; print(torch.__version__)')
[ -n "$torch" ] || echo "no torch for $PY: only ours is measured (pip install torch==2.8.0, then PYTHON=path make bench)"
json() { sed -nE "s/.*\"$2\": ([0-9.]+).*/\1/p" "$1" | awk '{ printf "%.1f", $1 }'; }
value() { echo "$1" | sed -nE "s/.*$2 ([0-9.]+).*/\1/p"; }
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
line() { printf '%-44s %12s %14s %8s\n' "$@"; }
# ratio OURS THEIRS BETTER: how many times better ours is
ratio() { [ -n "$1" ] && [ -n "$2" ] && awk "BEGIN { printf \"%.2f\", \"$3\" == \"more\" ? $1 / $2 : $2 / $1 }"; }
row() { line "$1" "${2:--}" "${3:--}" "$(ratio "$2" "$3" "$4")"; }
theirs() { [ -n "$torch" ] && "$@" 2>/dev/null | tail -1; }
trun="$(dirname "$(command -v "$PY")")/torchrun"
one() { OMP_NUM_THREADS=1 taskset -c 0 "$@"; }

table() {
  local t
  line "" ours PyTorch better
  "$B/ddprun" -n 2 --report "$tmp/toy.json" scripts/train_toy.lua --steps 2000 > /dev/null 2>&1
  t=$(theirs env LAUNCHED="$(date +%s.%N)" "$trun" --nproc_per_node=2 tests/bench/torch_toy.py)
  row "toy, 2 ranks: us a step" "$(json "$tmp/toy.json" step_us)" "$(value "$t" step_us)" less
  row "toy, 2 ranks: launch to first step, ms" "$(json "$tmp/toy.json" first_step_ms)" "$(value "$t" first_step_ms)" less
  row "toy, 2 ranks: MB a rank" "$(json "$tmp/toy.json" peak_mb)" "$(value "$t" rss_mb)" less

  one "$B/ddprun" --report "$tmp/one.json" tests/bench/resnet.lua > /dev/null 2>&1
  t=$(theirs one "$PY" tests/bench/torch_resnet.py)
  row "ResNet-18 f32 batch 64, 1 core: images/s" "$(json "$tmp/one.json" images_per_second)" "$(value "$t" img_s)" more
  row "ResNet-18 f32 batch 64, 1 core: MB" "$(json "$tmp/one.json" peak_mb)" "$(value "$t" rss_mb)" less
  OMP_NUM_THREADS=1 "$B/ddprun" -n 2 --report "$tmp/two.json" tests/bench/resnet.lua > /dev/null 2>&1
  t=$(OMP_NUM_THREADS=1 theirs "$trun" --nproc_per_node=2 tests/bench/torch_resnet.py)
  row "ResNet-18 f32 batch 64, 2 ranks: images/s" "$(json "$tmp/two.json" images_per_second)" "$(value "$t" img_s)" more
  line "2 ranks against 1" "$(awk "BEGIN { printf \"%.1f %%\", 50 * $(json "$tmp/two.json" images_per_second) / $(json "$tmp/one.json" images_per_second) }")" "" ""
  line "a 1-element add from Lua, us (JIT / without)" "$(eval "$("$B/ddprun" --env)"; echo "$(luajit tests/bench/add.lua) / $(luajit -joff tests/bench/add.lua)")" "" ""
  for f in libddp.so libddp_host.so libddp_onednn.so ddprun; do strip -o "$tmp/$f" "$B/$f"; done
  line "stripped libraries, ddprun and Lua side, MB" "$(du -cb "$tmp"/*.so "$tmp/ddprun" lua "$B/lua" | tail -1 | awk '{ printf "%.1f", $1 / 1e6 }')" "" ""
}

# Options in BENCH_ARGS come last and win.
conv() { one "$B/ddprun" tests/bench/conv.lua ${torch:+--python "$PY"} $BENCH_ARGS; }
memory() { one "$B/ddprun" tests/bench/memory.lua --peak "$B/peak" $BENCH_ARGS; }

# Whole steps on one core beside the best of PyTorch's layouts; compile gets a minute to come to an end.
steps() {
  local model amp ours layout t best which
  line "images/s, 1 core" ours "PyTorch's best" better
  for model in resnet18 resnet50; do
    for amp in none bf16; do
      ours=$(one "$B/ddprun" tests/bench/resnet.lua --model $model --amp $amp $BENCH_ARGS 2> "$tmp/why" | tail -1)
      grep -q "is not built yet" "$tmp/why" && echo "$(grep -o 'ddp.*is not built yet' "$tmp/why" | head -1): no $model $amp of ours"
      best="" which=""
      for layout in eager channels_last compile; do
        t=$(value "$(theirs one timeout 60 "$PY" tests/bench/torch_resnet.py --model $model --amp $amp --layout $layout $BENCH_ARGS)" img_s)
        [ -n "$torch" ] && [ -z "$t" ] && echo "PyTorch $layout, $model $amp: not done within 60 s, or failed"
        [ -n "$t" ] && awk "BEGIN { exit !($t > ${best:-0}) }" && best=$t which=$layout
      done
      row "$model, $amp${which:+ (PyTorch: $which)}" "$(value "$ours" img_s)" "$best" more
    done
  done
}

comm() {
  local amp e
  echo "all-reduce of f32, 2 ranks, medians"
  for e in shm gloo mpi hier; do printf '  %-14s %s\n' $e "$("$B/ddprun" -n 2 --engine $e tests/bench/all_reduce.lua 2>/dev/null | sed 's/^\[r0\] //' | tail -1)"; done
  [ -n "$torch" ] && printf '  %-14s %s\n' "PyTorch, gloo" "$(OMP_NUM_THREADS=1 theirs "$trun" --nproc_per_node=2 tests/bench/torch_all_reduce.py)"
  for amp in none bf16; do echo "ResNet-18, $amp, 2 ranks: $(OMP_NUM_THREADS=1 "$B/ddprun" -n 2 tests/bench/comm.lua --amp $amp $BENCH_ARGS 2>/dev/null | tail -1)"; done
}

link() { tests/bench/link.sh "${B#"$PWD"/}" 2000 $BENCH_ARGS; }

echo "ddp ($("$B/ddprun" --version)) beside PyTorch ${torch:-(none)}, $(nproc) cores, $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -1)"
case $WHAT in
  table|conv|memory|steps|comm|link) $WHAT ;;
  all) for s in table conv memory steps comm link; do echo; $s; done ;;
  *) echo "bench: no section $WHAT; there are table, conv, memory, steps, comm, link and all"; exit 2 ;;
esac
