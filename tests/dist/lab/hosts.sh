#!/bin/bash
# hosts.sh up FOLDER | exec FOLDER HOST COMMAND... | wire FOLDER WORDS... | down FOLDER -- two hosts of network namespaces (README.md).
# FOLDER keeps what belongs to this lab; HOST is 0 or 1. `up` ends with status 77 where the machine cannot do it, after saying why.
here=$(cd "$(dirname "$0")" && pwd)
what=$1 S=$2; shift 2
name() { echo "ddp$(basename "$S" | tr -cd 'a-zA-Z0-9' | tail -c 6)h$1"; }
cannot() { echo "$1"; exit 77; }
case $what in
up)
  mkdir -p "$S" || exit 1
  [ "$(id -u)" = 0 ] || cannot "needs root"
  command -v ip >/dev/null || cannot "needs ip (iproute2)"
  command -v unshare >/dev/null && command -v nsenter >/dev/null || cannot "needs unshare and nsenter"
  [ -c /dev/net/tun ] || cannot "needs /dev/net/tun"
  for i in 0 1; do ip netns add "$(name $i)" 2>"$S/why" || cannot "ip netns: $(cat "$S/why")"; done
  gcc -std=c11 -D_GNU_SOURCE -O2 -Wall -Wextra -o "$S/wire" "$here/wire.c" || exit 1
  echo "cut=0" > "$S/control"
  "$S/wire" "$(name 0)" 10.77.0.1 "$(name 1)" 10.77.0.2 "$S/control" >"$S/wire.out" 2>&1 & echo $! >"$S/wire.pid"
  for _ in $(seq 50); do grep -q up "$S/wire.out" && break; sleep 0.1; done
  grep -q up "$S/wire.out" || { cat "$S/wire.out"; exit 77; }
  for i in 0 1; do # a process in each that holds its namespaces; its pid is the one outside
    ip netns exec "$(name $i)" unshare -muip -f --mount-proc sh -c "hostname host$i; mount -t tmpfs tmpfs /dev/shm; exec sleep 100000" >/dev/null 2>&1 </dev/null & echo $! >"$S/outer$i"
    for _ in $(seq 50); do p=$(pgrep -P "$(cat "$S/outer$i")" -x sleep) && break; sleep 0.1; done
    echo "$p" >"$S/pid$i"
    [ -n "$p" ] || cannot "no namespaces of processes, names and mounts"
  done ;;
exec) host=$1; shift; exec nsenter -t "$(cat "$S/pid$host")" -n -u -i -m -p --wd="$PWD" "$@" ;;
wire) echo "$*" > "$S/control.new" && mv "$S/control.new" "$S/control"; sleep 0.1 ;;
down)
  for f in pid0 pid1 outer0 outer1 wire.pid; do [ -s "$S/$f" ] && kill -KILL "$(cat "$S/$f")" 2>/dev/null; done
  sleep 0.2
  for i in 0 1; do ip netns del "$(name $i)" 2>/dev/null; done
  true ;;
*) echo "hosts.sh up|exec|wire|down FOLDER ..."; exit 2 ;;
esac
