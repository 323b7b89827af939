"""Conversations from files, in the shapes in which they are commonly kept."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyline_lmcache.policies.base import Message


class ConversationError(ValueError):
    """A file holds no conversations; the message names file, line and field, and quotes nothing."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A whole conversation.

    Attributes:
        name: of the session.
        messages: all of them; every assistant message answered all messages before it.
    """

    name: str
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Conversations:
    """What a file holds.

    Attributes:
        found: conversations of messages.
        flat: records with prompts as plain text, in which there are no messages to transform.
    """

    found: tuple[Conversation, ...]
    flat: int = 0


def read_conversations(path: Path) -> Conversations:
    """Read a JSON or JSONL file, also one compressed by gzip.

    A conversation is a list of messages, or an object with ``messages`` (and ``session`` or ``id``). The file
    is one of them, a list of them, or has one on each line; or one message on each line.

    Raises:
        ConversationError: it holds something else.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ConversationError(f"{path}: not complete: gzip cannot read it") from None
    except OSError as error:
        raise ConversationError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConversationError(f"{path}: not UTF-8") from None
    records = list(_records(text, path))
    if records and all(_is_message(record) for _, record in records):
        records = [(str(path), [record for _, record in records])]
    found: list[Conversation] = []
    flat = 0
    for where, record in records:
        if isinstance(record, Mapping) and "messages" not in record and "turns" in record:
            flat += 1
            continue
        found.append(_conversation(record, where, f"{path.name.split('.')[0]}-{len(found)}"))
    if not found and not flat:
        raise ConversationError(f"{path}: is empty")
    return Conversations(tuple(found), flat)


def _records(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Each record with where it is."""
    try:
        whole = json.loads(text)
    except ValueError:
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    yield f"{path}:{number}", json.loads(line)
                except ValueError as error:
                    detail = getattr(error, "msg", "too large a number")
                    raise ConversationError(f"{path}:{number}: not JSON: {detail}") from None
        return
    if isinstance(whole, list) and whole and not _is_message(whole[0]):
        for number, record in enumerate(whole):
            yield f"{path}: [{number}]", record
        return
    yield str(path), whole


def _is_message(record: Any) -> bool:
    return isinstance(record, Mapping) and "role" in record


def _conversation(record: Any, where: str, name: str) -> Conversation:
    messages, inside = record, ""
    if isinstance(record, Mapping):
        if "messages" not in record:
            raise ConversationError(f"{where}: expected messages, or an object with messages")
        messages, inside = record["messages"], "messages"
        name = str(record.get("session") or record.get("id") or name)
    if not isinstance(messages, list):
        raise ConversationError(f"{where}: {inside or 'conversation'}: expected a list")
    for number, message in enumerate(messages):
        if not _is_message(message):
            raise ConversationError(f"{where}: {inside}[{number}]: expected an object with a role")
    return Conversation(name, tuple(messages))
