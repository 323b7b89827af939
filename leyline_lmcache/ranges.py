"""Arithmetic on sorted lists of half-open integer ranges `[start, end)`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Range = tuple[int, int]


def merge(ranges: Iterable[Range]) -> list[Range]:
    """Sort, drop empty ranges, and join those that overlap or touch."""
    out: list[Range] = []
    for start, end in sorted(ranges):
        if start >= end:
            continue
        if out and start <= out[-1][1]:
            if end > out[-1][1]:
                out[-1] = (out[-1][0], end)
        else:
            out.append((start, end))
    return out


def intersect(ranges: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """The part of `ranges` inside `others`. Both as `merge` returns them."""
    return subtract(ranges, subtract(ranges, others))


def subtract(ranges: Sequence[Range], holes: Sequence[Range]) -> list[Range]:
    """The part of `ranges` outside `holes`. Both as `merge` returns them; linear in their number."""
    out: list[Range] = []
    i = 0
    for start, end in ranges:
        while i < len(holes) and holes[i][1] <= start:
            i += 1
        j = i
        while j < len(holes) and holes[j][0] < end:
            if start < holes[j][0]:
                out.append((start, holes[j][0]))
            start = holes[j][1]
            j += 1
        # The last hole may also cut the next range; only those wholly behind us are dropped.
        i = max(i, j - 1)
        if start < end:
            out.append((start, end))
    return out
