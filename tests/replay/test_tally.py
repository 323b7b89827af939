"""What is made of the servers' answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leyline_lmcache.replay.arms import Arm, Servers, served_model
from leyline_lmcache.replay.ceiling import Ceiling
from leyline_lmcache.replay.play import Play, Served, Turn
from leyline_lmcache.replay.screen import COLUMNS, rows, verdicts
from leyline_lmcache.replay.tally import Tally, gain_points, summary, tally
from leyline_lmcache.stack.client import Generation


def answer(prompt: int, cached: int, report: dict[str, Any] | None = None, **details: int) -> Generation:
    meta = {"id": "r", "prompt_tokens": prompt, "cached_tokens": cached, "cached_tokens_details": details}
    return Generation("", (1,), meta if report is None else {**meta, "leyline": report})


SPLICED = {
    "outcome": "spliced",
    "edits": 2,
    "filled": 9,
    "tiers": {"gpu": 40, "cpu": 20, "redis": 1},
    "session": {"kept": 63},
}


def test_fills_are_not_hits() -> None:
    served = Served.of(answer(100, 70, SPLICED, device=70, host=0), 0.5)
    assert (served.hit, served.filled, served.prefilled) == (61, 9, 39)
    assert served.tiers == {"gpu": 40, "cpu": 20, "redis": 1}
    assert (served.edits, served.found, served.outcome) == (2, 63, "spliced")


def test_a_fallback_hits_what_the_ordinary_cache_has() -> None:
    report = {**SPLICED, "outcome": "fallback", "reason": "no_memory"}
    served = Served.of(answer(100, 30, report, device=25, host=5), 0.5)
    assert (served.hit, served.filled, served.edits, served.reason) == (30, 0, 0, "no_memory")
    assert served.tiers == {"gpu": 25, "cpu": 5, "redis": 0}


def test_a_server_without_leyline() -> None:
    served = Served.of(answer(100, 30), 0.5)
    assert (served.hit, served.outcome, served.found) == (30, None, None)
    assert served.tiers == {"gpu": 30, "cpu": 0, "redis": 0}


def turn(number: int, served: Served, blocks: int) -> Turn:
    return Turn("s", number, served, Ceiling(blocks // 2, blocks, blocks + 1, blocks + 5))


def played(arm: Arm, *turns: Turn, level: int = 1) -> Tally:
    return tally(Play("set", arm, level, turns, 2.0))


def ours(level: int = 1) -> Tally:
    fallback = {"outcome": "fallback", "reason": "no_memory", "session": {"kept": 80}}
    return played(
        Arm.LEYLINE,
        turn(0, Served.of(answer(100, 0), 0.1), 3),
        turn(1, Served.of(answer(100, 70, SPLICED), 0.2), 65),
        turn(2, Served.of(answer(100, 30, fallback), 0.3), 80),
        level=level,
    )


def test_sums() -> None:
    made = ours()
    assert (made.requests, made.prompt, made.hit, made.prefilled, made.filled) == (3, 300, 91, 209, 9)
    assert (made.prefix, made.blocks, made.in_order, made.anywhere) == (73, 148, 151, 163)
    assert (made.edited, made.edits, dict(made.fallbacks)) == (1, 2, {"no_memory": 1})
    assert dict(made.outcomes) == {"spliced": 1, "fallback": 1}
    assert made.tiers == {"gpu": 70, "cpu": 20, "redis": 1}
    # What is below the ceiling is accounted for.
    assert (made.not_found, made.not_served, made.not_seen) == (2, 52, 3)
    assert made.not_found + made.not_served + made.not_seen == made.blocks - made.hit
    assert made.ttft_ms == 200
    assert made.hit_rate == pytest.approx(91 / 300)
    assert made.fraction_of_ceiling == pytest.approx(91 / 148)


def test_the_summary_has_the_worst_of_all_levels() -> None:
    radix = played(Arm.RADIX, *(turn(n, Served.of(answer(100, 10), 0.1), 50) for n in range(3)))
    crowded = played(Arm.RADIX, *(turn(n, Served.of(answer(100, 20), 0.1), 50) for n in range(3)), level=8)
    tallies = [radix, crowded, ours(), ours(8)]
    assert gain_points(tallies, "set", 1) == pytest.approx(100 * (91 / 300 - 0.1))
    assert gain_points([ours()], "set", 1) is None
    made = summary(tallies)
    assert made["gain_points_set_c1"] == 20.33 and made["gain_points_set_c8"] == 10.33
    assert made["gain_points_set"] == 10.33
    assert made["fraction_of_ceiling_set"] == 0.6149
    assert made["fallbacks_set"] == 2
    assert made["hit_rate_set_radix_c8"] == 0.2


def test_nothing_divides_by_zero() -> None:
    made = played(Arm.LEYLINE)
    assert (made.hit_rate, made.fraction_of_ceiling, made.fraction_of_anywhere) == (0, 1, 1)
    assert made.to_json()["arm"] == "leyline"


def test_the_screen_has_eighty_columns() -> None:
    tallies = [ours(), played(Arm.RADIX, turn(0, Served.of(answer(1_000_000, 10), 0.1), 50))]
    widths = [max(len(row[i]) for row in [COLUMNS, *rows(tallies)]) for i in range(len(COLUMNS))]
    assert sum(widths) + len(widths) - 1 <= 80
    lines = list(verdicts(tallies))
    assert "fallbacks: no_memory 1" in lines[0] and "52 not served" in lines[1]


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from leyline_lmcache.replay.picture import draw

    draw([ours(), played(Arm.RADIX, turn(0, Served.of(answer(100, 10), 0.1), 50))], tmp_path / "a" / "p.png")
    assert (tmp_path / "a" / "p.png").stat().st_size > 1000


def test_a_larger_vocabulary_gets_a_model_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 512}')
    (tmp_path / "model.safetensors").write_text("weights")
    with served_model(Servers(model=str(tmp_path))) as model:
        assert model == str(tmp_path)
        assert Servers(model=model).spec(Arm.RADIX, model).sglang_args == ()
    servers = Servers(model=str(tmp_path), vocabulary=1000)
    with served_model(servers) as model:
        assert [file.name for file in Path(model).iterdir()] == ["config.json"]
        assert '"vocab_size": 1000' in (Path(model) / "config.json").read_text()
        assert servers.spec(Arm.RADIX, model).sglang_args == ("--load-format", "dummy")
    assert not Path(model).exists()


def test_the_stack_of_each_arm() -> None:
    specs = {arm: Servers().spec(arm, "mla") for arm in Arm}
    assert [specs[arm].plugin for arm in Arm] == [False, False, False, True]
    assert [specs[arm].lmcache for arm in Arm] == [False, False, True, True]
    assert [arm.has_policy for arm in Arm] == [False, True, True, True]
