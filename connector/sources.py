"""Where the KV that a view needs lies now.

A piece's KV may be on several paths of the tree: where it was first computed, and on every edited path it
was moved to since. The path with the fewest roundings wins, so that many edits cost one rotation as long
as the first copy lives (I4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from leyline_lmcache.ranges import Range, merge, subtract
from leyline_lmcache.view import Piece, View

from .records import BaseRecord, RecordStore

_MOST_HOLDERS = 8
"""Other paths looked at per piece; each costs a walk of the tree."""


@dataclass(frozen=True, slots=True)
class Run:
    """``length`` tokens that move from one path to the edited one.

    Attributes:
        start: view position of the first.
        record: whose path holds them.
        source: position on that path.
        roundings: their keys will have had afterwards.
    """

    start: int
    length: int
    record: BaseRecord
    source: int
    roundings: int

    @property
    def shift(self) -> int:
        """Positions by which the keys turn."""
        return self.start - self.source


Resident = Callable[[BaseRecord], int]
"""Tokens of a record's path, from its start, that the tier holds now."""


@dataclass(frozen=True, slots=True)
class Found:
    """``runs``: in view order. ``missing``: view ranges on no path that may be used. ``drifted``: some of
    those are only on paths that were rotated too often."""

    runs: list[Run]
    missing: list[Range]
    drifted: bool


def find_sources(
    view: View,
    start: int,
    end: int,
    record: BaseRecord,
    store: RecordStore,
    resident: Resident,
    drift_limit: int,
) -> Found:
    """Sources on the GPU for the tokens of ``[start, end)``. Holes are missing like anything else."""
    runs: list[Run] = []
    missing: list[Range] = []
    drifted = False
    for position, piece in view.between(start, end):
        pending: list[Range] = [(position, position + piece.length)]
        for candidate in _candidates(position, piece, record, store) if piece.buffer is not None else ():
            if candidate.roundings > drift_limit:
                drifted = True
                continue
            held = min(candidate.length, resident(candidate.record) - candidate.source)
            if held <= 0:
                continue
            left = subtract(pending, [(candidate.start, candidate.start + held)])
            for a, b in subtract(pending, left):
                source = candidate.source + a - candidate.start
                runs.append(Run(a, b - a, candidate.record, source, candidate.roundings))
            pending = left
            if not pending:
                break
        missing += pending
    runs.sort(key=lambda run: run.start)
    return Found(runs, merge(missing), drifted and bool(missing))


def _candidates(position: int, piece: Piece, record: BaseRecord, store: RecordStore) -> Iterator[Run]:
    own = list(_on_path(position, piece, record))
    # The base's own path serves unless a first copy elsewhere would save roundings.
    if all(run.roundings <= 1 for run in own):
        yield from own
        own = []
    assert piece.buffer is not None
    others = (held for held in store.holders(piece.buffer, record.namespace) if held is not record)
    found = [run for held in islice(others, _MOST_HOLDERS) for run in _on_path(position, piece, held)]
    yield from sorted(own + found, key=lambda run: run.roundings)


def _on_path(position: int, piece: Piece, record: BaseRecord) -> Iterator[Run]:
    for held_at, held in record.view.spans():
        if held.buffer != piece.buffer:
            continue
        low, high = max(held.src_start, piece.src_start), min(held.src_end, piece.src_end)
        if low >= high:
            continue
        start, source = position + low - piece.src_start, held_at + low - held.src_start
        turned = record.roundings.most(source, source + high - low)
        yield Run(start, high - low, record, source, turned + (start != source))
