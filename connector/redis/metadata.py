"""Small records: bases, views, lineages, fences.

A record has a family, a kind and a name. The records of one family (say, one session) lie in one slot of a
Cluster, so several are written in one transaction: all or none. Every record has a TTL that begins anew
with each use, so what nobody refers to any more disappears by itself. Bodies are opaque here; whoever
writes a kind owns its encoding. Missing data is None; everything else that goes wrong is a `StorageError`
with a name.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from redis.exceptions import ResponseError

from .client import FAILURES, REDIRECTS, RedisClient, is_down, outcome_of
from .codec import ValueFault, pack, unpack
from .keys import KeySchema, digest
from .options import RedisOptions
from .outcome import Counters, Outcome, StorageError
from .wire import Deadline, Wire

MAX_RECORD_BYTES = 8 * 1024 * 1024
MAX_NAME_CHARS = 512
_SCAN_COUNT = 512
_HEAD = struct.Struct(">8sI")  # before each body: revision, TTL in seconds

Name = tuple[str, str]
"""Kind and name, within a family."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record as it was read.

    Attributes:
        family, kind, name: which.
        body: what was written.
        revision: changes with every write; see ``expect`` of `MetadataStore.put`.
    """

    family: str
    kind: str
    name: str
    body: bytes
    revision: bytes

    def __repr__(self) -> str:
        return f"Record({self.kind} {self.name!r} of {self.family!r}, {len(self.body)} bytes)"


class Conflict(Exception):
    """A record is not at the revision that the writer expected; nothing was written."""


class MetadataStore(Protocol):
    """Where records are kept. All calls may come from any thread."""

    def get(self, family: str, names: Sequence[Name]) -> list[Record | None]:
        """Read records, each None if it is not there; their TTL begins anew.

        Raises:
            StorageError: they cannot be read, or one of them is damaged.
        """

    def put(
        self,
        family: str,
        bodies: Mapping[Name, bytes | None],
        ttl: int | None = None,
        expect: Mapping[Name, bytes | None] | None = None,
    ) -> dict[Name, bytes]:
        """Write and delete (None) records of one family, all or none.

        Args:
            family: of all of them.
            bodies: what to write.
            ttl: seconds; None: the configured one.
            expect: revisions that records (these or others of the family) must still be at, None for absent.

        Returns:
            The new revisions of those written.

        Raises:
            Conflict: an expectation failed.
            StorageError: it cannot be written, or it is not known whether it was.
            ValueError: a body or a name is too long.
        """

    def delete(self, family: str, names: Sequence[Name]) -> int:
        """Delete records; the number that were there. Raises StorageError."""

    def scan(self, family: str | None = None, kind: str | None = None) -> Iterator[tuple[str, str, str]]:
        """Family, kind and name of all records; one written meanwhile may be missed. Raises StorageError."""

    def status(self) -> dict[str, Any]:
        """Health and counters; plain data."""

    def close(self) -> None:
        """End."""


class RedisMetadata:
    """Records in Redis.

    Args:
        client: connections.
        schema: key names; None: as the client's options say.
        owns_client: close it with the store.
    """

    def __init__(
        self, client: RedisClient, schema: KeySchema | None = None, owns_client: bool = False
    ) -> None:
        self.client = client
        self.schema = schema or KeySchema(client.options.prefix, client.options.model_identity)
        self.counters = Counters()
        self._options: RedisOptions = client.options
        self._owns_client = owns_client

    def get(self, family: str, names: Sequence[Name]) -> list[Record | None]:
        """See `MetadataStore`."""
        keys = [self._key(family, name) for name in names]
        if not keys:
            return []
        values = self._on_node("get", keys, lambda wire: wire.call([("GET", key) for key in keys]))
        found = [
            None if value is None else self._decode(family, name, key, value)
            for name, key, value in zip(names, keys, values, strict=True)
        ]
        # Apart from the reading: a replica serves a GET, and refuses this without harm.
        self._touch([(key, item[1]) for key, item in zip(keys, found, strict=True) if item and item[1]])
        return [None if item is None else item[0] for item in found]

    def put(
        self,
        family: str,
        bodies: Mapping[Name, bytes | None],
        ttl: int | None = None,
        expect: Mapping[Name, bytes | None] | None = None,
    ) -> dict[Name, bytes]:
        """See `MetadataStore`. MULTI and EXEC, with WATCH on what is expected."""
        life = ttl if ttl is not None else self._options.metadata_ttl
        expire = () if life is None else ("EX", life)
        revisions = {name: os.urandom(8) for name, body in bodies.items() if body is not None}
        commands: list[tuple[Any, ...]] = []
        for name, body in bodies.items():
            key = self._key(family, name)
            if body is None:
                commands.append(("DEL", key))
            else:
                value = _encode(name, key, body, revisions[name], life)
                commands.append(("SET", key, value, *expire))
        if not commands:
            return {}
        watched = [(self._key(family, name), name, revision) for name, revision in (expect or {}).items()]
        keys = [command[1] for command in commands] + [key for key, _, _ in watched]

        def write(wire: Wire) -> list[Any]:
            if watched:
                self._check(family, wire, watched)
            replies = wire.call([("MULTI",), *commands, ("EXEC",)])
            for reply in replies:
                # A command refused while it was queued (OOM, MOVED) says more than EXEC's "aborted".
                if isinstance(reply, ResponseError):
                    raise reply
            if replies[-1] is None:
                raise Conflict(f"{family}: changed by another writer meanwhile")
            for reply in replies[-1]:
                if isinstance(reply, ResponseError):
                    raise reply
            return []

        # Not a second time where revisions are compared: the first may have been carried out unheard.
        self._on_node("put", keys, write, repeat=not watched)
        return revisions

    def delete(self, family: str, names: Sequence[Name]) -> int:
        """See `MetadataStore`."""
        keys = [self._key(family, name) for name in names]
        if not keys:
            return 0
        replies = self._on_node("delete", keys, lambda wire: wire.call([("DEL", key) for key in keys]))
        return sum(replies)

    def scan(self, family: str | None = None, kind: str | None = None) -> Iterator[tuple[str, str, str]]:
        """See `MetadataStore`. SCAN over all nodes."""
        pattern = self.schema.meta_pattern(family, kind)
        try:
            nodes = [self.client.node_of(pattern)] if family is not None else self.client.nodes()
        except FAILURES as error:
            raise self._error("scan", error) from None
        for node in nodes:
            cursor = 0
            while True:
                try:
                    with self.client.borrow(node, self._deadline()) as wire:
                        reply = wire.call([("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)])[0]
                    if isinstance(reply, Exception):
                        raise reply
                except FAILURES as error:
                    raise self._error("scan", error) from None
                for key in reply[1]:
                    found = self.schema.parse_meta(key)
                    if found is not None:
                        yield found
                cursor = int(reply[0])
                if not cursor:
                    break

    def status(self) -> dict[str, Any]:
        """See `MetadataStore`."""
        return {**self.client.status(), "operations": self.counters.snapshot()}

    def close(self) -> None:
        """See `MetadataStore`."""
        if self._owns_client:
            self.client.close()

    # -- parts ---------------------------------------------------------------------------------

    def _key(self, family: str, name: Name) -> bytes:
        if any(not part or len(part) > MAX_NAME_CHARS for part in (family, *name)):
            raise ValueError(f"family, kind, name: expected 1 to {MAX_NAME_CHARS} characters each")
        return self.schema.meta(family, *name)

    def _decode(self, family: str, name: Name, key: bytes, value: bytes) -> tuple[Record, int]:
        """The record, and its TTL in seconds (0: none)."""
        try:
            payload = unpack(value, digest(key), name[0])
            if len(payload) < _HEAD.size:
                raise ValueFault(Outcome.SHORT, f"record: expected at least {_HEAD.size} bytes")
        except ValueFault as fault:
            self.counters.add("get", [fault.outcome])
            detail = f"record {name[0]} {name[1]!r} of {family!r}: {fault.detail}"
            raise StorageError(fault.outcome, detail) from None
        revision, life = _HEAD.unpack_from(payload)
        return Record(family, *name, payload[_HEAD.size :], revision), life

    def _check(self, family: str, wire: Wire, watched: Sequence[tuple[bytes, Name, bytes | None]]) -> None:
        """WATCH the expected keys and compare; EXEC then fails if one changes in between."""
        keys = [key for key, _, _ in watched]
        replies = wire.call([("WATCH", *keys), *(("GET", key) for key in keys)])
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise reply
        for (key, name, revision), value in zip(watched, replies[1:], strict=True):
            found = None if value is None else self._decode(family, name, key, value)[0].revision
            if found != revision:
                wire.call([("UNWATCH",)])
                raise Conflict(f"{family}: {name[0]} {name[1]!r} is at another revision")

    def _touch(self, lives: Sequence[tuple[bytes, int]]) -> None:
        """Begin TTLs anew, each record's own."""
        if not lives:
            return
        try:
            node = self.client.node_of(lives[0][0])
            with self.client.borrow(node, self._deadline()) as wire:
                wire.call([("EXPIRE", key, life) for key, life in lives])
        except FAILURES:
            # They were read; that they may expire a little earlier harms nobody.
            self.counters.add("touch", [Outcome.UNREACHABLE])

    def _on_node(
        self,
        operation: str,
        keys: Sequence[bytes],
        work: Callable[[Wire], list[Any]],
        repeat: bool = True,
    ) -> list[Any]:
        """Run `work` on the node of one family's keys, a second time where that can help."""
        start = time.monotonic()
        attempt = 0
        while True:
            node = None
            try:
                node = self.client.node_of(keys[0])
                breaker = self.client.breaker(node)
                if breaker.is_open:
                    raise StorageError(Outcome.BREAKER_OPEN, f"redis {self._options.where}: {node} is down")
                with self.client.borrow(node, self._deadline()) as wire:
                    replies: list[Any] = work(wire)
                for reply in replies:
                    if isinstance(reply, ResponseError):
                        raise reply
                breaker.succeeded()
                self.counters.add(operation, [Outcome.OK] * len(keys), seconds=time.monotonic() - start)
                return replies
            except (Conflict, StorageError):
                raise
            except FAILURES as error:
                moved = isinstance(error, REDIRECTS)
                again = moved or (repeat and outcome_of(error) is Outcome.UNREACHABLE)
                if again and attempt < max(1, self._options.retries):
                    attempt += 1
                    try:
                        if moved:
                            self.client.refresh()
                        continue
                    except FAILURES as second:
                        error = second
                if node is not None and is_down(error):
                    self.client.failed(node, error)
                raise self._error(operation, error) from None

    def _error(self, operation: str, error: BaseException) -> StorageError:
        outcome = Outcome.UNREACHABLE if isinstance(error, REDIRECTS) else outcome_of(error)
        self.counters.add(operation, [outcome])
        return StorageError(outcome, f"redis {self._options.where}: {operation}: {error}")

    def _deadline(self) -> Deadline:
        return Deadline(self._options.task_timeout)


def _encode(name: Name, key: bytes, body: bytes, revision: bytes, life: int | None) -> bytes:
    if len(body) > MAX_RECORD_BYTES:
        raise ValueError(f"body: at most {MAX_RECORD_BYTES} bytes, got {len(body)}")
    return pack(_HEAD.pack(revision, life or 0) + body, digest(key), name[0])


def open_metadata(options: RedisOptions | None) -> MetadataStore:
    """Records in Redis, or in this process's memory when there is no Redis."""
    if options is None:
        from .memory import MemoryMetadata

        return MemoryMetadata()
    return RedisMetadata(RedisClient(options), owns_client=True)
