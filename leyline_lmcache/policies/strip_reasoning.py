"""``strip_reasoning``: the last answers keep their reasoning, older ones lose it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leyline_lmcache.policies.base import Message, Messages, OptionError
from leyline_lmcache.policies.messages import REASONING_FIELDS

_SPACE = re.compile(r"\s*")
_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})


@dataclass(frozen=True, slots=True)
class StripReasoning:
    """Strip the model's reasoning from older answers, wherever it is.

    That is: in fields beside the content, in tags within it, or in parts of it.

    Attributes:
        keep: the last answers with reasoning that keep it.
        keep_since_user: answers after the last ``user`` message keep it too, however many they are. Some
            models want that while they call tools.
        tags: names of tags around reasoning.
        fields: names of fields with reasoning.
    """

    keep: int = 1
    keep_since_user: bool = False
    tags: tuple[str, ...] = ("think", "thinking", "reasoning")
    fields: tuple[str, ...] = REASONING_FIELDS

    def __post_init__(self) -> None:
        if self.keep < 0:
            raise OptionError("keep", f"expected 0 or more, got {self.keep}")
        for number, tag in enumerate(self.tags):
            if not re.fullmatch(r"[\w.|:-]+", tag):
                raise OptionError("tags", "expected a name, without the brackets", number)
        for number, field in enumerate(self.fields):
            if field in ("role", "content", "tool_calls"):
                raise OptionError("fields", f"{field} is no field with reasoning", number)

    def transform(self, messages: Messages, turn_idx: int) -> Messages:
        """See :class:`leyline_lmcache.policies.Policy`."""
        roles = [message.get("role") for message in messages]
        users = [index for index, role in enumerate(roles) if role == "user"]
        end = users[-1] if self.keep_since_user and users else len(messages)
        made = list(messages)
        kept = 0
        for index in reversed(range(len(messages))):
            if roles[index] != "assistant":
                continue
            stripped = self._strip(messages[index])
            if stripped is None:
                continue
            if kept < self.keep or index > end:
                kept += 1
            else:
                made[index] = stripped
        return made

    def _strip(self, message: Message) -> dict[str, Any] | None:
        """The message without reasoning; None if it has none."""
        made = {key: value for key, value in message.items() if key not in self.fields or not value}
        content = message.get("content")
        if isinstance(content, str):
            made["content"] = self._untag(content)
        elif isinstance(content, list | tuple):
            parts = [self._part(part) for part in content if not _is_reasoning(part)]
            # No endpoint takes an empty list.
            made["content"] = parts or ""
            if content and parts == list(content):
                made["content"] = content
        return made if made != message else None

    def _part(self, part: Any) -> Any:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            return part
        text = self._untag(part["text"])
        return part if text == part["text"] else {**part, "text": text}

    def _untag(self, text: str) -> str:
        for tag in self.tags:
            text = _without(text, f"<{tag}>", f"</{tag}>")
        return text


def _is_reasoning(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _PARTS


def _without(text: str, opening: str, closing: str) -> str:
    """The text without what is between tags, in one pass however many there are."""
    end = text.find(closing)
    if end < 0:
        return text
    start = text.find(opening)
    if not 0 <= start < end:
        # The prompt may have opened the reasoning, and then there is a closing tag only.
        start = 0
    kept: list[str] = []
    at = 0
    while start >= 0 and end >= 0:
        kept.append(text[at:start])
        after = _SPACE.match(text, end + len(closing))
        at = after.end() if after else end
        start = text.find(opening, at)
        end = text.find(closing, start) if start >= 0 else -1
    return "".join((*kept, text[at:]))
