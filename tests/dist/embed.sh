#!/bin/bash
# embed.sh -- C programs that link libddp, or host its Lua side; from the build tree and from an installation.
cd "$(dirname "$0")/../.." || exit 2
unset DDP_LIB LUA_PATH RANK WORLD_SIZE
bad=0
say() { if [ "$2" = 0 ]; then echo "ok $1"; else echo "not ok $1: $(echo "$3" | tail -5 | tr '\n' '~' | cut -c1-400)"; bad=1; fi; }
out=$(timeout 200 make -s -C scripts/embed run 2>&1); say "the embedding examples learn, alone, on two ranks, and through Lua" $? "$out"
prefix=$(mktemp -d); trap 'rm -rf "$prefix"' EXIT
out=$(make -s install PREFIX="$prefix" 2>&1); say "make install" $? "$out"
out=$(cd / && timeout 60 "$prefix/bin/ddprun" -n 2 train_toy.lua --steps 20 2>&1); say "an installed ddprun finds its scripts" $? "$out"
cp -r "$prefix/share/ddp/scripts/embed" "$prefix/src"
out=$(cd "$prefix/src" && timeout 200 make -s run PKG="$prefix/lib/pkgconfig" RUN="$prefix/bin/ddprun" OUT=. DIGITS="$prefix/share/ddp/scripts/data/digits.bin" 2>&1)
say "the examples build and run against an installation" $? "$out"
lua=$(ldd "$prefix/lib/libddp.so" | grep -c luajit); [ "$lua" = 0 ]; say "libddp holds no Lua" $? "it links luajit"
size=$(for f in "$prefix"/lib/*.so "$prefix/bin/ddprun"; do case $f in */libddp_cuda.so) continue ;; esac; strip -o "$prefix/s" "$f"; stat -c %s "$prefix/s"; done | awk '{ s += $1 } END { print s }')
lua_size=$(du -sb "$prefix/share/ddp/lua" | cut -f1)
[ $((size + lua_size)) -lt 5000000 ]; say "stripped libraries, ddprun and the Lua side are under 5 MB together, without the kernels of GPUs" $? "$((size + lua_size)) bytes"
cuda=$prefix/lib/libddp_cuda.so
if [ -e "$cuda" ]; then
  strip -o "$prefix/s" "$cuda"; size=$(stat -c %s "$prefix/s")
  [ "$size" -lt 20000000 ]; say "libddp_cuda, with kernels for all architectures, is under 20 MB" $? "$size bytes"
fi
exit $bad
