#!/bin/bash
# engines.sh -- one matrix over every engine, ranks as real processes: what works on one must work on all, and fail alike.
cd "$(dirname "$0")/../.." || exit 2
B=${DDP_BUILD:-$PWD/build}
RUN=$B/ddprun; CASES=tests/dist/cases
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT DDP_LIB LUA_PATH DDP_ENGINE DDP_MPI
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
bad=0
ok() { echo "ok $1"; }
no() { echo "not ok $1: $(echo "$2" | tr '\n' '~' | cut -c1-500)"; bad=1; }
has() { case $1 in *"$2"*) return 0 ;; esac; return 1; }
passes() { local name=$1 out; shift; out=$(timeout 100 "$@" 2>&1); [ $? = 0 ] && has "$out" fine && ok "$name" || no "$name" "$out"; }
# fails NAME STATUS LEAST MOST TEXT COMMAND...: this status, after that many seconds, and text in the output
fails() {
  local name=$1 want=$2 least=$3 limit=$4 text=$5 out status begin took; shift 5
  begin=$(date +%s%N); out=$(timeout 60 "$@" 2>&1); status=$?; took=$(( ($(date +%s%N) - begin) / 1000000 ))
  if [ $status != "$want" ]; then no "$name" "status $status, expected $want: $out"
  elif [ $took -gt $((limit * 1000)) ] || [ $took -lt $((least * 1000)) ]; then no "$name" "took $took ms: $out"
  elif ! has "$out" "$text"; then no "$name" "no \"$text\" in: $out"
  else ok "$name"; fi
}

# Ports are below those that the system gives out by itself.
# by_hand "HOSTS" COMMAND...: starts ranks without a launcher; HOSTS is like "2 2", ranks on each host, or "1 1". Output of
# all in $tmp/hand*, the statuses in $statuses.
by_hand() {
  local hosts=$1 port=$((20000 + RANDOM % 12000)) rank=0 host=0 world=0 n local; shift
  for n in $hosts; do world=$((world + n)); done
  rm -f "$tmp"/hand*
  for n in $hosts; do
    for ((local = 0; local < n; local++)); do
      (eval "$("$RUN" --env)"
       RANK=$rank WORLD_SIZE=$world LOCAL_RANK=$local LOCAL_WORLD_SIZE=$n GROUP_RANK=$host MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
         timeout 60 luajit "$@" > "$tmp/hand$rank" 2>&1; echo $? > "$tmp/handstatus$rank") &
      rank=$((rank + 1))
    done
    host=$((host + 1))
  done
  wait
  statuses=$(cat "$tmp"/handstatus* | tr '\n' ' ')
}
hand_passes() { local name=$1 hosts=$2; shift 2; by_hand "$hosts" "$@"; [ -z "${statuses//[0 ]/}" ] && grep -q fine "$tmp"/hand0 && ok "$name" || no "$name" "$statuses $(cat "$tmp"/hand*)"; }

toy() { timeout 60 "$@" scripts/train_toy.lua --steps 200 2>&1 | grep -o 'step 200 loss .*'; }
want=$(toy "$RUN" -n 2 --engine shm)

matrix() { # matrix NAME: under ddprun with $engine
  local e=$1 run=("$RUN" --engine "$engine")
  for n in 2 3 4; do passes "C13 $e: collectives give the same bits on $n ranks, for every length and dtype" "${run[@]}" -n $n $CASES/collectives.lua; done
  for n in 2 4; do passes "C12 C7 C6 P3 $e: $n ranks train as one does, weighted 12/4 too" "${run[@]}" -n $n $CASES/reducer.lua; done
  passes "P1 P2 C6 $e: the stepper on two ranks equals one" "${run[@]}" -n 2 $CASES/stepper.lua
  passes "C12 C13 $e: sums of 1 MB and 3 elements, min and max, reduce_scatter, of many bytes" "${run[@]}" -n 3 $CASES/large.lua
  local got; got=$(toy "${run[@]}" -n 2)
  [ -n "$want" ] && [ "$got" = "$want" ] && ok "$e: the toy trains to the loss of shm" || no "$e: the toy trains to the loss of shm" "$got, not $want"
  local ms try
  for try in 1 2 3; do # what sockets take on a busy machine comes on top
    ms=$(DDP_FAULT=delay:20 timeout 60 "${run[@]}" -n 2 $CASES/fault.lua delay 2>&1 | sed -n 's/.*comm_ms \([0-9.]*\).*/\1/p')
    awk "BEGIN { exit !(0$ms >= 17 && 0$ms <= 30) }" && break
  done
  awk "BEGIN { exit !(0$ms >= 17 && 0$ms <= 30) }" && ok "C14 $e: a delay of 20 ms shows as exposed communication" || no "C14 $e: a delay of 20 ms shows as exposed communication" "$ms ms"
  fails "C3 $e: ranks that call different collectives are told both" 1 0 4 'rank 0 calls all_reduce #1 sum (f32 x 4096, "loss", tests/dist/cases/fault.lua:17), rank 1 calls broadcast #1 from 0 (f32 x 10' "${run[@]}" -n 2 $CASES/fault.lua mismatch
  fails "C3 $e: another dtype is told" 1 0 4 "f64 x 8" "${run[@]}" -n 2 $CASES/fault.lua dtype
  fails "C1 C2 $e: a rank that does not come is named after the timeout" 1 2 6 "rank 1 has not reached all_reduce #" "${run[@]}" -n 2 --timeout 2 --grace 1 $CASES/fault.lua stall
  fails "C1 $e: so is a stopped one" 1 2 6 "rank 1" "${run[@]}" -n 2 --timeout 2 --grace 1 $CASES/fault.lua stop
  fails "L2 $e: a killed peer ends the job" 137 0 4 "rank 1" "${run[@]}" -n 2 $CASES/fault.lua kill
  fails "L2 L3 $e: an error in one rank ends all, named with the user's line" 1 0 4 "deliberate" "${run[@]}" -n 2 $CASES/fault.lua error
  fails "L2 $e: a rank that leaves while others wait counts as failed" 1 0 4 "rank 1 left" "${run[@]}" -n 2 $CASES/fault.lua finish
}

if [ -e "$B/libddp_gloo.so" ]; then
  engine=gloo; matrix gloo
  export DDP_ENGINE=gloo
  hand_passes "C13 gloo: by hand, four ranks" "1 1 1 1" $CASES/collectives.lua
  by_hand "1 1" $CASES/fault.lua kill
  grep -q "peer: the connection to rank 1 is lost" "$tmp/hand0" && ok "gloo: without a launcher a killed peer is named" || no "gloo: without a launcher a killed peer is named" "$(cat "$tmp"/hand*)"
  export DDP_ENGINE=hier
  for hosts in "2 2" "2 1" "1 1"; do
    hand_passes "C13 hier: collectives on hosts of $hosts ranks" "$hosts" $CASES/collectives.lua
    hand_passes "C12 C13 hier: many bytes on hosts of $hosts ranks" "$hosts" $CASES/large.lua
  done
  for hosts in "2 2" "1 1"; do hand_passes "C12 C7 C6 P3 hier: hosts of $hosts ranks train as one does" "$hosts" $CASES/reducer.lua; done
  by_hand "2 1" $CASES/fault.lua kill3
  grep -q "rank 2" "$tmp/hand0" && grep -q "rank 2" "$tmp/hand1" && ok "hier: a killed leader of another host is named on every rank" || no "hier: a killed leader of another host is named on every rank" "$(cat "$tmp"/hand*)"
  by_hand "2 1" $CASES/fault.lua mismatch
  grep -q "rank 1 calls broadcast #1 from 0" "$tmp/hand0" && ok "C3 hier: a mismatch inside a host" || no "C3 hier: a mismatch inside a host" "$(cat "$tmp"/hand*)"
  by_hand "1 1" $CASES/fault.lua mismatch
  grep -q "rank 0 calls all_reduce #1.*rank 1 calls broadcast #1 from 0" "$tmp/hand0" && ok "C3 hier: a mismatch between hosts" || no "C3 hier: a mismatch between hosts" "$(cat "$tmp"/hand*)"
  export DDP_TIMEOUT=2
  by_hand "2 1" $CASES/fault.lua stall3
  unset DDP_TIMEOUT
  grep -q "rank 2 has not reached all_reduce #2 sum" "$tmp/hand0" && ok "C1 C2 hier: a host that does not come is named" || no "C1 C2 hier: a host that does not come is named" "$(cat "$tmp"/hand*)"
  mkdir "$tmp/lost"
  for r in 0 1 2; do (eval "$("$RUN" --env)"; RANK=$r WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29998 timeout 20 luajit $CASES/collectives.lua > "$tmp/lost/$r" 2>&1) & done; wait
  grep -q "ranks 0 and 1 both say they are LOCAL_RANK 0 of GROUP_RANK 0" "$tmp/lost/0" && ok "hier: hosts without a number are told" || no "hier: hosts without a number are told" "$(cat "$tmp"/lost/*)"
  unset DDP_ENGINE
  engine=hier; passes "C13 hier: on one host it is shm" "$RUN" --engine hier -n 2 $CASES/collectives.lua
else
  echo "skip gloo and hier: libgloo-dev was not there when this was built"
fi

# under_mpirun N COMMAND...: the ranks of MPI's own launcher
under_mpirun() {
  local n=$1 root=""; shift
  [ $mpi = openmpi ] && root="--allow-run-as-root --oversubscribe"
  # shellcheck disable=SC2086,SC2016
  (eval "$("$RUN" --env)"; export DDP_ENGINE=mpi MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 12000)) WORLD_SIZE=$n
   timeout 60 mpirun.$mpi $root -n "$n" sh -c 'RANK=${OMPI_COMM_WORLD_RANK:-$PMI_RANK} exec luajit "$@"' sh "$@" 2>&1)
}
mpi_passes() { local name=$1 out; shift; out=$(under_mpirun "$@"); [ $? = 0 ] && has "$out" fine && ok "$name" || no "$name" "$out"; }
mpi_fails() { local name=$1 text=$2 out; shift 2; out=$(under_mpirun "$@"); [ $? != 0 ] && has "$out" "$text" && ok "$name" || no "$name" "$out"; }

for mpi in openmpi mpich; do
  if [ ! -e "$B/libddp_$mpi.so" ]; then
    echo "skip mpi ($mpi): its headers were not there when this was built"
    continue
  fi
  export DDP_MPI=$mpi
  engine=mpi
  if [ $mpi = mpich ]; then matrix "mpi (mpich)"
  else fails "mpi (openmpi): without its launcher it refuses, with the remedy" 1 0 4 "start them with mpirun.openmpi" "$RUN" --engine mpi -n 2 $CASES/collectives.lua; fi
  if [ $mpi = mpich ]; then
    export DDP_ENGINE=hier DDP_HIER=mpi
    hand_passes "C13 hier: leaders over mpi ($mpi), hosts of 2 1 ranks" "2 1" $CASES/collectives.lua
    unset DDP_ENGINE DDP_HIER
  fi
  unset DDP_MPI
  if ! command -v mpirun.$mpi > /dev/null; then
    echo "skip mpi ($mpi) under mpirun: there is no mpirun.$mpi"
    continue
  fi
  for n in 2 3; do mpi_passes "C13 mpi ($mpi): collectives on $n ranks of mpirun" $n $CASES/collectives.lua; done
  mpi_passes "C12 C7 C6 P3 mpi ($mpi): two ranks of mpirun train as one does" 2 $CASES/reducer.lua
  mpi_passes "C12 C13 mpi ($mpi): many bytes on 3 ranks of mpirun" 3 $CASES/large.lua
  got=$(under_mpirun 2 scripts/train_toy.lua --steps 200)
  [ -n "$want" ] && has "$got" "$want" && ok "mpi ($mpi): under mpirun the toy trains to the loss of shm" || no "mpi ($mpi): under mpirun the toy trains to the loss of shm" "$got, not $want"
  mpi_fails "C3 mpi ($mpi): under mpirun both calls are told" 'rank 1 calls broadcast #1 from 0 (f32 x 10' 2 $CASES/fault.lua mismatch
  DDP_TIMEOUT=2 mpi_fails "C1 C2 mpi ($mpi): under mpirun a rank that does not come is named" 'rank 1 has not reached all_reduce #' 2 $CASES/fault.lua stall
done

out=$(timeout 60 "$RUN" doctor 2>&1 | grep '^engines ')
has "$out" "shm" && { [ ! -e "$B/libddp_gloo.so" ] || has "$out" "gloo, hier"; } && ok "doctor says which engines are there" || no "doctor says which engines are there" "$out"
out=$(DDP_ENGINE=carrier-pigeon WORLD_SIZE=2 RANK=0 MASTER_PORT=1 timeout 20 "$RUN" -n 2 $CASES/collectives.lua 2>&1)
has "$out" "expected auto, shm, gloo, mpi, hier or nccl" && ok "an unknown engine is told" || no "an unknown engine is told" "$out"
mkdir "$tmp/bare"
cp "$B"/libddp.so "$B"/libddp_host.so "$tmp/bare"
out=$(eval "$("$RUN" --env)"; export DDP_LIB="$tmp/bare"; DDP_ENGINE=gloo RANK=0 WORLD_SIZE=2 MASTER_PORT=29999 timeout 20 luajit $CASES/collectives.lua 2>&1)
has "$out" "engine gloo needs libgloo, which was not there when ddp was built; apt install libgloo-dev and build again" && ok "a plug-in that was not built is told with the remedy" || no "a plug-in that was not built is told with the remedy" "$out"
exit $bad
