"""The torch version of the splice: serves engines on CPU, and is what the Triton kernel is compared with.

On a CPU the work is bound by memory, so it goes plane by plane in chunks that stay in the L2 cache:
copy, decode the band to fp32, turn, encode. Operations are kept below the size at which torch spreads
one over its threads; waking them costs more than the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .job import Job
from .layout import FP8, KVLayout, Plane
from .rope import Pairing, RopeSpec

_SERIAL = 32768 - 1
"""Elements that an elementwise torch kernel handles without waking other threads (its grain size)."""

_CHUNK_BYTES = 1 << 19
"""Bytes of one chunk; with fp32 scratch it fits the L2 cache of a server core."""


class _Angles:
    """cos/sin of one spec for the distinct shifts, in the form the pairing wants, on the planes' device."""

    __slots__ = ("cos", "pairing", "sin", "turn")

    def __init__(self, spec: RopeSpec, shifts: torch.Tensor, device: torch.device) -> None:
        cos, sin = (t.to(device)[:, None] for t in spec.cos_sin(shifts))
        self.pairing = spec.pairing
        self.turn = torch.complex(cos, sin)  # [shifts, 1, half]
        self.cos, self.sin = torch.cat((cos, cos), -1), sin

    def at(self, row: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One row of angles ``[1, …]``, or one per token ``[c, 1, …]``."""
        if self.pairing is Pairing.INTERLEAVED:
            turn = self.turn[row]
            return turn, turn
        return self.cos[row], self.sin[row]


class _Turner:
    """Turns bands ``[c <= step, heads, rotary_dim]`` of one plane in place; owns the fp32 scratch.

    The views of a whole chunk are made once: on a CPU a view costs as much as a small operation.
    """

    __slots__ = (
        "angles",
        "apart",
        "band",
        "direct",
        "limit",
        "pairs",
        "stage",
        "step",
        "turning",
        "units",
        "x",
        "y",
    )

    def __init__(self, plane: Plane, angles: _Angles, step: int) -> None:
        turning, units = plane.turning, plane.turning_units
        assert turning is not None and units is not None
        shape = (step, *turning.shape[1:])
        self.angles, self.step, self.turning, self.units = angles, step, turning, units
        self.stage = torch.empty((step, *units.shape[1:]), dtype=units.dtype, device=units.device)
        self.band = self.stage.view(plane.dtype).view(shape)
        self.direct = plane.dtype is torch.float32
        self.limit = torch.finfo(plane.dtype).max if plane.dtype in FP8 else None
        # Bands that lie apart are decoded faster from a packed copy; fp32 is turned where it lies.
        self.apart = not self.direct and turning.stride(0) != turning[:1].numel()
        self.x = torch.empty(shape, dtype=torch.float32, device=plane.rows.device)
        self.pairs = _as_pairs(self.x)
        self.y = torch.empty_like(self.x) if angles.pairing is Pairing.HALVES else self.x

    def __call__(self, band: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        c = band.shape[0]
        if self.angles.pairing is Pairing.INTERLEAVED:
            if self.direct and _pairs_aligned(band):
                _as_pairs(band).mul_(cos)
                return
            x, pairs = (self.x, self.pairs) if c == self.step else (self.x[:c], self.pairs[:c])
            x.copy_(band)
            pairs.mul_(cos)
            band.copy_(self._bounded(x))
            return
        half = sin.shape[-1]
        y = self.y if c == self.step else self.y[:c]
        x = band if self.direct else (self.x if c == self.step else self.x[:c]).copy_(band)
        torch.mul(x, cos, out=y)
        y[..., :half].addcmul_(x[..., half:], sin, value=-1)
        y[..., half:].addcmul_(x[..., :half], sin)
        band.copy_(self._bounded(y))

    def turn_slots(self, start: int, stop: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Turn the bands of slots ``[start, stop)``, at most a chunk, where they lie."""
        if not self.apart:
            self(self.turning[start:stop], cos, sin)
            return
        c = stop - start
        stage, band = (self.stage, self.band) if c == self.step else (self.stage[:c], self.band[:c])
        stage.copy_(self.units[start:stop])
        self(band, cos, sin)
        self.units[start:stop].copy_(stage)

    def _bounded(self, x: torch.Tensor) -> torch.Tensor:
        """A turn can carry a pair of large fp8 elements past the largest one; those saturate, like a
        GPU's conversion does, and never become NaN."""
        return x if self.limit is None else x.clamp_(-self.limit, self.limit)


@torch.inference_mode()  # pools may be inference tensors, which refuse writes outside it
def splice_torch(layout: KVLayout, job: Job) -> None:
    """Run ``job`` on every plane, on whatever device the planes are."""
    device = layout.device
    angles: dict[RopeSpec, _Angles] = {}
    for plane in layout:
        if plane.band is not None and plane.band.rope not in angles:
            angles[plane.band.rope] = _Angles(plane.band.rope, job.shifts, device)
    groups = (
        _Group(job, 0, job.still, device),
        _Group(job, job.still, job.moved, device),
        _Group(job, job.moved, job.src.numel(), device),
    )
    for plane in layout:
        angle = angles[plane.band.rope] if plane.band is not None else None
        _splice_plane(plane, job, groups, angle)


def _splice_plane(
    plane: Plane, job: Job, groups: tuple[_Group, _Group, _Group], angles: _Angles | None
) -> None:
    still, moved, turned = groups
    step = _step(plane, job, plane.row_bytes)
    if job.moved:
        turner = _Turner(plane, angles, step) if angles is not None else None
        if job.overlap:
            _move_staged(plane, job, turner)
        else:
            _move(plane, still, None, step)
            _move(plane, moved, turner, step)
    if angles is not None and job.moved < job.src.numel():
        _turn_in_place(plane, turned, _Turner(plane, angles, _step(plane, job, plane.band_bytes)))


class _Group:
    """One group of a job: its runs, and the remaining tokens as device index tensors."""

    __slots__ = ("dst", "row", "runs", "src")

    def __init__(self, job: Job, start: int, stop: int, device: torch.device) -> None:
        runs, rest = job.runs(start, stop)
        self.runs = [(int(job.src[a]), int(job.dst[a]), b - a, int(job.row[a])) for a, b in runs]
        self.src, self.dst = job.src[rest].to(device), job.dst[rest].to(device)
        self.row = job.row[rest]

    def pieces(self, step: int) -> Iterator[tuple[int, int, int | torch.Tensor]]:
        """Chunks of the remaining tokens with the row of their angles, one if they share it."""
        n = self.row.numel()
        for i in range(0, n, step):
            j = min(i + step, n)
            first = int(self.row[i])
            # Rows are sorted within a group.
            yield i, j, first if first == int(self.row[j - 1]) else self.row[i:j].to(self.src.device)


def _step(plane: Plane, job: Job, token_bytes: int) -> int:
    """Tokens per chunk: as many as stay in cache and below the size at which torch uses its threads."""
    step = min(_CHUNK_BYTES // max(token_bytes, 1), _SERIAL // max(plane.units[:1].numel(), 1))
    if plane.turning is not None:
        step = min(step, _SERIAL // plane.turning[:1].numel())
    return max(1, min(step, job.src.numel()))


def _move(plane: Plane, group: _Group, turner: _Turner | None, step: int) -> None:
    units = plane.units
    for src, dst, count, row in group.runs:
        if turner is None:
            units[dst : dst + count].copy_(units[src : src + count])
            continue
        cos, sin = turner.angles.at(row)
        for i in range(0, count, step):
            a, b = dst + i, dst + min(i + step, count)
            units[a:b].copy_(units[a + src - dst : b + src - dst])
            turner.turn_slots(a, b, cos, sin)
    if group.src.numel() == 0:
        return
    stage = torch.empty((step, *units.shape[1:]), dtype=units.dtype, device=units.device)
    band = _band_of(plane, stage)
    for i, j, row_of in group.pieces(step):
        got = torch.index_select(units, 0, group.src[i:j], out=stage[: j - i])
        if turner is not None and band is not None:
            turner(band[: j - i], *turner.angles.at(row_of))
        units.index_copy_(0, group.dst[i:j], got)


def _move_staged(plane: Plane, job: Job, turner: _Turner | None) -> None:
    """All sources of the plane are read before the first destination is written."""
    device = plane.rows.device
    src, dst = job.src[: job.moved].to(device), job.dst[: job.moved].to(device)
    stage = plane.units.index_select(0, src)
    band = _band_of(plane, stage)
    if turner is not None and band is not None:
        for i in range(job.still, job.moved, turner.step):
            j = min(i + turner.step, job.moved)
            turner(band[i:j], *turner.angles.at(job.row[i:j].to(device)))
    plane.units.index_copy_(0, dst, stage)


def _turn_in_place(plane: Plane, group: _Group, turner: _Turner) -> None:
    units, step = plane.turning_units, turner.step
    assert units is not None
    for src, _, count, row in group.runs:
        cos, sin = turner.angles.at(row)
        for i in range(0, count, step):
            turner.turn_slots(src + i, src + min(i + step, count), cos, sin)
    for i, j, row_of in group.pieces(step):
        got = torch.index_select(units, 0, group.src[i:j], out=turner.stage[: j - i])
        turner(turner.band[: j - i], *turner.angles.at(row_of))
        units.index_copy_(0, group.src[i:j], got)


def _band_of(plane: Plane, stage: torch.Tensor) -> torch.Tensor | None:
    """The rotary band of rows staged as units, ``[n, heads, rotary_dim]``."""
    if plane.band is None:
        return None
    rows = stage.view(plane.dtype).view(stage.shape[0], *plane.rows.shape[1:])
    return rows[:, :, plane.band.offset : plane.band.offset + plane.band.rope.rotary_dim]


def _pairs_aligned(band: torch.Tensor) -> bool:
    return band.storage_offset() % 2 == 0 and all(s % 2 == 0 for s in band.stride()[:-1])


def _as_pairs(band: torch.Tensor) -> torch.Tensor:
    """fp32 ``[c, heads, rotary_dim]`` as complex ``[c, heads, half]``, no copy."""
    return torch.view_as_complex(band.unflatten(-1, (-1, 2)))
