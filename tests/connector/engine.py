"""SGLang's real tree, pool, allocator and ``Req`` around the plugin's cache, without a model or a server.

The model is replaced by something that can be checked exactly: the KV a token gets is a hash of the KV it
attends to, of the token and of its position, written as the latent row, plus a key that is rotated to
that position. So a wrong slot, a stale row, a missing rotation or KV from the wrong context shows in
every later token.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from leyline_lmcache.connector.cache import EditableRadixCache
from leyline_lmcache.connector.gpu_tier import GpuTier
from leyline_lmcache.connector.hints import fill_envelope
from leyline_lmcache.connector.packs import Shelf
from leyline_lmcache.connector.records import namespace_of
from leyline_lmcache.connector.report import Reporter
from leyline_lmcache.connector.runtime import Runtime
from leyline_lmcache.connector.settings import Settings
from leyline_lmcache.connector.stored import StoredTier
from leyline_lmcache.directive import Directive
from leyline_lmcache.kernels.layout import KVLayout
from leyline_lmcache.kernels.rope import Pairing, RopeSpec

LORA_RANK, ROPE_DIM, LAYERS = 4, 8, 2
ROPE = RopeSpec(
    ROPE_DIM, Pairing.INTERLEAVED, tuple(100.0 ** (-2 * i / ROPE_DIM) for i in range(ROPE_DIM // 2))
)

Sems = list[bytes]
"""Per position: what KV is there, as a hash."""


def compute(context: Sems, token: int) -> bytes:
    """The KV of ``token`` after ``context``."""
    digest = hashlib.blake2b(digest_size=9)
    # The context's own hash, kept running by its last element's prefix: see `running`.
    digest.update(running(context))
    digest.update(token.to_bytes(8, "little") + len(context).to_bytes(8, "little"))
    return digest.digest()


def running(context: Sems) -> bytes:
    return hashlib.blake2b(b"".join(context), digest_size=16).digest()


def row_of(sem: bytes, position: int, layer: int) -> np.ndarray:
    """The pool row of a token: its hash as exact floats, then its key turned to ``position``."""
    latent = [int.from_bytes(sem[i : i + 3], "little") for i in (0, 3, 6)] + [layer]
    raw = np.random.default_rng([*list(sem), layer]).standard_normal(ROPE_DIM)
    turned = raw[0::2] + 1j * raw[1::2]
    turned = turned * np.exp(1j * position * np.array(ROPE.inv_freq))
    key = np.stack([turned.real, turned.imag], -1).reshape(-1)
    return np.concatenate([latent, key])


def sem_of(row: torch.Tensor) -> bytes:
    """Back from a row's latent."""
    return b"".join(int(v).to_bytes(3, "little") for v in row[:3].tolist())


@cache
def configure_sglang() -> None:
    """SGLang's process-wide configuration, once; it wants to see a model's ``config.json``."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 8192,
        "vocab_size": 1024,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        set_global_server_args_for_scheduler(
            ServerArgs(model_path=folder, device="cpu", skip_tokenizer_init=True)
        )


@dataclass
class Served:
    """What a request got: its report, the KV on its row, and the tokens that have KV."""

    rid: str
    tokens: list[int]
    sems: Sems
    cached: int
    report: dict[str, Any] | None
    refused_memory: bool = False


@dataclass
class Engine:
    page_size: int = 1
    slots: int = 4096
    settings: Settings = field(default_factory=lambda: Settings(min_reuse=1))
    daemon: Any = None
    name: str = "r"

    def __post_init__(self) -> None:
        configure_sglang()
        self.slots = self.slots // self.page_size * self.page_size
        self.pool = MLATokenToKVPool(
            size=self.slots,
            page_size=self.page_size,
            dtype=torch.float32,
            kv_lora_rank=LORA_RANK,
            qk_rope_head_dim=ROPE_DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        if self.page_size == 1:
            self.allocator: Any = TokenToKVPoolAllocator(
                size=self.slots, dtype=torch.float32, device="cpu", kvcache=self.pool, need_sort=False
            )
        else:
            self.allocator = PagedTokenToKVPoolAllocator(
                size=self.slots,
                page_size=self.page_size,
                dtype=torch.float32,
                device="cpu",
                kvcache=self.pool,
                need_sort=False,
            )
        self.rows = ReqToTokenPool(size=64, max_context_len=8192, device="cpu", enable_memory_saver=False)
        self.cache = EditableRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=self.page_size,
                tree_components=(ComponentType.FULL,),
            )
        )
        layout = KVLayout.mla(self.pool.kv_buffer, ROPE, ROPE_DIM, kv_lora_rank=LORA_RANK)
        self.reporter = Reporter(self.settings, row_bytes=layout.row_bytes)
        self.tier = GpuTier(self.cache, Runtime(layout, None, "model", 1), self.settings, self.reporter)
        self.cache.attach_tier(self.tier)
        self.served: dict[str, Served] = {}
        if self.daemon is not None:
            connector = self.daemon.connect(self)
            self.stored = StoredTier(connector, "model", self.settings.tier_timeout)
            self.tier.attach_stored(self.stored)
        self._count = 0
        self.total = self.accounting()

    # ------------------------------------------------------------------ serving

    def serve(
        self,
        prompt: Sequence[int],
        output: Sequence[int] = (7, 8, 9),
        *,
        hints: dict[str, Any] | None = None,
        fills: bool = True,
        abort: bool = False,
        hold: bool = False,
        **request: Any,
    ) -> Served:
        """One client request, its fills first, as the hook in the main process would run them."""
        if hints is not None and fills:
            for span in self.spans(prompt, hints):
                fill = self.request(list(prompt[: span[1]]), hints=fill_envelope(hints, span), **request)
                self.run(fill, ())
        req = self.request(list(prompt), hints=hints, **request)
        return self.run(req, output, abort=abort, hold=hold)

    def spans(self, prompt: Sequence[int], hints: dict[str, Any]) -> list[tuple[int, int]]:
        from leyline_lmcache.connector.plans import fill_ranges
        from leyline_lmcache.directive import normalize
        from leyline_lmcache.envelope import parse_envelope

        directives = [d for d in normalize(parse_envelope(hints).directives, 2**31 - 1) if not d.is_identity]
        least = self.settings.min_reuse
        return [s for s in fill_ranges(directives, self.page_size, least) if s[1] + least <= len(prompt)]

    def request(self, prompt: list[int], *, hints: Any = None, rid: str | None = None, **fields: Any) -> Req:
        self._count += 1
        params = SamplingParams(max_new_tokens=64, temperature=0)
        return Req(
            rid or f"{self.name}{self._count}",
            "",
            array("q", prompt),
            params,
            kv_hints=hints,
            eos_token_ids=set(),
            **fields,
        )

    def run(self, req: Req, output: Sequence[int], *, abort: bool = False, hold: bool = False) -> Served:
        """Match, prefill, decode, publish and release one request, in the scheduler's order of calls."""
        req.init_next_round_input(self.cache)
        if self.daemon is not None:
            # As the scheduler does on arrival, and until the request may be admitted.
            self.tier.begin_lookup(req.rid)
            while self.tier.poll_lookup(req.rid) is False:
                self.tier.advance_lookups()
            req.init_next_round_input(self.cache)
        cached = req.prefix_len
        tokens = list(req.origin_input_ids) + list(output)
        # The last sampled token has no KV.
        known = len(tokens) - 1 if output else len(tokens)
        lock = self.cache.lock(req.last_node)
        req.lock = lock
        need = -(-known // self.page_size) * self.page_size - cached // self.page_size * self.page_size
        self.allocator.evict_to_free_tokens(self.cache, need)
        new = self.allocator.alloc(need) if self.allocator.available_size() >= need else None
        if new is None:
            self.cache.unlock(lock)
            self.tier.ended(req.rid)
            return Served(req.rid, tokens, [], cached, self._report(req), refused_memory=True)
        (row,) = self.rows.alloc([req])
        prefix = self.cache.prefix_device_indices(req)
        whole = torch.cat([prefix.to(torch.int64), new.to(torch.int64)])
        self.rows.write((row, slice(0, len(whole))), whole.to(torch.int32))
        sems = [sem_of(self.pool.kv_buffer[0][int(s), 0]) for s in prefix]
        for position in range(cached, known):
            sem = compute(sems, tokens[position])
            sems.append(sem)
            for layer in range(LAYERS):
                self.pool.kv_buffer[layer][int(whole[position]), 0] = torch.from_numpy(
                    row_of(sem, position, layer).astype(np.float32)
                )
        req.output_ids.extend(output)
        req.kv.kv_committed_len = known
        req.kv.kv_allocated_len = len(whole)
        req.extend_end = known
        self._check_rows(whole, sems, known)
        req.finished_reason = FINISH_ABORT("test") if abort else FINISH_LENGTH(len(output))
        served = Served(req.rid, tokens[:known], sems, cached, self._report(req))
        if hold:
            self._held = (req, served)
            return served
        self._release(req, known, len(whole))
        if not abort:
            self.served[req.rid] = served
            if self.daemon is not None:
                self.daemon.served[req.rid] = served
                self._store(req, served)
        return served

    def _store(self, req: Req, served: Served) -> None:
        """What LMCache would hold afterwards: exact chunks, and what an edited view computed."""
        plan = self.tier.plan_of(req)
        namespace = namespace_of(req)
        exact = plan.exact if plan is not None else len(served.tokens)
        self.daemon.put(self.stored.salt(namespace, b""), served, 0, exact)
        for packing in self.tier.packings(req):
            where = self.daemon.served[packing.record.response]
            salt = self.stored.salt(namespace, packing.info.lineage)
            self.daemon.put_pack(salt, where, Shelf(packing.info, packing.pack))

    def forget_pool(self) -> None:
        """Everything on the GPU is gone, as after ``/flush_cache``."""
        self.cache.reset()
        self.allocator.clear()
        self.rows.clear()

    def release_held(self) -> Served:
        req, served = self._held
        self._release(req, len(served.tokens), req.kv.kv_allocated_len)
        self.served[req.rid] = served
        return served

    def _release(self, req: Req, known: int, allocated: int) -> None:
        req.refresh_fill_ids()
        self.cache.checkpoint(req, up_to=known)
        self.cache.free_kv_row(req.kv, [(req.kv.cache_protected_len, known)])
        self.cache.unlock(req.lock)
        req.lock = None
        start = -(-known // self.page_size) * self.page_size
        if start < allocated:
            self.cache.free_kv_row(req.kv, [(start, allocated)])
        self.cache.on_release(req, checkpointed=True)
        self.rows.free(req)
        req.kv.mark_kv_released()

    # ------------------------------------------------------------------ checks

    def _check_rows(self, slots: torch.Tensor, sems: Sems, known: int) -> None:
        """Every slot of a request holds its token's key, turned to the position where it is used."""
        for layer in range(LAYERS):
            got = self.pool.kv_buffer[layer][slots[:known], 0].double().numpy()
            want = np.array([row_of(sem, i, layer) for i, sem in enumerate(sems)]).reshape(known, -1)
            np.testing.assert_array_equal(got[:, :LORA_RANK], want[:, :LORA_RANK])
            np.testing.assert_allclose(got[:, LORA_RANK:], want[:, LORA_RANK:], atol=2e-4)

    def accounting(self) -> int:
        """Free, evictable and protected tokens together: never changes between requests (I6)."""
        return int(
            self.allocator.available_size() + self.cache.evictable_size() + self.cache.protected_size()
        )

    def check(self) -> None:
        assert self.accounting() == self.total
        assert self.cache.protected_size() == 0
        self.cache.sanity_check()

    @staticmethod
    def _report(req: Req) -> dict[str, Any] | None:
        return (req.customized_info or {}).get("leyline", [None])[0]


def hints(base: str, *edits: tuple[int, int, Sequence[int]]) -> dict[str, Any]:
    """An envelope of splices."""
    return {
        "protocol_version": "1",
        "message_id": "m",
        "actions": [
            {
                "action_id": f"a{i}",
                "action_type": "kv.splice",
                "action_version": "1",
                "payload": {"base": base, "start": s, "end": e, "replacement_ids": list(r)},
            }
            for i, (s, e, r) in enumerate(edits)
        ],
    }


def apply(tokens: Sequence[int], *edits: tuple[int, int, Sequence[int]]) -> list[int]:
    """The edited text."""
    out, at = [], 0
    for start, end, replacement in sorted(edits):
        out += list(tokens[at:start]) + list(replacement)
        at = end
    return out + list(tokens[at:])


def directives(base: str, *edits: tuple[int, int, Sequence[int]]) -> list[Directive]:
    return [Directive(base, s, e, tuple(r)) for s, e, r in edits]
