"""Views: what a session sees now, as pieces of immutable KV buffers.

The idea is a text editor's piece table (DESIGN §4): buffers hold KV as the engine computed it and never
change; a view is an ordered list of pieces of buffers, and an edit only builds a new list. Nothing here looks
at tokens, so every operation costs O(pieces + edits), whatever the length of the context.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from leyline_lmcache.ranges import Range, merge
from leyline_lmcache.reasons import Fallback, FallbackReason

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BufferId: TypeAlias = str
"""Content hash of a buffer; see `buffer_id`."""

_DIGEST_BYTES = 16


def buffer_id(model: str, salt: str, lineage: str | bytes, tokens: ReadableBuffer) -> BufferId:
    """Name KV by everything it was computed from.

    Args:
        model: identity of the model and of the way it is run (weights, dtype, parallelism) that KV depends
            on.
        salt: the tenant's cache salt; "" for none. Different salts never share a buffer (I7).
        lineage: the edit lineage the tokens were computed under; empty for exact KV.
        tokens: token ids from position 0, as bytes-like memory of one fixed layout (for example a
            little-endian int64 array). The caller keeps the layout the same everywhere; it is part of the
            content.

    Returns:
        32 hexadecimal digits, the same in every process and on every node.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"leyline.buffer")
    for part in (model.encode("utf-8", "surrogatepass"), salt.encode("utf-8", "surrogatepass")):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    tag = lineage.encode("utf-8", "surrogatepass") if isinstance(lineage, str) else lineage
    digest.update(len(tag).to_bytes(8, "little"))
    digest.update(tag)
    digest.update(memoryview(tokens).cast("B"))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of tokens whose KV is in one buffer, or a hole when `buffer` is None.

    Attributes:
        buffer: which buffer; None where no KV exists yet.
        src_start: position, in the buffer, of the first token: the position its key was rotated for when it
            was computed. 0 for a hole.
        length: number of tokens, at least 1.
    """

    buffer: BufferId | None
    src_start: int
    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length: expected at least 1 token, got {self.length}")
        if self.src_start < 0:
            raise ValueError(f"src_start: expected a non-negative position, got {self.src_start}")
        if self.buffer is None and self.src_start:
            raise ValueError(f"src_start: a hole has no source, expected 0, got {self.src_start}")

    @property
    def src_end(self) -> int:
        """Position just past the last token, in the buffer."""
        return self.src_start + self.length


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace `[start, end)` of a view by `length` tokens that have no KV yet.

    Positions are those of the view the edit is applied to. `start == end` inserts; with `length == 0` as well
    it edits nothing.
    """

    start: int
    end: int
    length: int

    @property
    def is_identity(self) -> bool:
        """True when applying this changes nothing."""
        return self.start == self.end and self.length == 0

    @property
    def shift(self) -> int:
        """How far the tokens after the edit move."""
        return self.length - (self.end - self.start)


def order_edits(edits: Iterable[Edit], length: int) -> list[Edit]:
    """Sort the edits of one turn and check that together they mean one thing.

    Two edits overlap when they share a token, when an insertion lies strictly inside a replaced span, or when
    both insert at the same point (their order would be a guess). An insertion may touch a span's edge: before
    the span's first token it comes before the replacement, after its last token it comes after it. Identity
    edits overlap nothing and are left out of the result.

    Raises:
        Fallback: `invalid_directive` for bounds outside `[0, length]`, `overlapping_edits` for overlaps.
    """
    ordered: list[Edit] = []
    for edit in edits:
        if not 0 <= edit.start <= edit.end:
            raise Fallback(
                FallbackReason.INVALID_DIRECTIVE,
                f"start, end: expected 0 <= start <= end, got [{edit.start}, {edit.end})",
            )
        if edit.end > length:
            raise Fallback(
                FallbackReason.INVALID_DIRECTIVE,
                f"end: {edit.end} is past the end of the base, which has {length} tokens",
            )
        if edit.length < 0:
            raise Fallback(
                FallbackReason.INVALID_DIRECTIVE, f"length: expected at least 0, got {edit.length}"
            )
        if not edit.is_identity:
            ordered.append(edit)
    ordered.sort(key=_edit_order)
    for before, after in pairwise(ordered):
        same_point = before.start == before.end == after.start == after.end
        if after.start < before.end or same_point:
            raise Fallback(
                FallbackReason.OVERLAPPING_EDITS,
                f"[{before.start}, {before.end}) and [{after.start}, {after.end}) overlap; "
                "join them into one directive",
            )
    return ordered


def _edit_order(edit: Edit) -> tuple[int, int]:
    return edit.start, edit.end


@dataclass(frozen=True, slots=True)
class View:
    """An immutable sequence of pieces, always in canonical form.

    Canonical: neighbours that continue each other (same buffer, contiguous source; or two holes) are one
        piece, so
    equal content means equal pieces, equal fingerprints and `==`.

    Attributes:
        pieces: the pieces in order.
        starts: view position of each piece.
        length: number of tokens.
    """

    pieces: tuple[Piece, ...] = ()
    starts: tuple[int, ...] = field(init=False, compare=False, repr=False)
    length: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        merged: list[Piece] = []
        last: Piece | None = None
        for piece in self.pieces:
            if last is not None and last.buffer == piece.buffer:
                if piece.buffer is None:
                    last = merged[-1] = Piece(None, 0, last.length + piece.length)
                    continue
                if last.src_start + last.length == piece.src_start:
                    last = merged[-1] = Piece(piece.buffer, last.src_start, last.length + piece.length)
                    continue
            merged.append(piece)
            last = piece
        starts: list[int] = []
        position = 0
        for piece in merged:
            starts.append(position)
            position += piece.length
        object.__setattr__(self, "pieces", tuple(merged))
        object.__setattr__(self, "starts", tuple(starts))
        object.__setattr__(self, "length", position)

    @classmethod
    def of_buffer(cls, buffer: BufferId, length: int) -> View:
        """The view of a buffer's first `length` tokens at their own positions."""
        _check_count("length", length)
        return cls((Piece(buffer, 0, length),) if length else ())

    @classmethod
    def hole(cls, length: int) -> View:
        """A view of `length` tokens that has no KV at all."""
        return cls().extend(length)

    # ------------------------------------------------------------------ making new views

    def apply(self, edits: Sequence[Edit]) -> View:
        """The view after one turn's edits, which use this view's positions; replacements become holes.

        Raises:
            Fallback: see `order_edits`.
        """
        ordered = order_edits(edits, self.length)
        if not ordered:
            return self
        out: list[Piece] = []
        index = position = 0
        for edit in ordered:
            index = self._take(out, index, position, edit.start)
            if edit.length:
                out.append(Piece(None, 0, edit.length))
            position = edit.end
        self._take(out, index, position, self.length)
        return View(tuple(out))

    def truncate(self, length: int) -> View:
        """The first `length` tokens. Raises ValueError when the view has fewer."""
        self._check_span(0, length)
        out: list[Piece] = []
        self._take(out, 0, 0, length)
        return View(tuple(out))

    def extend(self, length: int) -> View:
        """This view and a hole of `length` tokens after it: the new turn."""
        _check_count("length", length)
        return View((*self.pieces, Piece(None, 0, length))) if length else self

    def punch(self, start: int, end: int) -> View:
        """The same tokens, with the KV of `[start, end)` given up: a hole of the same length."""
        self._check_span(start, end)
        return self.apply((Edit(start, end, end - start),))

    def aligned(self, block_size: int) -> View:
        """Holes widened to whole blocks, as the engine prefills them.

        A hole `[a, b)` becomes `[floor(a), ceil(b))` in steps of `block_size`, at most to the end of the
        view. Holes that then touch or overlap are one. The KV given up is the alignment slack.
        """
        _check_count("block_size", block_size, least=1)
        wide = merge(
            (a // block_size * block_size, min(-(-b // block_size) * block_size, self.length))
            for a, b in self.holes()
        )
        return self.apply([Edit(a, b, b - a) for a, b in wide])

    def filled(self, buffer: BufferId) -> View:
        """The view once the engine has computed every hole in place, into `buffer`.

        The engine computed them at their positions in this view, so their shift is 0.
        """
        return View(
            tuple(
                Piece(buffer, start, piece.length) if piece.buffer is None else piece
                for start, piece in zip(self.starts, self.pieces, strict=True)
            )
        )

    # ------------------------------------------------------------------ reading

    def __len__(self) -> int:
        return self.length

    def spans(self) -> Iterator[tuple[int, Piece]]:
        """Each piece with its view position, in order."""
        return zip(self.starts, self.pieces, strict=True)

    def between(self, start: int, end: int) -> Iterator[tuple[int, Piece]]:
        """The parts of pieces inside `[start, end)`, each with its view position, in order."""
        self._check_span(start, end)
        out: list[Piece] = []
        if start < end:
            self._take(out, bisect_right(self.starts, start) - 1, start, end)
        position = start
        for piece in out:
            yield position, piece
            position += piece.length

    def holes(self) -> tuple[Range, ...]:
        """The ranges that have no KV yet, in order and apart."""
        return tuple(
            (start, start + piece.length)
            for start, piece in zip(self.starts, self.pieces, strict=True)
            if piece.buffer is None
        )

    def locate(self, position: int) -> tuple[int, Piece]:
        """The piece that holds a position, and where it starts. Raises IndexError outside the view."""
        if not 0 <= position < self.length:
            raise IndexError(f"position: {position} is outside the view, which has {self.length} tokens")
        index = bisect_right(self.starts, position) - 1
        return self.starts[index], self.pieces[index]

    def shift_at(self, position: int) -> int | None:
        """How far the key at `position` is from where it was computed (view minus source); None in a hole."""
        start, piece = self.locate(position)
        return None if piece.buffer is None else start - piece.src_start

    def first_change(self, other: View) -> int:
        """The first position at which the two views differ.

        When one is a prefix of the other this is the shorter one's length, so equal views give their length.
        """
        position = 0
        for mine, theirs in zip(self.pieces, other.pieces, strict=False):
            if mine.buffer != theirs.buffer or mine.src_start != theirs.src_start:
                break
            position += min(mine.length, theirs.length)
            # In canonical form nothing that follows the shorter piece can continue it.
            if mine.length != theirs.length:
                break
        return position

    def buffers(self) -> frozenset[BufferId]:
        """The buffers this view draws on."""
        return frozenset(piece.buffer for piece in self.pieces if piece.buffer is not None)

    def fingerprint(self) -> bytes:
        """16 bytes that name this view's pieces, the same in every process and on every node."""
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"leyline.view")
        for piece in self.pieces:
            if piece.buffer is None:
                digest.update(b"h%d;" % piece.length)
            else:
                name = piece.buffer.encode("utf-8", "surrogatepass")
                digest.update(b"p%d:%s,%d,%d;" % (len(name), name, piece.src_start, piece.length))
        return digest.digest()

    # ------------------------------------------------------------------ internals

    def _take(self, out: list[Piece], index: int, start: int, end: int) -> int:
        """Append the pieces of `[start, end)`; `index` is a piece at or before `start`.

        Returns the index of the piece to go on from, so that a walk over all edits is one pass over the
        pieces.
        """
        pieces, starts = self.pieces, self.starts
        while start < end:
            piece = pieces[index]
            offset = start - starts[index]
            if offset >= piece.length:
                index += 1
                continue
            length = min(piece.length - offset, end - start)
            if length == piece.length:
                out.append(piece)
            else:
                out.append(
                    Piece(piece.buffer, piece.src_start + offset if piece.buffer is not None else 0, length)
                )
            start += length
        return index

    def _check_span(self, start: int, end: int) -> None:
        if not 0 <= start <= end <= self.length:
            raise ValueError(
                f"start, end: expected 0 <= start <= end <= {self.length} (the view's length), "
                f"got [{start}, {end})"
            )


def _check_count(name: str, value: int, least: int = 0) -> None:
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
