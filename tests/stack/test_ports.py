"""Ports are free when chosen, and not chosen twice."""

from __future__ import annotations

import socket

import pytest

from leyline_lmcache.stack import StackError
from leyline_lmcache.stack.ports import PortLease, is_free


def test_ports_of_several_leases_differ() -> None:
    with PortLease() as one, PortLease() as other:
        ports = [lease.take(str(index)) for lease in (one, other) for index in range(50)]
    assert len(set(ports)) == 100


def test_a_port_somebody_listens_on_is_refused() -> None:
    with socket.socket() as listener, PortLease() as lease:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not is_free(port)
        with pytest.raises(StackError, match=f"port {port} for sglang is in use"):
            lease.take("sglang", port)


def test_a_port_another_lease_holds_is_refused_until_released() -> None:
    with PortLease() as lease:
        one = PortLease()
        port = one.take("probe")
        one.release()
        one.take("sglang", port)
        with pytest.raises(StackError, match="in use"):
            lease.take("redis", port)
        one.release()
        assert lease.take("redis", port) == port
