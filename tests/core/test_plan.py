"""Plans: which ops, in which order; the sessions in test_edit_scripts check what they do."""

from __future__ import annotations

import random

import pytest

from leyline_lmcache.ops import (
    Copy,
    CopyRotate,
    Fill,
    Invalidate,
    Op,
    OpKind,
    Plan,
    Rotate,
    Tier,
    blocks_touched,
    expand,
    kind_of,
)
from leyline_lmcache.pieces import Edit, View
from leyline_lmcache.planner import compile_plan

from .oracle import Unsound, align_holes, check_plan, doc_of, execute

BASE = View.of_buffer("a", 2000)
EDITED = BASE.apply([Edit(300, 500, 5)]).extend(20)


def test_the_paper_example_on_the_gpu() -> None:
    assert compile_plan(BASE, EDITED, 16, Tier.GPU) == Plan(
        Tier.GPU,
        16,
        2000,
        1825,
        18,
        (
            Fill(0, (), 288, 320),
            CopyRotate(1, (0,), "a", 32, 3, 20, 0, 1472, -195, False),
            Fill(2, (1,), 1792, 1825),
            Invalidate(3, (2,), None, 18, 107),
        ),
    )


def test_the_paper_example_on_cpu_moves_nothing() -> None:
    plan = compile_plan(BASE, EDITED, 256, Tier.CPU)
    assert [kind_of(op) for op in plan.ops] == [
        OpKind.FILL,
        OpKind.COPY_ROTATE,
        OpKind.FILL,
        OpKind.INVALIDATE,
    ]
    assert all(op.deferred for op in plan.ops if isinstance(op, Copy | CopyRotate | Rotate))
    # The stored chunk inside the span, and with it the ones that only gave to what is filled now.
    assert plan.ops[-1] == Invalidate(3, (2,), "a", 1, 1)


def test_without_fusing_the_rotation_follows_its_copy() -> None:
    plan = compile_plan(BASE, EDITED, 16, Tier.GPU, fuse=False)
    copy, rotate = plan.ops[1:3]
    assert isinstance(copy, Copy)
    assert rotate == Rotate(2, (1,), 20, 0, 1472, -195, False)
    assert plan.ops[3].deps == (2,)
    assert plan.tokens_rotated == plan.tokens_copied == 1472


def test_an_extension_fills_from_the_last_full_block() -> None:
    plan = compile_plan(BASE.truncate(100), BASE.truncate(100).extend(30), 16, Tier.GPU)
    assert plan.fills == ((96, 130),)
    assert plan.shared_blocks == 6
    # The half-full block is made anew.
    assert plan.ops[-1] == Invalidate(1, (0,), None, 6, 1)


@pytest.mark.parametrize("tier", list(Tier))
def test_a_cut_needs_no_work_but_giving_up_blocks(tier: Tier) -> None:
    plan = compile_plan(BASE, BASE.truncate(90), 16, tier)
    assert plan.shared_blocks == 6
    assert plan.ops == (Invalidate(0, (), None if tier is Tier.GPU else "a", 6, 119),)
    assert compile_plan(BASE, BASE, 16, tier).ops == ()


def test_holes_that_share_a_block_are_filled_once() -> None:
    new = BASE.apply([Edit(100, 101, 1), Edit(105, 106, 1), Edit(112, 112, 2), Edit(640, 650, 3)])
    assert compile_plan(BASE, new, 16, Tier.GPU).fills == ((96, 128), (640, 656))


def test_several_invalidations_wait_for_the_whole_edit() -> None:
    new = BASE.apply([Edit(100, 200, 0), Edit(700, 900, 0), Edit(1500, 1600, 0)])
    plan = compile_plan(BASE, new, 16, Tier.REDIS)
    gone = [op for op in plan.ops if isinstance(op, Invalidate)]
    assert [(op.buffer, op.block, op.count) for op in gone] == [("a", 7, 5), ("a", 44, 12), ("a", 94, 6)]
    assert gone[0].deps == tuple(op.id for op in plan.ops if isinstance(op, Copy | CopyRotate))
    assert gone[1].deps == gone[2].deps == (gone[0].id,)


def test_undo_after_an_edit_copies_back_unrotated() -> None:
    plan = compile_plan(EDITED.filled("b"), BASE, 16, Tier.GPU)
    assert [kind_of(op) for op in plan.ops] == [OpKind.COPY, OpKind.INVALIDATE]
    assert plan.tokens_copied == 2000 - 288


def test_from_nothing() -> None:
    plan = compile_plan(View(), EDITED, 1, Tier.GPU)
    assert plan.shared_blocks == 0
    assert plan.tokens_copied == 1800
    assert plan.blocks_invalidated == 0


@pytest.mark.parametrize("size", [0, -1])
def test_a_block_size_below_one_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="block_size"):
        compile_plan(BASE, EDITED, size, Tier.GPU)


def test_blocks_touched_is_what_expand_gives() -> None:
    for size in (1, 7, 16, 64):
        for fuse in (True, False):
            plan = compile_plan(BASE, EDITED, size, Tier.GPU, fuse=fuse)
            for op in plan.ops:
                parts = list(expand(Plan(plan.tier, size, 2000, 1825, 0, (op,))))
                dst = {getattr(p, "dst_block", None) for p in parts}
                expected = len(dst) if hasattr(op, "dst_block") else len(parts)
                assert blocks_touched(op, size) == expected
                assert {p.id for p in parts} == {op.id}


def test_expansion_is_lazy() -> None:
    huge = View.of_buffer("a", 2**31 - 1)
    plan = compile_plan(huge, huge.apply([Edit(5, 6, 0)]), 1, Tier.GPU)
    first = next(iter(plan.blocks()))
    assert isinstance(first, CopyRotate)
    assert (first.src_block, first.dst_block, first.length) == (6, 5, 1)


def test_ops_and_deps_grow_with_edits_and_not_with_tokens() -> None:
    counts = []
    for tokens in (16 * 10**3, 16 * 10**6, 2**31 - 16):
        base = View.of_buffer("a", tokens)
        edits = [Edit(k * 300 + 50, k * 300 + 90, 11) for k in range(32)]
        for tier in Tier:
            plan = compile_plan(base, base.apply(edits).extend(9), 16, tier)
            counts.append((tier, len(plan.ops), sum(len(op.deps) for op in plan.ops)))
    assert set(counts[:3]) == set(counts[3:6]) == set(counts[6:])
    assert max(ops for _, ops, _ in counts) <= 32 * 4 + 2


def test_many_edits() -> None:
    base = View.of_buffer("a", 200_000)
    edits = [Edit(k * 20 + 3, k * 20 + 9, k % 3) for k in range(10_000)]
    new = base.apply(edits)
    assert len(new.pieces) <= 20_001
    plan = compile_plan(base, new, 4, Tier.GPU)
    assert len(plan.ops) <= 2 * len(new.pieces)
    assert sum(len(op.deps) for op in plan.ops) <= 3 * len(plan.ops)
    check_plan(base.truncate(2000), base.truncate(2000).apply(edits[:100]), 4, random.Random(0), (Tier.GPU,))


def broken(plan: Plan, index: int, op: Op | None) -> Plan:
    ops = list(plan.ops)
    if op is None:
        del ops[index]
    else:
        ops[index] = op
    return Plan(plan.tier, plan.block_size, plan.old_length, plan.new_length, plan.shared_blocks, tuple(ops))


@pytest.mark.parametrize(
    ("index", "op"),
    [
        (0, Fill(0, (), 288, 319)),
        (0, Fill(0, (), 304, 320)),
        (1, CopyRotate(1, (0,), "a", 32, 3, 20, 0, 1472, -194, False)),
        (1, CopyRotate(1, (0,), "a", 32, 2, 20, 0, 1472, -195, False)),
        (1, CopyRotate(1, (0,), "a", 32, 3, 20, 0, 1471, -195, False)),
        (1, CopyRotate(1, (0,), "b", 32, 3, 20, 0, 1472, -195, False)),
        (1, CopyRotate(1, (0,), "a", 32, 3, 20, 0, 1472, -195, True)),
        (1, CopyRotate(1, (), "a", 32, 3, 20, 0, 1472, -195, False)),
        (2, Fill(2, (0,), 1792, 1825)),
        (3, Invalidate(3, (), None, 18, 107)),
        (3, Invalidate(3, (2,), None, 17, 108)),
        (3, Invalidate(3, (2,), None, 18, 106)),
        (3, None),
    ],
)
def test_the_model_notices_a_wrong_plan(index: int, op: Op | None) -> None:
    """The checks of this suite can fail: each of these plans is wrong in one place."""
    plan = compile_plan(BASE, EDITED, 16, Tier.GPU)
    old, target = doc_of(BASE), align_holes(doc_of(EDITED), 16)
    execute(plan, old, target, random.Random(0))
    with pytest.raises((AssertionError, Unsound, KeyError)):
        for seed in range(30):
            execute(broken(plan, index, op), old, target, random.Random(seed))
