"""Stands in for SGLang's LMCache connector and the server module behind it, with faults to inject.

Only for the tests of this folder, which are about the engine's side: the same calls, the real messages,
chunks kept in a dictionary, and locks that are counted. The real servers are tested in ``tests/e2e``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch

from leyline_lmcache.connector import wire
from leyline_lmcache.connector.catalog import Catalog
from leyline_lmcache.connector.packs import Shelf

from .engine import LAYERS, Engine, Served, row_of

ChunkKey = tuple[str, bytes]


class Answer:
    """A future. ``delay``: polls until it is there; None: never."""

    def __init__(self, value: Any, delay: int | None = 0) -> None:
        self._value, self._delay = value, delay

    def query(self) -> bool:
        if self._delay:
            self._delay -= 1
        return self._delay == 0

    def result(self, timeout: float | None = None) -> Any:
        if isinstance(self._value, Exception):
            raise self._value
        return self._value

    def retain_reference(self, value: object) -> None:
        del value


class Response:
    def __init__(self, payload: bytes | None, error: str = "") -> None:
        self.success, self.payload, self.error = payload is not None, payload or b"", error


class Daemon:
    """Chunks, records and locks; outlives engines."""

    def __init__(self, chunk_size: int = 8) -> None:
        self.chunk_size = chunk_size
        self.chunks: dict[ChunkKey, list[np.ndarray]] = {}
        self.locks: Counter[ChunkKey] = Counter()
        self.catalog = Catalog(1 << 24)
        self.jobs: dict[str, tuple[wire.Fetch, list[list[int]]]] = {}
        self.delay: int | None = 2
        self.fault: Exception | str | None = None
        self.stored = self.packed = 0
        self.served: dict[str, Served] = {}
        self.invalidated: list[set[ChunkKey]] = []
        self.cold: set[ChunkKey] = set()
        """Chunks that are in Redis only."""

    def connect(self, engine: Engine) -> Connector:
        return Connector(self, engine)

    def key(self, salt: str, tokens: np.ndarray, chunk: int) -> ChunkKey:
        return salt, tokens[: (chunk + 1) * self.chunk_size].astype("<i4").tobytes()

    def put(self, salt: str, served: Served, start: int, end: int) -> None:
        """Store whole chunks of ``[start, end)`` as LMCache would."""
        tokens = np.array(served.tokens, dtype=np.int64)
        for chunk in range(-(-start // self.chunk_size), end // self.chunk_size):
            key = self.key(salt, tokens, chunk)
            span = range(chunk * self.chunk_size, (chunk + 1) * self.chunk_size)
            if key not in self.chunks:
                self.stored += 1
                self.chunks[key] = [
                    np.array([row_of(served.sems[i], i, layer) for i in span]) for layer in range(LAYERS)
                ]

    def put_pack(self, salt: str, served: Served, shelf: Shelf) -> None:
        """Store a pack, filled up with what nobody may read."""
        names = shelf.names(self.chunk_size)
        assert shelf.pack is not None
        where = [i for start, end in shelf.pack for i in range(start, end)]
        self.packed += len(where)
        for chunk in range(len(names) // self.chunk_size):
            key = self.key(salt, names, chunk)
            span = where[chunk * self.chunk_size :][: self.chunk_size]
            if key not in self.chunks:
                self.stored += 1
                self.chunks[key] = [
                    np.array(
                        [row_of(served.sems[i], i, layer) for i in span]
                        + [row_of(b"nonsense!", 0, layer)] * (self.chunk_size - len(span))
                    )
                    for layer in range(LAYERS)
                ]

    # ------------------------------------------------------------------ the server module

    def serve(self, method: str, payload: bytes) -> bytes:
        if method == wire.PUBLISH:
            self.catalog.publish(wire.decode(payload, wire.Publish))
        elif method == wire.RESOLVE:
            return wire.encode(self.catalog.resolve(wire.decode(payload, wire.Resolve)))
        elif method == wire.FETCH:
            self._fetch(wire.decode(payload, wire.Fetch))
        elif method == wire.POLL:
            fetch, hits = self.jobs[wire.decode(payload, wire.Job).job]
            brought = tuple(
                tuple(
                    i for i in hit if self.key(part.salt, np.frombuffer(part.tokens, "<i4"), i) in self.cold
                )
                for part, hit in zip(fetch.parts, hits, strict=True)
            )
            return wire.encode(
                wire.Fetched(done=True, hits=tuple(tuple(hit) for hit in hits), brought=brought)
            )
        elif method == wire.LOCATE:
            return wire.encode(self._locate(wire.decode(payload, wire.Locate)))
        elif method == wire.INVALIDATE:
            return wire.encode(self._invalidate(wire.decode(payload, wire.Invalidate)))
        elif method == wire.RELEASE:
            self._release(wire.decode(payload, wire.Job))
        return wire.encode(wire.Done())

    def _fetch(self, message: wire.Fetch) -> None:
        hits: list[list[int]] = []
        for part in message.parts:
            tokens = np.frombuffer(part.tokens, "<i4").astype(np.int64)
            asked = [i for a, b in part.chunks for i in range(a, b)]
            hits.append([i for i in asked if self.key(part.salt, tokens, i) in self.chunks])
            for i in hits[-1]:
                self.locks[self.key(part.salt, tokens, i)] += 1
        self.jobs[message.job] = (message, hits)

    def _locate(self, message: wire.Locate) -> wire.Located:
        cpu, redis = [], []
        for part in message.parts:
            tokens = np.frombuffer(part.tokens, "<i4").astype(np.int64)
            held = {i for a, b in part.chunks for i in range(a, b)}
            held = {i for i in held if self.key(part.salt, tokens, i) in self.chunks}
            cold = {i for i in held if self.key(part.salt, tokens, i) in self.cold}
            cpu.append(tuple(sorted(held - cold)))
            redis.append(tuple(sorted(held)))
        return wire.Located(cpu=tuple(cpu), redis=tuple(redis))

    def _invalidate(self, message: wire.Invalidate) -> wire.Invalidated:
        gone = {
            self.key(part.salt, np.frombuffer(part.tokens, "<i4").astype(np.int64), i)
            for part in message.parts
            for start, end in part.chunks
            for i in range(start, end)
        } & self.chunks.keys()
        self.invalidated.append(gone)
        for key in gone:
            del self.chunks[key]
        return wire.Invalidated(l1=len(gone), locked=0, l2=len(gone) * message.everywhere)

    def _release(self, message: wire.Job) -> None:
        job = self.jobs.pop(message.job, None)
        if job is None:
            return
        for at, (part, hits) in enumerate(zip(job[0].parts, job[1], strict=True)):
            kept = set(message.keep[at]) if at < len(message.keep) else set()
            tokens = np.frombuffer(part.tokens, "<i4").astype(np.int64)
            for i in set(hits) - kept:
                self.locks[self.key(part.salt, tokens, i)] -= 1

    def check(self) -> None:
        """No lock is held (I6)."""
        assert {key: count for key, count in self.locks.items() if count} == {}
        assert self.jobs == {}


class Connector:
    """What is used of ``UnifiedLMCacheMPConnector``."""

    tp_size, tp_rank, tp_group = 1, 0, None
    instance_id, model_name, kv_world_size, kv_worker_id, num_kv_readers = 1, "model", 1, 0, 1
    blocks_in_chunk = 1
    welcome: Any = object()

    def __init__(self, daemon: Daemon, engine: Engine) -> None:
        self._daemon, self._engine = daemon, engine
        self.chunk_size = daemon.chunk_size
        self._req_client = self._transfer_ctx = self
        self._kv_caches: dict[str, torch.Tensor] = {}
        self.requests: set[str] = set()

    @staticmethod
    def build_cache_salt(cache_salt: str | None, extra_key: str | None) -> str:
        return f"{cache_salt or ''}/{extra_key or ''}"

    def server_module_call(self, request: Any) -> Answer:
        if isinstance(self._daemon.fault, str):
            return Answer(Response(None, self._daemon.fault), self._daemon.delay)
        if self._daemon.fault is not None:
            raise self._daemon.fault
        if self._daemon.delay is None:
            return Answer(None, None)
        return Answer(Response(self._daemon.serve(request.method, request.payload)), self._daemon.delay)

    def _create_key(self, operation: Any, *, start: int, end: int, worker_id: int) -> Any:
        return operation, start, end

    def _block_ids_for_transfer(self, slots: torch.Tensor, *, allow_dummy_page: bool) -> list[list[int]]:
        page = self._engine.page_size
        pages = slots.reshape(-1, page)
        assert bool(((pages == pages[:, :1] + torch.arange(page)) | (pages == 0).all(1, keepdim=True)).all())
        return [(pages[:, 0] // page).tolist()]

    def create_recorded_event(self) -> None:
        return None

    def submit_retrieve(
        self, request: str, key: Any, caches: Any, blocks: list[list[int]], event: Any, in_chunk: int
    ) -> Answer:
        assert request not in self.requests, "a request id used twice returns another buffer's KV"
        self.requests.add(request)
        operation, start, end = key
        tokens, size, page = np.array(operation.token_ids), self.chunk_size, self._engine.page_size
        slots = [block * page + i for block in blocks[0] for i in range(page)]
        for n, chunk in enumerate(range(start // size, end // size)):
            name = self._daemon.key(operation.cache_salt, tokens, chunk)
            assert self._daemon.locks[name] > 0, "retrieved without a lock"
            self._daemon.locks[name] -= 1
            if name not in self._daemon.chunks:
                return Answer(False)
            for layer in range(LAYERS):
                for i, row in enumerate(self._daemon.chunks[name][layer]):
                    buffer = self._engine.pool.kv_buffer[layer]
                    buffer[slots[n * size + i], 0] = torch.from_numpy(row.astype(np.float32))
        return Answer(True)

    def end_session(self, request: str) -> Answer:
        return Answer(True)

    def _track_control_future(self, future: Any) -> None:
        del future
