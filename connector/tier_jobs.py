"""What is asked of the stored tiers, as jobs of the :class:`.tier_queue.TierQueue`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from leyline_lmcache.ranges import Range
from leyline_lmcache.reasons import Fallback, FallbackReason

from . import wire
from .packs import Shelf
from .ranks import Call, M
from .records import Namespace
from .stored import Held, StoredChunks, StoredTier, digest

Parts = Sequence[tuple[Shelf, Sequence[Range]]]
"""Chunks by shelf, as index ranges."""

_PIN = 4.0
"""Chunks stay locked for this many time-outs at most, should nobody come for them."""


class Asking:
    """Base of jobs: RPCs one after another, with one deadline for all of them."""

    def __init__(self, tier: StoredTier) -> None:
        self._tier = tier
        self._deadline = time.monotonic() + tier.timeout_s
        self._call: Call | None = None

    def is_late(self) -> bool:
        """See :class:`.tier_queue.Job`."""
        return self._tier.ranks.is_past(self._deadline)

    def _ask(self, method: str, message: wire.Message) -> None:
        self._call = self._tier.call(method, message)

    def _answered(self, kind: type[M]) -> M | None:
        """The answer to what was asked last, once it is there. Raises ``Fallback``."""
        assert self._call is not None
        try:
            if not self._call.ready(self._deadline):
                return None
            call, self._call = self._call, None
            return call.answer(kind)
        except TimeoutError:
            detail = f"lmcache did not answer within {self._tier.timeout_s} s"
            raise Fallback(FallbackReason.TIER_TIMEOUT, detail) from None
        except (OSError, wire.WireError) as error:
            raise Fallback(FallbackReason.TIER_ERROR, str(error)) from error


class Fetch(Asking):
    """Bring chunks to L1 and lock them."""

    def __init__(self, tier: StoredTier, namespace: Namespace, parts: Parts) -> None:
        super().__init__(tier)
        self._namespace = namespace
        self._parts = parts
        self._job: str | None = None
        self._accepted = False
        self.chunks: StoredChunks | None = None
        """What came, once it is over: locked until it is released."""

    def start(self) -> None:
        self._job = uuid.uuid4().hex
        message = self._tier.fetch_message(self._job, self._namespace, self._parts, _PIN)
        self._ask(wire.FETCH, message)

    def advance(self) -> bool:
        assert self._job is not None
        if not self._accepted:
            if self._answered(wire.Done) is None:
                return False
            self._accepted = True
        else:
            answer = self._answered(wire.Fetched)
            if answer is None:
                return False
            if answer.done:
                self.chunks = self._chunks(answer, self._job)
                return True
        self._ask(wire.POLL, wire.Job(job=self._job))
        return False

    def is_expired(self) -> bool:
        """Whether the server has let its locks go, or is about to."""
        return self._tier.ranks.is_past(self._deadline + (_PIN - 2) * self._tier.timeout_s)

    def cancel(self) -> None:
        """Give back what was locked, or will be."""
        if self.chunks is not None:
            self.chunks.release()
        elif self._job is not None:
            self._tier.send(wire.RELEASE, wire.Job(job=self._job))
        self._job = None

    def _chunks(self, answer: wire.Fetched, job: str) -> StoredChunks:
        held = []
        for (shelf, _), hits, brought in zip(self._parts, answer.hits, answer.brought, strict=True):
            salt = self._tier.salt(self._namespace, shelf.info.lineage)
            held.append(Held(shelf, salt, set(hits), set(brought)))
        return StoredChunks(self._tier, job, held)


class Lookup(Asking):
    """What one request waits for: its base's record, if that is not known, then chunks.

    Args:
        base: id of the response, when its record is not known here.
        found: told the record; whether chunks may be needed. May raise ``Fallback``.
        wanted: chunks that are needed.
    """

    def __init__(
        self,
        tier: StoredTier,
        namespace: Namespace,
        base: str | None,
        found: Callable[[wire.Resolved], bool],
        wanted: Callable[[], Parts],
    ) -> None:
        super().__init__(tier)
        self._namespace = namespace
        self._base = base
        self._found = found
        self._wanted = wanted
        self._fetch: Fetch | None = None
        self._is_over = False

    @property
    def chunks(self) -> StoredChunks | None:
        """What came, once it is over: locked until it is released."""
        return self._fetch.chunks if self._fetch is not None else None

    def start(self) -> None:
        if self._base is None:
            self._begin_fetch()
        else:
            namespace = digest(self._namespace)
            self._ask(
                wire.RESOLVE,
                wire.Resolve(response=self._base, namespace=namespace, model=self._tier.model),
            )

    def advance(self) -> bool:
        if self._is_over:
            return True
        if self._fetch is not None:
            return self._fetch.advance()
        answer = self._answered(wire.Resolved)
        if answer is None:
            return False
        if not self._found(answer):
            return True
        self._begin_fetch()
        return self._is_over

    def cancel(self) -> None:
        if self._fetch is not None:
            self._fetch.cancel()

    def _begin_fetch(self) -> None:
        parts = self._wanted()
        if not parts:
            self._is_over = True
            return
        self._fetch = Fetch(self._tier, self._namespace, parts)
        self._fetch.start()


class Invalidation(Asking):
    """Let chunks go that no view refers to any more.

    Args:
        everywhere: from the shared store too, not only from this node's memory.
        done: told what was deleted.
    """

    def __init__(
        self,
        tier: StoredTier,
        namespace: Namespace,
        parts: Parts,
        *,
        everywhere: bool,
        done: Callable[[wire.Invalidated], None],
    ) -> None:
        super().__init__(tier)
        self._message = tier.invalidate_message(namespace, parts, everywhere)
        self._done = done

    def start(self) -> None:
        # It may have waited for long; nobody waits for it.
        self._deadline = time.monotonic() + self._tier.timeout_s
        self._ask(wire.INVALIDATE, self._message)

    def is_late(self) -> bool:
        return False

    def advance(self) -> bool:
        answer = self._answered(wire.Invalidated)
        if answer is None:
            return False
        self._done(answer)
        return True

    def cancel(self) -> None:
        """What was submitted is done all the same."""


def shared(tier: StoredTier, parts: Parts, shelf_of: Callable[[Any], Shelf | None]) -> Parts:
    """The leading rank's parts, on every rank: each names them by records of its own."""
    if tier.ranks.count == 1:
        return parts
    named = tier.ranks.tell([((shelf.info.id, shelf.pack), list(chunks)) for shelf, chunks in parts])
    found = [(shelf_of(name), chunks) for name, chunks in named]
    return [(shelf, chunks) for shelf, chunks in found if shelf is not None]
