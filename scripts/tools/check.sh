#!/bin/bash
# check.sh BUILD -- the rules of the house: arrows point down, files stay small, exports are declared, ops are whole.
cd "$(dirname "$0")/../.." || exit 2
B=${1:-build}; bad=0
say() { echo "$*"; bad=1; }

# Rooms by height; a file may include its own room and those below.
rank() { case $1 in base) echo 0 ;; mem|tensor) echo 1 ;; op|ops) echo 2 ;; grad|amp) echo 3 ;; comm|plan|io|data) echo 4 ;; host|launch) echo 5 ;; *) echo -1 ;; esac; }
while IFS=: read -r file inc; do
  from=$(echo "$file" | cut -d/ -f2)
  to=$(echo "$inc" | sed -nE 's|.*"(\.\./)?([a-z]+)/[a-z_]+\.h".*|\2|p')
  [ -n "$to" ] || continue
  a=$(rank "$from"); b=$(rank "$to")
  [ "$a" -ge 0 ] && [ "$b" -ge 0 ] && [ "$b" -gt "$a" ] && say "$file includes upward: $inc"
done < <(grep -E '^#include "' core/*/*.c core/*/*.h | sed 's/:#include/:#include/')
grep -nE '#include "(.*core/)?(grad|comm|data|host|launch|plan|io|amp)/' kernels -r | grep -vE '^kernels/(gloo|mpi)/[^:]+:[0-9]+:#include "../../core/comm/wire.h"|^kernels/(nccl|cuda)/[^:]+:[0-9]+:#include "../../core/comm/device_coll.h"' && say "kernels know op and tensor, nothing above; engines know comm/wire.h or comm/device_coll.h"

for f in $(git ls-files '*.c' '*.cc' '*.h' '*.lua' '*.sh'); do
  n=$(wc -l < "$f"); [ "$n" -gt 700 ] && say "$f has $n lines, at most 700"
done

# Every exported symbol stands in a header.
cat core/*.h core/*/*.h kernels/*/*.h "$B"/gen/ddp_ops.h 2>/dev/null > /tmp/ddp-headers.$$
for lib in libddp libddp_host; do
  for s in $(nm -D --defined-only "$B/$lib.so" | awk '$2 ~ /[TDBR]/ {print $3}' | grep -v '^_'); do
    grep -qw "$s" /tmp/ddp-headers.$$ || say "$lib.so exports $s, which no header declares"
  done
done
rm -f /tmp/ddp-headers.$$

# Ops: the build itself fails without reference kernel, rules or comment. Samples and gradient rules:
for op in $(sed -nE 's/^OP\(([a-z0-9_]+), .*/\1/p' core/op/ops.def); do
  grep -qE "^S\.$op = |\"$op\"" tests/ops/samples.lua || say "op $op has no samples"
  flags=$(sed -nE "s/^OP\($op, \".*\", (.*)\)\$/\1/p" core/op/ops.def)
  rule=$(grep -hE -A6 "ddp__${op}_rules = " core/ops/*.c | tr '\n' ' ' | sed 's/};.*//')
  case $flags in *NO_GRAD*) ;; *) echo "$rule" | grep -q '\.vjp' || say "op $op has no gradient rule and is not flagged NO_GRAD" ;; esac
done
for d in core core/*/ kernels kernels/*/ lua scripts tests vendor; do
  [ -n "$(find "$d" -maxdepth 1 -type f | head -1)" ] && [ ! -e "$d/README.md" ] && say "$d has no README.md"
done
[ $bad = 0 ] && echo "check: the house is in order"
exit $bad
