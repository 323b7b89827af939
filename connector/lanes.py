"""Threads that carry out tasks one part after the other, each to its end in bounded time."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

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
        self._ready = threading.Condition()
        self._queue: deque[Part] = deque()
        self._closed = False
        self._busy = 0
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
        return len(self._queue)

    @property
    def busy(self) -> int:
        """Parts being carried out."""
        return self._busy

    def submit(self, parts: list[Part]) -> None:
        """Queue parts; after `close` they end at once."""
        with self._ready:
            if not self._closed:
                self._queue.extend(parts)
                self._ready.notify(len(parts))
                return
        for part in parts:
            part.give_up(Outcome.CLOSED)

    def expire(self) -> int:
        """End the parts that waited past their deadline; how many."""
        with self._ready:
            late = [part for part in self._queue if part.deadline.is_past]
            for part in late:
                self._queue.remove(part)
        return sum(part.give_up(Outcome.TIMEOUT) for part in late)

    def close(self, timeout_s: float) -> bool:
        """End what waits, let what runs end. False if a thread was still busy after the time-out."""
        with self._ready:
            self._closed = True
            left, self._queue = list(self._queue), deque()
            self._ready.notify_all()
        for part in left:
            part.give_up(Outcome.CLOSED)
        deadline = Deadline(timeout_s)
        for thread in self._threads:
            thread.join(max(0.0, deadline.left))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while True:
            with self._ready:
                while not self._queue and not self._closed:
                    self._ready.wait()
                if self._closed:
                    return
                part = self._queue.popleft()
                self._busy += 1
            try:
                part.carry_out()
            except Exception:
                # `end` of the part failed: the thread must live on for the others.
                logger.exception("the end of a part could not be told")
            finally:
                with self._ready:
                    self._busy -= 1
            del part  # its views must not outlive the task
