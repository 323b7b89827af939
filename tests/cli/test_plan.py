"""``leyline plan``: what it prints for people, for programs, and for mistakes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Leyline

from leyline_lmcache.codec import op_from_map

ENVELOPE: dict[str, Any] = {
    "protocol_version": "1",
    "message_id": "m1",
    "actions": [
        {
            "action_id": "a1",
            "action_type": "kv.splice",
            "action_version": "1",
            "payload": {"base": "r1", "start": 300, "end": 500, "replacement_ids": [7, 8, 9, 10, 11]},
        }
    ],
}


def test_one_edit_on_every_tier(leyline: Leyline) -> None:
    found = leyline("plan", "--length", 2000, "--edit", "300:500:5", "--json").json
    assert (found["old_length"], found["new_length"]) == (2000, 1805)
    assert found["edits"] == [{"start": 300, "end": 500, "length": 5, "shift": -195, "mode": "amortize"}]
    assert list(found["tiers"]) == ["gpu", "cpu", "redis"]
    gpu, cpu = found["tiers"]["gpu"], found["tiers"]["cpu"]
    assert (gpu["block_size"], cpu["block_size"]) == (1, 256)
    assert (gpu["fills"], gpu["tokens_filled"]) == ([[300, 305]], 5)
    assert (gpu["tokens_copied"], gpu["tokens_rotated"], gpu["blocks_invalidated"]) == (1500, 1500, 1700)
    # The chunk of the replacement is filled whole, and only the chunk that nothing draws on any more goes.
    assert (cpu["fills"], cpu["blocks_invalidated"]) == ([[256, 512]], 1)
    assert all(op_from_map(op) for op in gpu["ops"] + cpu["ops"])


def test_every_way_to_write_a_replacement(leyline: Leyline, tmp_path: Path) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text("[4, 5]")
    lengths = {"2:4": 0, "2:4:0": 0, "2:4:3": 3, "2:4:7,8": 2, "2:4:7,": 1, "2:4:[7]": 1, f"2:4:@{ids}": 2}
    for text, length in lengths.items():
        found = leyline("plan", "--length", 9, "--edit", text, "--json").json
        assert found["new_length"] == 7 + length, text


def test_tokens_come_from_a_file(leyline: Leyline, tmp_path: Path) -> None:
    for text in ("[1, 2, 3, 4]", "1 2\n3, 4\n"):
        file = tmp_path / "tokens"
        file.write_text(text)
        found = leyline("plan", "--tokens", file, "--edit", "0:1", "--json").json
        assert (found["old_length"], found["new_length"]) == (4, 3)


def test_an_envelope_means_the_same_as_edits(
    leyline: Leyline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "hints.json"
    file.write_text(json.dumps(ENVELOPE))
    edits = leyline("plan", "--length", 2000, "--edit", "300:500:5", "--json").json
    assert leyline("plan", "--length", 2000, "--envelope", file, "--json").json == edits
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(ENVELOPE)))
    assert leyline("plan", "--length", 2000, "--envelope", "-", "--json").json == edits


def test_turns_are_chained_and_rotated_once(leyline: Leyline, tmp_path: Path) -> None:
    file = tmp_path / "view.json"
    file.write_text(leyline("plan", "--length", 2000, "--edit", "300:500:5", "--json").out)
    second = leyline("plan", "--view", file, "--edit", "10:20", "--tier", "gpu", "--json").json
    assert second["new_length"] == 1795
    shifts = {
        (op["buffer"], op["shift"]) for op in second["tiers"]["gpu"]["ops"] if op["op"] == "copy_rotate"
    }
    # From where the keys were computed: -195 and -10 make one rotation.
    assert shifts == {("base", -10), ("turn-1", -10), ("base", -205)}
    assert [piece["buffer"] for piece in second["view"]["pieces"]] == ["base", "base", "turn-1", "base"]


def test_forget_fills_everything_after_it(leyline: Leyline) -> None:
    gpu = leyline("plan", "--length", 100, "--edit", "40:50:3:forget", "--json").json["tiers"]["gpu"]
    assert (gpu["fills"], gpu["tokens_copied"]) == ([[40, 93]], 0)


def test_expand_cuts_ops_at_blocks(leyline: Leyline) -> None:
    words = ("plan", "--length", 64, "--edit", "3:5", "--page-size", 8, "--tier", "gpu", "--json")
    ops = leyline(*words, "--expand").json["tiers"]["gpu"]["ops"]
    assert len(ops) > len(leyline(*words).json["tiers"]["gpu"]["ops"])
    for op in ops:
        if op["op"] == "copy_rotate":
            assert op["src_offset"] + op["length"] <= 8
            assert op["dst_offset"] + op["length"] <= 8


def test_a_person_sees_strip_and_totals_in_80_columns(leyline: Leyline) -> None:
    done = leyline(
        "plan",
        "--length",
        2000,
        "--edit",
        "300:500:5",
        "--edit",
        "700:720",
        "--append",
        40,
        "--page-size",
        16,
    )
    assert done.status == 0
    assert "2,000 tokens become 1,825 (-175)" in done.out
    assert "█ shared 300   ▓ spliced 1,480   ░ to fill 45   × gone 220" in done.out
    assert "gpu, pages of 16 tokens:" in done.out
    strips = [
        line.strip().split() for line in done.out.splitlines() if line.strip().startswith(("before", "after"))
    ]
    assert all(set(cells) <= set("█▓░×") for _, cells in strips)
    lines = [line.rstrip() for line in done.out.splitlines() if not line.startswith(("gpu", "cpu", "redis"))]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--edit", "1:2"], "expected one of --length, --tokens, --view"),
        (["--length", "9"], "--envelope"),
        (["--length", "9", "--edit", "x:2"], "start: expected a whole number"),
        (["--length", "9", "--edit", "1:-2"], "end: expected a whole number"),
        (["--length", "9", "--edit", "5:2"], "end: expected at least start (5), got 2"),
        (["--length", "9", "--edit", "7"], "expected START:END"),
        (["--length", "9", "--edit", "1:2:7,x"], "replacement[1]: expected a whole number"),
        (["--length", "9", "--edit", "1:2:@/nonexistent"], "/nonexistent: cannot be read"),
        (["--length", "9", "--edit", "1:20"], "end: 20 is past the end of the base, which has 9 tokens"),
        (["--length", "9", "--edit", "1:4", "--edit", "3:5"], "overlapping_edits"),
        (["--length", "9", "--edit", "1:2", "--page-size", "0"], "--page-size"),
        (["--length", "9", "--edit", "1:2", "--tier", "disk"], "--tier"),
        (["--length", "x", "--edit", "1:2"], "--length"),
        (["--view", "/nonexistent", "--edit", "1:2"], "--view /nonexistent: cannot be read"),
        (["--length", "9", "--envelope", "/dev/null"], "not JSON"),
    ],
)
def test_a_mistake_names_the_field(leyline: Leyline, words: list[str], named: str) -> None:
    done = leyline("plan", *words)
    assert (done.status, done.out) == (2, "")
    assert named in done.error


def test_a_mistake_in_an_envelope_or_a_view_names_the_field(leyline: Leyline, tmp_path: Path) -> None:
    file = tmp_path / "file"
    wrong = json.loads(json.dumps(ENVELOPE))
    wrong["actions"][0]["payload"]["start"] = "x"
    for option, text, named in (
        ("--envelope", json.dumps(wrong), "actions[0].payload.start: expected a non-negative integer"),
        ("--envelope", json.dumps(ENVELOPE | {"actions": []}), "actions: expected at least one"),
        ("--view", '{"pieces": [{"buffer": "b", "src_start": 0}]}', "pieces[0].length"),
        ("--view", '{"pieces": [{"buffer": null, "src_start": 3, "length": 1}]}', "pieces[0].src_start"),
        ("--view", "[]", "pieces: expected a list"),
        ("--tokens", '[1, "secret"]', "number 2 is none"),
    ):
        file.write_text(text)
        base = ["--length", 2000] if option == "--envelope" else ["--edit", "0:1"]
        done = leyline("plan", option, file, *base)
        assert done.status == 2
        assert named in done.error
        assert "secret" not in done.error
