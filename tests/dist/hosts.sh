#!/bin/bash
# hosts.sh -- jobs on several hosts, and jobs that start again. First hosts that are one machine, then two of network namespaces.
cd "$(dirname "$0")/../.." || exit 2
B=${DDP_BUILD:-$PWD/build}
RUN=$B/ddprun; CASES=$PWD/tests/dist/cases; LAB=tests/dist/lab/hosts.sh
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT DDP_LIB LUA_PATH DDP_FAULT DDP_JOB
tmp=$(mktemp -d); lab=$(mktemp -d)
trap '$LAB down "$lab"; rm -rf "$tmp" "$lab"' EXIT
bad=0
ok() { echo "ok $1"; }
no() { echo "not ok $1: $(echo "$2" | tr '\n' '~' | cut -c1-900)"; bad=1; }
check() { local name=$1; shift; if "$@"; then ok "$name"; else no "$name" "failed: $*; ms $ms; node 0 ($(cat "$tmp/status0")): $(tail -c 700 "$tmp/out0"); node 1 ($(cat "$tmp/status1")): $(tail -c 700 "$tmp/out1")"; fi; }
on() { local i=$1; shift; "$@"; } # how something is run on host i
port=$((11000 + RANDOM % 18000)) # below those that the system gives out by itself
# start I ARGS...: ddprun of host I in the background
start() {
  local i=$1; shift
  : > "$tmp/status$i"
  { on "$i" timeout 60 "$RUN" --nnodes 2 --node-rank "$i" --master-addr "$addr" --master-port $port --grace 0.5 "$@" > "$tmp/out$i" 2>&1 < /dev/null; echo $? > "$tmp/status$i"; } & pids[i]=$!
}
# both ARGS0 -- ARGS1: a job on two hosts; its statuses and outputs lie in $tmp
both() {
  local a=() t=${EPOCHREALTIME/./}; port=$((port + 1))
  while [ "$1" != -- ]; do a+=("$1"); shift; done; shift
  start 0 "${a[@]}"; start 1 "$@"; wait; ms=$(((${EPOCHREALTIME/./} - t) / 1000))
}
status() { [ "$(cat "$tmp/status0")" = "$1" ] && [ "$(cat "$tmp/status1")" = "$2" ]; }
said() { grep -qE -- "$2" "$tmp/out$1"; }
quick() { [ "$ms" -lt "$1" ]; }

addr=127.0.0.1
SHOW='echo $RANK/$WORLD_SIZE/$LOCAL_RANK/$LOCAL_WORLD_SIZE/$GROUP_RANK/$GROUP_WORLD_SIZE/$MASTER_ADDR/$MASTER_PORT; [ $DDP_STORE_PORT = '
both -n 1 --exec bash -c "$SHOW$((port + 1)) ]" -- -n 2 --exec bash -c "$SHOW$((port + 1)) ]"
check "L8 hosts with one and two ranks make a world of three" eval 'status 0 0 && [ "$(sort "$tmp/out0" "$tmp/out1" | grep -c "^\[r")" = 3 ] && said 0 "^.r0. 0/3/0/1/0/2/127.0.0.1" && said 1 "^.r1. 1/3/0/2/1/2/" && said 1 "^.r2. 2/3/1/2/1/2/" && [ "$(grep -h "^.r" "$tmp/out0" "$tmp/out1" | sed "s|.*/||" | sort -u | wc -l)" = 1 ]'
check "L7 each host says once who it is" said 1 "^ddprun: node 1 of 2: ranks 1 to 2 of 3, "
both --report "$tmp/report0" --exec bash -c '[ $RANK = 1 ] || printf "{}" >&$DDP_REPORT_FD' -- --report "$tmp/report1" --exec true
check "--report is written where rank 0 ran" eval 'status 0 0 && [ "$(cat "$tmp/report0")" = "{}" ] && [ ! -e "$tmp/report1" ]'
both --exec bash -c 'sleep 1' -- --exec bash -c 'exit 0'
check "a host that is done waits for the others, and all end well" eval 'status 0 0 && [ $ms -gt 900 ]'
both --exec sleep 987 -- --exec bash -c 'sleep 0.3; echo last words >&2; exit 7'
check "L2 a failure on one host ends all, with its status" eval 'status 7 7 && quick 4000'
check "L3 the other host says who failed and how" eval 'said 0 "node 1 failed first" && said 0 "rank 1 failed first, .*exit code 7"'
both --exec bash -c 'sleep 0.3; kill -SEGV $$' -- --exec bash -c 'sleep 987'
check "L2 a failure on node 0 reaches the others" eval 'status 139 139 && quick 4000 && said 1 "rank 0 failed first, .*SIGSEGV"'
port=$((port + 1)); start 0 --exec sleep 987; start 1 --exec sleep 987; sleep 1; pkill -INT -f -- "--node-rank 1 --master-addr 127.0.0.1 --master-port $port"; wait
check "L4 Ctrl-C on one host stops all" eval 'status 130 130 && said 0 "stopped by SIGINT"'
both --timeout 2 --exec true -- --help
check "L9 a host that does not come is named" eval '[ "$(cat "$tmp/status0")" = 1 ] && said 0 "missing: node 1 of 2, after 2.0 s" && quick 4000'
port=$((port + 1)); "$RUN" --nnodes 2 --node-rank 0 --master-addr $addr --master-port $port --exec true > "$tmp/out0" 2>&1 & waiting=$!
sleep 0.5; t=${EPOCHREALTIME/./}; kill -INT $waiting; wait $waiting; rc=$?; ms=$(((${EPOCHREALTIME/./} - t) / 1000))
check "L9 Ctrl-C while hosts meet ends it within a second" eval '[ $rc = 130 ] && quick 1000'
port=$((port + 1)); start 0 --timeout 3 --exec sleep 1; sleep 0.3; start 1 --timeout 3 --exec sleep 1; sleep 0.2
timeout 20 "$RUN" --nnodes 2 --node-rank 1 --master-addr $addr --master-port $port --timeout 3 --exec sleep 1 > "$tmp/twice" 2>&1; twice=$?; wait
check "L9 a host that joins twice is refused, and the job goes on" eval '[ $twice = 1 ] && grep -q "node 1 is here already" "$tmp/twice" && status 0 0'
port=$((port + 1)); start 0 --timeout 3 --exec true; timeout 20 "$RUN" --nnodes 3 --node-rank 1 --master-addr $addr --master-port $port --timeout 2 --exec true > "$tmp/out1" 2>&1; echo $? > "$tmp/status1"; wait
check "L9 hosts that disagree about their number do not meet, and say why" eval 'status 1 1 && { said 1 "serves another job" || said 1 "was started with --nnodes"; }'
timeout 20 "$RUN" --nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --master-port $((port + 500)) --timeout 1 --exec true > "$tmp/out1" 2>&1; rc=$?
check "L9 a master that nobody serves is named after the timeout" eval '[ $rc = 1 ] && said 1 "cannot connect to 127.0.0.1 port $((port + 500))"'
if command -v perl > /dev/null; then
  port=$((port + 1)); perl -MIO::Socket::INET -e 'my $s = IO::Socket::INET->new(Listen => 1, LocalAddr => "127.0.0.1:$ARGV[0]"); sleep 30' $port & held=$!
  sleep 0.3; start 0 --timeout 2 --exec true; start 1 --timeout 2 --exec true; wait $!; kill $held 2> /dev/null; wait
  check "a port in use is named on both sides" eval 'status 1 1 && said 0 "cannot listen on port $port of 127.0.0.1: Address already in use" && said 1 "."'
else echo "skip a port in use is named on both sides: perl is missing"; fi
mkdir "$tmp/other"; sed 's/0\.1\.0/0.1.9/g' "$RUN" > "$tmp/other/ddprun"; chmod +x "$tmp/other/ddprun"; ln -s "$B"/lib*.so "$tmp/other"
port=$((port + 1)); start 0 --timeout 2 --exec true
timeout 20 "$tmp/other/ddprun" --nnodes 2 --node-rank 1 --master-addr $addr --master-port $port --timeout 2 --exec true > "$tmp/out1" 2>&1; echo $? > "$tmp/status1"; wait
check "hosts with different versions are told both" eval 'status 1 1 && said 0 "node 1 .* runs ddp 0.1.9, node 0 runs 0.1.0" && said 1 "the same on all hosts is needed"'
DDP_JOB=one; export DDP_JOB; port=$((port + 1)); start 0 --timeout 2 --exec true; DDP_JOB=two start 1 --timeout 2 --exec true; wait; unset DDP_JOB
check "another job's token is refused" eval 'status 1 1 && said 1 "it serves another job"'

# ---- under srun, one ddprun a host: what its variables say ----
slurm() { # slurm NODE TASKS: ddprun as srun would start it
  env SLURM_JOB_ID=$port SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS="$2" SLURM_NODEID="$1" SLURM_PROCID="$1" SLURM_NTASKS=2 SLURM_LOCALID=0 \
    SLURM_STEP_NODELIST=localhost timeout 60 "$RUN" -n 2 --timeout 5 --exec bash -c 'echo $RANK/$WORLD_SIZE/$GROUP_RANK' > "$tmp/out$1" 2>&1
  echo $? > "$tmp/status$1"
}
slurm 0 2 & slurm 1 2; wait
check "srun -N2 ddprun -n 2 takes hosts, number and meeting place from Slurm" eval 'status 0 0 && said 0 "r1. 1/4/0" && said 1 "r2. 2/4/1"'
slurm 1 4
check "several ddprun a host under srun are refused with the remedy" eval '[ "$(cat "$tmp/status1")" = 2 ] && said 1 "srun -N2 --ntasks-per-node=1 ddprun"'

# ---- L10: again ----
again() { timeout 60 "$RUN" -n 2 --grace 0.5 "$@" > "$tmp/out0" 2>&1 < /dev/null; rc=$?; }
export DDP_FAULT="rank=1 step=5 do=kill"
again --max-restarts 2 "$CASES/steps.lua"
check "L10 a job that failed after its first step is started again whole" eval '[ $rc = 0 ] && said 0 "^ddprun: restart 1 of 2" && ! said 0 "restart 2" && said 0 fine'
again "$CASES/steps.lua"
check "L10 without --max-restarts it is not" eval '[ $rc = 137 ] && ! said 0 restart'
export DDP_FAULT="rank=1 at=init do=exit:3"
again --max-restarts 2 "$CASES/steps.lua"
check "L10 one that failed before its first step is not" eval '[ $rc = 3 ] && said 0 "failed before its first step"'
unset DDP_FAULT
again "$CASES/restart.lua" "$tmp/saved" "$tmp/undisturbed"
[ $rc = 0 ] || no "a run that nothing disturbs" "$(cat "$tmp/out0")"
# The checkpoints come after steps 5, 10, 15: a job that is hit in step 13 goes on at 11. A fault counts the steps of its attempt.
for fault in "rank=1 step=13 do=kill" "rank=0 step=13 do=segv" "rank=1 step=13 do=stop" "rank=0 step=13 do=throw" "rank=1 step=13 at=all_reduce do=skip" "rank=1 step=13 do=exit:0"; do
  rm -f "$tmp/saved"
  DDP_FAULT=$fault again --timeout 2 --max-restarts 1 "$CASES/restart.lua" "$tmp/saved" "$tmp/restarted"
  check "L10 after $fault the job goes on from its checkpoint to the bits of a run that nothing disturbed" \
    eval '[ $rc = 0 ] && said 0 "goes on at step 11, attempt 1" && cmp -s "$tmp/undisturbed" "$tmp/restarted"'
done
rm -f "$tmp/saved"; DDP_FAULT="rank=1 step=3 restart=0 do=kill" again --max-restarts 1 --log-dir "$tmp/logs" "$CASES/restart.lua" "$tmp/saved" "$tmp/restarted"
check "L10 one that failed before it saved begins anew, and ends with the same bits" eval '[ $rc = 0 ] && cmp -s "$tmp/undisturbed" "$tmp/restarted"'
DDP_FAULT="rank=1 step=3 do=exit:3" again --max-restarts 0 "$CASES/steps.lua"
check "L10 with --max-restarts 0 it ends" eval '[ $rc = 3 ] && ! said 0 restart'

# ---- two hosts of namespaces ----
why=$($LAB up "$lab" 2>&1); st=$?
if [ $st = 77 ]; then
  for name in "a cut cable" "a host that is gone" "a slow line"; do echo "skip $name ends the job on both sides: $why"; done
  exit $bad
fi
[ $st = 0 ] || { no "the lab comes up" "$why"; exit 1; }
addr=10.77.0.1
on() { local i=$1; shift; $LAB exec "$lab" "$i" "$@"; }
both --exec hostname -- --exec hostname
check "two hosts meet over a network" eval 'status 0 0 && said 0 "r0. host0" && said 1 "r1. host1"'
$LAB wire "$lab" delay=40 loss=5
both -n 2 --exec true -- -n 2 --exec true
check "they meet over a bad line" eval 'status 0 0 && quick 15000'
$LAB wire "$lab" delay=0 loss=0

# Ranks that train over both hosts: shared memory inside, gloo between.
if [ -e "$B/libddp_gloo.so" ]; then
  STEPS="--timeout 3 -n 2 $CASES/steps.lua"
  both $STEPS -- $STEPS
  check "four ranks on two hosts train" eval 'status 0 0 && said 0 "r0. fine"'
  export DDP_FAULT="rank=3 step=12 do=kill"; both $STEPS -- $STEPS
  check "L2 a killed rank ends the job on both hosts" eval 'status 137 137 && quick 4000'
  check "L3 both hosts say who it was" eval 'said 0 "rank 3 failed first, .*SIGKILL" && said 1 "rank 3 failed first, .*SIGKILL"'
  export DDP_FAULT="rank=2 step=12 do=stop"; both $STEPS -- $STEPS
  check "C1 C2 a rank that stands still is named on both hosts" eval 'status 1 1 && said 0 "rank 2 is stuck: it has not reached all_reduce" && said 1 "rank 2 is stuck: it has not reached all_reduce" && quick 7500'
  export DDP_FAULT="rank=0 step=12 do=throw"; both $STEPS -- $STEPS
  check "L3 an error on node 0 is told on node 1 with its line" eval 'status 1 1 && said 1 "steps.lua:12: .*thrown by DDP_FAULT"'
  export DDP_FAULT="rank=1 step=12 do=kill"; both --max-restarts 1 $STEPS -- --max-restarts 1 $STEPS
  check "L10 a job on two hosts starts again on both" eval 'status 0 0 && said 0 "restart 1 of 1" && said 1 "restart 1 of 1" && said 0 "r0. fine"'
  export DDP_HEARTBEAT=2 DDP_FAULT="rank=0 step=20 do=delay:1500"; port=$((port + 1)); start 0 $STEPS; start 1 $STEPS; sleep 0.9; $LAB wire "$lab" cut=1; t=${EPOCHREALTIME/./}; wait; ms=$(((${EPOCHREALTIME/./} - t) / 1000)); $LAB wire "$lab" cut=0
  check "a cable cut in the midst of training ends it on both sides" eval '[ "$(cat "$tmp/status0")" != 0 ] && [ "$(cat "$tmp/status1")" != 0 ] && quick 6500'
  unset DDP_FAULT
else echo "skip four ranks on two hosts train: built without gloo"; fi
export DDP_HEARTBEAT=2
port=$((port + 1)); start 0 --exec sleep 987; start 1 --exec sleep 987; sleep 1.5; $LAB wire "$lab" cut=1; t=${EPOCHREALTIME/./}; wait; ms=$(((${EPOCHREALTIME/./} - t) / 1000)); $LAB wire "$lab" cut=0
check "a cut cable ends the job on both sides within the limit of heartbeats" eval 'status 1 1 && quick 4500'
check "each side names the host that it lost" eval 'said 0 "node 1 .host1. is lost: not heard of for 2" && said 1 "node 0 .host0., where the job.s store is, is lost"'
port=$((port + 1)); start 0 --exec sleep 987; start 1 --exec sleep 987; sleep 1.5; t=${EPOCHREALTIME/./}; on 1 pkill -KILL ddprun; wait; ms=$(((${EPOCHREALTIME/./} - t) / 1000))
check "a host whose ddprun is killed is lost" eval '[ "$(cat "$tmp/status0")" = 1 ] && said 0 "node 1 .host1. is lost" && quick 4500'
check "L5 its ranks are gone too" eval '! on 1 pgrep -f "sleep 987" > /dev/null'
port=$((port + 1)); start 0 --exec sleep 987; start 1 --exec sleep 987; sleep 1.5; t=${EPOCHREALTIME/./}; on 0 pkill -STOP ddprun; wait ${pids[1]}; ms=$(((${EPOCHREALTIME/./} - t) / 1000)); on 0 pkill -CONT ddprun; wait
check "a host that stands still is lost" eval 'said 1 "node 0 .host0.,.* is lost" && [ "$(cat "$tmp/status1")" = 1 ] && quick 4500'
exit $bad
