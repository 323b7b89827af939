"""No server outlives whoever started it, and none is left half stopped. With real processes, not SGLang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.processes import MARK, processes, wait_for

from leyline_lmcache.stack import StackError
from leyline_lmcache.stack.process import Command, ProcessRef, ServerProcess, log_tail

# A server with a child in a session of its own, as worker pools have; it says when both are there.
WITH_CHILD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("ready", flush=True)
time.sleep(600)
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WITH_CHILD


def server(mark: str, directory: Path, code: str, grace_s: float = 10.0) -> ServerProcess:
    env = dict(os.environ) | {MARK: mark}
    return ServerProcess(Command("sglang", [sys.executable, "-c", code], env, grace_s), directory)


def started(mark: str, directory: Path, code: str, **options: float) -> ServerProcess:
    made = server(mark, directory, code, **options)
    made.start()
    made.wait_ready(lambda: "ready" in log_tail(made.log), 20)
    return made


@pytest.mark.parametrize("code", [WITH_CHILD, STUBBORN], ids=["willing", "stubborn"])
def test_stop_leaves_nothing(mark: str, tmp_path: Path, code: str) -> None:
    made = started(mark, tmp_path, code, grace_s=1.0)
    assert len(processes(mark)) == 3  # guard, server, its child
    made.stop()
    assert processes(mark) == []
    assert not made.is_running()


def test_a_crash_leaves_nothing(mark: str, tmp_path: Path) -> None:
    made = started(mark, tmp_path, WITH_CHILD)
    made.kill()
    assert processes(mark) == []
    with pytest.raises(StackError, match="not running"):
        _ = made.pid


def test_a_killed_guard_takes_the_server_along(mark: str, tmp_path: Path) -> None:
    made = started(mark, tmp_path, "print('ready', flush=True); import time; time.sleep(600)")
    os.kill(made.guard.pid, signal.SIGKILL)
    made.stop()
    wait_for(lambda: processes(mark) == [], "the server runs on")


STARTER = """
import os, sys, time
from pathlib import Path
from leyline_lmcache.stack.process import Command, ServerProcess
read, write = os.pipe()
command = Command("sglang", [sys.executable, "-c", sys.argv[2]], dict(os.environ), 5.0)
made = ServerProcess(command, Path(sys.argv[1]))
made.start(read)
if sys.argv[3] == "detach":
    os.write(write, b"D")
print("started", flush=True)
time.sleep(0 if sys.argv[3] == "detach" else 600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_servers_end_with_their_starter(mark: str, tmp_path: Path, how: signal.Signals) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path), WITH_CHILD, "tied"],
        env=dict(os.environ) | {MARK: mark},
        stdout=subprocess.DEVNULL,
    )
    wait_for(lambda: "ready" in log_tail(tmp_path / "logs" / "sglang.log"), "the server did not start")
    starter.send_signal(how)
    starter.wait()
    wait_for(lambda: processes(mark) == [], "the server runs on")


def test_a_detached_server_runs_on(mark: str, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", STARTER, str(tmp_path), WITH_CHILD, "detach"],
        env=dict(os.environ) | {MARK: mark},
        check=True,
        capture_output=True,
    )
    wait_for(lambda: len(processes(mark)) == 3, "the server did not start")
    time.sleep(0.2)  # long enough for the end of the pipe to be noticed
    assert len(processes(mark)) == 3
    guard = next(pid for pid in processes(mark) if b"guard.py" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(guard, signal.SIGTERM)
    wait_for(lambda: processes(mark) == [], "the server runs on")


def test_an_early_end_is_told_with_the_log(mark: str, tmp_path: Path) -> None:
    made = server(mark, tmp_path, "import sys; print('out of luck'); sys.exit(7)")
    made.start()
    with pytest.raises(StackError, match=r"(?s)sglang ended with status 7 after .*out of luck"):
        made.wait_ready(lambda: False, 20)


def test_slowness_is_told_with_the_log(mark: str, tmp_path: Path) -> None:
    made = started(mark, tmp_path, WITH_CHILD)
    with pytest.raises(StackError, match=r"(?s)not ready after 0.1 s.*ready"):
        made.wait_ready(lambda: False, 0.1)
    made.stop()


def test_a_missing_program_is_told(mark: str, tmp_path: Path) -> None:
    env = dict(os.environ) | {MARK: mark}
    made = ServerProcess(Command("redis", ["/nonexistent/redis-server"], env), tmp_path)
    made.start()
    with pytest.raises(StackError, match=r"(?s)redis ended with status 127.*/nonexistent/redis-server"):
        made.wait_ready(lambda: False, 20)


def test_a_server_can_be_started_again(mark: str, tmp_path: Path) -> None:
    made = started(mark, tmp_path, WITH_CHILD)
    first = made.pid
    with pytest.raises(StackError, match="already running"):
        made.start()
    made.kill()
    made.start()
    wait_for(lambda: len(processes(mark)) == 3, "the server did not start")
    assert made.pid != first
    made.stop()


def test_a_reused_pid_is_not_our_process() -> None:
    here = ProcessRef.of(os.getpid())
    assert here is not None
    assert here.is_alive()
    other = ProcessRef(here.pid, here.start_time + 1)
    assert not other.is_alive()
    assert not other.signal(signal.SIGKILL)
