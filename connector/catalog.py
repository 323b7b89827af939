"""What finished requests left behind, by response id and by buffer: in memory, and for other nodes in a
shared store."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Protocol

from . import wire


class SharedStore(Protocol):
    """Small values every node can read. Both calls may raise ``OSError`` when the store cannot be reached."""

    def put(self, values: dict[str, bytes]) -> None:
        """Write all of them or none."""

    def get(self, names: list[str]) -> list[bytes | None]:
        """Values in the order of the names; None for what is not there."""


class Catalog:
    """Records and buffers. Memory is bounded, the oldest goes first; the shared store keeps its own time.

    Thread-safe: the server module's handlers run in a pool.
    """

    def __init__(self, capacity_bytes: int, shared: SharedStore | None = None) -> None:
        self._capacity = capacity_bytes
        self._shared = shared
        self._lock = threading.Lock()
        self._values: OrderedDict[str, bytes] = OrderedDict()
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
        """Remember a record and its buffer, here first: a shared store may be away."""
        values = {
            _record_name(message.record): wire.encode(message.record),
            _buffer_name(message.record.namespace, message.buffer.id): wire.encode(message.buffer),
        }
        with self._lock:
            for name, value in values.items():
                self._keep(name, value)
        if self._shared is not None:
            try:
                self._shared.put(values)
            except OSError:
                self.errors += 1

    def resolve(self, message: wire.Resolve) -> wire.Resolved:
        """A record and the buffers of its view, as far as they are known."""
        (found,) = self._get([_name(message.model, message.namespace, message.response)])
        if found is None:
            return wire.Resolved(record=None)
        record = wire.decode(found, wire.RecordMessage)
        ids = sorted({piece.buffer for piece in record.view})
        values = self._get([_buffer_name(message.namespace, each) for each in ids])
        buffers = tuple(wire.decode(value, wire.BufferMessage) for value in values if value is not None)
        return wire.Resolved(record=record, buffers=buffers)

    def _get(self, names: list[str]) -> list[bytes | None]:
        with self._lock:
            found = [self._values.get(name) for name in names]
        missing = [name for name, value in zip(names, found, strict=True) if value is None]
        if missing and self._shared is not None:
            try:
                fetched = dict(zip(missing, self._shared.get(missing), strict=True))
            except OSError:
                self.errors += 1
                return found
            with self._lock:
                for name, value in fetched.items():
                    if value is not None:
                        self._keep(name, value)
            found = [value or fetched.get(name) for name, value in zip(names, found, strict=True)]
        return found

    def _keep(self, name: str, value: bytes) -> None:
        old = self._values.pop(name, None)
        self._size += len(value) - (len(old) if old is not None else 0)
        self._values[name] = value
        while self._size > self._capacity and len(self._values) > 1:
            self._size -= len(self._values.popitem(last=False)[1])


def _record_name(record: wire.RecordMessage) -> str:
    return _name(record.model, record.namespace, record.response)


def _name(model: str, namespace: str, response: str) -> str:
    return f"record:{model}:{namespace}:{response}"


def _buffer_name(namespace: str, buffer: str) -> str:
    # A buffer's id is a hash over its namespace already; the prefix keeps tenants listable apart.
    return f"buffer:{namespace}:{buffer}"
