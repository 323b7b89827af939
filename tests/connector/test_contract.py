"""Every symbol and signature of SGLang and LMCache that the plugin relies on, in one place.

A new release of either breaks here first, with the name of what moved.
"""

from __future__ import annotations

import dataclasses
import inspect
from importlib import import_module
from importlib.metadata import entry_points, version
from typing import Any

import pytest

from leyline_lmcache.connector import versions

SGLANG = "sglang.srt."

# (module, attribute path, parameters that must exist)
CALLS: list[tuple[str, str, tuple[str, ...]]] = [
    ("mem_cache.registry", "register_radix_cache_backend", ("name", "factory")),
    ("mem_cache.registry", "registered_radix_cache_backends", ()),
    ("mem_cache.registry", "create_unified_radix_cache", ("ctx", "cache_class")),
    ("mem_cache.unified_radix_cache", "UnifiedRadixCache.match_prefix", ("self", "params")),
    ("mem_cache.unified_radix_cache", "UnifiedRadixCache.insert", ("self", "params")),
    ("mem_cache.unified_radix_cache", "UnifiedRadixCache.checkpoint_into_tree", ("self", "req", "up_to")),
    ("mem_cache.unified_radix_cache", "UnifiedRadixCache.prefetch_from_storage", ("self", "request")),
    ("mem_cache.unified_radix_cache", "UnifiedRadixCache.release_aborted_request", ("self", "request")),
    ("mem_cache.unified_radix_cache", "UnifiedRadixCache.reset", ("self",)),
    ("mem_cache.unified_radix_cache", "UnifiedRadixCache.lock", ("self", "node_id")),
    ("mem_cache.unified_radix_cache", "UnifiedRadixCache.unlock", ("self", "lock")),
    ("mem_cache.unified_radix_cache", "UnifiedRadixCache.root_node_handle", ("self", "extra_key")),
    ("mem_cache.unified_radix_cache", "UnifiedRadixCache.evictable_size", ("self",)),
    ("mem_cache.unified_radix_cache", "UnifiedRadixCache.protected_size", ("self",)),
    ("mem_cache.unified_radix_cache", "UnifiedRadixCache._apply_eviction_result", ("self", "result")),
    (
        "mem_cache.unified_cache.unified_tree_core_interface",
        "UnifiedTreeCoreInterface.collect_full_device_indices",
        ("self", "from_node_id", "until_node_id"),
    ),
    (
        "mem_cache.unified_cache.unified_tree_core_interface",
        "UnifiedTreeCoreInterface.collect_path_info",
        ("self", "end_node_ids"),
    ),
    (
        "mem_cache.unified_cache.unified_tree_core_interface",
        "UnifiedTreeCoreInterface.evict_device_leaf",
        ("self", "node_id", "is_write_back"),
    ),
    (
        "mem_cache.radix_cache",
        "RadixKey.__init__",
        ("self", "token_ids", "extra_key", "is_bigram", "limit", "cache_salt"),
    ),
    (
        "mem_cache.allocator.base",
        "BaseTokenToKVPoolAllocator.evict_to_free_tokens",
        ("self", "tree_cache", "num_tokens"),
    ),
    ("plugins.hook_registry", "HookRegistry.register", ("target", "hook", "hook_type")),
    ("managers.tokenizer_manager", "TokenizerManager._tokenize_texts", ("self", "texts")),
    ("runtime_context", "get_memory", ()),
    ("runtime_context", "get_parallel", ()),
    ("runtime_context", "get_schedule", ()),
    ("runtime_context", "get_spec", ()),
]


def resolve(module: str, path: str) -> Any:
    found: Any = import_module(SGLANG + module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize(("module", "path", "parameters"), CALLS, ids=[path for _, path, _ in CALLS])
def test_signatures(module: str, path: str, parameters: tuple[str, ...]) -> None:
    found = inspect.signature(inspect.unwrap(resolve(module, path))).parameters
    assert [name for name in parameters if name not in found] == []


@pytest.mark.parametrize(
    ("module", "path", "fields"),
    [
        ("mem_cache.base_prefix_cache", "MatchPrefixParams", {"key", "cow_mamba", "req"}),
        ("mem_cache.base_prefix_cache", "InsertParams", {"key", "value", "prev_prefix_len"}),
        ("mem_cache.base_prefix_cache", "InsertResult", {"prefix_len"}),
        ("mem_cache.base_prefix_cache", "MatchResult", {"device_prefix_len", "last_device_node"}),
        (
            "mem_cache.cache_init_params",
            "CacheInitParams",
            {
                "req_to_token_pool",
                "token_to_kv_pool_allocator",
                "page_size",
                "tree_components",
                "is_eagle",
                "pp_size",
                "enable_kv_cache_events",
                "sidecar_draft_device_pools",
                "mtp_draft_device_pools",
                "tp_cache_group",
            },
        ),
        (
            "mem_cache.registry",
            "TreeCacheBuildContext",
            {"params", "tp_worker", "model_config", "tp_size", "tp_rank", "is_hybrid_swa", "is_hybrid_ssm"},
        ),
        (
            "mem_cache.unified_cache.unified_tree_core_interface",
            "TreePathNodeInfo",
            {"node_id", "path_start", "path_end", "full_value_len", "num_children"},
        ),
        (
            "mem_cache.unified_cache.unified_tree_core_interface",
            "EvictDeviceLeafResult",
            {"device_frees", "host_frees", "cache_actions"},
        ),
        ("managers.kv_hints", "KvHintsEnvelope", {"protocol_version", "message_id", "actions"}),
        ("managers.kv_hints", "KvHintAction", {"action_id", "action_type", "action_version", "payload"}),
        (
            "managers.io_struct",
            "GenerateReqInput",
            {
                "rid",
                "text",
                "input_ids",
                "input_embeds",
                "sampling_params",
                "kv_hints",
                "cache_salt",
                "extra_key",
                "lora_path",
                "priority",
                "routed_dp_rank",
            },
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fields(module: str, path: str, fields: set[str]) -> None:
    found = resolve(module, path)
    names = set(getattr(found, "__annotations__", {})) | set(getattr(found, "__struct_fields__", ()))
    for base in found.__mro__:
        names |= set(getattr(base, "__annotations__", {}))
    assert fields - names == set()


def test_request_attributes() -> None:
    from sglang.srt.managers.schedule_batch import Req

    source = inspect.getsource(Req.__init__)
    for name in (
        "rid",
        "origin_input_ids",
        "kv_hints",
        "sampling_params",
        "customized_info",
        "session",
        "multimodal_inputs",
        "positional_embed_overrides",
        "cache_salt",
        "extra_key",
        "lora_id",
        "full_untruncated_fill_ids",
        "finished_reason",
        "cached_tokens_device",
        "cached_tokens_host",
        "cached_tokens_storage",
        "_cache_breakdown_computed",
    ):
        assert f"self.{name}" in source, name


def test_pools_keep_the_buffers_that_are_read() -> None:
    for kind, names in (
        ("MLATokenToKVPool", ("kv_buffer", "kv_lora_rank", "qk_rope_head_dim", "use_dsa", "kv_scale_buffer")),
        ("MHATokenToKVPool", ("k_buffer", "v_buffer", "kv_cache_layout", "k_scale_buffer")),
    ):
        pool = resolve("mem_cache.memory_pool", kind)
        source = inspect.getsource(pool)
        for name in names:
            assert f"self.{name}" in source, f"{kind}.{name}"


def test_generate_and_abort_are_still_what_the_hooks_replace() -> None:
    manager = resolve("managers.tokenizer_manager", "TokenizerManager")
    assert inspect.isasyncgenfunction(inspect.unwrap(manager.generate_request))
    assert list(inspect.signature(inspect.unwrap(manager.abort_request)).parameters) == [
        "self",
        "rid",
        "abort_all",
    ]


def test_lmcache_cache_is_a_unified_radix_cache_with_the_methods_that_are_overridden() -> None:
    from sglang.srt.mem_cache.storage.lmcache.lmcache_unified_radix_cache import LMCacheUnifiedRadixCache
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    assert issubclass(LMCacheUnifiedRadixCache, UnifiedRadixCache)
    found = inspect.signature(LMCacheUnifiedRadixCache.__init__).parameters
    for name in ("params", "model_config", "tp_size", "tp_rank", "lmcache_config_file", "forward_stream"):
        assert name in found, name
    # Stores look their nodes up under untagged keys: edited KV can never be stored as exact KV.
    assert "MatchPrefixParams(key=key)" in inspect.getsource(LMCacheUnifiedRadixCache._submit_store)


def test_a_prefetch_tells_what_came_from_l2() -> None:
    from lmcache.v1.distributed.api import PrefetchResult

    assert {"hit_cells", "l2_hit_cells"} <= {each.name for each in dataclasses.fields(PrefetchResult)}


def test_the_entry_point_is_installed() -> None:
    found = {point.name: point.value for point in entry_points(group="sglang.srt.plugins")}
    assert found.get("leyline") == "leyline_lmcache.connector.plugin:register"


def test_t10_installed_releases_are_the_supported_ones() -> None:
    assert versions.supported().keys() >= {"sglang", "lmcache"}
    versions.check("sglang", "lmcache")


def test_t10_another_release_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    real = version

    def other(name: str) -> str:
        return "0.5.99" if name == "sglang" else real(name)

    monkeypatch.setattr(versions, "version", other)
    with pytest.raises(versions.UnsupportedVersion, match=r"sglang 0\.5\.99 .*supports 0\.5\.23.*"):
        versions.check("sglang")
