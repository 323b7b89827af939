"""Edits whose source is in LMCache: loaded into the edited path and turned there, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from leyline_lmcache.connector import wire
from leyline_lmcache.connector.hints import fill_envelope
from leyline_lmcache.connector.records import Namespace
from leyline_lmcache.connector.settings import InPlace, Invalidate, Settings
from leyline_lmcache.journal import JournalReader
from leyline_lmcache.ops import OpKind, Tier

from .daemon import Daemon
from .engine import Engine, Served, hints
from .expectation import exact
from .test_cache import PAGES, edited, expect, histories, refused, tokens

EDITS = [
    [(30, 50, [1, 2, 3])],
    [(30, 50, [])],
    [(0, 10, [4])],
    [(10, 20, [1]), (40, 60, []), (80, 85, list(range(20)))],
]


def rig(page: int = 1, slots: int = 4096, chunk: int = 16, **options: Any) -> Engine:
    return Engine(page, slots, Settings(min_reuse=1, **options), Daemon(chunk))


def loaded(got: Served) -> dict[str, Any]:
    assert got.report is not None and got.report["outcome"] == "spliced", got.report
    return got.report


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("edits", EDITS)
def test_a_base_that_left_the_gpu_loads_and_turns(page: int, edits: Any) -> None:
    engine = rig(page)
    base = engine.serve(tokens(160))
    engine.forget_pool()
    got = edited(engine, base, *edits)
    report = loaded(got)
    expect(engine, base, edits, got)
    # All but the last, incomplete chunk of the base was there.
    assert report["reprefilled"] <= 16 + page
    assert got.cached >= 100
    engine.check()
    engine.daemon.check()


def test_part_on_the_gpu_part_in_lmcache() -> None:
    engine = rig()
    base = engine.serve(tokens(160))
    engine.forget_pool()
    engine.serve(base.tokens[:100])
    got = edited(engine, base, (30, 50, [1, 2, 3]))
    expect(engine, base, [(30, 50, [1, 2, 3])], got)
    assert loaded(got)["reach"] >= 140
    engine.check()
    engine.daemon.check()


def test_what_the_gpu_has_stays_while_the_rest_is_on_its_way() -> None:
    """C1: nothing of a plan that waits is evicted, however much room others need."""
    engine = rig(slots=512)
    base = engine.serve(tokens(160))
    engine.forget_pool()
    engine.serve(base.tokens[:100])
    req = engine.request([*base.tokens[:30], *base.tokens[50:], 5], hints=hints(base.rid, (30, 50, [])))
    req.init_next_round_input(engine.cache)
    assert engine.tier.begin_lookup(req.rid)
    engine.allocator.evict_to_free_tokens(engine.cache, 512)
    assert engine.cache.protected_size() == 100
    got = engine.run(req, (7, 8, 9))
    assert loaded(got)["tiers"]["gpu"] == 80
    expect(engine, base, [(30, 50, [])], got)
    engine.check()
    engine.daemon.check()


def test_the_tier_of_every_token_is_told_fills_and_all(tmp_path: Path) -> None:
    engine = rig(journal_dir=tmp_path)
    base = engine.serve(tokens(160))
    engine.forget_pool()
    engine.serve(base.tokens[:20])
    daemon = engine.daemon
    # Chunks 0 to 4 are in L1, the rest in Redis.
    daemon.cold = {key for key in daemon.chunks if len(key[1]) // 4 > 80}
    got = edited(engine, base, (30, 50, [1, 2, 3]))
    report = loaded(got)
    # Of the view, [0, 20) was on the GPU; [20, 30) and [50, 80) in L1; [80, 160) in Redis.
    assert report["tiers"] == {"gpu": 20, "cpu": 40, "redis": 80}
    assert sum(report["tiers"].values()) == report["prefix"] + report["spliced"]
    again = edited(engine, base, (30, 50, [1, 2, 3]), tail=[5])
    assert loaded(again)["tiers"] == {"gpu": 140, "cpu": 0, "redis": 0}
    engine.reporter.close()
    ops = [op for op in JournalReader(tmp_path).records() if op.tier is not Tier.GPU]
    assert [(op.tier, op.op, op.blocks, op.tokens, op.shift) for op in ops] == [
        (Tier.CPU, OpKind.COPY, 1, 10, 0),
        (Tier.CPU, OpKind.COPY_ROTATE, 2, 30, -17),
        (Tier.REDIS, OpKind.COPY_ROTATE, 5, 80, -17),
    ]
    daemon.check()


@pytest.mark.parametrize("page", PAGES)
def test_another_engine_takes_the_session_over(page: int) -> None:
    here = rig(page)
    base = here.serve(tokens(160))
    there = Engine(page, 4096, here.settings, here.daemon, "there")
    edits = [(30, 50, [1, 2, 3])]
    got = edited(there, base, *edits)
    expect(there, base, edits, got)
    assert loaded(got)["reach"] >= 112
    for engine in (here, there):
        engine.check()
    here.daemon.check()


def test_i7_another_tenant_does_not_find_the_base() -> None:
    engine = rig()
    base = engine.serve(tokens(100), cache_salt="a")
    other = Engine(1, 4096, engine.settings, engine.daemon, "other")
    refused(edited(other, base, (30, 50, [1])), "unknown_base")
    refused(edited(other, base, (30, 50, [1]), cache_salt="b"), "unknown_base")
    assert loaded(edited(other, base, (30, 50, [1]), cache_salt="a"))["spliced"] > 0


def test_i5_an_edit_stores_no_kept_token_again() -> None:
    engine = rig(chunk=8)
    turn = engine.serve(tokens(200))
    before = engine.daemon.stored
    for i in range(6):
        turn = edited(engine, turn, (10, 12, [i]), tail=tokens(9, seed=i))
    # What these views computed, each token once (a replacement, the tail, what was answered), and what of the
    # base filled no chunk.
    assert engine.daemon.packed == 6 * (1 + 9 + 2) + (200 + 2) % 8
    assert engine.daemon.stored - before <= 6 * 2 + 1


@pytest.mark.parametrize(("page", "chunk"), [(1, 16), (1, 64), (4, 16), (16, 32)])
def test_i4_twenty_edits_with_nothing_left_on_the_gpu_between(page: int, chunk: int) -> None:
    """Every bit of every view is found again, and its keys were turned once."""
    engine = rig(page, chunk=chunk)
    turn = engine.serve(tokens(300))
    for i in range(20):
        sems, known = turn.sems, turn.tokens
        edits = [(10 + 11 * i, 14 + 11 * i, [i] * (i % 5))]
        # As it is served from the GPU, so that what nobody stored is known; then the same from LMCache.
        edited(engine, turn, *edits, tail=tokens(9, seed=i))
        engine.forget_pool()
        got = edited(engine, turn, *edits, tail=tokens(9, seed=i))
        report = loaded(got)
        assert report["reprefilled"] == 0 and report["tiers"]["gpu"] == 0, (i, report)
        expect(engine, Served(turn.rid, known, sems, 0, None), edits, got)
        record = engine.tier._records.get(got.rid, Namespace(None, None, None))
        assert record is not None and record.roundings.most(0, record.length) <= 1
        turn = got
    engine.check()
    engine.daemon.check()


def test_what_an_edit_will_need_is_brought_while_its_replacement_is_prefilled() -> None:
    """Prefetched when the edit is declared: the request itself finds it near, and is told where it was."""
    engine = rig()
    base = engine.serve(tokens(160))
    engine.forget_pool()
    daemon = engine.daemon
    daemon.cold = set(daemon.chunks)
    envelope = hints(base.rid, (30, 50, [1, 2, 3]))
    prompt = [*base.tokens[:30], 1, 2, 3, *base.tokens[50:], 5]
    fill = engine.request(prompt[:33], hints=fill_envelope(envelope, (30, 33)))
    engine.run(fill, ())
    for _ in range(10):
        engine.tier.advance_lookups()
    # [50, 160) lies in chunks 3 to 9.
    assert {len(key[1]) // 4 // 16 - 1 for key, count in daemon.locks.items() if count} == set(range(3, 10))
    daemon.cold = set()
    got = engine.serve(prompt, hints=envelope, fills=False)
    assert loaded(got)["tiers"] == {"gpu": 0, "cpu": 0, "redis": 140}
    assert loaded(got)["reach"] == 143
    expect(engine, base, [(30, 50, [1, 2, 3])], got)
    engine.check()
    daemon.check()


def test_an_edit_that_never_comes_gives_back_what_was_brought_for_it() -> None:
    engine = rig()
    base = engine.serve(tokens(160))
    engine.forget_pool()
    envelope = hints(base.rid, (30, 50, [1, 2, 3]))
    prompt = [*base.tokens[:30], 1, 2, 3, *base.tokens[50:], 5]
    engine.run(engine.request(prompt[:33], hints=fill_envelope(envelope, (30, 33))), ())
    engine.forget_pool()
    for _ in range(10):
        engine.tier.advance_lookups()
    assert not engine.tier.looking
    engine.daemon.check()


def test_no_prefetch_when_it_is_switched_off() -> None:
    engine = rig(prefetch=False)
    base = engine.serve(tokens(160))
    engine.forget_pool()
    envelope = hints(base.rid, (30, 50, [1, 2, 3]))
    prompt = [*base.tokens[:30], 1, 2, 3, *base.tokens[50:], 5]
    engine.run(engine.request(prompt[:33], hints=fill_envelope(envelope, (30, 33))), ())
    assert not engine.tier.looking and not any(engine.daemon.locks.values())


@pytest.mark.parametrize("wish", list(Invalidate))
def test_chunks_that_no_view_refers_to_any_more(wish: Invalidate) -> None:
    engine = rig(invalidate=wish)
    daemon = engine.daemon
    base = engine.serve(tokens(160))
    branch = engine.serve(base.tokens[:100])
    turn = edited(engine, base, (20, 130, []))
    engine.tier.advance_lookups()
    # Chunks 2 to 7 are wholly in the span; 2 to 6 are the branch's too, the last in part.
    gone = [sorted(len(key[1]) // 4 // 16 - 1 for key in each) for each in daemon.invalidated]
    assert gone == ([] if wish is Invalidate.KEEP else [[7]])
    edited(engine, branch, (90, 95, []))
    for _ in range(4):
        engine.tier.advance_lookups()
    engine.forget_pool()
    # What is still in a view is still there.
    assert loaded(edited(engine, turn, (25, 30, [])))["reprefilled"] == 0
    engine.check()
    daemon.check()


def test_a_base_that_is_edited_again_is_current_again() -> None:
    """Two branches of one turn: the second finds all of it, and its chunks stay while it lives."""
    engine = rig(invalidate=Invalidate.DELETE)
    base = engine.serve(tokens(160))
    edited(engine, base, (20, 120, []))
    again = edited(engine, base, (10, 15, []))
    expect(engine, base, [(10, 15, [])], again)
    engine.forget_pool()
    # The chunks of the first branch's span went before the second was asked for; those around it did not.
    assert loaded(edited(engine, again, (5, 6, [])))["reach"] >= 26
    engine.check()
    engine.daemon.check()


def test_a_view_whose_pack_is_gone_is_cut_there() -> None:
    engine = rig()
    turn = edited(engine, engine.serve(tokens(160)), (30, 50, [1, 2, 3]))
    engine.forget_pool()
    for key in list(engine.daemon.chunks):
        if key[0] != "/":
            del engine.daemon.chunks[key]
    got = edited(engine, turn, (100, 110, []))
    refused(got, "source_missing")
    again = edited(engine, got, (100, 110, []))
    assert loaded(again)["spliced"] > 0
    engine.check()
    engine.daemon.check()


def test_the_deleted_spans_chunks_need_not_exist() -> None:
    engine = rig()
    base = engine.serve(tokens(160))
    engine.forget_pool()
    for key in list(engine.daemon.chunks):
        if 48 < len(key[1]) // 4 <= 80:
            del engine.daemon.chunks[key]
    got = edited(engine, base, (48, 80, [1]))
    expect(engine, base, [(48, 80, [1])], got)
    assert loaded(got)["reach"] >= 100
    engine.daemon.check()


def test_t12_a_chunk_that_is_gone_shortens_what_is_kept() -> None:
    engine = rig()
    base = engine.serve(tokens(160))
    engine.forget_pool()
    for key in list(engine.daemon.chunks):
        if len(key[1]) // 4 == 112:
            del engine.daemon.chunks[key]
    got = edited(engine, base, (30, 50, [1]))
    expect(engine, base, [(30, 50, [1])], got)
    assert loaded(got)["reach"] == 96 - 19 and got.report is not None and got.report["reprefilled"] > 0
    engine.check()
    engine.daemon.check()


def test_t12_a_chunk_that_vanishes_between_lookup_and_load_is_a_tier_error() -> None:
    engine = rig()
    base = engine.serve(tokens(160))
    engine.forget_pool()
    plain = engine.daemon._fetch

    def vanish(message: wire.Fetch) -> None:
        plain(message)
        engine.daemon.chunks.clear()

    engine.daemon._fetch = vanish
    refused(edited(engine, base, (30, 50, [])), "tier_error")
    engine.check()


def test_tier_timeout_when_the_daemon_never_answers() -> None:
    engine = rig(tier_timeout=0.05)
    base = engine.serve(tokens(160))
    engine.forget_pool()
    engine.daemon.delay = None
    refused(edited(engine, base, (30, 50, [])), "tier_timeout")
    refused(engine.serve(base.tokens, hints=hints("elsewhere", (0, 5, []))), "tier_timeout")
    engine.check()


@pytest.mark.parametrize("fault", ["no such method", RuntimeError("down")])
def test_tier_error_when_the_daemon_is_broken(fault: Any) -> None:
    engine = rig()
    base = engine.serve(tokens(160))
    engine.forget_pool()
    engine.daemon.fault = fault
    refused(edited(engine, base, (30, 50, [])), "tier_error")
    # The GPU tier is not touched by that.
    again = engine.serve(base.tokens)
    assert loaded(edited(engine, again, (30, 50, [])))["spliced"] > 0
    engine.check()


def test_i9_a_record_that_makes_no_sense_is_refused() -> None:
    engine = rig()
    base = engine.serve(tokens(100))
    for name, value in engine.daemon.catalog._values.items():
        if name[1][0] == "record":
            record = wire.decode(value, wire.RecordMessage)
            broken = wire.PieceMessage(buffer=record.buffer, src_start=0, length=7)
            engine.daemon.catalog._values[name] = wire.encode(
                wire.RecordMessage(
                    response=record.response,
                    namespace=record.namespace,
                    model=record.model,
                    buffer=record.buffer,
                    view=(broken,),
                    spans=(),
                )
            )
    other = Engine(1, 4096, engine.settings, engine.daemon, "other")
    refused(edited(other, base, (30, 50, [1])), "tier_error")


@pytest.mark.parametrize("polls", [0, 1, 4, None])
def test_t3_aborted_while_it_looks_or_waits_gives_everything_back(polls: int | None) -> None:
    engine = rig()
    base = engine.serve(tokens(160))
    engine.forget_pool()
    engine.daemon.delay = 3
    req = engine.request([*base.tokens[:30], *base.tokens[50:], 5], hints=hints(base.rid, (30, 50, [])))
    req.init_next_round_input(engine.cache)
    assert engine.tier.begin_lookup(req.rid)
    if polls is None:
        while engine.tier.poll_lookup(req.rid) is False:
            pass
        assert sum(engine.daemon.locks.values()) > 0
    for _ in range(polls or 0):
        assert engine.tier.poll_lookup(req.rid) is False
    engine.tier.ended(req.rid)
    assert not engine.tier.looking
    engine.check()
    engine.daemon.check()


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(
    history=histories(),
    page=st.sampled_from([1, 1, 4, 16]),
    chunk=st.sampled_from([16, 32]),
    inplace=st.sampled_from(list(InPlace)),
    losses=st.sets(st.integers(0, 9), max_size=4),
)
def test_any_history_with_the_gpu_losing_everything_now_and_then(
    history: Any, page: int, chunk: int, inplace: InPlace, losses: set[int]
) -> None:
    daemon = Daemon(chunk)
    options = Settings(min_reuse=1, inplace=inplace, drift_limit=4)
    engine = Engine(page, 4000, options, daemon)
    bases = [engine.serve(tokens(120))]
    for i, (kind, which, cuts, tail) in enumerate(history):
        if i in losses:
            engine.forget_pool()
        if i in losses and i % 2:
            engine = Engine(page, 4000, options, daemon, f"engine{i}-")
        base = bases[which % len(bases)]
        new = tokens(tail, seed=i, vocabulary=50)
        if kind in ("new", "exact"):
            got = engine.serve(base.tokens + new)
        else:
            start = cuts[0][0] % (len(base.tokens) + 1)
            end = min(start + cuts[0][1], len(base.tokens))
            edits = [(start, end, tokens(cuts[0][2], seed=start, vocabulary=50))]
            got = edited(engine, base, *edits, tail=[1, *new], abort=kind == "abort")
            if got.report is not None and got.report["outcome"] == "spliced" and (end > start or edits[0][2]):
                expect(engine, base, edits, got)
        if got.report is None or got.report["outcome"] in ("fallback", "exact"):
            assert got.sems == exact(got.tokens, len(got.tokens))
        if kind != "abort":
            bases.append(got)
        engine.check()
    daemon.check()
