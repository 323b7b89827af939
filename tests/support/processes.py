"""Finding the processes of a test, and waiting for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

# A variable in the environment of everything a test starts; workers inherit it.
MARK = "LEYLINE_TEST_MARK"


def processes(mark: str) -> list[int]:
    """Pids of all processes with the mark in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def commands(mark: str) -> list[str]:
    """Command lines of all processes with the mark."""
    found = []
    for pid in processes(mark):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        found.append(f"{pid} {state} {line.decode(errors='replace')[:200]}")
    return found


def assert_gone(mark: str, timeout_s: float = 60.0) -> None:
    """All processes with the mark end: what was just asked to stop may take its time to."""
    deadline = time.monotonic() + timeout_s
    while left := commands(mark):
        assert time.monotonic() < deadline, f"running on: {left}"
        time.sleep(0.05)


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait until `condition` is true; fail with `what` if it never is."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
