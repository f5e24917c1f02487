#!/bin/bash
# signals.sh -- SIGTERM and SIGINT as what a loop asks about (ddp.stop_requested).
cd "$(dirname "$0")/../.." || exit 2
B=${DDP_BUILD:-$PWD/build}
RUN=$B/ddprun; STOP=tests/dist/cases/stop.lua
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT DDP_LIB LUA_PATH
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
bad=0
ok() { echo "ok $1"; }
no() { echo "not ok $1: $(echo "$2" | tr '\n' '~' | cut -c1-600)"; bad=1; }
# start COMMAND...: in the background; returns when `ready` ranks have said so
start() {
  rm -f "$tmp"/rank-*; : > "$tmp/out"
  timeout 60 "$@" > "$tmp/out" 2>&1 < /dev/null & pid=$!
  for _ in $(seq 100); do [ "$(grep -c "$ready" "$tmp/out")" -ge "$ranks" ] && break; sleep 0.1; done
  child=$(pgrep -P "$pid") # below timeout
}
ends() { wait "$pid"; rc=$?; out=$(cat "$tmp/out"); }
ready="ready, pid"; ranks=2

start "$RUN" -n 2 $STOP "$tmp"; kill -TERM "$child"; ends
saved=$(cat "$tmp"/rank-* 2>/dev/null)
[ $rc = 143 ] && [[ $out == *"stopped by SIGTERM"* ]] && ok "a job that is sent SIGTERM ends as stopped, 143" || no "a job that is sent SIGTERM ends as stopped, 143" "$rc $out"
[ "$(echo "$saved" | wc -l)" = 2 ] && [ "$(echo "$saved" | sort -u | wc -l)" = 1 ] && ok "every rank saves and leaves, at the same step" || no "every rank saves and leaves, at the same step" "$saved $out"
[[ $out != *"had to be killed"* ]] && ok "none of them is killed" || no "none of them is killed" "$out"

start "$RUN" -n 2 $STOP "$tmp"; kill -INT "$child"; ends
[ $rc = 130 ] && [ "$(cat "$tmp"/rank-* | sort | uniq -c | awk '{ print $1 }')" = 2 ] && ok "SIGINT does the same" || no "SIGINT does the same" "$rc $out"

start "$RUN" -n 2 $STOP "$tmp"; kill -TERM "$(sed -n 's/.*rank 1 ready, pid //p' "$tmp/out")"; ends
[ $rc = 0 ] && [ "$(cat "$tmp"/rank-* | sort | uniq -c | awk '{ print $1 }')" = 2 ] && ok "a signal to one rank stops all at the same step" || no "a signal to one rank stops all at the same step" "$rc $out $(cat "$tmp"/rank-*)"

begin=$(date +%s%N)
start "$RUN" -n 2 --grace 30 $STOP "$tmp" deaf; kill -INT "$child"; sleep 0.4; kill -INT "$child"; ends
[ $rc = 130 ] && [ $(( ($(date +%s%N) - begin) / 1000000 )) -lt 15000 ] && ok "L4 a second SIGINT still kills" || no "L4 a second SIGINT still kills" "$rc $out"

start "$RUN" -n 2 --grace 1 $STOP "$tmp" deaf; kill -TERM "$child"; ends
[ $rc = 143 ] && [[ $out == *"had to be killed"* ]] && ok "L4 who asks and goes on is killed after the grace" || no "L4 who asks and goes on is killed after the grace" "$rc $out"

ranks=1
start "$RUN" $STOP "$tmp"; kill -INT "$child"; ends
[ $rc = 130 ] && [ -s "$tmp/rank-0" ] && ok "one rank alone leaves by SIGINT" || no "one rank alone leaves by SIGINT" "$rc $out"
eval "$("$RUN" --env)"
start luajit $STOP "$tmp"; kill -TERM "$child"; ends
[ $rc = 0 ] && [ -s "$tmp/rank-0" ] && ok "a plain luajit leaves by SIGTERM" || no "a plain luajit leaves by SIGTERM" "$rc $out"
start luajit $STOP "$tmp" deaf; kill -TERM "$child"; sleep 0.2; kill -TERM "$child"; ends
[ $rc = 143 ] && ok "the second SIGTERM ends the process" || no "the second SIGTERM ends the process" "$rc $out"
start luajit $STOP "$tmp"; kill -INT "$child"; ends
[[ $out == *"interrupted!"* ]] && ok "a program's own handler, luajit's of SIGINT, stays" || no "a program's own handler, luajit's of SIGINT, stays" "$rc $out"
echo 'local ddp = require "ddp" ddp.ones(1) print "ready, pid" io.stdout:flush() os.execute "sleep 5"' > "$tmp/never.lua"
start "$RUN" "$tmp/never.lua"; kill -TERM "$child"; ends
[ $rc = 143 ] && ok "who never asks ends by SIGTERM as before" || no "who never asks ends by SIGTERM as before" "$rc $out"
unset DDP_LIB LUA_PATH

ready="step 10 of"; start "$RUN" -n 2 --grace 20 scripts/train_resnet.lua --steps 100000; kill -TERM "$child"; ends
[ $rc = 143 ] && [[ $out == *"stopped after step "*" of 100000"* && $out != *"test accuracy"* && $out != *killed* ]] && ok "train_resnet.lua leaves its loop and does not evaluate" || no "train_resnet.lua leaves its loop and does not evaluate" "$rc $out"
exit $bad
