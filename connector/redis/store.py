"""KV blocks in Redis.

Every call ends within its deadline (plus one socket time-out) and returns one `Outcome` for each key;
none raises because of Redis. Calls may come from many threads; each uses one connection of the pool, so
several threads are several connections.
"""

from __future__ import annotations

import base64
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from .client import FAILURES, REDIRECTS, RedisClient, is_down, outcome_of, outcome_of_line
from .codec import (
    MAX_HEADER_BYTES,
    MAX_VALUE_BYTES,
    PREAMBLE,
    Header,
    ValueFault,
    check_header,
    checksum,
    decode_header,
    header_length,
    template,
)
from .keys import KeySchema, KVKey, digest
from .options import RedisOptions
from .outcome import Counters, Outcome, StorageError
from .wire import Bulk, Deadline, Wire, pack

logger = logging.getLogger(__name__)

KVItem = tuple[KVKey, memoryview]
Check = Callable[[], None]
"""The rest of reading a value, once all of it is here; raises ValueFault."""

_MOST_PAYLOAD = MAX_VALUE_BYTES - MAX_HEADER_BYTES - PREAMBLE.size
_VERIFY_BYTES = 1 << 20
_SCAN_COUNT = 512
# One warning for each kind of fault in this time; the counters have them all.
_WARN_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One block as it lies in the store.

    Attributes:
        key: which block.
        size: of its value in bytes, header included.
    """

    key: KVKey
    size: int


@dataclass(frozen=True, slots=True)
class Page:
    """Part of a listing.

    Attributes:
        entries: at most as many as were asked for; a key that is written meanwhile may come twice or not.
        cursor: where the next page begins; None at the end.
    """

    entries: tuple[Entry, ...]
    cursor: str | None


class KVStore(Protocol):
    """Where KV blocks are kept. All calls may come from any thread; views are bytes (``format "B"``, 1-D)."""

    def store(self, items: Sequence[KVItem], deadline: Deadline | None = None) -> list[Outcome]:
        """Write blocks. OK: it is there. The views must not change meanwhile."""

    def load(self, items: Sequence[KVItem], deadline: Deadline | None = None) -> list[Outcome]:
        """Read blocks into the views, which say how long they must be. Not OK: the view's content is
        undefined."""

    def lookup(self, keys: Sequence[KVKey], deadline: Deadline | None = None) -> list[Outcome]:
        """OK: there is a value, and its TTL begins anew."""

    def delete(self, keys: Sequence[KVKey], deadline: Deadline | None = None) -> list[Outcome]:
        """OK: it was there and is gone. MISSING: it was not there. Else: nothing is known."""

    def verify(self, keys: Sequence[KVKey], deadline: Deadline | None = None) -> list[Outcome]:
        """Read whole values and check them, without keeping them."""

    def scan(self, model: str | None = None, limit: int = 500, cursor: str | None = None) -> Page:
        """List blocks. Raises ValueError for a wrong cursor, StorageError if the store cannot be asked."""

    def status(self) -> dict[str, Any]:
        """Health and counters; plain data."""

    def close(self) -> None:
        """End; whatever runs or comes later ends with CLOSED or another outage."""


class RedisKVStore:
    """A `KVStore` in Redis.

    Args:
        client: connections; closed with the store.
        schema: key names; None: as the client's options say.
    """

    def __init__(self, client: RedisClient, schema: KeySchema | None = None) -> None:
        options = client.options
        self.client = client
        self.schema = schema or KeySchema(options.prefix, options.model_identity)
        self.counters = Counters()
        self._options: RedisOptions = options
        self._backoff = ExponentialBackoff(cap=options.backoff_cap, base=options.backoff_base)
        self._expire = b"" if options.ttl is None else b"\r\n$2\r\nEX\r\n" + _bulk(b"%d" % options.ttl)
        self._warned: dict[str, float] = {}
        self._closed = False

    # -- write ---------------------------------------------------------------------------------

    def store(self, items: Sequence[KVItem], deadline: Deadline | None = None) -> list[Outcome]:
        """See `KVStore`. One SET each, with the TTL; header and payload leave in one gathering send."""
        raws = [self.schema.kv(key) for key, _ in items]

        def work(wire: Wire, todo: Sequence[int], call: _Call) -> None:
            gate = self.client.gate(call.node)
            if not gate.admits():
                call.settle(todo, gate.reason)
                return
            fitting = [i for i in todo if len(items[i][1]) <= _MOST_PAYLOAD]
            if len(fitting) < len(todo):
                large = set(todo).difference(fitting)
                call.settle([i for i in todo if i in large], Outcome.TOO_LARGE)
            replies: list[bytes] = []
            try:
                wire.put((self._set_command(items[i], raws[i]) for i in fitting), replies)
            finally:
                for i, line in zip(fitting, replies, strict=False):
                    call.reply(i, Outcome.OK if line == b"+OK" else line)
                self._note_writes(call, fitting)

        def again(i: int) -> Outcome:
            # A slot that moves: redis-py follows the redirection, at the price of a copy.
            value = self.encode(*items[i])
            expire = () if self._options.ttl is None else ("EX", self._options.ttl)
            self.client.execute("SET", raws[i], value, *expire)
            return Outcome.OK

        return self._run("store", raws, deadline, work, again, [len(view) for _, view in items])

    def delete(self, keys: Sequence[KVKey], deadline: Deadline | None = None) -> list[Outcome]:
        """See `KVStore`. Redis frees the memory in the background (UNLINK)."""
        raws = [self.schema.kv(key) for key in keys]
        return self._small("delete", raws, deadline, lambda i: ("UNLINK", raws[i]))

    # -- read ----------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[KVKey], deadline: Deadline | None = None) -> list[Outcome]:
        """See `KVStore`. With a TTL, EXPIRE answers whether the key exists and begins its TTL anew."""
        raws = [self.schema.kv(key) for key in keys]
        ttl = self._options.ttl
        if ttl is None:
            return self._small("lookup", raws, deadline, lambda i: ("EXISTS", raws[i]))
        outcomes = self._small("lookup", raws, deadline, lambda i: ("EXPIRE", raws[i], ttl))
        # A replica tells what it has, it only cannot prolong it; nor may a user with read commands alone.
        refused = [i for i, found in enumerate(outcomes) if found in (Outcome.READ_ONLY, Outcome.DENIED)]
        if refused:
            asked = [raws[i] for i in refused]
            found = self._small("lookup", asked, deadline, lambda i: ("EXISTS", asked[i]))
            for i, outcome in zip(refused, found, strict=True):
                outcomes[i] = outcome
        return outcomes

    def load(self, items: Sequence[KVItem], deadline: Deadline | None = None) -> list[Outcome]:
        """See `KVStore`. The payload is received into the view; nothing else of its size is allocated."""
        raws = [self.schema.kv(key) for key, _ in items]

        def take(i: int, bulk: Bulk) -> Check | None:
            return self._receive(bulk, *items[i], raws[i])

        outcomes = self._fetch("load", raws, [len(view) for _, view in items], take, deadline)
        damaged = [
            items[i][0] for i, found in enumerate(outcomes) if found in (Outcome.SHORT, Outcome.CORRUPT)
        ]
        if damaged:
            # Else every lookup would promise them again. What is foreign is left to whoever wrote it.
            self.delete(damaged, deadline)
        return outcomes

    def verify(self, keys: Sequence[KVKey], deadline: Deadline | None = None) -> list[Outcome]:
        """See `KVStore`."""
        raws = [self.schema.kv(key) for key in keys]
        scratch = memoryview(bytearray(_VERIFY_BYTES))

        def take(i: int, bulk: Bulk) -> Check | None:
            header = self._read_header(bulk, keys[i], raws[i])
            summed = xxhash.xxh3_64()
            while bulk.left:
                part = scratch[: min(bulk.left, len(scratch))]
                bulk.into(part)
                summed.update(part)
            if summed.digest() != header.checksum:
                raise ValueFault(Outcome.CORRUPT, "c: the checksum differs")
            return None

        return self._fetch("verify", raws, [_VERIFY_BYTES] * len(keys), take, deadline)

    # -- list ----------------------------------------------------------------------------------

    def scan(self, model: str | None = None, limit: int = 500, cursor: str | None = None) -> Page:
        """See `KVStore`. Walks the nodes one after the other with SCAN."""
        if limit < 1:
            raise ValueError(f"limit: must be positive, got {limit}")
        node, position, skip = _Cursor.decode(cursor) if cursor is not None else (None, 0, 0)
        pattern = self.schema.kv_pattern(model)
        found: list[bytes] = []
        start = time.monotonic()
        try:
            nodes = self.client.nodes()
            if node is not None and node not in nodes:
                raise ValueError("cursor: the cluster's nodes have changed; begin again")
            at = nodes.index(node) if node is not None else 0
            while at < len(nodes) and len(found) < limit:
                deadline = Deadline(self._options.task_timeout)
                with self.client.borrow(nodes[at], deadline) as wire:
                    command = ("SCAN", position, "MATCH", pattern, "COUNT", _SCAN_COUNT)
                    reply = _value(wire.call([command])[0])
                following, keys = int(reply[0]), sorted(reply[1])[skip:]
                room = limit - len(found)
                found += keys[:room]
                if len(keys) > room:
                    # The rest of this step comes with the next page.
                    skip += room
                    break
                skip, position = 0, following
                if not following:
                    at += 1
            entries = self._sized(found)
        except FAILURES as error:
            self.counters.add("scan", [outcome_of(error)], seconds=time.monotonic() - start)
            raise StorageError(
                outcome_of(error), f"redis {self._options.where}: cannot list: {error}"
            ) from None
        self.counters.add("scan", [Outcome.OK] * len(entries), seconds=time.monotonic() - start)
        return Page(entries, None if at >= len(nodes) else _Cursor.encode(nodes[at], position, skip))

    def _sized(self, raws: Sequence[bytes]) -> tuple[Entry, ...]:
        sizes: dict[int, int] = {}
        for node, indices in self.client.group(raws).items():
            with self.client.borrow(node, Deadline(self._options.task_timeout)) as wire:
                replies = wire.call([("STRLEN", raws[i]) for i in indices])
            sizes |= {i: reply for i, reply in zip(indices, replies, strict=True) if type(reply) is int}
        entries = []
        for i, raw in enumerate(raws):
            key = self.schema.parse_kv(raw)
            # Gone since, or not a string: then it is nothing we could load.
            if key is not None and sizes.get(i):
                entries.append(Entry(key, sizes[i]))
        return tuple(entries)

    # -- state ---------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """See `KVStore`."""
        return {**self.client.status(), "operations": self.counters.snapshot()}

    def close(self) -> None:
        """See `KVStore`."""
        self._closed = True
        self.client.close()

    # -- one value -----------------------------------------------------------------------------

    def encode(self, key: KVKey, view: memoryview) -> bytes:
        """A block's value as it lies in Redis; a copy."""
        return self._header(key, view, self.schema.kv(key)) + bytes(view)

    def _header(self, key: KVKey, view: memoryview, raw: bytes) -> bytes:
        return template(len(view), self._model(key)).fill(checksum(view), digest(raw))

    def _model(self, key: KVKey) -> str:
        return f"{key.model}|{self.schema.identity}" if self.schema.identity else key.model

    def _set_command(self, item: KVItem, raw: bytes) -> tuple[bytes, memoryview, bytes]:
        key, view = item
        header = self._header(key, view, raw)
        before = b"*%d\r\n$3\r\nSET\r\n%b$%d\r\n%b" % (
            5 if self._expire else 3,
            _bulk(raw),
            len(header) + len(view),
            header,
        )
        return before, view, self._expire or b"\r\n"

    def _receive(self, bulk: Bulk, key: KVKey, view: memoryview, raw: bytes) -> Check | None:
        expected = template(len(view), self._model(key))
        if bulk.left != expected.size + len(view):
            raise self._fault(bulk, key, view, raw)
        summed = expected.match(head := bulk.read(expected.size), digest(raw))
        if summed is None:
            raise self._fault(_Whole(head, bulk.left), key, view, raw)
        bulk.into(view)

        def check() -> None:
            if checksum(view) != summed:
                raise ValueFault(Outcome.CORRUPT, "c: the checksum differs")

        return check if self._options.verify_checksum else None

    def _fault(self, bulk: Bulk, key: KVKey, view: memoryview, raw: bytes) -> ValueFault:
        """What is wrong with a value whose head is not as it must be."""
        try:
            header = self._read_header(bulk, key, raw)
        except ValueFault as fault:
            return fault
        # Whole, but of another layout: somebody else's, under a name that should tell the two apart.
        detail = f"n: the block has {len(view)} bytes, the value {header.length}; see model_identity"
        return ValueFault(Outcome.FOREIGN, detail)

    def _read_header(self, bulk: Bulk, key: KVKey, raw: bytes) -> Header:
        size = header_length(bulk.read(PREAMBLE.size))
        header = decode_header(bulk.read(size), size)
        check_header(header, digest(raw), self._model(key))
        if header.length != bulk.left:
            raise ValueFault(
                Outcome.SHORT, f"n: the header says {header.length} bytes, there are {bulk.left}"
            )
        return header

    # -- many keys over nodes, connections and attempts ----------------------------------------

    def _fetch(
        self,
        operation: str,
        raws: Sequence[bytes],
        sizes: Sequence[int],
        take: Callable[[int, Bulk], Check | None],
        deadline: Deadline | None,
    ) -> list[Outcome]:
        commands = [pack(b"GET", raw) for raw in raws]

        def work(wire: Wire, todo: Sequence[int], call: _Call) -> None:
            def each(position: int, value: Bulk | bytes | None) -> Check | None:
                i = todo[position]
                if value is None:
                    call.settle([i], Outcome.MISSING)
                elif isinstance(value, bytes):
                    call.reply(i, value)
                else:
                    try:
                        check = take(i, value)
                    except ValueFault as fault:
                        call.settle([i], self._fault_outcome(fault))
                    else:
                        return lambda: call.settle([i], self._checked(check))
                return None

            wire.fetch([commands[i] for i in todo], [sizes[i] for i in todo], each)

        def again(i: int) -> Outcome:
            value = self.client.execute("GET", raws[i])
            if value is None:
                return Outcome.MISSING
            try:
                return self._checked(take(i, _Whole(value)))
            except ValueFault as fault:
                return self._fault_outcome(fault)

        return self._run(operation, raws, deadline, work, again, sizes)

    def _checked(self, check: Check | None) -> Outcome:
        try:
            if check is not None:
                check()
        except ValueFault as fault:
            return self._fault_outcome(fault)
        return Outcome.OK

    def _fault_outcome(self, fault: ValueFault) -> Outcome:
        self._warn(f"value {fault}")
        return fault.outcome

    def _small(
        self,
        operation: str,
        raws: Sequence[bytes],
        deadline: Deadline | None,
        command: Callable[[int], tuple[Any, ...]],
    ) -> list[Outcome]:
        """One command for each key that answers 1 for done and 0 for no such key."""

        def outcome(reply: Any) -> Outcome:
            return Outcome.OK if reply else Outcome.MISSING

        def work(wire: Wire, todo: Sequence[int], call: _Call) -> None:
            for i, reply in zip(todo, wire.call([command(i) for i in todo]), strict=True):
                call.reply(i, reply if isinstance(reply, ResponseError) else outcome(reply))

        return self._run(
            operation, raws, deadline, work, lambda i: outcome(self.client.execute(*command(i))), None
        )

    def _run(
        self,
        operation: str,
        raws: Sequence[bytes],
        deadline: Deadline | None,
        work: Callable[[Wire, Sequence[int], _Call], None],
        again: Callable[[int], Outcome],
        sizes: Sequence[int] | None,
    ) -> list[Outcome]:
        """Do `work` on each node's keys; `again` one by one on those that a node sent elsewhere."""
        start = time.monotonic()
        deadline = deadline or Deadline(self._options.task_timeout)
        call = _Call(len(raws))
        if self._closed:
            call.settle(range(len(raws)), Outcome.CLOSED)
        try:
            for node, indices in self.client.group(raws).items():
                call.node = node
                self._on_node(call, indices, deadline, work)
            if call.redirected:
                self._redirect(call, deadline, again)
        except FAILURES as error:
            # The Cluster's layout; a node's own failures end in `_on_node`.
            self._warn(f"{operation} {outcome_of(error).value}: {error}")
            call.settle(range(len(raws)), outcome_of(error))
        outcomes = call.finish()
        moved = (
            0
            if sizes is None
            else sum(size for size, end in zip(sizes, outcomes, strict=True) if end is Outcome.OK)
        )
        self.counters.add(operation, outcomes, moved, time.monotonic() - start)
        return outcomes

    def _on_node(
        self,
        call: _Call,
        indices: Sequence[int],
        deadline: Deadline,
        work: Callable[[Wire, Sequence[int], _Call], None],
    ) -> None:
        node = call.node
        breaker = self.client.breaker(node)
        attempt = 0
        while todo := call.open(indices):
            if breaker.is_open:
                call.settle(todo, Outcome.BREAKER_OPEN)
                return
            try:
                with self.client.borrow(node, deadline) as wire:
                    work(wire, todo, call)
                breaker.succeeded()
                # `work` has an answer for each, or it would have raised.
                return
            except FAILURES as error:
                outcome = Outcome.CLOSED if self._closed else outcome_of(error)
                # The first new attempt is for a connection that broke while it lay idle: no need to wait.
                pause = self._backoff.compute(attempt) if attempt else 0.0
                if (
                    outcome is Outcome.UNREACHABLE
                    and attempt < self._options.retries
                    and deadline.left > pause
                ):
                    attempt += 1
                    time.sleep(pause)
                    continue
                if is_down(error):
                    self.client.failed(node, error)
                self._warn(f"{outcome.value} at {node}: {error}")
                call.settle(todo, outcome)
                return

    def _redirect(self, call: _Call, deadline: Deadline, again: Callable[[int], Outcome]) -> None:
        self.client.refresh()
        for i in call.redirected:
            try:
                deadline.check()
                call.settle([i], again(i))
            except FAILURES as error:
                call.settle([i], Outcome.UNREACHABLE if isinstance(error, REDIRECTS) else outcome_of(error))

    def _note_writes(self, call: _Call, indices: Sequence[int]) -> None:
        gate = self.client.gate(call.node)
        ends = [call.outcomes[i] for i in indices]
        if Outcome.READ_ONLY in ends and self._options.sentinels:
            # The master was demoted: the next connection asks the sentinels anew.
            for i in indices:
                if call.outcomes[i] is Outcome.READ_ONLY:
                    call.outcomes[i] = None
            raise RedisConnectionError("the previous master is now a replica")
        refusals = [end for end in ends if end is not None and end.is_refusal]
        if refusals:
            if gate.refused(refusals[0]):
                logger.warning(
                    "redis %s (%s) takes no writes: %s", self._options.where, call.node, refusals[0].value
                )
        elif Outcome.OK in ends and gate.accepted():
            logger.info("redis %s (%s) takes writes again", self._options.where, call.node)

    def _warn(self, what: str) -> None:
        kind = what.partition(":")[0]
        now = time.monotonic()
        if now - self._warned.get(kind, -_WARN_EVERY_S) >= _WARN_EVERY_S:
            self._warned[kind] = now
            logger.warning("redis %s: %s", self._options.where, what)


class _Call:
    """Outcomes of one call while it runs."""

    def __init__(self, count: int) -> None:
        self.outcomes: list[Outcome | None] = [None] * count
        self.redirected: list[int] = []
        self.node = ""

    def open(self, indices: Sequence[int]) -> list[int]:
        """Those of `indices` that have no outcome yet and are not to be asked elsewhere."""
        elsewhere = set(self.redirected)
        return [i for i in indices if self.outcomes[i] is None and i not in elsewhere]

    def settle(self, indices: Sequence[int], outcome: Outcome) -> None:
        """Set the outcome of those that have none."""
        for i in indices:
            if self.outcomes[i] is None:
                self.outcomes[i] = outcome

    def reply(self, i: int, reply: Outcome | bytes | ResponseError) -> None:
        """Take a reply: an outcome, the line of an error, or redis-py's exception for one."""
        outcome: Outcome | None
        if isinstance(reply, Outcome):
            outcome = reply
        elif isinstance(reply, bytes):
            outcome = outcome_of_line(reply)
        else:
            outcome = None if isinstance(reply, REDIRECTS) else outcome_of(reply)
            if outcome is Outcome.UNREACHABLE:
                raise reply
        if outcome is None:
            self.redirected.append(i)
        else:
            self.outcomes[i] = outcome

    def finish(self) -> list[Outcome]:
        return [Outcome.ERROR if outcome is None else outcome for outcome in self.outcomes]


class _Whole(Bulk):
    """A value, or its beginning, that is here already: of the redirected few, and of those with a fault."""

    __slots__ = ("_position", "_value")

    def __init__(self, value: bytes, beyond: int = 0) -> None:
        self._value = memoryview(value)
        self._position = 0
        self.left = len(value) + beyond

    def read(self, count: int) -> bytes:
        start = self._position
        self._position += min(count, self.left)
        self.left -= min(count, self.left)
        return bytes(self._value[start : self._position])

    def into(self, view: memoryview) -> None:
        view[:] = self.read(len(view))


class _Cursor:
    """Where a listing goes on: node, SCAN's cursor there, keys of that step already given."""

    @staticmethod
    def encode(node: str, position: int, skip: int) -> str:
        return base64.urlsafe_b64encode(json.dumps([node, position, skip]).encode()).decode()

    @staticmethod
    def decode(text: str) -> tuple[str, int, int]:
        try:
            node, position, skip = json.loads(base64.urlsafe_b64decode(text.encode()))
        except (ValueError, TypeError):
            raise ValueError("cursor: not one of this store's; begin without one") from None
        if not isinstance(node, str) or type(position) is not int or type(skip) is not int or skip < 0:
            raise ValueError("cursor: not one of this store's; begin without one")
        return node, position, skip


def _bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


def _value(reply: Any) -> Any:
    if isinstance(reply, Exception):
        raise reply
    return reply


def entries(store: KVStore, model: str | None = None, limit: int = 500) -> Iterator[Entry]:
    """All blocks, page by page. Raises StorageError."""
    cursor: str | None = None
    while True:
        page = store.scan(model, limit, cursor)
        yield from page.entries
        cursor = page.cursor
        if cursor is None:
            return


def audit(store: KVStore, model: str | None = None) -> Counter[Outcome]:
    """Read and check every block; how many ended how. Raises StorageError."""
    found: Counter[Outcome] = Counter()
    cursor: str | None = None
    while True:
        page = store.scan(model, 64, cursor)
        found.update(store.verify([entry.key for entry in page.entries]))
        cursor = page.cursor
        if cursor is None:
            return found
