"""Session diff: the changes it derives give the prompt, always; what was kept is found where it can be."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_lmcache.diff import Change, Diff, Run, common_prefix, diff

LEAST = 4


def made(base: Sequence[int], found: Diff) -> list[int]:
    """The base with all changes made."""
    out: list[int] = []
    at = 0
    for change in found.changes:
        assert at <= change.start <= change.end <= len(base)
        out += [*base[at : change.start], *change.replacement]
        at = change.end
    return out + list(base[at:])


def check(base: Sequence[int], prompt: Sequence[int], least: int = LEAST, **options: int) -> Diff:
    found = diff(base, prompt, min_reuse=least, **options)
    whole = made(base, found)
    assert whole[: found.reach] == list(prompt[: found.reach]) and found.reach <= len(whole)
    at, to = 0, 0
    for index, run in enumerate(found.runs):
        assert run.base >= at and run.prompt >= to
        # Nothing is kept that two neighbouring runs could not be told apart by.
        assert index == 0 or run.base > at or run.prompt > to
        assert run.length >= least or (run.base, run.prompt) == (0, 0)
        assert list(base[run.base :][: run.length]) == list(prompt[run.prompt :][: run.length])
        at, to = run.base + run.length, run.prompt + run.length
    assert (to if found.runs else 0) == found.reach
    return found


few = st.lists(st.integers(0, 3), max_size=60)
many = st.lists(st.integers(0, 10**6), max_size=120)


@given(few, few, st.integers(1, 8))
def test_any_prompt_is_explained(base: list[int], prompt: list[int], least: int) -> None:
    check(base, prompt, least)


@st.composite
def edited(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """A base, a prompt made of it, and how many tokens of it are kept in runs of at least 8."""
    words = draw(st.integers(2, 50_000))
    base = [
        random.Random(draw(st.integers(0, 99))).randrange(words) for _ in range(draw(st.integers(0, 300)))
    ]
    base = [token * 7919 % words + index % 7 for index, token in enumerate(base)]
    prompt: list[int] = []
    at = 0
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(at, len(base)))
        end = draw(st.integers(start, len(base)))
        prompt += base[at:start] + draw(st.lists(st.integers(0, words), max_size=12))
        at = end
    return base, prompt + base[at:] + draw(st.lists(st.integers(0, words), max_size=20)), words


@given(edited())
def test_edits_are_explained(case: tuple[list[int], list[int], int]) -> None:
    base, prompt, _ = case
    check(base, prompt)


@given(st.data())
def test_what_is_kept_of_text_that_does_not_repeat_is_found_whole(data: st.DataObject) -> None:
    base = list(range(1000, 1000 + data.draw(st.integers(0, 400))))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(base)), max_size=10)))
    cuts = cuts[: len(cuts) // 2 * 2]
    prompt: list[int] = []
    at, want = 0, 0
    for number, (start, end) in enumerate(zip(cuts[::2], cuts[1::2], strict=True)):
        kept = base[at:start]
        want += len(kept) if len(kept) >= LEAST or at == 0 else 0
        prompt += [*kept, 10_000 + number]
        at = end
    kept = base[at:]
    want += len(kept) if len(kept) >= LEAST or at == 0 else 0
    prompt += [*kept, 20_000]
    assert check(base, prompt).kept == want


def test_an_ordinary_turn_changes_nothing() -> None:
    base = list(range(500))
    found = check(base, [*base, 7, 8, 9])
    assert found.changes == () and found.reach == 500 and found.runs == (Run(0, 0, 500),)


def test_a_rewind_changes_nothing() -> None:
    found = check(list(range(500)), [*range(100), 7, 8, 9])
    assert found.changes == () and found.reach == 100


def test_a_stubbed_tool_output_is_one_change() -> None:
    base = list(range(500))
    found = check(base, [*base[:100], 7, 7, *base[300:], 1, 2, 3])
    assert found.changes == (Change(100, 300, (7, 7)),)


def test_the_same_text_twice_is_told_apart_by_what_is_around_it() -> None:
    """Two outputs alike: no k-gram in them is unique, but the second is next to one that is."""
    same = [5, 6, 7, 8] * 20
    base = [*range(100, 150), *same, *range(200, 250), *same, *range(300, 350)]
    prompt = [*range(100, 150), 1, *range(200, 250), *same, *range(300, 350)]
    assert check(base, prompt).changes == (Change(50, 130, (1,)),)


def test_text_that_repeats_is_unique_between_two_changes() -> None:
    """The second round looks at one stretch alone."""
    rng = random.Random(1)
    block = [rng.randrange(1000) for _ in range(60)]
    base = [*range(2000, 2100), *block, 1, 2, 3, *range(3000, 3100), *block, 4, 5, 6, *range(4000, 4100)]
    changed = [block[i] if i not in (20, 40) else 9999 for i in range(60)]
    prompt = [*base[:100], *changed, *base[160:]]
    found = check(base, prompt)
    assert found.kept == len(base) - 2


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("least", [1, 2, 4, 16])
def test_text_of_few_words_is_not_anchored_by_chance(seed: int, least: int) -> None:
    """A stubbed output among others of the same kind: one change, whatever the least run is."""
    rng = random.Random(seed)
    base = [rng.randrange(100) for _ in range(500)]
    prompt = [*base[:200], 777, 778, *base[320:], *(rng.randrange(100) for _ in range(30))]
    found = check(base, prompt, least)
    assert found.changes[0] == Change(200, 320, (777, 778))
    assert found.kept >= 380


def test_a_run_that_is_too_short_is_replaced() -> None:
    base = list(range(100))
    prompt = [*base[:20], 777, *base[30:33], 778, *base[40:]]
    assert check(base, prompt).changes == (Change(20, 40, (777, 30, 31, 32, 778)),)


def test_no_more_changes_than_one_request_may_carry() -> None:
    base = list(range(1000))
    prompt = [token for token in base if token % 50]
    assert len(check(base, prompt).changes) == 20
    found = check(base, prompt, max_changes=5)
    assert len(found.changes) <= 5 and found.kept > 200


@pytest.mark.parametrize("name", ["min_reuse", "max_changes"])
def test_a_bound_below_one_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
        diff([1], [1], **{name: 0})


def test_arrays_of_other_types_are_taken() -> None:
    base = np.arange(100, dtype=np.int32)
    assert diff(base, base.tolist()).reach == 100
    assert diff([], [1, 2]) == Diff((), (), 0) == diff([1, 2], [])


@given(few, few)
def test_common_prefix(a: list[int], b: list[int]) -> None:
    n = common_prefix(np.array(a, np.int64), np.array(b, np.int64))
    assert a[:n] == b[:n] and (n == min(len(a), len(b)) or a[n] != b[n])


HARD = {
    "one token": ([7] * 100_000, [7] * 90_000),
    "reversed": (list(range(100_000)), list(range(100_000))[::-1]),
    "shuffled blocks": (
        list(range(100_000)),
        [
            token
            for block in random.Random(2).sample(range(1000), 1000)
            for token in range(block * 100, block * 100 + 100)
        ],
    ),
    "random": (
        random.Random(3).choices(range(100_000), k=100_000),
        random.Random(4).choices(range(100_000), k=100_000),
    ),
    "few words": (
        random.Random(5).choices(range(4), k=100_000),
        random.Random(6).choices(range(4), k=100_000),
    ),
    "period": ((list(range(64)) * 2000)[:100_000], (list(range(64)) * 2000)[10:100_010]),
    "every 20th changed": (
        list(range(100_000)),
        [token if token % 20 else -1 for token in range(100_000)],
    ),
}


@pytest.mark.parametrize("name", list(HARD))
def test_worst_cases_end(name: str) -> None:
    """A quadratic comparison would run into the time-out of the tests; benchmarks/diff.py has the times."""
    base, prompt = HARD[name]
    found = diff(base, prompt)
    assert made(base, found)[: found.reach] == prompt[: found.reach]
