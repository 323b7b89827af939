"""``redact``: text that matches a pattern never reaches the model."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from leyline_lmcache.policies.base import Message, Messages, OptionError
from leyline_lmcache.policies.messages import REASONING_FIELDS, arguments_of, tool_calls, with_arguments


@dataclass(frozen=True, slots=True)
class Redact:
    """Replace what matches a pattern: in text, reasoning and the arguments of calls.

    Attributes:
        patterns: regular expressions.
        replacement: what stands there instead, as it is (no references to groups).
        roles: only in messages of these roles; by default in all.
    """

    patterns: tuple[str, ...]
    replacement: str = "[redacted]"
    roles: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.patterns:
            raise OptionError("patterns", "expected one at least")
        for number, pattern in enumerate(self.patterns):
            try:
                compiled = re.compile(pattern)
            except re.error as error:
                raise OptionError("patterns", f"not a regular expression: {error}", number) from None
            if compiled.search(""):
                raise OptionError("patterns", "matches the empty text, and so everywhere", number)
            if compiled.search(self.replacement):
                raise OptionError("patterns", "matches the replacement, which would be replaced too", number)

    def transform(self, messages: Messages, turn_idx: int) -> Messages:
        """See :class:`leyline_lmcache.policies.Policy`."""
        return [
            self._message(message) if not self.roles or message.get("role") in self.roles else message
            for message in messages
        ]

    def erased(self, messages: Messages) -> str:
        """See :class:`leyline_lmcache.policies.Erasing`."""
        if self.roles and "assistant" not in self.roles:
            return ""
        found = hashlib.blake2b(digest_size=8)
        changed = False
        for index, message in enumerate(messages):
            if message.get("role") == "assistant" and (made := self._message(message)) is not message:
                changed = True
                # Where, and what is left: the name must not tell what was there.
                found.update(json.dumps([index, made], sort_keys=True, default=str).encode())
        return found.hexdigest() if changed else ""

    def _message(self, message: Message) -> Message:
        made: dict[str, Any] = dict(message)
        for field in ("content", "refusal", *REASONING_FIELDS):
            if field in made:
                made[field] = self._content(made[field])
        arguments = {
            number: changed
            for number, call in enumerate(tool_calls(message))
            if (changed := self._arguments(arguments_of(call))) != arguments_of(call)
        }
        if arguments:
            made = with_arguments(made, arguments)
        return made if made != message else message

    def _content(self, content: Any) -> Any:
        if isinstance(content, str):
            return self._text(content)
        if not isinstance(content, list | tuple):
            return content
        return [
            {**part, "text": self._text(part["text"])}
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]

    def _arguments(self, arguments: str) -> str:
        """JSON stays JSON: only the strings in it are looked at, as they are meant."""
        try:
            value = json.loads(arguments)
        except ValueError:
            return self._text(arguments)
        changed = self._value(value)
        return arguments if changed == value else json.dumps(changed, ensure_ascii=False)

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list):
            return [self._value(each) for each in value]
        if isinstance(value, dict):
            return {key: self._value(each) for key, each in value.items()}
        return value

    def _text(self, text: str) -> str:
        for pattern in _compiled(self.patterns):
            text = pattern.sub(lambda _: self.replacement, text)
        return text


@lru_cache(maxsize=64)
def _compiled(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern) for pattern in patterns)
