#!/bin/bash
# link.sh BUILD [MBIT] [ARGS] -- a training step of two hosts over a line of so many Mbit/s (2000), one rank each, beside what is slower:
# its computing, or reducing as many bytes over that line alone. The hosts are network namespaces (tests/dist/lab); needs root.
cd "$(dirname "$0")/../.." || exit 2
RUN=$PWD/${1:-build}/ddprun rate=${2:-2000}; shift 2
lab=$(mktemp -d); trap 'tests/dist/lab/hosts.sh down "$lab"; rm -rf "$lab"' EXIT
why=$(tests/dist/lab/hosts.sh up "$lab" 2>&1) || { echo "no two hosts here: $why"; exit 1; }
tests/dist/lab/hosts.sh wire "$lab" rate="$rate"
port=$((11000 + RANDOM % 18000))
for i in 1 0; do
  OMP_NUM_THREADS=1 tests/dist/lab/hosts.sh exec "$lab" $i "$RUN" --nnodes 2 --node-rank $i --master-addr 10.77.0.1 --master-port $port --engine gloo tests/bench/comm.lua "$@" > "$lab/out$i" 2>&1 &
done
wait
line=$(grep "images/s, exposed" "$lab/out0") || { cat "$lab"/out?; exit 1; }
echo "$line" | awk -v rate="$rate" '{
  for (i = 1; i <= NF; i++) { if ($i == "communication") exposed = $(i + 1); if ($i == "step" && $(i + 1) == "of") step = $(i + 2); if ($i == "MB") cold = $(i + 1) }
  compute = step - exposed; slower = compute > cold ? compute : cold
  printf "two hosts, %s Mbit/s: a step %.0f ms, of which it waits %.0f for the other; computing %.0f, reducing alone %.0f: %.2f of the slower\n", rate, step, exposed, compute, cold, step / slower }'
