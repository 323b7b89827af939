"""The tree and allocator calls of the GPU tier: match, lock, take over, insert.

Upstream: SGLang ``mem_cache/unified_radix_cache.py`` and
``unified_cache/unified_tree_core_interface.py``. Calls go to ``UnifiedRadixCache`` itself, never through
the overrides, so that nothing here can plan or splice again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from leyline_lmcache.reasons import Fallback, FallbackReason

from .records import Namespace


@dataclass(frozen=True, slots=True)
class Path:
    """What the tree holds of a key: ``length`` tokens ending at ``node``."""

    node: int
    length: int


@dataclass(frozen=True, slots=True)
class Taken:
    """Slots taken out of the tree: ``kept`` int64 ``[n]`` belong to the caller, ``freed`` tokens went back to
    the pool."""

    kept: torch.Tensor
    freed: int


class Slots:
    """KV slots of one ``UnifiedRadixCache``, by path."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._core = cache.tree_core
        self._allocator = cache.token_to_kv_pool_allocator

    @property
    def page_size(self) -> int:
        return int(self._cache.page_size)

    def available(self) -> int:
        """Free slots."""
        return int(self._allocator.available_size())

    def accounting(self) -> tuple[int, int, int]:
        """(free, evictable, protected) tokens; their sum never changes while nothing runs (I6)."""
        return self.available(), int(self._cache.evictable_size()), int(self._cache.protected_size())

    def match(self, keys: array[int], namespace: Namespace) -> Path:
        """Walk the tree along a key."""
        result = UnifiedRadixCache.match_prefix(
            self._cache, MatchPrefixParams(key=_radix_key(keys, namespace))
        )
        return Path(result.last_device_node, result.device_prefix_len)

    def indices(self, path: Path, namespace: Namespace) -> torch.Tensor:
        """Slots of a path, int64 ``[length]``, on the pool's device."""
        root = self._cache.root_node_handle(namespace.extra_key)
        found: torch.Tensor = self._core.collect_full_device_indices(path.node, root)
        return found[: path.length].to(torch.int64)

    @contextmanager
    def locked(self, path: Path) -> Iterator[None]:
        """Keep a path from being evicted."""
        lock = self._cache.lock(path.node)
        try:
            yield
        finally:
            self._cache.unlock(lock)

    def lock(self, path: Path) -> Any:
        return self._cache.lock(path.node)

    def unlock(self, lock: Any) -> None:
        self._cache.unlock(lock)

    def allocate(self, count: int) -> torch.Tensor:
        """``count`` free slots (whole pages), int64, evicting what is unlocked if need be.

        Raises:
            Fallback: ``no_memory``.
        """
        if self.available() < count:
            self._allocator.evict_to_free_tokens(self._cache, count)
        slots = self._allocator.alloc(count) if self.available() >= count else None
        if slots is None:
            raise Fallback(
                FallbackReason.NO_MEMORY,
                f"{count} slots are needed, {self.available()} are free and the rest is in use",
            )
        return slots.to(torch.int64)

    def free(self, slots: torch.Tensor) -> None:
        if slots.numel():
            self._allocator.free(slots)

    def insert(self, keys: array[int], namespace: Namespace, slots: torch.Tensor, held: int) -> int:
        """Publish ``slots`` under ``keys``; the tree holds the first ``held`` already. Returns what it
        held before.

        The tree owns the slots afterwards, and gives back to the pool what another insert had published
        first.
        """
        result = UnifiedRadixCache.insert(
            self._cache, InsertParams(key=_radix_key(keys, namespace), value=slots, prev_prefix_len=held)
        )
        return int(result.prefix_len)

    def take_tail(
        self, keys: array[int], namespace: Namespace, cut: int, start: int, end: int
    ) -> Taken | None:
        """Take the tokens from ``cut`` on out of the tree, without freeing ``[start, end)``.

        ``keys`` is the whole path. Only an unlocked chain without branches can be taken: on anything else
        the tree core panics and every later call fails, so that is checked first and answered with None,
        nothing changed.
        """
        page = self.page_size
        if cut % page or start % page or end % page:
            return None
        whole = self.match(keys, namespace)
        if whole.length < end or whole.length <= cut:
            return None
        top = self.match(keys[:cut], namespace)  # splits a node at the cut
        whole = self.match(keys, namespace)
        if top.length != cut:
            return None
        (nodes,) = self._core.collect_path_info([whole.node])
        tail = [node for node in nodes if node.path_start >= cut]
        if not tail or tail[0].path_start != cut or tail[-1].path_end != whole.length:
            return None
        if tail[-1].num_children or any(node.num_children != 1 for node in tail[:-1]):
            return None
        if any(node.full_value_len != node.path_end - node.path_start for node in tail):
            return None
        if self._anything_locked(top, whole, cut):
            return None
        parts: list[torch.Tensor] = []
        for node in reversed(tail):
            result = self._core.evict_device_leaf(node.node_id, self._cache.is_write_back)
            # Popped, so that the slots are handed over instead of freed.
            parts[:0] = result.device_frees.pop(ComponentType.FULL)
            self._cache._apply_eviction_result(result)
        slots = torch.cat(parts).to(torch.int64)
        dropped = torch.cat([slots[: start - cut], slots[end - cut :]])
        self.free(dropped)
        return Taken(slots[start - cut : end - cut], int(dropped.numel()))

    def _anything_locked(self, top: Path, whole: Path, cut: int) -> bool:
        """Whether a node below ``cut`` is locked: then locking the whole path protects fewer new tokens."""
        outer = self._cache.lock(top.node) if cut else None
        try:
            before = self._cache.protected_size()
            inner = self._cache.lock(whole.node)
            try:
                return bool(self._cache.protected_size() - before != whole.length - cut)
            finally:
                self._cache.unlock(inner)
        finally:
            if outer is not None:
                self._cache.unlock(outer)


def _radix_key(keys: array[int], namespace: Namespace) -> RadixKey:
    return RadixKey(keys, namespace.extra_key, cache_salt=namespace.cache_salt)
