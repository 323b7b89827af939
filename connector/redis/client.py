"""Connections to Redis: one server, a master behind Sentinel, or the primaries of a Cluster.

redis-py does the connecting; this adds what a cache needs that must never wait long: a breaker for each
node, a gate for writes that are refused, and a thread that probes what failed and lives only as long as
something is down.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    SlotNotCoveredError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from redis.sentinel import Sentinel

from .breaker import Breaker, WriteGate
from .credentials import Credentials, PasswordSource
from .options import RedisOptions
from .outcome import Outcome
from .wire import Deadline, TaskTimeout, Wire

logger = logging.getLogger(__name__)

SINGLE = "redis"
"""Name of the only node, outside a Cluster."""
TOPOLOGY = "cluster"
"""Name under which the Cluster as a whole is down: nobody could say who its nodes are."""
UNCOVERED = "uncovered"
"""Stands for the node of a slot that no node serves."""

FAILURES = (RedisError, RedisClusterException, OSError)
"""What redis-py and sockets raise."""
REDIRECTS = (MovedError, AskError, TryAgainError)
"""Replies that send the client to another node."""

_BY_CODE = {
    b"OOM": Outcome.OUT_OF_MEMORY,
    b"READONLY": Outcome.READ_ONLY,
    b"MISCONF": Outcome.READ_ONLY,
    b"NOREPLICAS": Outcome.READ_ONLY,
    b"NOPERM": Outcome.DENIED,
    b"NOAUTH": Outcome.DENIED,
    b"WRONGTYPE": Outcome.FOREIGN,
}
_DOWN_CODES = (b"LOADING", b"CLUSTERDOWN", b"MASTERDOWN", b"UNBLOCKED")
_REDIRECT_CODES = (b"MOVED", b"ASK", b"TRYAGAIN")


def outcome_of(error: BaseException) -> Outcome:
    """The name of what redis-py raised."""
    match error:
        case RedisTimeoutError() | TimeoutError():
            return Outcome.TIMEOUT
        case AuthenticationError() | AuthorizationError() | NoPermissionError():
            return Outcome.DENIED
        case AuthenticationWrongNumberOfArgsError():
            return Outcome.DENIED
        case OutOfMemoryError():
            return Outcome.OUT_OF_MEMORY
        case ReadOnlyError():
            return Outcome.READ_ONLY
        case ClusterDownError() | MasterDownError() | RedisConnectionError() | RedisClusterException():
            return Outcome.UNREACHABLE
        case ResponseError():
            return outcome_of_line(str(error).encode()) or Outcome.ERROR
        case OSError():
            return Outcome.UNREACHABLE
    return Outcome.ERROR


def is_down(error: BaseException) -> bool:
    """True if the error says that the node does not serve us at all, not only that it refused a command."""
    return outcome_of(error).is_outage and not isinstance(error, NoPermissionError | TaskTimeout)


def outcome_of_line(line: bytes) -> Outcome | None:
    """The name of an error reply, ``-CODE text``; None if it is a redirection.

    Raises:
        RedisConnectionError: the node says that it does not serve at all now.
    """
    code = line.removeprefix(b"-").partition(b" ")[0]
    if code in _REDIRECT_CODES:
        return None
    if code in _DOWN_CODES:
        raise RedisConnectionError(f"the node does not serve now ({code.decode()})")
    return _BY_CODE.get(code, Outcome.ERROR)


class _Sentinel(Sentinel):
    """Asks one at a time: redis-py reorders the list of sentinels while it walks it, without a lock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._asking = threading.Lock()
        super().__init__(*args, **kwargs)

    def discover_master(self, service_name: str) -> Any:
        with self._asking:
            return super().discover_master(service_name)


class RedisClient:
    """Connections by node, and what is known of each node's health.

    Constructing it talks to nobody: Redis may be started later.

    Args:
        options: where and how.
    """

    def __init__(self, options: RedisOptions) -> None:
        self.options = options
        self._lock = threading.Lock()
        self._topology_lock = threading.Lock()
        self._breakers: dict[str, Breaker] = {}
        self._gates: dict[str, WriteGate] = {}
        self._recovered: list[Callable[[], None]] = []
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._prober: threading.Thread | None = None
        self._sentinel: _Sentinel | None = None
        self._cluster: RedisCluster | None = None
        self._single: redis.Redis | None = None
        if options.sentinels:
            self._sentinel = self._make_sentinel()
            self._single = self._sentinel.master_for(options.service_name)
        elif not options.cluster:
            self._single = redis.Redis(**self._server_arguments(), **self._address())

    def __repr__(self) -> str:
        return f"RedisClient({self.options.where})"

    # -- nodes ---------------------------------------------------------------------------------

    def group(self, keys: Sequence[bytes]) -> dict[str, list[int]]:
        """Indices of `keys` by the node that holds them.

        Raises:
            RedisConnectionError: the Cluster's layout cannot be learnt.
        """
        if self._single is not None:
            return {SINGLE: list(range(len(keys)))}
        manager = self._cluster_client().nodes_manager
        groups: dict[str, list[int]] = {}
        for index, key in enumerate(keys):
            try:
                name = manager.get_node_from_slot(key_slot(key)).name
            except SlotNotCoveredError:
                name = UNCOVERED
            groups.setdefault(name, []).append(index)
        return groups

    def node_of(self, key: bytes) -> str:
        """Name of the node that holds `key`. Raises RedisConnectionError."""
        return next(iter(self.group([key])))

    def nodes(self) -> list[str]:
        """Names of all nodes that hold keys, in a stable order. Raises RedisConnectionError."""
        if self._single is not None:
            return [SINGLE]
        return sorted(node.name for node in self._cluster_client().get_primaries())

    def refresh(self) -> None:
        """Learn the Cluster's layout again. Raises what redis-py raises."""
        if self._cluster is not None:
            self._cluster.nodes_manager.initialize()

    @contextlib.contextmanager
    def borrow(self, node: str, deadline: Deadline) -> Iterator[Wire]:
        """A connection to a node; closed if anything is raised while it is out.

        Raises what redis-py raises.
        """
        if self._closing.is_set():
            raise RedisConnectionError("the client is closed")
        deadline.check()
        pool = self._pool(node)
        connection = pool.get_connection()
        try:
            yield Wire(connection, deadline, self.options.socket_timeout, self.options.pipeline_bytes)
        except BaseException:
            # Replies may still be under way: the next user must not get them.
            connection.disconnect()
            raise
        finally:
            pool.release(connection)

    def execute(self, *command: Any) -> Any:
        """One command through redis-py, which follows redirections. Raises what redis-py raises."""
        client = self._single if self._single is not None else self._cluster_client()
        return client.execute_command(*command)

    def _pool(self, node: str) -> Any:
        if self._single is not None:
            return self._single.connection_pool
        found = self._cluster_client().get_node(node_name=node)
        if found is None:
            raise RedisConnectionError(f"{node} is no longer in the cluster")
        if found.redis_connection is None:
            return self._cluster_client().get_redis_connection(found).connection_pool
        return found.redis_connection.connection_pool

    def _cluster_client(self) -> RedisCluster:
        if self._cluster is not None:
            return self._cluster
        if self.breaker(TOPOLOGY).is_open:
            raise RedisConnectionError("the cluster's layout could not be learnt a moment ago")
        return self._join_cluster()

    def _join_cluster(self) -> RedisCluster:
        with self._topology_lock:
            if self._cluster is None:
                options = self.options
                places = options.startup_nodes or ((options.host, options.port),)
                try:
                    self._cluster = RedisCluster(
                        startup_nodes=[ClusterNode(host, port) for host, port in places],
                        require_full_coverage=False,
                        retry=Retry(NoBackoff(), 1),
                        **self._server_arguments(),
                    )
                except FAILURES as error:
                    self.failed(TOPOLOGY, error)
                    raise RedisConnectionError(f"cannot join the cluster: {type(error).__name__}") from None
            return self._cluster

    # -- health --------------------------------------------------------------------------------

    def breaker(self, node: str) -> Breaker:
        """The breaker of a node."""
        found = self._breakers.get(node)
        if found is None:
            options = self.options
            with self._lock:
                found = self._breakers.setdefault(
                    node, Breaker(options.breaker_threshold, options.breaker_base, options.breaker_cap)
                )
        return found

    def gate(self, node: str) -> WriteGate:
        """The gate for writes to a node."""
        found = self._gates.get(node)
        if found is None:
            options = self.options
            with self._lock:
                found = self._gates.setdefault(node, WriteGate(options.breaker_base, options.breaker_cap))
        return found

    @property
    def is_up(self) -> bool:
        """True if no node is known to be down."""
        return not any(breaker.is_open for breaker in list(self._breakers.values()))

    def failed(self, node: str, error: BaseException) -> None:
        """Note that a node did not answer."""
        if self._closing.is_set() or not self.breaker(node).failed():
            return
        logger.warning(
            "redis %s (%s): %s, not asked until it answers again: %s",
            self.options.where,
            node,
            outcome_of(error).value,
            str(error),  # not the exception: a kept record would keep its connection open
        )
        self._start_prober()

    def on_recovery(self, call: Callable[[], None]) -> None:
        """Call this, in the prober's thread, whenever a node answers again. It must not close the client."""
        self._recovered.append(call)

    def ping(self, node: str) -> None:
        """Raises what redis-py raises if the node does not serve."""
        with self.borrow(node, Deadline(self.options.task_timeout)) as wire:
            reply = wire.call([("PING",)])[0]
        if isinstance(reply, Exception):
            raise reply

    def status(self) -> dict[str, Any]:
        """Health by node. Plain data, nothing secret."""
        breakers = dict(self._breakers)
        return {
            "where": self.options.where,
            "up": self.is_up,
            "open": sorted(node for node, breaker in breakers.items() if breaker.is_open),
            "opened": sum(breaker.opened for breaker in breakers.values()),
        }

    def _start_prober(self) -> None:
        with self._lock:
            self._wake.set()
            if self._closing.is_set() or self._prober is not None:
                return
            self._prober = threading.Thread(target=self._probe_all, name="leyline-redis-probe", daemon=True)
            self._prober.start()

    def _probe_all(self) -> None:
        """Probe what is down until nothing is."""
        while not self._closing.is_set():
            self._wake.clear()
            down = [(b.probe_due, node, b) for node, b in list(self._breakers.items()) if b.is_open]
            if not down:
                with self._lock:
                    if not any(breaker.is_open for breaker in self._breakers.values()):
                        self._prober = None
                        return
                continue
            due, node, breaker = min(down, key=lambda item: item[0])
            wait = due - time.monotonic()
            if wait > 0:
                self._wake.wait(wait)
                continue
            try:
                self._probe(node)
            except FAILURES:
                breaker.probe_failed()
            except Exception:
                logger.exception("redis %s (%s): the probe failed", self.options.where, node)
                breaker.probe_failed()
            else:
                if breaker.close():
                    logger.info("redis %s (%s): answers again", self.options.where, node)
                    self._tell_recovered()

    def _probe(self, node: str) -> None:
        if node == TOPOLOGY:
            self._join_cluster()
            return
        if self._cluster is not None:
            # After a failover the node may be a replica, or gone: then there is nothing to wait for.
            self.refresh()
            if node not in self.nodes():
                return
        self.ping(node)

    def _tell_recovered(self) -> None:
        for call in list(self._recovered):
            try:
                call()
            except Exception:
                logger.exception("redis %s: a recovery callback failed", self.options.where)

    # -- end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all connections; whoever waits on one gets an error. Idempotent."""
        self._closing.set()
        self._wake.set()
        clients = [client for client in (self._single, self._sentinel) if client is not None]
        with contextlib.suppress(*FAILURES):
            if self._single is not None:
                self._single.connection_pool.disconnect(inuse_connections=True)
            if self._cluster is not None:
                self._cluster.disconnect_connection_pools()
        with self._lock:
            prober = self._prober
        if prober is not None and prober is not threading.current_thread():
            prober.join(self.options.socket_connect_timeout + 2 * self.options.socket_timeout)
        if self._cluster is not None:
            clients.append(self._cluster)
        for client in clients:
            with contextlib.suppress(*FAILURES):
                client.close()

    # -- arguments of redis-py -----------------------------------------------------------------

    def _address(self) -> dict[str, Any]:
        options = self.options
        if options.unix_socket_path:
            return {"unix_socket_path": options.unix_socket_path, "db": options.db}
        return {"host": options.host, "port": options.port, "db": options.db}

    def _server_arguments(self) -> dict[str, Any]:
        options = self.options
        arguments = self._transport_arguments(options.username, options.password)
        arguments["max_connections"] = options.max_connections
        arguments["client_name"] = options.client_name
        if not options.cluster:
            # Retries are ours: redis-py's default of ten would hold a task far beyond its time.
            arguments["retry"] = Retry(NoBackoff(), 0)
        return arguments

    def _transport_arguments(self, username: str | None, password: PasswordSource) -> dict[str, Any]:
        options = self.options
        arguments: dict[str, Any] = {
            "socket_timeout": options.socket_timeout,
            "socket_connect_timeout": options.socket_connect_timeout,
            # RESP3 may push messages of its own between replies; values are read by hand.
            "protocol": 2,
        }
        if not options.unix_socket_path:
            arguments["socket_keepalive"] = options.socket_keepalive
        if username or password != PasswordSource():
            arguments["credential_provider"] = Credentials(username, password)
        if options.ssl:
            arguments |= {
                "ssl": True,
                "ssl_ca_certs": options.ssl_ca_certs,
                "ssl_certfile": options.ssl_certfile,
                "ssl_keyfile": options.ssl_keyfile,
                "ssl_cert_reqs": options.ssl_cert_reqs,
                "ssl_check_hostname": options.ssl_check_hostname and options.ssl_cert_reqs != "none",
                "ssl_min_version": options.tls_version,
            }
        return arguments

    def _make_sentinel(self) -> _Sentinel:
        options = self.options
        sentinels = list(options.sentinels)
        # Not every process asks the same one first.
        random.shuffle(sentinels)
        arguments = self._transport_arguments(options.sentinel_username, options.sentinel_password)
        return _Sentinel(
            sentinels,
            min_other_sentinels=options.min_other_sentinels,
            sentinel_kwargs={**arguments, "retry": Retry(NoBackoff(), 0)},
            db=options.db,
            **self._server_arguments(),
        )
