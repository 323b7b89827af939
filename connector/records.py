"""Base records: what past responses left in the cache, so that a later request can edit them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from leyline_lmcache.diff import common_prefix
from leyline_lmcache.ranges import Range, intersect, merge, subtract
from leyline_lmcache.view import BufferId, View

from .lineage import Roundings, Tokens, untagged
from .packs import BufferInfo


@dataclass(frozen=True, slots=True)
class Namespace:
    """Who may read a base (I7): SGLang's ``cache_salt``, ``extra_key`` and LoRA adapter of the request."""

    cache_salt: str | None
    extra_key: str | None
    lora: str | None

    @property
    def salt(self) -> str:
        """One unambiguous string, for buffer ids."""
        return repr((self.cache_salt, self.extra_key, self.lora))

    def __repr__(self) -> str:
        # A salt may be a secret of the tenant's.
        return f"Namespace(salted={self.cache_salt is not None}, keyed={self.extra_key is not None})"


@dataclass(frozen=True, slots=True)
class BaseRecord:
    """A finished request's prompt and completion, up to the last token that has KV.

    Attributes:
        response: id the client knows it by.
        spans: start and fingerprint of each lineage along ``keys``, in order; empty for exact KV. What the
            tags mean in every process.
        keys: tagged radix key, int64 ``[length]``; the path in the tree that holds (or held) its KV.
        view: its pieces, same length.
        buffer: the buffer that holds what this request itself computed.
        roundings: of the KV on that path.
    """

    response: str
    namespace: Namespace
    keys: Tokens
    view: View
    buffer: BufferId
    roundings: Roundings
    spans: tuple[tuple[int, bytes], ...] = ()

    @property
    def length(self) -> int:
        return self.view.length

    @property
    def tokens(self) -> Tokens:
        """Plain token ids."""
        return untagged(self.keys)

    def __repr__(self) -> str:
        return f"BaseRecord({self.response!r}, {self.length} tokens, {len(self.view.pieces)} pieces)"


def namespace_of(req: Any) -> Namespace:
    """Tenant and adapter of an SGLang request."""
    return Namespace(req.cache_salt or None, req.extra_key or None, req.lora_id or None)


class RecordStore:
    """Base records by response id, bounded in number and in tokens; the least recently used goes first."""

    def __init__(self, max_records: int, max_tokens: int) -> None:
        self._max_records = max_records
        self._max_tokens = max_tokens
        self._records: OrderedDict[str, BaseRecord] = OrderedDict()
        self._holders: dict[BufferId, OrderedDict[str, None]] = {}
        self._origins: dict[BufferId, str] = {}
        self._superseded: set[str] = set()
        self._infos: dict[BufferId, BufferInfo] = {}
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def tokens(self) -> int:
        """Tokens over all records."""
        return self._tokens

    def add(self, record: BaseRecord, infos: Iterable[BufferInfo] = ()) -> None:
        """Remember a record; one of the same response id is replaced.

        ``infos``: of buffers in its view. They are kept as long as a record has pieces of them.
        """
        kept = {info.id: info for info in infos}
        for buffer in record.view.buffers() & self._infos.keys():
            kept.setdefault(buffer, self._infos[buffer])
        self._drop(record.response)
        self._records[record.response] = record
        self._tokens += record.length
        self._origins[record.buffer] = record.response
        for buffer in record.view.buffers():
            self._holders.setdefault(buffer, OrderedDict())[record.response] = None
            if buffer in kept:
                self._infos[buffer] = kept[buffer]
        while len(self._records) > 1 and (
            len(self._records) > self._max_records or self._tokens > self._max_tokens
        ):
            self._drop(next(iter(self._records)))

    def get(self, response: str, namespace: Namespace) -> BaseRecord | None:
        """The record, if it is known *and* of this namespace; a stranger's base is as good as unknown."""
        record = self._records.get(response)
        if record is None or record.namespace != namespace:
            return None
        self._records.move_to_end(response)
        self._superseded.discard(response)
        return record

    def supersede(self, record: BaseRecord) -> dict[BufferId, tuple[list[Range], list[Range]]]:
        """A record was edited, and its session goes on with the outcome. It may still be edited again.

        Returns:
            For each buffer of its view, what no other record refers to: all of it, and what this record still
            did; both merged.
        """
        if self._records.get(record.response) is not record:
            return {}
        self._superseded.add(record.response)
        out: dict[BufferId, tuple[list[Range], list[Range]]] = {}
        for buffer in record.view.buffers():
            info = self._infos.get(buffer)
            if info is None:
                continue
            alive = [*self._referred(buffer), *self._shared(info, record.namespace)]
            dead = subtract([(0, len(info.tokens))], merge(alive))
            fresh = intersect(_of_buffer(record, buffer), dead)
            if fresh:
                out[buffer] = dead, fresh
        return out

    def _referred(self, buffer: BufferId) -> list[Range]:
        """What of a buffer is in the view of a record that was not superseded."""
        current = (each for each in self._holders.get(buffer, ()) if each not in self._superseded)
        return merge(part for each in current for part in _of_buffer(self._records[each], buffer))

    def _shared(self, info: BufferInfo, namespace: Namespace) -> list[Range]:
        """What current views have of other sequences that begin alike: stored once for all of them."""
        out: list[Range] = []
        if info.lineage:
            return out
        for other in self._infos.values():
            if other.id == info.id or other.lineage or not self._is_of(other.id, namespace):
                continue
            length = common_prefix(info.tokens, other.tokens)
            out += [(start, min(end, length)) for start, end in self._referred(other.id) if start < length]
        return out

    def _is_of(self, buffer: BufferId, namespace: Namespace) -> bool:
        return any(self._records[each].namespace == namespace for each in self._holders.get(buffer, ()))

    def holders(self, buffer: BufferId, namespace: Namespace) -> Iterator[BaseRecord]:
        """Records whose view has pieces of a buffer: the one that computed it, then the latest first."""
        origin = self._records.get(self._origins.get(buffer, ""))
        if origin is not None and origin.namespace == namespace:
            yield origin
        for response in reversed(self._holders.get(buffer, ())):
            record = self._records[response]
            if record is not origin and record.namespace == namespace:
                yield record

    def info(self, buffer: BufferId) -> BufferInfo | None:
        """What a buffer was computed from, while some record has pieces of it."""
        return self._infos.get(buffer)

    def learn(self, info: BufferInfo) -> None:
        """More is known of a buffer that some record has pieces of."""
        if info.id in self._infos:
            self._infos[info.id] = info

    def clear(self) -> None:
        self._records.clear()
        self._holders.clear()
        self._origins.clear()
        self._superseded.clear()
        self._infos.clear()
        self._tokens = 0

    def _drop(self, response: str) -> None:
        record = self._records.pop(response, None)
        if record is None:
            return
        self._tokens -= record.length
        self._superseded.discard(response)
        if self._origins.get(record.buffer) == response:
            del self._origins[record.buffer]
        for buffer in record.view.buffers():
            holders = self._holders[buffer]
            del holders[response]
            if not holders:
                del self._holders[buffer]
                self._infos.pop(buffer, None)


def _of_buffer(record: BaseRecord, buffer: BufferId) -> list[Range]:
    """Positions of a buffer that a record's view has."""
    return merge((piece.src_start, piece.src_end) for piece in record.view.pieces if piece.buffer == buffer)
