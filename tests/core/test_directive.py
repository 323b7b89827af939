"""Directives: validation, order, overlap, modes."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_lmcache.directive import (
    MAX_NAME_LENGTH,
    MAX_REPLACEMENT,
    TOKEN_LIMIT,
    Directive,
    Mode,
    apply_directives,
    normalize,
)
from leyline_lmcache.pieces import Edit, View
from leyline_lmcache.reasons import Fallback, FallbackReason


def d(start: int, end: int, length: int = 0, mode: Mode = Mode.AMORTIZE, base: str = "r") -> Directive:
    return Directive(base, start, end, tuple(range(length)), mode)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("base", ""),
        ("base", 7),
        ("base", "a\nforged: line"),
        ("base", "\ud800"),
        ("action_id", "\x1b[31m"),
        ("base", None),
        ("base", "x" * (MAX_NAME_LENGTH + 1)),
        ("start", -1),
        ("start", True),
        ("start", 1.0),
        ("start", "1"),
        ("start", None),
        ("start", TOKEN_LIMIT),
        ("end", 4),
        ("end", False),
        ("end", 10**30),
        ("replacement", [1]),
        ("replacement", "secret text"),
        ("replacement", (1, -1)),
        ("replacement", (1, True)),
        ("replacement", (1, 2.0)),
        ("replacement", (1, "secret text")),
        ("replacement", (TOKEN_LIMIT,)),
        ("replacement", (0,) * (MAX_REPLACEMENT + 1)),
        ("mode", "amortize"),
        ("mode", None),
        ("action_id", 3),
        ("action_id", "x" * (MAX_NAME_LENGTH + 1)),
    ],
)
def test_a_bad_field_is_named(field: str, value: Any) -> None:
    good: dict[str, Any] = {
        "base": "r",
        "start": 5,
        "end": 9,
        "replacement": (1, 2),
        "mode": Mode.FORGET,
        "action_id": "a",
    }
    Directive(**good)
    with pytest.raises(Fallback) as refused:
        Directive(**{**good, field: value})
    assert refused.value.reason is FallbackReason.INVALID_DIRECTIVE
    assert refused.value.detail.startswith(field)
    assert "secret" not in str(refused.value)
    assert len(refused.value.detail) < 200


def test_limits_are_inclusive() -> None:
    top = TOKEN_LIMIT - 1
    assert Directive("r", top, top, (0, top)).shift == 2


def test_directives_are_immutable_values() -> None:
    one = d(3, 5, 4)
    assert one == d(3, 5, 4)
    assert hash(one) == hash(d(3, 5, 4))
    assert one.shift == 2
    assert one.edit == Edit(3, 5, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.start = 4  # type: ignore[misc]


def test_a_fallback_survives_pickling() -> None:
    error = Fallback(FallbackReason.NO_MEMORY, "pool: 3 free, 5 needed")
    again = pickle.loads(pickle.dumps(error))
    assert (again.reason, again.detail) == (error.reason, error.detail)
    assert str(again) == "no_memory: pool: 3 free, 5 needed"


def test_reasons_are_those_of_the_contract() -> None:
    assert [r.value for r in FallbackReason] == [
        "invalid_directive",
        "overlapping_edits",
        "unknown_base",
        "token_mismatch",
        "incompatible_model",
        "unsupported_rope",
        "unsupported_runtime",
        "source_missing",
        "no_memory",
        "below_min_reuse",
        "tier_timeout",
        "tier_error",
        "forgotten",
        "drift_limit",
        "internal_error",
    ]


@pytest.mark.parametrize(
    "pair",
    [
        (d(3, 6), d(5, 8)),
        (d(3, 6), d(3, 6)),
        (d(3, 9), d(5, 6)),
        (d(3, 9), d(5, 5, 2)),
        (d(3, 4, 1), d(3, 5)),
        (d(4, 4, 1), d(4, 4, 2)),
        (d(0, 0, 1), d(0, 0, 1)),
    ],
)
def test_overlaps_are_refused_in_either_order(pair: tuple[Directive, Directive]) -> None:
    for order in (pair, pair[::-1]):
        with pytest.raises(Fallback) as refused:
            normalize(order, 20)
        assert refused.value.reason is FallbackReason.OVERLAPPING_EDITS


def test_an_insertion_may_touch_a_span() -> None:
    before, span, after = d(3, 3, 1), d(3, 6, 2), d(6, 6, 4)
    assert normalize([after, span, before], 10) == (before, span, after)
    view = View.of_buffer("a", 10).apply([e.edit for e in (after, span, before)])
    assert view.holes() == ((3, 10),)
    assert view.shift_at(10) == 4


def test_what_edits_nothing_overlaps_nothing_and_is_kept() -> None:
    nothing = d(4, 4)
    assert nothing.is_identity
    assert normalize([nothing], 10) == (nothing,)
    assert normalize([d(2, 8), nothing], 10) == (d(2, 8), nothing)
    insert = d(4, 4, 3)
    assert normalize([nothing, insert, nothing], 10) == (nothing, insert, nothing)
    assert View.of_buffer("a", 10).apply([nothing.edit]) == View.of_buffer("a", 10)
    with pytest.raises(Fallback):
        normalize([d(11, 11)], 10)


def test_several_bases_are_refused() -> None:
    with pytest.raises(Fallback) as refused:
        normalize([d(0, 1), d(2, 3, base="other")], 10)
    assert refused.value.reason is FallbackReason.INVALID_DIRECTIVE
    assert refused.value.detail.startswith("base")


def test_nothing_normalizes_to_nothing() -> None:
    assert normalize([], 0) == ()
    assert normalize(iter([d(0, 0)]), 0) == (d(0, 0),)


spans = st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 3)).map(
    lambda t: d(min(t[:2]), max(t[:2]), t[2])
)


@given(st.lists(spans, max_size=6), st.integers(0, 25))
def test_normalize_refuses_exactly_what_is_ambiguous(directives: list[Directive], length: int) -> None:
    outside = any(x.end > length for x in directives)
    real = [x for x in directives if not x.is_identity]

    def clash(a: Directive, b: Directive) -> bool:
        covered = set(range(a.start, a.end)) & set(range(b.start, b.end))
        inside = any(p.start == p.end and q.start < p.start < q.end for p, q in ((a, b), (b, a)))
        same = a.start == a.end == b.start == b.end
        return bool(covered) or inside or same

    clashes = any(clash(a, b) for i, a in enumerate(real) for b in real[i + 1 :])
    try:
        ordered = normalize(directives, length)
    except Fallback as refused:
        if refused.reason is FallbackReason.OVERLAPPING_EDITS:
            assert clashes
        else:
            assert outside
    else:
        assert not outside
        assert not clashes
        assert sorted(ordered, key=repr) == sorted(directives, key=repr)
        assert list(ordered) == sorted(directives, key=lambda x: (x.start, x.end))


def test_forget_prefills_everything_from_its_span_on() -> None:
    base = View.of_buffer("a", 100)
    new = apply_directives(base, [d(50, 60, 2, Mode.FORGET), d(10, 20, 4), d(80, 90)])
    # 10 tokens to 4 before it: the forgotten span starts at 44 now.
    assert new.length == 100 - 6 - 8 - 10
    assert new.holes() == ((10, 14), (44, new.length))
    assert apply_directives(base, [d(0, 1, 0, Mode.FORGET)]) == View.hole(99)
    # With no text changed it still gives up what follows.
    assert apply_directives(base, [d(40, 40, 0, Mode.FORGET)]).holes() == ((40, 100),)
    assert apply_directives(base, [d(0, 100, 0, Mode.FORGET)]) == View()
