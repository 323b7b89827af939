"""Recorded conversations in the shapes that policies meet: plain text, and tool calls made of it."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("LEYLINE_CONVERSATIONS", Path(__file__).parents[1] / "data" / "conversations"))

Conversation = list[dict[str, Any]]

_SPEAKER = re.compile(r"^(system|user|assistant): ", re.MULTILINE)


@cache
def conversations() -> dict[str, Conversation]:
    """All of them by name, with those of plain prompts taken apart into messages."""
    found: dict[str, Conversation] = {}
    for file in sorted(FOLDER.glob("*.jsonl.gz")):
        for line in gzip.decompress(file.read_bytes()).decode().splitlines():
            record = json.loads(line)
            name = record["session"]
            if "messages" in record:
                found[name] = record["messages"]
                found[f"{name}-tools"] = with_tool_calls(record["messages"])
            else:
                for number, one in enumerate(_of_turns(record["turns"])):
                    found[f"{name}.{number}"] = one
                    found[f"{name}.{number}-tools"] = with_tool_calls(one)
    assert found, f"no conversations in {FOLDER}"
    return found


def _of_turns(turns: list[dict[str, str]]) -> Iterator[Conversation]:
    """Calls whose prompts extend each other are one conversation."""
    if _SPEAKER.match(turns[0]["prompt"]):
        for turn in turns[:: max(1, len(turns) // 3)]:
            yield [*_of_speakers(turn["prompt"]), {"role": "assistant", "content": turn["completion"]}]
        return
    messages: Conversation = []
    before = ""
    for turn in turns:
        if not messages or not turn["prompt"].startswith(before):
            if messages:
                yield messages
            messages = [{"role": "user", "content": turn["prompt"]}]
        else:
            messages.append({"role": "user", "content": turn["prompt"][len(before) :]})
        messages.append({"role": "assistant", "content": turn["completion"]})
        before = turn["prompt"]
    yield messages


def _of_speakers(prompt: str) -> Conversation:
    pieces = _SPEAKER.split(prompt)[1:]
    return [{"role": role, "content": text} for role, text in zip(pieces[::2], pieces[1::2], strict=True)]


def with_tool_calls(messages: Conversation) -> Conversation:
    """The same with the commands in the answers as tool calls, some as two, and thoughts as reasoning."""
    made: Conversation = []
    for index, message in enumerate(messages):
        before = messages[index - 1]["role"] if index else None
        after = messages[index + 1]["role"] if index + 1 < len(messages) else None
        if message["role"] == "assistant" and after in ("user", "tool"):
            thought, _, command = message["content"].partition("```")
            calls = [
                {
                    "id": f"call-{index}-{number}",
                    "type": "function",
                    "function": {
                        "name": ("bash", "edit")[(index // 2 + number) % 2],
                        "arguments": json.dumps({"command": command}),
                    },
                }
                for number in range(1 + (index % 5 == 0))
            ]
            content = [None, f"<think>{thought}</think>\nNext.", [{"type": "text", "text": thought}]][
                index % 3
            ]
            made.append({"role": "assistant", "content": content, "tool_calls": calls})
            if index % 3 == 0:
                made[-1]["reasoning_content"] = thought
        elif before == "assistant" and message["role"] in ("user", "tool"):
            for number, call in enumerate(made[-1]["tool_calls"]):
                text = message["content"] if number == 0 else f"Error: {message['content'][:300]}"
                content = text if index % 4 else [{"type": "text", "text": text}]
                made.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        else:
            made.append(dict(message))
    return made
