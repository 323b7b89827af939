"""RoPE of a model that is not loaded, from its ``config.json``: for ``leyline doctor``.

What a configuration says is a forecast. The plugin probes the loaded model and believes only that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from .rope import Pairing, RopeFault, RopeSpec, UnsupportedRope

# Model types whose SGLang implementation turns neighbouring elements; all others turn halves. MLA models
# say it themselves (`rope_interleave`).
_INTERLEAVED = frozenset(
    (
        "chatglm",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "ernie4_5",
        "ernie4_5_moe",
        "ernie4_5_vl_moe",
        "glm4",
        "gptj",
        "sarvam_moe",
    )
)

# Model types that, in SGLang, normalise keys after turning them.
_NORM_AFTER_ROPE = ("hunyuan",)

_REFUSED = {
    "dynamic": (RopeFault.DYNAMIC_NTK, "the base depends on a sequence length"),
    "longrope": (RopeFault.LONGROPE, "the frequencies change with the length of the request"),
    "su": (RopeFault.LONGROPE, "the frequencies change with the length of the request"),
    "mrope": (RopeFault.MROPE, "multimodal RoPE has three positions per token"),
}


@dataclass(frozen=True, slots=True)
class _Request:
    """The arguments with which SGLang builds a model's rotary module."""

    head_dim: int
    rotary_dim: int
    max_position: int
    base: float
    pairing: Pairing
    scaling: dict[str, Any] | None

    @property
    def kind(self) -> str:
        if self.scaling is None:
            return "default"
        return str(self.scaling.get("rope_type") or self.scaling.get("type") or "default")


def probe_config(source: Mapping[str, Any] | str | PathLike[str], *, engine: bool = True) -> RopeSpec:
    """The :class:`RopeSpec` a model directory (or its configuration as a mapping) will have.

    With SGLang importable, and ``engine`` true, SGLang builds the rotary module and it is probed like a
    loaded one; otherwise plain, linear, Llama-3 and YaRN scaling are computed here. Raises
    :class:`UnsupportedRope` naming the reason; ``OSError`` or ``ValueError`` for an unreadable directory.
    """
    config = dict(source) if isinstance(source, Mapping) else _read(Path(source))
    text = config.get("text_config")
    request = _request({**config, **text} if isinstance(text, Mapping) else config)
    if engine:
        module = _build(request)
        if module is not None:
            from .probe import probe_module

            return probe_module(module)
    return _compute(request)


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    return found


def _request(config: Mapping[str, Any]) -> _Request:
    kind = str(config.get("model_type", ""))
    # transformers 5 writes rope_parameters, which includes rope_theta; older files rope_scaling beside it.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise UnsupportedRope(RopeFault.UNKNOWN_SCALING, f"rope parameters are a {type(rope).__name__}")
    _refuse(kind, config, rope)
    mla = bool(config.get("kv_lora_rank"))
    if mla:
        head_dim = int(config["qk_rope_head_dim"])
        pairing = Pairing.INTERLEAVED if config.get("rope_interleave", True) else Pairing.HALVES
    else:
        heads = config.get("num_attention_heads")
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // int(heads or 1))
        pairing = Pairing.INTERLEAVED if kind in _INTERLEAVED else Pairing.HALVES
    base = rope.get("rope_theta", config.get("rope_theta"))
    if base is None:
        raise UnsupportedRope(
            RopeFault.NO_ROTARY, "the configuration names no rope_theta; only the loaded model can tell"
        )
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    rotary_dim = int(config.get("rotary_dim") or int(head_dim * float(part)))
    scaling = dict(rope)
    name = scaling.get("rope_type") or scaling.get("type") or "default"
    if name == "default" and not rope.get("use_fope"):
        scaling = {}
    elif mla:
        scaling["rope_type"] = "deepseek_yarn"  # SGLang's MLA attention knows no other scaling
    return _Request(
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        max_position=int(config.get("max_position_embeddings", 8192)),
        base=base,
        pairing=pairing,
        scaling=scaling or None,
    )


def _refuse(kind: str, config: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    if kind.startswith("llama4"):
        raise UnsupportedRope(RopeFault.LLAMA4, "some layers have no rotary embedding")
    if kind.startswith(_NORM_AFTER_ROPE) and config.get("use_qk_norm"):
        raise UnsupportedRope(RopeFault.NORM_AFTER_ROPE, f"{kind} normalises keys after turning them")
    if config.get("alibi") or config.get("position_embedding_type") in ("alibi", "absolute"):
        raise UnsupportedRope(RopeFault.NO_ROTARY, "positions are not rotary")
    if config.get("dual_chunk_attention_config"):
        raise UnsupportedRope(RopeFault.DUAL_CHUNK, "positions are taken modulo a chunk")
    if config.get("no_rope_layers") or config.get("no_rope_layer_interval"):
        raise UnsupportedRope(RopeFault.MIXED_LAYERS, "some layers have no rotary embedding")
    if rope and all(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedRope(RopeFault.MIXED_LAYERS, f"rope parameters per kind of layer: {sorted(rope)}")
    if rope.get("mrope_section"):
        raise UnsupportedRope(*_REFUSED["mrope"])
    if rope.get("use_fope"):
        raise UnsupportedRope(RopeFault.FOURIER, "the table is a sum of frequencies, not a rotation")
    name = str(rope.get("rope_type") or rope.get("type") or "default")
    if name in _REFUSED:
        raise UnsupportedRope(*_REFUSED[name])


def _build(request: _Request) -> Any | None:
    """SGLang's own rotary module, or None where SGLang is not installed."""
    try:
        from sglang.srt.layers.rotary_embedding import get_rope
    except Exception:  # a half-installed engine fails in many ways; `doctor` reports those elsewhere
        return None
    try:
        return get_rope(
            request.head_dim,
            request.rotary_dim,
            request.max_position,
            request.base,
            request.pairing is Pairing.HALVES,
            request.scaling,
            torch.float32,
        )
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise UnsupportedRope(
            RopeFault.UNKNOWN_SCALING, f"SGLang cannot build RoPE of type {request.kind}: {error}"
        ) from error


def _compute(request: _Request) -> RopeSpec:
    """In fp32 step by step like the engine, so that the frequencies are the very ones it multiplies by."""
    dim, scaling = request.rotary_dim, request.scaling or {}
    periods = request.base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    freq = 1.0 / periods
    factor = float(scaling.get("factor", 1.0))
    amplitude = 1.0
    match request.kind:
        case "default":
            pass
        case "linear":
            freq = freq.to(torch.float64) / factor
        case "llama3":
            freq = _llama3(freq, factor, scaling, request.max_position)
        case "yarn" | "deepseek_yarn":
            freq = _yarn(periods, factor, scaling, request)
            amplitude = _yarn_amplitude(factor, scaling, deepseek=request.kind == "deepseek_yarn")
        case other:
            raise UnsupportedRope(
                RopeFault.UNKNOWN_SCALING, f"RoPE of type {other} can only be probed with SGLang installed"
            )
    return RopeSpec(dim, request.pairing, tuple(float(f) for f in freq.to(torch.float64)), amplitude)


def _llama3(freq: torch.Tensor, factor: float, scaling: Mapping[str, Any], max_position: int) -> torch.Tensor:
    """Long waves are slowed by ``factor``, short ones kept, those between blended."""
    low, high = float(scaling.get("low_freq_factor", 1.0)), float(scaling.get("high_freq_factor", 4.0))
    trained = scaling.get("original_max_position_embeddings", max_position)
    wave = 2 * math.pi / freq
    keep = (trained / wave - low) / (high - low) if low != high else 0
    blended = (1 - keep) * freq / factor + keep * freq
    return torch.where(wave < trained / high, freq, torch.where(wave > trained / low, freq / factor, blended))


def _yarn(
    periods: torch.Tensor, factor: float, scaling: Mapping[str, Any], request: _Request
) -> torch.Tensor:
    """Pairs that turn often within the trained length are kept, those that never do are slowed."""
    dim = request.rotary_dim
    trained = scaling.get("original_max_position_embeddings", request.max_position)

    def pair_of(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(request.base))

    first, last = pair_of(float(scaling.get("beta_fast", 32))), pair_of(float(scaling.get("beta_slow", 1)))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    keep = (1 - ramp) * float(scaling.get("extrapolation_factor", 1))
    return 1.0 / (factor * periods) * (1 - keep) + 1.0 / periods * keep


def _yarn_amplitude(factor: float, scaling: Mapping[str, Any], *, deepseek: bool) -> float:
    def grown(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    scale = float(scaling.get("attn_factor", 1.0))
    over, under = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if deepseek:
        return grown(1.0 if over is None else float(over)) / grown(float(under or 0)) * scale
    if over is not None and under is not None:
        return grown(float(over)) / grown(float(under)) * scale
    return grown(1.0) * scale
