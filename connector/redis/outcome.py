"""How an operation on the Redis tier ended: one name each, and counters by name.

A read that does not end in ``ok`` is a miss; the engine prefills. A write that does not end in ``ok`` is a
chunk that is not cached. Neither is ever an exception for whoever asked for KV.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """Result of one operation on one key."""

    OK = "ok"
    MISSING = "missing"
    """No such key: never stored, expired, evicted, deleted, or Redis came back empty."""
    SHORT = "short"
    """The value is not as long as its own header says."""
    FOREIGN = "foreign"
    """The value is not what was asked for: no header, another schema version, another key's, another
    model's, or of
    another length than the block has."""
    CORRUPT = "corrupt"
    """The bytes do not match their checksum."""
    FENCED = "fenced"
    """A FORGET covers the key."""
    BREAKER_OPEN = "breaker_open"
    """The node failed a moment ago and was not asked."""
    TIMEOUT = "timeout"
    """Redis did not answer in time, or the task waited too long for its turn."""
    UNREACHABLE = "unreachable"
    """No connection, or it broke."""
    OUT_OF_MEMORY = "out_of_memory"
    """Redis refuses writes: ``maxmemory`` is reached and nothing may be evicted."""
    READ_ONLY = "read_only"
    """Redis refuses writes: a replica, too few replicas, or its disk fails."""
    OVER_CAPACITY = "over_capacity"
    """The configured capacity is used up."""
    TOO_LARGE = "too_large"
    """Longer than Redis takes in one value."""
    DENIED = "denied"
    """Wrong credentials, or the ACL user may not do this."""
    ERROR = "error"
    """Redis answered with another error; the log has its text once."""
    CLOSED = "closed"
    """The store was closed meanwhile."""

    @property
    def is_outage(self) -> bool:
        """True if the node could not be asked; nothing is known about the key."""
        return self in _OUTAGES

    @property
    def is_refusal(self) -> bool:
        """True if Redis is there but takes no writes now."""
        return self in (Outcome.OUT_OF_MEMORY, Outcome.READ_ONLY)

    @property
    def is_damaged(self) -> bool:
        """True if there is a value under the key that cannot be used."""
        return self in (Outcome.SHORT, Outcome.FOREIGN, Outcome.CORRUPT)


_OUTAGES = frozenset(
    {Outcome.BREAKER_OPEN, Outcome.TIMEOUT, Outcome.UNREACHABLE, Outcome.DENIED, Outcome.CLOSED}
)


class StorageError(Exception):
    """A record could not be read or written.

    Attributes:
        outcome: the name used in metrics.
        detail: what exactly, and the way out. Never a secret, a token id or a value.
    """

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(outcome, detail)
        self.outcome = outcome
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.outcome.value}: {self.detail}"


class Counters:
    """Operations by name and outcome, bytes and seconds by name. Safe for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcomes: dict[str, dict[str, int]] = {}
        self._bytes: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._calls: dict[str, int] = {}

    def add(self, operation: str, outcomes: Iterable[Outcome], size: int = 0, seconds: float = 0.0) -> None:
        """Count one call.

        Args:
            operation: "store", "load", ...
            outcomes: of each key.
            size: payload bytes moved.
            seconds: the call took.
        """
        with self._lock:
            counts = self._outcomes.setdefault(operation, {})
            for outcome in outcomes:
                counts[outcome.value] = counts.get(outcome.value, 0) + 1
            self._bytes[operation] = self._bytes.get(operation, 0) + size
            self._seconds[operation] = self._seconds.get(operation, 0.0) + seconds
            self._calls[operation] = self._calls.get(operation, 0) + 1

    def count(self, operation: str, outcome: Outcome) -> int:
        """Keys of an operation that ended so."""
        with self._lock:
            return self._outcomes.get(operation, {}).get(outcome.value, 0)

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """By operation: calls, keys by outcome, bytes, seconds. A copy."""
        with self._lock:
            return {
                operation: {
                    "calls": self._calls[operation],
                    "keys": dict(counts),
                    "bytes": self._bytes[operation],
                    "seconds": round(self._seconds[operation], 6),
                }
                for operation, counts in self._outcomes.items()
            }
