#!/bin/bash
# soak.sh -- jobs with random faults: none hangs, none leaves a process or a shared memory file behind, and each verdict names the
# rank that the fault befell and what it was. DDP_SOAK=N jobs (default 200), DDP_SOAK_SEED=S.
cd "$(dirname "$0")/../.." || exit 2
B=${DDP_BUILD:-$PWD/build}
RUN=$B/ddprun; SCRIPT=$PWD/tests/dist/cases/steps.lua
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT DDP_LIB LUA_PATH
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
JOBS=${DDP_SOAK:-200} SEED=${DDP_SOAK_SEED:-1}
mark=soak.$$.$RANDOM

actions=(kill stop exit:3 exit:0 segv abort throw delay:20000 skip flip)
places=(all_reduce all_gather barrier any)

# job I: one job; its line in $tmp/I is "right|wrong|hang|left", a tab, and the fault with what went wrong
job() {
  local i=$1 rank act at step fault status want text left
  RANDOM=$((SEED * 1000 + i))
  rank=$((RANDOM % 2)) act=${actions[i % 10]} at=${places[RANDOM % 4]} step=$((1 + RANDOM % 29))
  [ "$act" = flip ] && at=all_reduce
  case $at in
    all_gather) step=$((6 + RANDOM % 5 * 5)) ;; # it comes after each fifth step
    barrier) step=31 ;;
  esac
  fault="rank=$rank step=$step do=$act"
  [ $at = any ] || fault="$fault at=$at"
  case $act in
    kill) want=137 text="rank $rank failed first, .*SIGKILL" ;;
    segv) want=139 text="rank $rank failed first, .*SIGSEGV" ;;
    abort) want=134 text="rank $rank failed first, .*SIGABRT" ;;
    exit:3) want=3 text="rank $rank failed first, .*exit code 3" ;;
    exit:0) want=1 text="rank $rank left .exit 0. while rank $((1 - rank)) waits" ;;
    throw) want=1 text="thrown by DDP_FAULT" ;;
    stop) want=1 text="rank $rank is stuck: it has not reached" ;;
    delay:*) want=1 text="rank $rank is stuck: it has not reached" ;;
    skip) want=1 text="rank $rank calls|rank $rank (has not reached|finished|left|is stuck)" ;;
    flip) want=1 text="check: parameter" ;;
  esac
  DDP_FAULT=$fault timeout -k 1 30 "$RUN" -n 2 --timeout 2 --grace 0.5 "$SCRIPT" check "$mark.$i" > "$tmp/out$i" 2>&1 < /dev/null; status=$?
  left=$(pgrep -f -- "$mark.$i\$")
  if [ $status = 124 ] || [ $status = 137 -a "$act" != kill ]; then echo "hang	$fault" > "$tmp/$i"
  elif [ -n "$left" ]; then echo "left	$fault: processes $left" > "$tmp/$i"
  elif [ $status = $want ] && grep -qE -- "$text" "$tmp/out$i" && { [ "$act" != throw ] || grep -q "rank $rank failed first" "$tmp/out$i"; }; then echo "right	$fault" > "$tmp/$i"
  else echo "wrong	$fault: status $status, expected $want and \"$text\": $(grep -m1 '^ddprun: rank' "$tmp/out$i")" > "$tmp/$i"; fi
}

files() { ls /dev/shm | grep -c '^ddp-'; }
before=$(files) begin=$SECONDS
for ((i = 0; i < JOBS; i++)); do
  while [ "$(jobs -rp | wc -l)" -ge 3 ]; do wait -n; done
  job $i &
done
wait
number() { cat "$tmp"/[0-9]* | grep -c "^$1	"; }
right=$(number right) hangs=$(number hang) left=$(number left) after=$(files)
bad=0
case_() { if [ "$2" = 1 ]; then echo "ok $1"; else echo "not ok $1: $(cat "$tmp"/[0-9]* | grep -v '^right' | head -5 | tr '\n\t' '~ ')"; bad=1; fi; }
case_ "L2 C1 of $JOBS jobs with random faults none hangs" $((hangs == 0))
case_ "L5 none of them leaves a process behind" $((left == 0))
case_ "none of them leaves shared memory behind" $((after <= before))
case_ "L3 C2 at least 95 % of the verdicts name the rank and the cause" $((right * 100 >= JOBS * 95))
echo "verdicts that name the rank and the cause: $right of $JOBS, in $((SECONDS - begin)) s"
cat "$tmp"/[0-9]* | grep -v '^right'
exit $bad
