"""Which server a request goes to: its session's, as long as that one is up."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from leyline_lmcache.gateway.settings import Backend

log = logging.getLogger(__name__)


class Router:
    """Rendezvous hashing over the servers, and what is known of their health.

    A session's server is the one with the highest hash of both names, so every gateway finds the same one,
    and a server that goes takes only its own sessions with it. A session that had to move stays where it
    went: what the new server has learnt of it would be lost on the way back.
    """

    def __init__(self, backends: Iterable[Backend], *, failures: int = 1, max_moved: int = 65536) -> None:
        """
        Args:
            backends: the servers.
            failures: checks in a row after which a server is down.
            max_moved: sessions remembered to have moved.
        """
        self.backends: Sequence[Backend] = tuple(backends)
        self._by_name = {backend.name: backend for backend in self.backends}
        self._failures = failures
        self._failed: dict[str, int] = {}
        self._down: set[str] = set()
        self._seen: set[str] = set()
        self._moved: OrderedDict[str, str] = OrderedDict()
        self._max_moved = max_moved

    def is_up(self, backend: Backend) -> bool:
        return backend.name not in self._down

    @property
    def ready(self) -> list[Backend]:
        """The servers that are up and have said so; before its first check, a server is only tried."""
        return [each for each in self.backends if each.name in self._seen and self.is_up(each)]

    @property
    def any_up(self) -> bool:
        return len(self._down) < len(self.backends)

    def order(self, key: str) -> list[Backend]:
        """All servers, the best for this key first; those that are down come last."""
        ranked = self._ranked(key)
        if key in self._moved:
            self._moved.move_to_end(key)
            home = self._by_name[self._moved[key]]
            ranked.remove(home)
            ranked.insert(0, home)
        return sorted(ranked, key=lambda backend: not self.is_up(backend))

    def served(self, key: str, backend: Backend) -> None:
        """A server has answered a request of this key."""
        if self._ranked(key)[0] is backend:
            self._moved.pop(key, None)
            return
        self._moved[key] = backend.name
        self._moved.move_to_end(key)
        while len(self._moved) > self._max_moved:
            self._moved.popitem(last=False)

    def healthy(self, backend: Backend) -> None:
        """A check of the server went well."""
        self._failed.pop(backend.name, None)
        self._seen.add(backend.name)
        if backend.name in self._down:
            self._down.discard(backend.name)
            log.info("%s is up", backend.name)

    def failed(self, backend: Backend, why: str, *, surely: bool = False) -> None:
        """A check of the server went wrong; ``surely``: nothing listens there, one failure is enough."""
        count = self._failed[backend.name] = self._failed.get(backend.name, 0) + 1
        if backend.name not in self._down and (surely or count >= self._failures):
            self._down.add(backend.name)
            log.warning("%s is down: %s", backend.name, why)

    def _ranked(self, key: str) -> list[Backend]:
        return sorted(self.backends, key=lambda backend: _score(key, backend.name), reverse=True)


def _score(key: str, name: str) -> bytes:
    return hashlib.blake2b(f"{key}\0{name}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
