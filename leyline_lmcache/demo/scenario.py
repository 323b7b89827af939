"""The conversation: an agent reads tool outputs, notes what follows from them, and drops the outputs.

The vocabulary and the forms of messages are those the tiny model was trained on (see models/tiny_mla): a tool
output sets a variable (`kappa = 42;`), a note derives another from it without saying the value
(`port = kappa;`), a question asks for a variable. What makes it a test of the contract: when a question is
asked, the output that set the value has just been dropped, so the value is nowhere in the text. It is only in
the KV of the note, which attended to the output while it was there.

The sizes are such that the tiny model, given the whole history, nearly always answers right. Where it is not
sure, a question says nothing about the stack, so a seed has several versions to choose from (see `arms`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

MOST_TURNS = 16
"""More would need longer histories than the tiny model can be asked about."""

_LAG = 8
"""How many turns old a tool output is when it is dropped."""


def _words(text: str) -> Sequence[str]:
    return tuple(text.split())


_NAMES: Sequence[str] = _words(
    """
    alpha beta gamma delta omega sigma theta kappa count total limit index offset size depth width height
    score level rate price port row col page step seed temp load rank slot node edge batch epoch gain cost
    mass a b c d e f g h i j k l m n o p q r s t u v w x y z
    """
)
_CHATTER: Sequence[str] = _words(
    """
    read set get log status ok error files found done list open test passed failed line build cache user file
    took ready info warn memory disk id old new run check result report older tool removed to save context
    policy by summary in of on for from no all items kept dropped next last
    """
)


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Round:
    """One step of the agent.

    Attributes:
        call: the agent calls a tool.
        output: what the tool says: the part that is dropped when it is stale.
        note: what the agent derives from it.
        aside: a call that came to nothing.
        asked: the variable whose value follows from the output.
        value: that value.
    """

    call: Message
    output: Message
    note: Message
    aside: Message
    asked: str
    value: str


class Place(StrEnum):
    """Where everybody's KV lies when a turn's edit comes."""

    GPU = "gpu"
    """In SGLang's pool, where the draft left it."""
    CPU = "cpu"
    """In LMCache's L1: the pool was emptied after the draft."""
    REDIS = "redis"
    """In Redis: L1 was emptied too."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: a new round, a question, and what the agent drops from its history before it answers.

    Attributes:
        number: from 1.
        round: index of the round that is new in this turn.
        stale: index of the round whose output is replaced by `stub`.
        stub: what stands in its place.
        deleted: index of a round whose aside is removed without a replacement; None: of none.
        question: asks for what follows from the stale output.
        expected: the right answer, given everything that was ever said.
        place: where the KV is driven between the draft and the edit.
    """

    number: int
    round: int
    stale: int
    stub: Message
    deleted: int | None
    question: Message
    expected: str
    place: Place


@dataclass(frozen=True, slots=True)
class Scenario:
    """A whole conversation.

    Attributes:
        system: the first message.
        rounds: all rounds; the first `before` of them precede the first turn.
        before: how many that are.
        turns: the turns.
    """

    system: Message
    rounds: tuple[Round, ...]
    before: int
    turns: tuple[Turn, ...]


def write_scenario(turns: int, seed: int, version: int = 0) -> Scenario:
    """A conversation of so many turns; the same seed and version give the same one.

    Raises:
        ValueError: for a number of turns outside 1 to `MOST_TURNS`.
    """
    if not 1 <= turns <= MOST_TURNS:
        raise ValueError(f"turns: expected 1 to {MOST_TURNS}, got {turns}")
    chance = random.Random(f"{seed}.{version}")
    names = iter(chance.sample(_NAMES, len(_NAMES)))
    rounds = tuple(_round(chance, names) for _ in range(_LAG + turns))
    system = Message("system", "You track variables. Answer with the value or unknown.")
    return Scenario(system, rounds, _LAG, tuple(_turn(chance, rounds, i) for i in range(turns)))


def _round(chance: random.Random, names: Iterator[str]) -> Round:
    source, asked = next(names), next(names)
    value = str(chance.randrange(100))
    return Round(
        call=_call(chance),
        output=Message("tool", f"{_chatter(chance, 10, 20)} {source} = {value};"),
        note=Message("assistant", f"{asked} = {source};"),
        aside=_call(chance),
        asked=asked,
        value=value,
    )


def _call(chance: random.Random) -> Message:
    return Message("assistant", f"call {chance.choice(_CHATTER)}")


def _turn(chance: random.Random, rounds: tuple[Round, ...], i: int) -> Turn:
    # Mostly the stub is shorter than what it replaces; a summary now and then is longer.
    if i % 4 == 3:
        stub = f"[evicted: 1 older tool turns summary of older turns kept {_chatter(chance, 18, 24)}]"
    else:
        stub = "[evicted: 1 older tool turns]"
    return Turn(
        number=i + 1,
        round=i + _LAG,
        stale=i,
        stub=Message("tool", stub),
        deleted=i + _LAG // 2 if i % 3 == 2 else None,
        question=Message("user", f"{rounds[i].asked} ?"),
        expected=rounds[i].value,
        place=list(Place)[i % len(Place)],
    )


def _chatter(chance: random.Random, least: int, most: int) -> str:
    """Words and numbers that say nothing, of `least` to `most` tokens."""
    count = chance.randint(least, most)
    words = [chance.choice(_CHATTER)]
    while len(words) < count:
        words.append(chance.choice(_CHATTER) if chance.random() < 0.8 else str(chance.randrange(100)))
    return " ".join(words)
