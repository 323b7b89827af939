"""The GPU tier: plans edited requests, splices their KV in SGLang's pool, remembers what they leave behind.

Runs in SGLang's scheduler process, on its one thread. Nothing here raises into the scheduler except through
:meth:`GpuTier.drop`'s callers, which turn every fault into the exact path (I3).
"""

from __future__ import annotations

import logging
import time
from array import array
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from leyline_lmcache.kernels.splice import splice_rows
from leyline_lmcache.reasons import Fallback, FallbackReason
from leyline_lmcache.view import View, buffer_id

from . import hints
from .lineage import Lineage, LineageTable, Roundings, Tokens, as_tokens
from .plans import Kind, RequestPlan, plan_request
from .records import BaseRecord, Namespace, RecordStore
from .report import EditReport, Outcome, Reporter
from .runtime import Runtime
from .settings import InPlace, Settings
from .slots import Path, Slots
from .sources import Run, find_sources

log = logging.getLogger(__name__)

_STATE = "_leyline"
"""Attribute of an SGLang ``Req`` that holds its :class:`_State`."""


@dataclass(slots=True)
class _State:
    """What was decided for one request. ``plan`` is None once it is served on the exact path."""

    plan: RequestPlan | None
    report: EditReport | None
    admitted: float = 0.0


@dataclass(frozen=True, slots=True)
class _Moved:
    """One splice: ``tokens`` moved, ``bytes`` read and written, whether slots were taken over."""

    tokens: int
    bytes: int
    in_place: bool
    freed: int
    micros: float


class GpuTier:
    """Edits over one radix cache.

    Args:
        cache: the ``UnifiedRadixCache`` whose overrides call this.
        runtime: what can be spliced.
        forward_stream: stream the model runs on; the kernel runs there, behind every forward already queued.
    """

    def __init__(
        self, cache: Any, runtime: Runtime, settings: Settings, reporter: Reporter, forward_stream: Any = None
    ) -> None:
        self._cache = cache
        self._runtime = runtime
        self._settings = settings
        self._reporter = reporter
        self._forward_stream = forward_stream
        self._slots = Slots(cache)
        self._records = RecordStore(settings.max_records, settings.max_record_tokens)
        self._lineages = LineageTable(settings.max_lineages)
        self._planned: dict[str, None] = {}

    # ------------------------------------------------------------------ planning

    def plan_of(self, req: Any) -> RequestPlan | None:
        """The plan of a request, made on first sight; None: the exact path. Never raises."""
        state = getattr(req, _STATE, None)
        if state is None:
            state = self._decide(req)
            setattr(req, _STATE, state)
        plan: RequestPlan | None = state.plan
        return plan

    def is_planned(self, rid: str) -> bool:
        """Whether the request of this id is served from edited KV, so that no exact lookup may shadow it."""
        return rid in self._planned

    def drop(self, req: Any, why: Fallback) -> None:
        """Give a request's plan up: from here on it is served by prefilling."""
        state: _State = getattr(req, _STATE)
        state.plan = None
        self._planned.pop(req.rid, None)
        self._refuse(req, state, why)

    def forget_request(self, rid: str) -> None:
        """The request ended, one way or another."""
        self._planned.pop(rid, None)

    def _decide(self, req: Any) -> _State:
        raw = None
        state = _State(None, None)
        try:
            raw = hints.raw_envelope(req.kv_hints, req.sampling_params)
            if raw is None:
                return state
            fill = hints.fill_span(raw)
            # Fills are part of another request's edit and are reported with it.
            state.report = EditReport() if fill is None else None
            envelope = hints.decode(raw)
            directives = envelope.directives + envelope.forgets
            if not directives:
                state.report = None
                return state
            if self._runtime.refusal is not None:
                raise self._runtime.refusal
            self._check_request(req)
            namespace = namespace_of(req)
            record = self._records.get(directives[0].base, namespace)
            if record is None:
                raise Fallback(
                    FallbackReason.UNKNOWN_BASE, "base: no finished response of this id is remembered here"
                )
            state.plan = plan_request(
                record,
                directives,
                as_tokens(req.origin_input_ids),
                self._lineages,
                page_size=self._slots.page_size,
                min_reuse=self._settings.min_reuse,
                fill=fill,
            )
        except Fallback as why:
            self._refuse(req, state, why)
        except Exception as error:
            log.exception("planning request %s failed", req.rid)
            self._refuse(req, state, _internal(error))
        if state.plan is not None:
            self._planned[req.rid] = None
        elif state.report is not None and state.report.outcome is None:
            self._reporter.finish(req.rid, state.report.exact())
        if state.report is not None:
            attach(req, state.report)
        return state

    def _check_request(self, req: Any) -> None:
        if req.multimodal_inputs is not None:
            raise Fallback(FallbackReason.UNSUPPORTED_RUNTIME, "the request has images, audio or video")
        if req.session is not None and getattr(req.session, "streaming", False):
            raise Fallback(FallbackReason.UNSUPPORTED_RUNTIME, "streaming sessions keep their own KV row")
        if req.positional_embed_overrides is not None:
            raise Fallback(FallbackReason.UNSUPPORTED_RUNTIME, "the request overrides embeddings")

    def _refuse(self, req: Any, state: _State, why: Fallback) -> None:
        if state.report is None:
            log.debug("fill %s is not spliced: %s", req.rid, why)
            return
        self._reporter.finish(req.rid, state.report.refused(why))
        attach(req, state.report)

    # ------------------------------------------------------------------ splicing

    def reach(self, req: Any, plan: RequestPlan, keys: array[int], held: Path, limit: int) -> bool:
        """Splice what the tree lacks before the request may be prefilled.

        Args:
            keys: the request's tagged keys, ``[n]``.
            held: what the tree holds of them.
            limit: tokens the engine will accept as a prefix.

        Returns:
            Whether the tree changed, so that the caller matches again.

        Raises:
            Fallback: the plan has to be dropped; nothing was changed.
        """
        page = self._slots.page_size
        goal = min(plan.goal, limit // page * page)
        if plan.kind is Kind.MAIN and goal + page < plan.goal:
            raise Fallback(
                FallbackReason.UNSUPPORTED_RUNTIME,
                f"the engine accepts only {limit} tokens of prefix (logprob_start_len?), the edit keeps {plan.goal}",
            )
        if goal < plan.goal:
            # The engine computes at least one token of a prompt itself.
            plan.view, plan.goal = plan.view.truncate(goal), goal
        moved: _Moved | None = None
        if held.length < goal:
            moved = self._splice(req, plan, keys, held, goal)
        state: _State = getattr(req, _STATE)
        state.admitted = time.perf_counter()
        if state.report is not None:
            self._account(req, plan, state.report, moved)
        return moved is not None

    def _splice(self, req: Any, plan: RequestPlan, keys: array[int], held: Path, goal: int) -> _Moved:
        started = time.perf_counter()
        namespace = plan.record.namespace
        layout = self._runtime.layout
        assert layout is not None
        with ExitStack() as locks:
            locks.enter_context(self._slots.locked(held))
            found = _Found(self._slots, namespace, locks)
            runs = self._agreed(
                lambda: find_sources(
                    plan.view,
                    held.length,
                    goal,
                    plan.record,
                    self._records,
                    found.resident,
                    self._settings.drift_limit,
                )
            )
            source = torch.cat(
                [found.slots(run.record)[run.source : run.source + run.length] for run in runs]
            )
            shifts = torch.from_numpy(
                np.repeat(
                    np.array([run.shift for run in runs], dtype=np.int32),
                    np.array([run.length for run in runs]),
                )
            )
            count = goal - held.length
            taken, freed = None, 0
            if self._may_take(plan, runs, goal, count):
                # The check for foreign locks counts ours too.
                found.unlock(plan.record)
                took = self._slots.take_tail(
                    found.keys(plan.record),
                    namespace,
                    plan.first_change // self._slots.page_size * self._slots.page_size,
                    runs[0].source,
                    runs[-1].source + runs[-1].length,
                )
                if took is not None:
                    taken, freed = took.kept, took.freed
                else:
                    found.relock(plan.record)
            target = taken if taken is not None else self._slots.allocate(count)
            if taken is not None:
                source = taken
            try:
                moved = self._rotate(layout, source, target, shifts)
            except BaseException:
                self._slots.free(target)
                raise
            before = self._slots.indices(held, namespace)
            self._slots.insert(keys[:goal], namespace, torch.cat([before, target]), held.length)
        for run in runs:
            plan.lineage.roundings.write(run.start, run.start + run.length, run.roundings)
        micros = (time.perf_counter() - started) * 1e6
        self._reporter.spliced(
            req.rid, plan, runs, moved, taken is not None, freed, micros, self._slots.page_size
        )
        return _Moved(count, moved, taken is not None, freed, micros)

    def _may_take(self, plan: RequestPlan, runs: list[Run], goal: int, count: int) -> bool:
        """Taking the old view's slots over is possible only for its last part, and only in one run of slots."""
        wish = self._settings.inplace
        if wish is InPlace.NEVER or (wish is InPlace.AUTO and self._slots.available() >= count):
            return False
        if goal != plan.target or plan.kind is not Kind.MAIN or plan.edits == 0:
            return False
        page = self._slots.page_size
        joined = all(a.source + a.length == b.source for a, b in zip(runs, runs[1:], strict=False))
        return (
            joined
            and all(run.record is plan.record for run in runs)
            and runs[0].start >= plan.first_change
            and runs[0].source >= plan.first_change
            and runs[0].source % page == 0
            and count % page == 0
        )

    def _rotate(self, layout: Any, source: torch.Tensor, target: torch.Tensor, shifts: torch.Tensor) -> int:
        """Run the kernel behind every forward already queued on the model's stream; returns bytes moved."""
        if layout.device.type != "cuda":
            return splice_rows(layout, source, target, shifts).bytes_moved
        stream = self._forward_stream or torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # The slots come from the tree; checking them again would wait for the device.
            stats = splice_rows(layout, source, target, shifts, validate=False)
        for tensor in (source, target):
            tensor.record_stream(stream)
        return stats.bytes_moved

    def _agreed(self, find: Any) -> list[Run]:
        """Sources, if every tensor-parallel rank found them; the ranks splice alike or not at all."""
        why: Fallback | None = None
        runs: list[Run] = []
        try:
            runs = find()
        except Fallback as error:
            why = error
        if self._runtime.ranks > 1:
            agreed = torch.tensor([0 if why else 1], dtype=torch.int32)
            torch.distributed.all_reduce(
                agreed, op=torch.distributed.ReduceOp.MIN, group=self._cache.tp_group
            )
            if not int(agreed) and why is None:
                why = Fallback(FallbackReason.SOURCE_MISSING, "another tensor-parallel rank lacks the source")
        if why is not None:
            raise why
        return runs

    def _account(self, req: Any, plan: RequestPlan, report: EditReport, moved: _Moved | None) -> None:
        start = min(plan.first_change, plan.target)
        first = report.outcome is None
        report.applied(
            prefix=start,
            spliced=plan.kept(start, plan.target),
            filled=sum(end - begin for begin, end in plan.fills),
            edits=plan.edits,
            lineage=plan.lineage.name,
        )
        if moved is not None:
            report.moved += moved.tokens
            report.in_place = report.in_place or moved.in_place
        if first:
            self._reporter.finish(req.rid, report)
        attach(req, report)

    # ------------------------------------------------------------------ records

    def checkpointed(self, req: Any, up_to: int) -> None:
        """A request's KV ``[0, up_to)`` has been published; when it is finished, remember it as a base."""
        if not req.finished():
            return
        self.forget_request(req.rid)
        state: _State | None = getattr(req, _STATE, None)
        plan = state.plan if state is not None else None
        if plan is not None and plan.kind is Kind.FILL:
            assert state is not None
            span = plan.fills[-1]
            micros = (time.perf_counter() - state.admitted) * 1e6 if state.admitted else 0.0
            self._reporter.filled(req.rid, plan, span, micros, self._slots.page_size)
            return
        if _aborted(req) or self._runtime.layout is None or req.multimodal_inputs is not None:
            return
        token_ids = req.full_untruncated_fill_ids[:up_to]
        tokens = as_tokens(token_ids)
        if not len(tokens):
            return
        namespace = namespace_of(req)
        lineage = plan.lineage if plan is not None else None
        buffer = buffer_id(
            self._runtime.model, namespace.salt, lineage.fingerprint if lineage else b"", tokens.data
        )
        if plan is None:
            record = BaseRecord(
                req.rid, namespace, tokens, View.of_buffer(buffer, len(tokens)), buffer, Roundings()
            )
        else:
            record = self._edited_record(req.rid, plan, token_ids, tokens, buffer)
        self._records.add(record)

    def _edited_record(
        self, rid: str, plan: RequestPlan, token_ids: array[int], tokens: Tokens, buffer: str
    ) -> BaseRecord:
        view = plan.view.truncate(min(plan.target, len(tokens)))
        view = view.extend(len(tokens) - view.length).filled(buffer)
        keys = as_tokens(plan.keys(token_ids))
        return BaseRecord(rid, plan.record.namespace, keys, view, buffer, plan.roundings())

    # ------------------------------------------------------------------ state

    def reset(self) -> None:
        """The tree was emptied. Records stay: their sources are then missing, by name."""
        self._planned.clear()

    def close(self) -> None:
        self._reporter.close()


class _Found:
    """Paths of the records looked at during one splice: matched once, locked until the splice ends."""

    def __init__(self, slots: Slots, namespace: Namespace, locks: ExitStack) -> None:
        self._slots_of = slots
        self._namespace = namespace
        self._paths: dict[int, tuple[Path, array[int]]] = {}
        self._indices: dict[int, torch.Tensor] = {}
        self._locks: dict[int, Any] = {}
        locks.callback(self._unlock_all)

    def resident(self, record: BaseRecord) -> int:
        """Tokens of the record's path that the tree holds."""
        key = id(record)
        if key not in self._paths:
            page = self._slots_of.page_size
            from .lineage import key_array

            keys = key_array(record.keys[: record.length // page * page])
            self._paths[key] = (self._slots_of.match(keys, self._namespace), keys)
            self._locks[key] = self._slots_of.lock(self._paths[key][0])
        return self._paths[key][0].length

    def slots(self, record: BaseRecord) -> torch.Tensor:
        """Slots of the record's path, int64."""
        key = id(record)
        if key not in self._indices:
            self._indices[key] = self._slots_of.indices(self._paths[key][0], self._namespace)
        return self._indices[key]

    def keys(self, record: BaseRecord) -> array[int]:
        return self._paths[id(record)][1]

    def unlock(self, record: BaseRecord) -> None:
        self._slots_of.unlock(self._locks.pop(id(record)))

    def relock(self, record: BaseRecord) -> None:
        self._locks[id(record)] = self._slots_of.lock(self._paths[id(record)][0])

    def _unlock_all(self) -> None:
        for lock in self._locks.values():
            self._slots_of.unlock(lock)
        self._locks.clear()


def namespace_of(req: Any) -> Namespace:
    """Tenant and adapter of a request."""
    return Namespace(req.cache_salt or None, req.extra_key or None, req.lora_id or None)


def attach(req: Any, report: EditReport) -> None:
    """Send a report back with the response: ``meta_info["leyline"]``."""
    if report.outcome is None:
        return
    if req.customized_info is None:
        req.customized_info = {}
    req.customized_info["leyline"] = [report.as_dict()]


def _aborted(req: Any) -> bool:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return isinstance(req.finished_reason, FINISH_ABORT)


def _internal(error: BaseException) -> Fallback:
    return Fallback(FallbackReason.INTERNAL_ERROR, f"{type(error).__name__} while planning; see the log")


__all__ = ["GpuTier", "Lineage", "Outcome", "attach", "namespace_of"]
