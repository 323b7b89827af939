"""What a finished edited request leaves to be stored in packs (see packs.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from leyline_lmcache.ranges import Range, merge, subtract
from leyline_lmcache.view import BufferId

from .lineage import Tokens
from .packs import BufferInfo, Pack
from .plans import RequestPlan
from .records import BaseRecord, RecordStore

Resident = Callable[[BaseRecord, int], bool]
"""Whether the first tokens of a record's path are on the GPU now."""

_MOST_HOLDERS = 8


@dataclass(frozen=True, slots=True)
class Packing:
    """A pack to be stored; ``info`` names it already. ``record``: on whose path its positions are."""

    info: BufferInfo
    pack: Pack
    record: BaseRecord

    @property
    def end(self) -> int:
        """Tokens of the record's path that are needed."""
        return self.pack[-1][1]

    @property
    def keys(self) -> Tokens:
        """Of that path."""
        return self.record.keys[: self.end]

    @property
    def tokens(self) -> int:
        return sum(end - start for start, end in self.pack)


def computed(plan: RequestPlan, known: int, page_size: int) -> Pack:
    """What a request and its fills computed, of ``known`` tokens, in whole pages."""
    holes = (
        (position, position + piece.length) for position, piece in plan.view.spans() if piece.buffer is None
    )
    runs = merge([*holes, (plan.target, known)])
    return tuple(_whole(runs, known // page_size * page_size, page_size))


def remainders(
    record: BaseRecord,
    records: RecordStore,
    chunk_size: int,
    page_size: int,
    resident: Resident,
) -> Iterator[Packing]:
    """What a record's view has of other buffers that LMCache was not given, where it can still be had."""
    wanted: dict[BufferId, list[Range]] = {}
    for piece in record.view.pieces:
        if piece.buffer is not None and piece.buffer != record.buffer:
            wanted.setdefault(piece.buffer, []).append((piece.src_start, piece.src_end))
    for buffer, ranges in wanted.items():
        info = records.info(buffer)
        if info is None:
            continue
        stored = info.stored(chunk_size)
        missing = subtract(merge(ranges), stored)
        if not missing:
            continue
        length = len(info.tokens) // page_size * page_size
        if not info.lineage:
            # All of it: another edit may keep other parts.
            missing = [(missing[0][0], length)]
        pack = tuple(subtract(merge(_whole(missing, length, page_size)), stored))
        origin = _origin(buffer, pack, record, records, resident) if pack else None
        if origin is not None:
            yield Packing(replace(info, packs=(*info.packs, pack)), pack, origin)


def _whole(ranges: list[Range], length: int, page_size: int) -> Iterator[Range]:
    """Widened to whole pages, within ``[0, length)``."""
    for start, end in ranges:
        low, high = start // page_size * page_size, min(-(-end // page_size) * page_size, length)
        if low < high:
            yield low, high


def _origin(
    buffer: BufferId, pack: Pack, record: BaseRecord, records: RecordStore, resident: Resident
) -> BaseRecord | None:
    """A record on whose path the runs still are as they were computed."""
    for tried, holder in enumerate(records.holders(buffer, record.namespace)):
        if tried == _MOST_HOLDERS:
            break
        if _has(holder, buffer, pack) and resident(holder, pack[-1][1]):
            return holder
    return None


def _has(record: BaseRecord, buffer: BufferId, pack: Pack) -> bool:
    """At their own positions, and never turned."""
    own = merge(
        (position, position + piece.length)
        for position, piece in record.view.spans()
        if piece.buffer == buffer and piece.src_start == position
    )
    return not subtract(list(pack), own) and not any(record.roundings.most(*run) for run in pack)
