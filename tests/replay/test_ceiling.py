"""The ceilings against the plainest way to compute them."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyline_lmcache.diff import diff
from leyline_lmcache.replay.ceiling import Ceiling, best_in_order, ceilings

LEAST = 3
# Few letters: runs that agree by chance, repeat, and overlap.
texts = st.lists(st.integers(0, 2), max_size=24)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def naive_in_order(old: Sequence[int], new: Sequence[int], least: int) -> int:
    """Every choice: skip a token on either side, or keep a run of any length that is long enough."""

    @cache
    def best(i: int, j: int) -> int:
        if i == len(old) or j == len(new):
            return 0
        shared = common_prefix(old[i:], new[j:])
        kept = [n + best(i + n, j + n) for n in range(least, shared + 1)]
        return max(best(i + 1, j), best(i, j + 1), *kept)

    return best(0, 0)


def by_difflib(old: Sequence[int], new: Sequence[int], least: int) -> int:
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks if block.size >= least)


def naive(prompts: Sequence[Sequence[int]], least: int) -> list[Ceiling]:
    found = []
    for turn, new in enumerate(prompts):
        earlier = prompts[:turn]
        prefixes = [common_prefix(old, new) for old in earlier]
        tails = [(old[n:], new[n:], n) for old, n in zip(earlier, prefixes, strict=True)]
        blocks = max((n + by_difflib(a, b, least) for a, b, n in tails), default=0)
        order = max((n + naive_in_order(a, b, least) for a, b, n in tails), default=0)
        prefix = max(prefixes, default=0)
        covered = set(range(prefix))
        for at in range(len(new) - least + 1):
            gram = new[at : at + least]
            if any(gram == old[i : i + least] for old in earlier for i in range(len(old) - least + 1)):
                covered |= set(range(at, at + least))
        most = max(0, len(new) - 1)
        bounds = (prefix, blocks, order, len(covered))
        found.append(Ceiling(*(min(bound, most) for bound in bounds)))
    return found


@given(texts, texts, st.integers(1, 4))
def test_alignment_is_the_best_there_is(old: list[int], new: list[int], least: int) -> None:
    assert best_in_order(old, new, least) == naive_in_order(old, new, least)


@given(st.lists(texts, max_size=4))
def test_ceilings_are_those_of_all_earlier_prompts(prompts: list[list[int]]) -> None:
    assert ceilings(prompts, LEAST) == naive(prompts, LEAST)


@given(st.lists(texts, max_size=4))
@settings(max_examples=200)
def test_no_diff_beats_the_ceiling(prompts: list[list[int]]) -> None:
    bounds = ceilings(prompts, LEAST)
    for turn, bound in enumerate(bounds):
        assert bound.prefix <= bound.blocks <= bound.in_order <= bound.anywhere
        for old in prompts[:turn]:
            kept = diff(old, prompts[turn], min_reuse=LEAST).kept
            assert min(kept, max(0, len(prompts[turn]) - 1)) <= bound.in_order


def test_what_each_bound_counts() -> None:
    a, b, c = list(range(10)), list(range(10, 20)), list(range(20, 30))
    first, second = [*a, *b, *c], [*a, *c, *b, 99]
    other = [*b, *b, 98]
    bounds = ceilings([first, second, other, first], 4)
    assert bounds[0] == Ceiling(0, 0, 0, 0)
    # b and c changed places: one of them is kept in order, both are found anywhere.
    assert bounds[1] == Ceiling(10, 20, 20, 30)
    # A base's tokens are used once in order, as often as one likes anywhere.
    assert bounds[2] == Ceiling(0, 10, 10, 20)
    # All of it, but the last token is computed.
    assert bounds[3] == Ceiling(29, 29, 29, 29)


def test_a_shortest_run_is_needed() -> None:
    with pytest.raises(ValueError, match="least: expected at least 1, got 0"):
        ceilings([], 0)


def test_prints_of_one_file_may_stand_in_for_each_other() -> None:
    """Three that differ in one line, the first dropped, a fourth behind them."""
    body, tail = list(range(100, 140)), list(range(200, 240))
    prints = [[*body, number, *tail] for number in range(4)]
    before = [9, *prints[0], *prints[1], *prints[2]]
    after = [9, 8, *prints[1], *prints[2], *prints[3]]
    bound = ceilings([before, after], 16)[1]
    # The two that are still there; or all three, but for the line in each that differs.
    assert bound.blocks == 1 + 2 * 81
    assert bound.in_order == 1 + 3 * 80
