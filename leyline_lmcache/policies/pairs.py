"""Whether a conversation is one that chat endpoints accept: above all, that calls and results go together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def problems(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong with a conversation, in order; messages are named by their index, never quoted.

    A result (role ``tool``) follows the assistant message that has its call, with nothing but other results
    between them; every call has one result, save those of the last assistant message, which may be pending.
    """
    found: list[str] = []
    open_calls: list[Any] = []
    asked = -1
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            found.append(f"{where}.role: unknown role")
        if role == "tool":
            answered = message.get("tool_call_id")
            if answered in open_calls:
                open_calls.remove(answered)
            else:
                found.append(f"{where}.tool_call_id: no call before it waits for this result")
        else:
            found += [f"messages[{asked}].tool_calls: a call has no result" for _ in open_calls]
            open_calls, asked = [], index
            if role == "assistant":
                calls = message.get("tool_calls") or ()
                if not isinstance(calls, list | tuple) or not all(
                    isinstance(call, Mapping) for call in calls
                ):
                    found.append(f"{where}.tool_calls: expected a list of objects")
                    continue
                open_calls += [call.get("id") for call in calls]
                found += [
                    f"{where}.tool_calls[{number}].function.arguments: expected a string"
                    for number, call in enumerate(calls)
                    if not _has_arguments(call)
                ]
        if not isinstance(message.get("content"), str | list | tuple | None):
            found.append(f"{where}.content: expected a string or a list of parts")
        elif role != "assistant" and message.get("content") is None:
            found.append(f"{where}.content: missing")
    return found


def _has_arguments(call: Mapping[str, Any]) -> bool:
    if "function" not in call:
        return True
    function = call["function"]
    return isinstance(function, Mapping) and isinstance(function.get("arguments", ""), str)
