"""The radix cache SGLang runs: thin overrides around :class:`GpuTier`.

Upstream: ``UnifiedRadixCache`` (``mem_cache/unified_radix_cache.py``) and, with ``--enable-lmcache``,
``LMCacheUnifiedRadixCache``. An exception in an override would kill the scheduler and with it the server,
so each one is caught, counted as ``internal_error`` and answered on the exact path.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_memory

from leyline_lmcache.reasons import Fallback, FallbackReason

from . import versions
from .gpu_tier import GpuTier
from .report import Reporter
from .runtime import inspect_runtime
from .settings import Settings
from .slots import Path

if TYPE_CHECKING:
    # The mixin goes in front of one of SGLang's caches.
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache as _Base
else:
    _Base = object

log = logging.getLogger(__name__)


class EditableCache(_Base):
    """Mixin: edited requests see tagged keys, everybody else sees SGLang's cache unchanged (I1)."""

    # SGLang's constructor calls overrides before the tier exists.
    _tier: GpuTier | None = None
    _publishing: Any = None

    def attach_tier(self, tier: GpuTier) -> None:
        self._tier = tier

    # ------------------------------------------------------------------ lookups

    def match_prefix(self, params: Any) -> Any:
        tier, req = self._tier, params.req
        if tier is None or req is None:
            return super().match_prefix(params)
        plan = tier.plan_of(req)
        if plan is None:
            return super().match_prefix(params)
        try:
            return self._match_edited(tier, plan, params)
        except Fallback as why:
            tier.drop(req, why)
        except Exception as error:
            log.exception("splicing request %s failed", req.rid)
            tier.drop(
                req,
                Fallback(
                    FallbackReason.INTERNAL_ERROR, f"{type(error).__name__} while splicing; see the log"
                ),
            )
        return super().match_prefix(params)

    def _match_edited(self, tier: GpuTier, plan: Any, params: Any) -> Any:
        key = params.key
        keys = plan.keys(key.token_ids)
        edited = replace(params, key=self._edited_key(key, keys))
        result = super().match_prefix(edited)
        if key.limit is None:
            return result  # a probe of the scheduling policy, not an admission
        held = Path(result.last_device_node, result.device_prefix_len)
        if tier.reach(params.req, plan, keys, held, len(key)):
            # Other keys, if the view had to be cut short.
            again = self._edited_key(key, plan.keys(key.token_ids))
            result = super().match_prefix(replace(params, key=again))
            if result.device_prefix_len < min(plan.goal, len(key)):
                raise Fallback(
                    FallbackReason.INTERNAL_ERROR,
                    f"{result.device_prefix_len} of {plan.goal} tokens are in the tree after the splice",
                )
        return result

    # ------------------------------------------------------------------ publishing

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        self._publishing = req
        try:
            super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        finally:
            self._publishing = None
        if self._tier is None:
            return
        try:
            self._tier.checkpointed(req, up_to)
        except Exception:
            log.exception("request %s could not be remembered as a base", req.rid)

    def insert(self, params: Any) -> Any:
        req = self._publishing
        if req is not None and self._tier is not None:
            plan = self._tier.plan_of(req)
            if plan is not None:
                # No fallback here: this KV must never be published under exact keys.
                key = params.key
                params = replace(params, key=self._edited_key(key, plan.keys(key.token_ids)))
        return super().insert(params)

    def release_aborted_request(self, handle: Any) -> None:
        if self._tier is not None:
            self._tier.ended(handle.rid)
        super().release_aborted_request(handle)

    # ------------------------------------------------------------------ life cycle

    def reset(self) -> None:
        super().reset()
        if self._tier is not None:
            self._tier.reset()

    @staticmethod
    def _edited_key(key: Any, keys: Any) -> RadixKey:
        return RadixKey(
            keys, key.extra_key, is_bigram=key.is_bigram, limit=key.limit, cache_salt=key.cache_salt
        )


class EditableRadixCache(EditableCache, UnifiedRadixCache):
    """Without LMCache."""


def build_cache(ctx: Any) -> Any:
    """Radix-cache factory (upstream ``mem_cache/registry.py``, ``RadixCacheFactory``).

    Raises:
        UnsupportedVersion: SGLang or LMCache is not a supported release.
        SettingsError: the configuration is wrong. Both stop the server at start, by name.
    """
    versions.check("sglang")
    memory = get_memory()
    lmcache_file = memory.lmcache_config_file if memory.enable_lmcache else None
    settings = Settings.load(lmcache_config=lmcache_file)
    cache = _with_lmcache(ctx, lmcache_file) if memory.enable_lmcache else _without_lmcache(ctx)
    runtime = inspect_runtime(ctx, cache)
    layout = runtime.layout
    # One process speaks for all tensor-parallel ranks.
    quiet = settings if ctx.tp_rank == 0 else replace(settings, journal_dir=None, metrics_port=None)
    reporter = Reporter(quiet, row_bytes=layout.row_bytes if layout else 0)
    stream = getattr(ctx.tp_worker.model_runner, "forward_stream", None)
    tier = GpuTier(cache, runtime, settings, reporter, stream)
    cache.attach_tier(tier)
    if memory.enable_lmcache:
        cache.attach_stored_tier(runtime, settings)
    return cache


def _without_lmcache(ctx: Any) -> Any:
    return create_unified_radix_cache(ctx, cache_class=EditableRadixCache)


def _with_lmcache(ctx: Any, config_file: str | None) -> Any:
    versions.check("lmcache")
    from .lmcache_cache import EditableLMCacheRadixCache

    components = [ComponentType.FULL]
    if ctx.is_hybrid_swa:
        components.append(ComponentType.SWA)
    if ctx.is_hybrid_ssm:
        components.append(ComponentType.MAMBA)
    ctx.params.tree_components = tuple(components)
    return EditableLMCacheRadixCache(
        ctx.params,
        model_config=ctx.model_config,
        tp_size=ctx.tp_size,
        tp_rank=ctx.tp_rank,
        lmcache_config_file=config_file,
        forward_stream=ctx.tp_worker.model_runner.forward_stream,
    )
