"""``leyline bench``: mistakes are named before any server starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.conftest import Leyline


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
        (["--policy", "keep_tool_results: {kep: 2}"], "unknown option"),
        (["--tokenizer", "nowhere.json"], "tokenizer nowhere.json: no such file"),
        (["--arm", "best"], "'best' is not one of"),
        (["--concurrency", "0"], "concurrency"),
        (["--max-tokens", "64"], "no prompt has at most 64 tokens"),
    ],
)
def test_i9_what_cannot_be_replayed_is_named(leyline: Leyline, words: list[str], says: str) -> None:
    done = leyline("bench", "replay", *words)
    assert done.status == 2
    assert says in done.error


def test_a_broken_file_is_named_with_its_line(leyline: Leyline, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_text(json.dumps({"turns": [{"prompt": "x"}]}) + "\n" + json.dumps({"turns": [{}]}))
    done = leyline("bench", "replay", file)
    assert done.status == 2
    assert f"{file}:2: turns[0].prompt: expected text" in done.error
