"""What a base's view looks like, and in which tiers its KV lies: the answer to ``leyline view``.

Asked by a request that carries a ``leyline.view`` action, under the tenant's own ``cache_salt``: a stranger's
base is as unknown as for an edit (I7). Nothing is moved, and no token ids are told (I10).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, Protocol

from leyline_lmcache.ops import Tier
from leyline_lmcache.ranges import Range, merge
from leyline_lmcache.reasons import Fallback, FallbackReason
from leyline_lmcache.view import BufferId, Piece

from . import wire
from .packs import BufferInfo, Shelf, chunks_of
from .ranks import Call
from .records import BaseRecord, namespace_of
from .stored import StoredTier, digest

log = logging.getLogger(__name__)

Infos = Callable[[BufferId], BufferInfo | None]


class Kind(StrEnum):
    """How a stretch of a view came to its KV, seen from the request that left the view."""

    KEPT = "kept"
    """Computed earlier, at the same position."""
    MOVED = "moved"
    """Computed earlier, at another position; its keys are turned."""
    FILLED = "filled"
    """Computed in the middle, for a replacement."""
    COMPUTED = "computed"
    """Computed at the end: the request's own turn."""
    GONE = "gone"
    """Not in the view any more; what stood here in the text it was computed from."""


Residence = Mapping[Tier, Sequence[Range]]
"""View ranges by tier. A tier that could not be asked is missing."""


def describe(record: BaseRecord, infos: Infos, residence: Residence) -> dict[str, Any]:
    """The view as plain data: ``length``, ``tiers`` that were asked, and ``stretches`` in order.

    A stretch has ``kind``, ``start`` and ``length`` in the view (0 long where tokens are gone: ``gone`` says
    how many), ``shift``, the first letters of its ``buffer``, and the ``tiers`` that hold all of it.
    """
    asked = list(residence)
    bounds = {edge for ranges in residence.values() for span in ranges for edge in span}
    stretches: list[dict[str, Any]] = []
    gone = _gone(record, infos)
    for index, (position, piece) in enumerate(record.view.spans()):
        if index in gone:
            stretches.append({"kind": Kind.GONE.value, "start": position, "length": 0, "gone": gone[index]})
        kind = _kind(record, index, position, piece)
        end = position + piece.length
        edges = [position, *sorted(edge for edge in bounds if position < edge < end), end]
        for low, high in pairwise(edges):
            held = [tier.value for tier in asked if any(a <= low and high <= b for a, b in residence[tier])]
            stretches.append(
                {
                    "kind": kind.value,
                    "start": low,
                    "length": high - low,
                    "shift": position - piece.src_start if piece.buffer is not None else 0,
                    "buffer": (piece.buffer or "")[:12],
                    "tiers": held,
                }
            )
    return {
        "response": record.response,
        "length": record.length,
        "tiers": [tier.value for tier in asked],
        "stretches": stretches,
    }


def _kind(record: BaseRecord, index: int, position: int, piece: Piece) -> Kind:
    if piece.buffer == record.buffer:
        return Kind.COMPUTED if index == len(record.view.pieces) - 1 else Kind.FILLED
    return Kind.KEPT if position == piece.src_start else Kind.MOVED


def _gone(record: BaseRecord, infos: Infos) -> dict[int, int]:
    """Tokens that were taken out right before a piece, by the piece's index, as far as the view tells.

    It does when the text was computed as one: from a sequence without edits, or between two parts of one
    buffer with nothing but this request's own tokens in between.
    """
    out: dict[int, int] = {}
    last: dict[BufferId, tuple[int, Piece]] = {}
    pieces = record.view.pieces
    for index, piece in enumerate(pieces):
        if piece.buffer is None:
            continue
        before = last.get(piece.buffer)
        info = infos(piece.buffer)
        exact = info is not None and not info.lineage
        if before is not None:
            at, earlier = before
            between = pieces[at + 1 : index]
            known = all(each.buffer == record.buffer for each in between) or (
                exact and all(_edited(each, infos) for each in between)
            )
            if known and piece.buffer != record.buffer and piece.src_start > earlier.src_end:
                out[index] = piece.src_start - earlier.src_end
        elif exact and piece.src_start and not any(_exact(each, infos) for each in pieces[:index]):
            out[index] = piece.src_start
        last[piece.buffer] = (index, piece)
    return out


def _exact(piece: Piece, infos: Infos) -> bool:
    info = infos(piece.buffer) if piece.buffer is not None else None
    return info is not None and not info.lineage


def _edited(piece: Piece, infos: Infos) -> bool:
    return not _exact(piece, infos)


# ---------------------------------------------------------------------- asking the stored tiers


def covered(
    record: BaseRecord, shelves: Sequence[Shelf], chunks: Sequence[Sequence[int]], chunk_size: int
) -> list[Range]:
    """View ranges whose tokens lie in the given chunks of the given shelves."""
    out: list[Range] = []
    for shelf, indexes in zip(shelves, chunks, strict=True):
        held = merge((i * chunk_size, (i + 1) * chunk_size) for i in indexes)
        for position, piece in record.view.spans():
            if piece.buffer != shelf.info.id:
                continue
            for place in shelf.places(piece.src_start, piece.src_end):
                start = position + place.origin - piece.src_start - place.offset
                for low, high in held:
                    low, high = max(low, place.offset), min(high, place.offset + place.length)
                    if low < high:
                        out.append((start + low, start + high))
    return merge(out)


class Host(Protocol):
    """Who asks, and is told what was found; see :class:`.gpu_tier.GpuTier`."""

    def record_from(self, req: Any, answer: wire.Resolved) -> BaseRecord:
        """Remember a base that is known elsewhere. Raises ``Fallback``."""

    def info_of(self, buffer: BufferId) -> BufferInfo | None:
        """What a buffer was computed from."""

    def sighted(self, req: Any, record: BaseRecord, stored: Mapping[Tier, Sequence[Range]]) -> None:
        """Where a view's KV lies in the stored tiers; a tier that could not be asked is missing."""

    def unseen(self, req: Any, why: Fallback) -> None:
        """There is no such view."""


@dataclass(slots=True)
class _Sighting:
    """One request that asks for a view: know the base, then ask where its chunks are."""

    req: Any
    record: BaseRecord | None
    deadline: float
    call: Call | None = None
    shelves: list[Shelf] = field(default_factory=list)


class Sightings:
    """Requests that ask for a view, by id. The scheduler submits and polls, as for loads."""

    def __init__(self, tier: StoredTier, host: Host) -> None:
        self._tier = tier
        self._host = host
        self._wanted: dict[str, tuple[Any, str, BaseRecord | None]] = {}
        self._running: dict[str, _Sighting] = {}

    def __bool__(self) -> bool:
        return bool(self._running)

    def want(self, req: Any, base: str, record: BaseRecord | None) -> None:
        """``record``: of the base, if it is known here."""
        self._wanted[req.rid] = (req, base, record)

    def begin(self, rid: str) -> bool:
        """Start what was wanted; whether it runs now."""
        wanted = self._wanted.pop(rid, None)
        if wanted is None:
            return False
        req, base, record = wanted
        sighting = _Sighting(req, record, time.monotonic() + self._tier.timeout_s)
        try:
            if record is None:
                namespace = digest(namespace_of(req))
                message = wire.Resolve(response=base, namespace=namespace, model=self._tier.model)
                sighting.call = self._tier.call(wire.RESOLVE, message)
            else:
                self._locate(sighting, record)
        except Exception as error:
            self._end(sighting, error)
            return False
        self._running[rid] = sighting
        return True

    def poll(self, rid: str) -> bool | None:
        """True when it is over (told once), False while it runs, None when there is none."""
        sighting = self._running.get(rid)
        if sighting is None:
            return None
        try:
            if not self._advance(sighting):
                return False
        except Exception as error:
            self._end(sighting, error)
        self._running.pop(rid, None)
        return True

    def cancel(self, rid: str) -> None:
        self._wanted.pop(rid, None)
        self._running.pop(rid, None)

    def cancel_all(self) -> None:
        self._wanted.clear()
        self._running.clear()

    def _advance(self, sighting: _Sighting) -> bool:
        assert sighting.call is not None
        if not sighting.call.ready(sighting.deadline):
            return False
        if sighting.record is None:
            answer = sighting.call.answer(wire.Resolved)
            sighting.record = self._host.record_from(sighting.req, answer)
            self._locate(sighting, sighting.record)
            return False
        located = sighting.call.answer(wire.Located)
        size = self._tier.chunk_size
        found = {Tier.CPU: covered(sighting.record, sighting.shelves, located.cpu, size)}
        if located.redis is not None:
            found[Tier.REDIS] = covered(sighting.record, sighting.shelves, located.redis, size)
        self._host.sighted(sighting.req, sighting.record, found)
        return True

    def _locate(self, sighting: _Sighting, record: BaseRecord) -> None:
        size = self._tier.chunk_size
        parts = chunks_of(record.view, [(0, record.length)], self._host.info_of, size)
        sighting.shelves = [shelf for shelf, _ in parts]
        sighting.call = self._tier.locate(record.namespace, parts)

    def _end(self, sighting: _Sighting, error: Exception) -> None:
        """Without a record there is nothing to show; without the stored tiers, what the GPU has."""
        if isinstance(error, Fallback):
            self._host.unseen(sighting.req, error)
        elif sighting.record is None:
            why = "did not answer in time" if isinstance(error, TimeoutError) else str(error)
            self._host.unseen(sighting.req, Fallback(FallbackReason.TIER_ERROR, f"lmcache server: {why}"))
        else:
            log.warning("the stored tiers could not be asked for a view: %s", type(error).__name__)
            self._host.sighted(sighting.req, sighting.record, {})
