"""The same interfaces in this process's memory, for one node without Redis. Bounded; the least recently used
goes."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .keys import KVKey
from .metadata import MAX_NAME_CHARS, MAX_RECORD_BYTES, Conflict, Name, Record
from .outcome import Counters, Outcome
from .store import Entry, KVItem, Page
from .wire import Deadline

K = TypeVar("K")


@dataclass(slots=True)
class _Value:
    data: bytes
    ttl: float | None
    expires: float
    revision: bytes = b""


class _Shelf(Generic[K]):
    """Values by key with TTL, bounded in bytes. Not locked."""

    def __init__(self, capacity: int, clock: Callable[[], float]) -> None:
        self._capacity = capacity
        self._clock = clock
        self._values: OrderedDict[K, _Value] = OrderedDict()
        self.used = 0

    def get(self, key: K, touch: bool = True) -> _Value | None:
        found = self._values.get(key)
        if found is None:
            return None
        now = self._clock()
        if found.expires <= now:
            self.pop(key)
            return None
        if touch:
            if found.ttl is not None:
                found.expires = now + found.ttl
            self._values.move_to_end(key)
        return found

    def put(self, key: K, data: bytes, ttl: float | None, revision: bytes = b"") -> None:
        self.pop(key)
        expires = float("inf") if ttl is None else self._clock() + ttl
        self._values[key] = _Value(data, ttl, expires, revision)
        self.used += len(data)
        while self.used > self._capacity and len(self._values) > 1:
            self.pop(next(iter(self._values)))

    def pop(self, key: K) -> bool:
        found = self._values.pop(key, None)
        if found is None:
            return False
        self.used -= len(found.data)
        return found.expires > self._clock()

    def live(self) -> list[K]:
        now = self._clock()
        return [key for key, value in self._values.items() if value.expires > now]


class MemoryKVStore:
    """A `KVStore` in memory.

    Args:
        capacity: bytes; older blocks give way.
        ttl: seconds after the last use; None: for ever.
        clock: seconds, monotonic.
    """

    def __init__(
        self, capacity: int = 1 << 30, ttl: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counters = Counters()
        self._ttl = ttl
        self._lock = threading.Lock()
        self._shelf: _Shelf[KVKey] = _Shelf(capacity, clock)
        self._closed = False

    def store(self, items: Sequence[KVItem], deadline: Deadline | None = None) -> list[Outcome]:
        """See `KVStore`."""
        outcomes = []
        for key, view in items:
            with self._lock:
                if not self._closed:
                    self._shelf.put(key, bytes(view), self._ttl)
                outcomes.append(Outcome.CLOSED if self._closed else Outcome.OK)
        return self._counted("store", outcomes)

    def load(self, items: Sequence[KVItem], deadline: Deadline | None = None) -> list[Outcome]:
        """See `KVStore`."""
        outcomes = []
        for key, view in items:
            with self._lock:
                value = self._shelf.get(key)
            if value is None:
                outcomes.append(Outcome.MISSING)
            elif len(value.data) != len(view):
                outcomes.append(Outcome.FOREIGN)
            else:
                view[:] = value.data
                outcomes.append(Outcome.OK)
        return self._counted("load", outcomes)

    def lookup(self, keys: Sequence[KVKey], deadline: Deadline | None = None) -> list[Outcome]:
        """See `KVStore`."""
        with self._lock:
            found = [self._shelf.get(key) is not None for key in keys]
        return self._counted("lookup", [Outcome.OK if there else Outcome.MISSING for there in found])

    def delete(self, keys: Sequence[KVKey], deadline: Deadline | None = None) -> list[Outcome]:
        """See `KVStore`."""
        with self._lock:
            found = [self._shelf.pop(key) for key in keys]
        return self._counted("delete", [Outcome.OK if there else Outcome.MISSING for there in found])

    def verify(self, keys: Sequence[KVKey], deadline: Deadline | None = None) -> list[Outcome]:
        """See `KVStore`; memory holds what was put there."""
        with self._lock:
            found = [self._shelf.get(key, touch=False) is not None for key in keys]
        return self._counted("verify", [Outcome.OK if there else Outcome.MISSING for there in found])

    def scan(self, model: str | None = None, limit: int = 500, cursor: str | None = None) -> Page:
        """See `KVStore`."""
        if limit < 1:
            raise ValueError(f"limit: must be positive, got {limit}")
        if cursor is not None and not cursor.isdecimal():
            raise ValueError("cursor: not one of this store's; begin without one")
        start = int(cursor or 0)
        with self._lock:
            keys = [key for key in self._shelf.live() if model is None or key.model == model]
            values = [(key, self._shelf.get(key, touch=False)) for key in keys[start : start + limit]]
        stop = start + limit
        found = tuple(Entry(key, len(value.data)) for key, value in values if value is not None)
        return Page(found, str(stop) if stop < len(keys) else None)

    def status(self) -> dict[str, Any]:
        """See `KVStore`."""
        return {
            "where": "memory",
            "up": not self._closed,
            "open": [],
            "opened": 0,
            "used_bytes": self._shelf.used,
            "operations": self.counters.snapshot(),
        }

    def close(self) -> None:
        """See `KVStore`."""
        with self._lock:
            self._closed = True

    def _counted(self, operation: str, outcomes: list[Outcome]) -> list[Outcome]:
        self.counters.add(operation, outcomes)
        return outcomes


class MemoryMetadata:
    """A `MetadataStore` in memory.

    Args:
        capacity: bytes of all bodies; older records give way.
        ttl: seconds after the last use; None: for ever.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        capacity: int = 256 << 20,
        ttl: float | None = 7 * 24 * 3600,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = Counters()
        self._ttl = ttl
        self._lock = threading.Lock()
        self._shelf: _Shelf[tuple[str, str, str]] = _Shelf(capacity, clock)

    def get(self, family: str, names: Sequence[Name]) -> list[Record | None]:
        """See `MetadataStore`."""
        keys = [_key(family, name) for name in names]
        with self._lock:
            values = [self._shelf.get(key) for key in keys]
        self.counters.add("get", [Outcome.OK if value else Outcome.MISSING for value in values])
        return [
            None if value is None else Record(*key, value.data, value.revision)
            for key, value in zip(keys, values, strict=True)
        ]

    def put(
        self,
        family: str,
        bodies: Mapping[Name, bytes | None],
        ttl: int | None = None,
        expect: Mapping[Name, bytes | None] | None = None,
    ) -> dict[Name, bytes]:
        """See `MetadataStore`."""
        keys = {name: _key(family, name) for name in (*bodies, *(expect or {}))}
        for body in bodies.values():
            if body is not None and len(body) > MAX_RECORD_BYTES:
                raise ValueError(f"body: at most {MAX_RECORD_BYTES} bytes, got {len(body)}")
        revisions = {name: os.urandom(8) for name, body in bodies.items() if body is not None}
        with self._lock:
            for name, revision in (expect or {}).items():
                found = self._shelf.get(keys[name], touch=False)
                if (None if found is None else found.revision) != revision:
                    raise Conflict(f"{family}: {name[0]} {name[1]!r} is at another revision")
            for name, body in bodies.items():
                if body is None:
                    self._shelf.pop(keys[name])
                else:
                    self._shelf.put(keys[name], body, self._ttl if ttl is None else ttl, revisions[name])
        self.counters.add("put", [Outcome.OK] * len(bodies))
        return revisions

    def delete(self, family: str, names: Sequence[Name]) -> int:
        """See `MetadataStore`."""
        with self._lock:
            found = [self._shelf.pop(_key(family, name)) for name in names]
        self.counters.add("delete", [Outcome.OK if there else Outcome.MISSING for there in found])
        return sum(found)

    def scan(self, family: str | None = None, kind: str | None = None) -> Iterator[tuple[str, str, str]]:
        """See `MetadataStore`."""
        with self._lock:
            keys = self._shelf.live()
        for key in keys:
            if family in (None, key[0]) and kind in (None, key[1]):
                yield key

    def status(self) -> dict[str, Any]:
        """See `MetadataStore`."""
        return {
            "where": "memory",
            "up": True,
            "open": [],
            "opened": 0,
            "used_bytes": self._shelf.used,
            "operations": self.counters.snapshot(),
        }

    def close(self) -> None:
        """See `MetadataStore`."""


def _key(family: str, name: Name) -> tuple[str, str, str]:
    if any(not part or len(part) > MAX_NAME_CHARS for part in (family, *name)):
        raise ValueError(f"family, kind, name: expected 1 to {MAX_NAME_CHARS} characters each")
    return family, *name
