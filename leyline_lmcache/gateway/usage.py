"""What an answer cost: SGLang's usage, with the tokens that were spliced, and without what only we asked for.

SGLang returns the plugin's report as ``choices[].meta_info``, on request, of chat completions that are not
streamed. Streams and completions say how many tokens were cached, and not how many of them were spliced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_REPORT = "leyline"
_META = "meta_info"
# A stream without an end of an event in so many bytes is passed on as it comes.
_END_OF_EVENT = re.compile(rb"\n\n|\r\n\r\n|\r\r")
_LONGEST_EVENT = 4 * 1024 * 1024


@dataclass(slots=True)
class Tokens:
    """Tokens of one answer; None: the server does not say."""

    prompt: int | None = None
    cached: int | None = None
    spliced: int | None = None
    completion: int | None = None

    def note(self, usage: object) -> None:
        """Take what a ``usage`` object says."""
        if not isinstance(usage, Mapping):
            return
        details = usage.get("prompt_tokens_details")
        self.prompt = _count(usage.get("prompt_tokens"))
        self.completion = _count(usage.get("completion_tokens"))
        self.cached = _count(details.get("cached_tokens")) if isinstance(details, Mapping) else None


@dataclass(frozen=True, slots=True)
class Request:
    """What the gateway asked for on its own, and takes out of the answer.

    Attributes:
        meta: the plugin's report.
        usage: the event with the usage at the end of a stream.
    """

    meta: bool = False
    usage: bool = False


def request_usage(body: dict[str, Any], *, chat: bool) -> Request:
    """Make a request ask for its usage; ``body`` is changed."""
    if not body.get("stream"):
        if not chat or body.get("return_meta_info") or body.get("n") not in (None, 1):
            return Request()
        body["return_meta_info"] = True
        return Request(meta=True)
    options = body.get("stream_options")
    if options is None:
        options = {}
    # What is no object is for the server to refuse.
    if not isinstance(options, dict) or options.get("include_usage"):
        return Request()
    body["stream_options"] = {**options, "include_usage": True}
    return Request(usage=True)


def settle_answer(content: bytes, asked: Request) -> tuple[bytes, Tokens]:
    """A whole answer as the client gets it, and its tokens."""
    tokens = Tokens()
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        return content, tokens
    if not isinstance(answer, dict):
        return content, tokens
    tokens.note(answer.get("usage"))
    report = None
    changed = False
    for choice in _objects(answer.get("choices")):
        meta = choice.get(_META)
        if isinstance(meta, dict):
            report = meta.get(_REPORT) or report
        if asked.meta and _META in choice:
            del choice[_META]
            changed = True
    if (asked.meta and changed) or report is not None:
        tokens.spliced = _count(report.get("spliced")) if isinstance(report, dict) else 0
        usage = answer.get("usage")
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details") or {}
            usage["prompt_tokens_details"] = {**details, "spliced_tokens": tokens.spliced or 0}
            changed = True
        if isinstance(report, dict):
            answer[_REPORT] = report
    return (json.dumps(answer, ensure_ascii=False).encode() if changed else content), tokens


class StreamUsage:
    """Reads a stream of events as it passes."""

    def __init__(self, asked: Request) -> None:
        self._asked = asked
        self._rest = b""
        self.tokens = Tokens()

    def pass_on(self, piece: bytes) -> bytes:
        """What the client gets, of the events that are whole by now."""
        text, at, out = self._rest + piece, 0, b""
        for end in _END_OF_EVENT.finditer(text):
            event, at = text[at : end.end()], end.end()
            out += event if self._keeps(event) else b""
        self._rest = text[at:]
        if len(self._rest) > _LONGEST_EVENT:
            out, self._rest = out + self._rest, b""
        return out

    def end(self) -> bytes:
        """What is left when the stream ends."""
        rest, self._rest = self._rest, b""
        return rest if self._keeps(rest) else b""

    def _keeps(self, event: bytes) -> bool:
        # Events of text have "usage":null; they are not parsed.
        if b'"usage":{' not in event.replace(b'"usage": {', b'"usage":{'):
            return True
        try:
            chunk = json.loads(event.removeprefix(b"data:"))
        except (ValueError, RecursionError):
            return True
        if not isinstance(chunk, dict) or not isinstance(chunk.get("usage"), dict):
            return True
        self.tokens.note(chunk["usage"])
        return not (self._asked.usage and not chunk.get("choices"))


def _objects(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None
