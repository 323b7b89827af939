"""The torch version of the splice: serves engines on CPU, and is what the Triton kernel is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .layout import KVLayout, Plane
from .rope import Pairing, RopeSpec

_CHUNK = 256
"""Tokens gathered at a time: a chunk of one plane stays in the L2 cache."""

_MIN_RUN = 32
"""Shorter runs of one shift are not worth a call each; then angles are looked up per token."""


@dataclass(frozen=True, slots=True)
class Job:
    """Tokens in the order in which they are worked off: moved without turning, moved and turned, turned
    in place; within each group by shift. Moves come first: a turn in place may be of a slot they read."""

    src: torch.Tensor
    dst: torch.Tensor
    shifts: torch.Tensor
    still: int
    moved: int
    overlap: bool

    @classmethod
    def plan(cls, slots: int, src: torch.Tensor, dst: torch.Tensor, shifts: torch.Tensor) -> Job:
        """From host tensors ``[n]`` that have been checked. Drops tokens that need nothing."""
        stay, turn = src == dst, shifts != 0
        group = torch.where(stay, torch.where(turn, 2, 3), turn.to(torch.int64))
        if bool((group != group[0]).any()) or bool((shifts != shifts[0]).any()):
            order = torch.argsort(shifts, stable=True)
            order = order[torch.argsort(group[order], stable=True)]
            order = order[group[order] < 3]
            src, dst, shifts, group = src[order], dst[order], shifts[order], group[order]
        still, moved = int((group == 0).sum()), int((group < 2).sum())
        written = torch.zeros(slots, dtype=torch.bool)
        written[dst[:moved]] = True
        return cls(src, dst, shifts, still, moved, bool(written[src[:moved]].any()))


def splice_torch(layout: KVLayout, job: Job) -> None:
    """Run ``job`` on every plane, on whatever device the planes are."""
    device = layout.device
    src, dst = job.src.to(device), job.dst.to(device)
    values, row = torch.unique(job.shifts, return_inverse=True)
    tables: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]] = {}
    for plane in layout:
        if plane.band is not None and plane.band.rope not in tables:
            cos, sin = plane.band.rope.cos_sin(values)
            tables[plane.band.rope] = (cos.to(device), sin.to(device))
    row = row.to(device)
    n = src.numel()
    for plane in layout:
        view = _indexable(plane.rows)
        step = job.moved if job.overlap else _CHUNK
        for i, j in _chunks(0, job.moved, step):
            got = view.index_select(0, src[i:j])
            first = max(job.still, i)
            if plane.band is not None and first < j:
                offset = plane.band.offset
                part = got[first - i :].view(plane.dtype)
                part = part[:, :, offset : offset + plane.band.rope.rotary_dim]
                cos, sin = tables[plane.band.rope]
                turn_(part, cos[row[first:j]], sin[row[first:j]], plane.band.rope.pairing)
            view.index_copy_(0, dst[i:j], got)
        if plane.band is None:
            continue
        offset = plane.band.offset
        view = view[:, :, offset : offset + plane.band.rope.rotary_dim]
        for i, j in _chunks(job.moved, n, _CHUNK):
            got = view.index_select(0, src[i:j])
            cos, sin = tables[plane.band.rope]
            turn_(got.view(plane.dtype), cos[row[i:j]], sin[row[i:j]], plane.band.rope.pairing)
            view.index_copy_(0, src[i:j], got)


def turn_(band: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairing: Pairing) -> torch.Tensor:
    """Rotate ``band`` ``[n, heads, rotary_dim]`` in place; ``cos``/``sin`` fp32 ``[n or 1, half]``.

    Decoded to fp32, turned, encoded back to the band's dtype (round to nearest even).
    """
    half = band.shape[-1] // 2
    c, s = cos[:, None, :], sin[:, None, :]
    x = band.to(torch.float32)
    if pairing is Pairing.HALVES:
        a, b = x[..., :half], x[..., half:]
        out_a, out_b = band[..., :half], band[..., half:]
    else:
        a, b = x[..., 0::2], x[..., 1::2]
        out_a, out_b = band[..., 0::2], band[..., 1::2]
    turned = a * c - b * s
    out_b.copy_(b * c + a * s)
    out_a.copy_(turned)
    return band


def _indexable(rows: torch.Tensor) -> torch.Tensor:
    """Index kernels do not take fp8; bytes are bytes."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


def _chunks(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    for i in range(start, stop, max(step, 1)):
        yield i, min(i + step, stop)
