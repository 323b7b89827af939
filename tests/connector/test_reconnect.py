"""The connector against a real ``lmcache server`` that is killed, stopped and replaced under it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from support.lmcache_server import LMCacheServer
from support.processes import wait_for

from leyline_lmcache.connector.reconnect import ReconnectingConnector

from .engine import Engine

pytestmark = pytest.mark.slow

CHUNK = 16
LENGTH = 4 * CHUNK
AT_ONCE_S = 5.0
"""Far below LMCache's time-out (60 s here), far above what a loaded machine needs."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCacheServer]:
    server = LMCacheServer(tmp_path_factory.mktemp("lmcache"))
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def server(running: LMCacheServer) -> LMCacheServer:
    """The server, started again if a test left it dead."""
    try:
        running.l1()
    except Exception:
        running.start()
    return running


class Peer:
    """An engine's KV pool and its connector."""

    def __init__(self, server: LMCacheServer, page: int = 1) -> None:
        self.engine = Engine(page, 512)
        self.connector = server.connector(self.engine, ReconnectingConnector)
        self._count = 0

    def fill(self, seed: int) -> tuple[list[int], torch.Tensor]:
        """Tokens and slots with random KV."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(3, 1000, (LENGTH,), generator=generator).tolist()
        slots = self.engine.allocator.alloc(LENGTH).to(torch.int64)
        for layer in self.engine.pool.kv_buffer:
            layer[slots] = torch.randn(layer[slots].shape, generator=generator)
        return tokens, slots

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer[slots] for layer in self.engine.pool.kv_buffer])

    def rid(self) -> str:
        self._count += 1
        return f"r{self._count}"

    def store(self, tokens: list[int], slots: torch.Tensor, rid: str | None = None) -> bool:
        """Whether it was stored."""
        rid = rid or self.rid()
        operation = self.connector.submit_store(
            rid, tokens, self.connector.device_indices_by_group(slots), device_indices_start=0, cache_salt=""
        )
        if operation is None:
            return False
        wait_for(lambda: self.connector.ready_prefix_count([operation]) == 1, "the store ends")
        return bool(self.connector.complete_store(operation))

    def look(self, tokens: list[int], rid: str) -> Any:
        operation = self.connector.submit_lookup(rid, tokens, local_hit_tokens=0, cache_salt="")
        wait_for(lambda: self.connector.poll_lookup(operation) is not None, "the lookup ends")
        return operation

    def load(self, tokens: list[int], rid: str | None = None) -> torch.Tensor | None:
        """The KV of these tokens; None: not all of it is there."""
        rid = rid or self.rid()
        operation = self.look(tokens, rid)
        try:
            if operation.total_hit_tokens < LENGTH:
                self.connector.free_lookup_locks(rid, 0, operation.total_hit_tokens)
                return None
            slots = self.engine.allocator.alloc(LENGTH).to(torch.int64)
            load = self.connector.submit_load(
                operation, self.connector.device_indices_by_group(slots), local_hit_tokens=0
            )
            return self.rows(slots) if self.connector.prepare_load_on_stream(load, None) else None
        finally:
            self.connector.finish_request(rid)

    def wait_back(self, before: int) -> None:
        wait_for(lambda: self.connector.instance_id != before, "the server is used again", 30)


@pytest.fixture
def peer(server: LMCacheServer) -> Iterator[Peer]:
    peer = Peer(server)
    try:
        yield peer
    finally:
        peer.connector.close()


@contextmanager
def at_once() -> Iterator[None]:
    start = time.monotonic()
    yield
    took = time.monotonic() - start
    assert took < AT_ONCE_S, f"{took:.1f} s: somebody waited for a server that is away"


def unlocked(server: LMCacheServer) -> None:
    names = ("read_locked_count", "write_locked_count", "staging_object_count")
    wait_for(lambda: not any(server.l1()[name] for name in names), f"no lock is left: {server.l1()}")


@pytest.mark.parametrize("page", [1, CHUNK])
def test_stored_kv_comes_back_bit_for_bit_also_after_a_hang(server: LMCacheServer, page: int) -> None:
    peer = Peer(server, page)
    try:
        tokens, slots = peer.fill(page)
        assert peer.store(tokens, slots)
        for hang in (True, False):
            loaded = peer.load(tokens)
            assert loaded is not None and torch.equal(loaded, peer.rows(slots))
            before = peer.connector.instance_id
            if hang:
                with server.hung(), at_once():
                    assert peer.load(tokens) is None
                peer.wait_back(before)
        unlocked(server)
    finally:
        peer.connector.close()


def test_t9_killed_then_back(server: LMCacheServer, peer: Peer) -> None:
    tokens, slots = peer.fill(102)
    assert peer.store(tokens, slots)
    before = peer.connector.instance_id
    server.kill()
    with at_once():
        assert peer.load(tokens) is None
        assert not peer.store(tokens, slots)
        peer.connector.end_all_sessions()
    assert peer.connector.welcome is None
    server.start()
    peer.wait_back(before)
    assert peer.load(tokens) is None, "the new server knows nothing"
    assert peer.store(tokens, slots)
    loaded = peer.load(tokens)
    assert loaded is not None and torch.equal(loaded, peer.rows(slots))
    wait_for(lambda: peer.connector.welcome is not None, "our module is greeted")
    unlocked(server)


def test_t9_hung_then_back_leaves_no_lock(server: LMCacheServer, peer: Peer) -> None:
    tokens, slots = peer.fill(103)
    assert peer.store(tokens, slots)
    before = peer.connector.instance_id
    held = peer.look(tokens, "held")
    assert held.total_hit_tokens == LENGTH
    with server.hung():
        with at_once():
            # On its way when the server fell silent: it may take locks when it goes on.
            assert peer.load(tokens, "on-its-way") is None
        with at_once():
            assert peer.load(tokens) is None
            assert not peer.store(*peer.fill(4))
            peer.connector.free_lookup_locks("held", 0, LENGTH)
            peer.connector.finish_request("held")
    peer.wait_back(before)
    loaded = peer.load(tokens)
    assert loaded is not None and torch.equal(loaded, peer.rows(slots))
    unlocked(server)


def _abandon(peer: Peer, tokens: list[int]) -> None:
    """The first half of a store, as an engine leaves it that dies in the middle."""
    from lmcache.integration.sglang.lmcache_mp_metadata import LMCacheLookupOperation

    connector = peer.connector
    key = connector._create_key(
        LMCacheLookupOperation("abandoned", tokens, 0, ""), start=0, end=LENGTH, worker_id=0
    )
    reserved = connector._req_client.prepare_store(key, connector.instance_id).result(timeout=AT_ONCE_S)
    assert len(reserved.context["slots"]) == LENGTH // CHUNK


def test_a_store_that_never_ended_is_never_served(server: LMCacheServer) -> None:
    """When the engine leaves; for one that only falls silent see test_contract: its reaper leaves for it."""
    peer, other = Peer(server), Peer(server)
    try:
        tokens, slots = other.fill(5)
        objects = server.l1()["total_object_count"]
        _abandon(peer, tokens)
        peer.connector.close()
        unlocked(server)
        assert server.l1()["total_object_count"] == objects
        assert other.load(tokens) is None
        # And it is no obstacle to the real thing.
        assert other.store(tokens, slots)
        loaded = other.load(tokens)
        assert loaded is not None and torch.equal(loaded, other.rows(slots))
    finally:
        other.connector.close()
        with suppress(Exception):
            peer.connector.close()


def test_two_engines_may_use_one_request_id(server: LMCacheServer, peer: Peer) -> None:
    """LMCache keeps the hashes of a request id, and would load the first one's KV for the second."""
    other = Peer(server)
    try:
        first, second = peer.fill(7), other.fill(8)
        assert peer.store(*first, rid="same")
        assert other.store(*second)
        loaded = other.load(second[0], "same")
        assert loaded is not None and torch.equal(loaded, other.rows(second[1]))
        # Nor may a client's second use of an id be taken for its first.
        peer.connector.finish_request("same")
        loaded = peer.load(second[0], "same")
        assert loaded is not None and torch.equal(loaded, other.rows(second[1]))
    finally:
        other.connector.close()


def test_another_server_behind_the_same_address(
    server: LMCacheServer, peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, slots = peer.fill(9)
    before = peer.connector.instance_id
    try:
        server.start(chunk_size=2 * CHUNK)
        wait_for(lambda: "--chunk-size 16" in caplog.text, "it says what is wrong", 30)
        assert peer.load(tokens) is None and not peer.store(tokens, slots)
        # Without our module: plain LMCache goes on, edits do without.
        server.start(server_module=False)
        peer.wait_back(before)
        assert peer.connector.welcome is None
        assert peer.store(tokens, slots)
        loaded = peer.load(tokens)
        assert loaded is not None and torch.equal(loaded, peer.rows(slots))
    finally:
        server.start()
    wait_for(lambda: peer.connector.welcome is not None, "the module is used again", 30)


def test_closing_ends_the_watch_even_while_the_server_hangs(server: LMCacheServer) -> None:
    peer = Peer(server)
    tokens, slots = peer.fill(10)
    assert peer.store(tokens, slots)
    watch = peer.connector._watch._thread
    with server.hung(), at_once():
        peer.connector.close()
    assert not watch.is_alive()
    assert "leyline-lmcache-watch" not in {thread.name for thread in threading.enumerate()}


def test_no_server_at_start_is_said_by_name(tmp_path: Any) -> None:
    nobody = LMCacheServer(tmp_path)
    try:
        engine = Engine(1, 512)
        file = nobody.config(**{"lmcache.mp.mq_timeout": 0.5})
        nobody.config = lambda **_: file  # type: ignore[method-assign]
        with pytest.raises(TimeoutError, match=rf"no lmcache server .*127\.0\.0\.1:{nobody.port}.*mp_host"):
            nobody.connector(engine, ReconnectingConnector)
    finally:
        nobody.close()
