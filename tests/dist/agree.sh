#!/bin/bash
# agree.sh -- what ranks agree about: parameters, metrics, statistics, shared files, data sets (C9, C10, C11, D7, D8).
cd "$(dirname "$0")/../.." || exit 2
B=${DDP_BUILD:-$PWD/build}
RUN=$B/ddprun; CASE=tests/dist/cases/agree.lua
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT DDP_LIB LUA_PATH
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
bad=0
ok() { echo "ok $1"; }
no() { echo "not ok $1: $(echo "$2" | tr '\n' '~' | cut -c1-500)"; bad=1; }
# passes NAME COMMAND...: status 0 and "fine" in the output
passes() { local name=$1 out; shift; out=$(timeout 100 "$@" 2>&1) && [[ $out == *fine* ]] && ok "$name" || no "$name" "$out"; }

for n in 2 3; do
  passes "C9 one flipped bit of $n ranks' parameters is found and named on all" "$RUN" -n $n $CASE check
  passes "C10 metrics of $n ranks are reduced as sums and counts, other keys are an error on all" "$RUN" -n $n $CASE metrics
  passes "C11 SyncBatchNorm on $n ranks trains as one process with the whole batch, and evaluates alone" "$RUN" -n $n $CASE norm
  passes "D7 rank0_first on $n ranks prepares a file once" "$RUN" -n $n $CASE first "$tmp/first$n"
  passes "D8 $n ranks find that they read different data" "$RUN" -n $n $CASE data
done
passes "C9 D8 a world of one agrees with itself" "$RUN" $CASE data

mkdir "$tmp/kill"; name="D7 a kill in the middle of rank0_first leaves no half file" why=""
for i in 1 2 3 4 5; do
  rm -f "$tmp/pid"
  timeout 60 "$RUN" -n 2 $CASE prepare "$tmp/kill/file" "$tmp/pid" > "$tmp/out" 2>&1 & job=$!
  for _ in $(seq 500); do [ -e "$tmp/pid" ] && break; kill -0 $job 2> /dev/null || break; sleep 0.02; done
  [ -e "$tmp/pid" ] || { why="run $i: $(cat "$tmp/out")"; break; }
  sleep "0.0$((RANDOM % 9))"
  kill -KILL "$(cat "$tmp/pid")"
  wait $job
  [ $? = 137 ] || { why="run $i ended otherwise: $(cat "$tmp/out")"; break; }
  [ -e "$tmp/kill/file" ] && why="a file after run $i"
done
[ -z "$why" ] && [ -n "$(ls -A "$tmp/kill")" ] && ok "$name" || no "$name" "$why"
passes "D7 the next one prepares it" "$RUN" -n 2 $CASE first "$tmp/kill/file"
[ "$(ls -A "$tmp/kill")" = file ] && ok "D7 and removes what the killed ones left" || no "D7 and removes what the killed ones left" "$(ls -A "$tmp/kill")"
exit $bad
