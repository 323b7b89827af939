"""Stubs: what stands where a result was.

A stub depends on the message it replaces and on nothing else, so that it stays the same in all later turns.
Results no longer than ``min_chars`` are left alone, and no stub is longer than that: so a stub is never
stubbed again, neither by its own policy nor by another one.
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from typing import Any

from leyline_lmcache.policies.base import Message, Messages, OptionError
from leyline_lmcache.policies.messages import (
    Result,
    arguments_of,
    is_text,
    text_of,
    tool_calls,
    with_arguments,
)

MIN_CHARS = 80
NO_ARGUMENTS = "{}"

_PLACES = ("chars", "lines")
_LARGEST = 10**12


def check_stub(stub: str, min_chars: int) -> None:
    """Raise :class:`OptionError` for a stub that cannot be filled in, or is too long."""
    if min_chars < 0:
        raise OptionError("min_chars", f"expected 0 or more, got {min_chars}")
    known = f"known placeholders are {', '.join('{' + place + '}' for place in _PLACES)}"
    try:
        places = [place for _, place, _, _ in string.Formatter().parse(stub) if place is not None]
    except ValueError as error:
        raise OptionError("stub", f"{error}; {known}, a brace is written twice") from None
    for place in places:
        if place not in _PLACES:
            raise OptionError("stub", f"unknown placeholder {place!r}; {known}")
    if not stub.strip():
        raise OptionError("stub", "expected some text: the model has to see that something was there")
    longest = longest_stub(stub)
    if longest > min_chars:
        raise OptionError(
            "stub",
            f"may have {longest} characters, more than min_chars ({min_chars}): shorten it",
        )


def longest_stub(stub: str) -> int:
    """Characters of the longest text that a stub becomes."""
    return len(_fill(stub, _LARGEST, _LARGEST))


def worth_stubbing(message: Message, min_chars: int) -> bool:
    """Whether a result is more than a stub would be."""
    return not is_text(message) or len(text_of(message)) > min_chars


def stubbed(message: Message, stub: str) -> dict[str, Any]:
    """The message with a stub as its content; everything else of it stays."""
    text = text_of(message)
    return {**message, "content": _fill(stub, len(text), text.count("\n") + 1)}


def stub_results(
    messages: Messages, chosen: Iterable[Result], stub: str, min_chars: int, *, clear_inputs: bool = False
) -> list[Message]:
    """The conversation with these results stubbed, and with `clear_inputs` their calls' arguments gone."""
    made: list[Message] = list(messages)
    for result in chosen:
        if worth_stubbing(messages[result.index], min_chars):
            made[result.index] = stubbed(messages[result.index], stub)
        if clear_inputs and result.call is not None:
            index, number = result.call
            if has_arguments(messages[index], number):
                made[index] = with_arguments(made[index], {number: NO_ARGUMENTS})
    return made


def has_arguments(message: Message, number: int) -> bool:
    """Whether a call has arguments that can be taken out."""
    return len(arguments_of(tool_calls(message)[number])) > len(NO_ARGUMENTS)


def _fill(stub: str, chars: int, lines: int) -> str:
    return stub.format(chars=f"{chars:,}", lines=f"{lines:,}")
