"""What names the session of a request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from leyline_lmcache.gateway.errors import ApiError
from leyline_lmcache.gateway.settings import Source

HEADER = "x-leyline-session"
_LONGEST = 256
_HEAD_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation that edits its own history.

    Attributes:
        name: what the client may send as the header to go on with it.
        wire: the ``session_id`` sent to the server: of fixed length, and a caller's own.
    """

    name: str
    wire: str


def identify(
    body: Mapping[str, Any], header: str | None, caller: str, sources: Sequence[Source]
) -> Session | None:
    """The session of a request; None if nothing names one.

    Args:
        body: of the request, as the client sent it, before any policy.
        header: value of ``x-leyline-session``.
        caller: whose session it is; two callers' sessions of the same name are different ones.
        sources: what may name it, the first that does.

    Raises:
        ApiError: the header is no name.
    """
    name = None
    for source in sources:
        if source is Source.HEADER:
            # SGLang's own field, of clients that were written for it, is as good as the header.
            name = _checked(header) if header is not None else _text(body.get("session_id"))
        elif source is Source.USER:
            user = _text(body.get("user"))
            name = None if user is None else f"user:{user}"
        else:
            head = conversation_head(body)
            name = None if head is None else f"head-{_hash(head)[:24]}"
        if name is not None:
            return Session(name, "ley-" + _hash(f"{caller}\0{name}")[:32])
    return None


def renamed(session: Session, gone: str) -> Session:
    """The session as the server knows it once ``gone`` was erased: another one, with nothing to keep."""
    return replace(session, wire="ley-" + _hash(f"{session.wire}\0{gone}")[:32]) if gone else session


def conversation_head(body: Mapping[str, Any]) -> str | None:
    """What stays the same while a chat goes on: its model, first system message and first user message."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return None
    first: dict[str, Any] = {}
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if role in ("system", "developer", "user"):
            first.setdefault("user" if role == "user" else "system", message.get("content"))
        if "user" in first:
            return json.dumps([body.get("model"), first], sort_keys=True)
    return None


def routing_key(body: Mapping[str, Any], caller: str, session: Session | None) -> str:
    """Requests with the same key go to the same server: those of a session, else those that begin alike."""
    if session is not None:
        return session.wire
    prompt = body.get("prompt")
    if isinstance(prompt, str | list):
        return _hash(f"{caller}\0{json.dumps(prompt[:_HEAD_CHARACTERS])}")
    return _hash(f"{caller}\0{conversation_head(body)}")


def is_header(name: str) -> bool:
    """Whether a session's name can be sent as a header."""
    return 0 < len(name) <= _LONGEST and name.isascii() and name.isprintable()


def _checked(header: str) -> str:
    if not is_header(header):
        raise ApiError(
            400, "invalid_session", f"{HEADER}: expected 1 to {_LONGEST} printable ASCII characters"
        )
    return header


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()
