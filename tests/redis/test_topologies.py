"""TLS, Unix sockets, Sentinel and Cluster, with real processes (case T7)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis.crc import key_slot
from support.kv import block, empty, items, key_of
from support.redis_servers import (
    Certificates,
    RedisServer,
    Sentinels,
    certificates,
    cluster,
    running,
    sentinels,
    wait,
)

from leyline_lmcache.connector.redis import Outcome, RedisKVStore, RedisMetadata
from leyline_lmcache.connector.redis.store import entries

pytestmark = pytest.mark.usefixtures("no_leaks")

OK, MISSING = Outcome.OK, Outcome.MISSING
MakeStore = Callable[..., RedisKVStore]
SIZES = [10, 5000, 70_000, 1 << 20, 3 << 20]


def round_trip(store: RedisKVStore, first: int = 0) -> None:
    """Blocks of several sizes come back, are listed, checked and deleted."""
    stored = items(SIZES, first)
    found = empty(stored)
    keys = [key for key, _ in stored]
    assert store.store(stored) == [OK] * len(SIZES)
    assert store.lookup(keys) == [OK] * len(SIZES)
    assert store.load(found) == [OK] * len(SIZES)
    assert [a[1] == b[1] for a, b in zip(stored, found, strict=True)] == [True] * len(SIZES)
    assert store.verify(keys) == [OK] * len(SIZES)
    assert {entry.key for entry in entries(store, limit=2)} >= set(keys)
    assert store.delete(keys) == [OK] * len(SIZES) and store.delete(keys) == [MISSING] * len(SIZES)


# -- TLS and Unix sockets ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("certs"))


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory, certs: Certificates) -> Iterator[RedisServer]:
    """A server that wants TLS and a certificate of the client's, and has a user with a password."""
    files = {"cert": certs.certificate, "key": certs.key, "ca-cert": certs.authority}
    lines = ["tls-auth-clients yes", "user kv on >hunter2 ~leyline:* +@all"]
    lines += [f"tls-{name}-file {path}" for name, path in files.items()]
    server = RedisServer(tmp_path_factory.mktemp("tls"), config="\n".join(lines), tls=True)
    server.ready = lambda: b"PONG" in _tls_ping(server.port, certs)
    try:
        yield server.start()
    finally:
        server.stop()


def _tls_ping(port: int, certs: Certificates) -> bytes:
    import socket
    import ssl

    context = ssl.create_default_context(cafile=str(certs.authority))
    context.load_cert_chain(certs.certificate, certs.key)
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=1) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped,
        ):
            wrapped.sendall(b"PING\r\n")
            return wrapped.recv(64)
    except OSError:
        return b""


def test_tls_with_client_certificate_and_acl_user(
    tls: RedisServer, certs: Certificates, make_store: MakeStore, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("hunter2\n")
    store = make_store(
        f"rediss://kv@127.0.0.1:{tls.port}",
        password_file=str(tmp_path / "secret"),
        ssl_ca_certs=str(certs.authority),
        ssl_certfile=str(certs.certificate),
        ssl_keyfile=str(certs.key),
        ttl=1000,
    )
    round_trip(store)
    # Ends of a value and a header may fall into one TLS record or into two.
    stored = items([4096 * i + j for i in range(4) for j in range(4090, 4100)], first=50)
    found = empty(stored)
    assert set(store.store(stored)) == {OK} and set(store.load(found)) == {OK}
    assert all(a[1] == b[1] for a, b in zip(stored, found, strict=True))


def test_tls_refuses_a_server_it_cannot_check(
    tls: RedisServer, certs: Certificates, make_store: MakeStore, tmp_path: Path
) -> None:
    other = certificates(tmp_path / "other")
    mine = {"ssl_certfile": str(certs.certificate), "ssl_keyfile": str(certs.key)}
    stranger = make_store(f"rediss://127.0.0.1:{tls.port}", ssl_ca_certs=str(other.authority), **mine)
    assert stranger.store(items([10])) == [Outcome.UNREACHABLE]
    unchecked = make_store(f"rediss://127.0.0.1:{tls.port}", ssl_cert_reqs="none", **mine)
    assert unchecked.client.options.ssl and unchecked.lookup([key_of(0)]) == [MISSING]


def test_tls_against_a_server_without_it(redis_server: RedisServer, make_store: MakeStore) -> None:
    store = make_store(f"rediss://127.0.0.1:{redis_server.port}", socket_timeout=0.3)
    assert store.store(items([10]))[0].is_outage


def test_unix_socket(tmp_path: Path, make_store: MakeStore) -> None:
    with running(tmp_path, "--unixsocket", str(tmp_path / "s")):
        round_trip(make_store(f"unix://{tmp_path / 's'}?db=3"))


def test_databases_are_apart(redis_server: RedisServer, make_store: MakeStore) -> None:
    one, other = make_store(f"{redis_server.url}/1"), make_store(f"{redis_server.url}/2")
    round_trip(one)
    one.store(items([10]))
    assert other.lookup([key_of(0)]) == [MISSING]


# -- Sentinel ----------------------------------------------------------------------------------------


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Sentinels]:
    with sentinels(tmp_path) as started:
        yield started


def _fails_over(sentinel: redis.Redis) -> bool:
    try:
        return bool(sentinel.sentinel_failover("mymaster"))
    except redis.exceptions.ResponseError:
        return False


def _behind(make_store: MakeStore, watched: Sentinels, **options: object) -> RedisKVStore:
    addresses = [f"127.0.0.1:{watched.sentinel.port}"]
    return make_store("", sentinels=addresses, service_name="mymaster", **options)


def test_sentinel_finds_the_primary_and_follows_a_failover(watched: Sentinels, make_store: MakeStore) -> None:
    store = _behind(make_store, watched)
    records = RedisMetadata(store.client)
    round_trip(store)
    stored = items([100_000] * 4)
    assert store.store(stored) == [OK] * 4
    records.put("session", {("view", "v"): b"body"})
    with watched.primary.client() as primary, watched.replica.client() as replica:
        wait(lambda: replica.dbsize() == primary.dbsize(), "the replica has everything")
    watched.primary.kill()
    start = time.monotonic()
    while store.store(items([10], first=20)) != [OK]:
        assert time.monotonic() - start < 20, "the store follows to the new primary"
        time.sleep(0.02)
    found = empty(stored)
    assert store.load(found) == [OK] * 4
    assert all(a[1] == b[1] for a, b in zip(stored, found, strict=True))
    record = records.get("session", [("view", "v")])[0]
    assert record is not None and record.body == b"body"
    with watched.replica.client() as client:
        assert client.info("replication")["role"] == "master" and client.dbsize() == 6


def test_a_primary_demoted_alive_is_left_for_the_new_one(watched: Sentinels, make_store: MakeStore) -> None:
    """The old primary still answers, as a replica: reads would work, writes are refused."""
    store = _behind(make_store, watched)
    assert store.store(items([10])) == [OK]
    with watched.sentinel.client() as sentinel, watched.replica.client() as replica:
        wait(lambda: _fails_over(sentinel), "the sentinel takes the replica for good enough")
        wait(lambda: replica.info("replication")["role"] == "master", "it is promoted")
        with watched.primary.client() as old:
            # The sentinel would do it too, ten seconds later.
            old.replicaof("127.0.0.1", watched.replica.port)
        wait(lambda: store.store(items([10], first=5)) == [OK], "the next write goes to the new primary")
        assert replica.exists(store.schema.kv(key_of(5)))
        assert store.delete([key_of(5)]) == [OK]


def test_wrong_service_name_is_an_outage_with_a_name(
    watched: Sentinels, make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store("", sentinels=[f"127.0.0.1:{watched.sentinel.port}"], service_name="other")
    assert store.lookup([key_of(0)]) == [Outcome.UNREACHABLE]
    assert "No master found for 'other'" in caplog.text


# -- Cluster -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    with cluster(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


@pytest.fixture
def spread(nodes: list[RedisServer], make_store: MakeStore) -> RedisKVStore:
    """A store on the empty cluster."""
    for server in nodes:
        with server.client() as client:
            client.flushall()
    return _on(make_store, nodes)


def _on(make_store: MakeStore, nodes: list[RedisServer], **options: object) -> RedisKVStore:
    startup = [f"127.0.0.1:{server.port}" for server in nodes[:2]]
    return make_store("", cluster=True, startup_nodes=startup, **options)


def test_cluster_spreads_blocks_over_all_nodes(nodes: list[RedisServer], spread: RedisKVStore) -> None:
    round_trip(spread)
    stored = items([1000] * 60)
    assert spread.store(stored) == [OK] * 60
    for server in nodes:
        with server.client() as client:
            assert client.dbsize() > 5
    listed = [entry.key for entry in entries(spread, limit=7)]
    assert len(listed) == 60 and set(listed) == {key for key, _ in stored}


def test_cluster_with_the_rights_that_are_documented(
    nodes: list[RedisServer], make_store: MakeStore, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("right")
    rights = "on >right ~leyline:* +@read +@write +@connection +@transaction"
    rights += " +cluster|slots +cluster|shards +cluster|nodes +command"
    for server in nodes:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "kv", *rights.split())
    store = _on(make_store, nodes, username="kv", password_file=str(tmp_path / "secret"), ttl=100)
    round_trip(store)
    RedisMetadata(store.client).put("s", {("a", "b"): b"c"}, expect={("a", "b"): None})


def test_cluster_writes_the_records_of_a_family_together(spread: RedisKVStore) -> None:
    records = RedisMetadata(spread.client)
    for i in range(8):
        family = f"session {{{i}}}"
        records.put(family, {("base", "b"): b"1", ("view", "v"): b"2", ("lineage", "l"): b"3"})
        assert sorted(records.scan(family)) == [
            (family, kind, kind[0]) for kind in ("base", "lineage", "view")
        ]
    assert len(list(records.scan())) == 24 and len(list(records.scan(kind="view"))) == 8


def test_cluster_node_down_leaves_the_others_in_use(tmp_path: Path, make_store: MakeStore) -> None:
    with cluster(tmp_path) as servers:
        store = _on(make_store, servers)
        stored = items([1000] * 60)
        assert store.store(stored) == [OK] * 60
        # Not a node that the store would ask for the layout first.
        lost = {i for i in range(60) if key_slot(store.schema.kv(key_of(i))) >= 16384 * 2 // 3}
        servers[2].kill()
        outcomes = store.load(empty(stored))
        assert {i for i, outcome in enumerate(outcomes) if outcome is OK} == set(range(60)) - lost
        assert lost and all(outcomes[i].is_outage for i in lost)
        start = time.monotonic()
        for _ in range(20):
            assert store.load(empty(stored)).count(OK) == 60 - len(lost)
        assert time.monotonic() - start < 10
        servers[2].start()
        wait(
            lambda: store.store(stored).count(OK) == 60 and store.load(empty(stored)).count(OK) == 60,
            "all nodes are used again",
        )


def test_cluster_that_is_not_there_yet(tmp_path: Path, make_store: MakeStore) -> None:
    with running(tmp_path) as server:  # no cluster
        store = make_store("", cluster=True, startup_nodes=[f"127.0.0.1:{server.port}"])
        assert store.lookup([key_of(0)]) == [Outcome.UNREACHABLE]
        assert not store.client.is_up
        start = time.monotonic()
        for _ in range(50):
            assert store.lookup([key_of(0)])[0].is_outage
        assert time.monotonic() - start < 5


def test_cluster_slots_that_move_are_followed(
    nodes: list[RedisServer], spread: RedisKVStore, make_store: MakeStore
) -> None:
    """A slot on the move (ASK), then moved (MOVED): values, lookups and deletions reach the right node."""
    stored = items([1000, 200_000, 30_000])
    keys = [key for key, _ in stored]
    spread.store(stored)
    slot = key_slot(spread.schema.kv(keys[1]))
    source = next(s for s in nodes if _owns(s, slot))
    target = next(s for s in nodes if s is not source)
    with source.client() as here, target.client() as there:
        ids = [client.execute_command("CLUSTER MYID").decode() for client in (here, there)]
        there.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
        here.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
        here.execute_command("MIGRATE", "127.0.0.1", target.port, spread.schema.kv(keys[1]), 0, 5000)
        found = empty(stored)
        assert spread.lookup(keys) == [OK] * 3
        assert spread.load(found) == [OK] * 3 and found[1][1] == stored[1][1]
        assert spread.store([(keys[1], block(200_000, 77))]) == [OK]
        assert spread.delete([keys[1]]) == [OK]
        assert not there.execute_command("CLUSTER COUNTKEYSINSLOT", slot)
        for client in (there, here):
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[1])
        assert spread.store(stored) == [OK] * 3
        assert there.execute_command("CLUSTER COUNTKEYSINSLOT", slot) == 1
        assert spread.load(empty(stored)) == [OK] * 3
        records = RedisMetadata(spread.client)
        records.put("any", {("a", "b"): b"c"})
        # Back, for the tests after this one.
        here.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[1])
        there.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[0])
        there.execute_command("MIGRATE", "127.0.0.1", source.port, spread.schema.kv(keys[1]), 0, 5000)
        for client in (here, there):
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[0])


def test_cluster_with_many_threads(spread: RedisKVStore) -> None:
    faults: list[str] = []

    def work(number: int) -> None:
        for turn in range(5):
            mine = items([20_000 + turn] * 12, first=1000 * number)
            found = empty(mine)
            if set(spread.store(mine)) | set(spread.load(found)) != {OK}:
                faults.append("not stored or loaded")
            if any(a[1] != b[1] for a, b in zip(mine, found, strict=True)):
                faults.append("other bytes")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def _owns(server: RedisServer, slot: int) -> bool:
    with server.client() as client:
        node = next(n for n in client.execute_command("CLUSTER NODES").values() if "myself" in n["flags"])
    return any(int(part[0]) <= slot <= int(part[-1]) for part in node["slots"])
