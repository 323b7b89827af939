"""Work for the stored tiers, in order of what waits for it.

A request that waits for KV goes first, then what an edit that was only just declared will need, then what
can be let go. Both the jobs that run and those that wait are bounded: when there is no room, a request is
prefilled (back-pressure), and the rest is left out. Nothing here waits; jobs are advanced by polling.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from enum import IntEnum
from typing import Protocol

from leyline_lmcache.reasons import Fallback, FallbackReason


class Priority(IntEnum):
    """Smaller goes first."""

    LOAD = 0
    """A request waits for it."""
    PREFETCH = 1
    """An edit was declared; its request will come."""
    INVALIDATE = 2
    """Nobody waits."""


class Job(Protocol):
    """Something a tier does. Under tensor parallelism every rank makes the same calls in the same order."""

    def start(self) -> None:
        """Submit it. May raise ``Fallback``."""

    def advance(self) -> bool:
        """Look how far it is; whether it is over. May raise ``Fallback``."""

    def is_late(self) -> bool:
        """Whether its deadline has passed while it waited."""

    def cancel(self) -> None:
        """Give everything back, started or not."""


class TierQueue:
    """Jobs by name.

    Args:
        running: jobs under way at a time; prefetches take at most half of them, so that a load finds room.
        waiting: jobs of each priority that wait.
    """

    def __init__(self, running: int, waiting: int) -> None:
        self._most_running = running
        self._most_waiting = waiting
        self._running: dict[str, tuple[Priority, Job]] = {}
        self._waiting: dict[Priority, OrderedDict[str, Job]] = {each: OrderedDict() for each in Priority}
        self.refused: Counter[Priority] = Counter()
        """Jobs there was no room for, by priority."""

    def __len__(self) -> int:
        return len(self._running) + sum(map(len, self._waiting.values()))

    def depth(self, priority: Priority) -> int:
        """Jobs of a priority that wait."""
        return len(self._waiting[priority])

    def submit(self, name: str, job: Job, priority: Priority) -> None:
        """Start a job, or let it wait for its turn.

        Raises:
            Fallback: ``tier_timeout`` when too many wait already; whatever starting it raises.
        """
        waiting = self._waiting[priority]
        if len(waiting) >= self._most_waiting:
            self.refused[priority] += 1
            raise Fallback(
                FallbackReason.TIER_TIMEOUT,
                f"{len(waiting)} requests wait for the stored tiers already (tier_waiting)",
            )
        if self._may_run(priority) and not self._before(priority):
            self._start(name, job, priority)
        else:
            waiting[name] = job

    def poll(self, name: str) -> bool | None:
        """True when a job is over (told once), False while it is not, None when there is none.

        Raises:
            Fallback: it failed, or its deadline passed while it waited; it is gone then.
        """
        running = self._running.get(name)
        if running is not None:
            try:
                over = running[1].advance()
            except BaseException:
                self._running.pop(name, None)
                self._next()
                raise
            if over:
                self._running.pop(name, None)
                self._next()
            return over
        for waiting in self._waiting.values():
            job = waiting.get(name)
            if job is not None:
                if job.is_late():
                    del waiting[name]
                    raise Fallback(
                        FallbackReason.TIER_TIMEOUT, "the stored tiers had too much to do (tier_running)"
                    )
                return False
        return None

    def cancel(self, name: str) -> bool:
        """Drop a job; whether there was one."""
        job = next((jobs.pop(name) for jobs in self._waiting.values() if name in jobs), None)
        if job is None:
            _, job = self._running.pop(name, (None, None))
        if job is None:
            return False
        job.cancel()
        self._next()
        return True

    def background(self) -> list[str]:
        """Names of running jobs that no request polls."""
        return [name for name, (priority, _) in self._running.items() if priority is not Priority.LOAD]

    def names(self) -> list[str]:
        """Of all jobs."""
        return [*self._running, *(name for waiting in self._waiting.values() for name in waiting)]

    def _may_run(self, priority: Priority) -> bool:
        room = self._most_running if priority is Priority.LOAD else max(1, self._most_running // 2)
        return len(self._running) < room

    def _before(self, priority: Priority) -> bool:
        """Whether others of this or a higher priority wait."""
        return any(self._waiting[each] for each in Priority if each <= priority)

    def _start(self, name: str, job: Job, priority: Priority) -> None:
        self._running[name] = priority, job
        try:
            job.start()
        except BaseException:
            self._running.pop(name, None)
            raise

    def _next(self) -> None:
        """Start what there is room for now."""
        for priority in Priority:
            waiting = self._waiting[priority]
            while waiting and self._may_run(priority):
                name, job = waiting.popitem(last=False)
                # A job that cannot be started says so when it is polled.
                self._running[name] = priority, _Starting(job)


class _Starting:
    """A job whose turn came while another one was polled: started at its own next poll."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._started = False

    def start(self) -> None:
        raise AssertionError("was started")

    def advance(self) -> bool:
        if not self._started:
            self._started = True
            self._job.start()
            return False
        return self._job.advance()

    def is_late(self) -> bool:
        return False

    def cancel(self) -> None:
        self._job.cancel()
