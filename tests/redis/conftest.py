"""Fixtures for the Redis tier: a shared server for tests that leave it running, stores on it, leak checks."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.redis_servers import RedisServer, running

from leyline_lmcache.connector.redis import RedisKVStore, RedisOptions
from leyline_lmcache.connector.redis.client import RedisClient

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.redis)


@pytest.fixture(scope="session")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_server(_shared: RedisServer) -> RedisServer:
    """A running server, empty, with its default configuration; not to be stopped."""
    with _shared.client() as client:
        client.flushall()
    return _shared


@pytest.fixture
def make_store() -> Iterator[Callable[..., RedisKVStore]]:
    """Stores by options; closed at the end."""
    made: list[RedisKVStore] = []

    def make(server: RedisServer | str, **options: object) -> RedisKVStore:
        url = server if isinstance(server, str) else server.url
        values: dict[str, object] = {"breaker_base": 0.05, "breaker_cap": 0.2, **options}
        if not {"host", "sentinels", "cluster", "unix_socket_path"} & values.keys():
            values["url"] = url
        made.append(RedisKVStore(RedisClient(RedisOptions.of(values, {}))))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def store(redis_server: RedisServer, make_store: Callable[..., RedisKVStore]) -> RedisKVStore:
    """A store on the shared server."""
    return make_store(redis_server)


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """No thread and no file descriptor of ours is left behind (I6)."""
    before = _descriptors()
    yield
    deadline = time.monotonic() + 5
    while (left := _threads() or _extra(before)) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    assert not left, f"left behind: {left}"


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("leyline-")]


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the one that listed the folder
    return found


def _extra(before: dict[int, str]) -> list[str]:
    # A log file that something opened meanwhile is not ours.
    kinds = ("socket:", "pipe:", "anon_inode:[eventfd")
    found = {
        what
        for number, what in _descriptors().items()
        if before.get(number) != what and what.startswith(kinds)
    }
    return sorted(found - _of_children())


def _of_children() -> set[str]:
    """Pipes that a child process holds the other end of: shared stacks start ahead, in the background."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            folder = Path(f"/proc/{child.pid}/fd")
            found |= {where for fd in folder.iterdir() if (where := os.readlink(fd)).startswith("pipe:")}
        except OSError:
            continue
    return found
