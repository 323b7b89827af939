"""The fence: what a FORGET covers can neither be stored nor found, from before its deletion begins.

One fence belongs to one process and is shared by all that could bring erased KV back there: stores and
lookups of the L2 adapter, and the server module. Deleting alone cannot do it, since a store that was
under way writes after the deletion; so the fence comes first, and the store looks at it again once it has
written.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from .redis.keys import KVKey


@dataclass(frozen=True, slots=True)
class Barrier:
    """One raised fence.

    Attributes:
        keys: blocks it covers.
        salts: salts it covers wholly, for lineages that are erased as a whole.
        expires: when it lowers itself, on the clock; None: when somebody lowers it.
    """

    keys: frozenset[KVKey]
    salts: frozenset[str]
    expires: float | None

    def covers(self, key: KVKey) -> bool:
        return key in self.keys or key.salt in self.salts


class Fence:
    """Barriers by name, and the stores under way. Safe for many threads.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._barriers: dict[str, Barrier] = {}
        # How many barriers cover each; so that a look costs the same however many there are.
        self._keys: Counter[KVKey] = Counter()
        self._salts: Counter[str] = Counter()
        self._next_expiry = float("inf")
        self._flights: dict[int, frozenset[KVKey]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._barriers)

    def raise_barrier(
        self, name: str, keys: Iterable[KVKey] = (), salts: Iterable[str] = (), ttl: float | None = None
    ) -> None:
        """Cover keys and salts under a name; what the name covered before stays covered.

        Args:
            name: of the FORGET, for `lower`.
            keys: blocks.
            salts: whole salts.
            ttl: seconds after which it lowers itself.
        """
        with self._changed:
            old = self._remove(name)
            expires = None if ttl is None else self._clock() + ttl
            new = Barrier(
                frozenset(keys) | (old.keys if old else frozenset()),
                frozenset(salts) | (old.salts if old else frozenset()),
                expires,
            )
            self._barriers[name] = new
            self._keys.update(new.keys)
            self._salts.update(new.salts)
            if expires is not None:
                self._next_expiry = min(self._next_expiry, expires)

    def lower(self, name: str) -> bool:
        """End a barrier. False if there was none of that name."""
        with self._changed:
            return self._remove(name) is not None

    def covers(self, key: KVKey) -> bool:
        """True if any barrier covers the key."""
        if not self._barriers:  # mostly; and then no lock
            return False
        with self._changed:
            if self._clock() >= self._next_expiry:
                self._drop_expired()
            return key in self._keys or key.salt in self._salts

    def covered(self, keys: Collection[KVKey]) -> set[KVKey]:
        """Those of `keys` that some barrier covers."""
        return {key for key in keys if self.covers(key)} if self._barriers else set()

    @contextlib.contextmanager
    def storing(self, keys: Iterable[KVKey]) -> Iterator[None]:
        """While these keys are being written. Look at `covers` only inside, before and after writing."""
        with self._changed:
            number = next(self._numbers)
            self._flights[number] = frozenset(keys)
        try:
            yield
        finally:
            with self._changed:
                del self._flights[number]
                self._changed.notify_all()

    def wait_for_stores(self, name: str, timeout_s: float) -> bool:
        """Wait until no store that began before the barrier can write what it covers.

        Later stores see the barrier themselves. A deletion after this has the last word.

        Returns:
            False if some were still under way after the time-out.
        """
        with self._changed:
            barrier = self._barriers.get(name)
            if barrier is None:
                return True
            begun = {
                number for number, keys in self._flights.items() if any(barrier.covers(key) for key in keys)
            }
            return self._changed.wait_for(lambda: not begun & self._flights.keys(), timeout_s)

    def _remove(self, name: str) -> Barrier | None:
        barrier = self._barriers.pop(name, None)
        if barrier is not None:
            # Counter's minus keeps what is still covered by another.
            self._keys -= Counter(barrier.keys)
            self._salts -= Counter(barrier.salts)
        return barrier

    def _drop_expired(self) -> None:
        now = self._clock()
        times = {name: barrier.expires for name, barrier in self._barriers.items()}
        for name, expires in times.items():
            if expires is not None and expires <= now:
                self._remove(name)
        left = [b.expires for b in self._barriers.values() if b.expires is not None]
        self._next_expiry = min(left, default=float("inf"))
