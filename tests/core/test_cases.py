"""Situations users of neighbouring systems reported, at the level of views and plans.

The ids name the situation: E1 middle dropped, E3 one more stub each turn, E5 one token flips, E8 edits on
edits, E9 edits at the edges, R8 shifts around the block size.
"""

from __future__ import annotations

import random

import pytest

from leyline_lmcache.directive import Directive, apply_directives
from leyline_lmcache.ops import Copy, CopyRotate, Fill, Rotate, Tier
from leyline_lmcache.pieces import Edit, View
from leyline_lmcache.planner import compile_plan
from leyline_lmcache.reasons import Fallback, FallbackReason

from .oracle import check_plan

TIERS = tuple(Tier)
SIZES = (1, 16, 64, 256)


@pytest.mark.parametrize("size", SIZES)
def test_e1_middle_dropped_reuses_prefix_and_tail(size: int) -> None:
    base = View.of_buffer("a", 2000)
    new = base.apply([Edit(300, 500, 0)])
    plan = compile_plan(base, new, size, Tier.GPU)
    check_plan(base, new, size, random.Random(7), TIERS)
    assert plan.fills == ()
    assert plan.shared_blocks == 300 // size
    # Everything after the first changed block is there without prefilling a token.
    assert plan.tokens_copied == 1800 - plan.shared_blocks * size
    assert new.shift_at(299) == 0
    assert new.shift_at(300) == -200
    # Off a block boundary one block draws on both sides of the cut, at two shifts.
    mixed = [op for op in plan.blocks() if isinstance(op, Copy | CopyRotate) and op.dst_block == 300 // size]
    assert {type(op) for op in mixed} == ({CopyRotate} if 300 % size == 0 else {Copy, CopyRotate})


@pytest.mark.parametrize("size", SIZES)
def test_e3_one_more_stub_each_turn_misses_only_stub_and_new_turn(size: int) -> None:
    result, stub, say, turns = 700, 9, 60, 12
    view = View.of_buffer("t0", 500)
    ends: list[int] = []
    for turn in range(1, turns):
        old = view
        edits = []
        if len(ends) >= 3:
            start = ends[-3] - result
            edits = [Edit(start, start + result, stub)]
            ends = [*ends[:-3], start + stub, *(e + stub - result for e in ends[-2:])]
        view = view.apply(edits).extend(say + result)
        ends.append(view.length)
        plan = compile_plan(old, view, size, Tier.GPU)
        check_plan(old, view, size, random.Random(7), TIERS)
        exact = say + result + (stub if edits else 0)
        # Each hole costs at most one block's slack at either end.
        assert exact <= plan.tokens_filled <= exact + 2 * (len(edits) + 1) * (size - 1)
        if size == 1:
            assert view.length - plan.tokens_filled == plan.shared_blocks + plan.tokens_copied
        view = view.aligned(size).filled(f"t{turn}")
    # Shifts add up over the turns: the last result lies as computed, the one before moved once, and so on.
    if size == 1:
        assert [view.shift_at(e - 1) for e in ends[-3:]] == [2 * (stub - result), stub - result, 0]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("size", SIZES)
def test_e5_one_token_flips_nothing_after_it_is_rotated(size: int, tier: Tier) -> None:
    base = View.of_buffer("a", 67_100)
    new = base.apply([Edit(100, 101, 1)])
    plan = compile_plan(base, new, size, tier)
    assert plan.tokens_rotated == 0
    assert plan.tokens_filled == size
    start, end = plan.fills[0]
    assert start <= 100 < end
    assert plan.shared_blocks * size + plan.tokens_filled + plan.tokens_copied == 67_100
    if tier.deferred:
        # The reused blocks are the stored ones: only the one that was filled is given up.
        assert plan.blocks_invalidated == 1
        assert all(op.deferred for op in plan.ops if isinstance(op, Copy | Rotate | CopyRotate))
    small = View.of_buffer("a", 700)
    check_plan(small, small.apply([Edit(100, 101, 1)]), size, random.Random(1), TIERS)


def test_e8_same_span_again_next_turn() -> None:
    base = View.of_buffer("a", 1000)
    once = base.apply([Edit(100, 200, 10)]).filled("b")
    twice = once.apply([Edit(100, 110, 30)]).filled("c")
    assert [(p.buffer, p.src_start, p.length) for p in twice.pieces] == [
        ("a", 0, 100),
        ("c", 100, 30),
        ("a", 200, 800),
    ]
    # From the original position, not from the last one.
    assert twice.shift_at(130) == -70


def test_e8_edit_inside_an_earlier_replacement() -> None:
    base = View.of_buffer("a", 1000)
    once = base.apply([Edit(100, 200, 50)]).filled("b")
    twice = once.apply([Edit(110, 120, 3)])
    assert [(p.buffer, p.src_start, p.length) for p in twice.pieces] == [
        ("a", 0, 100),
        ("b", 100, 10),
        (None, 0, 3),
        ("b", 120, 30),
        ("a", 200, 800),
    ]
    assert twice.shift_at(113) == -7
    assert twice.shift_at(143) == -57
    check_plan(once, twice, 16, random.Random(2), TIERS)


def test_e8_edit_before_an_earlier_edit() -> None:
    base = View.of_buffer("a", 1000)
    once = base.apply([Edit(500, 600, 7)]).filled("b")
    twice = once.apply([Edit(100, 120, 0)])
    assert [twice.shift_at(i) for i in (99, 100, 479, 480, 487)] == [0, -20, -20, -20, -113]
    rotations = [op for op in compile_plan(once, twice, 1, Tier.GPU).ops if isinstance(op, CopyRotate)]
    assert [(op.buffer, op.shift) for op in rotations] == [("a", -20), ("b", -20), ("a", -113)]
    check_plan(once, twice, 16, random.Random(3), TIERS)


def test_e8_edits_that_cancel_out_need_no_rotation() -> None:
    base = View.of_buffer("a", 1000)
    there = base.apply([Edit(100, 100, 40)]).filled("b")
    back = there.apply([Edit(100, 140, 0)])
    assert back == base
    assert back.fingerprint() == base.fingerprint()
    assert compile_plan(there, back, 16, Tier.GPU).tokens_rotated == 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("start", "end", "length"),
    [
        (0, 10, 0),
        (0, 10, 4),
        (0, 0, 4),
        (0, 1, 1),
        (599, 600, 0),
        (599, 600, 5),
        (600, 600, 5),
        (0, 600, 0),
        (0, 600, 7),
        (300, 300, 0),
        (300, 301, 0),
        (300, 301, 1),
    ],
)
def test_e9_edits_at_the_edges_are_applied(start: int, end: int, length: int, size: int) -> None:
    base = View.of_buffer("a", 600)
    directive = Directive("r", start, end, tuple(range(length)))
    new = apply_directives(base, [directive])
    assert new.length == 600 + directive.shift
    assert new.holes() == (((start, start + length),) if length else ())
    check_plan(base, new, size, random.Random(4), TIERS)
    if directive.is_identity:
        assert new is base
        assert compile_plan(base, new, size, Tier.GPU).ops == ()


@pytest.mark.parametrize(("start", "end"), [(600, 601), (601, 601), (0, 601), (2**31 - 1, 2**31 - 1)])
def test_e9_edits_past_the_end_are_refused_by_name(start: int, end: int) -> None:
    with pytest.raises(Fallback) as refused:
        apply_directives(View.of_buffer("a", 600), [Directive("r", start, end)])
    assert refused.value.reason is FallbackReason.INVALID_DIRECTIVE
    assert "end" in refused.value.detail
    assert "600" in refused.value.detail


def test_e9_an_empty_base() -> None:
    empty = View.of_buffer("a", 0)
    assert empty == View()
    new = apply_directives(empty, [Directive("r", 0, 0, (1, 2, 3))])
    assert new == View.hole(3)
    for size in SIZES:
        assert [type(op) for op in compile_plan(empty, new, size, Tier.GPU).ops] == [Fill]
        assert compile_plan(empty, empty, size, Tier.CPU).ops == ()


CONTEXT = 4096


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shift", [0, *(s * n for n in (1, 127, 128, 129, 1024, CONTEXT) for s in (1, -1))])
def test_r8_shifts_are_exact(shift: int, size: int, fuse: bool) -> None:
    span = max(3, 3 - shift)
    # A context's worth of tokens before the tail, so that it can move by as much either way.
    base = View.of_buffer("a", CONTEXT + span + 300)
    start = CONTEXT
    new = base.apply([Edit(start, start + span, span + shift)])
    assert new.shift_at(new.length - 1) == shift
    plan = compile_plan(base, new, size, Tier.GPU, fuse=fuse)
    turned = [op for op in plan.blocks() if isinstance(op, Rotate | CopyRotate)]
    assert {op.shift for op in turned} == ({shift} if shift and new.length > plan.fills[-1][1] else set())
    assert all(isinstance(op, CopyRotate) is fuse for op in turned)
    check_plan(base, new, size, random.Random(5), (Tier.GPU, Tier.REDIS))
