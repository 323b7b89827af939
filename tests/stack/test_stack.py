"""What `Stack` does when it is not let run its course."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support.processes import MARK, processes, wait_for

from leyline_lmcache.stack import Stack, StackError, StackSpec


def alone(mark: str) -> StackSpec:
    """SGLang and nothing else."""
    return StackSpec(plugin=False, lmcache=False, threads=1, env={MARK: mark})


def test_another_thread_can_stop_a_starting_stack(mark: str, tmp_path: Path) -> None:
    stack = Stack(alone(mark), directory=tmp_path)
    errors: list[BaseException] = []

    def start() -> None:
        try:
            stack.start()
        except StackError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    wait_for(lambda: (tmp_path / "sglang.pid").exists(), "SGLang was not started")
    stack.stop()
    thread.join()
    assert processes(mark) == []
    assert [str(error) for error in errors] == ["the stack was stopped; start a new one"]


def test_a_stopped_stack_stays_stopped(mark: str, tmp_path: Path) -> None:
    stack = Stack(alone(mark), directory=tmp_path)
    stack.stop()
    with pytest.raises(StackError, match="start a new one"):
        stack.start()
    assert processes(mark) == []


def test_an_error_in_the_block_stops_the_servers(mark: str, tmp_path: Path) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Stack(alone(mark), directory=tmp_path, on_progress=interrupt).start()
    assert processes(mark) == []


def test_asking_for_what_is_not_there_names_it(mark: str, tmp_path: Path) -> None:
    stack = Stack(alone(mark), directory=tmp_path)
    with pytest.raises(StackError, match="role: this stack runs nothing, not redis"):
        stack.kill("redis")
    with pytest.raises(StackError, match="no lmcache server"):
        _ = stack.lmcache_address
    with pytest.raises(StackError, match="not started"):
        _ = stack.directory
