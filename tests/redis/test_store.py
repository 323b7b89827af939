"""KV blocks on a real Redis: what is stored comes back, everything else is a miss with a name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from support.kv import block, empty, items, key_of
from support.redis_servers import RedisServer, wait

from leyline_lmcache.connector.redis import KVKey, MemoryKVStore, Outcome, RedisKVStore
from leyline_lmcache.connector.redis.codec import PREAMBLE, pack
from leyline_lmcache.connector.redis.keys import digest
from leyline_lmcache.connector.redis.store import KVStore, audit, entries
from leyline_lmcache.connector.redis.wire import Deadline

pytestmark = pytest.mark.usefixtures("no_leaks")

OK, MISSING = Outcome.OK, Outcome.MISSING


@pytest.fixture(params=["redis", "memory"])
def any_store(request: pytest.FixtureRequest, store: RedisKVStore) -> KVStore:
    """Both kinds keep the same promises."""
    return store if request.param == "redis" else MemoryKVStore()


@pytest.fixture
def raw(redis_server: RedisServer) -> redis.Redis:
    with redis_server.client() as client:
        yield client


def test_blocks_of_every_size_come_back(any_store: KVStore) -> None:
    # Around the sizes at which buffers fill and sends are split.
    sizes = [1, 2, 3985, 4000, 4095, 4096, 4097, 65_535, 65_536, 262_144, (1 << 19) + 1, 1 << 20, 8 << 20, 7]
    stored = items(sizes)
    loaded = empty(stored)
    assert any_store.store(stored) == [OK] * len(sizes)
    assert any_store.lookup([key for key, _ in stored]) == [OK] * len(sizes)
    assert any_store.load(loaded) == [OK] * len(sizes)
    assert [view == loaded[i][1] for i, (_, view) in enumerate(stored)] == [True] * len(sizes)
    assert any_store.verify([key for key, _ in stored]) == [OK] * len(sizes)


def test_an_empty_block_is_a_block(any_store: KVStore) -> None:
    stored = items([0])
    assert any_store.store(stored) == [OK] and any_store.load(empty(stored)) == [OK]


def test_nothing_to_do_is_nothing(any_store: KVStore) -> None:
    for call in (any_store.store, any_store.load, any_store.lookup, any_store.delete, any_store.verify):
        assert call([]) == []


def test_many_small_blocks_in_one_call(any_store: KVStore) -> None:
    stored = items([100 + i % 50 for i in range(3000)])
    loaded = empty(stored)
    assert set(any_store.store(stored)) == {OK} and set(any_store.load(loaded)) == {OK}
    assert all(view == loaded[i][1] for i, (_, view) in enumerate(stored))


def test_a_later_store_replaces(any_store: KVStore) -> None:
    key = key_of(1)
    for size, seed in ((1000, 1), (2000, 2)):
        assert any_store.store([(key, block(size, seed))]) == [OK]
    view = memoryview(bytearray(2000))
    assert any_store.load([(key, view)]) == [OK] and view == block(2000, 2)


def test_missing_blocks_leave_their_neighbours_alone(any_store: KVStore) -> None:
    stored = items([70_000] * 9)
    any_store.store(stored[::2])
    loaded = empty(stored)
    expected = [OK if i % 2 == 0 else MISSING for i in range(9)]
    assert any_store.lookup([key for key, _ in stored]) == expected
    assert any_store.load(loaded) == expected
    assert all(stored[i][1] == loaded[i][1] for i in range(0, 9, 2))


def test_delete_says_what_was_there(any_store: KVStore) -> None:
    stored = items([10, 10, 10])
    keys = [key for key, _ in stored]
    any_store.store(stored[:2])
    assert any_store.delete(keys) == [OK, OK, MISSING]
    assert any_store.delete(keys) == [MISSING] * 3
    assert any_store.lookup(keys) == [MISSING] * 3


def test_keys_differ_in_every_part(any_store: KVStore) -> None:
    base = KVKey("m", b"\x01", rank=1, group=1, salt="s")
    others = [
        KVKey("n", b"\x01", 1, 1, "s"),
        KVKey("m", b"\x02", 1, 1, "s"),
        KVKey("m", b"\x01", 2, 1, "s"),
        KVKey("m", b"\x01", 1, 2, "s"),
        KVKey("m", b"\x01", 1, 1, "t"),
        KVKey("m", b"\x01", 1, 1, ""),
    ]
    any_store.store([(base, block(64))])
    assert any_store.lookup(others) == [MISSING] * len(others)


def test_listing_gives_every_block_once_in_pages(any_store: KVStore) -> None:
    stored = items([33] * 137, salt="tenant: a/b~ü")
    any_store.store(stored)
    any_store.store([(key_of(1, model="other"), block(5))])
    pages, cursor = [], None
    while True:
        page = any_store.scan("org/model", 10, cursor)
        assert len(page.entries) <= 10
        pages += page.entries
        if (cursor := page.cursor) is None:
            break
    assert sorted(entry.key.chunk for entry in pages) == sorted(key.chunk for key, _ in stored)
    assert {entry.key.salt for entry in pages} == {"tenant: a/b~ü"}
    assert all(entry.size >= 33 for entry in pages)
    assert len(list(entries(any_store))) == 138


def test_a_wrong_cursor_is_said(any_store: KVStore) -> None:
    for cursor in ("zzz", "", "W10=", "WyJhIiwgMSwgLTFd"):
        with pytest.raises(ValueError, match="cursor"):
            any_store.scan(cursor=cursor)
    with pytest.raises(ValueError, match="limit"):
        any_store.scan(limit=0)


def test_a_listing_ignores_what_is_not_ours(store: RedisKVStore, raw: redis.Redis) -> None:
    store.store(items([10]))
    raw.set("leyline:1:kv:x", b"1")
    raw.set("leyline:1:meta:{a}:b:c", b"1")
    raw.set("leyline:2:kv:org/model::0:0::aa", b"1")
    raw.lpush("leyline:1:kv:org/model::0:0::bb", b"1")
    assert [entry.key for entry in entries(store)] == [key_of(0)]


# -- values that cannot be used --------------------------------------------------------------------


def stored_value(store: RedisKVStore, raw: redis.Redis, size: int = 200_000) -> tuple[bytes, bytes]:
    """Store one block; its key in Redis and its value there."""
    assert store.store(items([size])) == [OK]
    name = store.schema.kv(key_of(0))
    value = raw.get(name)
    assert isinstance(value, bytes)
    return name, value


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], Outcome]] = {
    "cut in the payload": (lambda value: value[:-1], Outcome.SHORT),
    "cut in the header": (lambda value: value[: PREAMBLE.size + 5], Outcome.SHORT),
    "cut in the preamble": (lambda value: value[:3], Outcome.FOREIGN),
    "empty": (lambda value: b"", Outcome.FOREIGN),
    "longer": (lambda value: value + b"x", Outcome.SHORT),
    "a byte of the payload": (
        lambda value: value[:-9] + bytes([value[-9] ^ 1]) + value[-8:],
        Outcome.CORRUPT,
    ),
    "no header": (lambda value: b"\x00" * len(value), Outcome.FOREIGN),
    "other schema": (lambda value: b"LEY\x02" + value[4:], Outcome.FOREIGN),
    "resp adapter's": (lambda value: value[-200_000:], Outcome.FOREIGN),
    "another key's": (lambda value: pack(value[-200_000:], b"12345678", "org/model"), Outcome.FOREIGN),
    "another model's": (
        lambda value: pack(value[-200_000:], digest(b"leyline:1:kv:org/model"), "x"),
        Outcome.FOREIGN,
    ),
    "huge": (lambda value: value + bytes(70 << 20), Outcome.SHORT),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_value_is_a_miss_by_name(store: RedisKVStore, raw: redis.Redis, damage: str) -> None:
    change, outcome = DAMAGES[damage]
    name, value = stored_value(store, raw)
    neighbours = items([150_000] * 4, first=10)
    store.store(neighbours)
    raw.set(name, change(value))
    assert store.verify([key_of(0)]) == [outcome]
    wanted = empty([*neighbours[:2], *items([200_000]), *neighbours[2:]])
    assert store.load(wanted) == [OK, OK, outcome, OK, OK]
    assert all(a[1] == b[1] for a, b in zip(neighbours, wanted[:2] + wanted[3:], strict=True))
    assert store.counters.count("load", outcome) == 1
    # Damaged values go, so that lookups stop promising them; what somebody else wrote stays.
    gone = outcome in (Outcome.SHORT, Outcome.CORRUPT)
    assert store.lookup([key_of(0)]) == [MISSING if gone else OK]
    assert store.store(items([200_000])) == [OK]
    assert store.load(empty(items([200_000]))) == [OK]


def test_a_key_of_another_type_is_a_miss(store: RedisKVStore, raw: redis.Redis) -> None:
    raw.lpush(store.schema.kv(key_of(0)), b"1")
    assert store.load(empty(items([10, 10]))) == [Outcome.FOREIGN, MISSING]


def test_a_block_of_another_length_is_a_miss_and_stays(store: RedisKVStore) -> None:
    store.store(items([1000]))
    for size in (999, 1001, 0):
        assert store.load([(key_of(0), memoryview(bytearray(size)))]) == [Outcome.FOREIGN]
    assert store.load(empty(items([1000]))) == [OK]


def test_models_of_one_name_are_told_apart(
    redis_server: RedisServer, make_store: Callable[..., RedisKVStore]
) -> None:
    one, other = (make_store(redis_server, model_identity=identity) for identity in ("rev 1", "rev 2"))
    one.store(items([50]))
    assert other.lookup([key_of(0)]) == [MISSING] and one.lookup([key_of(0)]) == [OK]
    # Even under the same key the header tells them apart.
    with redis_server.client() as client:
        client.rename(one.schema.kv(key_of(0)), other.schema.kv(key_of(0)))
    assert other.load(empty(items([50]))) == [Outcome.FOREIGN]
    assert list(entries(other)) != [] and list(entries(one)) == []


def test_prefixes_part_deployments(
    redis_server: RedisServer, make_store: Callable[..., RedisKVStore]
) -> None:
    one, other = make_store(redis_server, prefix="a"), make_store(redis_server, prefix="b")
    one.store(items([50]))
    assert other.lookup([key_of(0)]) == [MISSING] and list(entries(other)) == []


def test_what_is_too_long_for_redis_is_refused_without_sending(store: RedisKVStore) -> None:
    class Long(bytearray):
        def __len__(self) -> int:
            return 1 << 30

    wanted = [*items([10]), (key_of(5), Long()), *items([10], first=1)]
    assert store.store(wanted) == [OK, Outcome.TOO_LARGE, OK]  # type: ignore[arg-type]


def test_an_audit_counts_what_is_wrong(store: RedisKVStore, raw: redis.Redis) -> None:
    store.store(items([3000] * 150))
    for number, value in ((3, b"foreign"), (7, b"LEY\x01\x00\x10")):
        raw.set(store.schema.kv(key_of(number)), value)
    name = store.schema.kv(key_of(9))
    raw.setrange(name, 2000, b"\x00\x01\x02")
    assert audit(store) == {OK: 147, Outcome.FOREIGN: 1, Outcome.SHORT: 1, Outcome.CORRUPT: 1}
    assert audit(store, "other model") == {}


# -- time to live ------------------------------------------------------------------------------------


def test_a_block_expires_and_use_prolongs_it(
    redis_server: RedisServer, make_store: Callable[..., RedisKVStore], raw: redis.Redis
) -> None:
    store = make_store(redis_server, ttl=100)
    store.store(items([10, 10]))
    names = [store.schema.kv(key_of(i)) for i in range(2)]
    for name in names:
        assert 95 <= raw.ttl(name) <= 100
        raw.expire(name, 10)
    assert store.lookup([key_of(0)]) == [OK]
    assert raw.ttl(names[0]) > 90 and raw.ttl(names[1]) <= 10
    raw.pexpire(names[1], 1)
    wait(lambda: not raw.exists(names[1]), "it expires")
    assert store.lookup([key_of(1)]) == [MISSING] and store.load(empty(items([10], 1))) == [MISSING]


def test_without_ttl_blocks_stay(store: RedisKVStore, raw: redis.Redis) -> None:
    store.store(items([10]))
    assert raw.ttl(store.schema.kv(key_of(0))) == -1


def test_a_block_that_vanishes_between_lookup_and_load_is_a_miss(
    store: RedisKVStore, raw: redis.Redis
) -> None:
    store.store(items([70_000] * 3))
    assert store.lookup([key_of(i) for i in range(3)]) == [OK] * 3
    raw.delete(store.schema.kv(key_of(1)))
    assert store.load(empty(items([70_000] * 3))) == [OK, MISSING, OK]


# -- many at once ------------------------------------------------------------------------------------


def test_threads_do_not_mix_up_their_blocks(store: RedisKVStore) -> None:
    def work(number: int) -> list[str]:
        faults = []
        for turn in range(6):
            mine = items([1000 + 37 * turn, 90_000, 300_000], first=1000 * number + 10 * turn)
            found = empty(mine)
            if set(store.store(mine)) != {OK} or set(store.load(found)) != {OK}:
                faults.append(f"{number}/{turn}: not stored or loaded")
            if any(a[1] != b[1] for a, b in zip(mine, found, strict=True)):
                faults.append(f"{number}/{turn}: other bytes")
            if store.delete([mine[0][0]]) != [OK]:
                faults.append(f"{number}/{turn}: not deleted")
        return faults

    with ThreadPoolExecutor(8) as pool:
        assert [fault for faults in pool.map(work, range(8)) for fault in faults] == []


def test_a_deadline_that_has_passed_ends_at_once_and_blames_nobody(store: RedisKVStore) -> None:
    store.store(items([10]))
    past = Deadline(-1.0)
    assert store.store(items([10]), past) == [Outcome.TIMEOUT]
    assert store.lookup([key_of(0)], past) == [Outcome.TIMEOUT]
    assert store.client.is_up and store.lookup([key_of(0)]) == [OK]


def test_counters_tell_what_happened(store: RedisKVStore) -> None:
    store.store(items([1000, 2000]))
    store.load(empty(items([1000, 2000, 3000])))
    counted = store.status()["operations"]
    assert counted["store"] | {"seconds": 0} == {"calls": 1, "keys": {"ok": 2}, "bytes": 3000, "seconds": 0}
    assert counted["load"]["keys"] == {"ok": 2, "missing": 1} and counted["load"]["bytes"] == 3000
    assert counted["load"]["seconds"] > 0


def test_after_close_everything_ends(
    redis_server: RedisServer, make_store: Callable[..., RedisKVStore]
) -> None:
    store = make_store(redis_server)
    store.store(items([10]))
    store.close()
    store.close()
    assert store.load(empty(items([10]))) == [Outcome.CLOSED]
    assert threading.active_count() == len([thread for thread in threading.enumerate() if thread.is_alive()])
    start = time.monotonic()
    assert store.store(items([10])) == [Outcome.CLOSED] and time.monotonic() - start < 5
