"""The probe on SGLang's own rotary modules: what it reads, and what it refuses and how it says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import rope_variant
from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding
from torch import nn

from leyline_lmcache.kernels import (
    KVLayout,
    Pairing,
    UnsupportedRope,
    probe_model,
    probe_module,
    splice_rows,
)

from .rotary_modules import HEAD, REFUSED, SUPPORTED, build, keys_at

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", SUPPORTED)
def test_frequencies_are_those_the_engine_multiplies_by(kind: str, dtype: torch.dtype) -> None:
    """Whatever the type of the table, and of the model: on a CPU it is rounded to half precision with it."""
    module = build(SUPPORTED[kind], dtype=dtype)
    spec = probe_module(module)
    reference = build(SUPPORTED[kind], dtype=torch.float32)
    rows = reference.cos_sin_cache.double()
    half = HEAD // 2
    assert spec.pairing is Pairing.HALVES
    assert spec.rotary_dim == HEAD
    assert spec.amplitude == pytest.approx(float(rows[0, 0]), rel=2e-7 if hasattr(module, "mscale") else 4e-3)
    angle = torch.arange(len(rows), dtype=torch.float64)[:, None] * torch.tensor(
        spec.inv_freq, dtype=torch.float64
    )
    # The engine rounds angles to fp32; the probe's are at least as good at every row.
    bound = 1e-6 + angle * 2**-22
    assert bool(
        (
            (angle.cos() * spec.amplitude - rows[:, :half]).abs() <= bound + 8e-3 * (dtype != torch.float32)
        ).all()
    )
    assert bool((((angle.cos() - rows[:, :half] / rows[0, 0]).abs()) <= bound).all())
    assert bool((((angle.sin() - rows[:, half:] / rows[0, 0]).abs()) <= bound).all())


@pytest.mark.parametrize("kind", SUPPORTED)
def test_a_bare_table_gives_the_same_frequencies(kind: str) -> None:
    """A module that keeps its formula to itself: phases are unwrapped, to the rounding of fp32 itself."""
    module = build(SUPPORTED[kind])
    bare = SimpleNamespace(cos_sin_cache=module.cos_sin_cache, is_neox_style=False, rotary_dim=HEAD)
    spec, known = probe_module(bare), probe_module(module)
    assert spec.pairing is Pairing.INTERLEAVED
    assert spec.amplitude == pytest.approx(known.amplitude, rel=1e-7)
    assert spec.inv_freq == pytest.approx(known.inv_freq, rel=2**-24, abs=0)


@pytest.mark.parametrize("kind", SUPPORTED)
def test_frequencies_of_another_device_give_way_to_the_table(kind: str) -> None:
    """A table filled on a GPU, whose powers differ in the last bit from those the module computes here."""
    module = build(SUPPORTED[kind], positions=1 << 15)
    exact = probe_module(module).inv_freq
    told = [f * (1 + 2**-23) if i % 2 else f for i, f in enumerate(exact)]
    bare = SimpleNamespace(
        cos_sin_cache=module.cos_sin_cache,
        is_neox_style=True,
        rotary_dim=HEAD,
        inv_freq=torch.tensor(told, dtype=torch.float64),
    )
    got = probe_module(bare).inv_freq
    reach = len(module.cos_sin_cache)
    for found, right in zip(got, exact, strict=True):
        # Half the last bit, or too slow a pair for the bit to show anywhere in the table.
        assert abs(found - right) <= max(right * 2**-24, 2**-20 / reach)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_bare_half_precision_table_is_not_guessed_at(dtype: torch.dtype) -> None:
    table = build(None).cos_sin_cache.to(dtype)
    bare = SimpleNamespace(cos_sin_cache=table, is_neox_style=True, rotary_dim=HEAD)
    assert refusal(bare) == "unknown_frequencies"


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("kind", SUPPORTED)
def test_turned_keys_equal_freshly_computed_ones(kind: str, halves: bool) -> None:
    """R3, R6: the engine's module computes keys at p and at p + Δ; the splice makes the second of the first,
    amplitude and all. With the other pairing, or the amplitude applied again, it would not."""
    head = HEAD if kind == "deepseek_yarn" else 96  # partial rotary, where the engine has it
    module = build(SUPPORTED[kind], halves=halves, head=head, rotary_dim=HEAD)
    spec = probe_module(module)
    keys = torch.randn(128, 2, head, generator=torch.Generator().manual_seed(1))
    here = torch.randint(0, 900, (128,), generator=torch.Generator().manual_seed(2))
    shift = torch.tensor([(i * 97) % 3000 - int(here[i]) if i % 2 else 0 for i in range(128)])
    pool = keys_at(module, keys, here)
    layout = KVLayout.mha([pool], [torch.zeros(128, 2, head)], spec)
    slots = torch.arange(128)
    splice_rows(layout, slots, slots, shift)
    fresh = keys_at(module, keys, here + shift)
    # fp32 angles of up to 3000 radians are good to 2^-13 radians.
    assert (pool - fresh).abs().max() < 3e-3

    other = Pairing.INTERLEAVED if halves else Pairing.HALVES
    wrong = keys_at(module, keys, here)
    spoilt = type(spec)(spec.rotary_dim, other, spec.inv_freq, spec.amplitude)
    splice_rows(KVLayout.mha([wrong], [torch.zeros(128, 2, head)], spoilt), slots, slots, shift)
    assert torch.allclose(wrong.norm(dim=-1), fresh.norm(dim=-1), rtol=1e-5)  # norms tell nothing
    assert (wrong - fresh).abs().max() > 0.5


def refusal(module: Any) -> str:
    with pytest.raises(UnsupportedRope) as caught:
        probe_module(module)
    assert caught.value.detail
    return str(caught.value.reason)


@pytest.mark.parametrize("kind", REFUSED)
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    """R5, R7."""
    scaling, reason = REFUSED[kind]
    assert refusal(build(scaling)) == reason


def test_kinds_the_factory_makes_only_on_a_gpu_are_refused_too() -> None:
    dual = rope_variant.DualChunkRotaryEmbedding.__new__(rope_variant.DualChunkRotaryEmbedding)
    nn.Module.__init__(dual)
    dual.is_neox_style, dual.cos_sin_q_cache = True, torch.zeros(4, HEAD)
    assert refusal(dual) == "dual_chunk"
    fourier = rope_variant.FourierRotaryEmbedding(
        HEAD, HEAD, 128, 10000, True, torch.float32, 2, device="cpu"
    )
    assert refusal(fourier) == "fourier"
    vision = rope_variant.Llama4VisionRotaryEmbedding.__new__(rope_variant.Llama4VisionRotaryEmbedding)
    nn.Module.__init__(vision)
    assert refusal(vision) == "llama4"


def test_several_linear_scalings_in_one_table() -> None:
    module = LinearScalingRotaryEmbedding(HEAD, HEAD, 128, 10000, True, [1.0, 2.0], torch.float32)
    assert refusal(module) == "multi_scale"


def table_with(change: Any, dtype: torch.dtype = torch.float32, positions: int = 1 << 14) -> Any:
    table = build(None, positions=positions).cos_sin_cache.clone()
    change(table)
    return SimpleNamespace(cos_sin_cache=table.to(dtype), is_neox_style=True, rotary_dim=HEAD)


def last_row(table: torch.Tensor) -> None:
    table[-1] = table[-2]


def one_row(table: torch.Tensor) -> None:
    table[1234, 5] += 0.01


def bend(table: torch.Tensor) -> None:
    """Angles that grow a little faster than positions."""
    p = torch.arange(len(table), dtype=torch.float64)
    freq = torch.tensor(probe_module(build(None)).inv_freq, dtype=torch.float64)
    angle = (p + 1e-7 * p * p)[:, None] * freq
    table.copy_(torch.cat((angle.cos(), angle.sin()), -1))


def stretch_the_rest(table: torch.Tensor) -> None:
    """Another frequency from the middle on, like a table that changes with the length."""
    n = len(table) // 2
    table[n:] = table[n // 2 : n // 2 + n].clone()


def start_later(table: torch.Tensor) -> None:
    table.copy_(table.roll(-3, 0))


def not_finite(table: torch.Tensor) -> None:
    table[7, 7] = float("nan")


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        (last_row, {"not_closed", "not_linear"}),
        (one_row, {"not_closed", "not_linear"}),
        (bend, {"not_closed", "not_linear"}),
        (stretch_the_rest, {"not_closed", "not_linear"}),
        (start_later, {"not_linear"}),
        (not_finite, {"bad_shape"}),
    ],
)
def test_a_table_that_is_not_linear_in_the_position(change: Any, reasons: set[str]) -> None:
    assert refusal(table_with(change)) in reasons


def test_shapes_that_are_no_table() -> None:
    good = build(None).cos_sin_cache
    for table, reason in (
        (None, "missing_table"),
        (torch.empty(16, HEAD, device="meta"), "missing_table"),
        (good[:, :-1], "bad_shape"),
        (good[:2], "bad_shape"),
        (good.view(-1, 2, HEAD), "bad_shape"),
        (good[:, : HEAD // 2], "bad_shape"),
        (torch.view_as_complex(good.view(-1, HEAD // 2, 2)), "bad_shape"),
    ):
        assert refusal(SimpleNamespace(cos_sin_cache=table, is_neox_style=True, rotary_dim=HEAD)) == reason
    assert refusal(SimpleNamespace(cos_sin_cache=good, rotary_dim=HEAD)) == "missing_table"


class Attention(nn.Module):
    """An attention layer as SGLang's models build it: its own rotary module beside a RadixAttention."""

    def __init__(self, layer: int, rotary: Any, **flags: Any) -> None:
        super().__init__()
        if rotary is not None:
            self.rotary_emb = rotary
        self.attn = RadixAttention(4, HEAD, 1.0, num_kv_heads=2, layer_id=layer)
        for name, value in flags.items():
            setattr(self, name, value)


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


def model_refusal(*layers: nn.Module) -> str:
    with pytest.raises(UnsupportedRope) as caught:
        probe_model(Model(*layers))
    return str(caught.value.reason)


def test_a_module_shared_between_layers_is_found_in_each() -> None:
    shared, other = build(None), build(SUPPORTED["yarn"])
    specs = probe_model(Model(Attention(0, shared), Attention(1, shared), Attention(2, other)))
    assert list(specs) == [0, 1, 2]
    assert specs[0] == specs[1] == probe_module(shared)
    assert specs[2] == probe_module(other)


def test_models_whose_layers_do_not_all_turn() -> None:
    rope = build(None)
    assert model_refusal() == "no_attention"
    assert model_refusal(Attention(0, None)) == "no_rotary"
    assert model_refusal(Attention(0, rope), Attention(1, None)) == "mixed_layers"
    assert model_refusal(Attention(0, rope, use_rope=False)) == "mixed_layers"
    assert model_refusal(Attention(0, rope, other_rope=build(SUPPORTED["linear"]))) == "mixed_layers"
    assert model_refusal(Attention(0, rope), Attention(0, build(SUPPORTED["linear"]))) == "mixed_layers"
    crossing = Attention(0, rope)
    crossing.attn.is_cross_attention = True
    assert model_refusal(crossing) == "mixed_layers"
    assert model_refusal(Attention(0, build(REFUSED["mrope"][0]))) == "mrope"


def test_keys_normalised_after_turning() -> None:
    """A learnt weight per element does not commute with a rotation (Hunyuan)."""
    layer = Attention(0, build(None), use_qk_norm=True, key_layernorm=nn.LayerNorm(HEAD))
    assert model_refusal(layer) == "norm_after_rope"
