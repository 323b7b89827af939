"""The CPU and Redis tiers, seen from the engine: know a base, bring its chunks to L1, load them.

Works over the connection SGLang's LMCache connector already has. The scheduler submits and polls; it waits
for another process only while LMCache copies.
Upstream: ``lmcache/integration/sglang/unified_lmcache_mp_connector.py``.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from leyline_lmcache.ops import Tier
from leyline_lmcache.ranges import Range, intersect, merge, subtract
from leyline_lmcache.reasons import Fallback, FallbackReason
from leyline_lmcache.view import Piece, View

from . import wire
from .lineage import LineageTable, Roundings, Tokens, tagged
from .packs import BufferInfo, Shelf
from .ranks import Call, Ranks
from .records import BaseRecord, Namespace, RecordStore

log = logging.getLogger(__name__)

_LONGEST_SALT = 90
_MAX_PUBLISHING = 64


@dataclass(slots=True)
class Held:
    """Chunks of one shelf that are in L1 and locked for us."""

    shelf: Shelf
    salt: str
    chunks: set[int]
    brought: set[int] = field(default_factory=set)
    """Those of them that were not in L1 before."""
    retrieved: set[int] = field(default_factory=set)

    def by_tier(self) -> tuple[tuple[Tier, set[int]], tuple[Tier, set[int]]]:
        """The chunks, by where they lay."""
        return (Tier.CPU, self.chunks - self.brought), (Tier.REDIS, self.brought)


@dataclass(frozen=True, slots=True)
class StoredRun:
    """``length`` tokens to be loaded from L1.

    Attributes:
        start: view position of the first.
        source: offset on the shelf ``held``.
        origin: position at which it was computed.
        tier: where they lay when they were asked for.
    """

    start: int
    length: int
    source: int
    origin: int
    held: int
    tier: Tier

    @property
    def shift(self) -> int:
        return self.start - self.origin


@dataclass(frozen=True, slots=True)
class Load:
    """Chunks ``[first, last)`` of one shelf, to be loaded at once for all runs that lie in them.

    At once, because a chunk's lock is gone with its first retrieval.
    """

    held: int
    first: int
    last: int
    runs: tuple[StoredRun, ...]


@dataclass(slots=True)
class StoredChunks:
    """What a finished fetch holds for one request."""

    tier: StoredTier
    job: str
    held: list[Held]

    @property
    def chunk_size(self) -> int:
        return self.tier.chunk_size

    def cover(self, view: View, missing: Sequence[Range]) -> tuple[list[StoredRun], list[Range]]:
        """Runs for as much of ``missing`` as is in L1, and what is still missing; both in order."""
        runs: list[StoredRun] = []
        left = merge(missing)
        for start, end in missing:
            for position, piece in view.between(start, end):
                for run in self._runs(position, piece):
                    # Once is enough, if two shelves have it.
                    for low, high in intersect([(run.start, run.start + run.length)], left):
                        skipped = low - run.start
                        runs.append(
                            replace(
                                run,
                                start=low,
                                length=high - low,
                                source=run.source + skipped,
                                origin=run.origin + skipped,
                            )
                        )
                    left = subtract(left, [(run.start, run.start + run.length)])
        runs.sort(key=lambda run: run.start)
        return runs, left

    def _runs(self, position: int, piece: Piece) -> Iterator[StoredRun]:
        """All of a piece at view position ``position`` that is held."""
        size = self.tier.chunk_size
        for index, held in enumerate(self.held):
            if held.shelf.info.id != piece.buffer:
                continue
            for place in held.shelf.places(piece.src_start, piece.src_end):
                for tier, chunks in held.by_tier():
                    for low, high in merge((c * size, (c + 1) * size) for c in chunks):
                        low, high = max(low, place.offset), min(high, place.offset + place.length)
                        if low < high:
                            origin = place.origin + low - place.offset
                            start = position + origin - piece.src_start
                            yield StoredRun(start, high - low, low, origin, index, tier)

    def loads(self, runs: Sequence[StoredRun]) -> list[Load]:
        """Group runs by the chunks they share; those whose chunks follow each other load together."""
        size = self.tier.chunk_size
        out: list[Load] = []
        for run in sorted(runs, key=lambda run: (run.held, run.source)):
            first, last = run.source // size, -(-(run.source + run.length) // size)
            if out and out[-1].held == run.held and first <= out[-1].last:
                before = out.pop()
                first, last, joined = before.first, max(before.last, last), (*before.runs, run)
                out.append(Load(run.held, first, last, joined))
            else:
                out.append(Load(run.held, first, last, (run,)))
        return out

    def begin(self, load: Load, slots: torch.Tensor) -> Any:
        """Start writing whole chunks into ``slots``, int64 ``[(last - first) * chunk_size]``, in whole pages;
        page 0 is the pool's sink. Raises ``Fallback`` (``tier_error``)."""
        held, size = self.held[load.held], self.tier.chunk_size
        held.retrieved.update(range(load.first, load.last))
        return self.tier.begin_load(held.shelf, held.salt, load.first * size, load.last * size, slots)

    def finish(self, begun: Any, stream: Any) -> None:
        """Wait for what :meth:`begin` started; on a GPU, have ``stream`` wait. Raises ``Fallback``."""
        self.tier.finish_load(begun, stream)

    def release(self) -> None:
        """Give back the locks of what was not retrieved."""
        kept = tuple(tuple(sorted(held.retrieved)) for held in self.held)
        self.tier.send(wire.RELEASE, wire.Job(job=self.job, keep=kept))


class StillLoading(Fallback):
    """A load was given up, but may yet be written: its slots must never be anybody else's."""


@dataclass(frozen=True, slots=True)
class _Loading:
    """A load under way. ``request``: its id with LMCache."""

    request: str
    future: Any


class StoredTier:
    """One engine's way to its ``lmcache server``.

    Args:
        connector: SGLang's ``UnifiedLMCacheMPConnector``.
        model: identity of the model, for records.
        timeout_s: longest a request waits for the tier.
    """

    def __init__(self, connector: Any, model: str, timeout_s: float) -> None:
        self._connector = connector
        self.model = model
        self.timeout_s = timeout_s
        self.chunk_size = int(connector.chunk_size)
        self.ranks = Ranks(connector)
        self._publishing: list[Any] = []
        self._count = 0
        self.unpublished = 0

    # ------------------------------------------------------------------ calls

    def call(self, method: str, message: wire.Message) -> Call:
        """Submit an RPC, from the leading rank."""
        if not self.ranks.leads:
            return Call(self.ranks, None)
        try:
            return Call(self.ranks, self._submit(method, message))
        except Exception as error:
            return Call(self.ranks, None, type(error).__name__)

    def send(self, method: str, message: wire.Message) -> None:
        """Fire and forget, bounded. Nothing is sent to a server that could not answer."""
        if not self.ranks.leads or self._connector.welcome is None:
            return
        self._publishing = [future for future in self._publishing if not future.query()]
        if len(self._publishing) >= _MAX_PUBLISHING and method == wire.PUBLISH:
            self.unpublished += 1
            return
        try:
            self._publishing.append(self._submit(method, message))
        except Exception:
            log.warning("%s could not be sent to lmcache server", method, exc_info=True)

    def _submit(self, method: str, message: wire.Message) -> Any:
        from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest

        request = ServerModuleCallRequest(method=method, payload=wire.encode(message))
        return self._connector._req_client.server_module_call(request)

    # ------------------------------------------------------------------ names

    def request_id(self) -> str:
        """Never one twice: LMCache caches hashes by request id and would give another shelf's KV."""
        self._count += 1
        return f"leyline-{self._connector.instance_id}-{self._count}"

    @property
    def available(self) -> bool:
        """Whether our module can be asked now: not while the server is away or came back without it."""
        return bool(self.ranks.largest(int(self.ranks.leads and self._connector.welcome is not None)))

    def salt(self, namespace: Namespace, lineage: bytes) -> str:
        """LMCache's cache salt for KV of a lineage; exact KV has SGLang's own."""
        plain: str = self._connector.build_cache_salt(namespace.cache_salt, namespace.extra_key)
        if not lineage:
            return plain
        if len(plain) > _LONGEST_SALT:
            plain = hashlib.sha256(plain.encode()).hexdigest()
        return f"{plain}~{lineage.hex()}"

    # ------------------------------------------------------------------ data

    def begin_load(self, shelf: Shelf, salt: str, start: int, end: int, slots: torch.Tensor) -> _Loading:
        """Start loading tokens ``[start, end)`` of a shelf (whole chunks, locked before) into ``slots``.
        Raises ``Fallback``."""
        from lmcache.integration.sglang.lmcache_mp_metadata import LMCacheLookupOperation

        connector = self._connector
        request = self.request_id()
        tokens = shelf.names(self.chunk_size)[:end].tolist()
        operation = LMCacheLookupOperation(request, tokens, 0, salt)
        try:
            key = connector._create_key(operation, start=start, end=end, worker_id=connector.kv_worker_id)
            groups = connector._block_ids_for_transfer(slots, allow_dummy_page=True)
            context = connector._transfer_ctx
            event = context.create_recorded_event()
            future = context.submit_retrieve(
                request, key, connector._kv_caches, groups, event, connector.blocks_in_chunk
            )
            if event is not None:
                future.retain_reference(event)
        except Exception as error:
            raise Fallback(FallbackReason.TIER_ERROR, f"load from lmcache: {type(error).__name__}") from error
        return _Loading(request, future)

    def finish_load(self, loading: _Loading, stream: Any) -> None:
        """Wait until a load is done, or on a GPU: until ``stream`` will wait for it. Raises ``Fallback``."""
        connector = self._connector
        try:
            if stream is None:
                done = bool(loading.future.result(timeout=self.timeout_s))
            else:
                done = bool(loading.future.wait_on_stream(stream, timeout=self.timeout_s))
            connector._track_control_future(connector._req_client.end_session(loading.request))
        except Exception as error:
            # Without a stream the worker itself has copied, or never will.
            kind = Fallback if stream is None else StillLoading
            raise kind(FallbackReason.TIER_ERROR, f"load from lmcache: {type(error).__name__}") from error
        if not done:
            raise Fallback(FallbackReason.TIER_ERROR, "load from lmcache: a chunk was gone")

    def locate(self, namespace: Namespace, parts: Sequence[tuple[Shelf, Sequence[Range]]]) -> Call:
        """Ask where chunks are, by index ranges, without moving them; answered by ``wire.Located``."""
        return self.call(wire.LOCATE, wire.Locate(**self._named(namespace, parts)))

    def fetch_message(
        self, job: str, namespace: Namespace, parts: Sequence[tuple[Shelf, Sequence[Range]]], pin: float
    ) -> wire.Fetch:
        """Bring chunks to L1, locked for ``pin`` time-outs at most."""
        return wire.Fetch(job=job, ttl_s=self.timeout_s * pin, **self._named(namespace, parts))

    def invalidate_message(
        self, namespace: Namespace, parts: Sequence[tuple[Shelf, Sequence[Range]]], everywhere: bool
    ) -> wire.Invalidate:
        """Delete chunks from L1, and ``everywhere``: from the shared store."""
        return wire.Invalidate(everywhere=everywhere, **self._named(namespace, parts))

    def _named(self, namespace: Namespace, parts: Sequence[tuple[Shelf, Sequence[Range]]]) -> dict[str, Any]:
        """Chunks of shelves as LMCache names them: fields that such messages share."""
        connector, size = self._connector, self.chunk_size
        named = []
        for shelf, chunks in parts:
            last = max(end for _, end in chunks) * size
            tokens = shelf.names(size)[:last].astype("<i4").tobytes()
            salt = self.salt(namespace, shelf.info.lineage)
            named.append(wire.Part(tokens=tokens, salt=salt, chunks=tuple(chunks)))
        return {
            "model": connector.model_name,
            "world_size": connector.kv_world_size,
            "readers": connector.num_kv_readers,
            "parts": tuple(named),
        }

    # ------------------------------------------------------------------ records

    def publish(self, record: BaseRecord, infos: Iterable[BufferInfo]) -> None:
        """Tell other nodes, and our own next life, about a finished request."""
        buffers = tuple(_buffer(info) for info in infos)
        self.send(wire.PUBLISH, wire.Publish(record=to_message(record, self.model), buffers=buffers))


# ---------------------------------------------------------------------- records as messages


def digest(namespace: Namespace) -> str:
    """Names a namespace without telling its salt."""
    return hashlib.blake2b(namespace.salt.encode(), digest_size=16, person=b"leyline.tenant").hexdigest()


def to_message(record: BaseRecord, model: str) -> wire.RecordMessage:
    view = tuple(
        wire.PieceMessage(buffer=piece.buffer or "", src_start=piece.src_start, length=piece.length)
        for piece in record.view.pieces
    )
    return wire.RecordMessage(
        response=record.response,
        namespace=digest(record.namespace),
        model=model,
        buffer=record.buffer,
        view=view,
        spans=record.spans,
    )


def _buffer(info: BufferInfo) -> wire.BufferMessage:
    tokens = info.tokens.astype("<i4").tobytes()
    return wire.BufferMessage(id=info.id, tokens=tokens, lineage=info.lineage, packs=info.packs)


def remember(
    answer: wire.Resolved, namespace: Namespace, records: RecordStore, lineages: LineageTable
) -> BaseRecord | None:
    """Add a record that another node (or this one, before it restarted) published. Raises ``WireError``."""
    message = answer.record
    if message is None:
        return None
    infos = {
        each.id: BufferInfo(
            each.id, np.frombuffer(each.tokens, "<i4").astype(np.int64), each.lineage, each.packs
        )
        for each in answer.buffers
    }
    own = infos.get(message.buffer)
    if own is None or message.namespace != digest(namespace):
        return None
    view = View(tuple(Piece(piece.buffer, piece.src_start, piece.length) for piece in message.view))
    if view.length != len(own.tokens):
        raise wire.WireError(
            f"record.view: covers {view.length} tokens, its buffer was computed from {len(own.tokens)}"
        )
    keys: Tokens = own.tokens.copy()
    for start, fingerprint in message.spans:
        keys[start:] = tagged(own.tokens[start:], lineages.of(fingerprint).tag)
    record = BaseRecord(
        message.response, namespace, keys, view, message.buffer, Roundings(), tuple(message.spans)
    )
    records.add(record, infos.values())
    return record
