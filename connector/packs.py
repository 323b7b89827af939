"""Where the KV of a buffer lies in LMCache: in the chunks of its prefix, or in packs.

LMCache keeps whole chunks, each named by all tokens up to its end. That fits KV of a sequence that was never
edited, and shares it with every other request. What an edited view computes are a few short runs, a
replacement here and a turn there, that would hardly ever fill a chunk; and of a sequence, what lies behind
its last whole chunk is not stored at all. Such runs are laid one after another into as few chunks as hold
them: a pack, named by the buffer and the runs. Nothing is stored twice (I5), and all of a view can be loaded
again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from leyline_lmcache.ranges import Range, intersect, merge, subtract
from leyline_lmcache.view import BufferId, View

from .lineage import Tokens

Pack = tuple[Range, ...]
"""Runs of buffer positions that are stored one after another, in order and in whole pages."""

_NAME_WORDS = 8


@dataclass(frozen=True, slots=True)
class BufferInfo:
    """What a buffer's KV was computed from, and where it lies in LMCache: enough to name its chunks.

    Attributes:
        tokens: plain ids from position 0, int64 ``[n]``.
        lineage: fingerprint of the view it was computed in; empty for exact KV, which LMCache stores from
            position 0 on.
        packs: what is stored of it besides.
    """

    id: BufferId
    tokens: Tokens
    lineage: bytes
    packs: tuple[Pack, ...] = ()

    def stored(self, chunk_size: int) -> list[Range]:
        """Positions that LMCache was given."""
        prefix = 0 if self.lineage else len(self.tokens) // chunk_size * chunk_size
        return merge([(0, prefix), *(run for pack in self.packs for run in pack)])

    def shelves(self) -> list[Shelf]:
        """Everything LMCache may have of it."""
        packs = [Shelf(self, pack) for pack in self.packs]
        return packs if self.lineage else [Shelf(self, None), *packs]


@dataclass(frozen=True, slots=True)
class Place:
    """``length`` tokens on a shelf: ``offset`` there, computed at buffer position ``origin``."""

    offset: int
    origin: int
    length: int


@dataclass(frozen=True, slots=True)
class Shelf:
    """Chunks that follow one another in LMCache: a buffer's prefix (``pack`` is None), or one pack."""

    info: BufferInfo
    pack: Pack | None

    def size(self, chunk_size: int) -> int:
        """Tokens on it, in whole chunks. A pack's last chunk is padded, a prefix' is not stored."""
        if self.pack is None:
            return len(self.info.tokens) // chunk_size * chunk_size
        return -(-sum(end - start for start, end in self.pack) // chunk_size) * chunk_size

    def names(self, chunk_size: int) -> Tokens:
        """The ids that name its chunks in LMCache, int64 ``[size]``: the tokens, or a pack's digest."""
        if self.pack is None:
            return self.info.tokens[: self.size(chunk_size)]
        digest = hashlib.blake2b(digest_size=4 * _NAME_WORDS, person=b"leyline.pack")
        digest.update(f"{self.info.id}:{self.pack}".encode())
        out = np.zeros(self.size(chunk_size), dtype=np.int64)
        words = np.frombuffer(digest.digest(), dtype="<u4") & 0x7FFFFFFF
        out[:_NAME_WORDS] = words[: len(out)]
        return out

    def places(self, start: int, end: int) -> Iterator[Place]:
        """Where buffer positions ``[start, end)`` are, as far as they are here."""
        offset = 0
        for first, last in self.pack if self.pack is not None else ((0, len(self.info.tokens)),):
            low, high = max(first, start), min(last, end)
            if low < high:
                yield Place(offset + low - first, low, high - low)
            offset += last - first

    def chunks(self, start: int, end: int, chunk_size: int) -> list[Range]:
        """Index ranges of the chunks that hold buffer positions ``[start, end)``."""
        whole = self.size(chunk_size) // chunk_size
        spans = (
            (place.offset // chunk_size, min(-(-(place.offset + place.length) // chunk_size), whole))
            for place in self.places(start, end)
        )
        return merge(spans)

    def wholly_in(self, ranges: Sequence[Range], chunk_size: int) -> list[Range]:
        """Index ranges of the chunks that hold nothing outside of some buffer positions (merged)."""
        size = self.size(chunk_size)
        others = subtract([(0, len(self.info.tokens))], ranges)
        needed = merge(chunk for start, end in others for chunk in self.chunks(start, end, chunk_size))
        return subtract(merge([(0, size // chunk_size)]), needed)


def chunks_of(
    view: View, ranges: Iterable[Range], infos: Callable[[BufferId], BufferInfo | None], chunk_size: int
) -> list[tuple[Shelf, list[Range]]]:
    """Chunks that may hold view ranges, by shelf, as index ranges; of unknown buffers, none."""
    wanted: dict[tuple[BufferId, Pack | None], tuple[Shelf, list[Range]]] = {}
    for start, end in ranges:
        for _, piece in view.between(start, end):
            info = infos(piece.buffer) if piece.buffer is not None else None
            for shelf in info.shelves() if info is not None else ():
                chunks = shelf.chunks(piece.src_start, piece.src_end, chunk_size)
                if chunks:
                    wanted.setdefault((shelf.info.id, shelf.pack), (shelf, []))[1].extend(chunks)
    return [(shelf, merge(chunks)) for shelf, chunks in wanted.values()]


def dead_chunks(
    info: BufferInfo, dead: Sequence[Range], fresh: Sequence[Range], chunk_size: int
) -> list[tuple[Shelf, list[Range]]]:
    """Chunks all of whose tokens are ``dead``, some of them ``fresh``: not known to be dead before.

    Both are merged ranges of buffer positions; the outcome is by shelf, as index ranges.
    """
    out = []
    for shelf in info.shelves():
        touched = merge(chunk for start, end in fresh for chunk in shelf.chunks(start, end, chunk_size))
        chunks = intersect(touched, shelf.wholly_in(dead, chunk_size))
        if chunks:
            out.append((shelf, chunks))
    return out
