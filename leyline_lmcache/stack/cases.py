"""The cases that come with the trained model: edits whose effect on an answer is known."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leyline_lmcache.stack.errors import StackError
from leyline_lmcache.stack.models import trained_dir

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit of a case.

    Attributes:
        span: tokens ``[start, end)`` of the case's prompt that go.
        stub: tokens that take their place.
        message_span: the same span in messages.
        stub_message: the same stub as a message.
    """

    span: tuple[int, int]
    stub: tuple[int, ...]
    message_span: tuple[int, int]
    stub_message: Message

    @property
    def shift(self) -> int:
        """By how much the tokens after the span move."""
        return len(self.stub) - (self.span[1] - self.span[0])


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation in which a variable is set, derived from, and evicted; then its derivative is asked for.

    The derived value was never written out: it is in the KV of the tokens after the span, or nowhere.

    Attributes:
        id: its number.
        size: ``short``, ``medium`` or ``long``.
        prompt: tokens of the conversation.
        edits: one to three, left to right.
        question: tokens of the question, up to where the answer starts.
        edited_prompt: tokens of the conversation with all edits made.
        expected: the token full context answers with, and so must a splice.
        expected_forget: the token a prefill of the edited text answers with ("unknown").
        messages, question_message: the same as chat messages.
    """

    id: int
    size: str
    prompt: tuple[int, ...]
    edits: tuple[Edit, ...]
    question: tuple[int, ...]
    edited_prompt: tuple[int, ...]
    expected: int
    expected_forget: int
    messages: tuple[Message, ...]
    question_message: Message


def load_cases() -> list[Case]:
    """All cases, in order.

    Raises:
        StackError: the trained model is not here, or its cases cannot be read.
    """
    path = trained_dir() / "cases.jsonl.gz"
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            return [_case(json.loads(line)) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StackError(f"{path}: cannot be read: {error}") from error


def _case(row: Mapping[str, Any]) -> Case:
    edits = tuple(
        Edit(tuple(one["span"]), tuple(one["stub"]), tuple(one["message_span"]), one["stub_message"])
        for one in row["edits"]
    )
    return Case(
        id=row["id"],
        size=row["size"],
        prompt=tuple(row["prompt"]),
        edits=edits,
        question=tuple(row["question"]),
        edited_prompt=tuple(row["edited_prompt"]),
        expected=row["expected"],
        expected_forget=row["expected_forget"],
        messages=tuple(row["messages"]),
        question_message=row["question_message"],
    )
