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


def test_lmcache_connector_is_what_the_reconnecting_one_stands_on() -> None:
    from lmcache.integration.sglang.unified_lmcache_mp_connector import UnifiedLMCacheMPConnector as Upstream
    from sglang.srt.mem_cache.storage.lmcache import lmcache_unified_radix_cache as cache

    # The class is looked up in the module, by this name, when the cache is built.
    assert "= UnifiedLMCacheMPConnector(" in inspect.getsource(cache.LMCacheUnifiedRadixCache.__init__)
    built = inspect.getsource(Upstream.__init__)
    for line in (
        "self._req_client = RequestClientFactory.create(self.server_url)",
        "self.instance_id = ",
        "self._transfer_ctx",
        "self.chunk_size = self._get_chunk_size()",
        "self.register_kv_cache()",
        "self._mq_timeout",
    ):
        assert line in built, line
    # Assigned before the client is made, and after it: our properties rely on the order.
    assert (
        built.index("self.instance_id = ") < built.index("self._req_client = ") < built.index("_transfer_ctx")
    )
    register = inspect.getsource(Upstream.register_kv_cache)
    for line in (
        "create_transfer_context(",
        'layout_hints={"kv_list_layout": "unified"}',
        "EngineGroupInfo(**spec) for spec in self._engine_group_info_specs",
        "engine_type=EngineType.SGLANG",
    ):
        assert line in register, line
    # One request id per key, and everything else about a request is asked by name of these two.
    assert "request_id=operation.request_id" in inspect.getsource(Upstream._create_key)
    assert "self._req_client.query_prefetch_status(operation.request_id)" in inspect.getsource(
        Upstream.poll_lookup
    )
    assert "self._req_client.end_session(request_id)" in inspect.getsource(Upstream.end_session)
    store = inspect.getsource(Upstream.submit_store)
    assert store.index("self._store_group_blocks_are_valid(") < store.index("self._sync_success(can_submit)")
    for name, parameters in {
        "submit_lookup": ["self", "request_id", "token_ids", "local_hit_tokens", "cache_salt"],
        "_create_key": ["self", "operation", "start", "end", "worker_id"],
        "_store_group_blocks_are_valid": ["self", "group", "blocks"],
        "_ensure_heartbeat_started": ["self"],
        "close": ["self"],
    }.items():
        assert list(inspect.signature(getattr(Upstream, name)).parameters) == parameters, name


def test_lmcache_transport_fails_the_way_a_lost_link_needs() -> None:
    from lmcache.v1.multiprocess.futures import MessagingFuture
    from lmcache.v1.multiprocess.modules.management import ManagementModule
    from lmcache.v1.multiprocess.request_handler import HandlerType, iter_request_handlers
    from lmcache.v1.multiprocess.transport.base import RequestClient
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

    assert "context" in inspect.signature(RequestClientFactory.create).parameters
    for name in (
        "lookup",
        "query_prefetch_status",
        "free_lookup_locks",
        "end_session",
        "ping",
        "get_chunk_size",
    ):
        assert callable(getattr(RequestClient, name)), name
    for name in ("unregister_kv_cache_engine_driven_context", "unregister_kv_cache", "server_module_call"):
        assert callable(getattr(RequestClient, name)), name
    future: Any = MessagingFuture()
    future.set_exception(TimeoutError("gone"))
    assert future.query()
    # The watch's question is answered by the main loop, which no busy worker delays.
    module: Any = object.__new__(ManagementModule)
    kinds = {bound.operation: bound.options.handler_type for bound in iter_request_handlers(module)}
    assert kinds["get_chunk_size"] is HandlerType.SYNC


def test_every_way_an_engine_leaves_releases_its_stores_in_one_place() -> None:
    from lmcache.v1.distributed.l1_manager import L1Manager
    from lmcache.v1.distributed.storage_manager import StorageManager
    from lmcache.v1.multiprocess.modules.engine_driven_transfer import EngineDrivenTransferModule as Module

    for way in (Module.reap_stale_instances, Module.unregister_kv_cache):
        assert "self._release_entry(" in inspect.getsource(way)
    release = inspect.getsource(Module._release_entry)
    assert "self._pending_shm_writes.pop(k)" in release and "finish_write(obj_keys)" in release
    assert "_pending_shm_lock" in release
    assert list(inspect.signature(Module._release_entry).parameters) == ["self", "instance_id", "entry"]
    assert (
        "def finish_write_and_delete(\n        self,\n        keys: list[ObjectKey],\n        tag: str"
        in (inspect.getsource(L1Manager))
    )
    assert "tag=_L1_WRITE_TAG" in inspect.getsource(StorageManager.reserve_write)
    assert "self._l1_managers_by_id" in inspect.getsource(StorageManager.__init__)


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
