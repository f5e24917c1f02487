#!/bin/bash
# doctor.sh -- ddprun doctor: what it says here, and where something is broken on purpose.
cd "$(dirname "$0")/../.." || exit 2
B=${DDP_BUILD:-$PWD/build}
RUN=$B/ddprun
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT DDP_LIB LUA_PATH DDP_IFACE
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
bad=0
ok() { echo "ok $1"; }
no() { echo "not ok $1: $(echo "$2" | tr '\n' '~' | cut -c1-1500)"; bad=1; }
# says NAME STATUS PATTERN...: the last run ended so, and each extended regular expression is found in a line of it
says() {
  local name=$1 want=$2 p; shift 2
  [ $rc = "$want" ] || { no "$name" "status $rc, expected $want: $out"; return; }
  for p in "$@"; do echo "$out" | grep -qE -- "$p" || { no "$name" "no \"$p\" in: $out"; return; }; done
  ok "$name"
}
doctor() { out=$(timeout 60 "$@" "$RUN" doctor 2>&1); rc=$?; }

best=99999
for _ in 1 2 3; do begin=$(date +%s%N); doctor env; took=$(( ($(date +%s%N) - begin) / 1000000 )); [ $took -lt $best ] && best=$took; done
says "doctor names the build and what can be loaded" 0 '^ddp +0\.1\.0.*LuaJIT' '^oneDNN' '^libraries .*gloo.*Open MPI.*MPICH|^libraries ' '^GPU ' '^NCCL '
says "doctor names the processor, its cores and their quota" 0 '^processor +[A-Za-z]' '^cores +[0-9]+ \([0-9,-]+\); (no quota|the cgroup grants)' '^instructions .*thread'
says "doctor names the memory, its limit and huge pages" 0 '^memory +[0-9.]+ GB free, (no limit|limit of the cgroup [0-9.]+ GB).*huge pages: [a-z]+'
says "doctor tries what ranks share memory through" 0 '^shared memory *memfd works, other ranks may open it; /dev/shm works, [0-9.]+ GB free'
says "doctor reads the clock" 0 '^clock +[a-z_-]+, [0-9]+ ns a reading; 20[0-9]{2}-'
says "doctor names the interfaces and tries the loopback" 0 '^network .*lo 127\.0\.0\.1' '^loopback +works'
says "doctor computes a gradient" 0 '^a gradient +works' '^f32 products +[0-9]+ GFLOP/s'
[ $best -lt 2000 ] && ok "doctor takes under 2 s" || no "doctor takes under 2 s" "$best ms"
cores=$(taskset -c 0 "$RUN" doctor 2>&1 | grep '^cores'); [[ $cores == "cores         1 (0);"* ]] && ok "doctor counts the cores that it may use" || no "doctor counts the cores that it may use" "$cores"

doctor env DDP_IFACE=nosuch0; says "an interface that is not there is broken" 1 '^broken +DDP_IFACE is "nosuch0", no interface'
doctor env DDP_IFACE=lo; says "one that is there is taken" 0 'to other hosts: lo \(DDP_IFACE\)'
doctor env MASTER_ADDR=127.0.0.1; says "MASTER_ADDR picks its interface" 0 'to other hosts: lo \(MASTER_ADDR\)'
doctor env RANK=1; says "doctor needs no job that is whole" 0 '^a gradient +works'

if unshare -Urn true 2>/dev/null; then
  doctor unshare -Urn; says "without a loopback doctor says how to raise it, status 1" 1 '^loopback .*127\.0\.0\.1 fails' '^broken .*ip link set lo up' '^network +no interface is up'
else
  echo "skip without a loopback doctor says how to raise it: no network namespaces here"
fi
if unshare -Urm true 2>/dev/null; then
  sed 's/ sse4_2 / /; s/ avx[0-9a-z_]*//g' /proc/cpuinfo > "$tmp/cpuinfo"
  doctor unshare -Urm sh -c "mount --bind '$tmp/cpuinfo' /proc/cpuinfo; exec \"\$@\"" sh; says "a processor without SSE 4.2 is broken, status 1" 1 '^broken .*SSE 4\.2'
  doctor unshare -Urm sh -c 'cd /sys/fs && mount -t tmpfs none cgroup && echo 50000 100000 > cgroup/cpu.max && echo 107374182 > cgroup/memory.max && cd "$0" && exec "$@"' "$PWD"
  says "a cgroup's limits are told, with what they cost" 0 '^cores .*grants 0\.5 of them' '^memory .*limit of the cgroup 0\.1 GB' '^slow .*grants 0\.5 cores' '^slow .*less than half a GB'
  doctor unshare -Urm sh -c 'mount -t tmpfs -o ro none /dev/shm; exec "$@"' sh; says "a /dev/shm that takes nothing is told; memfd is enough" 0 '/dev/shm fails: Read-only'
else
  echo "skip a processor without SSE 4.2: no mount namespaces here"
fi
mkdir -p "$tmp/broken/scripts" "$tmp/broken/build"
cp -r lua "$tmp/broken/"; cp scripts/doctor.lua "$tmp/broken/scripts/"; cp "$RUN" "$B/libddp_host.so" "$tmp/broken/build/"
out=$(LD_LIBRARY_PATH=$B timeout 60 "$tmp/broken/build/ddprun" doctor 2>&1); rc=$?
says "a library that is not there is broken, and the rest is looked at all the same" 1 '^broken .*libddp' '^loopback +works' '^shared memory'
exit $bad
