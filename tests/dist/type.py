"""type.py COMMAND... -- runs a command at a terminal of its own and types what stdin says, one step a line:
  type TEXT   sends it (with Python's escapes)       wait TEXT   until the terminal has shown it since the last wait
Ends with what the terminal showed and the command's status; status 99 when a wait took longer than ten seconds."""
import os, pty, select, sys, time

pid, fd = pty.fork()
if pid == 0:
    os.execvp(sys.argv[1], sys.argv[1:])
shown, at = b"", 0


def read(seconds):
    global shown
    if not select.select([fd], [], [], seconds)[0]:
        return True
    try:
        more = os.read(fd, 4096)
    except OSError:  # the other side is closed
        more = b""
    shown += more
    return more != b""


def show(status):
    sys.stdout.write(shown.decode(errors="replace").replace("\r", ""))
    print(f"status {status}")
    sys.exit(status)


for line in sys.stdin:
    what, _, text = line.rstrip("\n").partition(" ")
    data = text.encode().decode("unicode_escape").encode()
    if what == "type":
        os.write(fd, data)
        continue
    until = time.time() + 10
    while data not in shown[at:]:
        if time.time() > until or not read(0.1):
            os.kill(pid, 9)
            print(f"waited in vain for {text!r}")
            show(99)
    at = shown.index(data, at) + len(data)
while read(10):
    pass
show(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
