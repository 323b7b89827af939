"""An independent model of the splice: complex numbers in fp64, one token at a time, on copies.

Shares nothing with the product but the names of its arguments: frequencies and pairing are given plainly.
"""

from __future__ import annotations

import cmath
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from leyline_lmcache.kernels import KVLayout, Pairing, Plane, RopeSpec

CONTEXT = 131072
SHIFTS = [0, *(sign * s for s in (1, 127, 128, 129, 1024, CONTEXT) for sign in (1, -1))]


def frequencies(rotary_dim: int, base: float = 10000.0) -> tuple[float, ...]:
    return tuple(base ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2))


def spec_of(rotary_dim: int, pairing: Pairing, base: float = 10000.0, amplitude: float = 1.0) -> RopeSpec:
    return RopeSpec(rotary_dim, pairing, frequencies(rotary_dim, base), amplitude)


def pairs_of(rotary_dim: int, pairing: Pairing) -> list[tuple[int, int]]:
    half = rotary_dim // 2
    if pairing == "interleaved":
        return [(2 * i, 2 * i + 1) for i in range(half)]
    return [(i, i + half) for i in range(half)]


def turned(head: torch.Tensor, shift: int, spec: RopeSpec, offset: int) -> torch.Tensor:
    """One head ``[dim]`` in fp64, its band turned by ``shift``."""
    out = head.clone()
    for i, (a, b) in enumerate(pairs_of(spec.rotary_dim, spec.pairing)):
        z = complex(float(head[offset + a]), float(head[offset + b])) * cmath.exp(
            1j * shift * spec.inv_freq[i]
        )
        out[offset + a], out[offset + b] = z.real, z.imag
    return out


@dataclass(frozen=True)
class Snapshot:
    """The planes of a layout before a splice."""

    rows: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, layout: KVLayout) -> Snapshot:
        return cls(tuple(plane.rows.clone() for plane in layout))


def check(
    layout: KVLayout,
    before: Snapshot,
    src: Sequence[int],
    dst: Sequence[int],
    shift: Sequence[int],
) -> None:
    """Compare every byte of the pool with what the splice should have made of ``before``."""
    for plane, old in zip(layout, before.rows, strict=True):
        exact = old.clone()
        for s, d in zip(src, dst, strict=True):
            exact[d] = old[s]
        got = plane.rows.clone()
        if plane.band is not None:
            band = slice(plane.band.offset, plane.band.offset + plane.band.rope.rotary_dim)
            for s, d, delta in zip(src, dst, shift, strict=True):
                if delta == 0:
                    continue
                want = torch.stack(
                    [turned(h, delta, plane.band.rope, plane.band.offset) for h in elements(old[s], plane)]
                )
                assert_rounded(elements(got[d], plane)[:, band], want[:, band], plane, delta)
                got[d, :, band] = exact[d, :, band]
        # Everything else, including what nobody asked to touch, is the same bytes.
        assert torch.equal(got.view(torch.uint8), exact.view(torch.uint8)), f"{plane.name}: bytes changed"


def elements(rows: torch.Tensor, plane: Plane) -> torch.Tensor:
    return rows.view(plane.dtype).to(torch.float64)


def assert_rounded(got: torch.Tensor, want: torch.Tensor, plane: Plane, shift: int) -> None:
    """``got`` is ``want`` as fp32 arithmetic leaves it, rounded once to the plane's dtype."""
    assert plane.band is not None
    info = torch.finfo(plane.dtype)
    want = want.clamp(info.min, info.max)
    pairs = torch.tensor(pairs_of(plane.band.rope.rotary_dim, plane.band.rope.pairing))
    length = torch.zeros_like(want)
    for a, b in pairs.tolist():
        length[..., a] = length[..., b] = torch.hypot(want[..., a], want[..., b])
    half_ulp = want.abs() * info.eps / 2 + info.smallest_normal * info.eps / 2
    bound = half_ulp * 1.001 + length * 2.0**-21
    worst = ((got - want).abs() - bound).max()
    assert float(worst) <= 0, f"{plane.name} {plane.dtype} shift {shift}: off by {float(worst)} past rounding"
