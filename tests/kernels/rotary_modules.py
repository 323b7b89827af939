"""SGLang's own rotary modules, of every kind its factory makes."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding

HEAD = 64
POSITIONS = 4096

SUPPORTED: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "deepseek_yarn": {
        "rope_type": "deepseek_yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
    },
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, "dynamic_ntk"),
    "dynamic_alpha": ({"rope_type": "dynamic", "factor": 4.0, "alpha": 1000.0}, "dynamic_ntk"),
    "longrope": (
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * (HEAD // 2),
            "long_factor": [2.0] * (HEAD // 2),
            "original_max_position_embeddings": 512,
        },
        "longrope",
    ),
    "mrope": ({"rope_type": "default", "mrope_section": [8, 12, 12]}, "mrope"),
    "mrope_yarn": (
        {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 512,
            "mrope_section": [8, 12, 12],
        },
        "mrope",
    ),
    "video": (
        {"rope_type": "default", "mrope_section": [8, 12, 12], "video_rope": True},
        "mrope",
    ),
}


def build(
    scaling: dict[str, Any] | None,
    *,
    dtype: torch.dtype = torch.float32,
    halves: bool = True,
    head: int = HEAD,
    rotary_dim: int | None = None,
    base: int = 10000,
    positions: int = POSITIONS,
) -> Any:
    return get_rope(
        head, rotary_dim or head, positions, base, halves, dict(scaling) if scaling else None, dtype
    )


def keys_at(module: Any, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """``keys`` ``[n, heads, head]`` as the module makes them at ``positions``."""
    shape = keys.shape
    if not isinstance(module, DeepseekScalingRotaryEmbedding):
        keys = keys.reshape(shape[0], -1)
    _, out = module.forward_native(positions, keys.clone(), keys.clone())
    return out.reshape(shape)
