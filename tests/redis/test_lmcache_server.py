"""The adapter in a real ``lmcache server``, driven by LMCache's own client in place of an engine."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.cli.commands.bench.server_bench.client import RequestContext, ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig
from support.redis_servers import RedisServer, running, wait

from leyline_lmcache.connector.redis import KVKey
from leyline_lmcache.connector.redis.keys import KeySchema
from leyline_lmcache.stack import StackSpec
from leyline_lmcache.stack import lmcache as lmcache_role
from leyline_lmcache.stack.errors import StackError
from leyline_lmcache.stack.ports import PortLease
from leyline_lmcache.stack.process import ServerProcess

_CHUNK, _TOKENS = 64, 512
_SHAPE = "(2,256,16,2,32):float32:3"  # 48 KiB for a chunk of 64 tokens
# Long enough for a loaded machine, so that only what the test does trips the breaker.
_PARAMS = {"breaker_base": 0.1, "breaker_cap": 0.3, "socket_timeout": 1.0, "task_timeout": 3.0}


class Daemon:
    """One ``lmcache server`` with our adapter on a Redis."""

    def __init__(self, folder: Path, redis: RedisServer, **params: object) -> None:
        self._lease = PortLease()
        self.port, self.http = self._lease.take("lmcache"), self._lease.take("http")
        spec = StackSpec(l2="leyline", l2_options={**_PARAMS, **params}, chunk_size=_CHUNK, l1_size_gb=0.25)
        folder.mkdir()
        self.process = ServerProcess(
            lmcache_role.command(spec, "cpu", self.port, self.http, redis.url), folder
        )
        self.process.start()

    def wait(self) -> Daemon:
        """Until it serves."""
        self.process.wait_ready(lambda: lmcache_role.is_ready(self.http), 120.0)
        return self

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """The HTTP interface."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http}{path}", data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def adapter(self) -> dict[str, Any]:
        """What ``/status`` says of the adapter."""
        found = [a for a in _find(self.ask("GET", "/status"), "l2_adapters") for a in a]
        assert len(found) == 1
        return found[0]

    def stop(self) -> None:
        self.process.stop()
        self._lease.release()


def _find(value: object, name: str) -> list[Any]:
    if isinstance(value, dict):
        return [v for k, v in value.items() if k == name] + [
            f for v in value.values() for f in _find(v, name)
        ]
    return []


class Engine:
    """LMCache's benchmark client: registers a paged KV cache, stores and retrieves."""

    def __init__(self, daemon: Daemon) -> None:
        self.client = ServerBenchClient(
            BenchConfig(
                rpc_url=f"tcp://127.0.0.1:{daemon.port}",
                http_url=f"http://127.0.0.1:{daemon.http}",
                mode="cpu",
                transfer_mode="engine_driven",
                tp_size=1,
                use_mla=False,
                num_tokens=_TOKENS,
                kvcache_shape_spec=_SHAPE,
                num_blocks=256,
                block_size=16,
            ),
            lambda text: None,
        )
        self.client.start()
        self._requests = 0

    @property
    def pool(self) -> list[torch.Tensor]:
        return list(self.client._workers[0].kv_caches.values())

    def request(self, sequence: int) -> RequestContext:
        self._requests += 1
        made = self.client.create_request(sequence, f"r{self._requests}-{time.monotonic_ns()}", "test")
        assert made is not None
        return made

    def fill(self, sequence: int) -> list[torch.Tensor]:
        """KV of a sequence, the same in every process."""
        generator = torch.Generator().manual_seed(sequence)
        for layer in self.pool:
            layer.copy_(torch.rand(layer.shape, generator=generator))
        return [layer.clone() for layer in self.pool]

    def store(self, sequence: int) -> None:
        self.fill(sequence)
        request = self.request(sequence)
        result = self.client.store(request, 0, request.num_full_tokens)
        assert result is not None and result.succeeded

    def hits(self, sequence: int) -> int:
        """Chunks that a lookup finds; they are retrieved and compared with what was stored."""
        wanted = self.fill(sequence)
        request = self.request(sequence)
        found = self.client.lookup(request)
        assert found.error is None
        tokens = found.hit_chunks * _CHUNK
        if tokens:
            for layer in self.pool:
                layer.zero_()
            result = self.client.retrieve(request, 0, tokens)
            assert result is not None and result.succeeded
            # Layers lie as [2, block, token, head, size]: compare the request's blocks.
            first, last = request.block_offset, request.block_offset + tokens // 16
            for got, want in zip(self.pool, wanted, strict=True):
                axis = list(got.shape).index(256)
                assert torch.equal(
                    got.narrow(axis, first, last - first), want.narrow(axis, first, last - first)
                )
        return found.hit_chunks


@pytest.fixture(scope="module")
def redis_tier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory, redis_tier: RedisServer) -> Iterator[list[Daemon]]:
    """Two servers on one Redis, and one with a wrong option; they start side by side."""
    folder = tmp_path_factory.mktemp("lmcache")
    started = [
        Daemon(folder / "first", redis_tier, ttl=1000),
        Daemon(folder / "second", redis_tier),
        Daemon(folder / "wrong", redis_tier, hots=1),
    ]
    try:
        yield started
    finally:
        for one in started:
            one.process.begin_stop()
        for one in started:
            one.stop()


@pytest.fixture(scope="module")
def daemon(daemons: list[Daemon]) -> Daemon:
    return daemons[0].wait()


@pytest.fixture(scope="module")
def engine(daemon: Daemon) -> Iterator[Engine]:
    made = Engine(daemon)
    try:
        yield made
    finally:
        made.client.close()


CHUNKS = _TOKENS // _CHUNK


def clear_l1(daemon: Daemon) -> None:
    daemon.ask("POST", "/cache/clear")


def keys_in(redis: RedisServer) -> int:
    with redis.client() as client:
        return int(client.dbsize())


def test_stores_reach_redis_and_come_back_from_it(
    daemon: Daemon, engine: Engine, redis_tier: RedisServer
) -> None:
    assert engine.hits(1) == 0
    engine.store(1)
    wait(lambda: keys_in(redis_tier) == CHUNKS, "all chunks are in Redis")
    clear_l1(daemon)
    assert engine.hits(1) == CHUNKS
    status = daemon.adapter()
    assert status["type"] == "leyline" and status["is_healthy"]
    assert status["redis"]["operations"]["load"]["keys"] == {"ok": CHUNKS}
    assert status["stored_keys"] == CHUNKS and status["stored_bytes"] == CHUNKS * 3 * 2 * 64 * 2 * 32 * 4


def test_http_lists_and_deletes_in_redis(daemon: Daemon, engine: Engine, redis_tier: RedisServer) -> None:
    engine.store(2)
    wait(lambda: keys_in(redis_tier) >= CHUNKS, "all chunks are in Redis")
    with redis_tier.client() as client:
        mine = client.keys("leyline:1:kv:*")
        assert all(900 < client.ttl(name) <= 1000 for name in mine)
    listed = daemon.ask("GET", "/cache/objects?tier=l2&page_size=500")["entries"]
    parsed = [KeySchema("leyline").parse_kv(name) for name in mine]
    assert {entry["key"]["chunk_hash_hex"] for entry in listed} == {
        key.chunk.hex() for key in parsed if isinstance(key, KVKey)
    }
    before = len(listed)
    chosen = [entry["key"] for entry in listed[:3]]
    answer = daemon.ask("DELETE", "/cache/objects", {"tier": "l2", "keys": chosen})
    assert answer["ok"] and keys_in(redis_tier) == before - 3


def test_a_chunk_that_redis_lost_shortens_the_prefix(
    daemon: Daemon, engine: Engine, redis_tier: RedisServer
) -> None:
    """Lost, cut, or foreign: a miss, and what comes before it is still used (T12)."""
    with redis_tier.client() as client:
        client.flushall()
        engine.store(3)
        wait(lambda: keys_in(redis_tier) == CHUNKS, "all chunks are in Redis")
        names = sorted(client.keys("leyline:1:kv:*"))
        values = {name: client.get(name) for name in names}
        for damage in (
            lambda name: client.delete(name),
            lambda name: client.set(name, values[name][:-100]),
            lambda name: client.set(name, b"foreign"),
        ):
            for name in names:
                damage(name)
                clear_l1(daemon)
                hits = engine.hits(3)
                assert hits < CHUNKS
                client.set(name, values[name])
                if hits == CHUNKS - 1:  # the last one: enough of this damage
                    break
        clear_l1(daemon)
        assert engine.hits(3) == CHUNKS


def test_redis_restarts_empty_and_hangs(daemon: Daemon, engine: Engine, redis_tier: RedisServer) -> None:
    engine.store(4)
    wait(lambda: keys_in(redis_tier) >= CHUNKS, "all chunks are in Redis")
    redis_tier.kill()
    clear_l1(daemon)
    assert engine.hits(4) == 0
    engine.store(5)  # to L1 only
    assert engine.hits(5) == CHUNKS
    assert not daemon.adapter()["is_healthy"]
    redis_tier.start()
    wait(lambda: daemon.adapter()["is_healthy"], "it is used again")
    engine.store(6)
    wait(lambda: keys_in(redis_tier) == CHUNKS, "stores reach the new Redis")
    clear_l1(daemon)
    assert engine.hits(6) == CHUNKS and engine.hits(4) == 0
    redis_tier.hang()
    try:
        clear_l1(daemon)
        assert engine.hits(6) == 0
        assert engine.hits(6) == 0
    finally:
        redis_tier.go_on()
    wait(lambda: daemon.adapter()["is_healthy"], "it is used again")
    assert engine.hits(6) == CHUNKS
    locks = daemon.ask("GET", "/status")
    assert _find(locks, "read_locked_count")[0] == 0 and _find(locks, "write_locked_count")[0] == 0


def test_another_server_on_the_same_redis_finds_it(
    daemons: list[Daemon], engine: Engine, redis_tier: RedisServer
) -> None:
    """Keys made in one process are those of another (T5)."""
    engine.store(7)
    wait(lambda: keys_in(redis_tier) >= CHUNKS, "all chunks are in Redis")
    other = Engine(daemons[1].wait())
    try:
        assert other.hits(7) == CHUNKS
    finally:
        other.client.close()
    assert engine.hits(7) == CHUNKS


def test_a_wrong_option_stops_the_server_with_its_name(daemons: list[Daemon]) -> None:
    with pytest.raises(StackError, match="hots: unknown key; known keys are config_file"):
        daemons[2].wait()
