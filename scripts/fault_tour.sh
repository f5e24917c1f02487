#!/bin/bash
# fault_tour.sh [ddprun] -- what each way of failing looks like: nine jobs of two ranks, each of which goes wrong, in half a minute.
here=$(cd "$(dirname "$0")" && pwd)
run=${1:-$(for p in "$here/../build/ddprun" "$here/../../../bin/ddprun" ddprun; do command -v "$p" && break; done)}
[ -n "$run" ] || { echo "fault_tour.sh: no ddprun; give it as the first argument"; exit 2; }
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT

# stop TITLE FAULT WHAT [WORDS BEFORE...]: a job with the fault; `ulimit` bounds its memory
stop() {
  local title=$1 fault=$2 what=$3 begin=${EPOCHREALTIME/./} status
  printf '\n==== %s\n' "$title"
  [ -n "$fault" ] && printf '     DDP_FAULT="%s" ' "$fault" || printf '     '
  printf 'ddprun -n 2 --timeout 3 fault_tour.lua --what %s\n\n' "$what"
  (
    [ "$what" = memory ] && ulimit -v 12000000
    DDP_FAULT=$fault exec "$run" -n 2 --timeout 3 --grace 1 --show 1 "$here/fault_tour.lua" --what "$what" < /dev/null 2>&1
  ) | grep -v '^\[r1\]'
  status=${PIPESTATUS[0]}
  printf '     -> status %s after %d ms\n' "$status" $(((${EPOCHREALTIME/./} - begin) / 1000))
}
stop "a rank is killed" "rank=1 step=20 at=all_reduce do=kill" train
stop "a rank hangs: it stands still, the other waits" "rank=1 step=20 do=stop" train
stop "a rank is late beyond the timeout" "rank=0 step=20 do=delay:60000" train
stop "a rank leaves out a collective" "rank=1 step=20 at=all_reduce do=skip" train
stop "a rank leaves with status 0 while the other waits" "rank=1 step=20 do=exit:0" train
stop "a rank runs out of memory" "" memory
stop "an error in the script of one rank" "" error
stop "the ranks' models differ" "" models
stop "one bit of a gradient changes on one rank" "rank=1 step=20 at=all_reduce do=flip" train
