"""Reading chat messages: their text, their tool calls, and which message is the result of which call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyline_lmcache.policies.base import CountTokens, Message, Messages

REASONING_FIELDS = ("reasoning_content", "reasoning")
"""Where servers put a model's reasoning, beside its content."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a tool gave back.

    Attributes:
        index: of the message.
        tool: name of the tool, if the conversation tells.
        call: where the call is: index of the assistant's message, and number of the call in it.
    """

    index: int
    tool: str | None = None
    call: tuple[int, int] | None = None


def results(messages: Messages, *, observations: bool = False) -> list[Result]:
    """All results, in order.

    Args:
        messages: the conversation.
        observations: a ``user`` message directly after an ``assistant`` one is a result too, as in harnesses
            whose model calls tools in plain text.
    """
    found: list[Result] = []
    calls: dict[str, Result] = {}
    before: Any = None
    for index, message in enumerate(messages):
        role = message.get("role")
        if role == "assistant":
            for number, call in enumerate(tool_calls(message)):
                calls[str(call.get("id"))] = Result(index, name_of(call), (index, number))
        elif role == "tool":
            of = calls.get(str(message.get("tool_call_id")), Result(index, message.get("name")))
            found.append(Result(index, of.tool, of.call))
        elif role == "function":
            found.append(Result(index, message.get("name")))
        elif role == "user" and observations and before == "assistant":
            found.append(Result(index))
        before = role
    return found


def seen_until(messages: Messages) -> int:
    """Index of the last answer of the model; what comes after it, the model has not read yet."""
    return max((i for i, message in enumerate(messages) if message.get("role") == "assistant"), default=-1)


def tool_calls(message: Message) -> Sequence[Mapping[str, Any]]:
    """The calls of a message; none if they are not what they should be."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        return ()
    return calls


def arguments_of(call: Mapping[str, Any]) -> str:
    """The arguments of a call, as the string they are sent as."""
    return _of_function(call, "arguments") or ""


def name_of(call: Mapping[str, Any]) -> str | None:
    """The tool that is called."""
    return _of_function(call, "name")


def text_of(message: Message) -> str:
    """The text of the content; parts are joined by line ends."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        return ""
    parts = (part.get("text") for part in content if isinstance(part, Mapping))
    return "\n".join(part for part in parts if isinstance(part, str))


def is_text(message: Message) -> bool:
    """Whether the content is nothing but text."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return True
    return all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content)


def texts(message: Message) -> Iterator[str]:
    """Everything in a message that becomes text of the prompt."""
    yield text_of(message)
    for field in REASONING_FIELDS:
        if isinstance(message.get(field), str):
            yield message[field]
    for call in tool_calls(message):
        yield name_of(call) or ""
        yield arguments_of(call)


def size(message: Message, count: CountTokens) -> int:
    """Tokens (or whatever `count` counts) of a message, without what the chat template adds."""
    return sum(count(text) for text in texts(message) if text)


def with_arguments(message: Message, arguments: Mapping[int, str]) -> dict[str, Any]:
    """A message whose calls of these numbers have other arguments."""
    calls = list(message["tool_calls"])
    for number, text in arguments.items():
        call = dict(calls[number])
        call["function"] = {**call["function"], "arguments": text}
        calls[number] = call
    return {**message, "tool_calls": calls}


def _of_function(call: Mapping[str, Any], key: str) -> str | None:
    function = call.get("function")
    found = function.get(key) if isinstance(function, Mapping) else None
    return found if isinstance(found, str) else None
