#!/bin/bash
# faults.sh -- faults put in by DDP_FAULT, and what ddprun says of them: which rank, what it did, where the others waited.
cd "$(dirname "$0")/../.." || exit 2
B=${DDP_BUILD:-$PWD/build}
RUN=$B/ddprun; CASES=tests/dist/cases
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT DDP_LIB LUA_PATH DDP_FAULT
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
bad=0
ok() { echo "ok $1"; }
no() { echo "not ok $1: $2"; bad=1; }
# fault NAME FAULT STATUS MILLISECONDS TEXT [ARGS...]: a job with the fault ends so, in time, and says TEXT
fault() {
  local name=$1 fault=$2 status=$3 limit=$4 text=$5 t=${EPOCHREALTIME/./} got ms; shift 5
  DDP_FAULT=$fault timeout 60 "$RUN" -n 2 --timeout 2 --grace 0.5 "$@" $CASES/steps.lua $check > "$tmp/out" 2>&1 < /dev/null; got=$?
  ms=$(((${EPOCHREALTIME/./} - t) / 1000))
  if [ $got = "$status" ] && [ $ms -lt "$limit" ] && grep -qF -- "$text" "$tmp/out"; then ok "$name"
  else no "$name" "status $got, $ms ms, no \"$text\" in: $(tail -c 1500 "$tmp/out")"; fi
}
says() { if grep -qE -- "$2" "$tmp/out"; then ok "$1"; else no "$1" "no \"$2\" in: $(tail -c 1500 "$tmp/out")"; fi; }

fault "L2 killed in step 20" "rank=1 step=20 at=all_reduce do=kill" 137 2500 "rank 1 failed first"
says "L3 SIGKILL is named" "killed by SIGKILL"
says "C2 the step and the last collective of the killed rank are known" "rank 1: gone; was: .*step 20, .* after all_reduce #"
says "C2 so is where the other one waits" "rank 0: .*waits in all_reduce #[0-9]+ mean \(f32 x [0-9]+, bucket 0, tests/dist/cases/steps.lua:12\)"
fault "L2 a segmentation fault" "rank=0 step=3 do=segv" 139 2500 "rank 0 failed first"
says "L3 SIGSEGV is named" "killed by SIGSEGV"
fault "L2 abort" "rank=1 step=3 do=abort" 134 2500 "SIGABRT"
fault "L2 a rank that exits 3" "rank=1 at=all_gather step=11 do=exit:3" 3 2500 "exit code 3"
fault "L2 a rank that exits 0 while the other waits" "rank=1 at=barrier do=exit:0" 1 2500 "rank 1 left (exit 0) while rank 0 waits for it"
fault "L3 an error is named with its line" "rank=1 step=7 do=throw" 1 2500 "steps.lua:12: all_reduce mean (f32 x"
says "L3 an error thrown by a fault says so" "thrown by DDP_FAULT"
fault "C1 C2 a stopped rank is named after the timeout" "rank=1 step=5 do=stop" 1 5500 "rank 1 is stuck: it has not reached all_reduce #"
says "C2 that it is stopped is told" "rank 1: stopped"
fault "C1 C2 a rank that is late beyond the timeout" "rank=0 step=5 do=delay:60000" 1 5500 "rank 0 is stuck: it has not reached all_reduce #"
fault "a delay within the timeout is no failure" "rank=1 step=5 do=delay:300" 0 5500 "fine"
fault "C3 a call left out shows as calls that differ" "rank=1 step=9 call=1 do=skip" 1 5500 "rank 1 calls"
fault "a fault of a rank that is not there happens to nobody" "rank=7 do=kill" 0 5500 "fine"
fault "a fault of a later restart does not happen in the first run" "rank=1 restart=1 do=kill" 0 5500 "fine"
check=check
fault "C9 one flipped bit is found by ddp.check and the parameter named" "rank=1 step=12 do=flip" 1 5500 "check: parameter"
fault "C9 without a fault ddp.check finds nothing" "" 0 5500 "fine"
check=
fault "a fault after a step" "rank=1 at=step step=4 do=kill" 137 2500 "rank 1 failed first"
fault "a fault before a rank joins" "rank=1 at=init do=exit:4" 4 2500 "exit code 4"
for f in "do=nothing|do is \"nothing\", expected kill" "rank=1|it is \"rank=1\", expected a word do=" "stp=3 do=kill|a word is \"stp\", expected rank, node" "do=exit|do is \"exit\", expected" "at=noon do=kill|at is \"noon\", expected all_reduce" \
  "step=0 do=kill|step is \"0\", expected a whole number from 1" "at=init do=flip|do is \"flip\", expected a collective"; do
  fault "a malformed fault is named: ${f%%|*}" "${f%%|*}" 1 2500 "DDP_FAULT: ${f#*|}"
done

# A rank that is stuck tells where it is: in C, in Lua that runs, in Lua that is compiled.
cat > "$tmp/stuck.lua" <<'L'
local ddp = require "ddp"
ddp.init()
local function sleeping() os.execute "sleep 30" end
local function spinning() local x = 0 while true do x = x + #tostring(x) end end
local function compiled() local x = 0 while true do x = x + 1 end end
if ddp.rank() == 1 then
  if arg[1] == "spinning" then jit.off() end
  local fn = ({ sleeping = sleeping, spinning = spinning, compiled = compiled })[arg[1]]
  fn()
end
ddp.all_reduce(ddp.ones(4))
L
stuck() {
  timeout 60 "$RUN" -n 2 --timeout 2 --grace 0.5 "$tmp/stuck.lua" "$1" > "$tmp/out" 2>&1 < /dev/null
  says "C2 a rank stuck $1 is named" "^ddprun: rank 1 is stuck: it has not reached all_reduce #1 "
  says "C2 a long wait is told before the timeout" "^ddprun:   rank 1 has not come: computing"
}
stuck sleeping; says "C2 its Lua stack is shown where C was called" "stuck.lua:3: in (sleeping|fn)"; says "C2 its C stack is shown" "\[r1\] .*wait4"
stuck spinning; says "C2 its Lua stack is shown in the midst of Lua" "stuck.lua:4: in (spinning|fn)"
stuck compiled; says "C2 compiled code is told to be such" "when code that LuaJIT has compiled is left"

# The tour that README shows to users.
scripts/fault_tour.sh "$RUN" > "$tmp/out" 2>&1
for text in "killed by SIGKILL" "rank 1 is stuck" "rank 0 is stuck" "rank 1 calls all_gather" "rank 1 left .exit 0. while rank 0 waits" "out of memory: [0-9]+ bytes" "matmul: a is" "models differ: parameter 1" \
  "check: parameter 0.weight differs"; do says "the fault tour shows: $text" "$text"; done

# SIGUSR1: what each rank is doing now.
DDP_FAULT="rank=1 step=5 do=stop" "$RUN" -n 2 --timeout 30 --grace 0.5 $CASES/steps.lua > "$tmp/out" 2>&1 < /dev/null & pid=$!
sleep 1; kill -USR1 $pid; sleep 0.3; kill -TERM $pid; wait $pid
says "C2 SIGUSR1 to ddprun tells what a waiting rank does" "^ddprun: rank 0: waits in all_reduce #[0-9]+"
says "C2 SIGUSR1 to ddprun tells that the other is stopped" "^ddprun: rank 1: stopped"
exit $bad
