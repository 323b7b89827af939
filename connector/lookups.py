"""What the engine asks of the stored tiers, and for whom: requests that wait, edits that were declared,
chunks that can go."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Protocol

from leyline_lmcache.directive import Directive
from leyline_lmcache.ranges import Range
from leyline_lmcache.reasons import Fallback, FallbackReason
from leyline_lmcache.view import BufferId

from . import wire
from .packs import BufferInfo, Shelf
from .plans import RequestPlan
from .records import BaseRecord, Namespace, namespace_of
from .settings import Settings
from .stored import StoredChunks, StoredTier
from .tier_jobs import Fetch, Invalidation, Lookup, Parts, shared
from .tier_queue import Priority, TierQueue

log = logging.getLogger(__name__)

Edit = tuple[Directive, ...]
"""One turn's directives: what a request and its fills have in common."""

_MOST_AHEAD = 64
"""Declared edits whose chunks are kept ready; the server lets locks go by itself after a while."""


class Planner(Protocol):
    """Who is told the results; see :class:`.gpu_tier.GpuTier`. The first three may raise ``Fallback``."""

    def plan_of(self, req: Any) -> RequestPlan | None: ...
    def found_record(self, req: Any, answer: wire.Resolved) -> RequestPlan | None: ...
    def wanted_chunks(
        self, req: Any, plan: RequestPlan, chunk_size: int
    ) -> list[tuple[Shelf, list[Range]]]: ...
    def found_nothing(self, req: Any, why: Fallback) -> None: ...
    def info_of(self, buffer: BufferId) -> BufferInfo | None: ...
    def invalidated(self, answer: wire.Invalidated) -> None: ...


class Lookups:
    """Lookups by request id: wanted, then begun, then polled until they are over."""

    def __init__(self, tier: StoredTier, planner: Planner, settings: Settings) -> None:
        self._tier = tier
        self._planner = planner
        self._queue = TierQueue(settings.tier_running, settings.tier_waiting)
        self._wanted: dict[str, tuple[Any, str | None]] = {}
        self._running: dict[str, tuple[Any, Lookup]] = {}
        self._ready: dict[str, StoredChunks] = {}
        self._ahead: OrderedDict[Edit, tuple[str, Fetch]] = OrderedDict()
        self._count = 0

    def __bool__(self) -> bool:
        return len(self._queue) > 0

    @property
    def chunk_size(self) -> int:
        """Tokens in one of LMCache's chunks."""
        return self._tier.chunk_size

    # ------------------------------------------------------------------ requests that wait

    @property
    def available(self) -> bool:
        """Whether asking may lead to anything now."""
        return self._tier.available

    def want(self, req: Any, base: str | None) -> None:
        """A request needs its base's record (``base``), or chunks of a known one."""
        self._wanted[req.rid] = (req, base)

    def begin(self, rid: str) -> bool:
        """Start a wanted lookup; whether there is one now."""
        wanted = self._wanted.pop(rid, None)
        if wanted is None:
            return False
        req, base = wanted
        job = Lookup(
            self._tier,
            namespace_of(req),
            base,
            found=lambda answer: self._planner.found_record(req, answer) is not None,
            wanted=lambda: self._parts(req),
        )
        self._running[rid] = (req, job)
        try:
            self._queue.submit(_load(rid), job, Priority.LOAD)
        except Exception as error:
            self._fail(rid, error)
        return rid in self._running

    def poll(self, rid: str) -> bool | None:
        """True when the lookup is over (told once), False while it runs, None when there is none."""
        running = self._running.get(rid)
        if running is None:
            return None
        job = running[1]
        try:
            if not self._queue.poll(_load(rid)):
                return False
        except Exception as error:
            self._fail(rid, error)
            return True
        del self._running[rid]
        if job.chunks is not None:
            self._ready[rid] = job.chunks
        return True

    def take(self, rid: str) -> StoredChunks | None:
        """Chunks that a finished lookup holds locked; the caller releases them."""
        return self._ready.pop(rid, None)

    def cancel(self, rid: str) -> None:
        """The request is over: give back what it still holds."""
        self._wanted.pop(rid, None)
        self._running.pop(rid, None)
        self._queue.cancel(_load(rid))
        ready = self._ready.pop(rid, None)
        if ready is not None:
            ready.release()

    def cancel_all(self) -> None:
        for rid in [*self._wanted, *self._running, *self._ready]:
            self.cancel(rid)
        for edit in list(self._ahead):
            self.settled(edit)

    def _parts(self, req: Any) -> Parts:
        plan = self._planner.plan_of(req)
        wanted = self._planner.wanted_chunks(req, plan, self.chunk_size) if plan is not None else []
        return shared(self._tier, wanted, self._shelf)

    def _shelf(self, name: tuple[BufferId, Any]) -> Shelf | None:
        info = self._planner.info_of(name[0])
        return Shelf(info, name[1]) if info is not None else None

    def _fail(self, rid: str, error: Exception) -> None:
        req, job = self._running.pop(rid)
        job.cancel()
        if not isinstance(error, Fallback):
            log.error("the stored tiers could not be asked for request %s", rid, exc_info=error)
            error = Fallback(FallbackReason.TIER_ERROR, f"{type(error).__name__} while asking; see the log")
        self._planner.found_nothing(req, error)

    # ------------------------------------------------------------------ in the background

    def prefetch(self, edit: Edit, namespace: Namespace, parts: Parts) -> None:
        """An edit was declared: bring to L1 what its request will load, and keep it there until it comes."""
        parts = shared(self._tier, parts, self._shelf)
        if not parts or edit in self._ahead:
            return
        job = Fetch(self._tier, namespace, parts)
        try:
            self._queue.submit(name := self._name("ahead"), job, Priority.PREFETCH)
        except Fallback as why:
            log.debug("nothing is brought ahead: %s", why)
            return
        self._ahead[edit] = name, job
        if len(self._ahead) > _MOST_AHEAD:
            self.settled(next(iter(self._ahead)))

    def settled(self, edit: Edit) -> None:
        """An edit's request is over; nothing needs to be kept ready for it."""
        name, job = self._ahead.pop(edit, ("", None))
        if job is not None and not self._queue.cancel(name):
            job.cancel()

    def invalidate(self, record: BaseRecord, parts: Parts, *, everywhere: bool) -> None:
        """Let chunks go, when there is time."""
        parts = shared(self._tier, parts, self._shelf)
        if not parts:
            return
        job = Invalidation(
            self._tier, record.namespace, parts, everywhere=everywhere, done=self._planner.invalidated
        )
        try:
            self._queue.submit(self._name("invalidate"), job, Priority.INVALIDATE)
        except Fallback as why:
            log.debug("chunks are left to eviction: %s", why)

    def publish(self, record: BaseRecord, infos: Iterable[BufferInfo]) -> None:
        """Make a finished request, and what is new of the buffers in its view, known to other nodes."""
        self._tier.publish(record, infos)

    def advance(self) -> None:
        """Look after what no request waits for; to be called in every step of the scheduler."""
        for name in self._queue.background():
            try:
                self._queue.poll(name)
            except Exception as why:
                # An exception here would end the scheduler.
                log.debug("%s: %s", name, why, exc_info=not isinstance(why, Fallback))
                self._settle(name)
        oldest = next(iter(self._ahead), None)
        if oldest is not None and self._ahead[oldest][1].is_expired():
            self.settled(oldest)

    def _settle(self, name: str) -> None:
        for edit in [edit for edit, (each, _) in self._ahead.items() if each == name]:
            self.settled(edit)

    def credit(self, edit: Edit, chunks: StoredChunks) -> None:
        """What was brought ahead for a request lay where it was brought from."""
        job = self._ahead[edit][1] if edit in self._ahead else None
        if job is None or job.chunks is None:
            return
        brought = {(held.shelf.info.id, held.shelf.pack): held.brought for held in job.chunks.held}
        for held in chunks.held:
            held.brought |= brought.get((held.shelf.info.id, held.shelf.pack), set()) & held.chunks

    def _name(self, what: str) -> str:
        self._count += 1
        return f"{what} {self._count}"


def _load(rid: str) -> str:
    """A request's job; clients choose ids as they like."""
    return f"load {rid}"
