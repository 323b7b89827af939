"""When to stop asking a node that does not answer, and when to ask it again."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from .outcome import Outcome

# A node that fails again this soon after it came back has not really been well in between.
_PROBATION_S = 10.0


class Breaker:
    """Opens after failures in a row; says when the next probe is due.

    While it is open nobody but the prober talks to the node, so a node that hangs costs one time-out, not one
    per request.

    Args:
        threshold: failures in a row that open it.
        base_s, cap_s: wait before a probe; doubles with each failed one, with jitter.
        clock: seconds, monotonic.
    """

    def __init__(
        self, threshold: int, base_s: float, cap_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._threshold = threshold
        self._base_s = base_s
        self._cap_s = cap_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._level = 0
        self._open = False
        self._due = 0.0
        self._closed_at = -_PROBATION_S
        self.opened = 0
        """How often it opened."""

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def probe_due(self) -> float:
        """When to probe, on the clock; only meaningful while open."""
        return self._due

    def failed(self) -> bool:
        """Note a failure of the node. True if this opened the breaker."""
        with self._lock:
            self._failures += 1
            if self._open or self._failures < self._threshold:
                return False
            if self._clock() - self._closed_at > _PROBATION_S:
                self._level = 0
            self._open = True
            self.opened += 1
            self._schedule()
            return True

    def succeeded(self) -> None:
        """Note an answer of the node; an open breaker stays open, only a probe closes it."""
        if self._failures:  # mostly not, and then there is nothing to lock for
            with self._lock:
                if not self._open:
                    self._failures = 0

    def probe_failed(self) -> None:
        """The probe had no answer either: wait longer."""
        with self._lock:
            if self._open:
                self._schedule()

    def close(self) -> bool:
        """The probe was answered. True if the breaker was open."""
        with self._lock:
            was_open, self._open = self._open, False
            self._failures = 0
            self._closed_at = self._clock()
            return was_open

    def _schedule(self) -> None:
        wait = min(self._cap_s, self._base_s * 2**self._level)
        self._level = min(self._level + 1, 32)
        # Nodes that lost the same Redis at the same moment come back at different ones.
        self._due = self._clock() + wait * random.uniform(0.75, 1.0)


class WriteGate:
    """Holds writes back after Redis refused one (full, read-only), while reads go on.

    A refusal costs the transfer of the whole value, so after one the next write is tried only after a
    wait that doubles while the refusals go on.
    """

    def __init__(self, base_s: float, cap_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._base_s = base_s
        self._cap_s = cap_s
        self._clock = clock
        self._lock = threading.Lock()
        self._until = 0.0
        self._level = 0
        self.reason = Outcome.READ_ONLY
        """Why the last write was refused."""

    def admits(self) -> bool:
        """True if a write may be tried now; while refusals go on, for one caller at a time."""
        if not self._level:
            return True
        with self._lock:
            now = self._clock()
            if now < self._until:
                return False
            self._until = now + self._base_s  # the caller's trial; others wait for its end
            return True

    def refused(self, reason: Outcome) -> bool:
        """Redis refused a write. True if it is the first of a row."""
        with self._lock:
            self.reason = reason
            first = not self._level
            self._until = self._clock() + min(self._cap_s, self._base_s * 2**self._level)
            self._level = min(self._level + 1, 32)
            return first

    def accepted(self) -> bool:
        """Redis took a write. True if it had refused before."""
        if not self._level:
            return False
        with self._lock:
            was, self._level = self._level, 0
            return bool(was)
