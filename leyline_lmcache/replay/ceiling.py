"""How much of each prompt could be reused at best, whatever finds it.

Two bounds, computed without the diff the server uses. Both count the common prefix with an earlier prompt,
however short, and apart from it only runs of at least ``least`` tokens (shorter ones agree by chance); both
leave out a prompt's last token, which always has to be computed.

* *in order*: the best single earlier prompt, of which runs are kept in order: the optimum of an alignment,
  found by dynamic programming. What edits leave of a history.
* *anywhere*: every token in a run that stands anywhere in any earlier prompt, also out of order, from several
  prompts at once, and again and again: text that a tool prints twice counts as reusable.

Assumes that nothing is ever evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Of one prompt, in tokens; `prefix` is the longest common one with any earlier prompt."""

    prefix: int
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
        prefix, order = 0, 0
        for old, old_grams in reversed(earlier):
            shared = _prefix(old, new)
            prefix = max(prefix, shared)
            covered = _covered(np.isin(grams[shared:], old_grams[shared:]), least)
            if shared + int(covered.sum()) > order:
                order = max(order, shared + _aligned(old, old_grams, new, grams, shared, least))
        everywhere = _covered(np.isin(grams, seen), least)
        everywhere = np.concatenate([everywhere, np.zeros(len(new) - len(everywhere), dtype=bool)])
        everywhere[:prefix] = True
        found.append(Ceiling(min(prefix, most), min(order, most), min(int(everywhere.sum()), most)))
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
