"""A store in memory to which things happen: a stand-in for Redis in every state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from leyline_lmcache.connector.redis import KVKey, MemoryKVStore, Outcome
from leyline_lmcache.connector.redis.store import KVItem


class Twin:
    """A `KVStore` whose test says what happens.

    Attributes:
        before, after: called with the operation's name.
        fail: the outcome of an operation that does not happen; None: it does.
        late: stores that timed out and lie in the server's buffer; see `catch_up`.
    """

    def __init__(self) -> None:
        self.memory = MemoryKVStore()
        self.before: Callable[[str], None] = lambda operation: None
        self.after: Callable[[str], None] = lambda operation: None
        self.fail: Callable[[str], Outcome | None] = lambda operation: None
        self.late: list[list[KVItem]] = []

    def _do(self, operation: str, count: int, call: Callable[[], list[Outcome]]) -> list[Outcome]:
        self.before(operation)
        failure = self.fail(operation)
        outcomes = [failure] * count if failure is not None else call()
        self.after(operation)
        return outcomes

    def store(self, items: Sequence[KVItem], deadline: object = None) -> list[Outcome]:
        if self.fail("store") is Outcome.TIMEOUT:
            # It sits in the buffer of a server that hangs.
            self.late.append([(key, memoryview(bytes(view))) for key, view in items])
        return self._do("store", len(items), lambda: self.memory.store(items))

    def catch_up(self) -> None:
        """The server goes on and carries out what it had read."""
        for batch in self.late:
            self.memory.store(batch)
        self.late = []

    def load(self, items: Sequence[KVItem], deadline: object = None) -> list[Outcome]:
        return self._do("load", len(items), lambda: self.memory.load(items))

    def lookup(self, keys: Sequence[KVKey], deadline: object = None) -> list[Outcome]:
        return self._do("lookup", len(keys), lambda: self.memory.lookup(keys))

    def delete(self, keys: Sequence[KVKey], deadline: object = None) -> list[Outcome]:
        return self._do("delete", len(keys), lambda: self.memory.delete(keys))

    def verify(self, keys: Sequence[KVKey], deadline: object = None) -> list[Outcome]:
        return self.memory.verify(keys)

    def scan(self, *args: Any) -> Any:
        return self.memory.scan(*args)

    def status(self) -> dict[str, Any]:
        return self.memory.status()

    def close(self) -> None:
        self.memory.close()
