#!/bin/bash
# launch.sh [build folder] -- ddprun with shell commands for ranks: nothing here needs libddp or Lua.
# Each case prints "ok NAME", "not ok NAME: why" or "skip NAME: why".
BUILD=$(cd "${1:-build}" 2>/dev/null && pwd) || { echo "not ok launch: no folder ${1:-build}"; exit 1; }
RUN=$BUILD/ddprun
DIR=$(mktemp -d)
FAILED=0
trap 'rm -rf "$DIR"' EXIT
cd "$DIR" || exit 1
unset OMP_NUM_THREADS RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
for v in $(compgen -e DDP_); do unset "$v"; done
export LC_ALL=C

ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; FAILED=1; }
# check NAME COMMAND...: the case holds when the command succeeds.
check() { local name=$1; shift; if "$@"; then ok "$name"; else bad "$name" "failed: $*, rc=$rc, stderr: $(tail -c 300 err | tr '\n' '~')"; fi; }
# job ARGS...: runs ddprun; sets rc and ms; output lies in files out and err.
job() { local t=${EPOCHREALTIME/./}; timeout -k 1 60 "$RUN" "$@" >out 2>err </dev/null; rc=$?; ms=$(((${EPOCHREALTIME/./} - t) / 1000)); }
# fails STATUS MILLISECONDS TEXT: the last job ended so, in time, and said so.
fails() { [ "$rc" = "$1" ] && [ "$ms" -lt "$2" ] && grep -qF -- "$3" err; }
# gone PATTERN TENTHS: no process with PATTERN in its command line after that time at most.
gone() { for _ in $(seq "$2"); do pgrep -f -- "$1" >/dev/null || return 0; sleep 0.1; done; ! pgrep -f -- "$1" >/dev/null; }
# a number for `sleep` that nobody else on this machine uses
nap() { echo "$((600 + RANDOM % 300)).$$$RANDOM"; }

# ---- L1 ----
eight() {
    local pids=() i held
    command -v perl >/dev/null && { perl -MIO::Socket::INET -e 'my $s = IO::Socket::INET->new(Listen => 1, LocalAddr => "127.0.0.1:29500"); sleep 60' & held=$!; }
    for i in 1 2 3 4 5 6 7 8; do "$RUN" -n 2 --exec bash -c 'echo $MASTER_PORT; sleep 0.3' >"out.$i" 2>err & pids+=($!); done
    rc=0
    for i in "${pids[@]}"; do wait "$i" || rc=$?; done
    [ -n "$held" ] && kill "$held" && wait "$held" 2>/dev/null
    [ "$rc" = 0 ] && [ "$(cat out.? | sed 's/.*] //' | sort | uniq -c | awk '$1 == 2' | wc -l)" = 8 ]
}
check "L1 eight 2-rank jobs at once have eight ports" eight

if command -v perl >/dev/null; then # as torch's rank 0 does: it serves at MASTER_PORT itself
    job -n 2 --exec perl -MIO::Socket::INET -e '$a = "127.0.0.1:$ENV{MASTER_PORT}";
        if ($ENV{RANK} == 0) { $s = IO::Socket::INET->new(Listen => 1, LocalAddr => $a, ReuseAddr => 1) or die "cannot serve at $a: $!\n"; print {$s->accept} "hello\n" }
        else { for (1 .. 100) { last if $s = IO::Socket::INET->new($a); select undef, undef, undef, .05 } print <$s> }'
    check "L1 a program can serve at its MASTER_PORT" test "$rc$(cat out)" = '0[r1] hello'
else echo "skip L1 a program can serve at its MASTER_PORT: perl is missing"; fi

# ---- L2, L3 ----
DIE='if [ $RANK = 1 ]; then sleep 0.2; echo "last words" >&2; DEED; fi; exec sleep 100'
dies() { job -n 2 --exec bash -c "${DIE/DEED/"$1"}"; } # quoted: an & in it is no pattern
dies 'exit 3'; check "L2 a rank that exits 3 ends the job" fails 3 2000 'rank 1 failed first'
check "L3 the exit code is named" grep -q 'exit code 3' err
check "L3 the tail of the rank's stderr is shown" grep -q '| last words' err
dies 'kill -SEGV $$'; check "L2 a rank that segfaults ends the job" fails 139 2000 'rank 1 failed first'
check "L3 the signal is named" grep -q 'SIGSEGV' err
dies 'kill -ABRT $$'; check "L2 a rank that aborts ends the job" fails 134 2000 'SIGABRT'
dies 'kill -KILL $$'; check "L2 a rank killed by SIGKILL ends the job" fails 137 2000 'SIGKILL'
dies 'printf "error t.lua:7: boom \\\\\\\\ x\\\\nstack traceback:\\\\n    t.lua:7: in main\\n" >&$DDP_STATUS_FD; exit 1'
check "L3 a Lua error is shown with file and line" fails 1 2000 't.lua:7: boom \ x'
check "L3 a Lua error is shown with its traceback" grep -q 't.lua:7: in main' err
job -n 2 --grace 1 --exec bash -c 'if [ $RANK = 1 ]; then sleep 0.5; exit 5; fi; trap "" TERM; while :; do sleep 0.2; done'
check "L2 a rank that ignores SIGTERM is killed after the grace" fails 5 3000 'had to be killed: rank 0'
job -n 2 --exec bash -c 'if [ $RANK = 1 ]; then sleep 0.2; kill -STOP $$; fi; sleep 0.5; exit 6'
check "L2 a stopped rank goes too" fails 6 2500 'rank 0 failed first'
job -n 2 --exec bash -c 'if [ $RANK = 1 ]; then sleep 0.2; printf "error a.lua:1: cause\n" >&$DDP_STATUS_FD; sleep 0.05; exit 1; fi
    sleep 0.18; printf "error b.lua:2: peer: rank 1 is gone\n" >&$DDP_STATUS_FD; exit 7'
check "L3 a cause wins over its consequence that arrived before it" fails 1 2000 'a.lua:1: cause'
job -n 2 --exec bash -c 'printf "joined\n" >&$DDP_STATUS_FD; [ $RANK = 1 ] || exec sleep 100'
check "L2 a rank that exits 0 in the midst of the job fails it" fails 1 2000 'rank 1 left (exit 0) while rank 0 waits for it'
job -n 2 --exec bash -c 'printf "joined\n" >&$DDP_STATUS_FD; [ $RANK = 1 ] && { printf "finished\n" >&$DDP_STATUS_FD; exit 0; }
    sleep 0.3; printf "error peer: rank 1 left\n" >&$DDP_STATUS_FD; exit 1'
check "L2 a rank that finished while another waited is named" fails 1 2000 'rank 1 left (exit 0) while rank 0 waits for it'
job -n 2 --exec bash -c 'printf "joined\nfinished\n" >&$DDP_STATUS_FD; [ $RANK = 1 ] || sleep 0.8'
check "L2 a rank that finished may leave before the others" test "$rc" = 0
job -n 2 --exec bash -c 'printf "joined\n" >&$DDP_STATUS_FD'
check "L2 ranks that never finish may leave together" test "$rc" = 0
job -n 2 --exec bash -c '[ $RANK = 1 ] || sleep 0.8'
check "C1 a script that never joins is legal" test "$rc" = 0
# ---- L4 ----
# signalled SIGNAL TIMES SCRIPT ARGS...: starts a job in the background, signals it when both ranks are up
signalled() {
    local sig=$1 times=$2 t; shift 2; : >out
    "$RUN" -n 2 "$@" >out 2>err </dev/null & local pid=$!
    for _ in $(seq 50); do [ "$(grep -c ready out)" = 2 ] && break; sleep 0.1; done
    t=${EPOCHREALTIME/./}
    for _ in $(seq "$times"); do kill "-$sig" "$pid"; sleep 0.3; done
    wait "$pid"; rc=$?; ms=$(((${EPOCHREALTIME/./} - t) / 1000))
}
signalled INT 1 --exec bash -c 'trap "echo got INT; exit 0" INT; echo ready; while :; do sleep 0.05; done'
check "L4 SIGINT is forwarded, status 130" fails 130 1500 'stopped by SIGINT'
check "L4 every rank sees SIGINT" test "$(grep -c 'got INT' out)" = 2
signalled TERM 1 --exec bash -c 'trap "echo got TERM; exit 0" TERM; echo ready; while :; do sleep 0.05; done'
check "L4 SIGTERM is forwarded, status 143" fails 143 1500 'stopped by SIGTERM'
N=$(nap); signalled TERM 1 --grace 1 --exec bash -c "trap '' TERM; echo ready; (trap '' TERM; sleep $N & sleep $N; sleep $N) & while :; do sleep 0.1; done"
check "L4 after the grace SIGKILL" fails 143 2500 'had to be killed'
check "L4 grandchildren that ignore SIGTERM are gone" gone "sleep $N" 5
signalled INT 2 --grace 30 --exec bash -c 'trap "" INT TERM; echo ready; while :; do sleep 0.1; done'
check "L4 a second SIGINT kills at once" fails 130 2000 'stopped by SIGINT'

# ---- L5 ----
lifeline() { # runs "$@" around ddprun; the pid of ddprun lies in file pid
    N=$(nap); rm -f pid; : >out
    "$@" bash -c 'echo $BASHPID >pid; exec "$0" -n 2 --exec bash -c "trap \"\" TERM; sleep '"$N"' & echo ready; sleep '"$N"'; sleep '"$N"'"' "$RUN" >out 2>err </dev/null &
    local pid=$!
    for _ in $(seq 50); do [ "$(grep -c ready out)" = 2 ] && break; sleep 0.1; done
    [ "$(pgrep -fc "sleep $N")" -ge 4 ] || return 1
    kill -KILL "$(cat pid)"
    disown "$pid"
    gone "sleep $N" 10
}
check "L5 kill -9 on ddprun takes ranks and grandchildren with it" lifeline env
if command -v perl >/dev/null && [ "$(uname -m)" = x86_64 ]; then # 157 is prctl, 36 PR_SET_CHILD_SUBREAPER
    check "L5 the same under a sub-reaper" lifeline perl -e 'syscall(157, 36, 1, 0, 0, 0); system @ARGV' --
else
    echo "skip L5 the same under a sub-reaper: perl is missing"
fi
if unshare -Urpf --mount-proc true 2>/dev/null; then
    pid_one() {
        N=$(nap); : >out
        unshare -Urpf --kill-child --mount-proc "$RUN" -n 2 --exec bash -c "sleep $N & echo ready; sleep $N; sleep $N" >out 2>err </dev/null & local pid=$!
        for _ in $(seq 50); do [ "$(grep -c ready out)" = 2 ] && break; sleep 0.1; done
        [ "$(pgrep -fc "sleep $N")" -ge 4 ] || return 1
        [ "$(pgrep -fc "sleep $N")" -ge 4 ] || return 1
        pkill -KILL -P "$pid"; disown "$pid" # unshare's one child: our PID 1
        gone "sleep $N" 10
    }
    check "L5 the same as PID 1" pid_one
else
    echo "skip L5 the same as PID 1: no PID namespaces here"
fi

# ---- L6 ----
job -n 2 --exec bash -c 'for i in $(seq 5); do echo "line $i"; echo "e $i" >&2; done; printf "no end"'
check "L6 lines have a prefix and their order" test "$(grep '^\[r1\] line' out | tr -d '\n')" = '[r1] line 1[r1] line 2[r1] line 3[r1] line 4[r1] line 5'
check "L6 stderr stays stderr" test "$(grep -c '^\[r0\] e ' err)" = 5
check "L6 a partial last line is ended" test "$(grep -cx '\[r[01]\] no end' out)" = 2
if command -v perl >/dev/null; then
    job -n 2 --exec perl -e '$s = join "", map { "row $_ of rank $ENV{RANK}\n" } 1 .. 10000; syswrite STDOUT, $s, 3, 3 * $_ for 0 .. length($s) / 3'
    three() { for r in 0 1; do seq 10000 | sed "s/.*/[r$r] row & of rank $r/" | cmp -s - <(grep "^\[r$r\]" out) || return 1; done; [ "$(wc -l <out)" = 20000 ]; }
    check "L6 10,000 lines written three bytes at a time arrive intact" three
    job -n 2 --exec perl -e 'print $ENV{RANK} x 1000000, "\n"'
    check "L6 a line of 1 MB arrives whole" test "$(awk '{ print substr($0, 1, 5), length($0) }' out | sort | tr '\n' ' ')" = '[r0]  1000005 [r1]  1000005 '
else
    echo "skip L6 10,000 lines written three bytes at a time arrive intact: perl is missing"
    echo "skip L6 a line of 1 MB arrives whole: perl is missing"
fi
job -n 3 --show 0,2 --log-dir logs/here --exec bash -c 'echo from $RANK'
check "L6 --show picks ranks" test "$(sort out | tr '\n' ' ')" = '[r0] from 0 [r2] from 2 '
check "L6 --log-dir has a file a rank" test "$(cat logs/here/rank-{0,1,2}.out | tr '\n' ' ')" = 'from 0 from 1 from 2 '
job --exec bash -c 'echo plain; echo eplain >&2'
check "L6 with one rank nothing is prefixed or added" test "$(cat out err | tr '\n' ' ')" = 'plain eplain '
job --timestamps --exec echo hello
check "L6 --timestamps puts the time before a line" grep -qE '^[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3} hello$' out
job -n 2 --exec bash -c 'sleep 100 & echo $RANK'
check "L6 a grandchild that holds the pipes does not hold the job" test "$rc" = 0 -a "$ms" -lt 2000

"$RUN" -n 2 --exec yes 2>err | head -1 >out; rc=${PIPESTATUS[0]}
check "L6 a reader that leaves ends the job" test "$rc" = 141
stuck() { # ddprun's output is a pipe that nobody reads
    local pid t; mkfifo fifo; exec 8<>fifo
    "$RUN" -n 2 --exec yes >fifo 2>err </dev/null & pid=$!
    sleep 0.5; t=${EPOCHREALTIME/./}; kill -INT $pid; wait $pid; rc=$?; exec 8>&-
    [ "$rc" = 130 ] && [ $(((${EPOCHREALTIME/./} - t) / 1000)) -lt 3500 ]
}
check "L4 SIGINT works while nobody reads our output" stuck

# ---- L7, L8 ----
job -n 2 --exec bash -c 'echo $OMP_NUM_THREADS'
cores=$(nproc); want=$((cores / 2 > 0 ? cores / 2 : 1))
[ -r /sys/fs/cgroup/cpu.max ] && [ "$(cut -d' ' -f1 /sys/fs/cgroup/cpu.max)" != max ] && want=$(sed 's/.* //' out | head -1)
check "L7 each rank gets its share of the cores" test "$(sort -u out | sed 's/.* //' | tr '\n' ' ')" = "$want $want "
check "L7 the banner says threads once" test "$(grep -c 'thread' err)" = 1
rc=0; taskset -c 0 "$RUN" -n 2 --exec bash -c 'echo $OMP_NUM_THREADS' >out 2>err
check "L7 under taskset -c 0 each rank says 1" test "$(sed 's/.* //' out | tr '\n' ' ')" = '1 1 '
check "L7 more ranks than cores are warned of once" test "$(grep -c 'more ranks than usable cores' err)" = 1
job -n 2 --bind core --exec true
check "L7 --bind core is told once" test "$(grep -c 'each rank is bound to' err)" = 1
OMP_NUM_THREADS=3 job -n 2 --exec bash -c 'echo $OMP_NUM_THREADS'
check "L7 an explicit OMP_NUM_THREADS wins" test "$(sed 's/.* //' out | tr '\n' ' ')" = '3 3 '
job -n 2 --bind core --exec bash -c 'taskset -cp $$ | sed "s/.*: //"'
check "L7 --bind core gives each rank cores of its own" test "$(nproc)" -lt 2 -o "$(sed 's/.* //' out | sort -u | wc -l)" = 2
RANK=7 WORLD_SIZE=9 job -n 2 --timeout 12 --exec bash -c 'echo $RANK/$LOCAL_RANK/$WORLD_SIZE/$LOCAL_WORLD_SIZE/$MASTER_ADDR/$DDP_RESTART/$DDP_TIMEOUT; [ $MASTER_PORT -gt 0 ]'
check "L8 the environment is torchrun's" test "$rc$(sort out | tr '\n' ' ')" = '0[r0] 0/0/2/2/127.0.0.1/0/12 [r1] 1/1/2/2/127.0.0.1/0/12 '
job --exec bash -c 'grep -E "^Sig(Blk|Ign)" /proc/self/status'
check "L8 a rank starts with no signal blocked" grep -qE '^SigBlk:\s0000000000000000' out

signalled_ignored() { # the caller ignored SIGINT, as a shell does for its background jobs
    : >out; bash -c 'trap "" INT; exec "$0" -n 2 --exec bash -c "echo ready; exec sleep 100"' "$RUN" >out 2>err </dev/null & local pid=$!
    for _ in $(seq 50); do [ "$(grep -c ready out)" = 2 ] && break; sleep 0.1; done
    kill -INT $pid; wait $pid; [ $? = 130 ]
}
check "L4 SIGINT works where the caller ignored it" signalled_ignored

# ---- L10 ----
# A step of a program that is not ours: nobody knows of it, so it is not started again.
job -n 2 --max-restarts 2 --exec bash -c 'sleep 0.1; exit 3'
check "L10 a job that failed before its first step is not started again" fails 3 2000 'it is not started again: it failed before its first step'

# ---- usage ----
refused() { local name=$1 text=$2; shift 2; job "$@"; check "$name" eval '[ $rc = 2 ] && [ ! -s out ] && [ "$(wc -l <err)" = 1 ] && grep -qF -- "$text" err'; }
refused "L8 -n 0 is refused" '-n is "0", expected a number from 1' -n 0 x.lua
refused "L8 -n banana is refused" '-n is "banana", expected' -n banana x.lua
refused "L8 an unknown flag is refused with a suggestion" 'did you mean --timeout?' --timout 3 x.lua
refused "L8 a missing script is named" 'no script nosuch.lua: tried nosuch.lua here and ' nosuch.lua
refused "L8 no script at all is refused" 'no script given' -n 2
refused "L9 several hosts need a number each" '--nnodes 2 needs --node-rank' --nnodes 2 x.lua
refused "L9 several hosts need an address to meet at" '--nnodes 2 needs --master-addr' --nnodes 2 --node-rank 1 x.lua
refused "L9 several hosts need a port to meet at" '--nnodes 2 needs --master-port' --nnodes 2 --node-rank 1 --master-addr 127.0.0.1 x.lua
refused "L9 a host beyond the number of hosts is refused" '--node-rank is 2, expected less than --nnodes 2' --nnodes 2 --node-rank 2 --master-addr 127.0.0.1 --master-port 1 x.lua
refused "L10 --max-restarts -1 is refused" '--max-restarts is "-1", expected a number from 0' --max-restarts -1 x.lua
refused "L8 a rank that is not there cannot be shown" '--show names rank 5, expected ranks from 0 to 1' -n 2 --show 5 x.lua
DDP_TIMEOUT=soon refused "L8 a bad twin in the environment is named" 'DDP_TIMEOUT is "soon"' x.lua
job -n 1 --nnodes 1 --node-rank 0 --max-restarts 0 --engine shm --exec true; check "L8 off values of later options are accepted" test "$rc" = 0
DDP_N=2 job --exec bash -c 'echo $WORLD_SIZE'; check "L8 twins in the environment work" test "$(sort -u out | wc -l)" = 2
job --help; check "L8 --help lists the twins" eval '[ $rc = 0 ] && grep -q DDP_LOG_DIR out && grep -q DDP_GRACE out'
job --version; check "L8 --version" test "$(cat out)" = 'ddp 0.1.0'
job --env; check "L8 --env prints lines for the shell" bash -c '. ./out && [ -n "$DDP_LIB" ] && [[ $LUA_PATH == *"/?.lua;"*";;" ]]'

# ---- report ----
job -n 2 --report r.json --exec bash -c 'printf "{\"rank\": $RANK}" >&$DDP_REPORT_FD'
check "L8 --report holds rank 0's report" test "$rc$(cat r.json)" = '0{"rank": 0}'
job --report none/r.json --exec bash -c 'printf "{}" >&$DDP_REPORT_FD'
check "L8 a report that cannot be written is status 1" fails 1 2000 'cannot write none/r.json'

# ---- L12 ----
best=9999
for _ in 1 2 3 4 5; do job -n 2 --exec true; [ "$ms" -lt "$best" ] && best=$ms; done
ms=$best; check "L12 starting and ending two ranks takes under 50 ms" test "$best" -lt 50
exit $FAILED
