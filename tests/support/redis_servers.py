"""Real Redis servers for tests: one, with TLS, behind Sentinel, as a Cluster; on 127.0.0.1, in memory."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import redis

from leyline_lmcache.stack import redis as redis_role
from leyline_lmcache.stack.ports import PortLease
from leyline_lmcache.stack.process import Command, ServerProcess


class RedisServer:
    """A ``redis-server`` that a test may kill, hang and start again on the same port.

    Args:
        folder: its working folder.
        args: further arguments.
        port: 0 takes a free one.
        config: text of a configuration file (a sentinel needs one).
        tls: its port is for TLS.
    """

    def __init__(
        self,
        folder: Path,
        args: tuple[str, ...] = (),
        port: int = 0,
        config: str | None = None,
        tls: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lease = PortLease()
        self.port = port or self._lease.take("redis")
        command = redis_role.command(self.port, folder, args)
        if config is not None:
            file = folder / "redis.conf"
            ports = f"port 0\ntls-port {self.port}" if tls else f"port {self.port}"
            file.write_text(f"{ports}\nbind 127.0.0.1\nsave ''\n{config}\n")
            command = Command("redis", [redis_role.find_server(), str(file), *args], dict(os.environ), 5.0)
        self._process = ServerProcess(command, folder)
        self.ready: Callable[[], bool] = lambda: redis_role.is_ready(self.port)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> RedisServer:
        """Start it and wait until it answers."""
        self._process.start()
        deadline = time.monotonic() + 20
        while not self.ready():
            assert self._process.is_running() and time.monotonic() < deadline, self._process.log.read_text()
            time.sleep(0.01)
        return self

    def stop(self) -> None:
        """Stop it; nothing of it is left."""
        if self._process.is_running():
            with contextlib.suppress(Exception):
                os.kill(self._process.pid, signal.SIGCONT)
        self._process.stop()
        self._lease.release()

    def kill(self) -> None:
        """As a crash would."""
        self._process.kill()

    def hang(self) -> None:
        """It keeps its connections and does nothing."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """The end of `hang`."""
        os.kill(self._process.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def client(self, **arguments: object) -> Iterator[redis.Redis]:
        """A plain redis-py client."""
        made = redis.Redis(port=self.port, **arguments)  # type: ignore[arg-type]
        try:
            yield made
        finally:
            made.close()


@contextlib.contextmanager
def running(folder: Path, *args: str, **keywords: object) -> Iterator[RedisServer]:
    """A server that stops at the end."""
    server = RedisServer(folder, args, **keywords)  # type: ignore[arg-type]
    try:
        yield server.start()
    finally:
        server.stop()


@dataclass(frozen=True)
class Sentinels:
    """A primary, a replica and a sentinel that watches them as ``mymaster``."""

    primary: RedisServer
    replica: RedisServer
    sentinel: RedisServer


@contextlib.contextmanager
def sentinels(folder: Path) -> Iterator[Sentinels]:
    """Start them and wait until the replica is in sync and known."""
    with contextlib.ExitStack() as stack:
        at_once = ("--repl-diskless-sync-delay", "0")
        primary = stack.enter_context(running(folder / "primary", *at_once))
        replica = stack.enter_context(
            running(folder / "replica", *at_once, "--replicaof", f"127.0.0.1 {primary.port}")
        )
        config = (
            f"sentinel monitor mymaster 127.0.0.1 {primary.port} 1\n"
            "sentinel down-after-milliseconds mymaster 300\n"
            "sentinel failover-timeout mymaster 2000\n"
            f"dir {folder}\n"
        )
        sentinel = RedisServer(folder / "sentinel", ("--sentinel",), config=config)
        stack.callback(sentinel.stop)
        sentinel.start()
        with replica.client() as asked, sentinel.client() as watching:
            wait(lambda: asked.info("replication")["master_link_status"] == "up", "the replica is in sync")
            wait(lambda: len(watching.sentinel_slaves("mymaster")) == 1, "the sentinel knows the replica")
        yield Sentinels(primary, replica, sentinel)


@contextlib.contextmanager
def cluster(folder: Path, masters: int = 3) -> Iterator[list[RedisServer]]:
    """Masters of a Cluster with all slots spread over them, no replicas."""
    with contextlib.ExitStack() as stack:
        args = (
            "--cluster-enabled", "yes",
            "--cluster-require-full-coverage", "no",
            "--cluster-node-timeout", "1000",
        )  # fmt: skip
        # Not a port 10,000 higher, where outgoing connections of anybody may sit.
        lease = stack.enter_context(PortLease())
        buses = [lease.take(f"bus {i}") for i in range(masters)]
        servers = [
            stack.enter_context(running(folder / f"n{i}", *args, "--cluster-port", str(bus)))
            for i, bus in enumerate(buses)
        ]
        clients = [stack.enter_context(server.client()) for server in servers]
        for i, client in enumerate(clients):
            first, last = 16384 * i // masters, 16384 * (i + 1) // masters
            client.execute_command("CLUSTER ADDSLOTSRANGE", first, last - 1)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", i + 1)
        for server, bus in zip(servers[1:], buses[1:], strict=True):
            clients[0].execute_command("CLUSTER MEET", "127.0.0.1", server.port, bus)

        def formed(client: redis.Redis) -> bool:
            info = client.execute_command("CLUSTER INFO")
            return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == masters

        wait(lambda: all(formed(client) for client in clients), "the cluster is formed")
        yield servers


def wait(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait until `condition` is true; fail with `what` if it never is."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@dataclass(frozen=True)
class Certificates:
    """Files of a small certificate authority: its own certificate, one for 127.0.0.1, keys."""

    authority: Path
    certificate: Path
    key: Path


def certificates(folder: Path) -> Certificates:
    """Make them."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)

    def write(path: Path, data: bytes) -> Path:
        path.write_bytes(data)
        return path

    def build(name: str, issuer: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        def of(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        return (
            x509.CertificateBuilder()
            .subject_name(of(name))
            .issuer_name(of(issuer))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    root = ec.generate_private_key(ec.SECP256R1())
    own = ec.generate_private_key(ec.SECP256R1())
    authority = (
        build("test authority", "test authority", root.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(root, hashes.SHA256())
    )
    names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    certificate = (
        build("redis", "test authority", own.public_key())
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(root, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    key_bytes = own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return Certificates(
        write(folder / "ca.pem", authority.public_bytes(pem)),
        write(folder / "redis.pem", certificate.public_bytes(pem)),
        write(folder / "redis.key", key_bytes),
    )
