"""Messages, catalog and configuration of the server module."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_lmcache.connector import wire
from leyline_lmcache.connector.catalog import Catalog
from leyline_lmcache.connector.redis.memory import MemoryMetadata
from leyline_lmcache.connector.server import ModuleConfig, ModuleConfigError

HELLO = wire.Hello(instance=7, version="1")


def record(response: str, buffer: str = "b", namespace: str = "n") -> wire.Publish:
    piece = wire.PieceMessage(buffer=buffer, src_start=0, length=2)
    return wire.Publish(
        record=wire.RecordMessage(
            response=response, namespace=namespace, model="m", buffer=buffer, view=(piece,), spans=()
        ),
        buffers=(wire.BufferMessage(id=buffer, tokens=b"\0" * 8, lineage=b""),),
    )


def ask(response: str, namespace: str = "n", model: str = "m") -> wire.Resolve:
    return wire.Resolve(response=response, namespace=namespace, model=model)


@given(st.binary(max_size=200))
def test_i9_any_bytes_are_a_message_or_a_wire_error(payload: bytes) -> None:
    with contextlib.suppress(wire.WireError):
        wire.decode(payload, wire.Fetch)


def test_i9_the_field_is_named() -> None:
    with pytest.raises(wire.WireError, match=r"Expected `int`, got `str` - at `\$\.instance`"):
        wire.decode(msgspec.msgpack.encode({"v": 1, "instance": "x", "version": "1"}), wire.Hello)
    with pytest.raises(wire.WireError, match="unknown field `extra`"):
        wire.decode(msgspec.msgpack.encode({"v": 1, "instance": 1, "version": "1", "extra": 2}), wire.Hello)


def test_t10_another_wire_version_says_both() -> None:
    with pytest.raises(wire.WireError, match="this side speaks version 1, the other sent 2"):
        wire.decode(msgspec.msgpack.encode({"v": 2, "instance": 1, "version": "1"}), wire.Hello)
    assert wire.decode(wire.encode(HELLO), wire.Hello) == HELLO


class Away(MemoryMetadata):
    """A shared store that can be away."""

    away = False

    def put(self, *args: Any, **kwargs: Any) -> Any:
        if self.away:
            raise OSError("away")
        return super().put(*args, **kwargs)

    def get(self, *args: Any, **kwargs: Any) -> Any:
        if self.away:
            raise OSError("away")
        return super().get(*args, **kwargs)


def test_a_record_is_found_with_its_buffers_and_only_in_its_namespace_and_model() -> None:
    catalog = Catalog(1 << 20)
    catalog.publish(record("r"))
    found = catalog.resolve(ask("r"))
    assert found.record == record("r").record and [each.id for each in found.buffers] == ["b"]
    for other in (ask("x"), ask("r", namespace="other"), ask("r", model="other")):
        assert catalog.resolve(other).record is None


def test_the_catalog_is_bounded_and_the_oldest_goes() -> None:
    catalog = Catalog(2000)
    for i in range(100):
        catalog.publish(record(f"r{i}", f"b{i}"))
    assert catalog.size <= 2000
    assert catalog.resolve(ask("r0")).record is None and catalog.resolve(ask("r99")).record is not None


def test_t8_a_shared_store_that_is_away_costs_other_nodes_only() -> None:
    shared = Away()
    here, there = Catalog(1 << 20, shared), Catalog(1 << 20, shared)
    here.publish(record("r"))
    assert there.resolve(ask("r")).record is not None
    shared.away = True
    here.publish(record("s", "c"))
    assert here.resolve(ask("s")).record is not None and here.errors == 1
    assert there.resolve(ask("s")).record is None and there.errors == 1
    assert there.resolve(ask("r")).record is not None  # known by now


def test_i9_the_modules_config_names_the_key() -> None:
    assert ModuleConfig.of({"workers": 3}).workers == 3
    with pytest.raises(ModuleConfigError, match="worker: unknown key; known keys are workers, catalog_bytes"):
        ModuleConfig.of({"worker": 3})
    with pytest.raises(ModuleConfigError, match="workers: expected a positive number, got '3'"):
        ModuleConfig.of({"workers": "3"})
    with pytest.raises(ModuleConfigError, match=r"redis\.ur: unknown key"):
        ModuleConfig.of({"redis": {"ur": "redis://h:1"}})
    with pytest.raises(ModuleConfigError, match="redis: expected an object"):
        ModuleConfig.of({"redis": "redis://h:1"})
    shared = ModuleConfig.of({"redis": {"url": "redis://h:1"}})
    assert shared.redis is not None
