"""Small KV pools of every kind a splice meets, filled with finite random keys and values."""

from __future__ import annotations

from collections.abc import Callable

import torch

from leyline_lmcache.kernels import KVLayout, Pairing

from .oracle import spec_of

SLOTS = 80
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, *FP8]


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Normal values; fp8 as the bytes a pool keeps."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    rows = values.to(dtype)
    return rows.view(torch.uint8) if dtype in FP8 else rows


def mla(
    pairing: Pairing, dtype: torch.dtype, *, layers: int = 3, rank: int = 512, rope: int = 64
) -> KVLayout:
    buffers = [filled((SLOTS, 1, rank + rope), dtype, i) for i in range(layers)]
    return KVLayout.mla(buffers, spec_of(rope, pairing), rope, kv_lora_rank=rank, logical_dtype=dtype)


def gqa(
    pairing: Pairing,
    dtype: torch.dtype,
    *,
    layers: int = 2,
    heads: int = 2,
    dim: int = 32,
    v_dim: int | None = None,
    rope: int | None = None,
) -> KVLayout:
    k = [filled((SLOTS, heads, dim), dtype, i) for i in range(layers)]
    v = [filled((SLOTS, heads, v_dim or dim), dtype, 100 + i) for i in range(layers)]
    return KVLayout.mha(k, v, spec_of(rope or dim, pairing, 500000.0), logical_dtype=dtype)


def fused_kv(pairing: Pairing, dtype: torch.dtype) -> KVLayout:
    """K and V as halves of one allocation, with a page of padding between them."""
    fused = [filled((2, SLOTS + 16, 2, 32), dtype, i) for i in range(2)]
    return KVLayout.mha(
        [f[0, :SLOTS] for f in fused],
        [f[1, :SLOTS] for f in fused],
        spec_of(32, pairing),
        logical_dtype=dtype,
    )


def scattered_heads(pairing: Pairing, dtype: torch.dtype) -> KVLayout:
    """Heads are not neighbours in memory, and rows lie apart."""
    k = [filled((3, SLOTS, 40), dtype, i).transpose(0, 1)[:, :, 4:36] for i in range(2)]
    v = [filled((3, SLOTS, 32), dtype, 9 + i).transpose(0, 1) for i in range(2)]
    return KVLayout.mha(k, v, spec_of(16, pairing), logical_dtype=dtype)


POOLS: dict[str, Callable[[Pairing, torch.dtype], KVLayout]] = {
    "mla": mla,
    "mla_odd": lambda p, d: mla(p, d, rank=37, rope=10),
    "gqa": gqa,
    "gqa_partial": lambda p, d: gqa(p, d, heads=3, dim=24, rope=12),
    "gqa_odd": lambda p, d: gqa(p, d, heads=3, dim=23, rope=6, v_dim=9),
    "fused_kv": fused_kv,
    "scattered_heads": scattered_heads,
}
