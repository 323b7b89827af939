"""The GPU tier: what is decided for each edited request, and what finished requests leave behind.

Runs in SGLang's scheduler process, on its one thread.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from leyline_lmcache.directive import Directive
from leyline_lmcache.ops import Tier
from leyline_lmcache.ranges import Range, subtract
from leyline_lmcache.reasons import Fallback, FallbackReason
from leyline_lmcache.view import BufferId, View, buffer_id

from . import hints, wire
from .lineage import LineageTable, Roundings, Tokens, as_tokens, key_array
from .lookups import Lookups
from .origins import Origins
from .packing import Packing, computed, remainders
from .packs import BufferInfo, Shelf, chunks_of, dead_chunks
from .plans import Kind, RequestPlan, plan_request
from .records import BaseRecord, RecordStore, namespace_of
from .report import EditReport, Reporter
from .runtime import Runtime
from .settings import Invalidate, Settings
from .slots import Path, Slots
from .splicer import Pin, Splice, Splicer
from .stored import StoredTier, remember
from .viewing import Sightings, describe

log = logging.getLogger(__name__)

_STATE = "_leyline"
"""Attribute of an SGLang ``Req`` that holds its :class:`_State`."""
_REPORT = "leyline"
"""Where a response has its report."""


@dataclass(slots=True)
class _State:
    """What was decided for one request.

    Attributes:
        plan: None once the request is on the exact path.
        report: None for requests without directives and for fills, which belong to another request's report.
        matched: when the plan was last found reachable (``time.perf_counter``).
        lost: tokens at the view's end whose KV was gone, so that they are prefilled.
        directives, fill: what was asked for, kept while the base's record is looked up elsewhere.
        looked: the stored tiers were asked, or cannot be.
        origins: what this request and its fills loaded from the stored tiers.
        told: SGLang's own breakdown of cached tokens has it.
        packings: what is to be stored now that it is finished.
        view: the base whose view it asks for, instead of editing one.
    """

    plan: RequestPlan | None = None
    report: EditReport | None = None
    matched: float | None = None
    lost: int = 0
    directives: tuple[Directive, ...] = ()
    fill: Range | None = None
    looked: bool = False
    origins: Origins = field(default_factory=Origins)
    told: bool = False
    packings: list[Packing] = field(default_factory=list)
    view: str | None = None


class GpuTier:
    """Edits over one radix cache.

    Args:
        cache: the ``UnifiedRadixCache`` whose overrides call this.
        runtime: what can be spliced.
        stream: the stream the model's forwards run on.
    """

    def __init__(
        self, cache: Any, runtime: Runtime, settings: Settings, reporter: Reporter, stream: Any = None
    ) -> None:
        self._cache = cache
        self._runtime = runtime
        self._settings = settings
        self._reporter = reporter
        self._page_size = int(cache.page_size)
        self._records = RecordStore(settings.max_records, settings.max_record_tokens)
        self._lineages = LineageTable(settings.max_lineages)
        self._planned: set[str] = set()
        self._declared: dict[str, tuple[Directive, ...]] = {}
        self._pins: dict[str, Pin] = {}
        self._lookups: Lookups | None = None
        self._sightings: Sightings | None = None
        self._splicer: Splicer | None = None
        if runtime.layout is not None:
            self._splicer = Splicer(
                Slots(cache),
                runtime.layout,
                self._records,
                settings,
                stream=stream,
                agree=self._all_ranks,
                kernel=runtime.kernel,
            )

    # ------------------------------------------------------------------ planning

    def plan_of(self, req: Any) -> RequestPlan | None:
        """The plan of a request, made on first sight; None: the exact path. Never raises."""
        state: _State | None = getattr(req, _STATE, None)
        if state is None:
            state = _State()
            setattr(req, _STATE, state)
            try:
                self._decide(req, state)
            except Fallback as why:
                self._refuse(req, state, why)
            except Exception as error:
                log.exception("request %s could not be planned", req.rid)
                self._refuse(req, state, _fault(error))
        return state.plan

    def is_planned(self, rid: str) -> bool:
        """Whether this request is served from edited KV, so that no exact lookup may shadow it."""
        return rid in self._planned

    def drop(self, req: Any, why: Fallback) -> None:
        """Give a request's plan up: from here on it is served by prefilling."""
        state: _State = getattr(req, _STATE)
        self._unpin(req.rid)
        if state.plan is not None:
            state.lost += state.plan.kept(min(state.plan.exact, state.plan.target), state.plan.target)
        state.plan = None
        self._planned.discard(req.rid)
        self._refuse(req, state, why)

    def ended(self, rid: str) -> None:
        """The request is over, one way or another."""
        self._planned.discard(rid)
        self._unpin(rid)
        edit = self._declared.pop(rid, None)
        if self._lookups is not None:
            self._lookups.cancel(rid)
            if edit is not None:
                self._lookups.settled(edit)
        if self._sightings is not None:
            self._sightings.cancel(rid)

    def _decide(self, req: Any, state: _State) -> None:
        raw = hints.raw_envelope(req.kv_hints, req.sampling_params)
        if raw is None:
            return
        try:
            state.view = hints.viewed_base(raw)
        except Fallback as why:
            self.unseen(req, why)
            return
        if state.view is not None:
            self._show(req, state.view)
            return
        state.fill = hints.fill_span(raw)
        state.report = EditReport() if state.fill is None else None
        envelope = hints.decode(raw)
        directives = envelope.directives + envelope.forgets
        if not directives:
            state.report = None
            return
        if self._runtime.refusal is not None:
            raise self._runtime.refusal
        _check_request(req)
        state.directives = directives
        if state.fill is None:
            self._declared[req.rid] = directives
        record = self._records.get(directives[0].base, namespace_of(req))
        if record is not None:
            self._plan(req, state, record)
        elif self._lookups is not None and self._lookups.available:
            self._lookups.want(req, directives[0].base)
        else:
            raise unknown_base()

    def _plan(self, req: Any, state: _State, record: BaseRecord) -> None:
        state.plan = plan_request(
            record,
            state.directives,
            as_tokens(req.origin_input_ids),
            self._lineages,
            page_size=self._page_size,
            min_reuse=self._settings.min_reuse,
            fill=state.fill,
        )
        if state.plan is not None:
            self._planned.add(req.rid)
        elif state.report is not None:
            state.report.exact()
            self._reporter.decided(req.rid, state.report)
            attach(req, state.report)

    def _refuse(self, req: Any, state: _State, why: Fallback) -> None:
        if state.report is None:
            log.debug("fill %s is not spliced: %s", req.rid, why)
            return
        state.report.refused(why, lost=state.lost)
        self._reporter.decided(req.rid, state.report)
        attach(req, state.report)

    # ------------------------------------------------------------------ splicing

    def reach(self, req: Any, plan: RequestPlan, keys: array[int], held: Path, limit: int) -> bool:
        """Splice what the tree lacks of ``[0, plan.goal)``, before the request may be prefilled.

        Args:
            keys: the request's tagged keys, ``[n]``.
            held: what the tree holds of them.
            limit: tokens of prefix the engine will accept.

        Returns:
            Whether the tree changed, so that the caller matches again.

        Raises:
            Fallback: the plan has to be dropped; nothing was changed.
        """
        if self._splicer is None:
            raise Fallback(FallbackReason.INTERNAL_ERROR, "a plan was made for a runtime without layout")
        goal = min(plan.goal, limit // self._page_size * self._page_size)
        if plan.kind is Kind.MAIN and goal + self._page_size < plan.goal:
            raise Fallback(
                FallbackReason.UNSUPPORTED_RUNTIME,
                f"the engine accepts {limit} tokens of prefix (see logprob_start_len), "
                f"the edit keeps {plan.goal}",
            )
        cut = goal < plan.goal
        if cut:
            # The engine computes at least one token of a prompt itself.
            plan.cut(goal, self._lineages)
        state: _State = getattr(req, _STATE)
        splice = None
        if state.matched is None:
            self._look_ahead(state, plan)
        if held.length < goal:
            if self._should_look(req, state, plan, held, goal):
                return False
            splice = self._splice(req.rid, plan, keys, held, goal)
            if splice.goal < goal:
                cut = True
                state.lost += plan.kept(splice.goal, goal)
                plan.cut(splice.goal, self._lineages)
            self._reporter.spliced(req.rid, plan, splice, self._page_size)
        self._note_origins(plan, state, splice)
        state.matched = time.perf_counter()
        if state.report is not None:
            state.report.reprefilled = state.lost
            self._account(req, plan, state, state.report, splice)
        return cut or (splice is not None and splice.tokens > 0)

    def _splice(self, rid: str, plan: RequestPlan, keys: array[int], held: Path, goal: int) -> Splice:
        assert self._splicer is not None
        self._unpin(rid)
        stored = self._lookups.take(rid) if self._lookups is not None else None
        if self._lookups is not None and stored is not None and rid in self._declared:
            self._lookups.credit(self._declared[rid], stored)
        try:
            return self._splicer.splice(plan, keys, held, goal, stored)
        finally:
            if stored is not None:
                stored.release()

    def _should_look(self, req: Any, state: _State, plan: RequestPlan, held: Path, goal: int) -> bool:
        """Whether the stored tiers are to be asked before this request is admitted; once per request."""
        if self._lookups is None or self._splicer is None or state.looked:
            return False
        state.looked = True
        missing, pin = self._splicer.pin(plan.view, held.length, goal, plan.record)
        if not missing or not self._lookups.available:
            pin.unlock()
            return False
        # What the GPU has must still be there when the rest has come.
        self._pins[req.rid] = pin
        self._lookups.want(req, None)
        return True

    def _unpin(self, rid: str) -> None:
        pin = self._pins.pop(rid, None)
        if pin is not None:
            pin.unlock()

    def _look_ahead(self, state: _State, plan: RequestPlan) -> None:
        """The first fill declares its edit: what comes behind it can be brought nearer meanwhile."""
        if self._lookups is None or self._splicer is None or not self._settings.prefetch:
            return
        if plan.kind is Kind.FILL and len(plan.fills) == 1 and self._lookups.available:
            missing = self._splicer.missing(plan.whole, plan.target, plan.whole.length, plan.record)
            parts = chunks_of(plan.whole, missing, self._records.info, self._lookups.chunk_size)
            self._lookups.prefetch(state.directives, plan.record.namespace, parts)

    def _account(
        self, req: Any, plan: RequestPlan, state: _State, report: EditReport, splice: Splice | None
    ) -> None:
        first = report.outcome is None
        start = min(plan.exact, plan.target)
        report.applied(
            prefix=start,
            spliced=plan.kept(start, plan.target),
            reach=plan.target,
            filled=sum(end - begin for begin, end in plan.fills),
            edits=plan.edits,
            lineage=plan.lineage.name,
            cpu=state.origins.tokens(Tier.CPU, plan.target),
            redis=state.origins.tokens(Tier.REDIS, plan.target),
        )
        if splice is not None:
            report.moved += splice.tokens
            report.in_place = report.in_place or splice.in_place
        if first:
            self._reporter.decided(req.rid, report)
        attach(req, report)

    @staticmethod
    def _note_origins(plan: RequestPlan, state: _State, splice: Splice | None) -> None:
        """Loads of fills count for the request they were made for."""
        waiting = plan.lineage.origins
        if plan.kind is Kind.FILL and len(plan.fills) == 1 and state.matched is None:
            waiting.clear()
        if plan.kind is Kind.MAIN:
            state.origins.update(waiting)
            waiting.clear()
        into = waiting if plan.kind is Kind.FILL else state.origins
        for run in splice.loaded if splice is not None else ():
            into.add(run.start, run.start + run.length, run.tier)

    def _all_ranks(self, value: int) -> int:
        """The smallest value of all tensor-parallel ranks."""
        if self._runtime.ranks == 1:
            return value
        votes = torch.tensor([value], dtype=torch.int64)
        torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MIN, group=self._cache.tp_group)
        return int(votes.item())

    # ------------------------------------------------------------------ stored tiers

    def attach_stored(self, tier: StoredTier) -> None:
        """From now on, what the GPU does not hold is looked for in CPU and Redis."""
        self._lookups = Lookups(tier, self, self._settings)
        if self._runtime.ranks == 1:
            self._sightings = Sightings(tier, self)

    @property
    def looking(self) -> bool:
        """Whether a request waits for the stored tiers."""
        return bool(self._lookups) or bool(self._sightings)

    def begin_lookup(self, rid: str) -> bool:
        """Start what :meth:`plan_of` or :meth:`reach` found necessary; whether it runs now."""
        if self._sightings is not None and self._sightings.begin(rid):
            return True
        return self._lookups is not None and self._lookups.begin(rid)

    def poll_lookup(self, rid: str) -> bool | None:
        """True when a lookup is over (told once), False while it runs, None when there is none."""
        over = None if self._sightings is None else self._sightings.poll(rid)
        if over is not None:
            return over
        return None if self._lookups is None else self._lookups.poll(rid)

    def advance_lookups(self) -> None:
        """To be called in every step of the scheduler."""
        if self._lookups is not None:
            self._lookups.advance()

    def found_record(self, req: Any, answer: wire.Resolved) -> RequestPlan | None:
        """The base's record came from elsewhere. Raises ``Fallback``."""
        state: _State = getattr(req, _STATE)
        self._plan(req, state, self.record_from(req, answer))
        state.looked = True
        return state.plan

    def record_from(self, req: Any, answer: wire.Resolved) -> BaseRecord:
        """Remember a record that another node, or this one before it restarted, has published.

        Raises:
            Fallback: there is none, or it makes no sense.
        """
        try:
            record = remember(answer, namespace_of(req), self._records, self._lineages)
        except (wire.WireError, ValueError) as error:
            raise Fallback(FallbackReason.TIER_ERROR, f"the base's record cannot be read: {error}") from error
        if record is None:
            raise unknown_base()
        return record

    def found_nothing(self, req: Any, why: Fallback) -> None:
        """The lookup failed."""
        self.drop(req, why)

    def wanted_chunks(self, req: Any, plan: RequestPlan, chunk_size: int) -> list[tuple[Shelf, list[Range]]]:
        """Chunks that hold what the GPU lacks of a plan, by shelf, as index ranges."""
        assert self._splicer is not None
        keys = plan.keys(req.origin_input_ids)[: plan.goal]
        held = self._splicer.match(keys, plan.record.namespace)
        missing = self._splicer.missing(plan.view, held.length, plan.goal, plan.record)
        return chunks_of(plan.view, missing, self._records.info, chunk_size)

    def invalidated(self, answer: wire.Invalidated) -> None:
        """Chunks that no view referred to any more are gone."""
        self._reporter.invalidated(answer)

    def packings(self, req: Any) -> list[Packing]:
        """What a finished request leaves to be stored in packs; told once."""
        state: _State | None = getattr(req, _STATE, None)
        if state is None:
            return []
        found, state.packings = state.packings, []
        return found

    # ------------------------------------------------------------------ views that are asked for

    def _show(self, req: Any, base: str) -> None:
        record = self._records.get(base, namespace_of(req))
        if self._sightings is not None and self._lookups is not None and self._lookups.available:
            self._sightings.want(req, base, record)
        elif record is not None:
            self.sighted(req, record, {})
        else:
            self.unseen(req, unknown_base())

    def _answer_late(self, req: Any, base: str) -> None:
        """The request is over and was never asked to wait: tell what is known here."""
        if req.customized_info is not None and _REPORT in req.customized_info:
            return
        record = self._records.get(base, namespace_of(req))
        if record is not None:
            self.sighted(req, record, {})
        else:
            self.unseen(req, unknown_base())

    def info_of(self, buffer: BufferId) -> BufferInfo | None:
        """What a buffer was computed from."""
        return self._records.info(buffer)

    def sighted(self, req: Any, record: BaseRecord, stored: Mapping[Tier, Sequence[Range]]) -> None:
        """Answer with a view and where its KV lies."""
        found: dict[Tier, Sequence[Range]] = dict(stored)
        if self._splicer is not None:
            gpu = subtract([(0, record.length)], self._splicer.missing(record.view, 0, record.length, record))
            found = {Tier.GPU: gpu, **found}
        tell(req, {"view": describe(record, self._records.info, found)})

    def unseen(self, req: Any, why: Fallback) -> None:
        """Answer that there is no such view."""
        tell(req, {"reason": why.reason.value, "detail": why.detail})

    # ------------------------------------------------------------------ records

    def checkpointed(self, req: Any, up_to: int) -> None:
        """A request's KV ``[0, up_to)`` was published; if it is finished, remember it as a base."""
        state: _State = getattr(req, _STATE, None) or _State()
        self._break_down(req, state)
        if not req.finished():
            return
        self.ended(req.rid)
        plan = state.plan
        if state.view is not None:
            self._answer_late(req, state.view)
            return
        if state.fill is not None:
            # Another request's fill: never a base, even if it was refused and prefilled.
            if plan is not None:
                micros = (time.perf_counter() - state.matched) * 1e6 if state.matched else 0.0
                self._reporter.filled(req.rid, plan, plan.fills[-1], micros, self._page_size)
            return
        aborted = isinstance(req.finished_reason, FINISH_ABORT)
        if aborted or self._splicer is None or req.multimodal_inputs is not None:
            return
        token_ids = req.full_untruncated_fill_ids[:up_to]
        tokens = as_tokens(token_ids)
        if not len(tokens):
            return
        if state.report is not None and state.report.outcome is None:
            self._refuse(req, state, unknown_base())  # the lookup never came about
        if plan is None:
            record, lineage = self._exact_record(req, tokens), b""
        else:
            record, lineage = self._edited_record(req.rid, plan, token_ids, tokens), plan.tail.fingerprint
        info = BufferInfo(record.buffer, tokens, lineage)
        self._records.add(record, [info])
        if self._lookups is not None and self._lookups.available:
            # Without our module nobody could find a pack.
            state.packings = self._pack(record, info, plan, self._lookups.chunk_size)
            for packing in state.packings:
                self._records.learn(packing.info)
            known = self._records.info(record.buffer) or info
            others = (packing.info for packing in state.packings if packing.info.id != known.id)
            self._lookups.publish(record, [known, *others])
            if plan is not None and plan.edits:
                self._invalidate(plan.record, self._lookups)

    def _invalidate(self, base: BaseRecord, lookups: Lookups) -> None:
        """An edit of ``base`` was served: let go what only it still refers to, if that is wished for."""
        wish = self._settings.invalidate
        if wish is Invalidate.KEEP:
            return
        parts: list[tuple[Shelf, list[Range]]] = []
        for buffer, (dead, fresh) in self._records.supersede(base).items():
            info = self._records.info(buffer)
            if info is not None:
                parts += dead_chunks(info, dead, fresh, lookups.chunk_size)
        lookups.invalidate(base, parts, everywhere=wish is Invalidate.DELETE)

    def _pack(
        self, record: BaseRecord, info: BufferInfo, plan: RequestPlan | None, chunk_size: int
    ) -> list[Packing]:
        """Packs for what LMCache's own stores leave out. KV of a sequence without edits needs none yet."""
        if plan is None:
            return []
        pack = computed(plan, record.length, self._page_size)
        own = [Packing(replace(info, packs=(pack,)), pack, record)] if pack else []
        return [*own, *remainders(record, self._records, chunk_size, self._page_size, self._is_resident)]

    def _is_resident(self, record: BaseRecord, length: int) -> bool:
        assert self._splicer is not None
        held = self._splicer.match(key_array(record.keys[:length]), record.namespace)
        return bool(self._all_ranks(int(held.length >= length)))

    @staticmethod
    def _break_down(req: Any, state: _State) -> None:
        """Let SGLang's ``cached_tokens_details`` say what was loaded: L1 is its host, Redis its storage."""
        if state.told or state.plan is None or not req._cache_breakdown_computed:
            return
        state.told = True
        cpu = state.origins.tokens(Tier.CPU, req.cached_tokens_device)
        redis = state.origins.tokens(Tier.REDIS, req.cached_tokens_device)
        req.cached_tokens_device -= cpu + redis
        req.cached_tokens_host += cpu
        req.cached_tokens_storage += redis

    def _exact_record(self, req: Any, tokens: Tokens) -> BaseRecord:
        namespace = namespace_of(req)
        buffer = buffer_id(self._runtime.model, namespace.salt, b"", tokens.data)
        view = View.of_buffer(buffer, len(tokens))
        return BaseRecord(req.rid, namespace, tokens, view, buffer, Roundings())

    def _edited_record(
        self, rid: str, plan: RequestPlan, token_ids: array[int], tokens: Tokens
    ) -> BaseRecord:
        namespace = plan.record.namespace
        buffer = buffer_id(self._runtime.model, namespace.salt, plan.tail.fingerprint, tokens.data)
        view = plan.view.truncate(min(plan.target, len(tokens)))
        view = view.extend(len(tokens) - view.length).filled(buffer)
        spans = [span for span in plan.record.spans if span[0] < plan.first_change]
        if plan.edits:
            spans.append((plan.first_change, plan.lineage.fingerprint))
        if plan.tail is not plan.lineage and plan.tail_start < len(tokens):
            spans = [span for span in spans if span[0] < plan.tail_start]
            spans.append((plan.tail_start, plan.tail.fingerprint))
        keys = as_tokens(plan.keys(token_ids))
        return BaseRecord(rid, namespace, keys, view, buffer, plan.roundings(), tuple(spans))

    # ------------------------------------------------------------------ life cycle

    def reset(self) -> None:
        """The tree was emptied. Records stay: edits of them are refused as ``source_missing``, by name."""
        self._planned.clear()
        self._declared.clear()
        self._pins.clear()
        if self._lookups is not None:
            self._lookups.cancel_all()
        if self._sightings is not None:
            self._sightings.cancel_all()

    def close(self) -> None:
        """Flush the journal."""
        self._reporter.close()


def unknown_base() -> Fallback:
    return Fallback(FallbackReason.UNKNOWN_BASE, "base: no finished response of this id is remembered here")


def attach(req: Any, report: EditReport) -> None:
    """Send a report back with the response, as ``meta_info["leyline"]``."""
    tell(req, report.as_dict())


def tell(req: Any, answer: dict[str, Any]) -> None:
    """Send plain data back with the response."""
    if req.customized_info is None:
        req.customized_info = {}
    req.customized_info[_REPORT] = [answer]


def _check_request(req: Any) -> None:
    if req.multimodal_inputs is not None:
        raise Fallback(FallbackReason.UNSUPPORTED_RUNTIME, "the request has images, audio or video")
    if req.session is not None:
        raise Fallback(FallbackReason.UNSUPPORTED_RUNTIME, "the request continues an engine session")
    if req.positional_embed_overrides is not None:
        raise Fallback(FallbackReason.UNSUPPORTED_RUNTIME, "the request overrides embeddings")


def _fault(error: BaseException) -> Fallback:
    return Fallback(FallbackReason.INTERNAL_ERROR, f"{type(error).__name__} while planning; see the log")
