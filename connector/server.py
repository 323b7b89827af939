"""LMCache server module: ``lmcache server --server-module '{"module_path":
"leyline_lmcache.connector.server", ...}'``.

Gives the engine what LMCache's own lookups cannot: chunks in the middle of a sequence without those
before them, and the records of edited sequences. Runs in the LMCache process, with a thread pool of its
own, so that it never delays a lookup. Upstream: ``lmcache/v1/multiprocess/ext_server_module.py``.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

from lmcache.v1.distributed.api import (
    PrefetchLockMode,
    PrefetchTaskSpec,
    ipc_key_to_grouped_object_keys,
)
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.ext_server_module import server_module_handler
from lmcache.v1.multiprocess.token_hasher import TokenHasher

from . import versions, wire
from .catalog import Catalog
from .l2 import adapters_of, kv_key
from .redis.metadata import MetadataStore, open_metadata
from .redis.options import OptionsError, RedisOptions
from .redis.outcome import Outcome
from .unfinished import drop_unfinished

log = logging.getLogger(__name__)

_DISTRIBUTION = "leyline-lmcache"
_MOST_ENGINES = 64
_RETRY_S = 0.5
"""How long chunks are asked for that another prefetch is bringing."""


class ModuleConfigError(ValueError):
    """The module's ``config`` object is wrong; names the key and the known ones."""


@dataclass(frozen=True, slots=True)
class ModuleConfig:
    """The ``config`` object of ``--server-module``.

    Attributes:
        workers: threads for this module's RPCs.
        catalog_bytes: memory for records and buffers.
        max_jobs: fetches kept at a time; more are refused.
        sweep_s: how often overdue fetches are looked for.
        redis: where records are shared with other nodes; the options are the L2 adapter's.
    """

    workers: int = 2
    catalog_bytes: int = 256 * 1024 * 1024
    max_jobs: int = 256
    sweep_s: float = 0.5
    redis: RedisOptions | None = None

    @classmethod
    def of(cls, values: dict[str, Any]) -> ModuleConfig:
        """Raises :class:`ModuleConfigError`."""
        known = list(cls.__dataclass_fields__)
        checked: dict[str, Any] = {}
        for key, value in values.items():
            if key not in known:
                raise ModuleConfigError(f"{key}: unknown key; known keys are {', '.join(known)}")
            if key == "redis":
                checked[key] = _redis(value)
            elif not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
                raise ModuleConfigError(f"{key}: expected a positive number, got {value!r}")
            elif key != "sweep_s" and not isinstance(value, int):
                raise ModuleConfigError(f"{key}: expected an integer, got {value!r}")
            else:
                checked[key] = value
        return cls(**checked)


def _redis(value: object) -> RedisOptions:
    if not isinstance(value, dict):
        raise ModuleConfigError(
            f"redis: expected an object with the adapter's options, got {type(value).__name__}"
        )
    try:
        return RedisOptions.of(value)
    except OptionsError as error:
        raise ModuleConfigError(f"redis.{error}") from None


@dataclass(slots=True)
class _FetchJob:
    """One fetch.

    Attributes, one entry per part:
        handles: its LMCache prefetch; None for a part without chunks.
        chunks: indexes of the chunks asked for.
        rows: their object keys, one list per object group and rank.
        cells: which of the chunks the running prefetch is for, by their place in the list.
        groups: the rows as LMCache wants them.
        hits: chunks that came and are locked; None while LMCache works.
        brought: those of them that were not in L1 before.
    """

    name: str
    readers: int
    deadline: float
    retry_until: float
    handles: list[Any] = field(default_factory=list)
    chunks: list[list[int]] = field(default_factory=list)
    rows: list[list[list[Any]]] = field(default_factory=list)
    cells: list[list[int]] = field(default_factory=list)
    groups: list[list[Any]] = field(default_factory=list)
    got: list[set[int]] = field(default_factory=list)
    hits: list[list[int] | None] = field(default_factory=list)
    brought: list[list[int]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return all(hit is not None for hit in self.hits)


class LeylineModule:
    """The ``leyline.*`` RPCs. One per LMCache server."""

    def __init__(self, build: Any, config: ModuleConfig, shared: MetadataStore | None = None) -> None:
        self._shared = shared
        self._context = build.server_context
        self._modules = build.modules
        self._storage = self._context.storage_manager
        self._config = config
        self._boot = uuid.uuid4().hex
        self._catalog = Catalog(config.catalog_bytes, shared)
        self._jobs: dict[str, _FetchJob] = {}
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        drop_unfinished(self._modules, self._storage, self._count_unfinished)
        self._engines: OrderedDict[int, str] = OrderedDict()
        self._stop = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, name="leyline-sweep", daemon=True)
        self._sweeper.start()

    # ------------------------------------------------------------------ LMCache's module protocol

    @property
    def context(self) -> Any:
        return self._context

    def report_status(self) -> dict[str, Any]:
        """Part of LMCache's ``/status``."""
        with self._lock:
            return {
                "leyline": {
                    "boot": self._boot,
                    "version": version(_DISTRIBUTION),
                    "wire": wire.WIRE_VERSION,
                    "engines": {str(instance): told for instance, told in self._engines.items()},
                    "shared": self._catalog.is_shared,
                    "shared_errors": self._catalog.errors,
                    "catalog_bytes": self._catalog.size,
                    "jobs": len(self._jobs),
                    **self._counters,
                }
            }

    def register_zmq_services(self, server: Any) -> None:
        """Own threads: a slow handler must not starve lookups."""
        server.add_normal_thread_pool(["server_module_call"], max_workers=self._config.workers)

    def close(self) -> None:
        """Called before LMCache's storage closes: give every lock back."""
        self._stop.set()
        self._sweeper.join(5)
        with self._lock:
            jobs = list(self._jobs)
        for job in jobs:
            self._drop(job)
        if self._shared is not None:
            self._shared.close()

    # ------------------------------------------------------------------ RPCs

    @server_module_handler(wire.HELLO)
    def hello(self, payload: bytes) -> bytes:
        try:
            message = wire.decode(payload, wire.Hello)
        except wire.WireError:
            self._counters["unreadable_hellos"] += 1
            raise
        mine = version(_DISTRIBUTION)
        with self._lock:
            # Refused ones too: whoever looks for the fault sees both versions here.
            self._engines[message.instance] = message.version
            self._engines.move_to_end(message.instance)
            while len(self._engines) > _MOST_ENGINES:
                self._engines.popitem(last=False)
        if message.version != mine:
            raise wire.WireError(
                f"version: the engine runs {_DISTRIBUTION} {message.version}, this server {mine}; "
                "install the same release on both"
            )
        return wire.encode(
            wire.Welcome(
                boot=self._boot,
                registered=self._knows(message.instance),
                chunk_size=self._context.chunk_size,
                version=mine,
                shared=self._catalog.is_shared,
            )
        )

    @server_module_handler(wire.FETCH)
    def fetch(self, payload: bytes) -> bytes:
        message = wire.decode(payload, wire.Fetch)
        now = time.monotonic()
        job = _FetchJob(message.job, message.readers, now + message.ttl_s, now + _RETRY_S)
        with self._lock:
            if message.job in self._jobs or len(self._jobs) >= self._config.max_jobs:
                raise wire.WireError(f"job: known already, or {self._config.max_jobs} fetches are kept")
            self._jobs[message.job] = job
        try:
            for part in message.parts:
                chunks, rows = self._rows(message, part)
                job.chunks.append(chunks)
                job.rows.append([list(row.keys) for row in rows])
                job.groups.append(list(rows))
                job.cells.append(list(range(len(chunks))))
                job.got.append(set())
                job.handles.append(self._prefetch(job, rows) if chunks else None)
                job.brought.append([])
                job.hits.append(None if chunks else [])
        except BaseException:
            self._drop(message.job)
            raise
        self._counters["fetches"] += 1
        return wire.encode(wire.Done())

    @server_module_handler(wire.LOCATE)
    def locate(self, payload: bytes) -> bytes:
        message = wire.decode(payload, wire.Locate)
        cpu: list[tuple[int, ...]] = []
        redis: list[tuple[int, ...]] | None = []
        for part in message.parts:
            chunks, rows = self._rows(message, part)
            keys = [list(row.keys) for row in rows]
            cpu.append(_everywhere(chunks, [[self._in_l1(key) for key in row] for row in keys]))
            held = [self._in_l2(row) for row in keys] if redis is not None else []
            if redis is not None:
                known = [row for row in held if row is not None]
                redis = [*redis, _everywhere(chunks, known)] if len(known) == len(held) else None
        return wire.encode(wire.Located(cpu=tuple(cpu), redis=None if redis is None else tuple(redis)))

    @server_module_handler(wire.POLL)
    def poll(self, payload: bytes) -> bytes:
        message = wire.decode(payload, wire.Job)
        with self._lock:
            job = self._jobs.get(message.job)
        if job is None:
            raise wire.WireError("job: not known (released, or overdue)")
        self._advance(job)
        if not job.done:
            return wire.encode(wire.Fetched(done=False))
        hits = tuple(tuple(hit or ()) for hit in job.hits)
        brought = tuple(tuple(each) for each in job.brought)
        return wire.encode(wire.Fetched(done=True, hits=hits, brought=brought))

    @server_module_handler(wire.RELEASE)
    def release(self, payload: bytes) -> bytes:
        message = wire.decode(payload, wire.Job)
        self._drop(message.job, message.keep)
        return wire.encode(wire.Done())

    @server_module_handler(wire.INVALIDATE)
    def invalidate(self, payload: bytes) -> bytes:
        message = wire.decode(payload, wire.Invalidate)
        keys = [key for part in message.parts for row in self._rows(message, part)[1] for key in row.keys]
        # The copy nearest last: what is read again meanwhile would come back from the shared store.
        l2 = sum(adapter.delete(keys) for adapter in adapters_of(self._storage)) if message.everywhere else 0
        l1, locked = self._storage.delete_l1_keys(keys) if keys else (0, 0)
        self._counters["invalidated"] += l1 + l2
        return wire.encode(wire.Invalidated(l1=l1, locked=locked, l2=l2))

    @server_module_handler(wire.PUBLISH)
    def publish(self, payload: bytes) -> bytes:
        self._catalog.publish(wire.decode(payload, wire.Publish))
        self._counters["published"] += 1
        return wire.encode(wire.Done())

    @server_module_handler(wire.RESOLVE)
    def resolve(self, payload: bytes) -> bytes:
        answer = self._catalog.resolve(wire.decode(payload, wire.Resolve))
        self._counters["resolved" if answer.record else "unresolved"] += 1
        return wire.encode(answer)

    @server_module_handler(wire.STATS)
    def stats(self, payload: bytes) -> bytes:
        wire.decode(payload, wire.Done)
        with self._lock:
            counters = {**self._counters, "jobs": len(self._jobs), "catalog_bytes": self._catalog.size}
        return wire.encode(wire.Stats(counters={**counters, "catalog_errors": self._catalog.errors}))

    # ------------------------------------------------------------------ fetches

    def _rows(
        self, message: wire.Fetch | wire.Locate | wire.Invalidate, part: wire.Part
    ) -> tuple[list[int], list[Any]]:
        """Indexes of a part's chunks, and their object keys in one row per object group and rank."""
        registry = self._context.layout_desc_registry
        layouts = registry.find_group_layout_descs(message.model, message.world_size)
        if not layouts:
            raise wire.WireError("model: no engine has registered this model's KV layout here")
        windows = registry.find_attn_desc(message.model, message.world_size)
        hashes = self._hashes(part)
        chunks = [i for start, end in part.chunks for i in range(start, min(end, len(hashes)))]
        groups = list(range(windows.num_object_groups))
        wanted = [hashes[i] for i in chunks]
        return chunks, ipc_key_to_grouped_object_keys(_key(message, part), wanted, groups, layouts, windows)

    def _in_l1(self, key: Any) -> bool:
        managers = self._storage._l1_managers_by_id.values()
        return any(manager.get_object_state(key) is not None for manager in managers)

    def _in_l2(self, keys: list[Any]) -> list[bool] | None:
        """None when there is no Redis of ours, or it does not answer."""
        adapters = adapters_of(self._storage)
        if not adapters:
            return None
        held = [False] * len(keys)
        for adapter in adapters:
            for i, outcome in enumerate(adapter.store.lookup([kv_key(key) for key in keys])):
                if outcome.is_outage:
                    return None
                held[i] = held[i] or outcome is Outcome.OK
        return held

    def _hashes(self, part: wire.Part) -> list[bytes]:
        if len(part.tokens) % 4:
            raise wire.WireError("parts.tokens: expected int32 token ids")
        tokens = memoryview(part.tokens).cast("i").tolist()
        size = self._context.chunk_size
        wanted = min(max((end for _, end in part.chunks), default=0), len(tokens) // size)
        hasher = self._context.token_hasher
        return [
            TokenHasher.hash_to_bytes(each)
            for each in hasher.compute_chunk_hashes(tokens[: wanted * size], end=wanted * size)
        ]

    def _prefetch(self, job: _FetchJob, rows: list[Any]) -> Any:
        spec = PrefetchTaskSpec(
            key_groups=rows,
            num_kv_readers=job.readers,
            fetching_policy="full",
            lock_mode=PrefetchLockMode.LOCK,
        )
        return self._storage.submit_prefetch_task(spec, external_request_id=job.name)

    def _advance(self, job: _FetchJob) -> None:
        """Ask LMCache for results that are due; each is told once."""
        for i, hit in enumerate(job.hits):
            if hit is not None:
                continue
            result = self._storage.query_prefetch_status(job.handles[i])
            if result is None:
                continue
            asked = job.cells[i]
            rows = [{asked[each] for each in row.get_indices_list()} for row in result.hit_cells]
            common = set.intersection(*rows) if rows else set()
            loaded = {asked[each] for row in result.l2_hit_cells for each in row.get_indices_list()}
            # Chunks that only some rows have cannot be used: their locks go back at once.
            for row, cells in zip(job.rows[i], rows, strict=False):
                self._unlock([row[each] for each in sorted(cells - common)], job.readers)
            job.got[i] |= common
            job.brought[i] = sorted({*job.brought[i], *(job.chunks[i][each] for each in common & loaded)})
            if not self._again(job, i, result):
                job.hits[i] = [job.chunks[i][each] for each in sorted(job.got[i])]

    def _again(self, job: _FetchJob, i: int, result: Any) -> bool:
        """Ask once more for what is there and did not come: while another prefetch brings a chunk from L2,
        LMCache gives it to nobody else."""
        found = [set(row.get_indices_list()) for row in result.found_cells or ()]
        there = {job.cells[i][each] for each in set.intersection(*found)} if found else set()
        left = sorted(there - job.got[i])
        if not left or time.monotonic() > job.retry_until or self._stop.is_set():
            return False
        with self._lock:
            if job.name not in self._jobs:
                return False
        job.cells[i] = left
        rows = [replace(group, keys=[group.keys[each] for each in left]) for group in job.groups[i]]
        job.handles[i] = self._prefetch(job, rows)
        self._counters["fetched_again"] += 1
        return True

    def _drop(self, name: str, keep: tuple[tuple[int, ...], ...] = ()) -> None:
        """Forget a job and give back the locks of what was not retrieved."""
        with self._lock:
            job = self._jobs.pop(name, None)
        if job is None:
            return
        for i in range(len(job.hits)):
            if job.hits[i] is None and job.handles[i] is not None:
                # Still loading: its locks can be given back once they are taken.
                threading.Thread(target=self._drain, args=(job, i), name="leyline-drain", daemon=True).start()
                continue
            self._unlock_hits(job, i, set(keep[i]) if i < len(keep) else set())

    def _drain(self, job: _FetchJob, i: int) -> None:
        until = time.monotonic() + 60
        while job.hits[i] is None and time.monotonic() < until and not self._stop.is_set():
            self._advance(job)
            time.sleep(0.02)
        self._unlock_hits(job, i, set())

    def _unlock_hits(self, job: _FetchJob, i: int, kept: set[int]) -> None:
        hits = set(job.hits[i] or ()) - kept
        for row in job.rows[i] if hits else ():
            self._unlock([row[at] for at, chunk in enumerate(job.chunks[i]) if chunk in hits], job.readers)

    def _unlock(self, keys: list[Any], readers: int) -> None:
        if keys:
            self._storage.finish_read_prefetched(keys, read_locks=readers)

    def _sweep(self) -> None:
        while not self._stop.wait(self._config.sweep_s):
            now = time.monotonic()
            with self._lock:
                overdue = [name for name, job in self._jobs.items() if job.deadline < now]
            for name in overdue:
                self._counters["overdue"] += 1
                log.warning("fetch %s was not retrieved in time; its locks are given back", name)
                self._drop(name)

    def _count_unfinished(self, chunks: int) -> None:
        with self._lock:
            self._counters["unfinished"] += chunks

    def _knows(self, instance: int) -> bool:
        for module in self._modules:
            status: Callable[[], dict[str, Any]] | None = getattr(module, "report_status", None)
            known = status() if status is not None else {}
            for key in ("registered_non_cuda_instance_ids", "registered_gpu_ids", "registered_instance_ids"):
                if instance in known.get(key, ()):
                    return True
        return False


def _everywhere(chunks: list[int], rows: list[list[bool]]) -> tuple[int, ...]:
    """Chunks that every row has."""
    return tuple(chunk for i, chunk in enumerate(chunks) if rows and all(row[i] for row in rows))


def _key(message: wire.Fetch | wire.Locate | wire.Invalidate, part: wire.Part) -> IPCCacheServerKey:
    tokens = memoryview(part.tokens).cast("i").tolist()
    return IPCCacheServerKey(
        model_name=message.model,
        world_size=message.world_size,
        worker_id=None,
        num_kv_readers=message.readers,
        token_ids=tuple(tokens),
        start=0,
        end=len(tokens),
        request_id=message.job if isinstance(message, wire.Fetch) else "leyline-locate",
        cache_salt=part.salt,
    )


def build_server_modules(build: Any) -> LeylineModule:
    """Factory that ``--server-module`` names. Raises for an unsupported LMCache or a wrong ``config``."""
    versions.check("lmcache")
    config = ModuleConfig.of(dict(build.config))
    shared = open_metadata(config.redis) if config.redis is not None else None
    return LeylineModule(build, config, shared)
