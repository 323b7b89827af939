"""What one splice has to do, sorted so that a backend can do it in order. Lives on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MIN_RUN = 32
"""Tokens in consecutive slots, of one shift, from which slicing beats gathering."""


@dataclass(frozen=True, slots=True)
class Job:
    """Tokens in the order in which they are worked off: moved without turning, moved and turned, turned
    in place; within each group by shift. Moves come first: a turn in place may be of a slot they read.

    ``src``, ``dst``, ``row``: int64 ``[n]`` on the host; ``row`` indexes ``shifts``, the distinct ones.
    ``overlap``: a moved token is written to a slot that another moved token reads. ``crossed``: the order
    of work matters at all, because of that or because a slot that is turned in place is also read.
    """

    src: torch.Tensor
    dst: torch.Tensor
    row: torch.Tensor
    shifts: torch.Tensor
    still: int
    moved: int
    overlap: bool
    crossed: bool

    @classmethod
    def plan(cls, slots: int, src: torch.Tensor, dst: torch.Tensor, shift: torch.Tensor | int) -> Job:
        """From host tensors ``[n]`` that have been checked. Tokens that need nothing are dropped."""
        stay = src == dst
        if isinstance(shift, int):
            distinct = torch.tensor([shift])
            row = torch.zeros_like(src)
            turn = torch.full_like(stay, shift != 0)
        else:
            # Shifts come in runs: sort the runs, not the tokens.
            runs, run = torch.unique_consecutive(shift, return_inverse=True)
            distinct, row = torch.unique(runs, return_inverse=True)
            row, turn = row[run], shift != 0
        group = torch.where(stay, torch.where(turn, 2, 3), turn.to(torch.int64))
        key = group * distinct.numel() + row
        if bool((key.diff() < 0).any()):
            order = torch.argsort(key, stable=True)
            src, dst, row, group = src[order], dst[order], row[order], group[order]
        n = int((group < 3).sum())
        src, dst, row, group = src[:n], dst[:n], row[:n], group[:n]
        still, moved = int((group == 0).sum()), int((group < 2).sum())
        written = torch.zeros(slots, dtype=torch.bool)
        written[dst[:moved]] = True
        overlap = bool(written[src[:moved]].any())
        written[dst[moved:]] = True
        crossed = overlap or bool(written[src[:moved]].any())
        return cls(src, dst, row, distinct, still, moved, overlap, crossed)

    def runs(self, start: int, stop: int) -> tuple[list[tuple[int, int]], torch.Tensor]:
        """Split ``[start, stop)`` into runs of consecutive slots with one shift, and the other tokens
        (positions in this job)."""
        if stop - start < _MIN_RUN:
            return [], torch.arange(start, stop)
        src, dst, row = self.src[start:stop], self.dst[start:stop], self.row[start:stop]
        breaks = (src.diff() != 1) | (dst.diff() != 1) | (row.diff() != 0)
        edges = torch.cat((torch.tensor([-1]), breaks.nonzero().squeeze(1), torch.tensor([stop - start - 1])))
        first, length = edges[:-1] + 1, edges.diff()
        long = length >= _MIN_RUN
        runs = [
            (start + a, start + a + n)
            for a, n in zip(first[long].tolist(), length[long].tolist(), strict=True)
        ]
        rest = torch.arange(start, stop)[~torch.repeat_interleave(long, length)]
        return runs, rest
