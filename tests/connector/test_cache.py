"""The cache on SGLang's real tree, pool and allocator: what KV every token gets, for any page size."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from leyline_lmcache.connector.hints import fill_envelope
from leyline_lmcache.connector.settings import InPlace, Settings

from .engine import Engine, Served, apply, hints
from .expectation import exact, spliced

PAGES = [1, 4, 16]


def tokens(n: int, seed: int = 0, vocabulary: int = 1000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocabulary) for _ in range(n)]


def edited(engine: Engine, base: Served, *edits: Any, tail: Any = (5, 6), **options: Any) -> Served:
    prompt = apply(base.tokens, *edits) + list(tail)
    return engine.serve(prompt, hints=hints(base.rid, *edits), **options)


def expect(engine: Engine, base: Served, edits: Any, got: Served, outputs: int = 3) -> None:
    want = spliced(
        base.sems,
        base.tokens,
        edits,
        got.tokens,
        len(got.tokens) - outputs + 1,
        engine.page_size,
        engine.settings.min_reuse,
        got.report["reach"] if got.report is not None and got.report["reprefilled"] else None,
    )
    assert got.sems == want


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(
    "edits",
    [
        [(30, 50, [1, 2, 3])],
        [(30, 50, [])],
        [(32, 48, list(range(16)))],
        [(30, 30, [1, 2, 3, 4])],
        [(30, 31, [9])],  # E5: one token flips, shift 0
        [(30, 40, list(range(40)))],  # E7: longer than the span
        [(0, 10, [1, 2])],
        [(0, 10, [])],
        [(0, 0, [1])],
        [(10, 20, [1]), (40, 60, []), (80, 85, list(range(20)))],
        [(10, 20, []), (20, 20, [3]), (21, 40, [])],
        [(5, 6, [1]), (8, 9, [2]), (11, 12, [3]), (60, 90, [])],
    ],
)
def test_kept_tokens_keep_their_kv_and_turn(page: int, edits: Any) -> None:
    engine = Engine(page)
    base = engine.serve(tokens(150))
    got = edited(engine, base, *edits)
    assert got.report is not None and got.report["outcome"] == "spliced", got.report
    expect(engine, base, edits, got)
    # All but the page slack, the replacements and the new tail came from the cache.
    assert got.cached >= (len(got.tokens) - 2 - 2) // page * page - page
    engine.check()


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("order", ["before", "after"])
def test_i1_exact_requests_never_read_edited_kv(page: int, order: str) -> None:
    engine = Engine(page)
    base = engine.serve(tokens(150))
    edit = (30, 50, [1, 2, 3])
    prompt = [*apply(base.tokens, edit), 5, 6]
    first = engine.serve(prompt) if order == "before" else None
    got = edited(engine, base, edit)
    expect(engine, base, [edit], got)
    again = engine.serve(prompt)
    assert again.report is None
    assert again.sems == exact(again.tokens, len(again.tokens))
    assert again.sems != got.sems
    if first is None:
        assert again.cached == 30 // page * page  # I2: only the prefix before the edit is shared
    engine.check()


@pytest.mark.parametrize("page", PAGES)
def test_e8_views_compose_over_turns(page: int) -> None:
    engine = Engine(page)
    base = engine.serve(tokens(250))
    turn = base
    for edit in [(60, 80, [1, 2]), (61, 61, [4]), (20, 40, []), (100, 101, [8] * 30), (10, 12, [3])]:
        got = edited(engine, turn, edit, tail=tokens(4, seed=edit[0]))
        assert got.report is not None and got.report["outcome"] == "spliced", got.report
        expect(engine, turn, [edit], got)
        turn = got
    engine.check()


@pytest.mark.parametrize("page", PAGES)
def test_identity_directive_continues_an_edited_view(page: int) -> None:
    engine = Engine(page)
    base = engine.serve(tokens(150))
    view = edited(engine, base, (30, 50, [1, 2, 3]))
    prompt = view.tokens + tokens(20, seed=3)
    got = engine.serve(prompt, hints=hints(view.rid, (0, 0, [])))
    assert got.report is not None and got.report["outcome"] == "spliced"
    assert got.cached == len(view.tokens) // page * page
    assert got.sems[: got.cached] == view.sems[: got.cached]
    without = engine.serve(prompt)
    assert without.sems == exact(without.tokens, len(without.tokens))
    engine.check()


def test_identity_directive_on_an_exact_base_is_an_exact_request() -> None:
    engine = Engine()
    base = engine.serve(tokens(100))
    got = engine.serve([*base.tokens, 1, 2], hints=hints(base.rid, (0, 0, [])))
    assert got.report is not None and got.report["outcome"] == "exact"
    assert got.sems == exact(got.tokens, len(got.tokens)) and got.cached == len(base.tokens)
    engine.check()


def test_an_edited_request_sent_again_finds_its_view_in_the_tree() -> None:
    engine = Engine()
    base = engine.serve(tokens(150))
    first = edited(engine, base, (30, 50, [1, 2, 3]))
    again = edited(engine, base, (30, 50, [1, 2, 3]))
    assert again.sems == first.sems
    assert again.report is not None and again.report["moved"] == 0 and again.report["spliced"] > 0
    engine.check()


@pytest.mark.parametrize("page", PAGES)
def test_in_place_takes_the_old_views_slots_over(page: int) -> None:
    engine = Engine(page, settings=Settings(min_reuse=1, inplace=InPlace.ALWAYS))
    base = engine.serve(tokens(160))
    edit = (32, 64, tokens(16, seed=1))
    free = engine.allocator.available_size()
    got = edited(engine, base, edit)
    assert got.report is not None and got.report["in_place"] is True
    expect(engine, base, [edit], got)
    # The span's slots came back: less is in use than before, though replacement and tail are new.
    assert engine.allocator.available_size() > free
    old = engine.serve(base.tokens)
    assert old.cached <= 32 + page and old.sems == exact(old.tokens, len(old.tokens))
    engine.check()


def test_in_place_is_refused_for_a_branched_base() -> None:
    engine = Engine(settings=Settings(min_reuse=1, inplace=InPlace.ALWAYS))
    base = engine.serve(tokens(150))
    other = engine.serve([*base.tokens, 1, 2, 3])
    got = edited(engine, base, (30, 50, [4]))
    assert got.report is not None and got.report["outcome"] == "spliced" and not got.report["in_place"]
    expect(engine, base, [(30, 50, [4])], got)
    # C5: the other session still finds all its KV.
    assert engine.serve([*other.tokens, 9]).cached == len(other.tokens)
    engine.check()


@pytest.mark.parametrize("where", ["whole", "middle"])
def test_in_place_is_refused_while_the_base_is_in_use(where: str) -> None:
    engine = Engine(settings=Settings(min_reuse=1, inplace=InPlace.ALWAYS))
    base = engine.serve(tokens(150))
    prompt = base.tokens if where == "whole" else base.tokens[:90]
    running = engine.serve([*prompt, 3], hold=True)
    got = edited(engine, base, (30, 50, [4]))
    assert got.report is not None and got.report["outcome"] == "spliced" and not got.report["in_place"]
    expect(engine, base, [(30, 50, [4])], got)
    assert running.sems == exact(running.tokens, len(running.tokens))
    engine.release_held()
    engine.check()


def test_in_place_auto_takes_over_only_when_copying_would_evict() -> None:
    roomy = Engine(slots=1000)
    base = roomy.serve(tokens(300))
    got = edited(roomy, base, (30, 50, [4]))
    assert got.report is not None and not got.report["in_place"]
    tight = Engine(slots=500)
    base = tight.serve(tokens(300))
    got = edited(tight, base, (30, 50, [4]))
    assert got.report is not None and got.report["in_place"]
    expect(tight, base, [(30, 50, [4])], got)
    tight.check()


def test_i4_many_edits_cost_one_rotation_while_the_first_copy_lives() -> None:
    engine = Engine(slots=16000)
    turn = engine.serve(tokens(200))
    for i in range(20):
        turn = edited(engine, turn, (10, 12, [i]), tail=[i])
        assert turn.report is not None and turn.report["outcome"] == "spliced"
    record = engine.tier._records.get(turn.rid, engine.tier._records._records[turn.rid].namespace)
    assert record is not None
    assert record.roundings.most(0, record.length) == 1
    engine.check()


def test_drift_limit_stops_a_chain_of_in_place_rotations() -> None:
    engine = Engine(settings=Settings(min_reuse=1, inplace=InPlace.ALWAYS, drift_limit=3))
    turn = engine.serve(tokens(200))
    outcomes = []
    for i in range(5):
        edits = [(10, 12, [i])]
        got = edited(engine, turn, *edits, tail=[i])
        assert got.report is not None
        outcomes.append(got.report.get("reason", got.report["outcome"]))
        if got.report["outcome"] == "spliced":
            expect(engine, turn, edits, got)
        else:
            assert got.sems == exact(got.tokens, len(got.tokens))
        turn = got
    # After the refusal the view was prefilled, and the count starts again.
    assert outcomes == ["spliced", "spliced", "spliced", "drift_limit", "spliced"]
    engine.check()


def test_undo_an_old_base_is_served_from_the_view_that_took_its_slots() -> None:
    engine = Engine(settings=Settings(min_reuse=1, inplace=InPlace.ALWAYS))
    base = engine.serve(tokens(200))
    edited(engine, base, (30, 50, [1]))
    other = (60, 61, [2, 3])
    got = edited(engine, base, other)
    # [30, 50) was given up for good; so the whole edit is refused and the request prefilled.
    assert got.report is not None and got.report["reason"] == "source_missing"
    assert got.sems == exact(got.tokens, len(got.tokens))
    later = edited(engine, base, (25, 55, [7]))
    assert later.report is not None
    engine.check()


# ---------------------------------------------------------------------- refusals


def refused(got: Served, reason: str) -> None:
    assert got.report is not None and got.report["outcome"] == "fallback", got.report
    assert got.report["reason"] == reason, got.report
    assert got.sems == exact(got.tokens, len(got.tokens))


def test_refusals_are_named_and_prefilled() -> None:
    engine = Engine(settings=Settings(min_reuse=8))
    base = engine.serve(tokens(150))
    edit = (30, 50, [1, 2, 3])
    prompt = [*apply(base.tokens, edit), 5]
    refused(engine.serve(prompt, hints=hints("nobody", edit)), "unknown_base")
    refused(engine.serve(prompt, hints=hints(base.rid, edit), cache_salt="other"), "unknown_base")
    refused(engine.serve(prompt, hints=hints(base.rid, (29, 50, [1, 2, 3]))), "token_mismatch")
    refused(
        engine.serve(prompt, hints=hints(base.rid, (30, 500, [1, 2, 3])), fills=False), "invalid_directive"
    )
    refused(engine.serve(prompt, hints=hints(base.rid, edit, (40, 60, [])), fills=False), "overlapping_edits")
    everything = (0, len(base.tokens), [1, 2, 3])
    refused(engine.serve([1, 2, 3, 4], hints=hints(base.rid, everything)), "below_min_reuse")
    last = (len(base.tokens) - 1, len(base.tokens), [1])
    refused(engine.serve([*apply(base.tokens, last), 2], hints=hints(base.rid, last)), "below_min_reuse")
    forget = hints(base.rid, edit)
    forget["actions"][0]["payload"]["mode"] = "forget"
    refused(engine.serve(prompt, hints=forget), "unsupported_runtime")
    engine.check()


@pytest.mark.parametrize("page", PAGES)
def test_source_missing_when_the_fill_never_ran(page: int) -> None:
    engine = Engine(page)
    base = engine.serve(tokens(150))
    refused(edited(engine, base, (32, 48, tokens(16, seed=1)), fills=False), "source_missing")
    engine.check()


@pytest.mark.parametrize("page", PAGES)
def test_source_missing_after_the_base_was_evicted(page: int) -> None:
    engine = Engine(page)
    base = engine.serve(tokens(150))
    engine.cache.reset()
    engine.allocator.clear()
    engine.rows.clear()
    refused(edited(engine, base, (32, 48, tokens(16, seed=1))), "source_missing")
    refused(edited(engine, base, (32, 48, [])), "source_missing")
    engine.check()


def test_no_memory_when_the_pool_is_in_use() -> None:
    engine = Engine(slots=400, settings=Settings(min_reuse=1, inplace=InPlace.NEVER))
    base = engine.serve(tokens(120))
    running = engine.serve(base.tokens + tokens(230, seed=1), hold=True)
    got = edited(engine, base, (30, 50, []), tail=[1])
    assert got.report is not None and got.report["reason"] == "no_memory"
    engine.release_held()
    assert running.sems == exact(running.tokens, len(running.tokens))
    got = edited(engine, base, (30, 50, []), tail=[1])
    assert got.report is not None and got.report["outcome"] == "spliced"
    engine.check()


def test_a_fault_of_ours_is_an_exact_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    base = engine.serve(tokens(150))

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(engine.tier._splicer, "_move", broken)
    refused(edited(engine, base, (30, 50, [1])), "internal_error")
    engine.check()
    monkeypatch.undo()
    monkeypatch.setattr("leyline_lmcache.connector.gpu_tier.plan_request", broken)
    refused(edited(engine, base, (30, 60, [1])), "internal_error")
    engine.check()


def test_an_aborted_request_is_no_base() -> None:
    engine = Engine()
    aborted = engine.serve(tokens(150), abort=True)
    refused(edited(engine, aborted, (30, 50, [])), "unknown_base")
    engine.check()


def test_c2_the_same_edit_from_two_requests_leaks_nothing() -> None:
    engine = Engine()
    base = engine.serve(tokens(150))
    edit = (30, 50, [1, 2, 3])
    running = edited(engine, base, edit, hold=True)
    second = edited(engine, base, edit)
    assert second.sems[:-2] == running.sems[:-2]
    engine.release_held()
    engine.check()


# ---------------------------------------------------------------------- histories

EDIT = st.tuples(st.integers(0, 130), st.integers(0, 40), st.integers(0, 24))


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, list[tuple[int, int, int]], int]]:
    step = st.tuples(
        st.sampled_from(["new", "edit", "edit", "edit", "edit", "exact", "abort", "continue"]),
        st.integers(0, 7),
        st.lists(EDIT, min_size=1, max_size=3),
        st.integers(0, 12),
    )
    return draw(st.lists(step, min_size=2, max_size=10))


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    # A history is short enough to read as it is, and shrinking one takes minutes.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(
    history=histories(),
    page=st.sampled_from([1, 1, 4, 16]),
    slots=st.sampled_from([600, 1200, 8000]),
    inplace=st.sampled_from(list(InPlace)),
    least=st.sampled_from([1, 5, 16]),
)
def test_any_history_of_edits_gives_every_token_its_kv(
    history: Any, page: int, slots: int, inplace: InPlace, least: int
) -> None:
    engine = Engine(page, slots, Settings(min_reuse=least, inplace=inplace, drift_limit=4))
    bases: list[Served] = [engine.serve(tokens(120))]
    for i, (kind, which, cuts, tail) in enumerate(history):
        base = bases[which % len(bases)]
        new = tokens(tail, seed=i, vocabulary=50)
        if kind == "new":
            got = engine.serve(tokens(60, seed=i) + new)
        elif kind == "exact":
            got = engine.serve(base.tokens + new)
        elif kind == "continue":
            got = engine.serve([*base.tokens, 1, *new], hints=hints(base.rid, (0, 0, [])))
        else:
            edits, at = [], 0
            for start, length, replacement in sorted(cuts):
                start = max(start, at) % (len(base.tokens) + 1)
                if start < at:
                    continue
                end = min(start + length, len(base.tokens))
                edits.append((start, end, tokens(replacement, seed=start, vocabulary=50)))
                at = end + 1
            got = edited(engine, base, *edits, tail=[1, *new], abort=kind == "abort")
            edits = [edit for edit in edits if edit[1] > edit[0] or edit[2]]
            spliced_now = got.report is not None and got.report["outcome"] == "spliced"
            if spliced_now and edits and not got.refused_memory:
                expect(engine, base, edits, got)
        if not got.refused_memory:
            if got.report is None or got.report["outcome"] in ("fallback", "exact"):
                assert got.sems == exact(got.tokens, len(got.tokens))
            if kind != "abort":
                bases.append(got)
        engine.check()


def test_a_refused_fill_is_no_base() -> None:
    engine = Engine()
    span = (30, 33)
    prompt = tokens(33)
    envelope = fill_envelope(hints("nobody", (30, 50, [1, 2, 3])), span)
    fill = engine.run(engine.request(prompt, hints=envelope), ())
    refused(engine.serve([1, *prompt[2:], 5], hints=hints(fill.rid, (0, 2, [1]))), "unknown_base")
    engine.check()
