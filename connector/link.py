"""One connection to ``lmcache server``, used until it is lost and never again.

LMCache's client waits up to ``lmcache.mp.mq_timeout`` (300 s) for a server that is gone, polls some answers
for ever, and sends what it had queued to the next server that listens there. A :class:`Link` ends all of
that at once: what was asked fails, what is asked from then on is a miss, and nothing more is sent. Its
successor is a new connection.
Upstream: ``lmcache/v1/multiprocess/transport``, ``futures.py``, ``transfer_context/worker_transfer.py``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from lmcache.v1.multiprocess.futures import MessagingFuture

from . import wire

log = logging.getLogger(__name__)

_MISSES: Mapping[str, Any] = {
    "lookup": None,
    "query_prefetch_status": 0,
    "free_lookup_locks": None,
    "end_session": None,
    "ping": False,
}
"""What a lost link answers. Everything else fails with :class:`ServerLost`."""

_TOUCH_OUR_MEMORY = frozenset({"store", "retrieve", "store_q"})
"""Calls during which the server reads or writes the engine's KV itself. One that hangs may still do so later,
so only its death ends them; their blocks stay taken until then."""

_OWED = ("end_session", "free_lookup_locks")
_MAX_OWED = 4096
_PRUNE_AT = 256


class ServerLost(TimeoutError):
    """``lmcache server`` is away. LMCache's transports treat a ``TimeoutError`` as a miss."""


def done(value: Any) -> Any:
    """A future that has its result."""
    future: Any = MessagingFuture()
    future.set_result(value)
    return future


class Link:
    """Stands in for LMCache's ``RequestClient``; any of its calls may be made from any thread.

    Args:
        client: the connection.
        names: what a request is called on the wire, by request id; see :mod:`.reconnect`.
    """

    def __init__(self, client: Any, names: Mapping[str, str]) -> None:
        self._client = client
        self._names = names
        self._lock = threading.Lock()
        self._open: dict[Any, str] = {}
        self._lookups: dict[str, tuple[Any, int]] = {}
        self._statuses: dict[str, Any] = {}
        self._owed: list[tuple[str, tuple[Any, ...]]] = []
        self._lost = False
        self._closed = False

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        if operation.startswith("_"):
            raise AttributeError(operation)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(operation, args, kwargs)

        return call

    # ------------------------------------------------------------------ calls that need a word

    def lookup(self, key: Any, tp_size: int) -> Any:
        with self._lock:
            self._lookups[key.request_id] = (key, tp_size)
        return self._call("lookup", (key, tp_size), {})

    def query_prefetch_status(self, request_id: str) -> Any:
        name = self._names.get(request_id, request_id)
        future = self._call("query_prefetch_status", (name,), {})
        with self._lock:
            self._statuses[name] = future
        return future

    def end_session(self, request_id: str) -> Any:
        name = self._names.get(request_id, request_id)
        with self._lock:
            if not self._lost:
                self._lookups.pop(name, None)
                self._statuses.pop(name, None)
        return self._call("end_session", (name,), {})

    def _call(self, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock:
            if self._lost:
                if _is_owed(operation, args) and len(self._owed) < _MAX_OWED:
                    self._owed.append((operation, args))
                future: Any = MessagingFuture()
                _end(future, operation)
                return future
            future = getattr(self._client, operation)(*args, **kwargs)
            if isinstance(future, MessagingFuture):
                if len(self._open) >= _PRUNE_AT:
                    self._open = {each: name for each, name in self._open.items() if not each.query()}
                self._open[future] = operation
            return future

    # ------------------------------------------------------------------ the end

    @property
    def is_lost(self) -> bool:
        return self._lost

    def lose(self, *, dead: bool) -> bool:
        """End everything. ``dead``: the server's process is gone, not only silent. Whether this is news."""
        with self._lock:
            news, self._lost = not self._lost, True
            ending = {
                future: operation
                for future, operation in self._open.items()
                if dead or operation not in _TOUCH_OUR_MEMORY
            }
            self._open = {each: name for each, name in self._open.items() if each not in ending}
        for future, operation in ending.items():
            if not future.query():
                _end(future, operation)
        return news

    @property
    def is_touching_our_memory(self) -> bool:
        """Whether a silent server may still read or write the engine's KV."""
        with self._lock:
            return any(not future.query() for future in self._open)

    def owed(self) -> list[tuple[str, tuple[Any, ...]]]:
        """Calls that should have released something, for a server that was only silent."""
        with self._lock:
            owed, self._owed = self._owed, []
            return owed

    def interrupted_lookups(self) -> dict[str, tuple[Any, int]]:
        """Lookups by name whose result never came, as they were asked; they may hold locks."""
        with self._lock:
            return {name: asked for name, asked in self._lookups.items() if not self._has_result(name)}

    def _has_result(self, name: str) -> bool:
        status = self._statuses.get(name)
        # The miss of a lost link is no result.
        if status is None or not status.query() or getattr(status, "is_miss", False):
            return False
        return status.result(0) is not None

    def close(self) -> None:
        """Close the connection; nothing queued is sent any more."""
        self.lose(dead=True)
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            try:
                self._client.close()
            except Exception:
                log.warning("a connection to lmcache server could not be closed", exc_info=True)


def _is_owed(operation: str, args: tuple[Any, ...]) -> bool:
    return operation in _OWED or (operation == "server_module_call" and args[0].method == wire.RELEASE)


def _end(future: Any, operation: str) -> None:
    future.is_miss = True
    if operation in _MISSES:
        future.set_result(_MISSES[operation])
    else:
        future.set_exception(ServerLost("lmcache server is away"))


class Transfer:
    """Stands in for LMCache's ``TransferContext``: moves KV over one link, and knows when nobody does now.

    Args:
        context: registered with the server.
    """

    def __init__(self, context: Any, link: Link) -> None:
        self.kind = type(context)
        self._context: Any = context
        self._link = link
        # Held while KV is copied, so that the shared memory does not go away under it.
        self._lock = threading.Lock()

    def create_recorded_event(self) -> Any:
        with self._lock:
            if self._link.is_lost or self._context is None:
                return None
            return self._context.create_recorded_event()

    def submit_store(self, *args: Any, **kwargs: Any) -> Any:
        return self._submit("submit_store", args, kwargs)

    def submit_retrieve(self, *args: Any, **kwargs: Any) -> Any:
        return self._submit("submit_retrieve", args, kwargs)

    def _submit(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock:
            if self._link.is_lost or self._context is None:
                return done(False)
            try:
                return getattr(self._context, method)(*args, **kwargs)
            except ServerLost:
                return done(False)

    def flush_inflight_stores(self) -> None:
        with self._lock:
            if self._context is not None:
                self._context.flush_inflight_stores()

    def unregister(self) -> Any:
        with self._lock:
            return None if self._context is None or self._link.is_lost else self._context.unregister()

    def close(self) -> None:
        """Wait for a copy under way, then let the shared memory go."""
        with self._lock:
            context, self._context = self._context, None
        if context is not None:
            # BufferError: somebody still looks at the memory; it goes when they do.
            with contextlib.suppress(BufferError):
                context.close()
