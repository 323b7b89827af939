"""From text to token ids.

The template is the simplest one that has roles: ``role: content`` and a line end for each message, then
``assistant: `` for the answer to come. Each text is encoded by itself, so that a message has the same tokens
wherever it stands, as with the special tokens of real templates.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from leyline_lmcache.policies.base import Message, Messages
from leyline_lmcache.policies.messages import texts

HEAD = 8
"""Tokens before each prompt that no other session has: so sessions find nothing of each other's."""
_BYTES = 256


class TokenizerError(ValueError):
    """A tokenizer cannot be used."""


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Encodes texts.

    Attributes:
        name: as results show it.
        vocabulary: ids are below it.
        encode: from a text to its ids.
    """

    name: str
    vocabulary: int
    encode: Callable[[str], tuple[int, ...]]

    def messages(self, messages: Messages) -> list[int]:
        """The prompt of chat messages, ready for an answer."""
        made: list[int] = []
        for message in messages:
            made += self.encode(f"{message.get('role')}: ")
            made += self.encode(_content(message))
            made += self.encode("\n")
        return [*made, *self.encode("assistant: ")]


def byte_tokenizer() -> Tokenizer:
    """A token for each byte of UTF-8, its id the byte: what the random models of the stack have."""
    return Tokenizer("bytes", _BYTES, lambda text: tuple(text.encode("utf-8", "surrogatepass")))


def file_tokenizer(path: Path) -> Tokenizer:
    """One of the library tokenizers, from a ``tokenizer.json`` or the folder it is in.

    Raises:
        TokenizerError: it cannot be read, or the library is not installed.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        import tokenizers
    except ImportError:
        raise TokenizerError("tokenizer: needs the package tokenizers, which is not installed") from None
    if not file.is_file():
        raise TokenizerError(f"tokenizer {path}: no such file")
    try:
        made = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        # The library raises nothing narrower.
        raise TokenizerError(f"tokenizer {path}: not a tokenizer: {error}") from None

    @lru_cache(maxsize=4096)
    def encode(text: str) -> tuple[int, ...]:
        return tuple(made.encode(text, add_special_tokens=False).ids)

    return Tokenizer(file.parent.name, made.get_vocab_size(), encode)


def head(*of: object) -> list[int]:
    """Tokens that stand before a session's prompts, ``[HEAD]``; others for other arguments."""
    digest = blake2b(json.dumps([str(each) for each in of]).encode(), digest_size=HEAD).digest()
    return list(digest)


def _content(message: Message) -> str:
    return "\n".join(text for text in texts(message) if text)
