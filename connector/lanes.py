"""Threads that carry out tasks one part after the other, each to its end in bounded time."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from .redis.outcome import Outcome
from .redis.wire import Deadline

logger = logging.getLogger(__name__)


class Part:
    """A part of a task. It ends exactly once, however it ends.

    Args:
        count: keys in it.
        deadline: of the task.
        run: does it; one outcome for each key.
        end: told the outcomes.
    """

    __slots__ = ("_claimed", "_end", "_lock", "_run", "count", "deadline")

    def __init__(
        self,
        count: int,
        deadline: Deadline,
        run: Callable[[Deadline], list[Outcome]],
        end: Callable[[list[Outcome]], None],
    ) -> None:
        self.count = count
        self.deadline = deadline
        self._run = run
        self._end = end
        self._claimed = False
        self._lock = threading.Lock()

    @property
    def is_claimed(self) -> bool:
        """True once it runs or has ended."""
        return self._claimed

    def carry_out(self) -> None:
        """Run it, unless it has already ended."""
        if not self._claim():
            return
        outcomes = [Outcome.ERROR] * self.count
        try:
            if self.deadline.is_past:
                outcomes = [Outcome.TIMEOUT] * self.count
            else:
                found = self._run(self.deadline)
                if len(found) != self.count:
                    raise ValueError(f"expected {self.count} outcomes, got {len(found)}")
                outcomes = found
        except Exception:
            logger.exception("a part of %d keys failed", self.count)
        finally:
            self._end(outcomes)

    def give_up(self, outcome: Outcome) -> bool:
        """End it without running it. False if it runs or has ended."""
        if not self._claim():
            return False
        self._end([outcome] * self.count)
        return True

    def _claim(self) -> bool:
        with self._lock:
            claimed, self._claimed = self._claimed, True
            return not claimed


class Lanes:
    """A queue of parts and the threads that work on it.

    Args:
        name: of the threads.
        count: how many.
    """

    def __init__(self, name: str, count: int) -> None:
        # Its wake-up is one step in C; a Condition's takes several in Python, on every task's way.
        self._queue: SimpleQueue[Part | None] = SimpleQueue()
        # The same parts, to find those that wait too long; what has ended is dropped from the left.
        self._waiting: deque[Part] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def count(self) -> int:
        return len(self._threads)

    @property
    def is_alive(self) -> bool:
        return not self._closed and all(thread.is_alive() for thread in self._threads)

    @property
    def waiting(self) -> int:
        """Parts in the queue."""
        return sum(not part.is_claimed for part in list(self._waiting))

    def submit(self, parts: list[Part]) -> None:
        """Queue parts; after `close` they end at once."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._waiting.extend(parts)
                for part in parts:
                    self._queue.put(part)
        if closed:
            for part in parts:
                part.give_up(Outcome.CLOSED)

    def expire(self) -> int:
        """End the parts that waited past their deadline; how many."""
        return sum(
            part.give_up(Outcome.TIMEOUT)
            for part in list(self._waiting)
            if not part.is_claimed and part.deadline.is_past
        )

    def close(self, timeout_s: float) -> bool:
        """End what waits, let what runs end. False if a thread was still busy after the time-out."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._queue.put(None)
        for part in list(self._waiting):
            part.give_up(Outcome.CLOSED)
        deadline = Deadline(timeout_s)
        for thread in self._threads:
            thread.join(max(0.0, deadline.left))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (part := self._queue.get()) is not None:
            try:
                part.carry_out()
            except Exception:
                # `end` of the part failed: the thread must live on for the others.
                logger.exception("the end of a part could not be told")
            part = None  # its views must not outlive the task
            with self._lock:
                while self._waiting and self._waiting[0].is_claimed:
                    self._waiting.popleft()
