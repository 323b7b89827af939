"""Compile the step from an old view to a new one into a tier's block ops (DESIGN §4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from leyline_lmcache.ops import Copy, CopyRotate, Fill, Invalidate, Op, Plan, Rotate, Tier
from leyline_lmcache.ranges import Range, merge, subtract
from leyline_lmcache.view import BufferId, View


def compile_plan(old: View, new: View, block_size: int, tier: Tier, *, fuse: bool = True) -> Plan:
    """What a tier must do so that it holds `new` where it held `old`. O(pieces), whatever the length.

    * Holes of `new` are filled, widened to whole blocks (`View.aligned`); what they take from the pieces
      around them is computed again.
    * Blocks before the first change are shared and need no op.
    * Every other piece is copied from its buffer, and rotated by its whole shift: from the KV as first
      computed, however many edits lie between (I4). Without a shift it is not rotated.
    * Blocks that are no longer needed are invalidated. On the GPU the new view has blocks of its own, so
      these are the old view's blocks from the first change on. On CPU and Redis views only refer to buffers,
      so these are the buffers' blocks that `old` drew on and `new` does not.

    Order: a fill needs the KV of everything before it in the view, and everything after it in the view comes
        after it;
    a rotation follows the copy of its tokens; invalidation comes last, so that a plan that fails half-way has
    destroyed nothing (I3).

    Args:
        old: the view the tier holds now; empty for none.
        new: the wanted view.
        block_size: tokens in one of the tier's blocks, at least 1.
        tier: decides what is deferred and whose blocks are invalidated.
        fuse: False for executors that cannot copy and rotate in one pass; gives Copy followed by Rotate.

    Raises:
        ValueError: for a block size below 1.
    """
    target = new.aligned(block_size)
    shared = _shared_blocks(old, new, block_size)
    deferred = tier.deferred
    ops: list[Op] = []
    fills: list[Range] = []
    # `gate` is the last fill; `open_ops` are the ops since, which nothing depends on yet.
    gate: tuple[int, ...] = ()
    open_ops: list[int] = []
    shared_end = shared * block_size
    for start, piece in target.spans():
        if piece.buffer is None:
            fills.append((start, start + piece.length))
            ops.append(Fill(len(ops), tuple(open_ops) or gate, start, start + piece.length))
            gate = (len(ops) - 1,)
            open_ops.clear()
            continue
        skip = max(0, shared_end - start)
        length = piece.length - skip
        if length <= 0:
            continue
        src_block, src_offset = divmod(piece.src_start + skip, block_size)
        dst_block, dst_offset = divmod(start + skip, block_size)
        shift = start - piece.src_start
        i = len(ops)
        if shift and fuse:
            ops.append(
                CopyRotate(
                    i,
                    gate,
                    piece.buffer,
                    src_block,
                    src_offset,
                    dst_block,
                    dst_offset,
                    length,
                    shift,
                    deferred,
                )
            )
        else:
            ops.append(
                Copy(i, gate, piece.buffer, src_block, src_offset, dst_block, dst_offset, length, deferred)
            )
            if shift:
                ops.append(Rotate(i + 1, (i,), dst_block, dst_offset, length, shift, deferred))
        open_ops.append(len(ops) - 1)
    if deferred:
        gone = _unreferenced(old, target, block_size)
    else:
        gone = _superseded(old, shared, fills, block_size)
    last = tuple(open_ops) or gate
    for buffer, block, count in gone:
        i = len(ops)
        ops.append(Invalidate(i, last, buffer, block, count))
        # The others wait for the first one, so that the edges stay linear in the ops.
        if len(last) > 1:
            last = (i,)
    return Plan(tier, block_size, old.length, new.length, shared, tuple(ops))


def _shared_blocks(old: View, new: View, block_size: int) -> int:
    """Leading blocks of `new` that are in `old`; a cut last block counts, it is a part of the old one."""
    same = old.first_change(new)
    return -(-same // block_size) if same == new.length else same // block_size


def _superseded(
    old: View, shared: int, fills: Sequence[Range], block_size: int
) -> Iterable[tuple[BufferId | None, int, int]]:
    """Runs of the old view's own blocks, with any KV in them, that the new view does not share."""
    held = merge(
        _blocks_of(start, start + piece.length, block_size)
        for start, piece in old.spans()
        if piece.buffer is not None
    )
    kept = subtract([(0, shared)], [_blocks_of(start, end, block_size) for start, end in fills])
    for start, end in subtract(held, kept):
        yield None, start, end - start


def _unreferenced(old: View, target: View, block_size: int) -> Iterable[tuple[BufferId | None, int, int]]:
    """Runs of buffers' blocks that the old view drew on and the target does not."""
    before, after = _drawn_on(old, block_size), _drawn_on(target, block_size)
    for buffer, blocks in before.items():
        for start, end in subtract(merge(blocks), merge(after.get(buffer, ()))):
            yield buffer, start, end - start


def _drawn_on(view: View, block_size: int) -> dict[BufferId, list[Range]]:
    blocks: dict[BufferId, list[Range]] = {}
    for piece in view.pieces:
        if piece.buffer is not None:
            blocks.setdefault(piece.buffer, []).append(_blocks_of(piece.src_start, piece.src_end, block_size))
    return blocks


def _blocks_of(start: int, end: int, block_size: int) -> Range:
    return start // block_size, -(-end // block_size)
