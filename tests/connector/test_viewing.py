"""What a base's view looks like, and in which tiers it lies, as a request is told."""

from __future__ import annotations

from typing import Any

import pytest

from leyline_lmcache.connector.settings import Settings

from .daemon import Daemon
from .engine import Engine, Served
from .test_cache import edited, tokens


def rig() -> Engine:
    return Engine(1, 4096, Settings(min_reuse=1), Daemon(16))


def asking(base: object) -> dict[str, Any]:
    action = {"action_id": "v", "action_type": "leyline.view", "action_version": "1", "payload": base}
    return {"protocol_version": "1", "message_id": "m", "actions": [action]}


def answer(engine: Engine, base: str, **request: Any) -> dict[str, Any]:
    got = engine.serve([1, 2], (), hints=asking({"base": base}), **request)
    assert got.report is not None
    return got.report


def strip(engine: Engine, base: Served) -> list[tuple[Any, ...]]:
    view = answer(engine, base.rid)["view"]
    assert view["length"] == len(base.tokens)
    assert sum(each["length"] for each in view["stretches"]) == view["length"]
    return [
        (each["kind"], each["start"], each.get("gone", each["length"]), "+".join(each.get("tiers", ())))
        for each in view["stretches"]
    ]


def test_a_plain_base_is_one_stretch() -> None:
    engine = rig()
    base = engine.serve(tokens(60))
    assert strip(engine, base) == [("computed", 0, 48, "gpu+cpu+redis"), ("computed", 48, 14, "gpu")]


def test_pieces_and_tiers_of_an_edited_view() -> None:
    engine = rig()
    base = engine.serve(tokens(158))
    turn = edited(engine, base, (32, 64, [1, 2, 3]), tail=[5, 6])
    whole = strip(engine, turn)
    assert [each[:3] for each in whole] == [
        ("kept", 0, 32),
        ("filled", 32, 3),
        ("gone", 35, 32),
        ("moved", 35, 96),
        ("computed", 131, len(turn.tokens) - 131),
    ]
    assert all("gpu" in tiers for kind, _, _, tiers in whole if kind != "gone")
    engine.forget_pool()
    engine.daemon.cold = {key for key in engine.daemon.chunks if len(key[1]) // 4 > 96}
    by_tier = strip(engine, turn)
    # Of the base's ten chunks the first six are in L1, the rest in Redis only.
    assert ("kept", 0, 32, "cpu+redis") in by_tier
    assert ("moved", 35, 32, "cpu+redis") in by_tier
    assert ("moved", 67, 64, "redis") in by_tier
    engine.check()
    engine.daemon.check()


def test_a_view_is_shown_on_a_node_that_never_had_it() -> None:
    engine = rig()
    base = engine.serve(tokens(64))
    other = Engine(1, 4096, engine.settings, engine.daemon, "other")
    assert strip(other, base) == [("computed", 0, 64, "cpu+redis"), ("computed", 64, 2, "")]


def test_i7_a_strangers_view_is_unknown() -> None:
    engine = rig()
    base = engine.serve(tokens(60), cache_salt="a")
    for other in ({}, {"cache_salt": "b"}):
        assert answer(engine, base.rid, **other)["reason"] == "unknown_base"
    assert answer(engine, base.rid, cache_salt="a")["view"]["length"] == 62
    assert answer(engine, "never")["reason"] == "unknown_base"


@pytest.mark.parametrize("payload", [{}, {"base": 7}, {"base": ""}, {"base": None}])
def test_i9_a_malformed_question_names_the_field(payload: Any) -> None:
    engine = rig()
    got = engine.serve([1, 2], (), hints=asking(payload))
    assert got.report is not None
    assert got.report["reason"] == "invalid_directive" and "payload.base" in got.report["detail"]


def test_without_an_answer_from_lmcache_the_gpu_is_told() -> None:
    engine = rig()
    base = engine.serve(tokens(60))
    engine.daemon.fault = "down"
    assert strip(engine, base) == [("computed", 0, 62, "gpu")]
    assert answer(engine, base.rid)["view"]["tiers"] == ["gpu"]
    assert answer(engine, "never")["reason"] == "tier_error"


def test_asking_leaves_no_base_behind_and_moves_nothing() -> None:
    engine = rig()
    base = engine.serve(tokens(60))
    engine.forget_pool()
    asked = engine.serve([1, 2], (), hints=asking({"base": base.rid}))
    assert answer(engine, asked.rid)["reason"] == "unknown_base"
    assert strip(engine, base)[0] == ("computed", 0, 48, "cpu+redis")
    engine.check()
    engine.daemon.check()


def test_without_lmcache_the_gpu_is_told() -> None:
    engine = Engine(1, 4096, Settings(min_reuse=1))
    base = engine.serve(tokens(60))
    turn = edited(engine, base, (10, 20, []))
    # A deletion right before kept tokens leaves no replacement behind.
    assert strip(engine, turn)[:3] == [("kept", 0, 10, "gpu"), ("gone", 10, 10, ""), ("moved", 10, 42, "gpu")]
    assert answer(engine, "never")["reason"] == "unknown_base"
