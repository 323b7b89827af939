"""The piece table: histories with undo, provenance, bounds."""

from __future__ import annotations

import pytest

from leyline_lmcache.directive import Directive, apply_directives
from leyline_lmcache.history import History, NoSuchView
from leyline_lmcache.pieces import BufferRange, Edit, PieceTable, View
from leyline_lmcache.provenance import Provenance


def views(n: int) -> list[View]:
    return [View.of_buffer("a", i) for i in range(n)]


# ---------------------------------------------------------------- history


def test_undo_and_redo() -> None:
    v = views(4)
    table = PieceTable()
    for view in v:
        table.push("s", view)
    assert table.current("s") == v[3]
    assert table.undo("s") == v[2]
    assert table.undo("s") == v[1]
    assert table.redo("s") == v[2]
    assert table.current("s") == v[2]
    assert table.redo("s") == v[3]
    with pytest.raises(NoSuchView, match="redo"):
        table.redo("s")
    assert table.goto("s", 0) == v[0]
    with pytest.raises(NoSuchView, match="undo"):
        table.undo("s")


def test_an_edit_after_undo_starts_a_branch_and_loses_nothing() -> None:
    v = views(5)
    table = PieceTable()
    for view in v[:3]:
        table.push("s", view)
    table.undo("s")
    assert table.push("s", v[4]).parent == 1
    assert table.undo("s") == v[1]
    assert table.redo("s") == v[4]
    assert table.goto("s", 2) == v[2]
    assert table.undo("s") == v[1]
    assert [x.view for x in table.history("s").versions] == [v[0], v[1], v[2], v[4]]


def test_histories_are_bounded_and_the_oldest_goes() -> None:
    history = History(View(), max_versions=3)
    for view in views(6)[1:]:
        history.push(view)
    assert [x.number for x in history.versions] == [3, 4, 5]
    assert history.undo().number == 4
    assert history.undo().number == 3
    with pytest.raises(NoSuchView, match="2"):
        history.undo()
    assert history.current.number == 3
    with pytest.raises(NoSuchView, match="kept are"):
        history.goto(0)
    one = History(View(), max_versions=1)
    assert one.push(View.hole(1)).number == 1
    assert [x.number for x in one.versions] == [1]


def test_sessions_are_bounded_and_the_least_used_goes() -> None:
    table = PieceTable(max_sessions=2)
    table.push("a", View())
    table.push("b", View())
    table.history("a")
    table.push("c", View())
    assert ["a" in table, "b" in table, "c" in table] == [True, False, True]
    assert len(table) == 2
    assert table.current("b") is None
    with pytest.raises(NoSuchView, match="'b'"):
        table.undo("b")
    table.close("a")
    table.close("a")
    assert len(table) == 1


@pytest.mark.parametrize("bound", ["max_sessions", "max_views", "max_buffers"])
def test_bounds_below_one_are_refused(bound: str) -> None:
    with pytest.raises(ValueError, match=bound):
        PieceTable(**{bound: 0})


# ---------------------------------------------------------------- provenance


def ranges(found: frozenset[BufferRange]) -> list[tuple[str, int, int]]:
    return sorted((name, start, end) for name, start, end in found)


def table_of(*steps: tuple[str, View]) -> PieceTable:
    table = PieceTable()
    for name, context in steps:
        table.register(name, context)
    return table


def test_everything_after_a_token_in_its_buffer_is_influenced() -> None:
    table = table_of(("a", View.of_buffer("a", 100)))
    assert ranges(table.influenced_by("a", 40, 50)) == [("a", 40, 100)]
    assert ranges(table.influenced_by("a", 0, 1)) == [("a", 0, 100)]
    assert ranges(table.influenced_by("a", 99, 100)) == [("a", 99, 100)]
    assert table.influenced_by("a", 40, 40) == frozenset()


def test_amortize_leaves_influence_that_forget_must_find() -> None:
    base = View.of_buffer("a", 100)
    # The secret [40, 50) leaves the text; what follows it has attended to it, and so has what comes next.
    edited = base.apply([Edit(40, 50, 0)]).extend(20).filled("b")
    later = edited.apply([Edit(10, 90, 0)]).extend(5).filled("c")
    table = table_of(("a", base), ("b", edited), ("c", later))
    assert [p.buffer for p in later.pieces] == ["a", "b", "c"]
    # c never had a tainted token of a in context, but b's, which had.
    assert ranges(table.influenced_by("a", 40, 50)) == [("a", 40, 100), ("b", 90, 110), ("c", 30, 35)]


def test_what_was_computed_before_or_without_it_is_clean() -> None:
    base = View.of_buffer("a", 100)
    filled = base.apply([Edit(10, 10, 5)]).filled("b")
    clean = base.truncate(30).extend(10).filled("c")
    table = table_of(("a", base), ("b", filled), ("c", clean))
    assert ranges(table.influenced_by("a", 40, 50)) == [("a", 40, 100)]
    assert ranges(table.influenced_by("a", 29, 30)) == [("a", 29, 100), ("c", 30, 40)]
    # b was computed after [0, 10) only, and what follows it in the view does not count.
    assert ranges(table.influenced_by("b", 10, 15)) == [("b", 10, 15)]


def test_positions_another_buffer_computed_are_followed_to_it() -> None:
    base = View.of_buffer("a", 100)
    edited = base.apply([Edit(40, 50, 0)]).extend(20).filled("b")
    table = table_of(("a", base), ("b", edited))
    assert table.influenced_by("b", 45, 46) == table.influenced_by("a", 55, 56)
    assert ranges(table.influenced_by("b", 85, 95)) == [("a", 95, 100), ("b", 90, 110)]


def test_a_buffer_computed_in_two_ways_is_influenced_by_either() -> None:
    table = table_of(
        ("a", View.of_buffer("a", 50)),
        ("b", View.of_buffer("b", 60)),
        ("b", View.of_buffer("a", 50).extend(10).filled("b")),
    )
    assert ranges(table.influenced_by("a", 10, 11)) == [("a", 10, 50), ("b", 50, 60)]
    assert table.buffer("b") is not None
    assert table.provenance.dropped == 0


def test_order_of_registration_does_not_matter() -> None:
    base = View.of_buffer("a", 100)
    edited = base.apply([Edit(40, 50, 3)]).filled("b")
    later = edited.extend(7).filled("c")
    steps = [("a", base), ("b", edited), ("c", later)]
    expected = table_of(*steps).influenced_by("a", 5, 6)
    assert len(expected) == 3
    assert table_of(*steps[::-1]).influenced_by("a", 5, 6) == expected


def test_an_unknown_buffer_gives_what_was_asked_and_what_builds_on_it() -> None:
    table = table_of(("b", View.of_buffer("gone", 20).extend(5).filled("b")))
    assert ranges(table.influenced_by("gone", 3, 4)) == [("b", 20, 25), ("gone", 3, 4)]
    assert ranges(table.influenced_by("never", 3, 4)) == [("never", 3, 4)]
    with pytest.raises(ValueError, match="start, end"):
        table.influenced_by("b", 4, 3)


def test_a_span_past_the_end_is_cut() -> None:
    table = table_of(("a", View.of_buffer("a", 10)))
    assert ranges(table.influenced_by("a", 8, 99)) == [("a", 8, 10)]
    assert table.influenced_by("a", 10, 99) == frozenset()


def test_provenance_outlives_the_session() -> None:
    base = View.of_buffer("a", 10)
    table = table_of(("a", base))
    table.push("s", base)
    table.close("s")
    assert ranges(table.influenced_by("a", 3, 4)) == [("a", 3, 10)]


def test_bounds_are_counted_and_what_is_in_use_stays() -> None:
    table = PieceTable(max_buffers=3)
    for name in "abc":
        table.register(name, View.of_buffer(name, 5))
    table.push("s", View.of_buffer("a", 5))
    table.register("d", View.of_buffer("d", 5))
    assert [table.buffer(n) is not None for n in "abcd"] == [True, False, True, True]
    assert table.provenance.dropped == 1
    table.provenance.discard(["c", "unknown"])
    assert len(table.provenance) == 2
    assert table.provenance.dropped == 1
    # What was dropped is no longer followed either, and leaves nothing behind.
    table.provenance.discard(["a", "d"])
    assert not table.provenance._users
    many = Provenance(max_contexts=2)
    for n in (5, 6, 7):
        many.record("x", View.of_buffer("x", n))
    assert many.dropped == 1


def test_long_chains_are_followed_to_their_end() -> None:
    table = PieceTable()
    view = View.of_buffer("b0", 10)
    table.register("b0", view)
    for k in range(1, 3000):
        # Each builds on the one before, and only on that.
        view = view.apply([Edit(0, 5, 0)]).extend(5).filled(f"b{k}")
        table.register(f"b{k}", view)
    found = ranges(table.influenced_by("b0", 9, 10))
    assert len(found) == 3000
    assert len(table.influenced_by("b2990", 5, 6)) == 10


def test_a_context_that_cannot_be_is_refused() -> None:
    table = PieceTable()
    with pytest.raises(ValueError, match="holes"):
        table.register("a", View.of_buffer("a", 5).extend(1))
    with pytest.raises(ValueError, match="found none"):
        table.register("a", View.of_buffer("b", 5))
    with pytest.raises(ValueError, match="shift of -1"):
        table.register("a", View.of_buffer("a", 5).apply([Edit(0, 1, 0)]))
    assert table.buffer("a") is None


def test_buffer_knows_its_own_ranges() -> None:
    context = View.of_buffer("a", 100).apply([Edit(40, 50, 3)]).extend(7).filled("b")
    made = table_of(("b", context)).buffer("b")
    assert made is not None
    assert made.length == 100
    assert made.computed == ((40, 43), (93, 100))


def test_views_of_directives_go_into_the_table() -> None:
    table = PieceTable()
    base = View.of_buffer("r1", 50)
    table.register("r1", base)
    table.push("s", base)
    new = apply_directives(base, [Directive("r1", 10, 20, (1, 2))]).filled("r2")
    table.register("r2", new)
    assert table.push("s", new).parent == 0
    assert table.undo("s") == base
