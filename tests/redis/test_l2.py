"""The L2 adapter as LMCache's controllers use it: every task ends, once, with the right answer."""

from __future__ import annotations

import json
import random
import select
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.check import registry
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd
from support.redis_servers import RedisServer, running, wait
from support.twin import Twin

from leyline_lmcache.connector.l2 import (
    L2Options,
    LeylineL2Adapter,
    LeylineL2AdapterConfig,
    adapters_of,
    kv_key,
    object_key,
)
from leyline_lmcache.connector.lanes import Part
from leyline_lmcache.connector.redis import OptionsError, Outcome
from leyline_lmcache.connector.redis.wire import Deadline

pytestmark = pytest.mark.usefixtures("no_leaks")

MakeAdapter = Callable[..., LeylineL2Adapter]
QUICK = {"breaker_base": 0.05, "breaker_cap": 0.2, "socket_timeout": 0.5, "task_timeout": 2.0}


def spec(url: str, **params: object) -> dict[str, Any]:
    return {
        "type": "plugin",
        "module_path": "leyline_lmcache.connector.l2",
        "class_name": "LeylineL2Adapter",
        "adapter_params": {"url": url, **QUICK, **params},
    }


@pytest.fixture
def make_adapter() -> Iterator[MakeAdapter]:
    """Adapters through LMCache's own loader, or on a twin of the store; closed at the end."""
    made: list[LeylineL2Adapter] = []

    def make(where: RedisServer | Twin, **params: object) -> LeylineL2Adapter:
        if isinstance(where, Twin):
            config = LeylineL2AdapterConfig(L2Options.of({**QUICK, **params}))
            made.append(LeylineL2Adapter(config, store=where))
        else:
            entry = spec(where.url, **params)
            made.append(create_l2_adapter(get_l2_adapter_config_class("plugin").from_dict(entry)))
        return made[-1]

    yield make
    for adapter in made:
        adapter.close()


@pytest.fixture
def adapter(redis_server: RedisServer, make_adapter: MakeAdapter) -> LeylineL2Adapter:
    return make_adapter(redis_server)


def key(number: int, salt: str = "", model: str = "org/model") -> ObjectKey:
    return ObjectKey(
        chunk_hash=number.to_bytes(4, "big"), model_name=model, kv_rank=0x01000100, cache_salt=salt
    )


def memory(size: int, seed: int | None = None) -> TensorMemoryObj:
    """An object of L1, filled at random or empty. Half floats, so that its bytes are not its items."""
    raw = torch.zeros(size, dtype=torch.uint8)
    if seed is not None:
        raw.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    metadata = MemoryObjMetadata(
        shape=torch.Size([size // 2]),
        dtype=torch.bfloat16,
        address=raw.data_ptr(),
        phy_size=size,
        fmt=MemoryFormat.KV_2LTD,
        ref_count=1,
    )
    return TensorMemoryObj(raw, metadata, parent_allocator=None)


def content(item: TensorMemoryObj) -> bytes:
    return bytes(memoryview(item.byte_array).cast("B"))


def ready(fd: int, timeout_s: float = 10.0) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if not poll.poll(timeout_s * 1000):
        return False
    consume_fd(fd)
    return True


def until(fd: int, ask: Callable[[], Any]) -> Any:
    """Wait on the event fd as LMCache does; it never looks without an event."""
    while True:
        assert ready(fd), "a task did not end"
        if (result := ask()) is not None:
            return result


def store(adapter: LeylineL2Adapter, keys: list[ObjectKey], objects: list[TensorMemoryObj]) -> Any:
    task = adapter.submit_store_task(keys, objects)
    return until(adapter.get_store_event_fd(), lambda: adapter.pop_completed_store_tasks().get(task))


def lookup(adapter: LeylineL2Adapter, keys: list[ObjectKey]) -> list[bool]:
    task = adapter.submit_lookup_and_lock_task(keys, {})
    ask = adapter.query_lookup_and_lock_result
    bitmap = until(adapter.get_lookup_and_lock_event_fd(), lambda: ask(task))
    assert ask(task) is None  # an answer is given once
    adapter.submit_unlock(keys)
    return [bool(bitmap.test(i)) for i in range(len(keys))]


def load(adapter: LeylineL2Adapter, keys: list[ObjectKey], objects: list[TensorMemoryObj]) -> list[bool]:
    task = adapter.submit_load_task(keys, objects)
    bitmap = until(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
    assert adapter.query_load_result(task) is None
    return [bool(bitmap.test(i)) for i in range(len(keys))]


class Heard(L2AdapterListener):
    """What LMCache's eviction would hear."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.events += [("stored", int.from_bytes(k.chunk_hash, "big")) for k in keys]

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.events += [("accessed", int.from_bytes(k.chunk_hash, "big")) for k in keys]

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        self.events += [("deleted", int.from_bytes(k.chunk_hash, "big")) for k in keys]


# -- the contract --------------------------------------------------------------------------------------


def test_store_lookup_load(adapter: LeylineL2Adapter) -> None:
    keys = [key(i) for i in range(8)]
    objects = [memory(600_000 + 2 * i, i) for i in range(8)]
    result = store(adapter, keys, objects)
    assert result.is_successful() and result.bytes_transferred() == sum(600_000 + 2 * i for i in range(8))
    assert lookup(adapter, [*keys, key(99)]) == [True] * 8 + [False]
    room = [memory(600_000 + 2 * i) for i in range(8)]
    assert load(adapter, keys, room) == [True] * 8
    assert [content(a) for a in objects] == [content(b) for b in room]
    assert (
        len(
            {
                adapter.get_store_event_fd(),
                adapter.get_load_event_fd(),
                adapter.get_lookup_and_lock_event_fd(),
            }
        )
        == 3
    )


def test_lmcaches_own_check_passes(redis_server: RedisServer, capsys: pytest.CaptureFixture[str]) -> None:
    """``lmcache``'s check mode for L2 adapters, as shipped."""
    import asyncio

    mode = registry.get_mode("test_l2_adapter")
    assert mode is not None
    asyncio.run(
        mode("org/model", l2_adapter=[json.dumps(spec(redis_server.url))], num_keys=7, obj_size=70_000)
    )
    out = capsys.readouterr().out
    assert "LeylineL2Adapter" in out
    for said in ("7/7 correctly absent", "Batch store OK", "7/7 found", "(loaded): 7/7", "(content): 7/7"):
        assert said in out, out
    assert "FAIL" not in out.upper().replace("0 FAILED", "")


def test_empty_tasks_end_too(adapter: LeylineL2Adapter) -> None:
    assert store(adapter, [], []).is_successful()
    assert lookup(adapter, []) == [] and load(adapter, [], []) == [] and adapter.delete([]) == 0


def test_many_tasks_at_once_keep_their_answers(adapter: LeylineL2Adapter) -> None:
    chance = random.Random(3)
    keys = [key(i) for i in range(64)]
    sizes = [2 * chance.randrange(1, 200_000) for _ in keys]
    objects = [memory(size, i) for i, size in enumerate(sizes)]
    there = set(range(0, 64, 2))
    assert store(adapter, [keys[i] for i in there], [objects[i] for i in there]).is_successful()
    tasks: dict[int, tuple[list[int], list[TensorMemoryObj]]] = {}
    for _ in range(40):
        chosen = chance.sample(range(64), chance.randrange(1, 12))
        room = [memory(sizes[i]) for i in chosen]
        tasks[adapter.submit_load_task([keys[i] for i in chosen], room)] = (chosen, room)
    deadline = time.monotonic() + 20
    while tasks:
        assert time.monotonic() < deadline, f"{len(tasks)} tasks did not end"
        ready(adapter.get_load_event_fd(), 1.0)
        for task in list(tasks):
            if (bitmap := adapter.query_load_result(task)) is not None:
                chosen, room = tasks.pop(task)
                for place, i in enumerate(chosen):
                    assert bool(bitmap.test(place)) == (i in there)
                    assert i not in there or content(room[place]) == content(objects[i])


def test_keys_survive_the_way_there_and_back() -> None:
    for salt in ("", "tenant~f:x ü"):
        made = ObjectKey(b"\x00\xff", "org/model", 0x04030201, 3, salt)
        assert object_key(kv_key(made)) == made


# -- listing, deleting, accounting ---------------------------------------------------------------------


def test_listing_is_lmcaches(adapter: LeylineL2Adapter) -> None:
    keys = [key(i, salt="s") for i in range(25)]
    store(adapter, keys, [memory(100, i) for i in range(25)])
    store(adapter, [key(1, model="other")], [memory(100, 1)])
    found, cursor = [], None
    while True:
        page = adapter.list_l2_keys("org/model", page_size=10, cursor=cursor)
        found += [entry.key.to_object_key() for entry in page.entries]
        if (cursor := page.next_page_token) is None:
            break
    assert sorted(found, key=lambda k: k.chunk_hash) == keys
    with pytest.raises(ValueError, match="cursor"):
        adapter.list_l2_keys(cursor="nonsense")


def test_delete_counts_what_was_there(adapter: LeylineL2Adapter) -> None:
    keys = [key(i) for i in range(4)]
    store(adapter, keys[:3], [memory(100, i) for i in range(3)])
    assert adapter.erase(keys) == [Outcome.OK] * 3 + [Outcome.MISSING]
    assert adapter.delete(keys) == 0 and adapter.verify(keys) == [Outcome.MISSING] * 4
    assert adapter.get_usage().total_bytes_used == 0


def test_usage_follows_stores_deletes_and_what_redis_lost(
    adapter: LeylineL2Adapter, redis_server: RedisServer
) -> None:
    heard = Heard()
    adapter.register_listener(heard)
    keys = [key(i, salt=f"s{i % 2}") for i in range(4)]
    store(adapter, keys, [memory(1000, i) for i in range(4)])
    store(adapter, keys[:1], [memory(1000, 9)])  # again: no more bytes
    assert dict(adapter.get_usage().bytes_by_cache_salt) == {"s0": 2000, "s1": 2000}
    with redis_server.client() as client:
        client.delete(adapter.store.inner.schema.kv(kv_key(keys[2])))  # type: ignore[attr-defined]
    assert lookup(adapter, keys) == [True, True, False, True]
    assert adapter.get_usage().total_bytes_used == 3000
    adapter.delete(keys[:2])
    assert adapter.get_usage().total_bytes_used == 1000
    room = [memory(1000)]
    load(adapter, keys[3:], room)
    assert heard.events == [
        *(("stored", i) for i in (0, 1, 2, 3, 0)),
        ("deleted", 2),
        ("deleted", 0),
        ("deleted", 1),
        ("accessed", 3),
    ]


def test_what_expires_leaves_the_books(redis_server: RedisServer, make_adapter: MakeAdapter) -> None:
    adapter = make_adapter(redis_server, ttl=1)
    store(adapter, [key(0)], [memory(1000, 0)])
    assert adapter.get_usage().total_bytes_used == 1000
    wait(lambda: adapter.get_usage().total_bytes_used == 0, "it is struck out")
    assert lookup(adapter, [key(0)]) == [False] and len(adapter._ledger) == 0


def test_capacity_is_not_exceeded(redis_server: RedisServer, make_adapter: MakeAdapter) -> None:
    adapter = make_adapter(redis_server, max_capacity_gb=1 / 1024, store_connections=1)
    assert adapter.supports_global_eviction
    size = 400_000
    assert store(adapter, [key(0), key(1)], [memory(size, i) for i in range(2)]).is_successful()
    refused = store(adapter, [key(2), key(3)], [memory(size, i) for i in range(2)])
    assert not refused.is_successful()
    assert adapter.get_usage().total_bytes_used == 2 * size
    assert adapter.delete([key(0)]) == 1
    assert store(adapter, [key(2)], [memory(size, 2)]).is_successful()
    assert lookup(adapter, [key(i) for i in range(4)]) == [False, True, True, False]


def test_a_listener_that_fails_does_not_stop_a_task(adapter: LeylineL2Adapter) -> None:
    class Broken(Heard):
        def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
            raise RuntimeError("broken")

    adapter.register_listener(Broken())
    assert store(adapter, [key(0)], [memory(100, 0)]).is_successful()
    assert lookup(adapter, [key(0)]) == [True]


# -- faults --------------------------------------------------------------------------------------------


def test_killed_restarted_and_hung_redis(
    tmp_path_factory: pytest.TempPathFactory, make_adapter: MakeAdapter
) -> None:
    with running(tmp_path_factory.mktemp("r")) as server:
        adapter = make_adapter(server)
        keys, objects = [key(i) for i in range(4)], [memory(300_000, i) for i in range(4)]

        def works() -> bool:
            if not store(adapter, keys, objects).is_successful():
                return False
            room = [memory(300_000) for _ in keys]
            assert lookup(adapter, keys) == [True] * 4
            assert load(adapter, keys, room) == [True] * 4
            return [content(a) for a in room] == [content(a) for a in objects]

        assert works() and adapter.report_status()["is_healthy"]
        for fault, end in ((server.kill, server.start), (server.hang, server.go_on)):
            fault()
            start = time.monotonic()
            for _ in range(10):
                assert not store(adapter, keys, objects).is_successful()
                assert lookup(adapter, keys) == [False] * 4
                assert load(adapter, keys, [memory(300_000) for _ in keys]) == [False] * 4
            assert time.monotonic() - start < 8
            status = adapter.report_status()
            assert (
                not status["is_healthy"] and status["threads_alive"] and status["redis"]["open"] == ["redis"]
            )
            end()
            wait(works, "it works again")
            assert adapter.report_status()["is_healthy"]


def test_tasks_behind_a_busy_thread_end_in_time(make_adapter: MakeAdapter) -> None:
    """One load holds the only thread; those behind it end by their deadline and write nothing later."""
    twin = Twin()
    release = threading.Event()
    twin.before = lambda operation: release.wait(20) and None if operation == "load" else None
    adapter = make_adapter(twin, load_connections=1)
    store(adapter, [key(0)], [memory(100, 0)])
    rooms = [[memory(100)] for _ in range(4)]
    tasks = [adapter.submit_load_task([key(0)], room) for room in rooms]
    try:
        start = time.monotonic()
        late = set(tasks[1:])
        while late:
            assert ready(adapter.get_load_event_fd()), "a task did not end"
            late -= {task for task in set(late) if adapter.query_load_result(task) is not None}
        assert time.monotonic() - start < 8
    finally:
        release.set()
    bitmap = until(adapter.get_load_event_fd(), lambda: adapter.query_load_result(tasks[0]))
    assert bitmap.test(0)
    assert [content(room[0]) != bytes(100) for room in rooms] == [True, False, False, False]


def test_a_part_ends_once() -> None:
    ends: list[list[Outcome]] = []
    runs: list[int] = []

    def run(deadline: Deadline) -> list[Outcome]:
        runs.append(1)
        assert not part.give_up(Outcome.TIMEOUT)  # it runs: nobody may end it from outside
        return [Outcome.OK] * 2

    part = Part(2, Deadline(5), run, ends.append)
    part.carry_out()
    part.carry_out()
    assert not part.give_up(Outcome.CLOSED)
    assert ends == [[Outcome.OK] * 2] and runs == [1]
    late = Part(1, Deadline(-1), run, ends.append)
    assert late.give_up(Outcome.TIMEOUT)
    late.carry_out()
    assert ends[1:] == [[Outcome.TIMEOUT]] and runs == [1]
    short = Part(3, Deadline(5), lambda deadline: [Outcome.OK], ends.append)
    short.carry_out()
    assert ends[2:] == [[Outcome.ERROR] * 3]


def test_a_store_that_raises_ends_its_task(make_adapter: MakeAdapter) -> None:
    twin = Twin()

    def explode(operation: str) -> None:
        raise RuntimeError(operation)

    twin.before = explode
    adapter = make_adapter(twin)
    for _ in range(3):
        assert not store(adapter, [key(0)], [memory(100, 0)]).is_successful()
        assert lookup(adapter, [key(0)]) == [False] and load(adapter, [key(0)], [memory(100)]) == [False]
    twin.before = lambda operation: None
    assert store(adapter, [key(0)], [memory(100, 0)]).is_successful()


def test_random_faults_never_lose_a_task_or_serve_other_bytes(make_adapter: MakeAdapter) -> None:
    chance = random.Random(11)
    twin = Twin()
    bad = [Outcome.TIMEOUT, Outcome.UNREACHABLE, Outcome.CORRUPT, Outcome.SHORT, Outcome.OUT_OF_MEMORY]

    def explode(operation: str) -> None:
        if chance.random() < 0.1:
            raise RuntimeError("fault")
        if chance.random() < 0.2:
            time.sleep(0.001)

    twin.before = explode
    twin.fail = lambda operation: chance.choice(bad) if chance.random() < 0.3 else None
    adapter = make_adapter(twin, load_connections=3, store_connections=3)
    objects = {i: memory(2000, i) for i in range(20)}
    hits = 0
    for _ in range(150):
        chosen = chance.sample(range(20), chance.randrange(1, 6))
        keys = [key(i) for i in chosen]
        if chance.random() < 0.5:
            store(adapter, keys, [objects[i] for i in chosen])
            lookup(adapter, keys)
        else:
            room = [memory(2000) for _ in keys]
            for i, got, hit in zip(chosen, room, load(adapter, keys, room), strict=True):
                hits += hit
                assert not hit or content(got) == content(objects[i])
    assert hits > 20


def test_fenced_keys_are_neither_stored_nor_found(adapter: LeylineL2Adapter) -> None:
    store(adapter, [key(0)], [memory(100, 0)])
    adapter.fence.raise_barrier("f", keys=[kv_key(key(0)), kv_key(key(1))])
    # Refused on purpose: not a failure of the tier.
    result = store(adapter, [key(1), key(2)], [memory(100, 1), memory(100, 2)])
    assert result.is_successful() and result.bytes_transferred() == 100
    assert lookup(adapter, [key(0), key(1), key(2)]) == [False, False, True]
    assert load(adapter, [key(0)], [memory(100)]) == [False]
    assert adapter.erase([key(0), key(1)]) == [Outcome.OK, Outcome.MISSING]
    adapter.fence.lower("f")
    assert lookup(adapter, [key(0), key(1)]) == [False, False]


# -- begin and end -------------------------------------------------------------------------------------


def test_closing_ends_what_waits(make_adapter: MakeAdapter) -> None:
    twin = Twin()
    release = threading.Event()
    twin.before = lambda operation: release.wait(0.5) and None
    adapter = make_adapter(twin, store_connections=1)
    tasks = [adapter.submit_store_task([key(i)], [memory(100, i)]) for i in range(5)]
    adapter.close()
    done = adapter.pop_completed_store_tasks()
    assert set(done) == set(tasks) and not done[tasks[-1]].is_successful()
    late = adapter.submit_store_task([key(9)], [memory(100, 9)])
    assert not adapter.pop_completed_store_tasks()[late].is_successful()
    adapter.close()


def test_without_redis_it_starts_and_serves_misses(make_adapter: MakeAdapter, tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    try:
        adapter = make_adapter(server)
        assert lookup(adapter, [key(0)]) == [False]
        assert not adapter.report_status()["is_healthy"]
        server.start()
        wait(lambda: store(adapter, [key(0)], [memory(100, 0)]).is_successful(), "it is found")
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"hots": 1}, "hots: unknown key; known keys are config_file, load_connections"),
        ({"load_connections": 0}, "load_connections: expected an integer from 1 to 64"),
        ({"max_capacity_gb": -1}, "max_capacity_gb: expected"),
        ({"config_file": 3}, "config_file: expected a path"),
        ({"password": "x"}, "password: not accepted here"),
        ({"port": "x"}, "port: expected an integer"),
    ],
)
def test_wrong_parameters_are_named_at_start(params: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionsError, match=named):
        LeylineL2AdapterConfig.from_dict(params)


def test_a_config_file_and_parameters_over_it(tmp_path: Path) -> None:
    file = tmp_path / "redis.yaml"
    file.write_text("host: cache\nttl: 60\nload_connections: 7\n")
    options = L2Options.of({"config_file": str(file), "ttl": 90})
    assert (options.redis.host, options.redis.ttl, options.load_connections) == ("cache", 90, 7)
    assert "ttl" in LeylineL2AdapterConfig.help() and "load_connections" in LeylineL2AdapterConfig.help()


def test_ours_are_found_among_lmcaches_adapters(make_adapter: MakeAdapter) -> None:
    adapter = make_adapter(Twin())

    class Wrapper:
        _inner = adapter

    class Manager:
        def l2_adapters(self) -> list[tuple[object, object]]:
            return [(None, object()), (None, Wrapper()), (None, adapter)]

    assert adapters_of(Manager()) == [adapter, adapter]
