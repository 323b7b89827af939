"""LMCache's L2 tier on Redis: ``lmcache server --l2-adapter '{"type": "plugin", ...}'``.

    {"type": "plugin", "module_path": "leyline_lmcache.connector.l2", "class_name": "LeylineL2Adapter",
     "adapter_params": {"url": "redis://redis:6379", "ttl": 86400}}

It serves any engine that LMCache serves, with or without edits. LMCache waits without a time-out for
every task it submits, and one that never ends blocks all later lookups; so here every task ends, in
bounded time, whatever Redis does. Contract:
``lmcache.v1.distributed.l2_adapters.base.L2AdapterInterface``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.platform import create_event_notifier

from .fence import Fence
from .fenced import FencedStore
from .lanes import Lanes, Part
from .redis.client import RedisClient
from .redis.keys import KVKey
from .redis.options import OptionsError, RedisOptions, read_yaml
from .redis.outcome import Outcome, StorageError
from .redis.store import KVStore, RedisKVStore
from .redis.wire import Deadline

logger = logging.getLogger(__name__)

# Less than this for one connection is not worth waking another thread.
_PART_BYTES = 1 << 20
_TICK_S = 0.25

TaskId = int


def _some_connections() -> int:
    """Two feed one Redis; more help with TLS and several nodes, where there are cores for them."""
    return max(2, min(4, len(os.sched_getaffinity(0))))


@dataclass(frozen=True, slots=True)
class L2Options:
    """Options of the adapter beside those of Redis.

    Attributes:
        redis: see `RedisOptions`; its keys stand beside these.
        load_connections, store_connections, lookup_connections: threads, and so connections at most, for each
            kind of task. By default 2 to 4 for loads and as many for stores, as there are cores.
        max_capacity_gb: bytes (in GiB) that this server may have stored; more is refused, and LMCache's
            eviction
            (``"eviction"`` beside ``"type"``) keeps below it. 0: no limit but Redis' own.
    """

    redis: RedisOptions
    load_connections: int = field(default_factory=_some_connections)
    store_connections: int = field(default_factory=_some_connections)
    lookup_connections: int = 1
    max_capacity_gb: float = 0.0

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> L2Options:
        """Check ``adapter_params``; ``config_file`` names a YAML file with the same keys, which come second.

        Raises:
            OptionsError: the message names the key and what is accepted.
        """
        values = dict(params)
        file = values.pop("config_file", None)
        if file is not None:
            if not isinstance(file, str):
                raise OptionsError(f"config_file: expected a path, got {type(file).__name__}")
            values = {**read_yaml(Path(file).expanduser()), **values}
        own = {field.name for field in fields(cls)} - {"redis"}
        known = ("config_file", *sorted(own), *RedisOptions.known())
        for key in values:
            if key not in known and key not in ("password", "sentinel_password"):
                raise OptionsError(f"{key}: unknown key; known keys are {', '.join(known)}")
        mine = {key: values.pop(key) for key in list(values) if key in own}
        for key, value in mine.items():
            if key == "max_capacity_gb":
                if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
                    raise OptionsError(f"{key}: expected a number of GiB, 0 or more, got {value!r}")
            elif not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 64:
                raise OptionsError(f"{key}: expected an integer from 1 to 64, got {value!r}")
        return cls(RedisOptions.of(values), **mine)


class LeylineL2AdapterConfig(L2AdapterConfigBase):
    """The options as LMCache's plugin loader wants them."""

    def __init__(self, options: L2Options) -> None:
        self.options = options

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> LeylineL2AdapterConfig:
        """Raises OptionsError (a ValueError)."""
        return cls(L2Options.of(d))

    @classmethod
    def help(cls) -> str:
        """Text for LMCache's command line."""
        own = [field.name for field in fields(L2Options) if field.name != "redis"]
        return f"Leyline's Redis adapter; keys: config_file, {', '.join((*own, *RedisOptions.known()))}"


class LeylineL2Adapter(L2AdapterInterface):
    """See the module.

    Args:
        config: options.
        l1_memory_desc: LMCache's; not needed.
        store: where blocks are kept, instead of the Redis of the options.
        fence: shared with whoever forgets; also found as ``adapter.fence``.
    """

    def __init__(
        self,
        config: LeylineL2AdapterConfig,
        l1_memory_desc: object = None,
        *,
        store: KVStore | None = None,
        fence: Fence | None = None,
    ) -> None:
        options = config.options
        super().__init__(max_capacity_bytes=int(options.max_capacity_gb * 1024**3))
        self.options = options
        self.fence = fence or Fence()
        self.store = FencedStore(store or RedisKVStore(RedisClient(options.redis)), self.fence)
        self._lock = threading.Lock()
        self._next_task = 0
        self._stores: dict[TaskId, L2StoreResult] = {}
        self._lookups: dict[TaskId, Bitmap] = {}
        self._loads: dict[TaskId, Bitmap] = {}
        self._ledger = _Ledger(options.redis.ttl)
        self._store_event = create_event_notifier()
        self._lookup_event = create_event_notifier()
        self._load_event = create_event_notifier()
        self._store_lanes = Lanes("leyline-l2-store", options.store_connections)
        self._load_lanes = Lanes("leyline-l2-load", options.load_connections)
        self._lookup_lanes = Lanes("leyline-l2-lookup", options.lookup_connections)
        self._lanes = (self._store_lanes, self._load_lanes, self._lookup_lanes)
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="leyline-l2-keeper", daemon=True)
        self._keeper.start()
        logger.info("leyline L2 adapter on %s", self.store.status()["where"])

    # -- LMCache: event fds --------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        """Readable when a store has ended."""
        return int(self._store_event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when a lookup has ended."""
        return int(self._lookup_event.fileno())

    def get_load_event_fd(self) -> int:
        """Readable when a load has ended."""
        return int(self._load_event.fileno())

    # -- LMCache: store ------------------------------------------------------------------------

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> TaskId:
        """Write objects; see `pop_completed_store_tasks`."""
        task = self._new_task()
        names = [kv_key(key) for key in keys]
        views = [_view(item) for item in objects]

        def run(part: range, deadline: Deadline) -> list[Outcome]:
            items = [(names[i], views[i]) for i in part]
            room = self._room()
            if room is not None:
                fitting = _fitting([len(view) for _, view in items], room)
                stored = self.store.store(items[:fitting], deadline) if fitting else []
                return stored + [Outcome.OVER_CAPACITY] * (len(items) - fitting)
            return self.store.store(items, deadline)

        def end(outcomes: list[Outcome]) -> None:
            written = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.OK]
            # A block behind a fence is refused on purpose; that is no failure of the tier.
            whole = all(outcome in (Outcome.OK, Outcome.FENCED) for outcome in outcomes)
            try:
                stored = [keys[i] for i in written]
                new = self._ledger.add(stored, [len(views[i]) for i in written])
                if stored:
                    self._notify_keys_stored(stored, new)
            finally:
                result = L2StoreResult(whole, sum(len(views[i]) for i in written) if whole else 0)
                self._publish(self._stores, task, result, self._store_event)

        self._submit(self._store_lanes, [len(view) for view in views], run, end)
        return task

    def pop_completed_store_tasks(self) -> dict[TaskId, Any]:
        """Results of the stores that have ended since the last call."""
        with self._lock:
            done, self._stores = self._stores, {}
            return done

    # -- LMCache: lookup -----------------------------------------------------------------------

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: object) -> TaskId:
        """Ask which objects there are. Their TTL begins anew: that is the lock."""
        task = self._new_task()
        names = [kv_key(key) for key in keys]

        def run(part: range, deadline: Deadline) -> list[Outcome]:
            return self.store.lookup([names[i] for i in part], deadline)

        def end(outcomes: list[Outcome]) -> None:
            try:
                self._ledger.touch(_where(keys, outcomes, Outcome.OK))
                self._forget_vanished(_where(keys, outcomes, Outcome.MISSING))
            finally:
                self._publish(self._lookups, task, _bitmap(outcomes), self._lookup_event)

        self._submit(self._lookup_lanes, [0] * len(keys), run, end)
        return task

    def query_lookup_and_lock_result(self, task_id: TaskId) -> Any:
        """The lookup's bitmap, once; None until it has ended."""
        with self._lock:
            return self._lookups.pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing to do: a load of what has gone meanwhile is a miss."""

    # -- LMCache: load -------------------------------------------------------------------------

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> TaskId:
        """Read objects into the memory given."""
        task = self._new_task()
        names = [kv_key(key) for key in keys]
        views = [_view(item) for item in objects]

        def run(part: range, deadline: Deadline) -> list[Outcome]:
            return self.store.load([(names[i], views[i]) for i in part], deadline)

        def end(outcomes: list[Outcome]) -> None:
            try:
                loaded = _where(keys, outcomes, Outcome.OK)
                if loaded:
                    self._notify_keys_accessed(loaded)
                gone = (Outcome.MISSING, Outcome.SHORT, Outcome.CORRUPT)
                self._forget_vanished(_where(keys, outcomes, *gone))
            finally:
                self._publish(self._loads, task, _bitmap(outcomes), self._load_event)

        self._submit(self._load_lanes, [len(view) for view in views], run, end)
        return task

    def query_load_result(self, task_id: TaskId) -> Any:
        """The load's bitmap, once; None until it has ended."""
        with self._lock:
            return self._loads.pop(task_id, None)

    # -- LMCache: delete, list, usage ----------------------------------------------------------

    def delete(self, keys: list[Any]) -> int:
        """Delete objects; how many there were.

        Never raises: LMCache's eviction thread would end with it. `erase` tells each key's outcome.
        """
        return self.erase(keys).count(Outcome.OK)

    def erase(self, keys: Sequence[Any]) -> list[Outcome]:
        """Delete objects: OK was there and is gone, MISSING was not there, else nothing is known."""
        outcomes = self.store.delete([kv_key(key) for key in keys]) if keys else []
        self._forget_vanished(_where(keys, outcomes, Outcome.OK, Outcome.MISSING))
        return outcomes

    def verify(self, keys: Sequence[Any]) -> list[Outcome]:
        """Read objects and check them: what is there, past any fence."""
        return self.store.verify([kv_key(key) for key in keys]) if keys else []

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> Any:
        """Keys in Redis, this server's or not.

        Raises:
            ValueError: `page_size` or `cursor` is wrong.
            RuntimeError: Redis cannot be asked.
        """
        try:
            page = self.store.scan(model_name, page_size, cursor)
        except StorageError as error:
            raise RuntimeError(str(error)) from None
        entries = []
        for entry in page.entries:
            try:
                key = object_key(entry.key)
            except ValueError:
                continue  # not a key LMCache could ask for
            entries.append(KeyEntry(key=key.to_encoded_object_key(), size_bytes=entry.size))
        return KeyListPage(entries=tuple(entries), next_page_token=page.cursor)

    def report_status(self) -> dict[str, Any]:
        """For ``/status``: healthy means that Redis answers and all threads live."""
        alive = all(lanes.is_alive for lanes in self._lanes) and self._keeper.is_alive()
        status = self.store.status()
        usage = self.get_usage()
        return {
            "is_healthy": alive and bool(status["up"]),
            "type": "leyline",
            "redis": status,
            "threads_alive": alive,
            "queued": {"store": self._store_lanes.waiting, "load": self._load_lanes.waiting},
            "stored_keys": len(self._ledger),
            "stored_bytes": usage.total_bytes_used,
            "capacity_bytes": usage.total_capacity_bytes,
        }

    def close(self) -> None:
        """End every task, thread and connection."""
        if self._closing.is_set():
            return
        self._closing.set()
        timeout = self.options.redis.socket_connect_timeout + 2 * self.options.redis.socket_timeout
        for lanes in self._lanes:
            lanes.close(0.0)
        # Whoever waits for Redis now is woken.
        self.store.close()
        stopped = [lanes.close(timeout) for lanes in self._lanes]
        self._keeper.join(timeout)
        if not all(stopped) or self._keeper.is_alive():
            logger.error("leyline L2 adapter: a thread did not end in %g s", timeout)
        for event in (self._store_event, self._lookup_event, self._load_event):
            event.close()

    # -- tasks ---------------------------------------------------------------------------------

    def _new_task(self) -> TaskId:
        with self._lock:
            self._next_task += 1
            return self._next_task

    def _submit(
        self,
        lanes: Lanes,
        sizes: Sequence[int],
        run: Callable[[range, Deadline], list[Outcome]],
        end: Callable[[list[Outcome]], None],
    ) -> None:
        """Split a task over a few threads; `end` is called once, after the last."""
        deadline = Deadline(self.options.redis.task_timeout)
        ranges = _split(sizes, lanes.count)
        outcomes = [Outcome.ERROR] * len(sizes)
        left = [len(ranges)]
        lock = threading.Lock()

        def part_of(part: range) -> Part:
            def part_end(ends: list[Outcome]) -> None:
                outcomes[part.start : part.stop] = ends
                with lock:
                    left[0] -= 1
                    if left[0]:
                        return
                end(outcomes)

            return Part(len(part), deadline, lambda deadline: run(part, deadline), part_end)

        if not ranges:
            end([])
            return
        lanes.submit([part_of(part) for part in ranges])

    def _publish(self, results: dict[TaskId, Any], task: TaskId, result: Any, event: Any) -> None:
        with self._lock:
            # `pop_completed_store_tasks` replaces the dictionary.
            (self._stores if event is self._store_event else results)[task] = result
        if not self._closing.is_set():
            event.notify()

    def _keep(self) -> None:
        """End overdue parts, carry out pending deletions, age the ledger."""
        while not self._closing.wait(_TICK_S):
            try:
                for lanes in self._lanes:
                    lanes.expire()
                self.store.flush()
                self._drop(self._ledger.expired())
            except Exception:
                logger.exception("leyline L2 adapter: housekeeping failed")

    # -- accounting ----------------------------------------------------------------------------

    def _room(self) -> int | None:
        """Bytes that may still be stored; None: any."""
        if not self._max_capacity_bytes:
            return None
        return max(0, int(self._max_capacity_bytes - self.get_usage().total_bytes_used))

    def _forget_vanished(self, keys: Sequence[Any]) -> None:
        self._drop(self._ledger.drop(keys))

    def _drop(self, dropped: list[tuple[Any, int]]) -> None:
        if dropped:
            self._notify_keys_deleted([key for key, _ in dropped], [size for _, size in dropped])


class _Ledger:
    """What this server has stored and is not known to be gone: sizes by key, least recently used first."""

    def __init__(self, ttl: float | None) -> None:
        self._ttl = ttl
        self._lock = threading.Lock()
        self._entries: OrderedDict[Any, tuple[int, Deadline | None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, keys: Sequence[Any], sizes: Sequence[int]) -> list[int]:
        """Enter keys; how many bytes each adds (0 for one that was there)."""
        with self._lock:
            new = [0 if key in self._entries else size for key, size in zip(keys, sizes, strict=True)]
            for key, size in zip(keys, sizes, strict=True):
                self._entries[key] = (size, self._life())
                self._entries.move_to_end(key)
            return new

    def touch(self, keys: Sequence[Any]) -> None:
        """Their TTL began anew."""
        if self._ttl is None:
            return
        with self._lock:
            for key in keys:
                found = self._entries.get(key)
                if found is not None:
                    self._entries[key] = (found[0], self._life())
                    self._entries.move_to_end(key)

    def drop(self, keys: Sequence[Any]) -> list[tuple[Any, int]]:
        """Strike keys out; those that were entered, with their sizes."""
        with self._lock:
            found = [(key, self._entries.pop(key, None)) for key in keys]
        return [(key, entry[0]) for key, entry in found if entry is not None]

    def expired(self) -> list[tuple[Any, int]]:
        """Strike out what Redis has let expire unless somebody else used it."""
        out: list[tuple[Any, int]] = []
        with self._lock:
            while self._ttl is not None and self._entries:
                key, (size, life) = next(iter(self._entries.items()))
                if life is None or not life.is_past:
                    break
                del self._entries[key]
                out.append((key, size))
        return out

    def _life(self) -> Deadline | None:
        return None if self._ttl is None else Deadline(self._ttl)


def kv_key(key: Any) -> KVKey:
    """LMCache's ObjectKey as ours."""
    return KVKey(key.model_name, key.chunk_hash, key.kv_rank, key.object_group_id, key.cache_salt)


def object_key(key: KVKey) -> Any:
    """The reverse. Raises ValueError for a name that LMCache does not allow."""
    return ObjectKey(
        chunk_hash=key.chunk,
        model_name=key.model,
        kv_rank=key.rank,
        object_group_id=key.group,
        cache_salt=key.salt,
    )


def adapters_of(storage_manager: Any) -> list[LeylineL2Adapter]:
    """Our adapters among those of a StorageManager, also behind LMCache's serde wrapper."""
    found = []
    for _, adapter in storage_manager.l2_adapters():
        inner = adapter
        while not isinstance(inner, LeylineL2Adapter) and hasattr(inner, "_inner"):
            inner = inner._inner
        if isinstance(inner, LeylineL2Adapter):
            found.append(inner)
    return found


def _view(item: Any) -> memoryview:
    """The object's bytes where they are."""
    # LMCache's view is of ctypes' unsigned bytes, format "<B", which Python cannot slice-assign.
    return memoryview(item.byte_array).cast("B")


def _where(keys: Sequence[Any], outcomes: Sequence[Outcome], *wanted: Outcome) -> list[Any]:
    return [key for key, outcome in zip(keys, outcomes, strict=True) if outcome in wanted]


def _bitmap(outcomes: Sequence[Outcome]) -> Any:
    bitmap = Bitmap(len(outcomes))
    for i, outcome in enumerate(outcomes):
        if outcome is Outcome.OK:
            bitmap.set(i)
    return bitmap


def _fitting(sizes: Sequence[int], room: int) -> int:
    """How many of the first items fit into `room`."""
    for count, size in enumerate(sizes):
        room -= size
        if room < 0:
            return count
    return len(sizes)


def _split(sizes: Sequence[int], lanes: int) -> list[range]:
    """Ranges of about equal size, as many as are worth a thread each."""
    count = len(sizes)
    parts = min(lanes, count, max(1, sum(sizes) // _PART_BYTES))
    bounds = [round(count * i / parts) for i in range(parts + 1)] if parts else []
    return [range(a, b) for a, b in pairwise(bounds)]
