#!/bin/bash
# environment.sh -- L8: a script under launchers that are not ours, each where it is installed.
cd "$(dirname "$0")/../.." || exit 2
B=${DDP_BUILD:-$PWD/build}
RUN=$B/ddprun; WHO=tests/dist/cases/who.lua
for v in $(compgen -e | grep -E '^(DDP|OMPI|PMI|PMIX|SLURM|MPI)_'); do unset "$v"; done
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT LUA_PATH
eval "$("$RUN" --env)"
bad=0
ok() { echo "ok $1"; }
no() { echo "not ok $1: $(echo "$2" | tr '\n' '~' | cut -c1-500)"; bad=1; }
# both NAME COMMAND...: status 0, and each of two ranks on one host says who it is
both() {
  local name=$1 out; shift
  out=$("$@" 2>&1)
  [ $? = 0 ] && [ "$(echo "$out" | grep -E '^(\[r[01]\] )?fine' | sed 's/^\[r[01]\] //' | sort | tr '\n' ',')" = "fine 0/2 0/2 0/1,fine 1/2 1/2 0/1," ] && ok "$name" || no "$name" "$out"
}
# by_hand VARIABLES...: two processes whose variables are those, each with "R" replaced by its rank
by_hand() {
  local r
  for r in 0 1; do env -i PATH="$PATH" LUA_PATH="$LUA_PATH" DDP_LIB="$DDP_LIB" "${@//=R/=$r}" timeout 60 luajit $WHO & done
  wait -n && wait -n
}

both "L8 under ddprun" timeout 60 "$RUN" -n 2 $WHO
if mpirun --version 2>/dev/null | grep -q 'Open MPI\|OpenRTE'; then
  both "L8 under Open MPI's mpirun" timeout 60 mpirun --allow-run-as-root --oversubscribe -n 2 luajit $WHO
  out=$(timeout 60 mpirun --allow-run-as-root --oversubscribe -n 2 "$RUN" $WHO 2>&1); [ "$(echo "$out" | grep -c 'fine 0/1')" = 2 ] && ok "L8 ddprun under mpirun starts worlds of its own" || no "L8 ddprun under mpirun starts worlds of its own" "$out"
else
  echo "skip L8 under Open MPI's mpirun: it is missing"
fi
if command -v mpiexec.hydra >/dev/null; then
  both "L8 under MPICH's mpiexec" timeout 60 mpiexec.hydra -n 2 luajit $WHO
  both "L8 under MPICH's mpiexec through a shell" timeout 60 mpiexec.hydra -n 2 sh -c "luajit $WHO; exit \$?"
else
  echo "skip L8 under MPICH's mpiexec: it is missing"
fi
both "L8 as two tasks of srun" by_hand SLURM_JOB_ID=$$ SLURM_STEP_ID=0 SLURM_PROCID=R SLURM_NTASKS=2 SLURM_LOCALID=R SLURM_NODEID=0 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NODELIST=nowhere
both "L8 with DDP_RANK by hand" by_hand DDP_RANK=R DDP_WORLD_SIZE=2 MASTER_PORT=$((20000 + RANDOM % 10000))
out=$(env RANK=1 timeout 20 luajit $WHO 2>&1); [ $? != 0 ] && [[ $out == *"init: RANK is 1 but WORLD_SIZE is not set"* ]] && ok "L8 half an environment is named" || no "L8 half an environment is named" "$out"
out=$(env SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_NTASKS=4 timeout 20 luajit $WHO 2>&1); [ "$out" = "fine 0/1 0/1 0/1" ] && ok "L8 in a batch script of Slurm a plain script is alone" || no "L8 in a batch script of Slurm a plain script is alone" "$out"
exit $bad
