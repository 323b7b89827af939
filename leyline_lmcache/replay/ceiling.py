"""How much of each prompt could be reused at best, whatever finds it.

Three bounds, each computed without the diff the server uses. All count the common prefix with an earlier
prompt, however short, and apart from it only runs of at least ``least`` tokens: shorter ones agree by chance.
All leave out a prompt's last token, which always has to be computed.

* *blocks*: the best single earlier prompt, of which the longest common run is kept, then the longest on each
  side of it, and so on, as difflib does. What an edit left of a history; this is called the ceiling.
* *in order*: the same with the most tokens that any choice of runs in the same order keeps, by dynamic
  programming. It is more where text repeats itself: of three prints of one file, of which the first is
  dropped and a fourth follows, it takes the first for the second, and so on, and has the fourth for nothing.
* *anywhere*: every token in a run that stands anywhere in any earlier prompt, also out of order, from several
  prompts at once, and again and again. Text that a tool prints twice counts as reusable.

All assume that nothing is ever evicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Of one prompt, in tokens; `prefix` is the longest common one with any earlier prompt."""

    prefix: int
    blocks: int
    in_order: int
    anywhere: int


def ceilings(prompts: Sequence[Sequence[int]], least: int) -> list[Ceiling]:
    """The bounds of each prompt of a session.

    Args:
        prompts: token ids of each turn, in order.
        least: tokens of the shortest run that counts.

    Raises:
        ValueError: `least` is less than 1.
    """
    if least < 1:
        raise ValueError(f"least: expected at least 1, got {least}")
    names: dict[bytes, int] = {}
    earlier: list[tuple[Tokens, npt.NDArray[np.int64]]] = []
    seen: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
    found = []
    for prompt in prompts:
        new = np.asarray(prompt, dtype=np.int64)
        grams = _named(new, least, names)
        most = max(len(new) - 1, 0)
        prefix, kept, order = 0, 0, 0
        for old, old_grams in reversed(earlier):
            shared = _prefix(old, new)
            prefix = max(prefix, shared)
            most_here = shared + int(_covered(np.isin(grams[shared:], old_grams[shared:]), least).sum())
            if most_here > kept:
                kept = max(kept, shared + in_blocks(old_grams[shared:], grams[shared:], least))
            if most_here > order:
                order = max(order, shared + _aligned(old, old_grams, new, grams, shared, least))
        everywhere = _covered(np.isin(grams, seen), least)
        everywhere = np.concatenate([everywhere, np.zeros(len(new) - len(everywhere), dtype=bool)])
        everywhere[:prefix] = True
        bounds = (prefix, kept, order, int(everywhere.sum()))
        found.append(Ceiling(*(min(bound, most) for bound in bounds)))
        earlier.append((new, grams))
        seen = np.union1d(seen, grams)
    return found


def _named(tokens: Tokens, least: int, names: dict[bytes, int]) -> npt.NDArray[np.int64]:
    """A number for every `least` tokens in a row, equal where they are equal."""
    raw, step = tokens.tobytes(), tokens.itemsize
    return np.array(
        [
            names.setdefault(raw[at * step : (at + least) * step], len(names))
            for at in range(len(tokens) - least + 1)
        ],
        dtype=np.int64,
    )


def _prefix(a: Tokens, b: Tokens) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _covered(starts: Flags, least: int) -> Flags:
    """Tokens that lie in a run: those from each start on."""
    if not len(starts):
        return np.zeros(0, dtype=bool)
    edges = np.zeros(len(starts) + least, dtype=np.int64)
    at = np.flatnonzero(starts)
    np.add.at(edges, at, 1)
    np.add.at(edges, at + least, -1)
    covered: Flags = np.cumsum(edges)[:-1] > 0
    return covered


def _aligned(
    old: Tokens,
    old_grams: npt.NDArray[np.int64],
    new: Tokens,
    grams: npt.NDArray[np.int64],
    prefix: int,
    least: int,
) -> int:
    """Most tokens in runs that can be kept in order, after the prefix."""
    a = _condensed(old[prefix:], np.isin(old_grams[prefix:], grams[prefix:]), least, -1)
    b = _condensed(new[prefix:], np.isin(grams[prefix:], old_grams[prefix:]), least, -2)
    return best_in_order(a, b, least)


def _condensed(tokens: Tokens, starts: Flags, least: int, gap: int) -> Tokens:
    """The tokens that lie in common runs, and one that equals nothing for each stretch between them."""
    covered = np.zeros(len(tokens), dtype=bool)
    runs = _covered(starts, least)
    covered[: len(runs)] = runs
    first = ~covered & np.concatenate([[True], covered[:-1]])
    kept: Tokens = np.where(covered, tokens, gap)[covered | first]
    return kept


def in_blocks(old_grams: npt.ArrayLike, grams: npt.ArrayLike, least: int) -> int:
    """Tokens kept by taking the longest common run, then the longest before it and behind it, and so on.

    Args:
        old_grams, grams: a number for every `least` tokens in a row, equal where they are equal.
    """
    old, new = np.asarray(old_grams).tolist(), np.asarray(grams).tolist()
    places: dict[int, list[int]] = {}
    for at, name in enumerate(new):
        places.setdefault(name, []).append(at)
    kept, windows = 0, [(0, len(old), 0, len(new))]
    while windows:
        a, a_end, b, b_end = windows.pop()
        at, to, length = _longest(old, places, (a, a_end), (b, b_end))
        if length:
            kept += length + least - 1
            # Only runs that end before it, or begin behind its last token.
            windows.append((a, at - least + 1, b, to - least + 1))
            windows.append((at + length + least - 1, a_end, to + length + least - 1, b_end))
    return kept


def _longest(
    old: Sequence[int], places: Mapping[int, Sequence[int]], a: tuple[int, int], b: tuple[int, int]
) -> tuple[int, int, int]:
    """Where the longest common run of two windows begins, and its length in grams; the first of equals."""
    best = (a[0], b[0], 0)
    before: dict[int, int] = {}
    for at in range(*a):
        here: dict[int, int] = {}
        for to in places.get(old[at], ()):
            if b[0] <= to < b[1]:
                length = here[to] = before.get(to - 1, 0) + 1
                if length > best[2]:
                    best = (at - length + 1, to - length + 1, length)
        before = here
    return best


def best_in_order(old: npt.ArrayLike, new: npt.ArrayLike, least: int) -> int:
    """Most tokens of `new` in runs of at least `least` that `old` has too, in the same order.

    Dynamic programming over all pairs of positions, a row at a time: for each pair, the most tokens kept up
    to it (``best``), the length of the run that ends there, and the most with a run that ends there.
    """
    rows, columns = np.asarray(old, dtype=np.int64), np.asarray(new, dtype=np.int64)
    width = len(columns)
    if min(len(rows), width) < least:
        return 0
    # Row i has index i + 1; only the last `least` rows are needed again.
    best = np.zeros((least + 1, width + 1), dtype=np.int32)
    run = np.zeros(width + 1, dtype=np.int32)
    ending = np.zeros(width + 1, dtype=np.int32)
    for row, token in enumerate(rows, 1):
        run[1:] = np.where(columns == token, run[:-1] + 1, 0)
        before = best[(row - least) % (least + 1)] if row >= least else None
        going_on = np.where(run[1:] > least, ending[:-1] + 1, 0)
        ending[0] = 0
        ending[1:] = going_on
        if before is not None:
            at = np.flatnonzero(run >= least)
            ending[at] = np.maximum(ending[at], before[at - least] + least)
        here = np.maximum(best[(row - 1) % (least + 1)], ending)
        best[row % (least + 1)] = np.maximum.accumulate(here)
    return int(best[len(rows) % (least + 1)][-1])
