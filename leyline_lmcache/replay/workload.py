"""What is replayed: sessions, each a list of prompts as token ids, with a policy and without one."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyline_lmcache.policies.base import Messages, Policy, apply
from leyline_lmcache.policies.conversations import ConversationError, read_conversations
from leyline_lmcache.replay.tokens import HEAD, Tokenizer

Prompt = Sequence[int]


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation.

    Attributes:
        name: of the session.
        full: the prompt of each call of the model, without a policy.
        sent: the same with it; the same prompts where there is none.
    """

    name: str
    full: tuple[Prompt, ...]
    sent: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """The sessions of one file.

    Attributes:
        name: of the file, without its endings.
        has_policy: a policy was applied. If not, whoever recorded the prompts edited them, or nobody did.
        left_out: calls whose prompts are longer than allowed, with all that follow them in their session.
    """

    name: str
    sessions: tuple[Session, ...]
    has_policy: bool
    left_out: int = 0


def read(
    path: Path, tokenizer: Tokenizer, policy: Policy, *, most_tokens: int, most_sessions: int | None = None
) -> Workload:
    """Read a file of conversations: whole ones with ``messages``, or ``turns`` with the ``prompt`` of each.

    Messages are replayed with the policy, one call of the model before each of its recorded answers; prompts
    of ``turns`` are sent as they are.

    Args:
        path: JSON or JSONL, also compressed by gzip; ``turns`` only as JSONL.
        most_tokens: of a prompt without policy; a session ends before the first one that is longer.
        most_sessions: the first ones of the file; None for all.

    Raises:
        ConversationError: the file holds something else; names file, line and field.
        PolicyError: the policy tears a call from its result.
    """
    name = path.name.partition(".")[0]
    held = read_conversations(path)
    if held.found and held.flat:
        raise ConversationError(f"{path}: has both messages and turns; give each kind a file of its own")
    sessions: list[tuple[str, list[tuple[list[int], list[int]]]]] = []
    if held.found:
        for each in held.found[:most_sessions]:
            calls = _calls(each.messages)
            pairs = [(said, apply(policy, said, number)) for number, said in enumerate(calls)]
            sessions.append((each.name, [(tokenizer.messages(a), tokenizer.messages(b)) for a, b in pairs]))
    else:
        for title, texts in _flat(path)[:most_sessions]:
            flat = [list(tokenizer.encode(text)) for text in texts]
            sessions.append((title, [(prompt, prompt) for prompt in flat]))
    made, left_out = [], 0
    for title, prompts in sessions:
        allowed = next(
            (i for i, (full, _) in enumerate(prompts) if len(full) + HEAD > most_tokens), len(prompts)
        )
        left_out += len(prompts) - allowed
        if allowed:
            full, sent = zip(*prompts[:allowed], strict=True)
            made.append(Session(title, full, sent))
    return Workload(name, tuple(made), bool(held.found), left_out)


def _calls(messages: Messages) -> list[Messages]:
    """What the model was given before each of its answers."""
    return [messages[:i] for i, message in enumerate(messages) if i and message.get("role") == "assistant"]


def _flat(path: Path) -> list[tuple[str, list[str]]]:
    """Prompts as plain text, by session."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record: Any = json.loads(line)
        except ValueError:
            raise ConversationError(f"{where}: not JSON; turns are read with one session a line") from None
        if not isinstance(record, Mapping) or not isinstance(record.get("turns"), list):
            raise ConversationError(f"{where}: turns: expected a list")
        for at, turn in enumerate(record["turns"]):
            if not isinstance(turn, Mapping) or not isinstance(turn.get("prompt"), str):
                raise ConversationError(f"{where}: turns[{at}].prompt: expected text")
        title = str(record.get("session") or f"{path.name.partition('.')[0]}-{number}")
        found.append((title, [turn["prompt"] for turn in record["turns"]]))
    return found
