"""One server process, behind its guard."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from leyline_lmcache.stack.errors import StackError

_GUARD = Path(__file__).with_name("guard.py")
_TAIL_LINES = 25
_POLL_S = 0.1
# What the guard needs beyond the server's grace to kill and reap what is left.
_GUARD_MARGIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Command:
    """What to run for one role of the stack.

    Attributes:
        role: "redis", "lmcache" or "sglang"; names the log and the messages.
        argv: program and arguments.
        env: the whole environment.
        grace_s: seconds between TERM and KILL.
    """

    role: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(repr=False)
    grace_s: float = 10.0


@dataclass(frozen=True, slots=True)
class ProcessRef:
    """A process that may outlive us: pids are used again, a pid with its start time is not."""

    pid: int
    start_time: int

    @classmethod
    def of(cls, pid: int) -> ProcessRef | None:
        """The running process `pid`, or None."""
        started = _start_time(pid)
        return None if started is None else cls(pid, started)

    def is_alive(self) -> bool:
        """True if that very process still runs."""
        return _start_time(self.pid) == self.start_time

    def signal(self, number: int) -> bool:
        """Send a signal; False if the process is gone."""
        if not self.is_alive():
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False

    def wait_gone(self, timeout_s: float) -> bool:
        """True once the process has ended, False after the time-out."""
        deadline = time.monotonic() + timeout_s
        while self.is_alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


def _start_time(pid: int) -> int | None:
    """Start of a running process in clock ticks since boot; None if there is none, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def log_tail(log: Path, lines: int = _TAIL_LINES) -> str:
    """The last lines of a log; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


class ServerProcess:
    """A started server. Its log is appended to over restarts."""

    def __init__(self, command: Command, directory: Path) -> None:
        self.command = command
        self.log = directory / "logs" / f"{command.role}.log"
        self._directory = directory
        self._pidfile = directory / f"{command.role}.pid"
        self._guard: subprocess.Popen[bytes] | None = None
        self._spawning: threading.Thread | None = None
        self._started = 0.0

    def start(self, lifeline: int | None = None) -> None:
        """Start the server and return at once.

        Args:
            lifeline: read end of a pipe; when its last write end is closed, the server is stopped.
        """
        if self.is_running():
            raise StackError(f"{self.command.role} is already running")
        self._pidfile.unlink(missing_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        grace = ["--grace", f"{self.command.grace_s:g}", "--pidfile", str(self._pidfile)]
        line = [] if lifeline is None else ["--lifeline", str(lifeline)]
        argv = [sys.executable, "-I", "-S", str(_GUARD), *grace, *line, "--", *self.command.argv]
        failed: list[OSError] = []

        def spawn() -> None:
            try:
                with self.log.open("ab") as log:
                    # Its own session: a Ctrl-C at the terminal reaches the starter, which stops all in order.
                    self._guard = subprocess.Popen(
                        argv,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=dict(self.command.env),
                        cwd=self._directory,
                        start_new_session=True,
                        pass_fds=() if lifeline is None else (lifeline,),
                    )
            except OSError as error:
                failed.append(error)

        # An interrupt is raised in the main thread, wherever it is: here it would lose a process that runs.
        self._spawning = threading.Thread(target=spawn, name=f"spawn-{self.command.role}")
        self._spawning.start()
        self._spawning.join()
        if failed:
            raise failed[0]
        self._started = time.monotonic()

    def is_running(self) -> bool:
        """True while the server's guard runs."""
        return self._guard is not None and self._guard.poll() is None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the last start."""
        return time.monotonic() - self._started

    @property
    def guard(self) -> ProcessRef:
        """The guard, through which anybody can stop the server.

        Raises:
            StackError: it is not running.
        """
        ref = (
            None if self._guard is None or self._guard.poll() is not None else ProcessRef.of(self._guard.pid)
        )
        if ref is None:
            raise StackError(f"{self.command.role} is not running")
        return ref

    @property
    def pid(self) -> int:
        """The server's own pid.

        Raises:
            StackError: it is not running.
        """
        deadline = time.monotonic() + 5.0
        while self.is_running() and time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                return int(self._pidfile.read_text())
            time.sleep(0.01)
        raise StackError(f"{self.command.role} is not running")

    def wait_ready(
        self, probe: Callable[[], bool], timeout_s: float, on_wait: Callable[[], None] | None = None
    ) -> None:
        """Wait until `probe` is true.

        Raises:
            StackError: the server ended or was not ready in time; the message ends with the log's last lines.
        """
        deadline = time.monotonic() + timeout_s
        while not probe():
            if not self.is_running():
                status = self._guard.returncode if self._guard is not None else None
                raise StackError(self._with_log(f"ended with status {status} after {self.elapsed_s:.1f} s"))
            if time.monotonic() > deadline:
                raise StackError(self._with_log(f"was not ready after {timeout_s:g} s"))
            if on_wait is not None:
                on_wait()
            time.sleep(_POLL_S)

    def _with_log(self, what: str) -> str:
        tail = log_tail(self.log)
        shown = f"; the last lines of {self.log}:\n{tail}" if tail else f" and left nothing in {self.log}"
        return f"{self.command.role} {what}{shown}"

    def begin_stop(self) -> None:
        """Ask the server to stop, without waiting."""
        if self._spawning is not None and self._spawning.is_alive():
            self._spawning.join()  # interrupted while it was started
        if self._guard is not None and self._guard.poll() is None:
            self._guard.terminate()

    def stop(self) -> None:
        """Stop the server in its own time, then by force; nothing of it is left."""
        self.begin_stop()
        if self._guard is None:
            return
        try:
            self._guard.wait(self.command.grace_s + _GUARD_MARGIN_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()  # the kernel then kills the server
            self._guard.wait()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Kill the server as a crash would, and wait until nothing of it is left."""
        os.kill(self.pid, number)
        if self._guard is not None:
            self._guard.wait(self.command.grace_s + _GUARD_MARGIN_S)
