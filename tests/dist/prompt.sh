#!/bin/bash
# prompt.sh -- ddprun -i: from a pipe, and at a terminal of its own.
cd "$(dirname "$0")/../.." || exit 2
B=${DDP_BUILD:-$PWD/build}
RUN=$B/ddprun
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT DDP_LIB LUA_PATH
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
export XDG_STATE_HOME=$tmp/state TERM=xterm
bad=0
ok() { echo "ok $1"; }
no() { echo "not ok $1: $(echo "$2" | tr '\n\033' '~^' | cut -c1-900)"; bad=1; }
# piped NAME LINES WANT: what the lines give, whole
piped() { local out; out=$(printf '%b' "$2" | timeout 20 "$RUN" -i 2>&1); [ $? = 0 ] && [ "$out" = "$(printf '%b' "$3")" ] && ok "$1" || no "$1" "$out"; }

piped "a prompt prints the value of an expression" '1 + 1\n' '2'
piped "several values, nil among them" '1, nil, "x"\n' '1\tnil\tx'
piped "nothing for a statement" 'x = 5\nx\n' '5'
piped "a call's values, and nothing where there are none" 'math.max(1, 2)\nprint "a"\n' '2\na'
piped "a tensor is shown" 'ddp.ones(2)\n' '{1, 1} [2] f32'
piped "ddp is there, and a global stays" 'a = ddp.arange(3)\na:sum():item()\n' '3'
piped "statements over several lines" 'for i = 1, 2 do\nprint(i)\nend\n' '1\n2'
piped "an expression over several lines" '1 +\n2\n' '3'
piped "a text over several lines" '[[a\nb]]\n' 'a\nb'
piped "what Lua's own prompt takes" '=2\n' '2'
piped "a mistake is told and the next line runs" 'x y\n7\n' "prompt:1: '=' expected near 'y'\n7"
piped "an unfinished end is told" 'for' "prompt:1: '<name>' expected near '<eof>'"
piped "an error that is no text" 'error(setmetatable({}, { __tostring = function() return "mine" end }))\n7\n' 'mine\n7'
out=$(printf 'local function f() return ddp.ones(2):matmul(ddp.ones(3)) + 1 end\nfunction g()\n  error "deep"\nend\ng()\nddp.ones(2):matmul(ddp.ones(3))\n7\n' | timeout 20 "$RUN" -i 2>&1)
[[ $out == *"prompt:2: deep"*"in function 'g'"*"prompt:1: in main chunk"* ]] && ok "an error has its traceback, down to the line typed" || no "an error has its traceback, down to the line typed" "$out"
[[ $out == *"prompt:1: matmul: a is [2], b [3]"* && ${out##*$'\n'} = 7 ]] && ok "an error of the library names the line, and the next one runs" || no "an error of the library names the line, and the next one runs" "$out"
[[ $out != *prompt.lua* && $out != *ddprun:* ]] && ok "a traceback has none of the prompt's own lines" || no "a traceback has none of the prompt's own lines" "$out"
echo 'x = 40 + #arg' > "$tmp/first.lua"
out=$(echo 'x' | timeout 20 "$RUN" -i "$tmp/first.lua" one two 2>&1); [ "$out" = 42 ] && ok "a script may run first" || no "a script may run first" "$out"
echo 'error "in the script"' > "$tmp/bad.lua"
out=$(echo '6' | timeout 20 "$RUN" -i "$tmp/bad.lua" 2>&1); [[ $out == *"bad.lua:1: in the script"*6 ]] && ok "the prompt comes after a script that failed too" || no "the prompt comes after a script that failed too" "$out"
for args in "-n 2 -i" "-n 2 -i x.lua"; do
  # shellcheck disable=SC2086
  out=$(timeout 20 "$RUN" $args 2>&1 < /dev/null); [ $? = 2 ] && [ "$out" = "ddprun: -i is a prompt for one rank, -n is 2" ] && ok "ddprun $args is refused" || no "ddprun $args is refused" "$out"
done
out=$(timeout 20 "$RUN" -i --exec true 2>&1 < /dev/null); [ $? = 2 ] && [[ $out == *"-i is a prompt of Lua"* ]] && ok "-i with --exec is refused" || no "-i with --exec is refused" "$out"

if ! python3 -c 'import os, pty; os.waitstatus_to_exitcode' 2>/dev/null; then
  echo "skip at a terminal: python3 is missing"
  exit $bad
fi
# typed NAME TEXT STEPS...: the terminal shows the text, and the prompt leaves with status 0
typed() {
  local name=$1 want=$2 out; shift 2
  out=$(printf '%s\n' "$@" | timeout 60 python3 tests/dist/type.py "$RUN" -i)
  [ $? = 0 ] && [[ $out == *"$want"* ]] && ok "$name" || no "$name" "$out"
}
END='type \x04'
typed "a terminal gets a prompt, and Ctrl-D leaves" $'\n42\n' 'wait > ' 'type 6 * 7\r' 'wait 42\r\n' 'wait > ' "$END"
typed "an unfinished chunk asks on" '>> ' 'wait > ' 'type do\r' 'wait >> ' 'type print(8)\r' 'wait >> ' 'type end\r' 'wait 8\r\n' 'wait > ' "$END"
typed "Up brings the line before back, to be changed" $'\n1234\n' 'wait > ' 'type 123\r' 'wait 123\r\n' 'wait > ' 'type \x1b[A' 'wait > 123' 'type 4\r' 'wait 1234\r\n' 'wait > ' "$END"
typed "Up reaches the session before, Down comes back" $'\n9\n' 'wait > ' 'type \x1b[A\x1b[A\x1b[B\x1b[B' 'type 9\r' 'wait 9\r\n' 'wait > ' "$END"
grep -qx 1234 "$tmp/state/ddp/history" && [ "$(stat -c %a "$tmp/state/ddp/history")" = 600 ] && ok "the history is kept for the user alone" || no "the history is kept for the user alone" "$(ls -l "$tmp/state/ddp")"
typed "arrows, Home, End, Backspace and Delete" $'\n35\n' 'wait > ' 'type 2x5\x1b[D\x7f\x1b[H\x1b[3~3\x1b[F\r' 'wait 35\r\n' 'wait > ' "$END"
typed "a character of several bytes is one" $'\nab\n' 'wait > ' 'type "a\u00e9\x7fb"\r' 'wait ab\r\n' 'wait > ' "$END"
typed "Ctrl-C drops the line that is typed" $'\n5\n' 'wait > ' 'type 99' 'wait 99' 'type \x03' 'wait > ' 'type 5\r' 'wait 5\r\n' 'wait > ' "$END"
typed "Ctrl-C drops an unfinished chunk" $'\n5\n' 'wait > ' 'type do\r' 'wait >> ' 'type \x03' 'wait > ' 'type 5\r' 'wait 5\r\n' 'wait > ' "$END"
typed "Ctrl-C interrupts a loop, and the prompt stays" $'\n5\n' 'wait > ' 'type print "in" while true do end\r' 'wait in\r\n' 'type \x03' 'wait interrupted' 'wait > ' 'type 5\r' 'wait 5\r\n' 'wait > ' "$END"
typed "Ctrl-C interrupts a second one too" $'\n5\n' 'wait > ' 'type print "in" while true do end\r' 'wait in\r\n' 'type \x03' 'wait interrupted' 'wait > ' \
  'type print "on" while true do ddp.ones(2) end\r' 'wait on\r\n' 'type \x03' 'wait interrupted' 'wait > ' 'type 5\r' 'wait 5\r\n' 'wait > ' "$END"
out=$(printf '%s\n' 'wait > ' 'type os.exit(3)\r' | timeout 60 python3 tests/dist/type.py "$RUN" -i); [ $? = 3 ] && ok "os.exit leaves with its status" || no "os.exit leaves with its status" "$out"
# The shell that started it has its terminal back: it can read from it, and it echoes.
out=$(printf '%s\n' 'wait > ' "$END" 'wait after' 'type word\r' 'wait got word' | timeout 60 python3 tests/dist/type.py bash -c "'$RUN' -i; echo after; read -r x; echo \"got \$x\"; stty -a | grep -o ' icanon'"); [ $? = 0 ] && [[ $out == *" icanon"* ]] && ok "afterwards the terminal is the shell's, as it was" || no "afterwards the terminal is the shell's, as it was" "$out"
out=$(printf '%s\n' 'wait > ' 'type ffi = require "ffi" ffi.cdef "int raise(int);" ffi.C.raise(9)\r' 'wait after' 'type word\r' 'wait got word' | timeout 60 python3 tests/dist/type.py bash -c "'$RUN' -i; echo after; read -r x; echo \"got \$x\"; stty -a | grep -o ' icanon'"); [ $? = 0 ] && [[ $out == *"SIGKILL"*" icanon"* ]] && ok "so it is when the rank was killed" || no "so it is when the rank was killed" "$out"
exit $bad
