"""Block operations, and plans made of them (DESIGN §4).

An op here is an *extent*: a run of tokens that starts at an offset in one block and goes on through the
blocks after it. That keeps planning O(pieces + edits). `Plan.blocks()` cuts extents into ops on single
blocks, for executors that work block by block.

Source blocks are blocks of a buffer (block `i` of a buffer holds its positions `[i * block_size, (i + 1) *
block_size)`); destination blocks are blocks of the new view, counted the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from leyline_lmcache.ranges import Range
from leyline_lmcache.view import BufferId


class Tier(StrEnum):
    """Where KV lives."""

    GPU = "gpu"
    """SGLang's KV pool; a block is a page."""
    CPU = "cpu"
    """LMCache L1; a block is a chunk."""
    REDIS = "redis"
    """LMCache L2; a block is a chunk."""

    @property
    def deferred(self) -> bool:
        """True where copying and rotating wait for the load to the GPU: the tier itself moves no KV (I5)."""
        return self is not Tier.GPU


class OpKind(StrEnum):
    """Names of the ops, on the wire and in the journal."""

    INVALIDATE = "invalidate"
    COPY = "copy"
    ROTATE = "rotate"
    COPY_ROTATE = "copy_rotate"
    FILL = "fill"


@dataclass(frozen=True, slots=True)
class Copy:
    """Tokens move, unchanged.

    Attributes:
        id: number of the op in its plan.
        deps: ids of the ops that must be done before.
        buffer: the source.
        src_block, src_offset: where the source run starts.
        dst_block, dst_offset: where the destination run starts.
        length: tokens.
        deferred: recorded now, executed by the load to the GPU.
    """

    id: int
    deps: tuple[int, ...]
    buffer: BufferId
    src_block: int
    src_offset: int
    dst_block: int
    dst_offset: int
    length: int
    deferred: bool


@dataclass(frozen=True, slots=True)
class CopyRotate:
    """A copy and the rotation of what it copied, in one pass. Attributes as `Copy`; `shift` as `Rotate`."""

    id: int
    deps: tuple[int, ...]
    buffer: BufferId
    src_block: int
    src_offset: int
    dst_block: int
    dst_offset: int
    length: int
    shift: int
    deferred: bool


@dataclass(frozen=True, slots=True)
class Rotate:
    """Turn the rotary band of tokens where they lie, by `shift` positions (either sign, never 0)."""

    id: int
    deps: tuple[int, ...]
    dst_block: int
    dst_offset: int
    length: int
    shift: int
    deferred: bool


@dataclass(frozen=True, slots=True)
class Fill:
    """The engine must prefill the view's tokens `[start, end)`.

    `start` is on a block boundary; `end` too, unless the view ends there.
    """

    id: int
    deps: tuple[int, ...]
    start: int
    end: int

    @property
    def length(self) -> int:
        """Tokens to prefill."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Invalidate:
    """The view no longer needs blocks `[block, block + count)`; free what nothing else needs.

    Attributes:
        buffer: whose blocks: of this buffer, as stored (CPU, Redis); None for the old view's own blocks
            (GPU).
    """

    id: int
    deps: tuple[int, ...]
    buffer: BufferId | None
    block: int
    count: int


Op: TypeAlias = Copy | CopyRotate | Rotate | Fill | Invalidate

KINDS: dict[type[Op], OpKind] = {
    Copy: OpKind.COPY,
    CopyRotate: OpKind.COPY_ROTATE,
    Rotate: OpKind.ROTATE,
    Fill: OpKind.FILL,
    Invalidate: OpKind.INVALIDATE,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything one tier must do to go from an old view to a new one.

    Attributes:
        tier: the tier.
        block_size: tokens in one of its blocks.
        old_length, new_length: tokens of the two views.
        shared_blocks: leading blocks of the new view that are the old view's own, untouched (I2).
        ops: in an order in which they may be executed; each op's `deps` name earlier ones.
    """

    tier: Tier
    block_size: int
    old_length: int
    new_length: int
    shared_blocks: int
    ops: tuple[Op, ...]

    @property
    def fills(self) -> tuple[Range, ...]:
        """What the engine prefills, in order and apart."""
        return tuple((op.start, op.end) for op in self.ops if isinstance(op, Fill))

    @property
    def tokens_filled(self) -> int:
        """Tokens the engine prefills."""
        return sum(op.length for op in self.ops if isinstance(op, Fill))

    @property
    def tokens_copied(self) -> int:
        """Tokens whose KV is reused at another place, rotated or not."""
        return sum(op.length for op in self.ops if isinstance(op, Copy | CopyRotate))

    @property
    def tokens_rotated(self) -> int:
        """Tokens whose key turns."""
        return sum(op.length for op in self.ops if isinstance(op, Rotate | CopyRotate))

    @property
    def blocks_invalidated(self) -> int:
        """Blocks the view no longer needs."""
        return sum(op.count for op in self.ops if isinstance(op, Invalidate))

    def blocks(self) -> Iterator[Op]:
        """`expand(self)`."""
        return expand(self)


def kind_of(op: Op) -> OpKind:
    """The op's name."""
    return KINDS[type(op)]


def blocks_touched(op: Op, block_size: int) -> int:
    """How many blocks the op writes (or gives up)."""
    if isinstance(op, Invalidate):
        return op.count
    start = op.start if isinstance(op, Fill) else op.dst_block * block_size + op.dst_offset
    return -(-(start + op.length) // block_size) - start // block_size


def expand(plan: Plan) -> Iterator[Op]:
    """Cut a plan's extents into ops on one destination block, and one source block, each; lazily.

    A piece gives at most two such copies in any destination block, since a run no longer than a block touches
    at most two source blocks. Cut ops keep the id and deps of their extent: the ops of one extent are free
    among themselves, and a dep is met when all ops of that id are done.
    """
    size = plan.block_size
    for op in plan.ops:
        match op:
            case Copy(id, deps, buffer, deferred=deferred):
                for src, dst, n in _cut_copy(op, size):
                    yield Copy(
                        id, deps, buffer, src // size, src % size, dst // size, dst % size, n, deferred
                    )
            case CopyRotate(id, deps, buffer, shift=shift, deferred=deferred):
                for src, dst, n in _cut_copy(op, size):
                    yield CopyRotate(
                        id, deps, buffer, src // size, src % size, dst // size, dst % size, n, shift, deferred
                    )
            case Rotate(id, deps, shift=shift, deferred=deferred):
                start = op.dst_block * size + op.dst_offset
                for a, b in _cut(start, start + op.length, size):
                    yield Rotate(id, deps, a // size, a % size, b - a, shift, deferred)
            case Fill(id, deps):
                for a, b in _cut(op.start, op.end, size):
                    yield Fill(id, deps, a, b)
            case Invalidate(id, deps, buffer):
                for block in range(op.block, op.block + op.count):
                    yield Invalidate(id, deps, buffer, block, 1)


def _cut(start: int, end: int, size: int) -> Iterator[Range]:
    """Cut `[start, end)` at block boundaries."""
    while start < end:
        stop = min(end, (start // size + 1) * size)
        yield start, stop
        start = stop


def _cut_copy(op: Copy | CopyRotate, size: int) -> Iterator[tuple[int, int, int]]:
    """Cut a copy at the block boundaries of both sides: source position, destination position, tokens."""
    src = op.src_block * size + op.src_offset
    dst = op.dst_block * size + op.dst_offset
    end = dst + op.length
    while dst < end:
        n = min(end - dst, size - src % size, size - dst % size)
        yield src, dst, n
        src, dst = src + n, dst + n
