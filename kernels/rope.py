"""Rotary position embedding as a value: which pairs of a key turn, and how fast.

A RoPE key at position ``p`` is ``amplitude * R(p) k``, with ``R(p)`` a rotation of each pair by
``p * inv_freq``. Moving the key by ``Δ`` positions is therefore ``R(Δ)`` alone: the amplitude (YaRN's
mscale) is in the key already and must not be applied twice. Source: arXiv 2606.01065, DESIGN §6 and §8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

MAX_SHIFT = 2**31 - 1
"""Shifts are 32-bit signed; angles stay accurate to fp32 rounding far beyond any context length."""


class Pairing(StrEnum):
    """Which two elements of a rotary band form a pair."""

    INTERLEAVED = "interleaved"
    """(0, 1), (2, 3), …; SGLang's ``is_neox_style = False`` (DeepSeek, GLM-4)."""

    HALVES = "halves"
    """(0, d/2), (1, d/2 + 1), …; SGLang's ``is_neox_style = True`` (Llama, Qwen)."""


class RopeFault(StrEnum):
    """Why a model's RoPE cannot be spliced."""

    NO_ATTENTION = "no_attention"
    NO_ROTARY = "no_rotary"
    MIXED_LAYERS = "mixed_layers"
    MISSING_TABLE = "missing_table"
    BAD_SHAPE = "bad_shape"
    DYNAMIC_NTK = "dynamic_ntk"
    LONGROPE = "longrope"
    MROPE = "mrope"
    LLAMA4 = "llama4"
    DUAL_CHUNK = "dual_chunk"
    FOURIER = "fourier"
    MULTI_SCALE = "multi_scale"
    NORM_AFTER_ROPE = "norm_after_rope"
    UNKNOWN_SCALING = "unknown_scaling"
    UNKNOWN_FREQUENCIES = "unknown_frequencies"
    NOT_LINEAR = "not_linear"
    NOT_CLOSED = "not_closed"


class UnsupportedRope(Exception):
    """The rotary embedding cannot be moved by one rotation; serve without splicing.

    ``reason`` is stable and fit for metrics, ``detail`` is for a person.
    """

    def __init__(self, reason: RopeFault, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One rotary band.

    ``rotary_dim``: elements that turn (even). ``inv_freq``: radians per position and pair, fp64,
    ``rotary_dim / 2`` of them. ``amplitude``: factor baked into the model's table, for the record only;
    rotations are pure. Raises ``ValueError`` naming the field.
    """

    rotary_dim: int
    pairing: Pairing
    inv_freq: tuple[float, ...]
    amplitude: float = 1.0

    def __post_init__(self) -> None:
        if self.rotary_dim <= 0 or self.rotary_dim % 2:
            raise ValueError(f"RopeSpec.rotary_dim must be even and positive, got {self.rotary_dim}")
        if len(self.inv_freq) != self.rotary_dim // 2:
            raise ValueError(
                f"RopeSpec.inv_freq must hold rotary_dim / 2 = {self.rotary_dim // 2} values, "
                f"got {len(self.inv_freq)}"
            )
        if not all(math.isfinite(f) for f in self.inv_freq):
            raise ValueError("RopeSpec.inv_freq must be finite")
        if not (math.isfinite(self.amplitude) and self.amplitude > 0):
            raise ValueError(f"RopeSpec.amplitude must be positive and finite, got {self.amplitude}")
        if not isinstance(self.pairing, Pairing):
            raise ValueError(f"RopeSpec.pairing must be a Pairing, got {self.pairing!r}")

    def angles(self, shift: int | Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Radians by which each pair turns: fp64 on the CPU, ``[half]`` for an int, else ``[n, half]``."""
        freq = torch.tensor(self.inv_freq, dtype=torch.float64)
        if isinstance(shift, int):
            return freq * shift
        shifts = torch.as_tensor(shift, dtype=torch.float64, device="cpu")
        return shifts[:, None] * freq

    def cos_sin(self, shift: int | Sequence[int] | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 cosine and sine of :meth:`angles`, each correctly rounded from fp64 (so negative shifts
        are exact conjugates and shift 0 is exactly (1, 0))."""
        angle = self.angles(shift)
        return angle.cos().to(torch.float32), angle.sin().to(torch.float32)
