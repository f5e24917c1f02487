#!/bin/bash
# save.sh -- checkpoints of ranks that are killed, of disks that are full, and of runs that go on (K1, K2, K3).
cd "$(dirname "$0")/../.." || exit 2
B=${DDP_BUILD:-$PWD/build}
RUN=$B/ddprun; CASE=tests/dist/cases/save.lua
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT DDP_LIB LUA_PATH
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
bad=0
ok() { echo "ok $1"; }
no() { echo "not ok $1: $(echo "$2" | tr '\n' '~' | cut -c1-500)"; bad=1; }
# fine COMMAND...: status 0 and "fine" in the output, which stands in $out
fine() { out=$(timeout 100 "$@" 2>&1) && case $out in *fine*) true ;; *) false ;; esac; }
passes() { local name=$1; shift; if fine "$@"; then ok "$name"; else no "$name" "$out"; fi; }

# ---- K2: the files after 20 steps are the same, byte for byte ----
for kind in middle2 middle0 end2 last2 skip2; do
  name="K2 20 steps equal a part, a resume and the rest, bit for bit on 2 ranks: $kind"
  case $kind in middle*) stop=13 ;; skip*) stop=12 ;; *) stop=10 ;; esac
  if fine "$RUN" -n 2 $CASE train $kind 20 - "$tmp/whole" && fine "$RUN" -n 2 $CASE train $kind $stop - "$tmp/part" \
      && fine "$RUN" -n 2 $CASE train $kind 20 "$tmp/part" "$tmp/resumed"; then
    if cmp "$tmp/whole" "$tmp/resumed" > "$tmp/cmp" 2>&1; then ok "$name"; else no "$name" "$(cat "$tmp/cmp")"; fi
    cmp -s "$tmp/whole" "$tmp/part" && no "$name" "the part is the whole"
  else no "$name" "$out"; fi
  [ $kind = middle2 ] && cp "$tmp/part" "$tmp/part2"
done

# ---- K3 ----
passes "K3 what 2 ranks saved 1 loads" "$RUN" -n 1 $CASE cross "$tmp/part2" 208 "$tmp/part1"
passes "K3 what 1 rank saved 2 load" "$RUN" -n 2 $CASE cross "$tmp/part1" 256 -
passes "K3 what 2 ranks saved 4 load" "$RUN" -n 4 $CASE cross "$tmp/part2" 208 -
passes "K1 an error on one rank reaches all" "$RUN" -n 2 $CASE differ "$tmp/differ"

passes "C11 running statistics are averaged over the ranks in the file, and each rank's own kept" "$RUN" -n 2 $CASE norm "$tmp/norm"

name="C1 a save that a rank does not come to ends after the timeout, and names it"
begin=$(date +%s%N); out=$(timeout 60 "$RUN" -n 2 --timeout 2 --grace 1 $CASE stall "$tmp/stall" 2>&1); status=$?; took=$(( ($(date +%s%N) - begin) / 1000000 ))
[ $status = 1 ] && [ $took -ge 2000 ] && [ $took -lt 5000 ] && [[ $out == *"rank 1 has not reached"*save.lua:* ]] && [ ! -e "$tmp/stall" ] && ok "$name" || no "$name" "$status, $took ms: $out"

# ---- K1: killed 50 times; each start looks at what the one before left ----
mkdir "$tmp/kill"; name="K1 SIGKILL at 50 random moments of a save leaves a loadable file"
parts=0 why=""
for i in $(seq 50); do
  rm -f "$tmp/pid"
  timeout 60 "$RUN" -n 2 $CASE kill "$tmp/kill/latest" "$tmp/pid" > "$tmp/out" 2>&1 & job=$!
  for _ in $(seq 500); do [ -e "$tmp/pid" ] && break; kill -0 $job 2>/dev/null || break; sleep 0.02; done
  [ -e "$tmp/pid" ] || { why="run $i: $(cat "$tmp/out")"; break; }
  sleep "0.0$((RANDOM % 60 + 10))"
  kill -KILL "$(cat "$tmp/pid")"
  wait $job
  [ $? = 137 ] || { why="run $i ended otherwise: $(cat "$tmp/out")"; break; }
  [ "$(find "$tmp/kill" -name '.latest.*.part' | wc -l)" -gt 0 ] && parts=$((parts + 1))
done
if [ -z "$why" ] && [ $parts -ge 5 ]; then ok "$name"; else no "$name" "$why ($parts in the middle of a file)"; fi
touch "$tmp/kill/.latest.01234567.part"
passes "K1 the last one loads, and another save" "$RUN" -n 2 $CASE kill "$tmp/kill/latest" - 1
[ "$(ls -A "$tmp/kill")" = latest ] && ok "K1 a save removes what killed ones left" || no "K1 a save removes what killed ones left" "$(ls -A "$tmp/kill")"

# ---- K1: no room (ddprun gives ranks the signals of a fresh process, so that the limit is for a plain luajit) ----
name="K1 a full disk is an error on all ranks and keeps the old file"
mkdir "$tmp/small"
if unshare -rm mount -t tmpfs -o size=1m none "$tmp/small" 2> /dev/null; then
  passes "$name" unshare -rm bash -c 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -n 2 "$3" full "$1/f" "No space left on device"' _ "$tmp/small" "$RUN" $CASE
else
  echo "skip $name: no mounts of our own here"
fi
passes "K1 a limit of a file's size is an error and keeps the old file" bash -c 'eval "$("$1" --env)"; trap "" XFSZ; ulimit -f 1024; exec luajit "$2" full "$3" "File too large"' _ "$RUN" $CASE "$tmp/limited"

# ---- the script ----
# same_end NAME OPTIONS...: a run that is resumed from a save on the way ends like one that was not, files and numbers alike
same_end() {
  local name=$1 whole rest a b job; shift
  train() { timeout 100 "$RUN" -n 2 scripts/train_resnet.lua --epochs 2 --deterministic "$@" 2>&1; }
  rm -f "$tmp"/[abcd]
  whole=$(train "$@" --save "$tmp/a"); a=$(echo "$whole" | grep -E 'test accuracy|\] loss')
  train "$@" --save "$tmp/b" --save-every 5 > /dev/null & job=$!
  for _ in $(seq 3000); do [ -e "$tmp/b" ] && break; sleep 0.01; done
  cp "$tmp/b" "$tmp/c"
  wait $job
  rest=$(train "$@" --resume "$tmp/c" --save "$tmp/d"); b=$(echo "$rest" | grep -E 'test accuracy|\] loss')
  if [ -n "$a" ] && [ "$a" = "$b" ] && cmp -s "$tmp/a" "$tmp/d" && cmp -s "$tmp/a" "$tmp/b" && [[ $rest == *"goes on after step"* ]]; then ok "$name"; else no "$name" "$a, $b: $rest"; fi
}
same_end "K2 train_resnet: a run that is resumed ends like one that was not" --batch 64
same_end "K2 the same in f16 with accumulation and another number of workers" --batch 32 --amp f16 --accumulate 3 --workers 1
out=$("$RUN" scripts/train_resnet.lua --model resnet18 --resume "$tmp/a" 2>&1)
[ $? = 2 ] && [[ $out == *"is a checkpoint of resnet20, not of resnet18"* ]] && ok "train_resnet refuses a checkpoint of another model" || no "train_resnet refuses a checkpoint of another model" "$out"
exit $bad
