"""What turned one token sequence into another: the edits of a session whose client names none.

Compares a base with the prompt that came after it and finds what was kept, in order: the common prefix, then
runs around k-grams that occur once on either side (as patience diff does with lines), then, between those,
runs around k-grams that occur once *there*. Everything else was replaced. The outcome explains the prompt
exactly, whatever the input; how much is kept is what may vary.

Linear but for one sort, and bounded: text that repeats itself, random text and reversed text cost no more
than text that was edited a little.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]
"""Token ids, one int64 each."""

_GRAMS = (16, 8, 4)
"""Tokens in a row that anchor a run, round by round, or ``min_reuse`` if that is more. Shorter ones agree by
chance in text of few words, so they come last and only between what is sure."""
_MOST_RUNS = 2048
"""Candidate runs that are put in order, per stretch of text; the longest are."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Run:
    """``length`` tokens that are the same from ``base`` on and from ``prompt`` on."""

    base: int
    prompt: int
    length: int


@dataclass(frozen=True, slots=True)
class Change:
    """Base tokens ``[start, end)`` gave way to ``replacement``."""

    start: int
    end: int
    replacement: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Diff:
    """How a prompt came out of a base.

    Attributes:
        runs: what was kept, in order; the first may begin at (0, 0), each other has at least ``min_reuse``
            tokens.
        changes: of the base, that bring the kept runs to where the prompt has them. Made in the base they
            give, at its start, the prompt's first ``reach`` tokens.
        reach: end of the last kept run in the prompt; what follows is new.
    """

    runs: tuple[Run, ...]
    changes: tuple[Change, ...]
    reach: int

    @property
    def kept(self) -> int:
        """Tokens of the prompt that the base has."""
        return sum(run.length for run in self.runs)


def diff(base: object, prompt: object, *, min_reuse: int = 16, max_changes: int = 1024) -> Diff:
    """Find what was kept of a base.

    Args:
        base: token ids, ``[n]``; a sequence or an integer array.
        prompt: token ids, ``[m]``.
        min_reuse: shorter runs after the first edit are not worth keeping.
        max_changes: at most so many; the shortest runs are given up for it.

    Raises:
        ValueError: ``min_reuse`` or ``max_changes`` is less than 1.
    """
    for name, value in (("min_reuse", min_reuse), ("max_changes", max_changes)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    old, new = np.asarray(base, dtype=np.int64), np.asarray(prompt, dtype=np.int64)
    prefix = common_prefix(old, new)
    grams = [max(gram, min(min_reuse, _GRAMS[0])) for gram in _GRAMS]
    later = _between(old[prefix:], new[prefix:], grams)
    runs = [Run(run.base + prefix, run.prompt + prefix, run.length) for run in later]
    runs = [run for run in runs if run.length >= min_reuse]
    # Each has at most one change before it.
    longest = sorted(runs, key=lambda run: -run.length)[:max_changes]
    runs = sorted(longest, key=lambda run: run.base)
    if prefix:
        runs.insert(0, Run(0, 0, prefix))
    return Diff(tuple(runs), tuple(_changes(runs, new)), runs[-1].prompt + runs[-1].length if runs else 0)


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Length of the longest common prefix; looks no further than it must."""
    n, first, step = min(len(a), len(b)), 0, 64
    while first < n:
        last = min(n, first + step)
        differ = np.flatnonzero(a[first:last] != b[first:last])
        if len(differ):
            return first + int(differ[0])
        first, step = last, step * 8
    return n


def _changes(runs: Sequence[Run], prompt: Tokens) -> list[Change]:
    """What lies between the runs was replaced."""
    out: list[Change] = []
    at, to = 0, 0
    for run in runs:
        if run.base > at or run.prompt > to:
            out.append(Change(at, run.base, tuple(prompt[to : run.prompt].tolist())))
        at, to = run.base + run.length, run.prompt + run.length
    return out


def _between(old: Tokens, new: Tokens, grams: Sequence[int]) -> list[Run]:
    """Runs that two stretches share, in order on both sides. ``grams``: of this round and those to come."""
    if not grams:
        return []
    gram, later = grams[0], grams[1:]
    enough = min(len(old), len(new)) >= gram
    chain = _in_order(_candidates(old, new, gram)) if enough else []
    out: list[Run] = []
    for run in [*_grown(chain, old, new), Run(len(old), len(new), 0)]:
        at, to = _end(out)
        out += _shifted(_between(old[at : run.base], new[to : run.prompt], later), at, to)
        if run.length:
            out.append(run)
    return _joined(out)


def _end(runs: Sequence[Run]) -> tuple[int, int]:
    return (runs[-1].base + runs[-1].length, runs[-1].prompt + runs[-1].length) if runs else (0, 0)


def _shifted(runs: Sequence[Run], base: int, prompt: int) -> list[Run]:
    return [Run(run.base + base, run.prompt + prompt, run.length) for run in runs]


def _joined(runs: Sequence[Run]) -> list[Run]:
    """Runs that follow each other on both sides are one."""
    out: list[Run] = []
    for run in runs:
        if out and _end(out) == (run.base, run.prompt):
            out[-1] = Run(out[-1].base, out[-1].prompt, out[-1].length + run.length)
        else:
            out.append(run)
    return out


def _candidates(old: Tokens, new: Tokens, gram: int) -> list[Run]:
    """Runs of k-grams that occur once on either side, as runs of tokens; the longest, by their place in the
    base."""
    left, right = _grams(old, gram), _grams(new, gram)
    names, at = _once(left)
    others, to = _once(right)
    _, i, j = np.intersect1d(names, others, assume_unique=True, return_indices=True)
    if not len(i):
        return []
    order = np.argsort(at[i])
    at, to = at[i][order], to[j][order]
    breaks = np.flatnonzero((np.diff(at) != 1) | (np.diff(to) != 1)) + 1
    starts = np.concatenate([[0], breaks])
    ends = np.concatenate([breaks, [len(at)]])
    lengths = ends - starts
    if len(starts) > _MOST_RUNS:
        longest = np.sort(np.argsort(-lengths, kind="stable")[:_MOST_RUNS])
        starts, lengths = starts[longest], lengths[longest]
    runs = [Run(int(at[s]), int(to[s]), int(n) + gram - 1) for s, n in zip(starts, lengths, strict=True)]
    # Two k-grams may have one hash.
    return [run for run in runs if _same(run, old, new)]


def _same(run: Run, old: Tokens, new: Tokens) -> bool:
    return np.array_equal(old[run.base :][: run.length], new[run.prompt :][: run.length])


def _grams(tokens: Tokens, gram: int) -> npt.NDArray[np.uint64]:
    """A hash of every ``gram`` tokens in a row, ``[n - gram + 1]``."""
    count = len(tokens) - gram + 1
    words = tokens.astype(np.uint64) * _MULTIPLIER
    words ^= words >> np.uint64(29)
    out = np.zeros(count, dtype=np.uint64)
    for i in range(gram):
        out *= _MULTIPLIER
        out += words[i : i + count]
    return out


def _once(names: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Values that occur once, sorted, and where."""
    order = np.argsort(names, kind="stable")
    ordered = names[order]
    differs = np.concatenate([[True], ordered[1:] != ordered[:-1], [True]])
    alone = differs[1:] & differs[:-1]
    return ordered[alone], order[alone]


def _in_order(runs: Sequence[Run]) -> list[Run]:
    """The chain of runs, increasing on both sides, that holds most tokens. ``runs``: by their base."""
    # best: prompt positions, increasing, with the most tokens of a chain whose last run begins there.
    positions: list[int] = []
    totals: list[int] = []
    tips: list[int] = []
    before: list[int] = []
    for index, run in enumerate(runs):
        at = bisect_left(positions, run.prompt)
        before.append(tips[at - 1] if at else -1)
        total = run.length + (totals[at - 1] if at else 0)
        last = at
        while last < len(positions) and totals[last] <= total:
            last += 1
        positions[at:last], totals[at:last], tips[at:last] = [run.prompt], [total], [index]
    out: list[Run] = []
    index = tips[-1] if tips else -1
    while index >= 0:
        out.append(runs[index])
        index = before[index]
    return out[::-1]


def _grown(chain: Sequence[Run], old: Tokens, new: Tokens) -> list[Run]:
    """The runs of a chain, as long as the text around them goes on alike, and none into another."""
    out: list[Run] = []
    for index, run in enumerate(chain):
        at, to = _end(out)
        # k-grams of neighbours overlap.
        cut = max(0, at - run.base, to - run.prompt)
        base, prompt, length = run.base + cut, run.prompt + cut, run.length - cut
        if length <= 0:
            continue
        back = common_prefix(old[at:base][::-1], new[to:prompt][::-1])
        base, prompt, length = base - back, prompt - back, length + back
        following = chain[index + 1] if index + 1 < len(chain) else None
        until = (following.base, following.prompt) if following else (len(old), len(new))
        length += common_prefix(old[base + length : until[0]], new[prompt + length : until[1]])
        out.append(Run(base, prompt, length))
    return out
