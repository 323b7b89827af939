"""What happened to edits: the report in each response, counters, and the op journal."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server

from leyline_lmcache.journal import JournalWriter, OpRecord
from leyline_lmcache.ops import OpKind, Tier
from leyline_lmcache.ranges import Range
from leyline_lmcache.reasons import Fallback, FallbackReason

from . import wire
from .plans import Kind, RequestPlan
from .settings import Settings
from .splicer import Splice

log = logging.getLogger(__name__)


class Outcome(StrEnum):
    """How a request with directives was served."""

    SPLICED = "spliced"
    """From edited KV."""
    EXACT = "exact"
    """On the ordinary path, because the directives leave an exact continuation."""
    FALLBACK = "fallback"
    """By prefilling; the reason says why."""


@dataclass(slots=True)
class EditReport:
    """Travels back to the client as ``meta_info["leyline"]``.

    Attributes:
        prefix: tokens before everything that was ever edited, on the ordinary path.
        spliced: tokens after that whose KV was kept.
        moved: of those, how many this request had to move; the rest lay in the tree already.
        reach: position up to which the request was served from cached KV.
        filled: tokens prefilled for replacements (with their alignment slack).
        tiers: of the tokens whose KV was kept, prefix and all, how many lay in which tier when the request
            (or its fills) came.
        reprefilled: tokens that should have been kept, but whose KV was gone or could not be moved.
        in_place: slots were taken over instead of copied.
    """

    outcome: Outcome | None = None
    reason: FallbackReason | None = None
    detail: str | None = None
    edits: int = 0
    prefix: int = 0
    spliced: int = 0
    moved: int = 0
    reach: int = 0
    filled: int = 0
    reprefilled: int = 0
    in_place: bool = False
    lineage: str | None = None
    tiers: dict[str, int] | None = None

    def exact(self) -> EditReport:
        self.outcome = Outcome.EXACT
        return self

    def refused(self, why: Fallback, *, lost: int = 0) -> EditReport:
        self.outcome, self.reason, self.detail = Outcome.FALLBACK, why.reason, why.detail
        self.prefix = self.spliced = self.moved = self.reach = self.filled = 0
        self.reprefilled = lost
        self.in_place, self.tiers = False, None
        return self

    def applied(
        self,
        *,
        prefix: int,
        spliced: int,
        reach: int,
        filled: int,
        edits: int,
        lineage: str,
        cpu: int = 0,
        redis: int = 0,
    ) -> None:
        self.outcome, self.reason, self.detail = Outcome.SPLICED, None, None
        self.prefix, self.spliced, self.reach, self.filled = prefix, spliced, reach, filled
        self.edits, self.lineage = edits, lineage
        gpu = max(0, prefix + spliced - cpu - redis)
        self.tiers = {Tier.GPU.value: gpu, Tier.CPU.value: cpu, Tier.REDIS.value: redis}

    def as_dict(self) -> dict[str, Any]:
        """Plain values only: the report crosses processes."""
        plain = {
            key: str(value) if isinstance(value, StrEnum) else value for key, value in asdict(self).items()
        }
        return {key: value for key, value in plain.items() if value is not None}


class Reporter:
    """Counters and journal of one scheduler process.

    Under SGLang's ``--enable-metrics`` the counters join its ``/metrics`` (Prometheus' multiprocess files);
    ``metrics_port`` serves them otherwise.
    """

    def __init__(self, settings: Settings, *, row_bytes: int = 0) -> None:
        self._row_bytes = row_bytes
        registry = CollectorRegistry()
        self._edits = Counter(
            "leyline_edits",
            "Requests with directives, by outcome and reason",
            ["outcome", "reason"],
            registry=registry,
        )
        self._tokens = Counter(
            "leyline_tokens",
            "Tokens of requests with directives, by how their KV came about",
            ["how"],
            registry=registry,
        )
        self._ops = Counter("leyline_ops", "Ops executed", ["tier", "op"], registry=registry)
        self._loaded = Counter(
            "leyline_loaded_tokens", "Tokens loaded for edited views, by tier", ["tier"], registry=registry
        )
        self._seconds = Histogram(
            "leyline_splice_seconds",
            "Time of one splice in the scheduler",
            buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
            registry=registry,
        )
        self._journal: JournalWriter | None = None
        if settings.journal_dir is not None:
            try:
                self._journal = JournalWriter(
                    settings.journal_dir,
                    max_bytes=settings.journal_max_bytes,
                    max_files=settings.journal_max_files,
                )
            except OSError as error:
                log.error(
                    "journal_dir: %s cannot be written (%s); no journal is kept", settings.journal_dir, error
                )
        if settings.metrics_port is not None:
            try:
                start_http_server(settings.metrics_port, registry=registry)
            except OSError as error:
                log.error("metrics_port: %d cannot be opened (%s)", settings.metrics_port, error)

    def decided(self, rid: str, report: EditReport) -> None:
        """The outcome of one request is known."""
        outcome = report.outcome or Outcome.EXACT
        self._edits.labels(outcome.value, report.reason.value if report.reason else "").inc()
        if outcome is Outcome.FALLBACK:
            log.info("edit of request %s is prefilled: %s: %s", rid, report.reason, report.detail)
            self._write(
                OpRecord(time.time(), rid, report.lineage or "", Tier.GPU, None, reason=report.reason)
            )
        elif outcome is Outcome.SPLICED:
            self._tokens.labels("spliced").inc(report.spliced)
        self._tokens.labels("reprefilled").inc(report.reprefilled)

    def spliced(self, rid: str, plan: RequestPlan, splice: Splice, page: int) -> None:
        """A splice was executed."""
        self._seconds.observe(splice.micros / 1e6)
        for run in splice.runs:
            if run.shift:
                kind = OpKind.ROTATE if splice.in_place else OpKind.COPY_ROTATE
            elif not splice.in_place:
                kind = OpKind.COPY
            else:
                continue  # the tokens stay where they are, under another key
            share = run.length / splice.tokens
            span = (run.start, run.start + run.length)
            self._op(rid, plan, kind, span, page, run.shift, splice.bytes * share, splice.micros * share)
        for load in splice.loaded:
            kind = OpKind.COPY_ROTATE if load.shift else OpKind.COPY
            # The blocks of these tiers are the chunks that were read, wherever in the view their tokens go.
            span = (load.source, load.source + load.length)
            size, micros = load.length * self._row_bytes, splice.micros * load.length / splice.tokens
            self._loaded.labels(load.tier.value).inc(load.length)
            self._op(rid, plan, kind, span, splice.chunk_size, load.shift, size, micros, load.tier)
        if plan.kind is Kind.MAIN and plan.edits:
            gone = splice.freed if splice.in_place else plan.record.length - plan.first_change
            self._op(rid, plan, OpKind.INVALIDATE, (plan.first_change, plan.first_change + gone), page)

    def filled(self, rid: str, plan: RequestPlan, span: Range, micros: float, page: int) -> None:
        """An internal request prefilled a replacement."""
        self._tokens.labels("filled").inc(span[1] - span[0])
        size = (span[1] - span[0]) * self._row_bytes
        self._op(rid, plan, OpKind.FILL, span, page, 0, size, micros)

    def invalidated(self, answer: wire.Invalidated) -> None:
        """Chunks that no view referred to any more were deleted from the stored tiers."""
        for tier, objects in ((Tier.CPU, answer.l1), (Tier.REDIS, answer.l2)):
            if objects:
                self._ops.labels(tier.value, OpKind.INVALIDATE.value).inc()
                self._write(OpRecord(time.time(), "", "", tier, OpKind.INVALIDATE, blocks=objects))

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _op(
        self,
        rid: str,
        plan: RequestPlan,
        kind: OpKind,
        span: Range,
        page: int,
        shift: int = 0,
        size: float = 0,
        micros: float = 0,
        tier: Tier = Tier.GPU,
    ) -> None:
        start, end = span
        self._ops.labels(tier.value, kind.value).inc()
        blocks = -(-end // page) - start // page if end > start else 0
        self._write(
            OpRecord(
                ts=time.time(),
                request=rid,
                lineage=plan.lineage.fingerprint.hex(),
                tier=tier,
                op=kind,
                blocks=blocks,
                tokens=end - start,
                shift=shift,
                bytes=round(size),
                micros=round(micros),
            )
        )

    def _write(self, record: OpRecord) -> None:
        if self._journal is not None:
            self._journal.write(record)
