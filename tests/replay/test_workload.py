"""From recorded conversations to prompts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from leyline_lmcache.policies.base import Pipeline
from leyline_lmcache.policies.config import build
from leyline_lmcache.policies.conversations import ConversationError
from leyline_lmcache.policies.document import Document
from leyline_lmcache.replay.load import POLICY, Limits, load, sample
from leyline_lmcache.replay.tokens import HEAD, TokenizerError, byte_tokenizer, file_tokenizer, head
from leyline_lmcache.replay.workload import read

BYTES = byte_tokenizer()
PAPER = build([Document.parse(POLICY, "policy").value])


def write(path: Path, *records: Any) -> Path:
    path.write_bytes(gzip.compress("\n".join(json.dumps(record) for record in records).encode()))
    return path


def conversation(outputs: int, size: int = 200) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": "be good"}, {"role": "user", "content": "do it"}]
    for number in range(outputs):
        messages += [
            {"role": "assistant", "content": f"call {number}"},
            {"role": "user", "content": f"output {number} " + "x" * size},
        ]
    return [*messages, {"role": "assistant", "content": "done"}]


def text(prompt: Any) -> str:
    return bytes(prompt).decode()


def test_a_call_for_each_answer_and_old_outputs_are_stubbed(tmp_path: Path) -> None:
    file = write(tmp_path / "runs.jsonl.gz", {"session": "s", "messages": conversation(4)})
    made = read(file, BYTES, PAPER, most_tokens=10_000)
    assert (made.name, made.has_policy, made.left_out) == ("runs", True, 0)
    (session,) = made.sessions
    assert len(session.full) == len(session.sent) == 5
    assert text(session.full[0]) == "system: be good\nuser: do it\nassistant: "
    assert session.full[0] == session.sent[0]
    assert all("removed" not in text(prompt) for prompt in session.full)
    last = text(session.sent[-1])
    assert [f"output {number} x" in last for number in range(4)] == [False, False, True, True]
    assert last.count("[old tool output removed]") == 2
    # The recorded answers are part of what follows them.
    assert "assistant: call 3\n" in last


def test_a_conversation_ends_where_its_unedited_prompt_is_too_long(tmp_path: Path) -> None:
    file = write(tmp_path / "runs.jsonl", {"session": "s", "messages": conversation(6)})
    (whole,) = read(file, BYTES, PAPER, most_tokens=10_000).sessions
    most = len(whole.full[3]) + HEAD
    made = read(file, BYTES, PAPER, most_tokens=most)
    assert made.sessions[0].full == whole.full[:4] and made.sessions[0].sent == whole.sent[:4]
    assert made.left_out == 3
    assert read(file, BYTES, PAPER, most_tokens=10).sessions == ()


def test_flat_prompts_are_sent_as_they_are(tmp_path: Path) -> None:
    turns = [{"prompt": "a b", "completion": "x"}, {"prompt": "", "completion": "y"}]
    file = write(tmp_path / "flat.jsonl.gz", {"session": "f", "turns": turns}, {"turns": turns[:1]})
    made = read(file, BYTES, PAPER, most_tokens=100)
    assert not made.has_policy
    assert [session.name for session in made.sessions] == ["f", "flat-2"]
    assert made.sessions[0].full == made.sessions[0].sent == ([97, 32, 98], [])
    assert len(read(file, BYTES, PAPER, most_tokens=100, most_sessions=1).sessions) == 1


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"turns": 3}, ":1: turns: expected a list"),
        ({"turns": [{"prompt": 3}]}, r":1: turns\[0\].prompt: expected text"),
        ({"turns": [[]]}, r":1: turns\[0\].prompt: expected text"),
    ],
)
def test_i9_a_wrong_record_is_named(tmp_path: Path, record: Any, says: str) -> None:
    with pytest.raises(ConversationError, match=says):
        read(write(tmp_path / "x.jsonl", record), BYTES, Pipeline(), most_tokens=10)


def test_a_file_has_one_kind(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", {"messages": conversation(1)}, {"turns": []})
    with pytest.raises(ConversationError, match="has both messages and turns"):
        read(file, BYTES, Pipeline(), most_tokens=10)


def test_files_that_cannot_be_replayed_are_named(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", {"session": "s", "messages": conversation(1)})
    with pytest.raises(ConversationError, match="no prompt has at most 10 tokens"):
        load([file], BYTES, PAPER, Limits(10))
    twice = write(tmp_path / "y.jsonl", *[{"session": "s", "messages": conversation(1)}] * 2)
    with pytest.raises(ConversationError, match="two conversations have the same name"):
        load([twice], BYTES, PAPER, Limits(1000))
    with pytest.raises(ConversationError, match="another file has the name x"):
        load([file, file], BYTES, PAPER, Limits(1000))


def test_the_sample_is_read() -> None:
    made = load(sample(), BYTES, PAPER, Limits(9000))
    assert [each.name for each in made] == ["swe_agent", "miniswe", "magagent"]
    assert [each.has_policy for each in made] == [True, False, False]
    assert all(len(prompt) + HEAD <= 9000 for each in made for s in each.sessions for prompt in s.full)


def test_heads_differ() -> None:
    heads = {tuple(head(run, number)) for run in ("a", "b") for number in range(50)}
    assert len(heads) == 100 and all(len(each) == HEAD for each in heads)
    assert head("a", 1) == head("a", 1)


def test_another_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel(
        {"assistant": 0, ":": 1, "user": 2, "hello": 3, "?": 4}, unk_token="?"
    )
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    one = file_tokenizer(tmp_path)
    assert (one.name, one.vocabulary) == (tmp_path.name, 5)
    assert one.messages([{"role": "user", "content": "hello"}]) == [2, 1, 3, 0, 1]
    with pytest.raises(TokenizerError, match="no such file"):
        file_tokenizer(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(TokenizerError, match="not a tokenizer"):
        file_tokenizer(tmp_path / "broken.json")
