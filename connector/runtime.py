"""What of this engine can be spliced, decided once at start.

The answer is a :class:`KVLayout`, or a named reason; in the second case every request is served as
without Leyline and edits are refused with that reason.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.runtime_context import get_memory, get_spec

from leyline_lmcache.kernels.layout import KVLayout, LayoutError
from leyline_lmcache.kernels.probe import probe_model
from leyline_lmcache.kernels.rope import UnsupportedRope
from leyline_lmcache.kernels.splice import prepare
from leyline_lmcache.reasons import Fallback, FallbackReason

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Runtime:
    """The engine as the splice sees it.

    Attributes:
        layout: the pool's planes; None when nothing can be spliced.
        refusal: why not, when ``layout`` is None.
        model: identity of model and dtype, for buffer ids.
        ranks: tensor-parallel ranks that must decide alike.
        kernel: what moves and turns rows.
    """

    layout: KVLayout | None
    refusal: Fallback | None
    model: str
    ranks: int
    kernel: Literal["torch", "triton"] = "torch"


def inspect_runtime(ctx: Any, cache: Any) -> Runtime:
    """Look at a ``TreeCacheBuildContext`` and the cache built from it. Never raises."""
    pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    model = f"{ctx.model_config.model_path}:{getattr(pool, 'dtype', None)}"
    try:
        _check_cache(ctx, cache)
        layout = pool_layout(pool, ctx.tp_worker.model_runner.model)
    except Fallback as refusal:
        log.warning("Leyline serves without splicing: %s", refusal)
        return Runtime(None, refusal, model, 1)
    except Exception as error:  # an unforeseen pool or model must not stop the server
        log.exception("Leyline serves without splicing: the engine could not be inspected")
        fault = Fallback(FallbackReason.INTERNAL_ERROR, f"inspection failed: {type(error).__name__}")
        return Runtime(None, fault, model, 1)
    kernel: Literal["torch", "triton"] = "torch"
    try:
        # Here, because the first edited request would wait seconds for the compiler.
        kernel = prepare(layout)
    except Exception:
        log.exception("the Triton kernel cannot be compiled here; torch moves and turns rows instead")
    log.info(
        "Leyline splices %d planes with %s, %d bytes a token, %d of them turn",
        len(layout.planes),
        kernel,
        layout.row_bytes,
        layout.band_bytes,
    )
    return Runtime(layout, None, model, int(cache.tp_world_size), kernel)


def pool_layout(pool: Any, model: Any) -> KVLayout:
    """Planes of a KV pool, with the RoPE probed from the model.

    Raises:
        Fallback: ``unsupported_runtime`` for a pool kind that is not known here, ``unsupported_rope``.
    """
    # Subclasses interleave pages, pack scales or share bytes: only the two plain pools are known to be rows
    # of slots.
    kind = type(pool)
    if kind not in (MLATokenToKVPool, MHATokenToKVPool):
        raise _refuse(f"{kind.__name__} is not a plain MLA or MHA pool")
    try:
        ropes = probe_model(model)
    except UnsupportedRope as error:
        raise Fallback(FallbackReason.UNSUPPORTED_ROPE, str(error)) from error
    layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
    missing = [layer for layer in layers if layer not in ropes]
    if missing:
        raise Fallback(FallbackReason.UNSUPPORTED_ROPE, f"no rotary embedding was found for layers {missing}")
    per_layer = [ropes[layer] for layer in layers]
    try:
        if kind is MLATokenToKVPool:
            if pool.use_dsa or pool.kv_scale_buffer is not None:
                raise _refuse("sparse-attention and packed MLA rows carry more than latent and key")
            return KVLayout.mla(
                pool.kv_buffer,
                per_layer,
                pool.qk_rope_head_dim,
                kv_lora_rank=pool.kv_lora_rank,
                logical_dtype=_logical(pool),
            )
        if pool.kv_cache_layout != "nhd" or pool.k_scale_buffer is not None:
            raise _refuse(f"KV layout {pool.kv_cache_layout} with scales={pool.k_scale_buffer is not None}")
        return KVLayout.mha(pool.k_buffer, pool.v_buffer, per_layer, logical_dtype=_logical(pool))
    except LayoutError as error:
        raise _refuse(str(error)) from error


def _logical(pool: Any) -> torch.dtype:
    return pool.dtype if pool.store_dtype != pool.dtype else pool.store_dtype


def _check_cache(ctx: Any, cache: Any) -> None:
    params = ctx.params
    if cache.disable:
        raise _refuse("the radix cache is disabled (--disable-radix-cache)")
    if tuple(cache.tree_components) != (ComponentType.FULL,):
        kinds = ", ".join(str(component) for component in cache.tree_components)
        raise _refuse(f"the model has sliding-window or recurrent layers ({kinds})")
    if params.is_eagle or get_spec().speculative_algorithm is not None:
        raise _refuse("speculative decoding keeps draft KV beside the pool")
    if cache.cache_controller is not None or cache.linker is not None:
        raise _refuse("HiCache and external linkers move blocks behind the tree")
    if get_memory().enable_hierarchical_cache:
        raise _refuse("HiCache moves blocks behind the tree (--enable-hierarchical-cache)")
    if params.pp_size > 1:
        raise _refuse("pipeline parallelism: ranks cannot yet agree on a splice")
    if params.enable_kv_cache_events:
        raise _refuse("KV cache events would carry lineage tags (--kv-events-config)")
    if params.sidecar_draft_device_pools or params.mtp_draft_device_pools:
        raise _refuse("draft KV pools share the target's slots")
    if type(params.token_to_kv_pool_allocator) not in (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator):
        raise _refuse(f"{type(params.token_to_kv_pool_allocator).__name__} is not a plain slot allocator")


def _refuse(detail: str) -> Fallback:
    return Fallback(FallbackReason.UNSUPPORTED_RUNTIME, detail)
