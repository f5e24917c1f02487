#!/bin/bash
# run.sh BUILD [GROUP...] -- runs the tests of a build tree, each file in a process of its own with a timeout, and ends with
# `N passed, N failed, N skipped`, where N counts cases. Groups: c ops lua dist cuda (default: all). Status 1 on a failure, or
# when nothing ran. A file prints `ok NAME`, `not ok NAME: why` or `skip NAME: why`, one a line.
cd "$(dirname "$0")/.." || exit 2
B=$PWD/${1:-build}; shift
groups=${*:-c ops lua dist cuda}
LIMIT=${DDP_TEST_LIMIT:-300}
export DDP_LIB=$B DDP_BUILD=$B DDP_CACHE= # plans of cuDNN are not kept in the user's folder
export LUA_PATH="$PWD/lua/?.lua;$PWD/lua/?/init.lua;$B/lua/?.lua;$PWD/tests/lua/?.lua;$PWD/tests/harness/?.lua;$PWD/tests/ops/?.lua;$PWD/tests/golden/?.lua;;"
export PATH=$B:$PATH
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
passed=0 failed=0 skipped=0
out=$(mktemp) || exit 2
trap 'rm -f "$out"' EXIT

# A sanitized library in an unsanitized luajit needs its runtime first.
PRELOAD=
case $B in
  *-address) PRELOAD=$(gcc -print-file-name=libasan.so)
    # Programs that test one file of the library hold its objects twice: not told where they are alike.
    export ASAN_OPTIONS=detect_odr_violation=1:detect_leaks=0:handle_segv=1:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 ;;
esac

count() { # count FILE STATUS: adds the cases of $out; a file that ended badly without saying so is a failure of its own
  local p f s
  p=$(grep -c '^ok ' "$out"); f=$(grep -c '^not ok ' "$out"); s=$(grep -c '^skip ' "$out")
  grep -E -A12 '^not ok ' "$out" | grep -v '^ok ' | cut -c1-600 | head -60
  grep '^skip ' "$out"
  if [ "$2" != 0 ] && [ "$f" = 0 ]; then
    f=1
    echo "not ok $1: ended with status $2$([ "$2" = 124 ] && echo ", after $LIMIT s")"
    tail -15 "$out"
  fi
  [ $((p + f + s)) = 0 ] && { f=1; echo "not ok $1: it ran no case"; }
  passed=$((passed + p)); failed=$((failed + f)); skipped=$((skipped + s))
  printf '%-36s %4d ok %3d failed %3d skipped\n' "$1" "$p" "$f" "$s"
}

run() { # run FILE COMMAND...
  local file=$1; shift
  timeout -k 5 "$LIMIT" "$@" > "$out" 2>&1 < /dev/null
  count "$file" $?
}

for group in $groups; do
  case $group in
    c)
      for src in tests/c/test_*.c; do
        [ -e "$src" ] || continue
        exe=$B/$(basename "$src" .c)
        # shellcheck disable=SC2046
        if ! gcc -std=c11 -D_GNU_SOURCE -O1 -g -Wall -Wextra -fopenmp $(case $B in *-address) echo -fsanitize=address,undefined ;; esac) \
            -Icore -I"$B/gen" $(pkg-config --cflags luajit) "$src" -o "$exe" $(sed -n 's|^/\* link: \(.*\) \*/|\1|p' "$src" | sed "s|@B|$B|g") \
            -L"$B" -lddp -lddp_host -lm -lpthread -ldl -Wl,-rpath,"$B" > "$out" 2>&1; then
          echo "not ok $src: does not compile" >> "$out"; count "$src" 0; continue
        fi
        run "$src" "$exe"
      done ;;
    ops)
      for src in tests/harness/test_*.lua tests/ops/test_*.lua; do run "$src" env ${PRELOAD:+LD_PRELOAD=$PRELOAD} luajit "$src"; done
      # The host side of GPUs under the sanitizers too, on the double of the plain build.
      if [ -n "$PRELOAD" ] && [ -e build/cuda-double/libcudart.so ]; then
        run "tests/ops/test_ops.lua, on a GPU" env LD_PRELOAD="$PRELOAD" DDP_CUDA_LIBS="$PWD/build/cuda-double" DDP_DOUBLE_LEAKS=quiet DDP_TEST_DEVICE=cuda \
          ASAN_OPTIONS="$ASAN_OPTIONS:handle_segv=0" luajit tests/ops/test_ops.lua
      fi
      # Each cap of the instruction set runs the same cases.
      if [ -z "$PRELOAD" ]; then
        for isa in sse avx2; do
          for f in ops copies pool index; do run "$f under DDP_ISA=$isa" env DDP_ISA=$isa luajit tests/ops/test_$f.lua; done
        done
        for isa in sse avx2 avx512 amx; do
          for f in conv conv_bn_act; do run "$f under DDP_ISA=$isa" env DDP_ISA=$isa luajit tests/ops/test_$f.lua; done
        done
        for src in tests/ops/test_*.lua; do run "$src, AMX emulated" env DDP_AMX=emulate luajit "$src"; done
      fi ;;
    lua)
      for src in tests/lua/test_*.lua tests/golden/test_*.lua; do [ -e "$src" ] && run "$src" env ${PRELOAD:+LD_PRELOAD=$PRELOAD} luajit "$src"; done ;;
    dist)
      for src in tests/dist/*.sh; do run "$src" bash "$src"; done ;;
    cuda)
      # On the test double: without CUDA's headers there is none.
      if [ ! -e "$B/cuda-double/libcudart.so" ]; then
        echo "skip tests/cuda: no test double (make cuda-double; it needs g++ on x86-64 and CUDA's headers)" > "$out"; count tests/cuda 0; continue
      fi
      export TSAN_OPTIONS=atexit_sleep_ms=0 ASAN_OPTIONS=detect_leaks=0:handle_segv=0
      for exe in "$B"/cuda-double/test_* "$B"/cuda-double/emu_*/test_emu; do
        case $exe in *.[a-z]*) continue ;; esac
        run "${exe#"$PWD/"}" "$exe"
      done
      for src in tests/cuda/test_*.lua; do run "$src" env DDP_CUDA_LIBS="$B/cuda-double" luajit "$src"; done
      for src in tests/cuda/*.sh; do [ -e "$src" ] && run "$src" bash "$src"; done ;;
  esac
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ] && [ $((passed + skipped)) -gt 0 ]
