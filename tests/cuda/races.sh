#!/bin/bash
# races.sh -- the project's own kernels under ThreadSanitizer: threads of a block that touch the same memory must meet in between.
# Needs libddp_emulated_thread.so (make cuda-races).
cd "$(dirname "$0")/../.." || exit 2
B=${DDP_BUILD:-$PWD/build}
kernels=$B/cuda-double/libddp_emulated_thread.so
tsan=$(gcc -print-file-name=libtsan.so)
if [ ! -e "$kernels" ]; then echo "skip races: no kernels for ThreadSanitizer (make cuda-races)"; exit 0; fi
if ! LD_PRELOAD=$tsan luajit -e 'os.exit(0)' 2>/dev/null; then echo "skip races: luajit does not run with ThreadSanitizer here"; exit 0; fi
out=$(mktemp); trap 'rm -f "$out"' EXIT
export DDP_CUDA_LIBS=$B/cuda-double DDP_DOUBLE_KERNELS=$kernels DDP_DOUBLE_MODE=eager DDP_DOUBLE_LEAKS=quiet DDP_EMU_FLAT=0 OMP_NUM_THREADS=1
export TSAN_OPTIONS=atexit_sleep_ms=0:exitcode=0
LD_PRELOAD=$tsan timeout 250 luajit tests/cuda/cases/races.lua > /dev/null 2> "$out"
status=$?
# A case is what is said between its name and the next: ok, a race with the place of it, or why it did not run.
awk -v status=$status '
  function tell() {
    if (name == "") return
    if (race != "") { print "not ok races: " name ": " race; bad = 1 }
    else if (why ~ /has no kernel on this device/) print "skip races: " name ": " why
    else if (why != "") { print "not ok races: " name ": " why; bad = 1 }
    else print "ok races: " name
  }
  /^case / { tell(); name = substr($0, 6); race = why = ""; next }
  /^SUMMARY: ThreadSanitizer/ && race == "" { race = $0 }
  /^failed / { why = substr($0, 8) }
  /^cuda double: |^emulator: / && why == "" { why = $0 }
  END {
    if (name != "end") { print "not ok races: it ended with status " status " in: " name " " why race; bad = 1 }
    exit bad
  }' "$out"
