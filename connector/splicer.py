"""Moves KV into the edited path: from paths in SGLang's pool, and from chunks in LMCache's L1."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np
import torch

from leyline_lmcache.kernels.layout import KVLayout
from leyline_lmcache.kernels.splice import splice_rows
from leyline_lmcache.ops import Tier
from leyline_lmcache.ranges import Range
from leyline_lmcache.reasons import Fallback, FallbackReason
from leyline_lmcache.view import View

from .lineage import key_array
from .plans import Kind, RequestPlan
from .records import BaseRecord, Namespace, RecordStore
from .settings import InPlace, Settings
from .slots import Path, Slots
from .sources import Found, Run, find_sources
from .stored import StillLoading

log = logging.getLogger(__name__)

Agree = Callable[[int], int]
"""The smallest value of all tensor-parallel ranks; all ranks call it at the same points."""


class StoredRun(Protocol):
    """``length`` tokens in a stored tier; ``source`` is their position in the buffer."""

    @property
    def start(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def source(self) -> int: ...
    @property
    def shift(self) -> int: ...
    @property
    def tier(self) -> Tier: ...


class Load(Protocol):
    """Whole chunks ``[first, last)`` to be retrieved at once for ``runs``."""

    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...
    @property
    def runs(self) -> Sequence[StoredRun]: ...


class Stored(Protocol):
    """What a stored tier holds ready for one request; see :class:`.stored.StoredChunks`."""

    @property
    def chunk_size(self) -> int: ...
    def cover(self, view: View, missing: Sequence[Range]) -> tuple[list[Any], list[Range]]: ...
    def loads(self, runs: Sequence[Any]) -> Sequence[Load]: ...
    def begin(self, load: Any, slots: torch.Tensor) -> Any: ...
    def finish(self, begun: Any, stream: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Splice:
    """What one splice did.

    Attributes:
        goal: how far the edited path reaches now.
        runs: tokens moved inside the pool, by source.
        loaded: tokens loaded from a stored tier.
        chunk_size: tokens per chunk there.
        bytes: read and written by the kernel.
        in_place: slots of the old view were taken over.
        freed: tokens of the old view given back to the pool by that.
        micros: microseconds in the scheduler, all included.
    """

    goal: int
    runs: tuple[Run, ...] = ()
    loaded: tuple[StoredRun, ...] = ()
    bytes: int = 0
    in_place: bool = False
    freed: int = 0
    micros: float = 0.0
    chunk_size: int = 1

    @property
    def tokens(self) -> int:
        return sum(run.length for run in self.runs) + sum(run.length for run in self.loaded)


@dataclass(frozen=True, slots=True)
class _Sources:
    """Where each token of ``[held, goal)`` comes from."""

    goal: int
    runs: list[Run]
    stored: list[Any]


class Pin(Protocol):
    """Paths that stay in the pool."""

    def unlock(self) -> None:
        """Let them go."""


class Splicer:
    """Splices over one pool.

    Args:
        layout: the pool's planes.
        stream: the stream the model's forwards run on; None on a CPU.
        agree: see :data:`Agree`.
        kernel: what moves and turns rows.
    """

    def __init__(
        self,
        slots: Slots,
        layout: KVLayout,
        records: RecordStore,
        settings: Settings,
        *,
        stream: Any = None,
        agree: Agree = int,
        kernel: Literal["torch", "triton"] = "torch",
    ) -> None:
        self._slots = slots
        self._layout = layout
        self._records = records
        self._settings = settings
        self._stream = stream
        self._agree = agree
        self._kernel = kernel

    def match(self, keys: array[int], namespace: Namespace) -> Path:
        """What the tree holds of a key."""
        return self._slots.match(keys, namespace)

    def missing(self, view: View, start: int, end: int, record: BaseRecord) -> list[Range]:
        """View ranges of ``[start, end)`` that no path in the pool has; ``record``: the base."""
        with _Paths(self._slots, record.namespace) as paths:
            return self._find(view, start, end, record, paths).missing

    def pin(self, view: View, start: int, end: int, record: BaseRecord) -> tuple[list[Range], Pin]:
        """As :meth:`missing`; what there is cannot be evicted until the pin is released."""
        paths = _Paths(self._slots, record.namespace)
        try:
            found = self._find(view, start, end, record, paths)
            paths.keep({id(run.record) for run in found.runs})
        except BaseException:
            paths.unlock()
            raise
        return found.missing, paths

    def splice(
        self, plan: RequestPlan, keys: array[int], held: Path, goal: int, stored: Stored | None = None
    ) -> Splice:
        """Make view positions ``[held.length, goal)`` resident under ``keys``.

        KV that is missing at the view's end shortens what is kept; anywhere else the plan is refused.

        Raises:
            Fallback: ``source_missing``, ``drift_limit``, ``no_memory``, ``tier_error``; nothing was changed.
        """
        started = time.perf_counter()
        namespace = plan.record.namespace
        with ExitStack() as locks:
            locks.enter_context(self._slots.locked(held))
            paths = locks.enter_context(_Paths(self._slots, namespace))
            sources = self._sources(plan, held.length, goal, paths, stored)
            count = sources.goal - held.length
            if count == 0:
                return Splice(sources.goal)
            target, freed = self._take_over(plan, sources, count, paths)
            in_place = target is not None
            if target is None:
                target = self._slots.allocate(count)
            staging: list[torch.Tensor] = []
            try:
                source = self._gather(sources, held.length, target, in_place, paths, stored, staging)
                moved = self._move(source, target, sources, held.length)
                before = self._slots.indices(held, namespace)
            except StillLoading:
                log.warning("%d slots are withheld: a load into them was given up", len(target))
                raise
            except BaseException:
                self._free(target, *staging)
                raise
            # Whoever gets these slots next writes them behind the kernel, on the same stream.
            self._free(*staging)
            self._slots.insert(keys[: sources.goal], namespace, torch.cat([before, target]), held.length)
        roundings = plan.lineage.roundings
        for run in sources.runs:
            roundings.write(run.start, run.start + run.length, run.roundings)
        for load in sources.stored:
            roundings.write(load.start, load.start + load.length, int(load.shift != 0))
        micros = (time.perf_counter() - started) * 1e6
        return Splice(
            sources.goal,
            tuple(sources.runs),
            tuple(sources.stored),
            moved,
            in_place,
            freed,
            micros,
            stored.chunk_size if stored is not None else 1,
        )

    def _free(self, *slots: torch.Tensor) -> None:
        for each in slots:
            self._slots.free(each)

    # ------------------------------------------------------------------ sources

    def _find(self, view: View, start: int, end: int, record: BaseRecord, paths: _Paths) -> Found:
        limit = self._settings.drift_limit
        return find_sources(view, start, end, record, self._records, paths.resident, limit)

    def _sources(
        self, plan: RequestPlan, start: int, goal: int, paths: _Paths, stored: Stored | None
    ) -> _Sources:
        """Sources, as far as every rank has them: ranks splice alike or not at all."""
        found = self._find(plan.view, start, goal, plan.record, paths)
        missing = found.missing
        loads: list[Any] = []
        if stored is not None and missing:
            loads, missing = stored.cover(plan.view, missing)
        why: Fallback | None = None
        reach = 0
        try:
            reach = self._reach(plan, start, goal, missing, found.drifted)
        except Fallback as lacking:
            why = lacking
        agreed = self._agree(reach)
        if not agreed:
            raise why or Fallback(
                FallbackReason.SOURCE_MISSING, "another tensor-parallel rank lacks the source"
            )
        return _Sources(agreed, _clipped(found.runs, agreed), _clipped(loads, agreed))

    def _reach(self, plan: RequestPlan, start: int, goal: int, missing: list[Range], drifted: bool) -> int:
        """How far the view can be made resident. Raises ``Fallback`` when that is not worth it."""
        if not missing:
            return goal
        page = self._slots.page_size
        reach = max(start, missing[0][0] // page * page)
        lost = sum(end - begin for begin, end in missing)
        enough = plan.kind is Kind.MAIN and reach >= max((end for _, end in plan.fills), default=0)
        if enough and plan.kept(min(plan.exact, reach), reach) >= self._settings.min_reuse:
            return reach
        if drifted:
            raise Fallback(
                FallbackReason.DRIFT_LIMIT,
                f"{lost} tokens were rotated {self._settings.drift_limit} times and have no first copy left",
            )
        raise Fallback(
            FallbackReason.SOURCE_MISSING,
            f"{lost} of {goal - start} tokens from position {missing[0][0]} on are no longer in the cache",
        )

    # ------------------------------------------------------------------ slots

    def _take_over(
        self, plan: RequestPlan, sources: _Sources, count: int, paths: _Paths
    ) -> tuple[torch.Tensor | None, int]:
        """The old view's slots, if that is wished for and nothing else uses them; and how many were freed."""
        wish = self._settings.inplace
        wanted = wish is InPlace.ALWAYS or (wish is InPlace.AUTO and self._slots.available() < count)
        if not wanted or not self._can_take(plan, sources, count):
            return None, 0
        runs = sources.runs
        cut = plan.first_change // self._slots.page_size * self._slots.page_size
        with paths.released(plan.record) as keys:
            taken = self._slots.take_tail(
                keys, plan.record.namespace, cut, runs[0].source, runs[-1].source + runs[-1].length
            )
        return (taken.kept, taken.freed) if taken is not None else (None, 0)

    def _can_take(self, plan: RequestPlan, sources: _Sources, count: int) -> bool:
        """Only the last part of the base's own path, and only in one run of whole pages."""
        page, runs = self._slots.page_size, sources.runs
        return (
            plan.kind is Kind.MAIN
            and plan.edits > 0
            and not sources.stored
            and all(run.record is plan.record for run in runs)
            and all(a.source + a.length == b.source for a, b in pairwise(runs))
            and min(runs[0].start, runs[0].source) >= plan.first_change
            and runs[0].source % page == 0
            and count % page == 0
        )

    def _gather(
        self,
        sources: _Sources,
        start: int,
        target: torch.Tensor,
        in_place: bool,
        paths: _Paths,
        stored: Stored | None,
        staging: list[torch.Tensor],
    ) -> torch.Tensor:
        """Slots to read for each slot of ``target``; loads what comes from a stored tier on the way."""
        if in_place:
            return target
        source = target.clone()
        for run in sources.runs:
            slots = paths.slots(run.record)[run.source :][: run.length]
            source[run.start - start :][: run.length] = slots
        if stored is None or not sources.stored:
            return source
        begun: list[Any] = []
        why: Fallback | None = None
        try:
            self._begin_loads(stored, sources, start, target, source, staging, begun)
        except Fallback as failed:
            why = failed
        for each in begun:
            # All of them: nobody may get slots that are still written.
            try:
                stored.finish(each, self._stream)
            except StillLoading as failed:
                why = failed
            except Fallback as failed:
                why = why or failed
        if not self._agree(int(why is None)):
            raise why or Fallback(FallbackReason.TIER_ERROR, "another tensor-parallel rank could not load")
        return source

    def _begin_loads(
        self,
        stored: Stored,
        sources: _Sources,
        start: int,
        target: torch.Tensor,
        source: torch.Tensor,
        staging: list[torch.Tensor],
        begun: list[Any],
    ) -> None:
        """Submit all loads; ``source``, ``staging`` and ``begun`` are written."""
        for load in stored.loads(sources.stored):
            first = load.first * stored.chunk_size
            count = load.last * stored.chunk_size - first
            if self._slots.page_size == 1:
                # Straight to where they belong; what else the chunks hold goes to the pool's sink.
                chunks = torch.zeros(count, dtype=torch.int64, device=target.device)
                for part in load.runs:
                    where = target[part.start - start :][: part.length]
                    chunks[part.source - first :][: part.length] = where
            else:
                chunks = self._slots.allocate(count)
                staging.append(chunks)
                for part in load.runs:
                    where = chunks[part.source - first :][: part.length]
                    source[part.start - start :][: part.length] = where
            begun.append(stored.begin(load, chunks))

    def _move(self, source: torch.Tensor, target: torch.Tensor, sources: _Sources, start: int) -> int:
        """Run the kernel behind every forward already queued; returns the bytes it moved."""
        shifts = np.zeros(len(target), dtype=np.int32)
        for run in [*sources.runs, *sources.stored]:
            shifts[run.start - start :][: run.length] = run.shift
        turns = torch.from_numpy(shifts)
        if self._layout.device.type != "cuda":
            return splice_rows(self._layout, source, target, turns, backend=self._kernel).bytes_moved
        current = torch.cuda.current_stream()
        stream = self._stream or current
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # The slots come from the tree; checking them again would wait for the device.
            stats = splice_rows(self._layout, source, target, turns, backend=self._kernel, validate=False)
        for tensor in (source, target):
            tensor.record_stream(stream)
        return stats.bytes_moved


def _clipped(runs: Sequence[Any], end: int) -> list[Any]:
    """The part of runs before ``end``."""
    return [
        run if run.start + run.length <= end else replace(run, length=end - run.start)
        for run in runs
        if run.start < end
    ]


class _Paths:
    """The records' paths looked at during one splice: walked once, and locked until it ends."""

    def __init__(self, slots: Slots, namespace: Namespace) -> None:
        self._of = slots
        self._namespace = namespace
        self._walked: dict[int, tuple[Path, array[int]]] = {}
        self._indices: dict[int, torch.Tensor] = {}
        self._locks: dict[int, Any] = {}
        self._records: dict[int, BaseRecord] = {}

    def __enter__(self) -> _Paths:
        return self

    def __exit__(self, *_: object) -> None:
        self.unlock()

    def keep(self, records: set[int]) -> None:
        """Let all paths go but those of some records, by ``id``."""
        for record in self._locks.keys() - records:
            self._of.unlock(self._locks.pop(record))

    def unlock(self) -> None:
        """Let all paths go."""
        while self._locks:
            self._of.unlock(self._locks.popitem()[1])

    def resident(self, record: BaseRecord) -> int:
        """Tokens of the record's path that the tree holds, counted from its start."""
        return self._walk(record)[0].length

    def slots(self, record: BaseRecord) -> torch.Tensor:
        """Slots of the record's path, int64 ``[resident]``."""
        if id(record) not in self._indices:
            self._indices[id(record)] = self._of.indices(self._walk(record)[0], self._namespace)
        return self._indices[id(record)]

    @contextmanager
    def released(self, record: BaseRecord) -> Iterator[array[int]]:
        """Without our locks for a while; gives the record's keys.

        All of them: the path of another record may lead over this one's. Walked anew afterwards, as paths may
        have been taken or split.
        """
        keys = self._walk(record)[1]
        self.unlock()
        try:
            yield keys
        finally:
            self._walked.clear()
            self._indices.clear()
            for each in list(self._records.values()):
                self._walk(each)

    def _walk(self, record: BaseRecord) -> tuple[Path, array[int]]:
        found = self._walked.get(id(record))
        if found is None:
            keys = key_array(record.keys[: record.length // self._of.page_size * self._of.page_size])
            found = self._walked[id(record)] = (self._of.match(keys, self._namespace), keys)
            self._locks[id(record)] = self._of.lock(found[0])
            self._records[id(record)] = record
        return found
