"""Keys that real models compute at the new position, against the splice (R3, R6).

The models are random and tiny, the code that computes keys is transformers'. Nothing is turned by a
difference there: the model is run at the shifted positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
)

from leyline_lmcache.kernels import KVLayout, Pairing, RopeSpec, probe_config, splice_rows

RANK, ROPE, TOKENS = 48, 16, 40

MLA_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 1.5,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def deepseek() -> Any:
    torch.manual_seed(0)
    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            first_k_dense_replace=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            kv_lora_rank=RANK,
            q_lora_rank=None,
            qk_rope_head_dim=ROPE,
            qk_nope_head_dim=16,
            v_head_dim=16,
            max_position_embeddings=2048,
            rope_parameters=dict(MLA_ROPE),
            initializer_range=0.2,
        )
    ).eval()


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=ROPE,
            max_position_embeddings=2048,
            rope_parameters=dict(LLAMA3_ROPE),
            initializer_range=0.2,
        )
    ).eval()


@torch.no_grad()
def cache_at(model: Any, start: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the model caches for the same tokens at positions ``[start, start + TOKENS)``, layer by layer.
    All layers agree between starts: RoPE attention sees only differences of positions."""
    tokens = torch.randint(0, 64, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(start, start + TOKENS)[None]
    cache = DynamicCache()
    model(tokens, past_key_values=cache, position_ids=positions, cache_position=positions[0], use_cache=True)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def mla_rows(cache: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """transformers caches the latent and the rotary key of DeepSeek apart, ``[1, tokens, …]`` each."""
    return [torch.cat((latent[0], turning[0]), -1)[:, None].contiguous() for latent, turning in cache]


def by_token(heads: torch.Tensor) -> torch.Tensor:
    return heads.transpose(0, 1).contiguous()


Arm = Callable[[Any, RopeSpec, int, int], tuple[list[torch.Tensor], list[torch.Tensor]]]


def spliced_mla(
    model: Any, spec: RopeSpec, start: int, shift: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(pool turned from ``start`` by ``shift``, pool computed at ``start + shift``)."""
    pool, fresh = mla_rows(cache_at(model, start)), mla_rows(cache_at(model, start + shift))
    old = [rows.clone() for rows in pool]
    slots = torch.arange(TOKENS)
    splice_rows(KVLayout.mla(pool, spec, ROPE, kv_lora_rank=RANK), slots, slots, shift)
    for rows, before in zip(pool, old, strict=True):
        assert torch.equal(rows[..., :RANK], before[..., :RANK])  # c_kv is bit-identical
    return pool, fresh


def spliced_gqa(
    model: Any, spec: RopeSpec, start: int, shift: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    here, there = cache_at(model, start), cache_at(model, start + shift)
    keys, values = [by_token(k) for k, _ in here], [by_token(v) for _, v in here]
    slots = torch.arange(TOKENS)
    splice_rows(KVLayout.mha(keys, values, spec), slots, slots, shift)
    for rows, (_, before) in zip(values, here, strict=True):
        assert torch.equal(rows, by_token(before))  # V is bit-identical
    return keys, [by_token(k) for k, _ in there]


@pytest.mark.parametrize(("start", "shift"), [(0, 1), (3, 129), (700, -128), (1500, -1500), (100, 1900)])
@pytest.mark.parametrize(("make", "arm"), [(deepseek, spliced_mla), (llama, spliced_gqa)], ids=["mla", "gqa"])
def test_turned_keys_are_those_the_model_computes_there(
    make: Callable[[], Any], arm: Arm, start: int, shift: int
) -> None:
    model = make()
    spec = probe_config(model.config.to_dict())
    turned, fresh = arm(model, spec, start, shift)
    for a, b in zip(turned, fresh, strict=True):
        # The model's fp32 angles of up to 2,000 radians are good to 2^-13; deeper layers inherit it.
        assert (a - b).abs().max() < 1e-3 * b.abs().max()


@pytest.mark.parametrize(("make", "arm"), [(deepseek, spliced_mla), (llama, spliced_gqa)], ids=["mla", "gqa"])
def test_the_wrong_pairing_ruins_the_keys_and_keeps_their_norms(make: Callable[[], Any], arm: Arm) -> None:
    """Why only keys of the model will do."""
    model = make()
    right = probe_config(model.config.to_dict())
    other = Pairing.HALVES if right.pairing is Pairing.INTERLEAVED else Pairing.INTERLEAVED
    wrong = RopeSpec(right.rotary_dim, other, right.inv_freq, right.amplitude)
    turned, fresh = arm(model, wrong, 3, 129)
    for a, b in zip(turned, fresh, strict=True):
        assert torch.allclose(a.norm(dim=-1), b.norm(dim=-1), rtol=1e-3)
        assert (a - b).abs().max() > 0.1 * b.abs().max()


def test_the_tiny_deepseek_has_an_amplitude() -> None:
    assert abs(probe_config(deepseek().config.to_dict()).amplitude - 1) > 0.05
