"""The editable radix cache with LMCache behind it: edited requests look up their view, not their prefix.

Upstream: ``mem_cache/storage/lmcache/lmcache_unified_radix_cache.py``.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from lmcache.integration.sglang.lmcache_mp_metadata import LMCachePendingStore
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.storage.lmcache.lmcache_unified_radix_cache import LMCacheUnifiedRadixCache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from . import wire
from .cache import EditableCache
from .lineage import key_array
from .packing import Packing
from .packs import Shelf
from .reconnect import reconnecting
from .records import namespace_of
from .runtime import Runtime
from .settings import Settings
from .stored import StoredTier

log = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 2.0


class EditableLMCacheRadixCache(EditableCache, LMCacheUnifiedRadixCache):
    """With LMCache. Without our module in ``lmcache server``, edits use the GPU tier alone."""

    _stored: StoredTier | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with reconnecting():
            super().__init__(*args, **kwargs)

    def attach_stored_tier(self, runtime: Runtime, settings: Settings) -> None:
        """Use the CPU and Redis tiers for edits, if the server has our module."""
        if self._tier is None or runtime.layout is None:
            return
        tier = StoredTier(self.lmcache_connector, runtime.model, settings.tier_timeout)
        try:
            welcome = self.lmcache_connector.greet(_HELLO_TIMEOUT_S)
        except (OSError, wire.WireError) as error:
            # A server that comes back with our module is used.
            log.warning("edits use the GPU tier alone: %s", error)
        else:
            log.info(
                "edits use LMCache (chunks of %d tokens); bases are %s",
                welcome.chunk_size,
                "shared between nodes" if welcome.shared else "known to this node",
            )
        self._stored = tier
        self._deferred: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
        self._tier.attach_stored(tier)

    # ------------------------------------------------------------------ loading

    def prefetch_from_storage(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """An exact lookup would cut the match of an edited request down to its exact prefix."""
        if self._tier is not None:
            if self._tier.begin_lookup(request.rid):
                self._deferred[request.rid] = (request, args, kwargs)
                return None
            if self._tier.is_planned(request.rid):
                return None
        return super().prefetch_from_storage(request, *args, **kwargs)

    def check_prefetch_progress(self, handle: Any) -> bool:
        over = self._tier.poll_lookup(handle.rid) if self._tier is not None else None
        if over is False:
            return False
        if over and self._tier is not None:
            request, args, kwargs = self._deferred.pop(handle.rid)
            if not self._tier.is_planned(handle.rid):
                # The edit is refused: now the exact prefix is worth looking up.
                super().prefetch_from_storage(request, *args, **kwargs)
        return bool(super().check_prefetch_progress(handle))

    def check_hicache_events(self) -> None:
        super().check_hicache_events()
        if self._stored is not None and self._tier is not None:
            self._tier.advance_lookups()

    def has_pending_cache_operations(self) -> bool:
        return bool(super().has_pending_cache_operations() or (self._tier is not None and self._tier.looking))

    def release_aborted_request(self, handle: Any) -> None:
        if self._stored is not None:
            self._deferred.pop(handle.rid, None)
        super().release_aborted_request(handle)

    # ------------------------------------------------------------------ storing

    def _submit_store(self, req: Any, token_ids: Any) -> None:
        """Exact KV as upstream does; what an edited view computed, in packs."""
        super()._submit_store(req, token_ids)
        if self._stored is None or self._tier is None or not req.finished():
            return
        try:
            for packing in self._tier.packings(req):
                self._store_pack(req, packing)
        except Exception:
            log.exception("the edited KV of request %s was not stored", req.rid)

    def _store_pack(self, req: Any, packing: Packing) -> None:
        assert self._stored is not None
        connector = self.lmcache_connector
        key = RadixKey(key_array(packing.keys), req.extra_key, cache_salt=req.cache_salt)
        matched = UnifiedRadixCache.match_prefix(self, MatchPrefixParams(key=key))
        if not connector._sync_success(matched.device_prefix_len >= packing.end):
            return
        path = self.path_device_indices(matched.last_device_node)
        shelf = Shelf(packing.info, packing.pack)
        names = shelf.names(self._stored.chunk_size).tolist()
        slots = torch.cat([path[start:end] for start, end in packing.pack])
        if len(slots) < len(names):
            # A chunk is stored whole; what fills it up is never read.
            page = slots[-self.page_size :]
            slots = torch.cat([slots, page.repeat((len(names) - len(slots)) // self.page_size)])
        lock = self.inc_lock_ref(matched.last_device_node).to_dec_params()
        rid = self._stored.request_id()
        operation = None
        try:
            operation = connector.submit_store(
                rid,
                names,
                connector.device_indices_by_group(slots),
                device_indices_start=0,
                cache_salt=self._stored.salt(namespace_of(req), packing.info.lineage),
            )
        finally:
            if operation is None:
                self.dec_lock_ref(matched.last_device_node, lock)
        if operation is None:
            return
        self._pending_stores.append(LMCachePendingStore(operation, matched.last_device_node, lock))
        self._pending_store_counts[rid] = self._pending_store_counts.get(rid, 0) + 1
        self._request_session_finish(rid)
