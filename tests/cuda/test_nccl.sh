#!/bin/bash
# test_nccl.sh -- ranks with GPUs, as real processes on the test double: collectives, training, and what goes wrong between them.
cd "$(dirname "$0")/../.." || exit 2
B=${DDP_BUILD:-$PWD/build}
RUN=$B/ddprun; DIST=tests/dist/cases; CASES=tests/cuda/cases
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT DDP_LIB LUA_PATH
export DDP_CUDA_LIBS=$B/cuda-double DDP_DOUBLE_GPUS=4 DDP_DOUBLE_LEAKS=quiet
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
bad=0
ok() { echo "ok $1"; }
no() { echo "not ok $1: $(echo "$2" | tr '\n' '~' | cut -c1-600)"; bad=1; }
has() { case $1 in *"$2"*) return 0 ;; esac; return 1; }

# passes NAME COMMAND...: status 0 and "fine" in the output
passes() { local name=$1 out; shift; out=$(timeout 100 "$@" 2>&1); [ $? = 0 ] && has "$out" fine && ok "$name" || no "$name" "$out"; }
# fails NAME SECONDS TEXT COMMAND...: not status 0, within these seconds, and text in the output
fails() {
  local name=$1 limit=$2 text=$3 out status begin took; shift 3
  begin=$(date +%s%N); out=$(timeout 60 "$@" 2>&1); status=$?; took=$(( ($(date +%s%N) - begin) / 1000000 ))
  if [ $status = 0 ] || [ $status = 124 ]; then no "$name" "status $status: $out"
  elif [ $took -gt $((limit * 1000)) ]; then no "$name" "took $took ms: $out"
  elif ! has "$out" "$text"; then no "$name" "no \"$text\" in: $out"
  else ok "$name"; fi
}

# The cases of the CPU, on GPUs, whatever order the streams run in.
for mode in eager lazy random; do
  for n in 1 2 3; do DDP_DOUBLE_MODE=$mode passes "C13 collectives give the same bits on $n GPUs ($mode)" "$RUN" -n $n $CASES/on_gpu.lua $DIST/collectives.lua; done
done
for n in 1 2 4; do passes "C12 C7 C6 P3 $n GPUs train as one does" "$RUN" -n $n $CASES/on_gpu.lua $DIST/reducer.lua; done
passes "P1 P2 C6 the stepper on two GPUs equals one, whatever the micro-batches" "$RUN" -n 2 $CASES/on_gpu.lua $DIST/stepper.lua
for n in 2 3; do passes "C5 uneven data on $n GPUs ends like one process" "$RUN" -n $n $CASES/on_gpu.lua $DIST/uneven.lua; done
for n in 2 3; do passes "C6 C7 what steps leave out, frozen parameters, several models on $n GPUs" "$RUN" -n $n $CASES/on_gpu.lua $DIST/uses.lua; done
for n in 2 3; do passes "P3 C5 communication hooks and compression on $n GPUs" "$RUN" -n $n $CASES/on_gpu.lua $DIST/hooks.lua; done
for n in 2 3; do passes "C3 groups and messages between two on $n GPUs" "$RUN" -n $n $CASES/on_gpu.lua $DIST/groups.lua; done
fails "C3 ranks that call different collectives on GPUs are told both" 5 'rank 0 calls all_reduce' "$RUN" -n 3 $CASES/on_gpu.lua $DIST/groups.lua mismatch

# What goes wrong between GPUs.
DDP_DOUBLE_UUID=same fails "two ranks on one GPU are refused before NCCL sees them" 5 "ranks 0 and 1 are on the same GPU" "$RUN" -n 2 $CASES/steps.lua
fails "a rank whose model is on the CPU is named by the others" 8 "rank 1 has its model on the cpu" "$RUN" -n 2 --timeout 2 --grace 1 $CASES/steps.lua one_on_cpu
DDP_DOUBLE_GPUS=1 fails "C1 more ranks than GPUs: the rank without one is told" 5 "are on the same GPU" "$RUN" -n 2 $CASES/steps.lua
DDP_DOUBLE_GPUS=2 fails "a rank beyond the GPUs of its host is told what to start" 5 "rank 2 has no GPU: 2 here for 3 ranks" "$RUN" -n 3 $CASES/steps.lua
fails "L2 a rank that is killed ends the job of GPUs" 8 "SIGKILL" "$RUN" -n 2 --grace 1 $CASES/steps.lua kill
fails "C1 C2 a rank that stalls is named, though the others' GPUs wait in NCCL" 8 "rank 1 has not reached" "$RUN" -n 2 --timeout 2 --grace 1 $CASES/steps.lua stall
DDP_DOUBLE_FAIL=ncclAllReduce:6:6 fails "an NCCL call that fails ends the job with NCCL's words" 8 "NCCL: " "$RUN" -n 2 --grace 1 $CASES/steps.lua
DDP_DOUBLE_FAIL=ncclAsync:6:6 fails "an asynchronous error of NCCL ends the job" 8 "NCCL: " "$RUN" -n 2 --grace 1 $CASES/steps.lua
DDP_DOUBLE_FAIL=ncclHang:9 fails "C1 work that does not end on the GPUs, though all ranks came, is ended by the watchdog" 8 "was begun by all ranks, but its work on the GPUs has not ended for 2.0 s" "$RUN" -n 2 --timeout 2 --grace 1 $CASES/steps.lua
DDP_DOUBLE_FAIL=ncclHang:1 fails "C1 a first all_reduce that does not end names what to try" 8 "NCCL_P2P_DISABLE=1" "$RUN" -n 2 --timeout 2 --grace 1 $CASES/steps.lua
DDP_DOUBLE_FAIL=ncclWrong:1 fails "a first all_reduce with a wrong result is refused, with what to try" 5 "the first all_reduce of 2 GPUs is wrong: element 0" "$RUN" -n 2 $CASES/steps.lua
passes "an engine that moves host memory still serves a model on the CPU" "$RUN" -n 2 --engine shm $CASES/steps.lua cpu
fails "an engine that moves host memory refuses tensors of a GPU" 5 "engine shm moves host memory only" "$RUN" -n 2 --engine shm $CASES/steps.lua
DDP_DEVICE=cpu fails "DDP_DEVICE=cpu refuses a GPU by name" 5 "DDP_DEVICE=cpu keeps this process on the cpu" "$RUN" -n 2 $CASES/steps.lua
exit $bad
