"""The splice against the fp64 oracle, both backends; the Triton kernel runs under its interpreter here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leyline_lmcache.kernels import (
    KVLayout,
    Pairing,
    RopeSpec,
    SlotRangeError,
    SpliceError,
    prepare,
    splice_rows,
)

from .oracle import CONTEXT, SHIFTS, Snapshot, check, spec_of
from .pools import DTYPES, FP8, POOLS, SLOTS, filled, gqa, mla

BACKENDS = ["torch", "triton"]
Case = dict[str, Any]


def apart(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """``n`` source and ``n`` other destination slots, in no order."""
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))
    return slots[:n], slots[n : 2 * n]


def run(
    layout: KVLayout, src: torch.Tensor, dst: torch.Tensor, shift: torch.Tensor | int, backend: str
) -> None:
    before = Snapshot.of(layout)
    splice_rows(layout, src, dst, shift, backend=backend)  # type: ignore[arg-type]
    shifts = [shift] * len(src) if isinstance(shift, int) else shift.tolist()
    check(layout, before, src.tolist(), dst.tolist(), shifts)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pairing", list(Pairing))
@pytest.mark.parametrize("pool", POOLS)
def test_every_pool_equals_the_oracle(pool: str, pairing: Pairing, dtype: torch.dtype, backend: str) -> None:
    """Moved and turned by every shift, turned in place, and copied unturned, in one call (R1, R4, R8)."""
    layout = POOLS[pool](pairing, dtype)
    src, dst = apart(2 * len(SHIFTS))
    dst[: len(SHIFTS)] = src[: len(SHIFTS)]
    run(layout, src, dst, torch.tensor(SHIFTS * 2), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shift", [*SHIFTS, 2**21, -(2**21)])
def test_one_shift_for_all(shift: int, backend: str) -> None:
    layout = mla(Pairing.INTERLEAVED, torch.bfloat16, layers=2, rank=16, rope=64)
    run(layout, *apart(11, 1), shift, backend)
    slots = apart(11, 2)[0]
    run(layout, slots, slots, shift, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pairing", list(Pairing))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_runs_of_neighbouring_slots(dtype: torch.dtype, pairing: Pairing, backend: str) -> None:
    """Slots that run on are sliced, not gathered; runs end at gaps and where the shift changes."""
    layout = gqa(pairing, dtype)
    src = torch.cat((torch.arange(1, 36), torch.tensor([37, 39])))
    dst = torch.cat((torch.arange(40, 75), torch.tensor([78, 76])))
    run(layout, src, dst, torch.tensor([5] * 34 + [9, 9, 9]), backend)
    run(layout, src, src, torch.tensor([5] * 34 + [9, 0, 9]), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shift", [0, 5])
def test_slots_that_run_on_on_one_side_only(shift: int, backend: str) -> None:
    """A run is one on both sides: here the other side has a gap, or goes backwards."""
    layout = mla(Pairing.INTERLEAVED, torch.bfloat16, layers=1, rank=8, rope=8)
    on, gap = torch.arange(36), torch.cat((torch.arange(40, 58), torch.arange(59, 77)))
    for src, dst in ((on, gap), (gap, on), (on, gap.flip(0)), (gap.flip(0), on)):
        run(layout, src, dst, shift, backend)


def test_reads_of_what_is_written_are_never_left_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its programs run in any order; such calls are staged instead."""
    from leyline_lmcache.kernels import triton_rotate

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(triton_rotate, "splice_triton", refuse)
    layout = gqa(Pairing.HALVES, torch.float32)
    for src, dst in (([4, 4], [4, 5]), ([1, 2], [2, 3]), ([1, 2], [2, 1])):
        run(layout, torch.tensor(src), torch.tensor(dst), 3, "triton")
    with pytest.raises(AssertionError, match="launched"):
        run(layout, torch.tensor([1, 6, 6]), torch.tensor([2, 7, 8]), 3, "triton")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_copy_without_shift_keeps_every_bit(dtype: torch.dtype, backend: str) -> None:
    """Also NaN payloads, infinities, negative zeros and denormals."""
    layout = mla(Pairing.INTERLEAVED, dtype, layers=2, rank=12, rope=8)
    generator = torch.Generator().manual_seed(3)
    for plane in layout:
        raw = torch.randint(0, 256, (SLOTS, 1, plane.row_bytes), generator=generator, dtype=torch.uint8)
        plane.rows.view(torch.uint8).copy_(raw.view(plane.rows.view(torch.uint8).shape))
    src, dst = apart(20)
    before = Snapshot.of(layout)
    stats = splice_rows(layout, src, dst, 0, backend=backend)  # type: ignore[arg-type]
    for plane, old in zip(layout, before.rows, strict=True):
        assert torch.equal(plane.rows[dst].view(torch.uint8), old[src].view(torch.uint8))
    assert (stats.rows, stats.bytes_moved) == (20, 2 * 20 * layout.row_bytes)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (list(range(5, 60)), [*range(6, 60), 5]),  # a cycle
        (list(range(40)), list(range(3, 43))),  # moved over itself, up
        (list(range(3, 43)), list(range(40))),  # and down
        ([1, 2, 2, 9], [2, 7, 8, 9]),  # read twice, overwritten, and one in place
        ([4, 4], [4, 5]),  # turned in place and read by another
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sources_are_read_before_destinations_are_written(
    src: list[int], dst: list[int], backend: str, dtype: torch.dtype
) -> None:
    shifts = torch.tensor([(-1) ** i * (i % 3) * 77 for i in range(1, len(src) + 1)])
    for layout in (gqa(Pairing.HALVES, dtype), mla(Pairing.INTERLEAVED, dtype, rank=24, rope=8)):
        run(layout, torch.tensor(src), torch.tensor(dst), shifts, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_keep_their_own_frequencies(backend: str) -> None:
    specs = [spec_of(8, Pairing.HALVES, base) for base in (10000.0, 1e6, 500.0)]
    buffers = [filled((SLOTS, 1, 24), torch.float32, i) for i in range(3)]
    layout = KVLayout.mla(buffers, dict(enumerate(specs)), 8)
    run(layout, *apart(9), 321, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_of_different_shape(backend: str) -> None:
    """Bands of two shapes in one pool: more than one launch, same result."""
    k = [filled((SLOTS, 2, 16), torch.bfloat16, 0), filled((SLOTS, 1, 40), torch.bfloat16, 1)]
    v = [filled((SLOTS, 2, 16), torch.bfloat16, 2), filled((SLOTS, 1, 8), torch.bfloat16, 3)]
    specs = [spec_of(16, Pairing.HALVES), spec_of(20, Pairing.INTERLEAVED)]
    layout = KVLayout.mha(k, v, specs)
    run(layout, *apart(9), torch.arange(-4, 5), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("pairing", list(Pairing))
def test_fp8_saturates(dtype: torch.dtype, pairing: Pairing, backend: str) -> None:
    """The largest pair turned by 45 degrees no longer fits; it must not become NaN or infinity (R4)."""
    top = torch.finfo(dtype).max
    rows = torch.full((4, 1, 8), top).to(dtype).view(torch.uint8)
    spec = RopeSpec(8, pairing, (0.7853981633974483,) * 4)
    layout = KVLayout.mla([rows], spec, 8, logical_dtype=dtype)
    splice_rows(layout, torch.tensor([0, 1]), torch.tensor([0, 2]), 1, backend=backend)  # type: ignore[arg-type]
    got = rows.view(dtype).float()[[0, 2], 0]
    assert got.isfinite().all()
    assert got.abs().max() == top
    assert got.abs().min() < top * 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_every_value_is_coded_and_rounded_like_torch_does(dtype: torch.dtype, backend: str) -> None:
    """All finite values of the narrow types, turned so that many results lie halfway between two of them."""
    bits = torch.arange(256 if dtype in FP8 else 65536)
    stored = bits.to(torch.uint8) if dtype in FP8 else bits.to(torch.uint16)
    values = stored.view(dtype)
    values = values[values.float().isfinite()]
    values = values[: len(values) // 8 * 8].view(-1, 1, 8)
    rows = torch.cat((values, torch.zeros_like(values)), -1)
    rows = rows.view(torch.uint8) if dtype in FP8 else rows
    spec = RopeSpec(16, Pairing.HALVES, (math.acos(0.75),) * 8)
    cos, sin = (float(t[0]) for t in spec.cos_sin(1))
    assert cos == 0.75
    layout = KVLayout.mla([rows], spec, 16, logical_dtype=dtype)
    slots = torch.arange(len(rows))
    splice_rows(layout, slots, slots, 1, backend=backend)  # type: ignore[arg-type]
    got = rows.view(dtype).float()
    assert torch.equal(got[..., :8], (values.float() * cos).to(dtype).float())
    assert torch.equal(got[..., 8:], (values.float() * sin).to(dtype).float())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pairing", list(Pairing))
def test_norms_are_kept_and_the_amplitude_is_not_applied_again(pairing: Pairing, backend: str) -> None:
    """R3: whatever mscale is baked into the model's table, a rotation is pure."""
    buffers = [filled((SLOTS, 1, 96), torch.float32, i) for i in range(2)]
    layout = KVLayout.mla(buffers, spec_of(64, pairing, amplitude=1.37), 64)
    src, dst = apart(30)
    old = [b[src].double().norm(dim=-1) for b in buffers]
    splice_rows(layout, src, dst, -4097, backend=backend)  # type: ignore[arg-type]
    for before, buffer in zip(old, buffers, strict=True):
        assert torch.allclose(buffer[dst].double().norm(dim=-1), before, rtol=2**-22, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_fifty_edits_are_one_rotation_from_stored_kv(dtype: torch.dtype, backend: str) -> None:
    """R2: a view of fifty edits reloads with one rotation by the sum and is as exact as a single edit;
    a chain of fifty rotations in place is visibly worse in the narrow types."""
    generator = torch.Generator().manual_seed(5)
    steps = torch.randint(-700, 700, (50,), generator=generator).tolist()
    layout = mla(Pairing.INTERLEAVED, dtype, layers=1, rank=8, rope=64)
    stored, once, chained = torch.arange(8), torch.arange(8, 16), torch.arange(16, 24)
    run(layout, stored, once, sum(steps), backend)

    splice_rows(layout, stored, chained, steps[0], backend=backend)  # type: ignore[arg-type]
    for step in steps[1:]:
        splice_rows(layout, chained, chained, step, backend=backend)  # type: ignore[arg-type]
    (plane,) = layout.planes
    rows = plane.rows.view(dtype).double()
    drift = (rows[chained] - rows[once]).abs().max()
    assert drift < 2e-5 if dtype is torch.float32 else drift > torch.finfo(dtype).eps / 2


def test_pools_made_in_inference_mode() -> None:
    """An engine's pool may refuse writes outside inference mode."""
    with torch.inference_mode():
        layout = gqa(Pairing.HALVES, torch.float32)
    assert layout.planes[0].rows.is_inference()
    before = Snapshot.of(layout)
    src, dst = apart(9)
    splice_rows(layout, src, dst, 7)
    check(layout, before, src.tolist(), dst.tolist(), [7] * 9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_count_what_must_move(backend: str) -> None:
    layout = gqa(Pairing.HALVES, torch.bfloat16, rope=16)
    src = torch.tensor([1, 2, 3, 4, 5])
    dst = torch.tensor([1, 2, 13, 14, 15])
    stats = splice_rows(layout, src, dst, torch.tensor([0, 4, 4, 0, 4]), backend=backend)  # type: ignore[arg-type]
    assert layout.row_bytes == 2 * 2 * (2 * 32) * 2
    assert layout.band_bytes == 2 * 2 * 16 * 2
    assert (stats.rows, stats.bytes_moved) == (4, 2 * (3 * layout.row_bytes + layout.band_bytes))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_do(backend: str) -> None:
    layout = gqa(Pairing.HALVES, torch.bfloat16)
    before = Snapshot.of(layout)
    none = torch.empty(0, dtype=torch.int64)
    slots = torch.tensor([3, 4])
    assert splice_rows(layout, none, none, 3, backend=backend).rows == 0  # type: ignore[arg-type]
    assert splice_rows(layout, slots, slots, 0, backend=backend).bytes_moved == 0  # type: ignore[arg-type]
    check(layout, before, [], [], [])


def test_preparing_compiles_and_touches_nothing() -> None:
    layout = mla(Pairing.INTERLEAVED, torch.float32)
    before = Snapshot.of(layout)
    assert prepare(layout, backend="triton") == "triton"
    assert prepare(layout) == "torch"
    check(layout, before, [], [], [])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"src": torch.tensor([0, SLOTS])}, SlotRangeError, f"src holds slot {SLOTS}"),
        ({"dst": torch.tensor([-1, 3])}, SlotRangeError, "dst holds slot -1"),
        ({"src": torch.tensor([0, 1, 2])}, SpliceError, "src holds 3 slots but dst holds 2"),
        ({"dst": torch.tensor([7, 7])}, SpliceError, "dst holds slot 7 more than once"),
        ({"dst": torch.tensor([[5, 6]])}, SpliceError, "dst must be one-dimensional"),
        ({"src": torch.tensor([0.0, 1.0])}, SpliceError, "src must be int64 or int32"),
        ({"shift": torch.tensor([1.0, 2.0])}, SpliceError, "shift must be int64 or int32"),
        ({"shift": torch.tensor([1, 2, 3])}, SpliceError, "shift must have shape"),
        ({"shift": 2**31}, SpliceError, "shift must lie within"),
        ({"shift": torch.tensor([0, -(2**40)])}, SpliceError, "shift must lie within"),
        ({"backend": "cuda"}, SpliceError, "backend must be"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(
    change: Case, error: type[Exception], words: str
) -> None:
    layout = gqa(Pairing.HALVES, torch.float32)
    before = Snapshot.of(layout)
    good: Case = {"src": torch.tensor([0, 1]), "dst": torch.tensor([5, 6]), "shift": 3, "backend": "torch"}
    call = good | change
    with pytest.raises(error, match=words):
        splice_rows(layout, call["src"], call["dst"], call["shift"], backend=call["backend"])
    check(layout, before, [], [], [])


def test_slot_errors_are_index_errors() -> None:
    assert issubclass(SlotRangeError, IndexError)


@st.composite
def splices(draw: st.DrawFn) -> tuple[KVLayout, list[int], list[int], list[int]]:
    pairing = draw(st.sampled_from(list(Pairing)))
    dtype = draw(st.sampled_from(DTYPES))
    heads, half = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    slack = draw(st.integers(0, 9))
    if draw(st.booleans()):
        layout = mla(pairing, dtype, layers=draw(st.integers(1, 3)), rank=slack, rope=2 * half)
    else:
        layout = gqa(pairing, dtype, heads=heads, dim=2 * half + slack, rope=2 * half, v_dim=heads + slack)
    slots = st.integers(0, SLOTS - 1)
    dst = draw(st.lists(slots, min_size=1, max_size=40, unique=True))
    src = [draw(st.one_of(slots, st.just(d))) for d in dst]
    few = draw(st.lists(st.integers(-CONTEXT, CONTEXT), min_size=1, max_size=3))
    shifts = [draw(st.sampled_from([0, *few])) for _ in dst]
    return layout, src, dst, shifts


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(case=splices())
def test_any_splice_equals_the_oracle(
    backend: str, case: tuple[KVLayout, list[int], list[int], list[int]]
) -> None:
    layout, src, dst, shifts = case
    run(layout, torch.tensor(src), torch.tensor(dst), torch.tensor(shifts), backend)
