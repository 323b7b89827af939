"""The Triton version of the splice: one launch moves and turns the rows of every plane.

A program owns a few tokens of one plane. It copies their rows as raw words, band excluded where it turns,
and then turns the band in fp32. Planes are reached through a table of addresses, so the number of layers
does not matter and K and V (or all layers of an MLA pool) share the launch. Only planes whose *band* has a
different shape, which no common model has, need a launch of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from .layout import KVLayout, Plane
from .rope import Pairing, RopeSpec

_TILE_BYTES = 1 << 15
"""Bytes of rows one program has in flight, and"""
_TILE_PAIRS = 1 << 11
"""pairs it turns at a time: as many as its registers hold without spilling."""

_MAX_TOKENS = 64

_WORDS = {4: tl.int32, 2: tl.int16, 1: tl.int8}

_STORED = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.uint16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.uint8,
    torch.float8_e5m2: tl.uint8,
}

_MANTISSA = {
    torch.float32: 23,
    torch.bfloat16: 7,
    torch.float16: 10,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 2,
}


# bf16 and fp8 are taken apart by hand. It costs a few integer operations in a kernel that waits for memory,
# runs on cards without fp8 instructions, and rounds alike everywhere, Triton's interpreter included.
@triton.jit
def _decode(raw, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 values of stored elements, exactly."""
    if MANTISSA >= 10:
        value = raw.to(tl.float32)
    elif MANTISSA == 7:
        value = (raw.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
        bits = raw.to(tl.uint32)
        size = bits & 0x7F
        value = (size << (23 - MANTISSA)).to(tl.float32, bitcast=True) * (2.0 ** (127 - BIAS))
        if MANTISSA == 3:
            value = tl.where(size == 0x7F, float("nan"), value)
        else:
            value = tl.where(size == 0x7C, float("inf"), tl.where(size > 0x7C, float("nan"), value))
        value = tl.where(bits >= 0x80, -value, value)
    return value


@triton.jit
def _encode(value, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements to store, rounded to nearest even. A turn can carry a pair of large fp8 elements past the
    largest one; those saturate and never become NaN."""
    if MANTISSA == 23:
        raw = value
    elif MANTISSA == 10:
        raw = value.to(tl.float16)
    elif MANTISSA == 7:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        raw = tl.where(value != value, 0x7FC0, rounded).to(tl.uint16)
    else:
        BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
        DROP: tl.constexpr = 23 - MANTISSA
        TOP: tl.constexpr = 448.0 if MANTISSA == 3 else 57344.0
        # Adding this aligns the last bit of fp32 with the last one of a denormal.
        MAGIC: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
        size = tl.minimum(tl.abs(value), TOP)
        bits = size.to(tl.uint32, bitcast=True)
        rounded = (bits + ((1 << (DROP - 1)) - 1) + ((bits >> DROP) & 1)) >> DROP
        normal = rounded - ((127 - BIAS) << MANTISSA)
        denormal = (size + MAGIC).to(tl.uint32, bitcast=True) & 0xFF
        code = tl.where(size < 2.0 ** (1 - BIAS), denormal, normal)
        code = tl.where(value != value, 0x7F, code)
        sign = (value.to(tl.uint32, bitcast=True) >> 24) & 0x80
        raw = (code | sign).to(tl.uint8)
    return raw


# Nothing that differs between calls is compiled in: a new variant would stall a serving engine for seconds.
@triton.jit(
    do_not_specialize=["tokens", "shifts"],
    do_not_specialize_on_alignment=["src", "dst", "row", "cos", "sin"],
)
def splice_kernel(  # type: ignore[no-untyped-def]
    planes,  # int64 [planes, 4]: address, words per slot, words per row, angle table (-1: no band)
    src,  # int64 [tokens]
    dst,  # int64 [tokens]
    row,  # int32 [tokens]: row of the angle tables, -1 for shift 0
    cos,  # fp32 [specs, shifts, HALF]
    sin,
    tokens,
    shifts,
    TOKENS: tl.constexpr,
    MOVES: tl.constexpr,  # False: every token stays in its slot
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    ROW: tl.constexpr,  # words of the widest row, rounded up to a power of two
    STEP: tl.constexpr,  # every plane's row and slot stride is a multiple of so many words
    ALIGN: tl.constexpr,  # bytes to which every row is aligned
    STORED: tl.constexpr,  # type of an element in memory
    MANTISSA: tl.constexpr,  # its bits, which tell the kind of element
    PER_WORD: tl.constexpr,  # elements per word
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,  # elements
    OFFSET: tl.constexpr,  # elements
    HALF: tl.constexpr,  # pairs per head, 0 if no plane has a band
    HEADS_TILE: tl.constexpr,  # HEADS and HALF rounded up to powers of two
    HALF_TILE: tl.constexpr,
    BAND_ALIGN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    plane = tl.program_id(1)
    address = tl.load(planes + plane * 4)
    slot_words = tl.multiple_of(tl.load(planes + plane * 4 + 1), STEP)
    row_words = tl.multiple_of(tl.load(planes + plane * 4 + 2), STEP)
    table = tl.load(planes + plane * 4 + 3)

    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    live = token < tokens
    source = tl.load(src + token, mask=live, other=0)
    target = tl.load(dst + token, mask=live, other=0)
    angle = tl.load(row + token, mask=live, other=-1)
    turns = live & (tl.minimum(angle, table.to(tl.int32)) >= 0)

    if MOVES:
        moves = live & (source != target)
        if tl.max(moves.to(tl.int32), 0) > 0:
            column = tl.arange(0, ROW)
            mask = moves[:, None] & (column < row_words)[None, :]
            if HALF > 0:
                within = column % (HEAD // PER_WORD)
                in_band = (within >= OFFSET // PER_WORD) & (within < (OFFSET + 2 * HALF) // PER_WORD)
                skip = turns[:, None] & in_band[None, :]
                mask = mask & (skip == 0)
            words = address.to(tl.pointer_type(WORD))
            reads = words + (source * slot_words)[:, None] + column[None, :]
            writes = words + (target * slot_words)[:, None] + column[None, :]
            reads = tl.multiple_of(reads, (WORD_BYTES, ALIGN))
            writes = tl.multiple_of(writes, (WORD_BYTES, ALIGN))
            tl.store(writes, tl.load(reads, mask=mask), mask=mask)

    if HALF > 0:  # noqa: SIM102 - one test is made when compiling, the other when running
        if tl.max(turns.to(tl.int32), 0) > 0:
            elements = address.to(tl.pointer_type(STORED))
            slot_elements = slot_words * PER_WORD
            reads = elements + (source * slot_elements)[:, None, None] + OFFSET
            writes = elements + (target * slot_elements)[:, None, None] + OFFSET
            head = tl.arange(0, HEADS_TILE)[None, :, None]
            pair = tl.arange(0, HALF_TILE)[None, None, :]
            turning = turns[:, None, None]
            angles = ((table * shifts + angle) * HALF)[:, None, None] + pair
            c = tl.load(cos + angles, mask=turning & (pair < HALF), other=1.0)
            s = tl.load(sin + angles, mask=turning & (pair < HALF), other=0.0)
            if INTERLEAVED:
                element = tl.arange(0, 2 * HALF_TILE)[None, None, :]
                mask = turning & (head < HEADS) & (element < 2 * HALF)
                reads = tl.multiple_of(reads + head * HEAD + element, (1, 1, BAND_ALIGN))
                writes = tl.multiple_of(writes + head * HEAD + element, (1, 1, BAND_ALIGN))
                x = _decode(tl.load(reads, mask=mask, other=0), MANTISSA)
                a, b = tl.split(tl.reshape(x, (TOKENS, HEADS_TILE, HALF_TILE, 2)))
                y = tl.reshape(tl.join(a * c - b * s, b * c + a * s), (TOKENS, HEADS_TILE, 2 * HALF_TILE))
                tl.store(writes, _encode(y, MANTISSA), mask=mask)
            else:
                mask = turning & (head < HEADS) & (pair < HALF)
                reads = tl.multiple_of(reads + head * HEAD + pair, (1, 1, BAND_ALIGN))
                writes = tl.multiple_of(writes + head * HEAD + pair, (1, 1, BAND_ALIGN))
                second = tl.multiple_of(reads + HALF, (1, 1, BAND_ALIGN))
                a = _decode(tl.load(reads, mask=mask, other=0), MANTISSA)
                b = _decode(tl.load(second, mask=mask, other=0), MANTISSA)
                tl.store(writes, _encode(a * c - b * s, MANTISSA), mask=mask)
                second = tl.multiple_of(writes + HALF, (1, 1, BAND_ALIGN))
                tl.store(second, _encode(b * c + a * s, MANTISSA), mask=mask)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch's share of a layout: its table of planes and its compile-time shape."""

    table: torch.Tensor
    banded: int
    specs: tuple[RopeSpec, ...]
    shape: dict[str, Any]
    warps: int
    move_tokens: int
    turn_tokens: int

    def constants(self, *, moves: bool) -> dict[str, Any]:
        """What the kernel is compiled for."""
        return {**self.shape, "MOVES": moves, "TOKENS": self.move_tokens if moves else self.turn_tokens}


def plan_launches(layout: KVLayout) -> tuple[Launch, ...]:
    """Group the planes by the shape of their band. Planes without a band ride along with the first group."""
    views = [view for plane in layout for view in _flat(plane)]
    groups: dict[tuple[object, ...] | None, list[_Flat]] = {}
    for view in views:
        groups.setdefault(view.shape, []).append(view)
    bare = groups.pop(None, [])
    batches = list(groups.values()) or [[]]
    batches[0] = [*batches[0], *bare]
    return tuple(_launch(batch, layout.device) for batch in batches)


def splice_triton(
    layout: KVLayout,
    src: torch.Tensor,
    dst: torch.Tensor,
    row: torch.Tensor,
    shifts: torch.Tensor,
    *,
    in_place: bool = False,
) -> None:
    """Enqueue the splice on the current stream of the layout's device.

    ``src``, ``dst``: int64 ``[n]`` on the device, no token reading a slot that another one writes.
    ``row``: int32 ``[n]`` on the device, indexing ``shifts`` (distinct, on the host), -1 for shift 0.
    ``in_place``: promises ``src == dst`` throughout, so planes without a band need no program.
    """
    for launch in launches_of(layout):
        planes = launch.banded if in_place else launch.table.shape[0]
        if planes == 0:
            continue
        cos, sin = _angle_tables(launch.specs, shifts, layout.device)
        tokens, constants = src.numel(), launch.constants(moves=not in_place)
        grid = (triton.cdiv(max(tokens, 1), constants["TOKENS"]), planes)
        splice_kernel[grid](
            launch.table,
            src,
            dst,
            row,
            cos,
            sin,
            tokens,
            shifts.numel(),
            **constants,
            num_warps=launch.warps,
            enable_fp_fusion=True,
        )


def launches_of(layout: KVLayout) -> tuple[Launch, ...]:
    """:func:`plan_launches`, once per layout (it writes a table to the device)."""
    found = layout.cache.get("triton")
    if found is None:
        found = layout.cache["triton"] = plan_launches(layout)
    launches: tuple[Launch, ...] = found
    return launches


def supports(device: torch.device) -> bool:
    """Whether the kernel runs there: on CUDA, or anywhere if it was imported under ``TRITON_INTERPRET=1``."""
    return device.type == "cuda" or not isinstance(splice_kernel, triton.JITFunction)


@dataclass(frozen=True, slots=True)
class _Flat:
    """A plane whose row is one stretch of memory, in bytes; a plane with scattered heads becomes several."""

    address: int
    slot: int
    row: int
    dtype: torch.dtype
    heads: int
    head: int
    offset: int
    rope: RopeSpec | None

    @property
    def shape(self) -> tuple[object, ...] | None:
        if self.rope is None:
            return None
        return (self.dtype, self.heads, self.head, self.offset, self.rope.rotary_dim, self.rope.pairing)


def _flat(plane: Plane) -> list[_Flat]:
    rows, size = plane.rows, plane.rows.element_size()
    heads, dim = rows.shape[1:]
    joined = heads == 1 or rows.stride(1) == dim
    offset, rope = (plane.band.offset, plane.band.rope) if plane.band else (0, None)
    return [
        _Flat(
            address=rows.data_ptr() + h * rows.stride(1) * size,
            slot=rows.stride(0) * size,
            row=(heads if joined else 1) * dim * size,
            dtype=plane.dtype,
            heads=heads if joined else 1,
            head=dim,
            offset=offset,
            rope=rope,
        )
        for h in range(1 if joined else heads)
    ]


def _launch(views: list[_Flat], device: torch.device) -> Launch:
    banded = [v for v in views if v.rope is not None]
    specs = tuple(dict.fromkeys(v.rope for v in banded if v.rope is not None))
    spans = [x for v in views for x in (v.address, v.slot, v.row)]
    dtype, heads, head, offset, half = torch.uint8, 1, 1, 0, 0
    pairing, size = Pairing.HALVES, 1
    if banded:
        first = banded[0]
        dtype, heads, head, offset = first.dtype, first.heads, first.head, first.offset
        half, pairing, size = specs[0].rotary_dim // 2, specs[0].pairing, dtype.itemsize
        spans += [offset * size, 2 * half * size, head * size]
    word = _common(spans, 4)
    align = _common([x for v in views for x in (v.address, v.slot)], 16)
    step = _common([x for v in views for x in (v.row, v.slot)], 16) // word
    band = [x for v in banded for x in (v.address + offset * size, v.slot, head * size)]
    if pairing is Pairing.HALVES:
        band.append(half * size)
    widest = max(v.row for v in views)
    heads_tile, half_tile = triton.next_power_of_2(heads), triton.next_power_of_2(max(half, 1))
    turn_tokens = _tokens(_TILE_PAIRS // (heads_tile * half_tile))
    move_tokens = min(turn_tokens, _tokens(_TILE_BYTES * align // 16 // triton.next_power_of_2(widest)))
    table = [
        (v.address, v.slot // word, v.row // word, specs.index(v.rope) if v.rope is not None else -1)
        for v in views
    ]
    return Launch(
        table=torch.tensor(table, dtype=torch.int64).to(device),
        banded=len(banded),
        specs=specs,
        # A row wider than the tile gets more threads instead of more registers.
        warps=max(4, min(16, 4 * heads_tile * half_tile // _TILE_PAIRS)),
        move_tokens=move_tokens,
        turn_tokens=turn_tokens,
        shape={
            "WORD": _WORDS[word],
            "WORD_BYTES": word,
            "ROW": triton.next_power_of_2(widest // word),
            "STEP": step,
            "ALIGN": align,
            "STORED": _STORED.get(dtype, tl.uint8),
            "MANTISSA": _MANTISSA.get(dtype, 23),
            "PER_WORD": max(1, word // size),
            "HEADS": heads,
            "HEAD": head,
            "OFFSET": offset,
            "HALF": half,
            "HEADS_TILE": heads_tile,
            "HALF_TILE": half_tile,
            "BAND_ALIGN": _common(band, 16) if band else 1,
            "INTERLEAVED": pairing is Pairing.INTERLEAVED,
        },
    )


def _angle_tables(
    specs: tuple[RopeSpec, ...], shifts: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    if not specs:
        empty = torch.zeros(1, dtype=torch.float32, device=device)
        return empty, empty
    pairs = [spec.cos_sin(shifts) for spec in specs]
    both = torch.stack([torch.stack([c for c, _ in pairs]), torch.stack([s for _, s in pairs])]).to(device)
    return both[0], both[1]


def _tokens(fitting: int) -> int:
    return max(1, min(_MAX_TOKENS, fitting))


def _common(spans: list[int], limit: int) -> int:
    """The largest power of two up to ``limit`` that divides all ``spans``."""
    while any(span % limit for span in spans):
        limit //= 2
    return limit
