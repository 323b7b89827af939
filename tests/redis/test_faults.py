"""What Redis and the network do wrong: each call ends, nothing wrong is served, and it recovers (case T8)."""

from __future__ import annotations

import logging
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from support.kv import empty, items, key_of
from support.redis_servers import RedisServer, running, wait

from leyline_lmcache.connector.redis import Outcome, RedisKVStore
from leyline_lmcache.connector.redis.wire import Deadline

pytestmark = pytest.mark.usefixtures("no_leaks")

OK, MISSING = Outcome.OK, Outcome.MISSING
MakeStore = Callable[..., RedisKVStore]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RedisServer]:
    """A server of the test's own."""
    with running(tmp_path) as server:
        yield server


def is_back(store: RedisKVStore) -> bool:
    return store.client.is_up and store.lookup([key_of(99)]) == [MISSING]


# -- gone, and back ----------------------------------------------------------------------------------


def test_killed_and_restarted_empty(own: RedisServer, make_store: MakeStore) -> None:
    store = make_store(own)
    assert store.store(items([1000] * 3)) == [OK] * 3
    own.kill()
    start = time.monotonic()
    for _ in range(50):
        outcomes = {
            *store.load(empty(items([1000] * 3))),
            *store.store(items([1000])),
            *store.lookup([key_of(0)]),
        }
        assert outcomes <= {Outcome.UNREACHABLE, Outcome.BREAKER_OPEN}
    # A hundred and fifty calls on a dead Redis: one of them asked it, maybe a few between probes.
    assert time.monotonic() - start < 5
    assert store.status()["open"] == ["redis"]
    own.start()
    wait(lambda: is_back(store), "it is used again by itself")
    assert store.load(empty(items([1000] * 3))) == [MISSING] * 3
    assert store.store(items([1000])) == [OK] and store.load(empty(items([1000]))) == [OK]


def test_it_may_be_started_after_us(tmp_path: Path, make_store: MakeStore) -> None:
    server = RedisServer(tmp_path)
    store = make_store(server)
    try:
        assert store.lookup([key_of(0)]) == [Outcome.UNREACHABLE]
        server.start()
        wait(lambda: is_back(store), "it is found")
        assert store.store(items([10])) == [OK]
    finally:
        server.stop()


def test_a_restart_between_two_calls_costs_nothing(own: RedisServer, make_store: MakeStore) -> None:
    """The connection in the pool is dead, and nobody has noticed."""
    store = make_store(own)
    store.store(items([10]))
    own.kill()
    own.start()
    assert store.load(empty(items([10]))) == [MISSING]
    assert store.store(items([100_000])) == [OK]
    assert store.client.status()["opened"] == 0


def test_connections_cut_by_the_server_are_made_anew(
    redis_server: RedisServer, make_store: MakeStore
) -> None:
    store = make_store(redis_server)
    stop = threading.Event()
    chance = random.Random(5)

    def cut() -> None:
        with redis_server.client() as client:
            while not stop.is_set():
                client.execute_command("CLIENT KILL TYPE normal SKIPME yes")
                time.sleep(0.02 * chance.random())

    thread = threading.Thread(target=cut)
    thread.start()
    seen: set[Outcome] = set()
    try:
        stored = items([300_000] * 4)
        for _ in range(40):
            found = empty(stored)
            seen |= set(store.store(stored))
            outcomes = store.load(found)
            seen |= set(outcomes)
            for wanted, got, outcome in zip(stored, found, outcomes, strict=True):
                assert outcome is not OK or wanted[1] == got[1]
    finally:
        stop.set()
        thread.join()
    assert seen <= {OK, MISSING, Outcome.UNREACHABLE, Outcome.BREAKER_OPEN}
    wait(lambda: store.store(stored) == [OK] * 4, "it recovers")


def test_a_hung_redis_costs_one_time_out(own: RedisServer, make_store: MakeStore) -> None:
    store = make_store(own, socket_timeout=0.4, task_timeout=2.0)
    store.store(items([1000]))
    own.hang()
    try:
        start = time.monotonic()
        assert store.load(empty(items([1000]))) == [Outcome.TIMEOUT]
        first = time.monotonic() - start
        assert 0.3 < first < 3
        start = time.monotonic()
        for _ in range(100):
            assert store.load(empty(items([1000]))) == [Outcome.BREAKER_OPEN]
            assert store.store(items([1000])) == [Outcome.BREAKER_OPEN]
        assert time.monotonic() - start < first + 1
        time.sleep(max(0.0, 2.0 - first))
    finally:
        own.go_on()
    wait(lambda: is_back(store), "it is used again")
    assert store.load(empty(items([1000]))) == [OK]


def test_large_values_into_a_hung_redis(own: RedisServer, make_store: MakeStore) -> None:
    """The socket's buffers fill: sending must end too."""
    store = make_store(own, socket_timeout=0.3, task_timeout=1.0)
    store.lookup([key_of(0)])
    own.hang()
    try:
        assert set(store.store(items([8 << 20] * 3))) == {Outcome.TIMEOUT}
    finally:
        own.go_on()
    wait(lambda: is_back(store), "it is used again")


# -- writes refused ----------------------------------------------------------------------------------


def test_full_redis_refuses_writes_and_serves_reads(tmp_path: Path, make_store: MakeStore) -> None:
    with running(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server:
        store = make_store(server)
        assert store.store(items([1 << 20] * 3)) == [OK] * 3
        outcomes = store.store(items([1 << 20] * 12, first=10))
        assert set(outcomes) == {OK, Outcome.OUT_OF_MEMORY}
        # While it is full, values are not sent in vain, and reads go on.
        with server.client() as client:
            before = client.info("stats")["total_net_input_bytes"]
            assert store.store(items([1 << 20] * 2, first=30)) == [Outcome.OUT_OF_MEMORY] * 2
            assert client.info("stats")["total_net_input_bytes"] - before < 1 << 20
        assert store.load(empty(items([1 << 20] * 3))) == [OK] * 3
        assert store.client.is_up
        with server.client() as client:
            client.config_set("maxmemory", 0)
        wait(lambda: store.store(items([1 << 20], first=40)) == [OK], "writes are taken again")
        assert store.store(items([1 << 20] * 3, first=50)) == [OK] * 3


def test_evicting_redis_needs_no_care(tmp_path: Path, make_store: MakeStore) -> None:
    with running(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru") as server:
        store = make_store(server)
        for first in range(0, 40, 4):
            assert store.store(items([1 << 20] * 4, first)) == [OK] * 4
        outcomes = store.load(empty(items([1 << 20] * 40)))
        assert set(outcomes) == {OK, MISSING} and outcomes.count(OK) < 8


def test_read_only_replica_serves_reads(tmp_path: Path, make_store: MakeStore) -> None:
    at_once = ("--repl-diskless-sync-delay", "0")
    with running(tmp_path / "p", *at_once) as primary, running(tmp_path / "r") as replica:
        writer = make_store(primary, ttl=50)
        assert writer.store(items([1000] * 3)) == [OK] * 3
        with replica.client() as client:
            client.replicaof("127.0.0.1", primary.port)
            wait(lambda: client.dbsize() == 3, "it is in sync")
        reader = make_store(replica, ttl=50)
        assert reader.lookup([key_of(i) for i in range(4)]) == [OK, OK, OK, MISSING]
        assert reader.load(empty(items([1000] * 3))) == [OK] * 3
        assert reader.store(items([1000])) == [Outcome.READ_ONLY]
        assert reader.store(items([1000])) == [Outcome.READ_ONLY]
        assert reader.delete([key_of(0)]) == [Outcome.READ_ONLY]
        assert reader.client.is_up
        with replica.client() as client:
            client.replicaof("NO", "ONE")
        wait(lambda: reader.store(items([1000], first=9)) == [OK], "it takes writes once it is a primary")


# -- who we are --------------------------------------------------------------------------------------


def test_acl_user_and_a_password_that_changes(tmp_path: Path, make_store: MakeStore) -> None:
    secret = tmp_path / "secret"
    secret.write_text("wrong\n")
    with running(tmp_path / "r") as server, server.client() as admin:
        admin.acl_setuser("kv", enabled=True, passwords=["+right"], keys=["leyline:*"], categories=["+@all"])
        store = make_store(server, username="kv", password_file=str(secret))
        assert store.store(items([1000])) == [Outcome.DENIED]
        assert store.store(items([1000])) == [Outcome.BREAKER_OPEN]
        secret.write_text("right\n")
        wait(lambda: store.store(items([1000])) == [OK], "the new password is read")
        assert store.load(empty(items([1000]))) == [OK]
        assert len(store.scan().entries) == 1


def test_a_missing_secret_leaves_no_open_connection(tmp_path: Path, make_store: MakeStore) -> None:
    with running(tmp_path / "r") as server, server.client() as admin:
        store = make_store(server, password_file=str(tmp_path / "none"))
        for _ in range(3):
            assert set(store.lookup([key_of(0)])) <= {Outcome.DENIED, Outcome.BREAKER_OPEN}
        assert all(client["name"] != "leyline" for client in admin.client_list())


def test_a_user_who_may_only_read(tmp_path: Path, make_store: MakeStore) -> None:
    secret = tmp_path / "secret"
    secret.write_text("right")
    with running(tmp_path / "r") as server, server.client() as admin:
        make_store(server).store(items([1000]))
        categories = ["+@read", "+@connection"]
        admin.acl_setuser("ro", enabled=True, passwords=["+right"], keys=["leyline:*"], categories=categories)
        store = make_store(server, username="ro", password_file=str(secret), ttl=100)
        assert store.lookup([key_of(0), key_of(1)]) == [OK, MISSING]
        assert store.load(empty(items([1000]))) == [OK]
        assert store.store(items([1000])) == [Outcome.DENIED]
        assert store.delete([key_of(0)]) == [Outcome.DENIED]
        assert store.client.is_up and store.load(empty(items([1000]))) == [OK]


def test_a_wrong_password_is_not_logged(
    redis_server: RedisServer, make_store: MakeStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = tmp_path / "secret"
    secret.write_text("correct-horse-battery")
    store = make_store(redis_server, username="nobody", password_file=str(secret))
    assert store.store(items([10])) == [Outcome.DENIED]
    assert "denied" in caplog.text and "correct-horse" not in caplog.text
    assert "correct-horse" not in str(store.status())


# -- a server that lies ------------------------------------------------------------------------------


class Liar:
    """Accepts connections, answers the handshake, and to a GET or SET whatever the test says."""

    def __init__(self, answer: Callable[[socket.socket, bytes], None]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                taken, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(taken)
            thread = threading.Thread(target=self._serve, args=(taken,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, taken: socket.socket) -> None:
        try:
            while data := taken.recv(1 << 20):
                if b"GET" in data or (b"SET\r\n" in data and b"CLIENT" not in data):
                    self._answer(taken, data)
                else:
                    taken.sendall(b"+OK\r\n" * data.count(b"*"))
        except OSError:
            pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for taken in self._open:
            with taken:
                taken.close()
        for thread in self._threads:
            thread.join(5)


def _say(data: bytes) -> Callable[[socket.socket, bytes], None]:
    return lambda taken, _: taken.sendall(data)


def _then_close(data: bytes) -> Callable[[socket.socket, bytes], None]:
    def answer(taken: socket.socket, _: bytes) -> None:
        taken.sendall(data)
        taken.shutdown(socket.SHUT_RDWR)

    return answer


def _reset(taken: socket.socket, _: bytes) -> None:
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    taken.close()


def _trickle(taken: socket.socket, _: bytes) -> None:
    taken.sendall(b"$100000\r\n")
    while True:
        taken.sendall(b"x")
        time.sleep(0.02)


LIES: dict[str, Callable[[socket.socket, bytes], None]] = {
    "silence": lambda taken, data: None,
    "end": _then_close(b""),
    "reset": _reset,
    "half a line": _then_close(b"$10"),
    "half a value": _then_close(b"$100000\r\n" + b"x" * 500),
    "a value that stops": _say(b"$100000\r\n" + b"x" * 500),
    "one byte at a time": _trickle,
    "no protocol": _say(b"HTTP/1.1 200 OK\r\n\r\n"),
    "no number": _say(b"$many\r\n"),
    "a value that does not end": _say(b"$3\r\nabcdefgh\r\n"),
    "more than was asked for": _say(b"$3\r\nabc\r\n$3\r\nabc\r\n"),
    "endless line": _say(b"$" + b"1" * 100_000),
    "a list": _say(b"*1\r\n$1\r\na\r\n"),
    "petabytes": _say(b"$1125899906842624\r\n" + b"x" * 5000),
    "loading": _say(b"-LOADING Redis is loading the dataset in memory\r\n"),
    "unknown error": _say(b"-WHAT ever\r\n"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_lies_costs_a_miss_and_no_more(lie: str, make_store: MakeStore) -> None:
    liar = Liar(LIES[lie])
    try:
        store = make_store(liar.url, socket_timeout=0.3, task_timeout=0.6, retries=0)
        start = time.monotonic()
        for call in (store.load, store.store):
            wanted = items([1000])
            outcomes = call(wanted)
            assert len(outcomes) == 1 and outcomes[0] is not OK, outcomes
        assert time.monotonic() - start < 5
        store.close()
    finally:
        liar.close()


def test_what_came_before_the_break_counts(make_store: MakeStore) -> None:
    """The first of three replies arrives, then the connection ends: one hit, two misses."""
    store_value: list[bytes] = []

    def answer(taken: socket.socket, _: bytes) -> None:
        value = store_value[0]
        taken.sendall(b"$%d\r\n%b\r\n$%d\r\n%b" % (len(value), value, len(value), value[:40]))
        taken.shutdown(socket.SHUT_RDWR)

    liar = Liar(answer)
    try:
        store = make_store(liar.url, retries=0)
        wanted = items([100] * 3)
        store_value.append(store.encode(*wanted[0]))
        found = empty(wanted)
        assert store.load(found) == [OK, Outcome.UNREACHABLE, Outcome.UNREACHABLE]
        assert found[0][1] == wanted[0][1]
        store.close()
    finally:
        liar.close()


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_what_a_broken_connection_interrupts_is_tried_again(make_store: MakeStore, retries: int) -> None:
    value: list[bytes] = []
    asked = [0]

    def answer(taken: socket.socket, _: bytes) -> None:
        asked[0] += 1
        if asked[0] < 3:
            taken.shutdown(socket.SHUT_RDWR)
        else:
            taken.sendall(b"$%d\r\n%b\r\n" % (len(value[0]), value[0]))

    liar = Liar(answer)
    try:
        store = make_store(liar.url, retries=retries)
        wanted = items([100])
        value.append(store.encode(*wanted[0]))
        assert store.load(empty(wanted)) == [OK if retries >= 2 else Outcome.UNREACHABLE]
        assert asked[0] == min(3, retries + 1)
        store.close()
    finally:
        liar.close()


def test_a_late_answer_never_meets_the_next_question(make_store: MakeStore) -> None:
    """A connection that timed out is not used again: its answer may still come."""
    liar = Liar(lambda taken, data: None)
    try:
        store = make_store(liar.url, socket_timeout=0.2, task_timeout=0.4, breaker_threshold=100)
        for _ in range(3):
            assert store.load(empty(items([100]))) == [Outcome.TIMEOUT]
        assert len(liar._open) == 3
        store.close()
    finally:
        liar.close()


def test_waiting_for_a_slow_server_ends_with_the_task(make_store: MakeStore) -> None:
    liar = Liar(_trickle)
    try:
        store = make_store(liar.url, socket_timeout=0.5, task_timeout=5.0, retries=0)
        start = time.monotonic()
        assert store.load(empty(items([1000])), Deadline(0.4)) != [OK]
        assert time.monotonic() - start < 3
        store.close()
    finally:
        liar.close()


def test_closing_wakes_whoever_waits(make_store: MakeStore) -> None:
    liar = Liar(lambda taken, data: None)
    try:
        store = make_store(liar.url, socket_timeout=30.0, task_timeout=60.0, retries=0)
        got: list[list[Outcome]] = []
        thread = threading.Thread(target=lambda: got.append(store.load(empty(items([1000])))))
        thread.start()
        time.sleep(0.2)
        store.close()
        thread.join(5)
        assert got == [[Outcome.CLOSED]]
    finally:
        liar.close()


def test_no_connection_is_left_after_trouble(redis_server: RedisServer, make_store: MakeStore) -> None:
    store = make_store(redis_server)
    with redis_server.client() as admin:
        for _ in range(20):
            store.load(empty(items([10])), Deadline(-1))
            store.store(items([100]))
            store.load([(key_of(0), memoryview(bytearray(5)))])
        mine = [client for client in admin.client_list() if client["name"] == "leyline"]
        assert len(mine) == 1
        store.close()
        wait(lambda: all(c["name"] != "leyline" for c in admin.client_list()), "it is closed")
        with pytest.raises(redis.exceptions.ConnectionError):
            store.client.ping("redis")
