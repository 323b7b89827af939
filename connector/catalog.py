"""What finished requests left behind, by response and buffer id: in memory, and for other nodes in Redis."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

from . import wire

log = logging.getLogger(__name__)

Name = tuple[str, str]
"""Kind and name."""

_RECORD, _BUFFER = "record", "buffer"


class Value(Protocol):
    """A value as the shared store gives it."""

    @property
    def body(self) -> bytes: ...


class SharedStore(Protocol):
    """Small values every node can read, by family; see :class:`.redis.metadata.MetadataStore`. May raise."""

    def put(self, family: str, bodies: Mapping[Name, bytes | None]) -> object:
        """Write all of them or none."""

    def get(self, family: str, names: Sequence[Name]) -> Sequence[Value | None]:
        """Values in the order of the names; None for what is not there."""


class Catalog:
    """Records and buffers. Memory is bounded, the oldest goes first; the shared store keeps its own time.

    Tenants and models are families apart (I7). Thread-safe: the server module's handlers run in a pool.
    """

    def __init__(self, capacity_bytes: int, shared: SharedStore | None = None) -> None:
        self._capacity = capacity_bytes
        self._shared = shared
        self._lock = threading.Lock()
        self._values: OrderedDict[tuple[str, Name], bytes] = OrderedDict()
        self._size = 0
        self.errors = 0

    @property
    def is_shared(self) -> bool:
        return self._shared is not None

    @property
    def size(self) -> int:
        """Bytes held in memory."""
        return self._size

    def publish(self, message: wire.Publish) -> None:
        """Remember a record and its buffers, here first: a shared store may be away."""
        family = _family(message.record.model, message.record.namespace)
        values: dict[Name, bytes | None] = {
            (_RECORD, message.record.response): wire.encode(message.record),
            **{(_BUFFER, buffer.id): wire.encode(buffer) for buffer in message.buffers},
        }
        with self._lock:
            for name, value in values.items():
                assert value is not None
                self._keep((family, name), value)
        if self._shared is not None:
            try:
                self._shared.put(family, values)
            except Exception as error:
                self._failed("published", error)

    def resolve(self, message: wire.Resolve) -> wire.Resolved:
        """A record and the buffers of its view, as far as they are known."""
        family = _family(message.model, message.namespace)
        (found,) = self._get(family, [(_RECORD, message.response)])
        if found is None:
            return wire.Resolved(record=None)
        record = wire.decode(found, wire.RecordMessage)
        ids = sorted({piece.buffer for piece in record.view})
        values = self._get(family, [(_BUFFER, each) for each in ids])
        buffers = tuple(wire.decode(value, wire.BufferMessage) for value in values if value is not None)
        return wire.Resolved(record=record, buffers=buffers)

    def _get(self, family: str, names: list[Name]) -> list[bytes | None]:
        with self._lock:
            found = [self._values.get((family, name)) for name in names]
        missing = [name for name, value in zip(names, found, strict=True) if value is None]
        if not missing or self._shared is None:
            return found
        try:
            values = self._shared.get(family, missing)
        except Exception as error:
            self._failed("looked up", error)
            return found
        fetched = {name: value.body for name, value in zip(missing, values, strict=True) if value is not None}
        with self._lock:
            for name, body in fetched.items():
                self._keep((family, name), body)
        return [
            value if value is not None else fetched.get(name)
            for name, value in zip(names, found, strict=True)
        ]

    def _keep(self, key: tuple[str, Name], value: bytes) -> None:
        old = self._values.pop(key, None)
        self._size += len(value) - (len(old) if old is not None else 0)
        self._values[key] = value
        while self._size > self._capacity and len(self._values) > 1:
            self._size -= len(self._values.popitem(last=False)[1])

    def _failed(self, what: str, error: Exception) -> None:
        """The shared store is away: other nodes miss it, this one goes on."""
        self.errors += 1
        log.warning("a record could not be %s in the shared store: %s", what, type(error).__name__)


def _family(model: str, namespace: str) -> str:
    """Model names may be long paths, and differ in letters a key should not carry."""
    return hashlib.blake2b(f"{namespace}:{model}".encode(), digest_size=16).hexdigest()
