"""Real servers, started once per run when the first test needs them, stopped after the last."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from leyline_lmcache.stack import Stack, StackSpec

# A stack takes about 2 GB: SGLang 1.5, lmcache server 0.5.
_MOST_ALIVE = int(os.environ.get("LEYLINE_TEST_STACKS", "4"))


class _Start:
    """A stack that is being started by a thread of its own."""

    def __init__(self, spec: StackSpec, directory: Path) -> None:
        self.stack = Stack(spec, directory=directory)
        self._error: BaseException | None = None
        # A daemon: an interrupted run must not wait for it. The servers go with the process in any case.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.stack.start()
        except BaseException as error:
            self._error = error

    def result(self) -> Stack:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.stack


class StackPool:
    """At most a handful of running stacks, by name."""

    def __init__(self, specs: Mapping[str, StackSpec], directory: Path) -> None:
        self._specs = specs
        self._directory = directory
        self._starts: dict[str, _Start] = {}  # least recently used first
        self._stops: list[threading.Thread] = []
        self._in_use: set[str] = set()
        self._left: Counter[str] = Counter()
        self._order: list[str] = []

    # -- what the run will need ----------------------------------------------------------------

    def plan(self, needs: Iterable[Iterable[str]]) -> None:
        """Take note of the stacks of every test, in the order in which the tests will run."""
        for names in needs:
            for name in names:
                self._left[name] += 1
                if name not in self._order:
                    self._order.append(name)

    def begin_test(self, names: Iterable[str]) -> None:
        """Keep these stacks while a test runs; prepare the one that is needed next."""
        self._in_use = set(names)
        self._start_ahead()

    def end_test(self, names: Iterable[str]) -> None:
        """Stop the stacks that no later test needs."""
        self._in_use = set()
        for name in names:
            self._left[name] -= 1
            if self._left[name] <= 0:
                self._stop(name)

    def _start_ahead(self) -> None:
        """Start the next stack while the tests before it run: starting is mostly waiting on one core."""
        waiting = [name for name in self._order if self._left[name] > 0 and name not in self._starts]
        if waiting and len(self._starts) < min(2, _MOST_ALIVE):
            self._begin(waiting[0])

    # -- stacks --------------------------------------------------------------------------------

    def get(self, name: str) -> Stack:
        """The running stack of that name."""
        self._in_use.add(name)
        if name not in self._starts:
            self._begin(name)
        start = self._starts.pop(name)
        self._starts[name] = start
        return start.result()

    def running(self, names: Iterable[str]) -> list[Stack]:
        """Those of the named stacks that were started."""
        return [self._starts[name].stack for name in names if name in self._starts]

    def _begin(self, name: str) -> None:
        for old in [other for other in self._starts if other not in self._in_use]:
            if len(self._starts) < _MOST_ALIVE:
                break
            self._stop(old)
        self._starts[name] = _Start(self._specs[name], self._directory / name)

    def _stop(self, name: str) -> None:
        start = self._starts.pop(name, None)
        if start is not None:
            thread = threading.Thread(target=start.stack.stop)
            thread.start()
            self._stops.append(thread)

    def stop_all(self) -> None:
        """Stop everything and wait for it."""
        for name in list(self._starts):
            self._stop(name)
        for thread in self._stops:
            thread.join()
        self._stops = []
