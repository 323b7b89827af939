"""The fence: what a FORGET covers does not come back, whatever was under way (I8)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
from support.kv import block, empty, items, key_of
from support.redis_servers import RedisServer, running, wait
from support.twin import Twin

from leyline_lmcache.connector.fence import Fence
from leyline_lmcache.connector.fenced import FencedStore
from leyline_lmcache.connector.redis import KVKey, Outcome, RedisKVStore
from leyline_lmcache.connector.redis.store import entries

pytestmark = pytest.mark.usefixtures("no_leaks")

OK, MISSING, FENCED = Outcome.OK, Outcome.MISSING, Outcome.FENCED
MakeStore = Callable[..., RedisKVStore]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# -- the fence itself ----------------------------------------------------------------------------------


def test_barriers_cover_keys_and_whole_salts() -> None:
    fence = Fence()
    assert not fence.covers(key_of(1))
    fence.raise_barrier("f1", keys=[key_of(1)])
    fence.raise_barrier("f2", salts=["tenant~abc"])
    assert fence.covers(key_of(1)) and not fence.covers(key_of(2))
    assert fence.covers(key_of(2, salt="tenant~abc")) and not fence.covers(key_of(1, salt="tenant"))
    assert fence.covered([key_of(1), key_of(2)]) == {key_of(1)}
    fence.raise_barrier("f1", keys=[key_of(2)])
    assert fence.covers(key_of(1)) and fence.covers(key_of(2))
    assert fence.lower("f1") and not fence.lower("f1") and not fence.covers(key_of(1))
    assert len(fence) == 1


def test_barriers_that_overlap_do_not_lower_each_other() -> None:
    clock = Clock()
    fence = Fence(clock)
    fence.raise_barrier("a", keys=[key_of(1), key_of(2)], salts=["s"])
    fence.raise_barrier("b", keys=[key_of(2)], salts=["s"], ttl=5)
    fence.raise_barrier("b", keys=[key_of(3)], ttl=10)
    fence.lower("a")
    assert [fence.covers(key_of(i)) for i in (1, 2, 3)] == [False, True, True]
    assert fence.covers(key_of(1, salt="s"))
    clock.now = 7  # what was raised again counts from then
    assert fence.covers(key_of(2))
    clock.now = 11
    assert not any(fence.covers(key_of(i, salt=s)) for i in (1, 2, 3) for s in ("", "s"))


def test_a_barrier_may_lower_itself() -> None:
    clock = Clock()
    fence = Fence(clock)
    fence.raise_barrier("f", keys=[key_of(1)], ttl=10)
    clock.now = 9.9
    assert fence.covers(key_of(1))
    clock.now = 10.1
    assert not fence.covers(key_of(1)) and len(fence) == 0


def test_waiting_for_stores_waits_for_those_that_began_before_and_touch_it() -> None:
    fence = Fence()
    with fence.storing([key_of(9)]):
        fence.raise_barrier("f", keys=[key_of(1)])
        assert fence.wait_for_stores("f", 0.0)  # another key's store is nobody's business
    release = threading.Event()
    inside = threading.Event()

    def store() -> None:
        with fence.storing([key_of(2)]):
            inside.set()
            release.wait()

    thread = threading.Thread(target=store)
    thread.start()
    inside.wait()
    fence.raise_barrier("g", keys=[key_of(2)])
    assert not fence.wait_for_stores("g", 0.05)
    release.set()
    assert fence.wait_for_stores("g", 5.0)
    thread.join()
    assert fence.wait_for_stores("unknown", 0.0)


# -- a store behind it ---------------------------------------------------------------------------------


def fenced() -> tuple[FencedStore, Twin, Fence, Clock]:
    clock = Clock()
    twin, fence = Twin(), Fence()
    return FencedStore(twin, fence, clock), twin, fence, clock


def there(twin: Twin) -> set[KVKey]:
    return {entry.key for entry in entries(twin.memory)}


def test_behind_a_barrier_nothing_is_stored_found_or_loaded() -> None:
    store, twin, fence, _ = fenced()
    stored = items([10] * 4)
    assert store.store(stored) == [OK] * 4
    fence.raise_barrier("f", keys=[key_of(1), key_of(5)])
    assert store.lookup([key for key, _ in stored]) == [OK, FENCED, OK, OK]
    assert store.load(empty(stored)) == [OK, FENCED, OK, OK]
    assert store.store([*items([10], 5), *items([10], 6)]) == [FENCED, OK]
    assert key_of(5) not in there(twin)
    # Whoever forgets still sees and deletes what is there.
    assert store.verify([key_of(1)]) == [OK] and store.delete([key_of(1)]) == [OK]
    fence.lower("f")
    assert store.lookup([key_of(1)]) == [MISSING] and store.store(items([10], 1)) == [OK]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_store_that_meets_a_barrier_takes_back_what_it_wrote(moment: str) -> None:
    store, twin, fence, _ = fenced()

    def raise_it(operation: str) -> None:
        if operation == "store":
            fence.raise_barrier("f", keys=[key_of(1)])

    setattr(twin, moment, raise_it)
    assert store.store(items([10] * 3)) == [OK, FENCED, OK]
    assert there(twin) == {key_of(0), key_of(2)} and not store.pending


@pytest.mark.parametrize("operation", ["load", "lookup"])
def test_a_barrier_raised_while_a_value_is_under_way_makes_it_a_miss(operation: str) -> None:
    store, twin, fence, _ = fenced()
    store.store(items([10] * 2))
    twin.after = lambda done: fence.raise_barrier("f", keys=[key_of(1)]) if done == operation else None
    if operation == "load":
        assert store.load(empty(items([10] * 2))) == [OK, FENCED]
    else:
        assert store.lookup([key_of(0), key_of(1)]) == [OK, FENCED]


def test_a_deletion_that_fails_stays_pending_until_it_is_done() -> None:
    store, twin, fence, clock = fenced()
    down = [False]

    def raise_it(operation: str) -> None:
        if operation == "store":
            fence.raise_barrier("f", keys=[key_of(0)])
            down[0] = True

    twin.after = raise_it
    twin.fail = lambda operation: Outcome.UNREACHABLE if operation == "delete" and down[0] else None
    assert store.store(items([10])) == [FENCED]
    assert store.pending == {key_of(0)} and there(twin) == {key_of(0)}
    for _ in range(3):
        clock.now += 1
        assert store.flush() == 1
    down[0] = False
    for _ in range(4):
        clock.now += 1
        store.flush()
    assert not store.pending and there(twin) == set()


def test_a_write_that_a_hung_server_carries_out_later_is_undone() -> None:
    """Store times out, then comes the FORGET, then Redis goes on and writes what it had read."""
    store, twin, fence, clock = fenced()
    twin.fail = lambda operation: Outcome.TIMEOUT
    assert store.store(items([10])) == [Outcome.TIMEOUT]
    fence.raise_barrier("f", keys=[key_of(0)])
    clock.now += 1
    assert store.flush() == 1
    twin.fail = lambda operation: None
    clock.now += 1
    store.flush()  # the deletion overtakes the write
    twin.catch_up()
    assert there(twin) == {key_of(0)}
    assert store.pending == {key_of(0)}, "one look that finds nothing is not enough"
    for _ in range(4):
        clock.now += 1
        store.flush()
    assert there(twin) == set() and not store.pending


def test_a_store_of_unknown_end_that_meets_a_barrier_stays_pending() -> None:
    store, twin, fence, clock = fenced()
    twin.fail = lambda operation: Outcome.TIMEOUT if operation == "store" else None
    twin.after = lambda op: fence.raise_barrier("f", keys=[key_of(0)]) if op == "store" else None
    assert store.store(items([10])) == [FENCED]
    assert store.pending == {key_of(0)}
    twin.catch_up()
    for _ in range(4):
        clock.now += 1
        store.flush()
    assert there(twin) == set() and not store.pending


def test_what_is_uncertain_is_forgotten_in_time() -> None:
    store, twin, fence, clock = fenced()
    twin.fail = lambda operation: Outcome.TIMEOUT
    store.store(items([10] * 5))
    clock.now += 1000
    store.flush()
    fence.raise_barrier("f", keys=[key_of(0)])
    assert store.flush() == 0 and not store.pending


# -- races, with the real Redis ------------------------------------------------------------------------


def test_forget_against_stores_over_and_over(redis_server: RedisServer, make_store: MakeStore) -> None:
    """Barrier, wait, delete, look: never a key left, never one that comes back while the barrier stands."""
    fence = Fence()
    store = FencedStore(make_store(redis_server), fence)
    chance = random.Random(7)
    blocks = [block(40_000, i) for i in range(4)]
    for turn in range(150):
        keys = [key_of(10 * turn + i) for i in range(4)]
        wanted = list(zip(keys, blocks, strict=True))
        threads = [threading.Thread(target=store.store, args=(wanted,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(chance.random() * 0.002)
        fence.raise_barrier("f", keys=keys[:2])
        assert fence.wait_for_stores("f", 10.0)
        store.delete(keys[:2])
        with redis_server.client() as client:
            left = [client.exists(store.inner.schema.kv(key)) for key in keys]  # type: ignore[attr-defined]
            assert left[:2] == [0, 0], f"turn {turn}"
        for thread in threads:
            thread.join()
        assert store.inner.lookup(keys)[:2] == [MISSING] * 2
        assert store.lookup(keys) == [FENCED, FENCED, OK, OK]
        fence.lower("f")


def test_forget_while_redis_hangs(tmp_path_factory: pytest.TempPathFactory, make_store: MakeStore) -> None:
    """The writes lie in the server's socket; when it goes on, they are carried out and undone."""
    with running(tmp_path_factory.mktemp("r")) as server:
        fence = Fence()
        store = FencedStore(make_store(server, socket_timeout=0.2, task_timeout=0.4), fence)
        for turn in range(3):
            keys = [key_of(10 * turn + i) for i in range(3)]
            store.lookup(keys)
            server.hang()
            # Small enough for the socket's buffer: sent whole, answered never.
            assert set(store.store([(key, block(2000)) for key in keys])) == {Outcome.TIMEOUT}
            fence.raise_barrier("f", keys=keys)
            store.flush()
            assert store.pending == set(keys)
            server.go_on()

            def clean() -> bool:
                return store.flush() == 0

            wait(clean, "the deletions are carried out")
            with server.client() as client:
                assert client.dbsize() == 0
            fence.lower("f")
