"""What a policy would do to a conversation, turn by turn, without a server.

Reuse is counted by whole messages: one that was changed at any place counts as not there before. A server
counts tokens, and finds what is equal within changed messages too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from leyline_lmcache.policies.base import CountTokens, Message, Messages, Policy, apply
from leyline_lmcache.policies.messages import size


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the model. Sizes are in what `count` counts.

    Attributes:
        messages: messages sent.
        full: size of the conversation.
        sent: size of what the policy leaves of it.
        edited: messages of the last turn's prompt or its answer that are now sent otherwise, by their index
            in what was sent then.
        prefix: of `sent`, what is unchanged from the start: what prefix caching reuses.
        kept: of `sent`, what is unchanged anywhere: what a splice reuses.
    """

    messages: int
    full: int
    sent: int
    edited: tuple[int, ...]
    prefix: int
    kept: int


@dataclass(frozen=True, slots=True)
class Sums:
    """The same over several turns."""

    turns: int
    full: int
    sent: int
    edits: int
    prefix: int
    kept: int


def trial(policy: Policy, messages: Messages, count: CountTokens) -> list[Turn]:
    """Hold a conversation once more, with a policy before each call of the model.

    Args:
        policy: applied to all messages before each answer, and to what follows the last one.
        messages: the whole conversation.
        count: measures texts.

    Raises:
        PolicyError: the policy tears a call from its result.
    """
    calls = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    if messages and (not calls or calls[-1] != len(messages) - 1):
        calls.append(len(messages))
    found: list[Turn] = []
    before: list[Message] = []
    for number, call in enumerate(calls):
        said = messages[:call]
        sent = apply(policy, said, number)
        found.append(_turn(said, sent, before, count))
        before = [*sent, *messages[call : call + 1]]
    return found


def sums(turns: Sequence[Turn]) -> Sums:
    """Add turns up."""
    return Sums(
        len(turns),
        sum(turn.full for turn in turns),
        sum(turn.sent for turn in turns),
        sum(len(turn.edited) for turn in turns),
        sum(turn.prefix for turn in turns),
        sum(turn.kept for turn in turns),
    )


def _turn(said: Messages, sent: Messages, before: Messages, count: CountTokens) -> Turn:
    sizes = [size(message, count) for message in sent]
    old, new = [_key(message) for message in before], [_key(message) for message in sent]
    prefix = 0
    while prefix < min(len(old), len(new)) and old[prefix] == new[prefix]:
        prefix += 1
    pairs = _same(old, new) if len(sent) == len(said) else _similar(old, new)
    still, kept = {pair[0] for pair in pairs}, {pair[1] for pair in pairs}
    return Turn(
        messages=len(sent),
        full=sum(size(message, count) for message in said),
        sent=sum(sizes),
        edited=tuple(index for index in range(len(old)) if index not in still),
        prefix=sum(sizes[:prefix]),
        kept=sum(sizes[index] for index in kept),
    )


def _same(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """Messages that are still what they were, where the policy took none out."""
    return [(index, index) for index, (a, b) in enumerate(zip(old, new, strict=False)) if a == b]


def _similar(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """Messages that are still there, in order."""
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    return [(block.a + i, block.b + i) for block in blocks for i in range(block.size)]


def _key(message: Message) -> str:
    return json.dumps(message, sort_keys=True, default=str)
