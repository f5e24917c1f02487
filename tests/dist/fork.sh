#!/bin/bash
# fork.sh -- L11: a fork after start-up gets errors, not hangs, and does not disturb the job; starting programs works.
cd "$(dirname "$0")/../.." || exit 2
B=${DDP_BUILD:-$PWD/build}
RUN=$B/ddprun; FORK=tests/dist/cases/fork.lua
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT DDP_LIB LUA_PATH
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
bad=0
ok() { echo "ok $1"; }
no() { echo "not ok $1: $(echo "$2" | tr '\n' '~' | cut -c1-900)"; bad=1; }
WHY="this process is a fork of one that had started ddp"

for n in 1 2; do
  out=$(OMP_NUM_THREADS=2 timeout 60 "$RUN" -n $n $FORK plain 2>&1); rc=$?
  [ $rc = 0 ] && [ "$(echo "$out" | grep -c "fine")" = $n ] && ok "L11 with $n ranks the job goes on after a fork" || no "L11 with $n ranks the job goes on after a fork" "$rc $out"
  for what in collective again op new; do
    [ "$(echo "$out" | grep -c "$what: .*fork.lua:[0-9]*: $WHY")" = $n ] && ok "L11 with $n ranks a fork's call gets an error, $what" || no "L11 with $n ranks a fork's call gets an error, $what" "$out"
  done
  [ "$(echo "$out" | grep -c "child's status 0")" = $n ] && ok "L11 with $n ranks the fork ends by itself" || no "L11 with $n ranks the fork ends by itself" "$out"
done
out=$(OMP_NUM_THREADS=2 timeout 60 "$RUN" -n 2 $FORK loader 2>&1); rc=$?
[ $rc = 0 ] && [ "$(echo "$out" | grep -c "loader: .*$WHY")" = 2 ] && [ "$(echo "$out" | grep -c "child's status 0")" = 2 ] && ok "L11 a loader in a fork is an error, and is closed without its workers" || no "L11 a loader in a fork is an error, and is closed without its workers" "$rc $out"
out=$(OMP_NUM_THREADS=2 timeout 60 "$RUN" -n 2 $FORK raise 2>&1); rc=$?
[ $rc = 0 ] && [ "$(echo "$out" | grep -c "child's status 1")" = 2 ] && [[ $out == *"$WHY"* && $out != *"failed first"* ]] && ok "L11 a fork that fails is not the rank that fails" || no "L11 a fork that fails is not the rank that fails" "$rc $out"

cat > "$tmp/early.lua" <<'LUA'
local ddp, ffi = require "ddp", require "ffi"
ffi.cdef "int fork(void); int waitpid(int, int *, int);"
local pid = ffi.C.fork()
print(pid == 0 and "child" or "parent", ddp.ones(300, 300):matmul(ddp.ones(300, 300)):sum():item())
if pid ~= 0 then ffi.C.waitpid(pid, nil, 0) end
LUA
out=$(OMP_NUM_THREADS=2 timeout 60 "$RUN" "$tmp/early.lua" 2>&1); rc=$?
[ $rc = 0 ] && [ "$(echo "$out" | grep -cE "^(child|parent)"$'\t'"27000000$")" = 2 ] && ok "L11 a fork before the first call computes as its parent does" || no "L11 a fork before the first call computes as its parent does" "$rc $out"

cat > "$tmp/popen.lua" <<'LUA'
local ddp = require "ddp"
ddp.all_reduce(ddp.ones(1000, 1000))
local f = io.popen("echo popen of rank " .. ddp.rank() .. "; (: >&$DDP_STATUS_FD) 2>/dev/null && echo open || echo closed")
local said = f:read "*a"
f:close()
io.write(said)
assert(os.execute "true" == 0)
if ddp.all_reduce(ddp.ones(1)):item() ~= ddp.world_size() then error "the sum is wrong" end
LUA
out=$(OMP_NUM_THREADS=2 timeout 60 "$RUN" -n 2 "$tmp/popen.lua" 2>&1); rc=$?
[ $rc = 0 ] && [[ $out == *"popen of rank 0"* && $out == *"popen of rank 1"* ]] && ok "L11 io.popen and os.execute in a script work" || no "L11 io.popen and os.execute in a script work" "$rc $out"
[ "$(echo "$out" | grep -c "closed")" = 2 ] && ok "L11 a program that a script starts has none of the launcher's pipes" || no "L11 a program that a script starts has none of the launcher's pipes" "$out"
exit $bad
