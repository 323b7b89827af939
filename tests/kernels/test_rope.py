"""The spec as a value: angles, and what it refuses to be."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from leyline_lmcache.kernels import Pairing, RopeFault, RopeSpec, UnsupportedRope

from .oracle import SHIFTS, spec_of

SPEC = spec_of(64, Pairing.HALVES)


def test_angles_of_one_shift_and_of_many_agree() -> None:
    shifts = [*SHIFTS, 2**21, -(2**21)]
    table = SPEC.angles(shifts)
    assert table.dtype is torch.float64
    assert torch.equal(table, SPEC.angles(torch.tensor(shifts, dtype=torch.int32)))
    for row, shift in zip(table, shifts, strict=True):
        assert torch.equal(row, SPEC.angles(shift))
        assert row.tolist() == [shift * f for f in SPEC.inv_freq]


@pytest.mark.parametrize("shift", [*SHIFTS, 2**21, -(2**21)])
def test_cosines_are_rounded_once_and_negative_shifts_are_inverses(shift: int) -> None:
    cos, sin = SPEC.cos_sin(shift)
    for c, s, f in zip(cos.tolist(), sin.tolist(), SPEC.inv_freq, strict=True):
        assert abs(c - math.cos(shift * f)) <= 2**-25
        assert abs(s - math.sin(shift * f)) <= 2**-25
    back_cos, back_sin = SPEC.cos_sin(-shift)
    assert torch.equal(back_cos, cos)
    assert torch.equal(back_sin, -sin)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rotary_dim": 63}, "rotary_dim"),
        ({"rotary_dim": 0}, "rotary_dim"),
        ({"inv_freq": (1.0,)}, "inv_freq"),
        ({"inv_freq": (math.nan,) * 32}, "inv_freq"),
        ({"amplitude": 0.0}, "amplitude"),
        ({"amplitude": math.inf}, "amplitude"),
        ({"pairing": "halves"}, "pairing"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=rf"RopeSpec\.{field}"):
        dataclasses.replace(SPEC, **change)


def test_specs_are_values() -> None:
    assert spec_of(64, Pairing.HALVES) == SPEC
    assert len({SPEC, spec_of(64, Pairing.HALVES), spec_of(64, Pairing.INTERLEAVED)}) == 2
    assert isinstance(SPEC, RopeSpec)


def test_a_refusal_says_its_name_and_why() -> None:
    error = UnsupportedRope(RopeFault.MROPE, "three positions")
    assert (error.reason, error.detail, str(error)) == ("mrope", "three positions", "mrope: three positions")
