"""A YAML file whose errors name the key and the line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import yaml

E = TypeVar("E", bound=StrEnum)
Path_ = tuple[str | int, ...]


class ConfigError(ValueError):
    """The configuration is wrong; the message names the file, the line, the key and what is accepted."""


class Section:
    """One mapping of a document. Keys are taken out of it; `done` refuses those that nobody took."""

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        name: str = "",
        path: Path_ = (),
        lines: Mapping[Path_, int] | None = None,
    ) -> None:
        """
        Args:
            values: the mapping.
            name: of the document, for messages.
            path: where the mapping is in it.
            lines: line of each path, counted from 1.
        """
        self._values = values
        self._name = name
        self._path = path
        self._lines = lines or {}
        self._taken: list[str] = []

    @property
    def keys(self) -> list[str]:
        return list(self._values)

    def error(self, key: str | int | None, says: str) -> ConfigError:
        """The error of a key of this mapping, or of the mapping itself."""
        path = self._path if key is None else (*self._path, key)
        line = next((self._lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self._lines), None)
        where = f"{self._name}:{line}: " if self._name and line else f"{self._name}: " if self._name else ""
        shown = ""
        for part in path:
            shown += f"[{part}]" if isinstance(part, int) else f".{part}" if shown else str(part)
        return ConfigError(f"{where}{shown}: {says}" if shown else f"{where}{says}")

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

    def flag(self, key: str, default: bool) -> bool:
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"expected true or false, got {value!r}")
        return value

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
        return self._below(key, self.take(key, {}))

    def sections(self, key: str) -> Iterator[Section]:
        """The mappings of the list below a key."""
        value = self.take(key, [])
        if not isinstance(value, list):
            raise self.error(key, f"expected a list, got {value!r}")
        parent = Section({}, name=self._name, path=(*self._path, key), lines=self._lines)
        for index, each in enumerate(value):
            yield parent._below(index, each)

    def _below(self, key: str | int, value: Any) -> Section:
        if not isinstance(value, Mapping):
            raise self.error(key, f"expected a mapping of keys to values, got {value!r}")
        for each in value:
            if not isinstance(each, str):
                raise self.error(key, f"expected names as keys, got {each!r}")
        return Section(value, name=self._name, path=(*self._path, key), lines=self._lines)

    def done(self) -> None:
        """Raises :class:`ConfigError` for a key that is not known."""
        for key in self._values:
            if key not in self._taken:
                known = ", ".join(self._taken)
                raise self.error(key, f"unknown key; known keys are {known}")


def read_document(path: Path) -> Section:
    """Read a YAML file.

    Raises:
        ConfigError: it cannot be read, is not YAML, has a key twice or is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    return parse_document(text, str(path))


def parse_document(text: str, name: str) -> Section:
    """As :func:`read_document`, of a text; ``name`` stands in messages."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{name}{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{name}: not valid YAML: {str(error).splitlines()[0]}") from None
    lines: dict[Path_, int] = {}
    root = Section({}, name=name, lines=lines)
    _note_lines(node, (), lines, root)
    if values is None:
        values = {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{name}: expected a mapping of names to values")
    return Section(values, name=name, lines=lines)


def _note_lines(node: yaml.Node | None, path: Path_, lines: dict[Path_, int], root: Section) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = (*path, str(key.value))
            if below in lines and key.value != "<<":
                line = key.start_mark.line + 1
                raise root.error(None, f"line {line}: {key.value}: stands there twice")
            lines[below] = key.start_mark.line + 1
            _note_lines(value, below, lines, root)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            below = (*path, index)
            lines[below] = item.start_mark.line + 1
            _note_lines(item, below, lines, root)
