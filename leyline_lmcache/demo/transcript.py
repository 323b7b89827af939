"""One arm's history as tokens, in parts that can be found and replaced."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from leyline_lmcache.view import Edit

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replacement:
    """One edit of a transcript: where, in its positions before the turn's edits, and what comes there."""

    start: int
    end: int
    tokens: Tokens

    @property
    def edit(self) -> Edit:
        """The same as an edit of a view."""
        return Edit(self.start, self.end, len(self.tokens))


class Transcript:
    """A sequence of named parts."""

    def __init__(self, parts: Iterable[tuple[str, Tokens]] = ()) -> None:
        self._parts = list(parts)

    @property
    def tokens(self) -> list[int]:
        """All tokens, in order."""
        return [token for _, tokens in self._parts for token in tokens]

    def append(self, name: str, *messages: Tokens) -> None:
        """Add a part at the end."""
        self._parts.append((name, tuple(token for tokens in messages for token in tokens)))

    def edit(self, changes: dict[str, Tokens]) -> tuple[Replacement, ...]:
        """Replace parts by name, and say which tokens that were, in order."""
        made: list[Replacement] = []
        position = 0
        for index, (name, tokens) in enumerate(self._parts):
            if name in changes:
                made.append(Replacement(position, position + len(tokens), changes[name]))
                self._parts[index] = (name, changes[name])
            position += len(tokens)
        if len(made) != len(changes):
            raise KeyError(f"parts: {', '.join(sorted(changes))}: not all are in the transcript")
        return tuple(made)
