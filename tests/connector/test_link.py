"""A lost connection: what was asked ends at once, what is asked then is a miss, and nothing is sent."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest

from leyline_lmcache.connector import wire
from leyline_lmcache.connector.link import Link, ServerLost, Transfer, done


class Client:
    """Remembers what it was asked; nobody answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[Any, ...], Any]] = []
        self.closed = False

    def __getattr__(self, operation: str) -> Any:
        def call(*args: Any) -> Any:
            future: Any = MessagingFuture()
            self.asked.append((operation, args, future))
            return future

        return call

    def close(self) -> None:
        self.closed = True

    def answer(self, operation: str, value: Any) -> None:
        next(future for name, _, future in self.asked if name == operation).set_result(value)


def key(name: str) -> IPCCacheServerKey:
    return IPCCacheServerKey("m", 1, None, (1, 2, 3, 4), 0, 4, request_id=name, num_kv_readers=1)


def open_link(**names: str) -> tuple[Client, Link]:
    client = Client()
    return client, Link(client, names)


MISSES = [("lookup", None), ("query_prefetch_status", 0), ("end_session", None), ("ping", False)]


@pytest.mark.parametrize("dead", [True, False])
@pytest.mark.parametrize(("operation", "miss"), MISSES)
def test_open_and_later_calls_of_a_lost_link_are_misses(operation: str, miss: Any, dead: bool) -> None:
    client, link = open_link()
    arguments: tuple[Any, ...] = (key("r"), 1) if operation == "lookup" else ("r",)
    before = getattr(link, operation)(*arguments)
    assert not before.query()
    assert link.lose(dead=dead)
    assert before.query() and before.result(0) == miss
    assert getattr(link, operation)(*arguments).result(0) == miss
    assert len(client.asked) == 1
    assert not link.lose(dead=True), "told once"


def test_what_has_no_miss_fails_as_lmcache_expects() -> None:
    _, link = open_link()
    before = link.prepare_store(key("r"), 1)
    link.lose(dead=True)
    for future in (
        before,
        link.commit_store(key("r"), 1, b""),
        link.server_module_call(module_call(wire.POLL)),
    ):
        with pytest.raises(ServerLost):
            future.result(0)
    assert issubclass(ServerLost, TimeoutError)


@pytest.mark.parametrize("operation", ["store", "retrieve"])
def test_a_silent_server_that_may_touch_our_memory_is_waited_for(operation: str) -> None:
    client, link = open_link()
    copy = getattr(link, operation)(key("r"), 1, [[0]], b"")
    link.lose(dead=False)
    assert not copy.query() and link.is_touching_our_memory
    client.answer(operation, (b"", True))
    assert copy.result(0) == (b"", True) and not link.is_touching_our_memory


def test_death_ends_that_too() -> None:
    _, link = open_link()
    copy = link.store(key("r"), 1, [[0]], b"")
    link.lose(dead=False)
    link.lose(dead=True)
    assert not link.is_touching_our_memory
    with pytest.raises(ServerLost):
        copy.result(0)


def module_call(method: str) -> ServerModuleCallRequest:
    return ServerModuleCallRequest(method=method, payload=wire.encode(wire.Job(job="j")))


def test_what_would_have_released_something_is_owed() -> None:
    _, link = open_link(r="r~1")
    link.lose(dead=False)
    link.end_session("r")
    link.free_lookup_locks(key("r~1"), 1)
    link.server_module_call(module_call(wire.RELEASE))
    link.server_module_call(module_call(wire.POLL))
    link.ping(1)
    owed = link.owed()
    assert [operation for operation, _ in owed] == ["end_session", "free_lookup_locks", "server_module_call"]
    assert owed[0][1] == ("r~1",)
    assert link.owed() == []


def test_lookups_without_a_result_are_known_by_name() -> None:
    client, link = open_link(a="a~1", b="b~1", c="c~1", d="d~1")
    for name in ("a~1", "b~1", "c~1", "d~1"):
        link.lookup(key(name), 1)
    link.query_prefetch_status("a")
    client.answer("query_prefetch_status", 3)
    link.query_prefetch_status("b")
    link.end_session("d")
    link.lose(dead=False)
    assert set(link.interrupted_lookups()) == {"b~1", "c~1"}


def test_closing_closes_the_connection_once() -> None:
    client, link = open_link()
    link.close()
    link.close()
    assert client.closed and link.is_lost


class Context:
    """A transfer context that waits in the middle of a copy."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.inside = threading.Event()
        self.closed_at = 0.0
        self.left_at = 0.0

    def submit_store(self, *args: Any) -> Any:
        future = self._link.prepare_store(key("r"), 1)
        self.inside.set()
        try:
            future.result(10)
        finally:
            time.sleep(0.05)
            self.left_at = time.monotonic()
        return done(True)

    def create_recorded_event(self) -> str:
        return "event"

    def close(self) -> None:
        self.closed_at = time.monotonic()


def test_memory_is_let_go_only_after_a_copy_has_ended() -> None:
    _, link = open_link()
    context = Context(link)
    transfer = Transfer(context, link)
    assert transfer.create_recorded_event() == "event"
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(transfer.submit_store()))
    thread.start()
    assert context.inside.wait(10)
    link.lose(dead=True)
    transfer.close()
    thread.join(10)
    assert results[0].result(0) is False
    assert 0 < context.left_at <= context.closed_at
    assert transfer.submit_store().result(0) is False
    assert transfer.submit_retrieve().result(0) is False
    assert transfer.create_recorded_event() is None
    assert transfer.unregister() is None
