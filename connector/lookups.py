"""Requests that wait for the stored tiers before they can be admitted."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Protocol

from leyline_lmcache.ranges import Range
from leyline_lmcache.reasons import Fallback, FallbackReason

from . import wire
from .packs import BufferInfo, Shelf
from .plans import RequestPlan
from .records import BaseRecord, Namespace
from .stored import Flow, StoredChunks, StoredTier

log = logging.getLogger(__name__)


class Planner(Protocol):
    """Who is told the results; see :class:`.gpu_tier.GpuTier`. All but the last may raise ``Fallback``."""

    def plan_of(self, req: Any) -> RequestPlan | None: ...
    def found_record(self, req: Any, answer: wire.Resolved) -> RequestPlan | None: ...
    def wanted_chunks(
        self, req: Any, plan: RequestPlan, chunk_size: int
    ) -> list[tuple[Shelf, list[Range]]]: ...
    def found_nothing(self, req: Any, why: Fallback) -> None: ...


class Lookups:
    """Lookups by request id: wanted, then begun, then polled until they are over."""

    def __init__(self, tier: StoredTier, planner: Planner) -> None:
        self._tier = tier
        self._planner = planner
        self._wanted: dict[str, tuple[Any, str | None]] = {}
        self._running: dict[str, tuple[Any, Flow]] = {}
        self._ready: dict[str, StoredChunks] = {}

    def __bool__(self) -> bool:
        return bool(self._running)

    @property
    def available(self) -> bool:
        """Whether asking may lead to anything now."""
        return self._tier.available

    def want(self, req: Any, base: str | None) -> None:
        """A request needs its base's record (``base``), or chunks of a known one."""
        self._wanted[req.rid] = (req, base)

    def begin(self, rid: str) -> bool:
        """Start a wanted lookup; whether one is running now."""
        wanted = self._wanted.pop(rid, None)
        if wanted is None:
            return False
        req, base = wanted
        try:
            flow = Flow(
                self._tier,
                base,
                Namespace(req.cache_salt or None, req.extra_key or None, req.lora_id or None),
            )
            self._running[rid] = (req, flow)
            if base is None:
                self._fetch(req, flow)
        except Exception as error:
            self._fail(rid, req, error)
        return rid in self._running

    def poll(self, rid: str) -> bool | None:
        """True when the lookup is over (told once), False while it runs, None when there is none."""
        running = self._running.get(rid)
        if running is None:
            return None
        req, flow = running
        try:
            over = self._advance(req, flow)
        except Exception as error:
            self._fail(rid, req, error)
            return True
        if over:
            self._running.pop(rid, None)
        return over

    def take(self, rid: str) -> StoredChunks | None:
        """Chunks that a finished lookup holds locked; the caller releases them."""
        return self._ready.pop(rid, None)

    def cancel(self, rid: str) -> None:
        """The request is over: give back what it still holds."""
        self._wanted.pop(rid, None)
        ready = self._ready.pop(rid, None)
        if ready is not None:
            ready.release()
        running = self._running.pop(rid, None)
        if running is not None:
            running[1].cancel()

    def cancel_all(self) -> None:
        for rid in [*self._wanted, *self._running, *self._ready]:
            self.cancel(rid)

    @property
    def chunk_size(self) -> int:
        """Tokens in one of LMCache's chunks."""
        return self._tier.chunk_size

    def publish(self, record: BaseRecord, infos: Iterable[BufferInfo]) -> None:
        """Make a finished request, and what is new of the buffers in its view, known to other nodes."""
        self._tier.publish(record, infos)

    def _advance(self, req: Any, flow: Flow) -> bool:
        if flow.over:
            return True
        if flow.resolving:
            answer = flow.resolved()
            if answer is None:
                return False
            if self._planner.found_record(req, answer) is None:
                return True
            self._fetch(req, flow)
            return flow.over
        chunks = flow.fetched()
        if chunks is None:
            return False
        self._ready[req.rid] = chunks
        return True

    def _fetch(self, req: Any, flow: Flow) -> None:
        plan = self._planner.plan_of(req)
        wanted = self._planner.wanted_chunks(req, plan, self._tier.chunk_size) if plan is not None else []
        if wanted:
            flow.fetch(wanted)
        else:
            flow.over = True

    def _fail(self, rid: str, req: Any, error: Exception) -> None:
        self._running.pop(rid, None)
        if not isinstance(error, Fallback):
            log.exception("the stored tiers could not be asked for request %s", rid)
            error = Fallback(FallbackReason.TIER_ERROR, f"{type(error).__name__} while asking; see the log")
        self._planner.found_nothing(req, error)
