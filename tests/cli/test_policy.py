"""``leyline policy``: what it prints for people, for programs, and for mistakes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Leyline

RECORDED = Path(__file__).parents[1] / "data" / "conversations" / "swe_agent.jsonl.gz"
PAPER = "keep_tool_results: {keep: 2, observations: true}"


def agent(turns: int, size: int = 100) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [{"role": "user", "content": "t" * size}]
    for _ in range(turns):
        made.append({"role": "assistant", "content": "a" * size})
        made.append({"role": "user", "content": "o" * size})
    return made


def test_the_turns_of_one_conversation(leyline: Leyline, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(agent(4)))
    found = leyline("policy", "try", file, "--policy", PAPER, "--json").json
    assert found["unit"] == "characters"
    ((name, session),) = found["sessions"].items()
    assert name == "run-0"
    assert [turn["edited"] for turn in session["turns"]] == [[], [], [], [2], [4]]
    assert [turn["full"] for turn in session["turns"]] == [100, 300, 500, 700, 900]
    assert [turn["sent"] for turn in session["turns"]] == [100, 300, 500, 625, 750]
    # Before the edit 200 and 325; after it all but the stub and the new turn.
    assert [turn["prefix"] for turn in session["turns"]] == [0, 200, 400, 200, 325]
    assert [turn["kept"] for turn in session["turns"]] == [0, 200, 400, 500, 625]
    assert found["total"] == session["total"]
    assert found["total"]["edits"] == 2


def test_a_person_sees_it_in_80_columns(leyline: Leyline) -> None:
    done = leyline("policy", "try", RECORDED, "--policy", PAPER)
    assert done.status == 0, done.err
    assert "10 conversations; sizes are characters, summed over turns" in done.out
    assert "559,106 of 1,981,578 characters not sent (28.2%), by 83 edits." in done.out
    assert "prefix caching reuses 71.6%, a splice 83.5%" in done.out
    one = leyline("policy", "try", RECORDED, "--policy", PAPER, "--session", "swe-08")
    assert "swe-08: 21 turns; sizes are characters" in one.out
    for text in (done.out, one.out, leyline("policy", "list").out):
        assert max(len(line.rstrip()) for line in text.splitlines()) <= 90


def test_every_shape_of_a_file(leyline: Leyline, tmp_path: Path) -> None:
    messages = agent(3)
    shapes = {
        "list.json": json.dumps(messages),
        "object.json": json.dumps({"messages": messages}),
        "lines.jsonl": "\n".join(map(json.dumps, messages)),
        "conversations.json": json.dumps([{"messages": messages}]),
        "lists.json": json.dumps([messages]),
        "conversations.jsonl": json.dumps({"session": "s", "messages": messages}) + "\n\n",
    }
    totals = []
    for name, text in shapes.items():
        for packed in (False, True):
            file = tmp_path / (name + ".gz" * packed)
            file.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
            totals.append(leyline("policy", "try", file, "--policy", PAPER, "--json").json["total"])
    assert all(total == totals[0] for total in totals) and totals[0]["edits"] == 1


def test_policies_add_up_from_files_and_words(leyline: Leyline, tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("policies:\n- strip_reasoning: {keep: 0}\n")
    conversation = tmp_path / "c.json"
    conversation.write_text(
        json.dumps(
            [
                {"role": "user", "content": "key sk-1"},
                {"role": "assistant", "content": "<think>hm</think>so"},
                {"role": "user", "content": "on"},
            ]
        )
    )
    words = ("policy", "try", conversation, "--json", "--policy", file)
    assert leyline(*words).json["total"]["sent"] == 8 + 12
    both = leyline(*words, "--policy", "redact: {patterns: [sk-1], replacement: X}").json
    assert both["total"]["sent"] == 5 + 9


def test_tokens_are_counted_when_there_is_a_tokenizer(leyline: Leyline, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    file = tmp_path / "c.json"
    file.write_text(json.dumps([{"role": "user", "content": "a bc d"}]))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        done = leyline(
            "policy", "try", file, "--policy", "redact: {patterns: [' bc']}", "--tokenizer", path, "--json"
        )
        # "a[redacted] d": a, [, redacted, ], d.
        assert (done.json["unit"], done.json["total"]["full"], done.json["total"]["sent"]) == ("tokens", 3, 5)


def test_no_is_an_answer(leyline: Leyline, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps(agent(1)))
    done = leyline("policy", "try", file, "--policy", PAPER)
    assert done.status == 3
    assert "The policy changes nothing here." in done.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "nope"], "--policy[0]: unknown policy 'nope'; there are keep_tool_results"),
        (["--policy", "redact"], "--policy[0].patterns: is missing"),
        (
            ["--policy", PAPER, "--policy", "strip_reasoning: {kep: 1}"],
            "--policy[1].strip_reasoning.kep: unknown",
        ),
        (["--policy", "a: ["], "--policy:1: not valid YAML"),
        (["--policy", "/nowhere/p.yaml"], "/nowhere/p.yaml: cannot be read"),
        (["--policy", PAPER, "--session", "x"], "--session x: not in"),
        (["--policy", PAPER, "--tokenizer", "/nowhere"], "--tokenizer /nowhere: no such file"),
        ([], "--policy"),
    ],
)
def test_a_mistake_names_the_field(leyline: Leyline, words: list[str], said: str) -> None:
    done = leyline("policy", "try", RECORDED, *words)
    assert (done.status, done.out) == (2, "")
    assert said in done.error


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("secret", ":1: not JSON"),
        ('{"a": "secret"}', "expected messages, or an object with messages"),
        ('{"messages": "secret"}', "messages: expected a list"),
        ('{"messages": [{"role": "user", "content": ""}, "secret"]}', "messages[1]: expected an object"),
        ('{"messages": []}\n{', ":2: not JSON"),
        ('{"turns": [{"prompt": "secret"}]}', "no conversation in it has messages"),
        ('{"session": "a", "messages": []}\n{"session": "a", "messages": []}', "two conversations"),
    ],
)
def test_a_file_with_something_else_is_refused(
    leyline: Leyline, tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text(text)
    done = leyline("policy", "try", file, "--policy", PAPER)
    assert done.status == 2
    assert said in done.err and "secret" not in done.err


def test_half_a_file_is_refused(leyline: Leyline, tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl.gz"
    file.write_bytes(RECORDED.read_bytes()[:5000])
    assert "not complete" in leyline("policy", "try", file, "--policy", PAPER).error


def test_the_list_has_every_option(leyline: Leyline) -> None:
    found = {each["name"]: each for each in leyline("policy", "list", "--json").json}
    assert {"keep_tool_results", "stub_failed_calls", "strip_reasoning", "clear_tool_uses", "redact"} <= set(
        found
    )
    assert found["redact"]["options"][0] == {"name": "patterns", "required": True}
    clear = {option["name"]: option.get("default") for option in found["clear_tool_uses"]["options"]}
    assert clear["trigger"] == {"type": "input_tokens", "value": 100_000}
    assert "count" not in clear
    out = leyline("policy", "list").out
    assert "patterns: required" in out and "keep: 1" in out and "batch: 1" in out


def test_without_a_command_there_is_help(leyline: Leyline) -> None:
    done = leyline("policy")
    assert done.status == 2 and "try" in done.out
    assert "Example: `leyline policy try" in leyline("policy", "try", "--help").out
