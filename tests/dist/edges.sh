#!/bin/bash
# edges.sh -- L1 to L9 where launch.sh and train.sh do not look: rendezvous that fails, cgroups, names, what is left behind.
cd "$(dirname "$0")/../.." || exit 2
B=${DDP_BUILD:-$PWD/build}
RUN=$B/ddprun; WHO=$PWD/tests/dist/cases/who.lua
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT DDP_LIB LUA_PATH OMP_NUM_THREADS
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
bad=0
ok() { echo "ok $1"; }
no() { echo "not ok $1: $(echo "$2" | tr '\n' '~' | cut -c1-700)"; bad=1; }
# holds NAME COMMAND...: shows $out when the command fails
holds() { local name=$1; shift; if "$@"; then ok "$name"; else no "$name" "$rc $out"; fi; }
has() { [[ $out == *"$1"* ]]; }
ms() { echo $(($(date +%s%N) / 1000000)); }
gone() { for _ in $(seq 20); do pgrep -f -- "$1" > /dev/null || return 0; sleep 0.1; done; return 1; }
nap() { echo "$((600 + RANDOM % 300)).$$$RANDOM"; }

# ---- L9: ranks that do not make a world ----
# world RANKS SIZES: processes by hand with these ranks and world sizes; their output lies in $out
world() {
  local ranks=$1 sizes=$2 port=$((20000 + RANDOM % 10000)) i=0
  rm -f "$tmp"/hand*
  eval "$("$RUN" --env)"
  for r in $ranks; do
    i=$((i + 1))
    RANK=$r WORLD_SIZE=$(echo "$sizes" | cut -d' ' -f$i) MASTER_PORT=$port DDP_TIMEOUT=3 timeout 30 luajit "$WHO" > "$tmp/hand$i" 2>&1 &
  done
  wait
  unset DDP_LIB LUA_PATH
  out=$(cat "$tmp"/hand*)
}
world "0 1 1" "3 3 3"; holds "L9 a rank that is there twice is named" has "two processes say they are rank 1"
world "0 1" "2 3"; holds "L9 worlds that do not match are named" has "init: rank 1 is in a world of 3, rank 0 in one of 2"
world "0 1" "3 3"; holds "L9 a rank that is missing in a world by hand is named" has "init: missing: rank 2 of 3"
echo 'if os.getenv "RANK" == "1" then io.popen("sleep 30"):read "*a" end print "joins" io.stdout:flush() require("ddp").init()' > "$tmp/late.lua"
: > "$tmp/out"; "$RUN" -n 2 "$tmp/late.lua" > "$tmp/out" 2>&1 < /dev/null & pid=$!
for _ in $(seq 50); do grep -q joins "$tmp/out" && break; sleep 0.1; done
sleep 0.2; begin=$(ms); kill -INT $pid; wait $pid; rc=$?; took=$(($(ms) - begin)); out="$took ms, $(cat "$tmp/out")"
holds "L9 Ctrl-C during rendezvous exits within a second" [ $rc = 130 -a $took -lt 1000 ]
if command -v gcc > /dev/null; then
  echo '#include <stdlib.h>
int getaddrinfo(const char *a, const char *b, const void *c, void *d) { (void)a, (void)b, (void)c, (void)d; abort(); }
int gethostname(char *a, unsigned long b) { (void)a, (void)b; abort(); }' > "$tmp/names.c"
  gcc -shared -fPIC -o "$tmp/names.so" "$tmp/names.c"
  out=$(LD_PRELOAD="$tmp/names.so" timeout 30 "$RUN" -n 2 "$WHO" 2>&1); rc=$?
  holds "L9 one host never resolves a name" [ $rc = 0 ]
else
  echo "skip L9 one host never resolves a name: gcc is missing"
fi

# ---- L3, L7: what a cgroup says, made of files ----
if unshare -Urm true 2> /dev/null; then
  # in_cgroup SCRIPT COMMAND...: the command where /sys/fs/cgroup holds what the script makes there
  in_cgroup() { unshare -Urm bash -c 'mount -t tmpfs none /sys/fs/cgroup && cd /sys/fs/cgroup && eval "$0" && cd / && exec "$@"' "$@"; }
  out=$(in_cgroup 'echo 100000 100000 > cpu.max' "$RUN" -n 1 --exec bash -c 'echo threads $OMP_NUM_THREADS' 2>&1); rc=$?
  holds "L7 a cgroup's quota of one core is one thread" [ "$out" = "threads 1" ]
  out=$(in_cgroup 'echo max 100000 > cpu.max' "$RUN" -n 1 --exec bash -c 'echo threads $OMP_NUM_THREADS' 2>&1); rc=$?
  holds "L7 a cgroup without a quota leaves all cores" [ "$out" = "threads $(nproc)" ]
  out=$(in_cgroup 'mkdir cpu; echo 150000 > cpu/cpu.cfs_quota_us; echo 100000 > cpu/cpu.cfs_period_us' "$RUN" -n 1 --exec bash -c 'echo threads $OMP_NUM_THREADS' 2>&1); rc=$?
  if grep -qE ':([a-z,]*,)?cpu(,[a-z,]*)?:' /proc/self/cgroup; then
    holds "L7 so does one of version 1, of one core and a half" [ "$out" = "threads 1" ]
  else
    echo "skip L7 a quota of version 1: no such cgroups here"
  fi
  RISES='if [ $RANK = 1 ]; then sleep 0.2; printf "oom 1\noom_kill 3\n" > /sys/fs/cgroup/memory.events; kill -KILL $$; fi; exec sleep 100'
  out=$(in_cgroup 'printf "oom 0\noom_kill 1\n" > memory.events' "$RUN" -n 2 --exec bash -c "$RISES" 2>&1); rc=$?
  holds "L3 SIGKILL is told with the cgroup's oom_kill count when it rose" has "out of memory: the cgroup's oom_kill count rose by 2, from 1 to 3"
  out=$(in_cgroup 'printf "oom 0\noom_kill 1\n" > memory.events' "$RUN" -n 2 --exec bash -c '[ $RANK = 1 ] && kill -KILL $$; exec sleep 100' 2>&1); rc=$?
  holds "L3 and without it when it did not" [ "$(echo "$out" | grep -c 'SIGKILL')$(echo "$out" | grep -c 'out of memory')" = 10 ]
else
  echo "skip L3 L7 what a cgroup says: no mount namespaces here"
fi

# ---- L4: the default grace ----
begin=$(ms); out=$(timeout 30 "$RUN" -n 2 --exec bash -c '[ $RANK = 1 ] && exit 4; trap "" TERM; while :; do sleep 0.1; done' 2>&1); rc=$?; took=$(($(ms) - begin))
holds "L4 SIGKILL comes after 5 s where nothing else is asked for" [ $rc = 4 -a $took -ge 5000 -a $took -lt 7000 ]

# ---- L5: what is left behind ----
N=$(nap); out=$(timeout 30 "$RUN" -n 2 --exec bash -c "(setsid sleep 0.1; exec sleep $N) > /dev/null 2>&1 & exit 0" 2>&1); rc=$?
holds "L5 a job that ends takes what its ranks left running" eval "[ $rc = 0 ] && gone 'sleep $N'"
up() { for _ in $(seq 50); do [ "$(pgrep -fc "sleep $N")" -ge 2 ] && return 0; sleep 0.1; done; return 1; }
# job_of: a job of two sleeping ranks; its pid in $pid, its guardian's in $guardian
job_of() {
  N=$(nap)
  bash -c 'exec "$@"' _ "$RUN" -n 2 --exec sleep "$N" > /dev/null 2>&1 < /dev/null & pid=$!
  up || no "L5 a job starts" ""
  guardian=$(pgrep -P $pid -f -- --guardian)
}
job_of; kill $pid; wait $pid; out="guardian $guardian"
holds "L5 no guardian is left after a job" eval "[ -n '$guardian' ] && sleep 0.3 && ! grep -qs guardian /proc/$guardian/cmdline"
job_of; kill -KILL "$guardian"; disown $pid; kill -KILL $pid; out="sleep $N is there"
holds "L5 the ranks go with ddprun though the guardian went before" gone "sleep $N"
job_of; kill -KILL "$guardian"; sleep 0.2; up; rc=$?; kill $pid; wait $pid 2> /dev/null; out=""
holds "L5 a job goes on without its guardian" [ $rc = 0 ]

# ---- L6: whose output goes where ----
out=$(cd "$tmp" && timeout 30 "$RUN" -n 2 --show 0 --log-dir log --exec bash -c 'echo err $RANK >&2; sleep 0.1; echo out $RANK; printf tail' 2>&1); rc=$?
holds "L6 --show 0 prints rank 0 alone" [ "$(echo "$out" | grep -v thread | sort | tr '\n' ' ')" = "[r0] err 0 [r0] out 0 [r0] tail " ]
out=$(sort "$tmp/log/rank-1.out" | tr '\n' ' '); holds "L6 --log-dir has both streams of a rank that is not shown, to the last byte" [ "$out" = "err 1 out 1 tail " -o "$out" = "err 1 out 1 tail" ]
out=$(timeout 30 "$RUN" -n 2 --show 0 --exec bash -c '[ $RANK = 1 ] && { echo why >&2; exit 9; }; exec sleep 100' 2>&1); rc=$?
holds "L6 L3 a rank that is not shown is in the verdict with its stderr" eval '[ $rc = 9 ] && has "rank 1 failed first" && has "| why"'
out=$(timeout 30 "$RUN" -n 2 --exec bash -c 'printf "a\r\nb\0c\n\n"' 2> /dev/null | od -An -c | tr -s ' \n' ' '); rc=$?
holds "L6 bytes that are no text, and empty lines, go through" eval "has 'a \\r \\n' && has 'b \\0 c \\n' && has '[ r 1 ] \\n'"
exit $bad
