"""LMCache's connector, for an ``lmcache server`` that may die, hang or be restarted at any time.

While the server is away every call is a miss at once; when one answers again the engine registers anew and
uses it, with no restart. Nothing is queued for a later server, and nothing of an earlier life is trusted:
each registration has a connection, an instance id and a transfer context of its own.

Several tensor-parallel ranks need no agreement beyond upstream's: a call that fails on one rank fails in the
same place of the same collective as upstream's own failures.
Upstream: ``lmcache/integration/sglang/unified_lmcache_mp_connector.py``.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import zmq as pyzmq
from lmcache.integration.sglang.unified_lmcache_mp_connector import UnifiedLMCacheMPConnector
from lmcache.utils import EngineType
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest
from lmcache.v1.multiprocess.transfer_context import EngineDrivenTransferContext, create_transfer_context
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
from sglang.srt.mem_cache.storage.lmcache import lmcache_unified_radix_cache

from . import wire
from .link import Link, Transfer
from .watch import Watch

log = logging.getLogger(__name__)
zmq: Any = pyzmq

_CALL_TIMEOUT_S = 5.0
"""Of one step of a copy. A server that answers the watch but not this has lost its workers."""
_JOIN_TIMEOUT_S = 2.0
"""Of one step of coming back."""
_SEEK_EVERY_S = 60.0
"""How often our module is looked for in a server that does not have it."""

_GREET_EVERY_S = 2.0
_SETTLE_S = 2.0
_SAY_EVERY_S = 10.0


@dataclass(slots=True)
class _Session:
    """One registration with one server. ``boot``: of our module there; None: there is no module."""

    link: Link
    instance: int
    transfer: Transfer | None = None
    boot: str | None = None


class ReconnectingConnector(UnifiedLMCacheMPConnector):
    """See the module. ``welcome``: what our server module last said; None: it cannot be used now."""

    welcome: wire.Welcome | None = None

    def __init__(self, **arguments: Any) -> None:
        self._names: dict[str, str] = {}
        # What a lost connection had queued must never reach the next server.
        self._zmq = zmq.Context()
        self._zmq.linger = 0
        self._session: _Session
        self._registered = False
        self._rejoining = threading.Lock()
        self._question: Any = None
        self._asked = 0.0
        self._said: tuple[str, float] = ("", 0.0)
        self._watch: Watch | None = None
        super().__init__(**arguments)
        # The same on every rank, and different in every process.
        self._nonce = f"{self._sync_leader_int(uuid.uuid4().int & ((1 << 62) - 1)):x}"
        self._serial = itertools.count()
        # Else an engine that is idle from the start is forgotten by the server.
        self._ensure_heartbeat_started()
        if self.server_url.startswith(("tcp://", "ipc://")):
            self._watch = Watch(self.server_url, self._zmq, self._connect, self._lose, self._answered)
            self._watch.start()
        else:
            log.warning(
                "mp_host: %s is not watched, so a dead lmcache server stalls requests as it does without "
                "Leyline; use tcp://",
                self.server_url,
            )

    # ------------------------------------------------------------------ what upstream assigns

    @property
    def _req_client(self) -> Any:
        return self._session.link

    @_req_client.setter
    def _req_client(self, client: Any) -> None:
        client.close()  # for one in a context of ours
        self._session = _Session(Link(self._connect(), self._names), self.instance_id)

    @property
    def _transfer_ctx(self) -> Any:
        return self._session.transfer

    @_transfer_ctx.setter
    def _transfer_ctx(self, transfer: Any) -> None:
        self._session.transfer = transfer

    def _connect(self) -> Any:
        return RequestClientFactory.create(self.server_url, context=self._zmq)

    # ------------------------------------------------------------------ joining

    def _get_chunk_size(self) -> int:
        """Wait for a server that is started later, as upstream does, but say so."""
        future = self._req_client.get_chunk_size()
        deadline = time.monotonic() + self._mq_timeout
        while not future.wait(min(_SAY_EVERY_S, max(deadline - time.monotonic(), 0))):
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"no lmcache server answered at {self.server_url} within {self._mq_timeout:g} s: start "
                    "it, or correct mp_host and mp_port in the LMCache configuration"
                )
            log.warning("waiting for an lmcache server at %s", self.server_url)
        return int(future.result(0))

    def register_kv_cache(self) -> None:
        if self._registered:
            raise RuntimeError("LMCache KV tensors are already registered")
        session = self._session
        session.transfer = self._register(session.link, session.instance)
        self._registered = True

    def _register(self, link: Link, instance: int) -> Transfer:
        context = create_transfer_context(
            self._kv_caches, instance_id=instance, req_client=link, mode=self._mp_transfer_mode
        )
        try:
            context.register(
                self._kv_caches,
                self.model_name,
                self.kv_world_size,
                self.blocks_in_chunk,
                min(self._mq_timeout, _CALL_TIMEOUT_S),
                layout_hints={"kv_list_layout": "unified"},
                engine_group_infos=[EngineGroupInfo(**spec) for spec in self._engine_group_info_specs],
                engine_type=EngineType.SGLANG,
            )
        except Exception:
            with suppress(Exception):
                context.unregister()
            context.close()
            raise
        # LMCache waits much longer for an engine it has never heard before it drops what it left behind.
        link.ping(instance)
        return Transfer(context, link)

    # ------------------------------------------------------------------ our module in the server

    def greet(self, timeout_s: float) -> wire.Welcome:
        """Ask our module who it is. Raises ``OSError`` when it is not there, ``WireError`` when it is another
        release."""
        session = self._session
        return self._welcomed(session, self._hello(session), timeout_s)

    def _hello(self, session: _Session) -> Any:
        hello = wire.Hello(instance=session.instance, version=version("leyline-lmcache"))
        request = ServerModuleCallRequest(method=wire.HELLO, payload=wire.encode(hello))
        return session.link.server_module_call(request)

    def _welcomed(self, session: _Session, future: Any, timeout_s: float) -> wire.Welcome:
        try:
            response = future.result(timeout=timeout_s)
        except Exception as error:
            raise OSError(f"lmcache server: {type(error).__name__}") from error
        if not response.success:
            self._forget_module(session, response.error)
            raise OSError(f"lmcache server: {response.error}")
        welcome = wire.decode(response.payload, wire.Welcome)
        session.boot = welcome.boot
        if session is self._session and not session.link.is_lost:
            self.welcome = welcome
        return welcome

    def _forget_module(self, session: _Session, why: str) -> None:
        session.boot = None
        if session is self._session and self.welcome is not None:
            self.welcome = None
            log.warning("edits use the GPU tier alone: %s", why)

    # ------------------------------------------------------------------ told by the watch

    def _lose(self, why: str, dead: bool) -> None:
        session = self._session
        if session.link.lose(dead=dead):
            self.welcome = None
            log.warning(
                "lmcache server at %s is away (%s); requests are served without it until it is back",
                self.server_url,
                why,
            )

    def _answered(self, chunk_size: int) -> None:
        session = self._session
        if not session.link.is_lost:
            self._check(session)
        if session.link.is_lost:
            self._rejoin(session, chunk_size)

    def _check(self, session: _Session) -> None:
        """Notice a server that forgot us, or was replaced behind an address that stayed connected."""
        now = time.monotonic()
        if self._question is None:
            # A server without our module complains of each question in its log.
            if now - self._asked > (_GREET_EVERY_S if session.boot is not None else _SEEK_EVERY_S):
                self._question, self._asked = self._hello(session), now
            return
        if not self._question.query():
            return  # no module, or a busy one: the server itself did answer
        question, self._question = self._question, None
        boot = session.boot
        try:
            welcome = self._welcomed(session, question, 0)
        except (OSError, wire.WireError):
            return
        if not welcome.registered:
            self._lose("it does not know this engine any more", True)
        elif boot not in (None, welcome.boot):
            self._lose("it was restarted", True)

    def _rejoin(self, old: _Session, chunk_size: int) -> None:
        with self._rejoining:
            if self._closed:
                return
            if chunk_size != self.chunk_size:
                self._say(
                    f"its chunks have {chunk_size} tokens, this engine was started with {self.chunk_size}; "
                    f"start it with --chunk-size {self.chunk_size}, or restart SGLang"
                )
                return
            if old.link.is_touching_our_memory:
                self._say("it has yet to finish what it was asked before it fell silent")
                return
            # From here on nobody copies into memory that the server may give to others.
            if old.transfer is not None:
                old.transfer.close()
            old.link.close()
            new = _Session(Link(self._connect(), self._names), uuid.uuid4().int & ((1 << 63) - 1))
            try:
                new.transfer = self._register(new.link, new.instance)
            except Exception as error:
                self._say(f"registering failed: {type(error).__name__}: {error}")
                new.link.close()
                return
            try:
                self._settle(old, new)
            except Exception:
                log.warning("lmcache server may hold locks of before it fell silent", exc_info=True)
            self.instance_id = new.instance
            self._session = new
            self._question, self._asked = None, time.monotonic()
            self._said = ("", 0.0)
            with suppress(OSError, wire.WireError):
                self._welcomed(new, self._hello(new), _JOIN_TIMEOUT_S)
            log.warning(
                "lmcache server at %s is back and used again%s",
                self.server_url,
                ""
                if self.welcome is not None
                else "; our module does not answer there: edits use the GPU tier",
            )

    def _settle(self, old: _Session, new: _Session) -> None:
        """Make a server that was only silent drop what it holds for us; to a new one it means nothing."""
        link = new.link
        engine_driven = old.transfer is not None and issubclass(
            old.transfer.kind, EngineDrivenTransferContext
        )
        leave = link.unregister_kv_cache_engine_driven_context if engine_driven else link.unregister_kv_cache
        leave(old.instance).result(timeout=_JOIN_TIMEOUT_S)
        deadline = time.monotonic() + _SETTLE_S
        for name, (key, tp_size) in old.link.interrupted_lookups().items():
            chunks: int | None = None
            while chunks is None and time.monotonic() < deadline:
                chunks = link.query_prefetch_status(name).result(timeout=_JOIN_TIMEOUT_S)
                if chunks is None:
                    time.sleep(0.01)
            if chunks:
                link.free_lookup_locks(replace(key, end=chunks * self.chunk_size), tp_size)
        for operation, arguments in old.link.owed():
            getattr(link, operation)(*arguments)

    def _say(self, what: str) -> None:
        """Log a reason to stay away, not more often than a reader wants it."""
        before, when = self._said
        if what != before or time.monotonic() - when > _SAY_EVERY_S:
            self._said = (what, time.monotonic())
            log.error("lmcache server at %s cannot be used: %s", self.server_url, what)

    # ------------------------------------------------------------------ requests

    def _name(self, request_id: str) -> None:
        """LMCache caches hashes by request id, and a client may use an id twice: name each use anew."""
        if request_id not in self._names:
            self._names[request_id] = f"{request_id}~{self._nonce}.{next(self._serial)}"

    def _create_key(self, operation: Any, **arguments: Any) -> Any:
        key = super()._create_key(operation, **arguments)
        return replace(key, request_id=self._names.get(key.request_id, key.request_id))

    def submit_lookup(self, request_id: str, token_ids: list[int], **arguments: Any) -> Any:
        self._name(request_id)
        return super().submit_lookup(request_id, token_ids, **arguments)

    def submit_store(self, request_id: str, token_ids: list[int], *args: Any, **arguments: Any) -> Any:
        self._name(request_id)
        return super().submit_store(request_id, token_ids, *args, **arguments)

    def _store_group_blocks_are_valid(self, group: Any, blocks: list[int]) -> bool:
        """Upstream asks all ranks here whether to store: not while the server is away, so that no pending
        store keeps its blocks."""
        return not self._session.link.is_lost and super()._store_group_blocks_are_valid(group, blocks)

    def end_session(self, request_id: str) -> None:
        super().end_session(request_id)
        self._names.pop(request_id, None)

    def close(self) -> None:
        if self._closed:
            return
        # The watch runs on: a server that falls silent now must not keep us.
        with self._rejoining:
            super().close()
        if self._watch is not None:
            self._watch.stop()
        self._zmq.destroy(linger=0)


@contextmanager
def reconnecting() -> Iterator[None]:
    """Within it, SGLang's LMCache cache builds its connector as a :class:`ReconnectingConnector`: its
    constructor offers no other way to choose one."""
    module = lmcache_unified_radix_cache
    before = module.UnifiedLMCacheMPConnector
    module.UnifiedLMCacheMPConnector = ReconnectingConnector
    try:
        yield
    finally:
        module.UnifiedLMCacheMPConnector = before
