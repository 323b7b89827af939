"""Where the KV rows of an engine lie: planes of slots, some with a rotary band.

Built from plain tensors, so that nothing here knows SGLang: an MLA pool is one plane per layer
(``[slots, 1, kv_lora_rank + rope_dim]``, the band at the end of the row), an MHA/GQA pool a K plane with
a band at the head's start and a V plane without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .rope import RopeSpec

FLOATS: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
"""Element types that can be rotated; the arithmetic is always fp32."""

FP8: tuple[torch.dtype, ...] = (torch.float8_e4m3fn, torch.float8_e5m2)


class LayoutError(ValueError):
    """Buffers that do not have the layout the kernels expect; names the plane and the field."""


@dataclass(frozen=True, slots=True)
class Band:
    """Elements ``[offset, offset + rope.rotary_dim)`` of each head turn by ``rope``."""

    offset: int
    rope: RopeSpec


@dataclass(frozen=True, slots=True, eq=False)
class Plane:
    """One tensor of one layer.

    ``rows``: ``[slots, heads, dim]`` or ``[slots, dim]``, contiguous in the last dimension, any other
    strides. ``dtype``: what the elements *mean*; differs from ``rows.dtype`` only for fp8 kept in a
    uint8 tensor (SGLang's pools do that). ``band``: None for a plane that is only copied.
    """

    name: str
    rows: torch.Tensor
    dtype: torch.dtype
    band: Band | None = None
    units: torch.Tensor = field(init=False, repr=False)
    """The same memory in the widest elements that fit, ``[slots, …]``: what a bit-exact copy moves."""
    turning: torch.Tensor | None = field(init=False, repr=False, default=None)
    """The band, ``[slots, heads, rotary_dim]`` in ``dtype``."""
    turning_units: torch.Tensor | None = field(init=False, repr=False, default=None)
    """The band as :attr:`units`."""

    def __post_init__(self) -> None:
        rows = self.rows
        if rows.dim() == 2:
            rows = rows.unsqueeze(1)
            object.__setattr__(self, "rows", rows)
        if rows.dim() != 3:
            raise LayoutError(
                f"{self.name}: rows must be [slots, heads, dim] or [slots, dim], got {tuple(rows.shape)}; "
                "page-interleaved and head-major pools are not supported"
            )
        if rows.shape[2] and rows.stride(2) != 1:
            raise LayoutError(f"{self.name}: the last dimension must be contiguous")
        if self.dtype not in FLOATS:
            raise LayoutError(f"{self.name}: dtype {self.dtype} cannot be rotated; supported: {FLOATS}")
        if rows.dtype != self.dtype and not (rows.dtype == torch.uint8 and self.dtype in FP8):
            raise LayoutError(f"{self.name}: {rows.dtype} rows cannot hold {self.dtype} elements")
        if self.band is not None:
            end = self.band.offset + self.band.rope.rotary_dim
            if self.band.offset < 0 or end > rows.shape[2]:
                raise LayoutError(
                    f"{self.name}: band [{self.band.offset}, {end}) lies outside a head of {rows.shape[2]}"
                )
            band = rows[:, :, self.band.offset : end]
            object.__setattr__(self, "turning", band.view(self.dtype))
            object.__setattr__(self, "turning_units", _widest(band))
        object.__setattr__(self, "units", _widest(rows))

    @property
    def slots(self) -> int:
        return self.rows.shape[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of one slot's row, all heads."""
        return self.rows.shape[1] * self.rows.shape[2] * self.rows.element_size()

    @property
    def band_bytes(self) -> int:
        """Bytes of one slot's rotary bands, all heads; 0 without a band."""
        if self.band is None:
            return 0
        return self.rows.shape[1] * self.band.rope.rotary_dim * self.rows.element_size()


@dataclass(frozen=True, slots=True, eq=False)
class KVLayout:
    """All planes of a pool. They share a device and a number of slots.

    Holds the buffers and, once used, their addresses: make a new layout when an engine reallocates its pool.
    """

    planes: tuple[Plane, ...]
    cache: dict[str, Any] = field(init=False, repr=False, default_factory=dict)
    """What a backend derives from the planes once (addresses on the device)."""

    def __post_init__(self) -> None:
        if not self.planes:
            raise LayoutError("KVLayout.planes is empty")
        first = self.planes[0]
        for plane in self.planes:
            if plane.rows.device != first.rows.device:
                raise LayoutError(
                    f"{plane.name} is on {plane.rows.device}, {first.name} on {first.rows.device}"
                )
            if plane.slots != first.slots:
                raise LayoutError(f"{plane.name} has {plane.slots} slots, {first.name} has {first.slots}")

    def __iter__(self) -> Iterator[Plane]:
        return iter(self.planes)

    @property
    def slots(self) -> int:
        return self.planes[0].slots

    @property
    def device(self) -> torch.device:
        return self.planes[0].rows.device

    @property
    def row_bytes(self) -> int:
        """Bytes one token occupies over all planes."""
        return sum(plane.row_bytes for plane in self.planes)

    @property
    def band_bytes(self) -> int:
        """Bytes of one token that turn, over all planes."""
        return sum(plane.band_bytes for plane in self.planes)

    @classmethod
    def mla(
        cls,
        buffers: Sequence[torch.Tensor],
        rope_per_layer: RopeSpec | Sequence[RopeSpec] | Mapping[int, RopeSpec],
        rope_dim: int,
        *,
        kv_lora_rank: int | None = None,
        logical_dtype: torch.dtype | None = None,
    ) -> KVLayout:
        """An MLA pool (SGLang ``MLATokenToKVPool.kv_buffer``): the last ``rope_dim`` elements turn.

        ``kv_lora_rank`` guards against packed rows (scales inside the row): a row must be exactly
        ``kv_lora_rank + rope_dim`` elements. ``rope_per_layer``: one spec for all, or one per buffer in
        order (a mapping is read in the order of its layer ids).
        """
        planes = []
        for i, (rows, rope) in enumerate(zip(buffers, _per_layer(rope_per_layer, len(buffers)), strict=True)):
            if rope.rotary_dim != rope_dim:
                raise LayoutError(f"kv[{i}]: rope_dim {rope_dim} but the model turns {rope.rotary_dim}")
            width = rows.shape[-1]
            if kv_lora_rank is not None and width != kv_lora_rank + rope_dim:
                raise LayoutError(
                    f"kv[{i}]: row of {width} elements, expected kv_lora_rank + rope_dim = "
                    f"{kv_lora_rank + rope_dim}; packed quantized rows are not supported"
                )
            planes.append(Plane(f"kv[{i}]", rows, logical_dtype or rows.dtype, Band(width - rope_dim, rope)))
        return cls(tuple(planes))

    @classmethod
    def mha(
        cls,
        k_buffers: Sequence[torch.Tensor],
        v_buffers: Sequence[torch.Tensor],
        rope_per_layer: RopeSpec | Sequence[RopeSpec] | Mapping[int, RopeSpec],
        *,
        logical_dtype: torch.dtype | None = None,
    ) -> KVLayout:
        """An MHA/GQA pool (SGLang ``MHATokenToKVPool.k_buffer`` and ``.v_buffer``, NHD layout): the first
        ``rotary_dim`` elements of each K head turn, V is only copied."""
        if len(k_buffers) != len(v_buffers):
            raise LayoutError(f"{len(k_buffers)} K buffers but {len(v_buffers)} V buffers")
        planes = []
        ropes = _per_layer(rope_per_layer, len(k_buffers))
        for i, (k, v, rope) in enumerate(zip(k_buffers, v_buffers, ropes, strict=True)):
            planes.append(Plane(f"k[{i}]", k, logical_dtype or k.dtype, Band(0, rope)))
            planes.append(Plane(f"v[{i}]", v, logical_dtype or v.dtype))
        return cls(tuple(planes))


def _widest(rows: torch.Tensor) -> torch.Tensor:
    """``[slots, heads, dim]`` seen as ``[slots, …]`` of the widest unit that size, strides and offset allow:
    index kernels work per element, and 16 bytes cost them no more than two. Heads that lie side by side
    are merged."""
    if rows.shape[1] == 1 or rows.stride(1) == rows.shape[2]:
        rows = rows.as_strided(
            (rows.shape[0], rows.shape[1] * rows.shape[2]), (rows.stride(0), 1), rows.storage_offset()
        )
    size = rows.element_size()
    spans = [size * span for span in (rows.shape[-1], rows.storage_offset(), *rows.stride()[:-1])]
    spans.append(rows.data_ptr())
    for unit in (torch.complex128, torch.int64, torch.int32, torch.int16):
        if unit.itemsize > size and all(span % unit.itemsize == 0 for span in spans):
            return rows.view(unit)
    return rows.view(torch.uint8) if size == 1 else rows


def _per_layer(
    ropes: RopeSpec | Sequence[RopeSpec] | Mapping[int, RopeSpec], layers: int
) -> Sequence[RopeSpec]:
    if isinstance(ropes, RopeSpec):
        return [ropes] * layers
    found = [ropes[i] for i in sorted(ropes)] if isinstance(ropes, Mapping) else list(ropes)
    if len(found) != layers:
        raise LayoutError(f"rope_per_layer has {len(found)} entries for {layers} buffers")
    return found
