"""Read a model's RoPE off the loaded model, and test that one rotation really moves its keys.

The cos/sin table is the truth: it is what the engine multiplies keys by. The frequencies come from the
module where it has them (a half-precision table is too coarse to give angles), else from the table
itself, and either way every sampled row of the table must be reproduced by them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .model_config import probe_config
from .rope import Pairing, RopeFault, RopeSpec, UnsupportedRope

__all__ = ["probe_config", "probe_model", "probe_module"]

_DENSE_ROWS = 2048
_SPREAD_ROWS = 4096
_CLOSURE_PAIRS = 2048

# Class-name fragments whose angle depends on more than the position, or on the length of the request.
# Checked along the class hierarchy, so that subclasses are found too.
_REFUSED: tuple[tuple[str, RopeFault, str], ...] = (
    ("MRotary", RopeFault.MROPE, "multimodal RoPE has three positions per token"),
    ("MRoPE", RopeFault.MROPE, "multimodal RoPE has three positions per token"),
    ("VLRotary", RopeFault.MROPE, "multimodal RoPE has three positions per token"),
    ("LongRoPE", RopeFault.LONGROPE, "the frequencies change with the length of the request"),
    ("DynamicNTK", RopeFault.DYNAMIC_NTK, "the base depends on a sequence length"),
    ("DualChunk", RopeFault.DUAL_CHUNK, "positions are taken modulo a chunk"),
    ("Llama4", RopeFault.LLAMA4, "two-dimensional positions"),
    ("Fourier", RopeFault.FOURIER, "the table is a sum of frequencies, not a rotation"),
)


def probe_module(rotary: Any) -> RopeSpec:
    """The :class:`RopeSpec` of one SGLang rotary module.

    Reads ``cos_sin_cache`` (``[positions, rotary_dim]``: cosines, then sines), ``is_neox_style`` and
    ``rotary_dim``. Raises :class:`UnsupportedRope` naming the reason.
    """
    _refuse_by_kind(rotary)
    table = getattr(rotary, "cos_sin_cache", None)
    if not isinstance(table, torch.Tensor):
        raise UnsupportedRope(RopeFault.MISSING_TABLE, f"{_name(rotary)} has no cos_sin_cache")
    if table.device.type == "meta" or table.numel() == 0:
        raise UnsupportedRope(RopeFault.MISSING_TABLE, f"{_name(rotary)}.cos_sin_cache holds no data")
    if table.dim() != 2 or table.shape[1] % 2 or not table.is_floating_point():
        raise UnsupportedRope(
            RopeFault.BAD_SHAPE,
            f"cos_sin_cache is {table.dtype} {tuple(table.shape)}, expected a real [positions, rotary_dim]",
        )
    positions, width = table.shape
    rotary_dim = getattr(rotary, "rotary_dim", width)
    if rotary_dim != width:
        raise UnsupportedRope(
            RopeFault.BAD_SHAPE, f"rotary_dim is {rotary_dim}, the table has {width} columns"
        )
    if positions < 4:
        raise UnsupportedRope(RopeFault.BAD_SHAPE, f"cos_sin_cache has only {positions} rows")
    neox = getattr(rotary, "is_neox_style", None)
    if neox is None:
        raise UnsupportedRope(RopeFault.MISSING_TABLE, f"{_name(rotary)} does not say is_neox_style")
    pairing = Pairing.HALVES if bool(neox) else Pairing.INTERLEAVED

    sample = _Sample(table)
    amplitude = sample.amplitude()
    sample.check_closure(amplitude)
    freq = sample.frequencies(list(_module_frequencies(rotary, width // 2)), amplitude)
    exact = getattr(rotary, "mscale", None)
    if isinstance(exact, float) and abs(exact - amplitude) <= 2 * sample.epsilon * amplitude:
        amplitude = exact
    return RopeSpec(width, pairing, tuple(float(f) for f in freq), amplitude)


class _Sample:
    """Rows of a table in fp64: the first ones densely, then spread to the last, which is always in."""

    def __init__(self, table: torch.Tensor) -> None:
        last = table.shape[0] - 1
        rows = {*range(min(_DENSE_ROWS, last + 1)), last}
        rows.update(int(v) for v in torch.linspace(0, last, _SPREAD_ROWS, dtype=torch.float64))
        rows.update(p + d for p in (1 << i for i in range(31)) for d in (-1, 0, 1) if p + d <= last)
        index = torch.tensor(sorted(rows))
        taken = table.index_select(0, index.to(table.device)).to("cpu", torch.float64)
        half = table.shape[1] // 2
        self.rows = index
        self.values = torch.complex(taken[:, :half], taken[:, half:])
        self.epsilon = torch.finfo(table.dtype).eps
        if not bool(torch.isfinite(taken).all()):
            raise UnsupportedRope(RopeFault.BAD_SHAPE, "cos_sin_cache holds values that are not finite")

    def amplitude(self) -> float:
        """Row 0 is angle 0 everywhere: its cosines are the amplitude."""
        first = self.values[0]
        amplitude = float(first.real[0])
        bound = 2 * self.epsilon * abs(amplitude)
        if amplitude <= 0 or float((first - amplitude).abs().max()) > bound:
            raise UnsupportedRope(RopeFault.NOT_LINEAR, "row 0 of the table is not one amplitude at angle 0")
        return amplitude

    def _tolerance(self, angle: torch.Tensor, amplitude: float) -> torch.Tensor:
        """What an engine that works in fp32 may be off by at ``angle`` radians: the product is rounded
        (relative 2^-24, up to three times: t / factor, inv_freq, product), then the value to the table's
        type."""
        return amplitude * (angle.abs() * 2**-22 + 4 * 2**-24 + 2 * self.epsilon)

    def frequencies(self, candidates: list[torch.Tensor], amplitude: float) -> torch.Tensor:
        """fp64 radians per position: those of the module that explain the table, or recovered from it."""
        known = next((c for c in candidates if bool(self._explained(c, amplitude).all())), None)
        if self.epsilon > 2**-20:  # half precision
            if known is None:
                raise UnsupportedRope(
                    RopeFault.UNKNOWN_FREQUENCIES,
                    "a half-precision table gives no angles, and it matches no frequencies of the module",
                )
            return known
        found = self.recover(amplitude)
        if known is not None:
            # A fit follows the table's rounding noise, so it is believed only where it is clearly better: the
            # module's frequency, computed here, may differ in its last bit from the one its device computed.
            better = self._error(known, amplitude) > 2 * self._error(found, amplitude)
            found = torch.where(better, found, known)
        if not bool(self._explained(found, amplitude).all()):
            raise UnsupportedRope(RopeFault.NOT_LINEAR, "the angle is not proportional to the position")
        return found

    def _off(self, freq: torch.Tensor, amplitude: float) -> tuple[torch.Tensor, torch.Tensor]:
        angle = self.rows.to(torch.float64)[:, None] * freq
        return (self.values - torch.polar(torch.full_like(angle, amplitude), angle)).abs(), angle

    def _explained(self, freq: torch.Tensor, amplitude: float) -> torch.Tensor:
        """Per sampled row and pair: whether it is ``amplitude * exp(i * row * freq)`` to rounding."""
        off, angle = self._off(freq, amplitude)
        return off <= self._tolerance(angle, amplitude)

    def _error(self, freq: torch.Tensor, amplitude: float) -> torch.Tensor:
        """Per pair: how far the table is from ``freq``, over all sampled rows."""
        return self._off(freq, amplitude)[0].square().mean(0)

    def recover(self, amplitude: float) -> torch.Tensor:
        """Frequencies from the table alone: unwrap the phase from row 1 outwards, each row refining the
        estimate enough to unwrap the next, then fit all rows (least squares through the origin)."""
        z = self.values / amplitude
        rows = self.rows.to(torch.float64)
        freq = torch.angle(z[1])
        top = 1
        while True:
            reach = (rows > 0) & (rows <= 2 * top)
            r = rows[reach][:, None]
            residual = torch.angle(z[reach] * torch.polar(torch.ones(()).double(), -(r * freq)))
            freq = freq + (r * residual).sum(0) / (r * r).sum(0)
            if 2 * top >= float(rows[-1]):
                break
            top *= 2
        # Engines hold frequencies in fp32; take that value when the fit cannot tell it from its own.
        near = freq.to(torch.float32).to(torch.float64)
        return torch.where((near - freq).abs() <= freq.abs() * 2**-26, near, freq)

    def check_closure(self, amplitude: float) -> None:
        """R(a) R(b) = R(a + b) on rows of the table itself, with no frequencies involved."""
        last = int(self.rows[-1])
        where = {int(r): i for i, r in enumerate(self.rows)}
        dense = min(_DENSE_ROWS, last + 1)
        generator = torch.Generator().manual_seed(0)
        picks = torch.randint(len(self.rows), (_CLOSURE_PAIRS,), generator=generator).tolist()
        triples = []
        for k, i in enumerate(picks):
            total = int(self.rows[i])
            b = min(total, (k * 7919) % dense)
            if total - b in where:
                triples.append((where[total - b], where[b], i))
        triples += [(where[a], where[b], where[a + b]) for a in range(dense // 2) for b in (1, a)]
        left, right, both = (torch.tensor(t) for t in zip(*triples, strict=True))
        z = self.values
        off = (z[left] * z[right] / amplitude - z[both]).abs()
        # The frequency is unknown here, so bound the angle by the fastest pair a RoPE can have: one radian
        # per position. Slow pairs get the same slack, `explains` is the sharp test.
        bound = 2 * self._tolerance(self.rows[both].to(torch.float64), amplitude)[:, None]
        if bool((off > bound).any()):
            raise UnsupportedRope(RopeFault.NOT_CLOSED, "R(a) R(b) differs from R(a + b) on the table's rows")


def _refuse_by_kind(rotary: Any) -> None:
    names = [c.__name__ for c in type(rotary).__mro__]
    for fragment, fault, why in _REFUSED:
        if any(fragment.lower() in name.lower() for name in names):
            raise UnsupportedRope(fault, f"{_name(rotary)}: {why}")
    if getattr(rotary, "mrope_section", None):
        raise UnsupportedRope(RopeFault.MROPE, f"{_name(rotary)} has an mrope_section")
    for attribute, fault in (
        ("long_short_cos_sin_cache", RopeFault.LONGROPE),
        ("cos_sin_q_cache", RopeFault.DUAL_CHUNK),
        ("cos_coef", RopeFault.FOURIER),
    ):
        if hasattr(rotary, attribute):
            raise UnsupportedRope(fault, f"{_name(rotary)} has {attribute}")
    factors = getattr(rotary, "scaling_factors", None)
    if isinstance(factors, (list, tuple)) and len(factors) > 1:
        raise UnsupportedRope(RopeFault.MULTI_SCALE, f"{_name(rotary)} holds one table per scaling factor")


def _module_frequencies(rotary: Any, half: int) -> Iterator[torch.Tensor]:
    """Frequencies the module can tell, as candidates: what its ``_compute_inv_freq`` takes differs between
    classes (the base, or YaRN's factor), and only the table says which one was meant."""
    compute = getattr(rotary, "_compute_inv_freq", None)
    found: list[torch.Tensor] = []
    if callable(compute):
        for argument in ("scaling_factor", "base"):
            value = getattr(rotary, argument, None)
            if value is not None:
                found.extend(_attempt(compute, value))
    for attribute in ("inv_freq", "_inv_freq"):
        value = getattr(rotary, attribute, None)
        if isinstance(value, torch.Tensor):
            found.append(value)
    factors = getattr(rotary, "scaling_factors", None)
    stretch = float(factors[0]) if isinstance(factors, (list, tuple)) and factors else 1.0
    for value in found:
        if value.numel() == half and value.is_floating_point() and value.device.type != "meta":
            freq = value.detach().to("cpu", torch.float64).reshape(half)
            if bool(torch.isfinite(freq).all()):
                yield freq / stretch
                if stretch != 1.0:
                    yield freq


def _attempt(compute: Callable[[Any], Any], argument: Any) -> Iterable[torch.Tensor]:
    try:
        value = compute(argument)
    except Exception:  # an upstream method given an argument it may not take; the table decides
        return ()
    return (value,) if isinstance(value, torch.Tensor) else ()


def probe_model(model: Any) -> dict[int, RopeSpec]:
    """``{layer_id: RopeSpec}`` of every attention layer of a loaded SGLang model.

    An attention layer is a module that owns a ``RadixAttention`` (anything with ``layer_id``,
    ``qk_head_dim`` and ``tp_k_head_num``); its rotary module is its own child. Raises
    :class:`UnsupportedRope` if a layer has none (NoPE layers are keys that do not turn with position,
    and they share a pool with those that do), has several, or normalises keys after turning them.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    specs: dict[int, RopeSpec] = {}
    probed: dict[int, RopeSpec] = {}
    bare: list[str] = []
    for path, module in modules.items():
        if not _is_attention(module):
            continue
        owner_path = path.rpartition(".")[0]
        owner = modules.get(owner_path)
        if owner is None:
            continue
        if getattr(module, "is_cross_attention", False):
            raise UnsupportedRope(RopeFault.MIXED_LAYERS, f"{path} is cross-attention")
        _refuse_by_layer(owner_path, owner)
        rotary = _rotary_of(owner_path, owner)
        if rotary is None:
            bare.append(owner_path)
            continue
        if id(rotary) not in probed:
            probed[id(rotary)] = probe_module(rotary)
        spec = probed[id(rotary)]
        if specs.setdefault(int(module.layer_id), spec) != spec:
            raise UnsupportedRope(
                RopeFault.MIXED_LAYERS, f"layer {module.layer_id} has two rotary embeddings"
            )
    if not specs and not bare:
        raise UnsupportedRope(RopeFault.NO_ATTENTION, "no attention layer of a known kind in the model")
    if not specs:
        raise UnsupportedRope(RopeFault.NO_ROTARY, f"attention layers without a rotary module: {bare[0]}, …")
    if bare:
        raise UnsupportedRope(RopeFault.MIXED_LAYERS, f"{bare[0]} has no rotary module, other layers have")
    return dict(sorted(specs.items()))


def _is_attention(module: Any) -> bool:
    return all(hasattr(module, a) for a in ("layer_id", "qk_head_dim", "tp_k_head_num"))


def _is_rotary(module: Any) -> bool:
    return hasattr(module, "is_neox_style") or bool(re.search("rotary|rope", type(module).__name__, re.I))


def _rotary_of(path: str, owner: Any) -> Any | None:
    """The rotary module among the owner's children; two different ones are ambiguous."""
    found = {id(child): child for child in owner.children() if _is_rotary(child)}
    with_table = {key: child for key, child in found.items() if hasattr(child, "is_neox_style")}
    found = with_table or found
    if len(found) > 1:
        raise UnsupportedRope(RopeFault.MIXED_LAYERS, f"{path} has {len(found)} rotary modules")
    return next(iter(found.values()), None)


def _refuse_by_layer(path: str, owner: Any) -> None:
    if getattr(owner, "use_qk_norm", False) and getattr(owner, "key_layernorm", None) is not None:
        # Hunyuan: a learnt per-element weight on turned keys does not commute with a rotation.
        raise UnsupportedRope(RopeFault.NORM_AFTER_ROPE, f"{path} normalises keys after turning them")
    for flag in ("use_rope", "attn_use_rope"):
        if getattr(owner, flag, True) is False:
            raise UnsupportedRope(RopeFault.MIXED_LAYERS, f"{path}.{flag} is off")
    if hasattr(owner, "apply_rope_all_layers") and not (owner.apply_rope_all_layers or owner.sliding_window):
        raise UnsupportedRope(RopeFault.MIXED_LAYERS, f"{path} does not turn its keys")


def _name(module: Any) -> str:
    return type(module).__name__
