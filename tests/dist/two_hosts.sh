#!/bin/bash
# two_hosts.sh -- ranks started by hand on two hosts made of network namespaces on this machine, and a cable between them that can be cut. Needs root.
cd "$(dirname "$0")/../.." || exit 2
B=${DDP_BUILD:-$PWD/build}
RUN=$B/ddprun; CASES=tests/dist/cases
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT DDP_LIB LUA_PATH DDP_ENGINE DDP_MPI DDP_HIER
[ -e "$B/libddp_gloo.so" ] || { echo "skip two hosts: libgloo-dev was not there when this was built"; exit 0; }
a=ddp$$a b=ddp$$b bad=0 # names of hosts and, with a v, of their ends of the cable
tmp=$(mktemp -d)
tidy() { rm -rf "$tmp"; ip netns del $a; ip netns del $b; }
trap 'tidy 2>/dev/null' EXIT
if ! { ip netns add $a && ip netns add $b && ip link add v$a netns $a type veth peer name v$b netns $b &&
       ip -n $a addr add 10.99.0.1/24 dev v$a && ip -n $b addr add 10.99.0.2/24 dev v$b &&
       ip -n $a link set lo up && ip -n $b link set lo up && ip -n $a link set v$a up && ip -n $b link set v$b up; } 2>/dev/null; then
  echo "skip two hosts: network namespaces cannot be made here"
  exit 0
fi
ok() { echo "ok $1"; }
no() { echo "not ok $1: $(echo "$2" | tr '\n' '~' | cut -c1-500)"; bad=1; }

# start ENGINE N COMMAND...: N ranks on each host; their output goes to $tmp/rank*
start() {
  local engine=$1 n=$2 rank=0 host local; shift 2
  rm -f "$tmp"/*
  for host in $a $b; do
    for ((local = 0; local < n; local++)); do
      (eval "$("$RUN" --env)"
       [ "$engine" = auto ] || export DDP_ENGINE=$engine
       [ $host = $a ] && export GROUP_RANK=0 || export GROUP_RANK=1
       export RANK=$rank WORLD_SIZE=$((2 * n)) LOCAL_RANK=$local LOCAL_WORLD_SIZE=$n MASTER_ADDR=10.99.0.1 MASTER_PORT=23456
       timeout 60 ip netns exec $host luajit "$@" > "$tmp/rank$rank" 2>&1; echo $? > "$tmp/status$rank") &
      rank=$((rank + 1))
    done
  done
}
fine() { [ -z "$(cat "$tmp"/status* | tr -d '0\n')" ] && grep -q fine "$tmp/rank0" && ok "$1" || no "$1" "$(cat "$tmp"/*)"; }

for engine in gloo hier auto; do
  start $engine 2 $CASES/collectives.lua; wait; fine "C13 $engine: collectives on two hosts of two ranks"
done
start hier 2 $CASES/reducer.lua; wait; fine "C12 C7 C6 P3 hier: two hosts of two ranks train as one does"
out=$(DDP_IFACE=nosuch0 start gloo 1 $CASES/collectives.lua; wait; cat "$tmp"/rank*)
case $out in *"gloo cannot connect the ranks from nosuch0"*) ok "an interface that is not there is told" ;; *) no "an interface that is not there is told" "$out" ;; esac

export DDP_TIMEOUT=3
for engine in gloo hier; do
  n=1; [ $engine = hier ] && n=2
  start $engine $n $CASES/fault.lua loop
  for _ in $(seq 100); do grep -q begun "$tmp/rank0" 2>/dev/null && break; sleep 0.1; done
  ip -n $a link set v$a down; wait; ip -n $a link set v$a up
  told=0
  for ((r = 0; r < 2 * n; r++)); do grep -qE "after (3|[0-9.]+ s: peer: ).*rank" "$tmp/rank$r" && told=$((told + 1)); done
  [ $told = $((2 * n)) ] && ok "C1 $engine: a cut cable ends all ranks between T and T + 1 s" || no "C1 $engine: a cut cable ends all ranks between T and T + 1 s" "$(cat "$tmp"/rank*)"
done
exit $bad
