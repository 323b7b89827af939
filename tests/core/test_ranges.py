"""Range arithmetic against sets of integers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from leyline_lmcache.ranges import Range, merge, subtract

ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def members(found: list[Range]) -> set[int]:
    return {i for a, b in found for i in range(a, b)}


def canonical(found: list[Range]) -> bool:
    return all(a < b for a, b in found) and all(x[1] < y[0] for x, y in itertools.pairwise(found))


@given(ranges)
def test_merge(some: list[Range]) -> None:
    assert members(merge(some)) == members(some)
    assert canonical(merge(some))


@given(ranges, ranges)
def test_subtract(a: list[Range], b: list[Range]) -> None:
    left = subtract(merge(a), merge(b))
    assert members(left) == members(a) - members(b)
    assert canonical(left)
