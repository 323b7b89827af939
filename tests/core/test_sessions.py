"""Sessions: which earlier view a prompt is taken to come from, and what is remembered at all."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from leyline_lmcache.sessions import SessionStore, SessionView, derive


def view(response: str, tokens: list[int], *, edited: bool = False) -> SessionView:
    return SessionView(response, np.array(tokens, np.int32), edited)


def some(start: int, length: int = 100) -> list[int]:
    return list(range(start, start + length))


def chosen(views: list[SessionView], prompt: list[int]) -> str | None:
    found = derive(views, prompt, min_reuse=8)
    return found.base.response if found is not None else None


def test_the_last_turn_is_the_base_of_the_next() -> None:
    first, second = view("1", some(0)), view("2", some(0) + some(500))
    assert chosen([second, first], some(0) + some(500) + [7]) == "2"


def test_a_rewind_goes_on_from_the_turn_it_goes_back_to() -> None:
    first, second = view("1", some(0)), view("2", some(0) + some(500))
    # Both have as much of it; the later one may still be nearer.
    assert chosen([second, first], [*some(0), 7]) == "2"
    edited = view("2", [*some(0, 10), *some(50, 50), *some(500)], edited=True)
    assert chosen([edited, first], [*some(0), 7]) == "1"


def test_two_branches_of_one_turn_have_one_base() -> None:
    base = view("base", some(0) + some(1000))
    left = view("left", some(0) + some(1000) + some(2000), edited=False)
    prompt = some(0, 50) + some(1000) + some(3000)
    assert chosen([left, base], prompt) == "left"  # as much as the base has
    branch = view("right", some(0, 20) + some(1000), edited=True)
    assert chosen([branch, left, base], some(0) + some(1000) + [5]) == "left"


def test_a_stranger_is_no_base() -> None:
    assert chosen([view("1", some(0))], some(5000)) is None
    assert chosen([], some(0)) is None


def test_directives_are_needed_for_changes_and_to_go_on_with_an_edited_view() -> None:
    plain, edited = view("1", some(0)), view("2", some(0), edited=True)
    for base, prompt, needed in (
        (plain, [*some(0), 7], False),
        (edited, [*some(0), 7], True),
        (plain, some(0, 40) + some(60, 40), True),
        (plain, some(0, 40), False),
    ):
        found = derive([base], prompt, min_reuse=8)
        assert found is not None and found.needs_directives is needed


def test_bounds_hold_and_the_oldest_goes_first() -> None:
    store = SessionStore(max_sessions=2, max_views=2, max_tokens=1000)
    for number in range(3):
        store.add("a", view(str(number), some(0)))
    assert [each.response for each in store.candidates("a")] == ["2", "1"]
    store.add("b", view("b", some(0)))
    assert store.candidates("a")
    store.add("c", view("c", some(0)))
    assert len(store) == 2 and not store.candidates("b")
    store.add("d", view("d", some(0, 950)))
    assert len(store) == 1 and store.tokens == 950
    store.add("d", view("d", some(0, 10)))
    assert store.tokens == 10
    store.forget("d")
    store.forget("d")
    assert store.tokens == len(store) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 50)), max_size=60))
def test_tokens_are_counted(adds: list[tuple[int, int, int]]) -> None:
    store = SessionStore(max_sessions=3, max_views=3, max_tokens=200)
    for session, response, length in adds:
        store.add(session, view(str(response), some(0, length)))
        held = [each for name in range(6) for each in store._sessions.get(name, {}).values()]
        assert store.tokens == sum(len(each.tokens) for each in held)
        assert len(store) <= 3 and (store.tokens <= 200 or len(store) == 1)
