"""Which KV was computed while which tokens were in context.

AMORTIZE removes tokens from the text and leaves their influence in the KV that attended to them. FORGET must
find that influence wherever it went: through every buffer that was computed in a view with a tainted token in
it, and through the buffers computed on top of those (DESIGN §9).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from leyline_lmcache.ranges import Range, merge
from leyline_lmcache.view import BufferId, View


@dataclass(frozen=True, slots=True)
class Buffer:
    """KV the engine computed in one go.

    Attributes:
        id: content hash.
        context: the view in which it was computed, with its own tokens filled in: what it could attend to. A
            buffer that was computed more than once has one context for each way.
    """

    id: BufferId
    context: View

    @property
    def length(self) -> int:
        """Positions from 0 to the end of the context; only `computed` of them are this buffer's own."""
        return self.context.length

    @property
    def computed(self) -> tuple[Range, ...]:
        """The positions whose KV this buffer holds; the rest of the context came from other buffers."""
        return tuple(
            (start, start + piece.length) for start, piece in self.context.spans() if piece.buffer == self.id
        )


class BufferRange(NamedTuple):
    """Positions `[start, end)` of a buffer."""

    buffer: BufferId
    start: int
    end: int


class Provenance:
    """How every known buffer was computed. Not thread-safe: it belongs to one loop.

    Args:
        max_buffers: most buffers remembered; the one that was least recently recorded, used or built upon
            goes first.
        max_contexts: most contexts remembered for one buffer; the oldest goes first.
    """

    def __init__(self, *, max_buffers: int = 65536, max_contexts: int = 8) -> None:
        if max_buffers < 1:
            raise ValueError(f"max_buffers: expected at least 1, got {max_buffers}")
        if max_contexts < 1:
            raise ValueError(f"max_contexts: expected at least 1, got {max_contexts}")
        self._max_buffers = max_buffers
        self._max_contexts = max_contexts
        self._records: OrderedDict[BufferId, tuple[Buffer, ...]] = OrderedDict()
        # The buffers with this one in a context of theirs, so that taint is followed and not searched for.
        self._users: dict[BufferId, set[BufferId]] = {}
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """How many records a bound has cost.

        When it is not 0, `influenced_by` may miss KV whose record is gone, and a receipt must not claim
        completeness.
        """
        return self._dropped

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, buffer: BufferId) -> bool:
        return buffer in self._records

    def record(self, buffer: BufferId, context: View) -> Buffer:
        """Remember that `buffer` was computed in `context`.

        Args:
            buffer: the buffer.
            context: the view at the end of the computation, with the buffer's own pieces at shift 0 and no
                holes (`View.filled`).

        Raises:
            ValueError: when the context has a hole, lacks the buffer, or holds it at a shift: a buffer's
                positions are those of its context.
        """
        made = Buffer(buffer, context)
        own = False
        for start, piece in context.spans():
            if piece.buffer is None:
                raise ValueError(f"context: expected no holes, found one at {start}; fill the view first")
            if piece.buffer == buffer:
                own = True
                if piece.src_start != start:
                    raise ValueError(
                        f"context: {buffer} lies at a shift of {start - piece.src_start}, expected 0"
                    )
        if not own:
            raise ValueError(f"context: expected pieces of {buffer}, found none")
        self.touch(context.buffers())
        known = self._records.get(buffer, ())
        if made not in known:
            known = (*known, made)
            self._dropped += len(known) > self._max_contexts
            self._replace(buffer, known[-self._max_contexts :])
        self.touch((buffer,))
        while len(self._records) > self._max_buffers:
            self._replace(next(iter(self._records)), ())
            self._dropped += 1
        return made

    def get(self, buffer: BufferId) -> Buffer | None:
        """The buffer as it was computed last; None when it is not known."""
        known = self._records.get(buffer)
        return known[-1] if known else None

    def touch(self, buffers: Iterable[BufferId]) -> None:
        """Keep these longer: something in use draws on them."""
        for buffer in buffers:
            if buffer in self._records:
                self._records.move_to_end(buffer)

    def discard(self, buffers: Iterable[BufferId]) -> None:
        """Drop the records of buffers whose KV is known to be gone everywhere; costs no completeness."""
        for buffer in buffers:
            self._replace(buffer, ())

    def influenced_by(self, buffer: BufferId, start: int, end: int) -> frozenset[BufferRange]:
        """Every range computed while a token of `[start, end)` of `buffer` was in context, and that range
        itself.

        Attention is causal, so in any context everything from the first tainted token on is tainted; a buffer
        computed there is tainted from that position, and taints in turn every context it is part of.
        Positions of the buffer's context that another buffer computed are followed to that buffer.

        Returns:
            Ranges per buffer, merged. Empty when `start == end`. For a buffer that is not known, at least the
            range asked for.

        Raises:
            ValueError: unless `0 <= start <= end`.
        """
        if not 0 <= start <= end:
            raise ValueError(f"start, end: expected 0 <= start <= end, got [{start}, {end})")
        if start == end:
            return frozenset()
        # Per buffer, the first position whose KV is tainted; all its later positions are, too.
        first: dict[BufferId, int] = {}
        known = self._records.get(buffer, ())
        for made in known:
            context = made.context
            for _, piece in context.between(min(start, context.length), min(end, context.length)):
                if piece.buffer is not None:
                    first[piece.buffer] = min(piece.src_start, first.get(piece.buffer, piece.src_start))
        if not known:
            first[buffer] = start
        # Whatever has a buffer in its context that became tainted, or tainted from further forward.
        todo = {*first, *(name for tainted in first for name in self._users.get(tainted, ()))}
        while todo:
            name = todo.pop()
            for made in self._records.get(name, ()):
                since = _first_own(made, _first_tainted(made.context, first))
                if since is not None and since < first.get(name, since + 1):
                    first[name] = since
                    todo |= self._users.get(name, set())
        out: set[BufferRange] = set()
        for name, since in first.items():
            ways = self._records.get(name, ())
            own = [r for made in ways for r in made.computed] if ways else [(start, end)]
            out.update(BufferRange(name, max(a, since), b) for a, b in merge(own) if b > since)
        return frozenset(out)

    def _replace(self, buffer: BufferId, ways: tuple[Buffer, ...]) -> None:
        """Set the contexts of a buffer (none to drop it), and who uses whom with them."""
        before = _used(self._records.get(buffer, ()))
        after = _used(ways)
        for used in before - after:
            users = self._users[used]
            users.discard(buffer)
            if not users:
                del self._users[used]
        for used in after - before:
            self._users.setdefault(used, set()).add(buffer)
        if ways:
            self._records[buffer] = ways
        else:
            self._records.pop(buffer, None)


def _used(ways: Iterable[Buffer]) -> set[BufferId]:
    return {name for made in ways for name in made.context.buffers()}


def _first_tainted(context: View, first: dict[BufferId, int]) -> int | None:
    """The first position of the context at which a tainted token lies."""
    for start, piece in context.spans():
        since = first.get(piece.buffer) if piece.buffer is not None else None
        if since is not None and since < piece.src_end:
            return start + max(0, since - piece.src_start)
    return None


def _first_own(made: Buffer, since: int | None) -> int | None:
    """The first position at or after `since` that the buffer itself computed."""
    if since is None:
        return None
    for start, end in made.computed:
        if end > since:
            return max(start, since)
    return None
