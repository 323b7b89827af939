"""A view as a strip of cells: what is shared, spliced, filled and gone, and what lies in a tier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from rich.text import Text

from leyline_lmcache.directive import Directive, Mode
from leyline_lmcache.ranges import merge, subtract
from leyline_lmcache.view import View


class Part(Enum):
    """What became of tokens: their name, the character of a cell, and its colour."""

    SHARED = ("shared", "█", "blue")
    """Before the first edit, untouched."""
    SPLICED = ("spliced", "▓", "green")
    """After the first edit, with their KV as it was computed."""
    FILLED = ("to fill", "░", "yellow")
    """No KV yet: the engine prefills them."""
    GONE = ("gone", "×", "red")
    """In the old view only."""
    KEPT = ("kept", "█", "blue")
    """Computed earlier, where it still is."""
    MOVED = ("moved", "▓", "green")
    """Computed earlier, elsewhere."""
    WAS_FILLED = ("filled", "▒", "yellow")
    """Prefilled in the middle."""
    COMPUTED = ("computed", "░", "cyan")
    """Prefilled at the end."""
    HELD = ("there", "■", "default")
    """In this tier."""
    ABSENT = ("not there", "·", "dim")
    """Not in this tier."""
    BLANK = ("", " ", "default")
    """Nothing to say."""

    def __init__(self, label: str, cell: str, style: str) -> None:
        self.label = label
        self.cell = cell
        self.style = style


@dataclass(frozen=True, slots=True)
class Run:
    """So many tokens of one kind."""

    part: Part
    length: int


def runs_before(old: View, directives: Sequence[Directive]) -> list[Run]:
    """The old view: what the new one keeps of it."""
    first = min((d.start for d in directives if not d.is_identity), default=old.length)
    gone = merge((d.start, old.length if d.mode is Mode.FORGET else d.end) for d in directives)
    kept = subtract([(0, old.length)], gone)
    cells = [(start, end, Part.GONE) for start, end in gone]
    for start, end in kept:
        cells += [
            (start, min(end, first), Part.SHARED),
            (max(start, first), end, Part.SPLICED),
        ]
    return [Run(part, end - start) for start, end, part in sorted(cells, key=lambda c: c[0]) if start < end]


def runs_after(new: View, first: int) -> list[Run]:
    """The new view, whose first change is at `first`."""
    runs: list[Run] = []
    for start, piece in new.spans():
        if piece.buffer is None:
            runs.append(Run(Part.FILLED, piece.length))
            continue
        shared = max(0, min(piece.length, first - start))
        runs += [Run(Part.SHARED, shared), Run(Part.SPLICED, piece.length - shared)]
    return [run for run in runs if run.length]


def draw(runs: Sequence[Run], width: int, scale: int | None = None) -> Text:
    """The runs as cells, each run at least one of them where the width allows it.

    Args:
        runs: in order.
        width: cells for `scale` tokens.
        scale: tokens of the whole width; by default what the runs have.
    """
    total = sum(run.length for run in runs)
    cells = max(1, round(width * total / scale)) if scale and total else width
    text = Text()
    for run, count in zip(runs, _shares([run.length for run in runs], cells), strict=True):
        text.append(run.part.cell * count, run.part.style)
    return text


def legend(runs: Iterable[Run]) -> Text:
    """How many tokens of each kind there are."""
    sums: dict[Part, int] = {}
    for run in runs:
        sums[run.part] = sums.get(run.part, 0) + run.length
    text = Text()
    for part in Part:
        if part in sums:
            text.append("   " if text else "")
            text.append(part.cell, part.style)
            text.append(f" {part.label} {sums[part]:,}")
    return text


def _shares(lengths: Sequence[int], cells: int) -> list[int]:
    """Share cells out in proportion, one at least to each while there are enough; they sum up to `cells`."""
    total = sum(lengths)
    if not total:
        return [0 for _ in lengths]
    least = 1 if len(lengths) <= cells else 0
    left = cells - least * len(lengths)
    spare = [max(0.0, length * cells / total - least) for length in lengths]
    factor = left / sum(spare) if sum(spare) else 0.0
    shares = [least + int(value * factor) for value in spare]
    # What rounding left over goes to the largest runs, where a cell more shows least.
    largest = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for index in largest[: cells - sum(shares)]:
        shares[index] += 1
    return shares
