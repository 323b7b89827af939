"""A KV store behind a fence."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from .fence import Fence
from .redis.keys import KVKey
from .redis.outcome import Outcome
from .redis.store import KVItem, KVStore, Page
from .redis.wire import Deadline

logger = logging.getLogger(__name__)

# A write of unknown end may still sit in the buffer of a Redis that hangs. Deletions are repeated until two
# checks, this far apart, find nothing: by then a Redis that runs has read what it had.
_SETTLE_S = 0.25
_CLEAN_CHECKS = 2
# How long such a write is remembered after it failed.
_UNCERTAIN_S = 120.0
_MOST_UNCERTAIN = 65536


class FencedStore:
    """A `KVStore` that honours a `Fence`.

    What a barrier covers is not stored, found or loaded. A store that meets a barrier on its way deletes
    what it wrote; if Redis cannot be asked, the deletion stays pending, and `flush` carries it out later.

    Args:
        store: the store behind; closed with this one.
        fence: shared with whoever raises barriers.
        clock: seconds, monotonic.
    """

    def __init__(self, store: KVStore, fence: Fence, clock: Callable[[], float] = time.monotonic) -> None:
        self.inner = store
        self.fence = fence
        self._clock = clock
        self._lock = threading.Lock()
        self._pending: dict[KVKey, tuple[int, float]] = {}
        self._uncertain: dict[KVKey, float] = {}

    @property
    def pending(self) -> frozenset[KVKey]:
        """Keys that must go and are not known to be gone."""
        return frozenset(self._pending)

    def store(self, items: Sequence[KVItem], deadline: Deadline | None = None) -> list[Outcome]:
        """See `KVStore`."""
        with self.fence.storing(key for key, _ in items):
            outcomes = self._around(
                [key for key, _ in items], lambda free: self.inner.store([items[i] for i in free], deadline)
            )
            written = {key: end for (key, _), end in zip(items, outcomes, strict=True)}
            late = [
                key
                for key, end in written.items()
                if end is not Outcome.FENCED and end is not Outcome.BREAKER_OPEN and self.fence.covers(key)
            ]
            self._note_uncertain(written)
            if late:
                self._take_back(late, written, deadline)
            return [Outcome.FENCED if self.fence.covers(key) else written[key] for key, _ in items]

    def load(self, items: Sequence[KVItem], deadline: Deadline | None = None) -> list[Outcome]:
        """See `KVStore`. A barrier raised while the value was under way makes it a miss."""
        keys = [key for key, _ in items]
        outcomes = self._around(keys, lambda free: self.inner.load([items[i] for i in free], deadline))
        return self._hidden(keys, outcomes)

    def lookup(self, keys: Sequence[KVKey], deadline: Deadline | None = None) -> list[Outcome]:
        """See `KVStore`."""
        outcomes = self._around(keys, lambda free: self.inner.lookup([keys[i] for i in free], deadline))
        return self._hidden(keys, outcomes)

    def delete(self, keys: Sequence[KVKey], deadline: Deadline | None = None) -> list[Outcome]:
        """See `KVStore`."""
        return self.inner.delete(keys, deadline)

    def verify(self, keys: Sequence[KVKey], deadline: Deadline | None = None) -> list[Outcome]:
        """See `KVStore`. Sees what is behind the fence too."""
        return self.inner.verify(keys, deadline)

    def scan(self, model: str | None = None, limit: int = 500, cursor: str | None = None) -> Page:
        """See `KVStore`. Sees what is behind the fence too."""
        return self.inner.scan(model, limit, cursor)

    def status(self) -> dict[str, Any]:
        """See `KVStore`."""
        return {**self.inner.status(), "barriers": len(self.fence), "pending_deletes": len(self._pending)}

    def close(self) -> None:
        """See `KVStore`."""
        self.inner.close()
        if self._pending:
            logger.error("%d deletions for a FORGET are still pending", len(self._pending))

    def flush(self) -> int:
        """Carry out what is pending and due. The number still pending."""
        if not self._pending and not self._uncertain:
            return 0
        now = self._clock()
        with self._lock:
            for key, since in list(self._uncertain.items()):
                if self.fence.covers(key):
                    self._pending.setdefault(key, (0, now))
                    del self._uncertain[key]
                elif now - since > _UNCERTAIN_S:
                    del self._uncertain[key]
            due = [key for key, (_, at) in self._pending.items() if at <= now]
        if due:
            self._note_deleted(due, self.inner.delete(due))
        return len(self._pending)

    # -- parts ---------------------------------------------------------------------------------

    def _around(self, keys: Sequence[KVKey], ask: Callable[[list[int]], list[Outcome]]) -> list[Outcome]:
        """Ask the inner store about the keys that no barrier covers."""
        if not len(self.fence):
            return ask(list(range(len(keys))))
        free = [i for i, key in enumerate(keys) if not self.fence.covers(key)]
        outcomes = [Outcome.FENCED] * len(keys)
        if free:
            for i, outcome in zip(free, ask(free), strict=True):
                outcomes[i] = outcome
        return outcomes

    def _hidden(self, keys: Sequence[KVKey], outcomes: list[Outcome]) -> list[Outcome]:
        if not len(self.fence):
            return outcomes
        return [
            Outcome.FENCED if self.fence.covers(key) else outcome
            for key, outcome in zip(keys, outcomes, strict=True)
        ]

    def _note_uncertain(self, written: dict[KVKey, Outcome]) -> None:
        unknown = [key for key, end in written.items() if end in (Outcome.TIMEOUT, Outcome.UNREACHABLE)]
        if unknown:
            now = self._clock()
            with self._lock:
                for key in unknown:
                    if len(self._uncertain) >= _MOST_UNCERTAIN:
                        del self._uncertain[next(iter(self._uncertain))]
                    self._uncertain[key] = now

    def _take_back(self, keys: list[KVKey], written: dict[KVKey, Outcome], deadline: Deadline | None) -> None:
        """Delete what this store wrote behind a barrier."""
        ends = self.inner.delete(keys, deadline)
        open_ends = [
            (key, end)
            for key, end in zip(keys, ends, strict=True)
            # A write that was acknowledged is undone by one deletion; one of unknown end may come later.
            if written[key] is not Outcome.OK or end not in (Outcome.OK, Outcome.MISSING)
        ]
        with self._lock:
            for key, _ in open_ends:
                self._pending[key] = (0, self._clock())
                self._uncertain.pop(key, None)

    def _note_deleted(self, keys: Sequence[KVKey], ends: Sequence[Outcome]) -> None:
        due = self._clock() + _SETTLE_S
        with self._lock:
            for key, end in zip(keys, ends, strict=True):
                clean = self._pending.get(key, (0, 0.0))[0]
                if end is Outcome.MISSING and clean + 1 >= _CLEAN_CHECKS:
                    self._pending.pop(key, None)
                elif key in self._pending:
                    self._pending[key] = (clean + 1 if end is Outcome.MISSING else 0, due)
