"""Moves KV inside SGLang's pool: from the paths that hold it to the edited one (DESIGN §6, *Splice*)."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from leyline_lmcache.kernels.layout import KVLayout
from leyline_lmcache.kernels.splice import splice_rows
from leyline_lmcache.reasons import Fallback, FallbackReason

from .lineage import key_array
from .plans import Kind, RequestPlan
from .records import BaseRecord, Namespace, RecordStore
from .settings import InPlace, Settings
from .slots import Path, Slots
from .sources import Run, find_sources

Agree = Callable[[bool], bool]
"""Tells whether every tensor-parallel rank says yes; all ranks call it at the same points."""


@dataclass(frozen=True, slots=True)
class Splice:
    """What one splice did.

    Attributes:
        runs: tokens moved, by source.
        bytes: read and written by the kernel.
        in_place: slots of the old view were taken over.
        freed: tokens of the old view given back to the pool by that.
        micros: microseconds in the scheduler, all included.
    """

    runs: tuple[Run, ...]
    bytes: int
    in_place: bool
    freed: int
    micros: float

    @property
    def tokens(self) -> int:
        return sum(run.length for run in self.runs)


class Splicer:
    """Splices over one pool.

    Args:
        layout: the pool's planes.
        stream: the stream the model's forwards run on; None on a CPU.
        agree: see :data:`Agree`.
    """

    def __init__(
        self,
        slots: Slots,
        layout: KVLayout,
        records: RecordStore,
        settings: Settings,
        *,
        stream: Any = None,
        agree: Agree = bool,
    ) -> None:
        self._slots = slots
        self._layout = layout
        self._records = records
        self._settings = settings
        self._stream = stream
        self._agree = agree

    def splice(self, plan: RequestPlan, keys: array[int], held: Path, goal: int) -> Splice:
        """Make view positions ``[held.length, goal)`` resident under ``keys``.

        Raises:
            Fallback: ``source_missing``, ``drift_limit`` or ``no_memory``; nothing was changed then.
        """
        started = time.perf_counter()
        namespace = plan.record.namespace
        count = goal - held.length
        freed = 0
        with ExitStack() as locks:
            locks.enter_context(self._slots.locked(held))
            paths = locks.enter_context(_Paths(self._slots, namespace))
            runs = self._sources(plan, held.length, goal, paths)
            target = None
            if self._wants_takeover(count) and self._can_take(plan, runs, goal, count):
                source_end = runs[-1].source + runs[-1].length
                cut = plan.first_change // self._slots.page_size * self._slots.page_size
                with paths.released(plan.record) as record_keys:
                    taken = self._slots.take_tail(record_keys, namespace, cut, runs[0].source, source_end)
                if taken is not None:
                    target, freed = taken.kept, taken.freed
            in_place = target is not None
            if target is None:
                source = torch.cat([paths.slots(run.record)[run.source :][: run.length] for run in runs])
                target = self._slots.allocate(count)
            else:
                source = target
            try:
                moved = self._move(source, target, runs)
                before = self._slots.indices(held, namespace)
            except BaseException:
                self._slots.free(target)
                raise
            self._slots.insert(keys[:goal], namespace, torch.cat([before, target]), held.length)
        for run in runs:
            plan.lineage.roundings.write(run.start, run.start + run.length, run.roundings)
        return Splice(tuple(runs), moved, in_place, freed, (time.perf_counter() - started) * 1e6)

    def _sources(self, plan: RequestPlan, start: int, end: int, paths: _Paths) -> list[Run]:
        """Sources, if every rank has them: ranks splice alike or not at all."""
        why: Fallback | None = None
        runs: list[Run] = []
        try:
            runs = find_sources(
                plan.view, start, end, plan.record, self._records, paths.resident, self._settings.drift_limit
            )
        except Fallback as missing:
            why = missing
        if not self._agree(why is None) and why is None:
            why = Fallback(FallbackReason.SOURCE_MISSING, "another tensor-parallel rank lacks the source")
        if why is not None:
            raise why
        return runs

    def _wants_takeover(self, count: int) -> bool:
        wish = self._settings.inplace
        return wish is InPlace.ALWAYS or (wish is InPlace.AUTO and self._slots.available() < count)

    def _can_take(self, plan: RequestPlan, runs: list[Run], goal: int, count: int) -> bool:
        """Only the last part of the base's own path can be taken over, and only in one run of whole pages."""
        page = self._slots.page_size
        return (
            plan.kind is Kind.MAIN
            and plan.edits > 0
            and goal == plan.target
            and all(run.record is plan.record for run in runs)
            and all(a.source + a.length == b.source for a, b in pairwise(runs))
            and min(runs[0].start, runs[0].source) >= plan.first_change
            and runs[0].source % page == 0
            and count % page == 0
        )

    def _move(self, source: torch.Tensor, target: torch.Tensor, runs: list[Run]) -> int:
        """Run the kernel behind every forward already queued; returns the bytes it moved."""
        lengths = np.array([run.length for run in runs])
        shifts = torch.from_numpy(np.repeat(np.array([run.shift for run in runs], dtype=np.int32), lengths))
        if self._layout.device.type != "cuda":
            return splice_rows(self._layout, source, target, shifts).bytes_moved
        current = torch.cuda.current_stream()
        stream = self._stream or current
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # The slots come from the tree; checking them again would wait for the device.
            moved = splice_rows(self._layout, source, target, shifts, validate=False).bytes_moved
        for tensor in (source, target):
            tensor.record_stream(stream)
        return moved


class _Paths:
    """The records' paths looked at during one splice: walked once, and locked until it ends."""

    def __init__(self, slots: Slots, namespace: Namespace) -> None:
        self._of = slots
        self._namespace = namespace
        self._walked: dict[int, tuple[Path, array[int]]] = {}
        self._indices: dict[int, torch.Tensor] = {}
        self._locks: dict[int, Any] = {}

    def __enter__(self) -> _Paths:
        return self

    def __exit__(self, *_: object) -> None:
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

    def released(self, record: BaseRecord) -> _Released:
        """Without our lock on the path for a while; gives the path's keys."""
        return _Released(self, record)

    def _walk(self, record: BaseRecord) -> tuple[Path, array[int]]:
        found = self._walked.get(id(record))
        if found is None:
            keys = key_array(record.keys[: record.length // self._of.page_size * self._of.page_size])
            found = self._walked[id(record)] = (self._of.match(keys, self._namespace), keys)
            self._locks[id(record)] = self._of.lock(found[0])
        return found


class _Released:
    """See :meth:`_Paths.released`. The path is walked anew afterwards: it may have been taken or split."""

    def __init__(self, paths: _Paths, record: BaseRecord) -> None:
        self._paths = paths
        self._record = record

    def __enter__(self) -> array[int]:
        keys = self._paths._walk(self._record)[1]
        self._paths._of.unlock(self._paths._locks.pop(id(self._record)))
        return keys

    def __exit__(self, *_: object) -> None:
        self._paths._walked.pop(id(self._record))
        self._paths._indices.pop(id(self._record), None)
        self._paths._walk(self._record)
