"""Runs one server and sees to it that nothing of it is left behind.

Started as a script, with the standard library only, between whoever starts a stack and the server:

    python guard.py --pidfile FILE [--grace SECONDS] [--lifeline FD] -- COMMAND ...

The server is stopped (TERM to it alone, after the grace KILL to it and to all its descendants) when the guard
gets TERM, INT or HUP, or when the lifeline, a pipe whose other end the starter holds, is closed. The kernel
closes it when the starter dies, of whatever cause. A byte ``D`` on the lifeline sets the server free of the
starter. If the guard itself is killed, the kernel kills the server.

The exit status is the server's, or 128 plus the number of the signal that ended it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_DETACH = b"D"


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _descendants(root: int) -> list[int]:
    """Pids below `root`, nearest first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The command name, in parentheses, may itself hold spaces and parentheses.
            fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry))
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _reap_all() -> None:
    """Kill every descendant until none is left. Orphans come to us, the subreaper, however deep they were."""
    while pids := _descendants(os.getpid()):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _status(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def _stop(child: subprocess.Popen[bytes], grace: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    try:
        child.wait(grace)
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"guard: still running {grace:g} s after TERM, killing it\n")
        child.kill()
        child.wait()


def _watch(child: subprocess.Popen[bytes], lifeline: int | None, wakeup: int, grace: float) -> None:
    """Return once the child has ended, of itself or because somebody asked for it."""
    pidfd = os.pidfd_open(child.pid)
    poll = select.poll()
    for fd in (pidfd, wakeup, lifeline):
        if fd is not None:
            poll.register(fd, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if pidfd in ready:
            child.wait()
            break
        if wakeup in ready:
            _stop(child, grace)
            break
        if lifeline is not None and lifeline in ready:
            if os.read(lifeline, 1) != _DETACH:
                _stop(child, grace)
                break
            poll.unregister(lifeline)
            os.close(lifeline)
            lifeline = None


def main() -> int:
    """Guard one command; see the module's text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pidfile", type=Path, required=True)
    parser.add_argument("--grace", type=float, default=10.0)
    parser.add_argument("--lifeline", type=int)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()

    wakeup, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def before_exec() -> None:  # safe here: the guard has one thread
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    try:
        child = subprocess.Popen(
            options.command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=before_exec
        )
    except OSError as error:
        sys.stderr.write(f"guard: cannot run {options.command[0]}: {error.strerror}\n")
        return 127
    options.pidfile.write_text(f"{child.pid}\n")
    _watch(child, options.lifeline, wakeup, options.grace)
    _reap_all()
    return _status(child.returncode)


if __name__ == "__main__":
    sys.exit(main())
