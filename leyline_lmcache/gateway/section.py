"""Reading a mapping of a configuration, key by key, with errors that name the key and its line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, TypeVar

from leyline_lmcache.policies import ConfigError, Document

E = TypeVar("E", bound=StrEnum)


class Section:
    """One mapping of a document. Keys are taken out of it; `done` refuses those that nobody took."""

    def __init__(self, document: Document, values: Any, at: tuple[str | int, ...] = ()) -> None:
        """
        Args:
            document: what it is from.
            values: the mapping.
            at: where in the document it is.

        Raises:
            ConfigError: it is something else than a mapping of names.
        """
        self.document = document
        self.at = at
        if not isinstance(values, Mapping):
            raise self.error(None, f"expected a mapping of names to values, got {values!r}")
        if not all(isinstance(key, str) for key in values):
            raise self.error(None, "expected names as keys")
        self._values: Mapping[str, Any] = values
        self._taken: list[str] = []

    @property
    def keys(self) -> list[str]:
        return list(self._values)

    def error(self, key: str | None, says: str) -> ConfigError:
        """The error of a key of this mapping, or of the mapping itself."""
        return self.document.error(self.at if key is None else (*self.at, key), says)

    def take(self, key: str, default: Any = None) -> Any:
        """The value as it stands there."""
        self._taken.append(key)
        value = self._values.get(key)
        return default if value is None else value

    def text(self, key: str, default: str | None = None) -> str | None:
        value = self.take(key, default)
        if value is not None and (not isinstance(value, str) or not value.strip()):
            raise self.error(key, f"expected a text, got {value!r}")
        return value

    def texts(self, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
        value = self.take(key, list(default))
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.error(key, f"expected a list of names, got {value!r}")
        return tuple(value)

    def count(self, key: str, default: int, least: int, most: int) -> int:
        value = self.take(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.error(key, f"expected an integer from {least} to {most}, got {value!r}")
        return value

    def seconds(self, key: str, default: float, least: float, most: float) -> float:
        value = self.take(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise self.error(key, f"expected seconds from {least:g} to {most:g}, got {value!r}")
        return float(value)

    def choice(self, key: str, kind: type[E], default: E) -> E:
        value = self.take(key, default)
        # YAML reads a bare off as false.
        text = "off" if value is False else value
        try:
            return kind(text)
        except ValueError:
            raise self.error(key, f"expected one of {', '.join(kind)}, got {value!r}") from None

    def section(self, key: str) -> Section:
        """The mapping below a key; an empty one if the key is missing."""
        return Section(self.document, self.take(key, {}), (*self.at, key))

    def sections(self, key: str) -> Iterator[Section]:
        """The mappings of the list below a key."""
        value = self.take(key, [])
        if not isinstance(value, list):
            raise self.error(key, f"expected a list, got {value!r}")
        for index, each in enumerate(value):
            yield Section(self.document, each, (*self.at, key, index))

    def done(self) -> None:
        """Raises :class:`ConfigError` for a key that is not known."""
        for key in self._values:
            if key not in self._taken:
                known = ", ".join(self._taken)
                raise self.error(key, f"unknown key; known keys are {known}")
