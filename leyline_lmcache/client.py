"""Sessions for a harness that talks to SGLang, or to the gateway, through an ``openai`` client.

The harness keeps its messages whole and sends all of them in every turn. A session names itself to the
server, so that edits are found there, applies a policy before each call, and adds up what was saved::

    openai = OpenAI(base_url="http://127.0.0.1:30000/v1", api_key="-")
    client = Session(openai, policy=KeepToolResults(keep=2))
    answer = client.chat.completions.create(model="default", messages=messages)
    print(client.totals)

:class:`AsyncSession` does the same for ``AsyncOpenAI``. Nothing of ``openai`` is imported here: any client of
its shape will do.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from leyline_lmcache.policies import Message, Policy, apply, erased, load
from leyline_lmcache.policies.messages import size

_FIELD = "leyline"


class EditMode(StrEnum):
    """What the server is asked to do with the edits of a session."""

    AMORTIZE = "amortize"
    """Keep the KV of what stays."""
    OFF = "off"
    """Nothing: what follows an edit is computed again."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one call sent and what the server had of it.

    Attributes:
        edited: messages that the policy changed.
        removed: characters that it took out of them.
        prompt: tokens of the prompt; None: the server did not say.
        cached: of those, tokens that were not computed. SGLang tells with ``--enable-cache-report``.
        spliced: of those, tokens behind an edit. Not told of streams.
        completion: tokens of the answer.
        outcome: what became of the edits: ``spliced``, ``exact`` or ``fallback``; None: there were none.
        reason: why they were not spliced.
    """

    edited: int
    removed: int
    prompt: int | None = None
    cached: int | None = None
    spliced: int | None = None
    completion: int | None = None
    outcome: str | None = None
    reason: str | None = None


@dataclass(slots=True)
class Totals:
    """The same over all calls of a session, as far as the server said.

    Attributes:
        calls: answers; a stream counts once it was read to its end.
    """

    calls: int = 0
    removed: int = 0
    prompt: int = 0
    cached: int = 0
    spliced: int = 0
    completion: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of the prompts' tokens that was not computed."""
        return self.cached / self.prompt if self.prompt else 0.0

    def add(self, report: Report) -> None:
        """Count one more call."""
        self.calls += 1
        self.removed += report.removed
        self.prompt += report.prompt or 0
        self.cached += report.cached or 0
        self.spliced += report.spliced or 0
        self.completion += report.completion or 0


class _Session:
    """What both kinds of session have in common."""

    def __init__(
        self,
        client: Any,
        *,
        policy: Policy | str | Path | None = None,
        session_id: str | None = None,
        mode: EditMode | str = EditMode.AMORTIZE,
    ) -> None:
        """
        Args:
            client: the ``openai`` client, or one like it.
            policy: what is left out of the messages; a path: the policies of a YAML file; None: they are sent
                as they are, which also fits a harness that edits them itself.
            session_id: what the server knows the session by; by default a new, random one.
            mode: see :class:`EditMode`.

        Raises:
            ConfigError: the file is wrong; names line and field.
            ValueError: an unknown mode.
        """
        self.client = client
        self.policy = load(policy) if isinstance(policy, str | Path) else policy
        self.session_id = session_id or f"session-{uuid.uuid4().hex}"
        self.mode = EditMode(mode)
        self.totals = Totals()
        self.last: Report | None = None

    @property
    def chat(self) -> _Chat:
        """As of the client, so that a session can stand in its place."""
        return _Chat(self)

    def __getattr__(self, name: str) -> Any:
        # Only asked for what a session has not itself.
        if name == "client":
            raise AttributeError(name)
        return getattr(self.client, name)

    def _request(self, fields: dict[str, Any]) -> tuple[dict[str, Any], _Call]:
        """What is sent, and the record of it."""
        whole = [_plain(message) for message in fields["messages"]]
        sent: Sequence[Message] = whole if self.policy is None else apply(self.policy, whole)
        changed = [new for old, new in zip(whole, sent, strict=False) if old != new]
        removed = max(0, _characters(whole) - _characters(sent))
        edited = len(changed) + abs(len(whole) - len(sent))
        extra = dict(fields.get("extra_body") or {})
        gone = erased(self.policy, whole) if self.policy is not None else ""
        extra.setdefault("session_id", f"{self.session_id}.{gone}" if gone else self.session_id)
        custom = {_FIELD: {"mode": self.mode.value}, **(extra.get("custom_params") or {})}
        extra["custom_params"] = custom
        request = {**fields, "messages": [dict(message) for message in sent], "extra_body": extra}
        swallow = False
        if fields.get("stream"):
            options = fields.get("stream_options") or {}
            swallow = not options.get("include_usage")
            request["stream_options"] = {**options, "include_usage": True}
        elif (fields.get("n") or 1) == 1:
            extra.setdefault("return_meta_info", True)
        return request, _Call(Report(edited, removed), self._note, swallow)

    def _note(self, report: Report) -> None:
        self.last = report
        self.totals.add(report)


class Session(_Session):
    """A session over an ``OpenAI`` client; to be used in its place.

    ``chat.completions.create`` takes and returns what the client's does; everything else is the client's own.
    Not to be shared by threads: each conversation is a session of its own.
    """

    def create(self, **fields: Any) -> Any:
        """One call: the client's ``chat.completions.create``.

        Raises:
            PolicyError: the policy made something of the messages that no endpoint takes.
        """
        request, call = self._request(fields)
        answer = self.client.chat.completions.create(**request)
        if fields.get("stream"):
            return _Stream(answer, call)
        call.note(answer)
        return answer


class AsyncSession(_Session):
    """A session over an ``AsyncOpenAI`` client; see :class:`Session`."""

    async def create(self, **fields: Any) -> Any:
        """One call: the client's ``chat.completions.create``."""
        request, call = self._request(fields)
        answer = await self.client.chat.completions.create(**request)
        if fields.get("stream"):
            return _AsyncStream(answer, call)
        call.note(answer)
        return answer


class _Chat:
    """Stands for ``client.chat``."""

    def __init__(self, session: _Session) -> None:
        self.completions = _Completions(session)


class _Completions:
    """Stands for ``client.chat.completions``."""

    def __init__(self, session: _Session) -> None:
        self.create: Callable[..., Any] = session.create

    def __getattr__(self, name: str) -> Any:
        # Handing the client's out would send the conversation past the policy, unnoticed.
        raise AttributeError(
            f"chat.completions.{name}: a session has create() only; session.client has the rest, unedited"
        )


@dataclass(slots=True)
class _Call:
    """A call until its answer is there.

    Attributes:
        report: what is known of it.
        done: is told when all is.
        swallow: the last event of the stream is there because we asked for it.
    """

    report: Report
    done: Callable[[Report], None]
    swallow: bool = False
    usage: Any = None

    def note(self, answer: Any) -> None:
        """The answer is there: tell what it cost."""
        choices = getattr(answer, "choices", None) or ()
        meta = _get(choices[0], "meta_info") if choices else None
        report = _get(meta, _FIELD) or _get(answer, _FIELD)
        self.usage = getattr(answer, "usage", None)
        self.finish(report)

    def event(self, chunk: Any) -> bool:
        """A part of a stream is there; whether the harness is to see it."""
        usage = getattr(chunk, "usage", None)
        if usage is None:
            return True
        self.usage = usage
        return bool(getattr(chunk, "choices", None)) or not self.swallow

    def finish(self, report: Any = None) -> None:
        """Everything was said."""
        details = _get(self.usage, "prompt_tokens_details")
        spliced = _get(details, "spliced_tokens")
        self.done(
            Report(
                self.report.edited,
                self.report.removed,
                prompt=_get(self.usage, "prompt_tokens"),
                cached=_get(details, "cached_tokens"),
                spliced=_get(report, "spliced") if spliced is None else spliced,
                completion=_get(self.usage, "completion_tokens"),
                outcome=_get(report, "outcome"),
                reason=_get(report, "reason"),
            )
        )


class _Stream:
    """A stream of the client that is read along."""

    def __init__(self, stream: Any, call: _Call) -> None:
        self._stream = stream
        self._events = self._read(call)

    def _read(self, call: _Call) -> Iterator[Any]:
        for chunk in self._stream:
            if call.event(chunk):
                yield chunk
        call.finish()

    def __iter__(self) -> Iterator[Any]:
        return self._events

    def __next__(self) -> Any:
        return next(self._events)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _AsyncStream:
    """The same for an asynchronous client."""

    def __init__(self, stream: Any, call: _Call) -> None:
        self._stream = stream
        self._events = self._read(call)

    async def _read(self, call: _Call) -> AsyncIterator[Any]:
        async for chunk in self._stream:
            if call.event(chunk):
                yield chunk
        call.finish()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._events

    async def __anext__(self) -> Any:
        return await anext(self._events)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _plain(message: Any) -> Message:
    """A message as plain data: harnesses append the answer's message object as it is."""
    if isinstance(message, Mapping):
        return message
    if not hasattr(message, "model_dump"):
        raise TypeError(f"messages: expected objects with a role, got {type(message).__name__}")
    dumped: dict[str, Any] = message.model_dump(mode="json", exclude_none=True)
    return dumped


def _characters(messages: Sequence[Message]) -> int:
    return sum(size(message, len) for message in messages)


def _get(value: Any, name: str) -> Any:
    """A field of an object or of a mapping; None if there is none."""
    if isinstance(value, Mapping):
        return value.get(name)
    return getattr(value, name, None)
