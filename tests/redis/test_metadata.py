"""Small records: the same promises from Redis and from memory; atomic, with TTL, damage by name (case T6)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from support.redis_servers import RedisServer, running, wait

from leyline_lmcache.connector.redis import (
    MemoryMetadata,
    MetadataStore,
    Outcome,
    RedisKVStore,
    RedisMetadata,
    RedisOptions,
    StorageError,
    open_metadata,
)
from leyline_lmcache.connector.redis.metadata import MAX_RECORD_BYTES, Conflict

pytestmark = pytest.mark.usefixtures("no_leaks")

BASE, VIEW, LINEAGE = ("base", "b1"), ("view", "v1"), ("lineage", "l1")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def records(store: RedisKVStore) -> RedisMetadata:
    return RedisMetadata(store.client)


@pytest.fixture(params=["redis", "memory"])
def any_records(request: pytest.FixtureRequest, records: RedisMetadata) -> MetadataStore:
    return records if request.param == "redis" else MemoryMetadata()


@pytest.fixture
def raw(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis_server.client() as client:
        yield client


def body(records: MetadataStore, family: str, name: tuple[str, str]) -> bytes | None:
    record = records.get(family, [name])[0]
    return None if record is None else record.body


def test_records_read_back_and_go(any_records: MetadataStore) -> None:
    family = "session: {1}/ü"
    revisions = any_records.put(family, {BASE: b"base", VIEW: b""})
    found = any_records.get(family, [VIEW, LINEAGE, BASE])
    assert [None if r is None else (r.kind, r.name, r.body) for r in found] == [
        ("view", "v1", b""),
        None,
        ("base", "b1", b"base"),
    ]
    assert found[2] is not None and found[2].revision == revisions[BASE] and found[2].family == family
    assert any_records.delete(family, [BASE, LINEAGE]) == 1 and any_records.delete(family, [BASE]) == 0
    assert body(any_records, family, BASE) is None and body(any_records, family, VIEW) == b""


def test_families_are_apart(any_records: MetadataStore) -> None:
    any_records.put("a", {BASE: b"1"})
    any_records.put("b", {BASE: b"2"})
    assert body(any_records, "a", BASE) == b"1" and body(any_records, "b", BASE) == b"2"
    assert sorted(any_records.scan()) == [("a", *BASE), ("b", *BASE)]
    assert list(any_records.scan("a")) == [("a", *BASE)]
    assert list(any_records.scan(kind="view")) == []


def test_nothing_is_nothing(any_records: MetadataStore) -> None:
    assert any_records.get("a", []) == [] and any_records.put("a", {}) == {}
    assert any_records.delete("a", []) == 0


def test_a_write_that_expects_another_revision_writes_nothing(any_records: MetadataStore) -> None:
    first = any_records.put("s", {VIEW: b"1"})[VIEW]
    with pytest.raises(Conflict):
        any_records.put("s", {VIEW: b"2", BASE: b"new"}, expect={VIEW: b"12345678"})
    with pytest.raises(Conflict):
        any_records.put("s", {BASE: b"new"}, expect={VIEW: None})
    with pytest.raises(Conflict):
        any_records.put("s", {BASE: b"new"}, expect={LINEAGE: first})
    assert body(any_records, "s", VIEW) == b"1" and body(any_records, "s", BASE) is None
    second = any_records.put("s", {VIEW: b"2", BASE: b"new"}, expect={VIEW: first, LINEAGE: None})[VIEW]
    assert second != first and body(any_records, "s", VIEW) == b"2"
    any_records.put("s", {VIEW: None}, expect={VIEW: second})
    assert body(any_records, "s", VIEW) is None and body(any_records, "s", BASE) == b"new"


def test_two_writers_never_both_win(any_records: MetadataStore) -> None:
    """Each thread counts up; every count that was confirmed is in the sum."""
    any_records.put("s", {VIEW: b"0"})
    wins: list[int] = []

    def work() -> None:
        won = 0
        for _ in range(60):
            record = any_records.get("s", [VIEW])[0]
            assert record is not None
            try:
                any_records.put("s", {VIEW: b"%d" % (int(record.body) + 1)}, expect={VIEW: record.revision})
                won += 1
            except Conflict:
                continue
        wins.append(won)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert body(any_records, "s", VIEW) == b"%d" % sum(wins) and sum(wins) >= 60


def test_readers_never_see_half_a_write(any_records: MetadataStore) -> None:
    """MULTI: both records of a turn or none."""
    stop = threading.Event()

    def write() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            any_records.put("s", {BASE: b"%d" % turn, VIEW: b"%d" % turn})

    any_records.put("s", {BASE: b"0", VIEW: b"0"})
    thread = threading.Thread(target=write)
    thread.start()
    try:
        last = 0
        for _ in range(300):
            base, view = any_records.get("s", [BASE, VIEW])
            assert base is not None and view is not None
            # The two are read one after the other: the later one may be newer, never older.
            assert last <= int(base.body) <= int(view.body)
            last = int(base.body)
    finally:
        stop.set()
        thread.join()


def test_too_long_is_refused(any_records: MetadataStore) -> None:
    with pytest.raises(ValueError, match="body: at most"):
        any_records.put("s", {BASE: b"ok", VIEW: bytes(MAX_RECORD_BYTES + 1)})
    with pytest.raises(ValueError, match="1 to 512 characters"):
        any_records.put("s" * 600, {BASE: b""})
    with pytest.raises(ValueError, match="1 to 512 characters"):
        any_records.get("s", [("base", "")])
    assert body(any_records, "s", BASE) is None


def test_ttl_begins_anew_with_each_use_and_is_each_records_own(
    records: RedisMetadata, raw: redis.Redis
) -> None:
    records.put("s", {BASE: b"1"})
    records.put("s", {VIEW: b"1"}, ttl=50)
    keys = [records.schema.meta("s", *name) for name in (BASE, VIEW)]
    assert raw.ttl(keys[0]) > 600_000 and 45 <= raw.ttl(keys[1]) <= 50
    for key in keys:
        raw.expire(key, 5)
    records.get("s", [BASE, VIEW])
    assert raw.ttl(keys[0]) > 600_000 and 45 <= raw.ttl(keys[1]) <= 50
    raw.pexpire(keys[1], 1)
    wait(lambda: not raw.exists(keys[1]), "it expires")
    assert body(records, "s", VIEW) is None and body(records, "s", BASE) == b"1"


def test_memory_forgets_by_time_and_by_size() -> None:
    clock = Clock()
    records = MemoryMetadata(capacity=1000, ttl=10, clock=clock)
    records.put("s", {BASE: b"1", VIEW: b"2"})
    records.put("s", {LINEAGE: b"3"}, ttl=100)
    clock.now = 8
    records.get("s", [BASE])
    clock.now = 15
    assert [r is not None for r in records.get("s", [BASE, VIEW, LINEAGE])] == [True, False, True]
    assert sorted(records.scan()) == [("s", *BASE), ("s", *LINEAGE)]
    for i in range(20):
        records.put("big", {("base", str(i)): bytes(300)})
    assert len(list(records.scan())) <= 4 and records.status()["used_bytes"] <= 1000


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], Outcome]] = {
    "cut": (lambda value: value[:-1], Outcome.SHORT),
    "a bit": (lambda value: value[:-1] + bytes([value[-1] ^ 1]), Outcome.CORRUPT),
    "empty": (lambda value: b"", Outcome.FOREIGN),
    "other schema": (lambda value: b"LEY\x09" + value[4:], Outcome.FOREIGN),
    "text": (lambda value: b"hello", Outcome.FOREIGN),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_an_error_with_a_name(
    records: RedisMetadata, raw: redis.Redis, damage: str
) -> None:
    change, outcome = DAMAGES[damage]
    records.put("s", {BASE: b"body of the record", VIEW: b"fine"})
    key = records.schema.meta("s", *BASE)
    value = raw.get(key)
    assert isinstance(value, bytes)
    raw.set(key, change(value))
    with pytest.raises(StorageError, match="record base 'b1' of 's'") as error:
        records.get("s", [VIEW, BASE])
    assert error.value.outcome is outcome and "body of the record" not in str(error.value)
    assert body(records, "s", VIEW) == b"fine"
    records.put("s", {BASE: b"again"})
    assert body(records, "s", BASE) == b"again"


def test_a_record_under_another_name_is_foreign(records: RedisMetadata, raw: redis.Redis) -> None:
    records.put("s", {BASE: b"1"})
    raw.copy(records.schema.meta("s", *BASE), records.schema.meta("t", *BASE))
    with pytest.raises(StorageError) as error:
        records.get("t", [BASE])
    assert error.value.outcome is Outcome.FOREIGN


def test_outages_are_errors_with_a_name(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running(tmp_path_factory.mktemp("r")) as server:
        options = RedisOptions.of({"url": server.url, "breaker_base": 0.05, "breaker_cap": 0.2}, {})
        records = open_metadata(options)
        try:
            records.put("s", {BASE: b"1"})
            server.kill()
            for call in (
                lambda: records.get("s", [BASE]),
                lambda: records.put("s", {BASE: b"2"}),
                lambda: records.delete("s", [BASE]),
                lambda: list(records.scan()),
            ):
                with pytest.raises(StorageError) as error:
                    call()
                assert error.value.outcome.is_outage
            start = time.monotonic()
            for _ in range(100):
                with pytest.raises(StorageError):
                    records.get("s", [BASE])
            assert time.monotonic() - start < 5
            server.start()
            wait(lambda: records.status()["up"], "it is used again")
            assert records.get("s", [BASE]) == [None]
            records.put("s", {BASE: b"3"})
        finally:
            records.close()


def test_full_redis_writes_all_or_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running(tmp_path_factory.mktemp("r"), "--maxmemory", "1mb") as server:
        records = open_metadata(RedisOptions.of({"url": server.url}, {}))
        try:
            with pytest.raises(StorageError) as error:
                records.put("s", {BASE: b"1", VIEW: bytes(100_000)})
            assert error.value.outcome is Outcome.OUT_OF_MEMORY
            assert records.get("s", [BASE, VIEW]) == [None, None]
        finally:
            records.close()


def test_a_command_that_is_not_allowed_does_not_take_the_others_along(
    redis_server: RedisServer, tmp_path: Path, raw: redis.Redis
) -> None:
    (tmp_path / "secret").write_text("right")
    rights = "on >right ~leyline:* +get +set +multi +exec +@connection"
    raw.execute_command("ACL", "SETUSER", "few", *rights.split())
    values = {"url": f"redis://few@127.0.0.1:{redis_server.port}", "password_file": str(tmp_path / "secret")}
    records = open_metadata(RedisOptions.of(values, {}))
    try:
        records.put("s", {BASE: b"1"})
        for _ in range(2):
            with pytest.raises(StorageError) as error:
                records.delete("s", [BASE])
            assert error.value.outcome is Outcome.DENIED
        assert body(records, "s", BASE) == b"1" and records.status()["up"]
    finally:
        records.close()
        raw.acl_deluser("few")


def test_a_replica_serves_records(tmp_path_factory: pytest.TempPathFactory) -> None:
    with (
        running(tmp_path_factory.mktemp("p"), "--repl-diskless-sync-delay", "0") as primary,
        running(tmp_path_factory.mktemp("r")) as replica,
    ):
        writer = open_metadata(RedisOptions.of({"url": primary.url}, {}))
        reader = open_metadata(RedisOptions.of({"url": replica.url}, {}))
        try:
            writer.put("s", {BASE: b"1"})
            with replica.client() as client:
                client.replicaof("127.0.0.1", primary.port)
                wait(lambda: client.dbsize() == 1, "it is in sync")
            assert body(reader, "s", BASE) == b"1"
            with pytest.raises(StorageError) as error:
                reader.put("s", {BASE: b"2"})
            assert error.value.outcome is Outcome.READ_ONLY
        finally:
            writer.close()
            reader.close()


def test_without_redis_records_live_in_memory() -> None:
    records = open_metadata(None)
    records.put("s", {BASE: b"1"})
    assert body(records, "s", BASE) == b"1" and records.status()["where"] == "memory"
    records.close()
