"""What is relied on in redis-py and in LMCache's L2 interface; a new release fails here first."""

from __future__ import annotations

import inspect
import socket

import pytest
import redis
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from redis.cluster import ClusterNode, NodesManager, RedisCluster
from redis.connection import Connection, ConnectionPool, SSLConnection
from redis.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection
from support.redis_servers import RedisServer

from leyline_lmcache.connector.l2 import LeylineL2Adapter, LeylineL2AdapterConfig


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_a_connection_shows_its_socket_while_it_is_connected(redis_server: RedisServer) -> None:
    pool = ConnectionPool(host="127.0.0.1", port=redis_server.port, protocol=2)
    connection = pool.get_connection()
    try:
        assert isinstance(connection._sock, socket.socket)
        connection.send_packed_command(connection.pack_commands([("PING",)]), check_health=False)
        assert connection.read_response() == b"PONG"
        connection.disconnect()
        assert connection._sock is None
    finally:
        pool.release(connection)
        pool.disconnect()


def test_what_is_called_of_redis_py_takes_what_we_give() -> None:
    assert parameters(ConnectionPool.release) == ["self", "connection"]
    assert "inuse_connections" in parameters(ConnectionPool.disconnect)
    assert "check_health" in parameters(Connection.send_packed_command)
    given = "socket_timeout socket_connect_timeout protocol credential_provider client_name retry"
    assert set(given.split()) <= set(parameters(redis.Redis.__init__))
    tls = "ca_certs certfile keyfile cert_reqs check_hostname min_version"
    assert {f"ssl_{name}" for name in tls.split()} <= set(parameters(SSLConnection.__init__))
    assert {"startup_nodes", "require_full_coverage", "retry"} <= set(parameters(RedisCluster.__init__))
    assert parameters(NodesManager.get_node_from_slot)[:2] == ["self", "slot"]
    assert "redis_connection" in parameters(ClusterNode.__init__)
    for name in ("get_primaries", "get_node", "get_redis_connection", "disconnect_connection_pools"):
        assert callable(getattr(RedisCluster, name))
    assert callable(NodesManager.initialize)
    # A demoted master is recognised by redis-py's own pool for small commands, by us for values.
    assert issubclass(SentinelConnectionPool, ConnectionPool)
    assert issubclass(SentinelManagedConnection, Connection)
    assert parameters(Sentinel.discover_master) == ["self", "service_name"]


def test_hiredis_parses() -> None:
    from redis.connection import DefaultParser

    assert "Hiredis" in DefaultParser.__name__


@pytest.mark.parametrize("name", sorted(L2AdapterInterface.__abstractmethods__))
def test_every_call_of_the_l2_interface_is_there(name: str) -> None:
    ours, theirs = getattr(LeylineL2Adapter, name), getattr(L2AdapterInterface, name)
    assert parameters(ours) == parameters(theirs)


def test_the_optional_calls_keep_their_form() -> None:
    for name in ("delete", "list_l2_keys", "report_status", "get_usage"):
        assert parameters(getattr(LeylineL2Adapter, name)) == parameters(getattr(L2AdapterInterface, name))
    # What the base class does for us: books, listeners, events.
    for name in ("_notify_keys_stored", "_notify_keys_deleted", "_notify_keys_accessed"):
        assert callable(getattr(L2AdapterInterface, name))
    assert not LeylineL2Adapter.__abstractmethods__
    assert issubclass(LeylineL2AdapterConfig, L2AdapterConfigBase)
    # LMCache's plugin loader takes a class of this name as the adapter's configuration.
    assert LeylineL2AdapterConfig.__name__ == f"{LeylineL2Adapter.__name__}Config"
