"""A YAML file that knows where in it each value is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Where = tuple[str | int, ...]
"""Keys and indices from the top of a file to a value."""


class ConfigError(ValueError):
    """A configuration is wrong; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML document.

    Attributes:
        name: of the file.
        value: what it says, as plain data.
    """

    name: str
    value: Any
    _root: yaml.Node | None = None

    @classmethod
    def read(cls, path: Path) -> Document:
        """Read a file.

        Raises:
            ConfigError: it cannot be read or is not YAML.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path}: not UTF-8") from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str) -> Document:
        """Read a text; `name` stands for the file in messages.

        Raises:
            ConfigError: it is not YAML.
        """
        try:
            loader = yaml.SafeLoader(text)
            root = loader.get_single_node()
            if root is None:
                return cls(name, None)
            _refuse_twice(root, name)
            # Anchors and merges are resolved only here; marks are looked up in the tree above.
            return cls(name, loader.construct_document(root), root)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = f":{mark.line + 1}" if mark else ""
            raise ConfigError(f"{name}{line}: not valid YAML: {error.problem or error.context}") from None
        except ConfigError:
            raise
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            detail = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(f"{name}: not valid YAML: {detail}") from None

    def line(self, where: Where) -> int | None:
        """The line of a value, from 1; of what is nearest above it, if it is not in the file."""
        if self._root is None:
            return None
        return _find(self._root, where).start_mark.line + 1

    def error(self, where: Where, detail: str) -> ConfigError:
        """What to raise about a value."""
        line = self.line(where)
        field = path_text(where)
        return ConfigError(
            f"{self.name}{f':{line}' if line else ''}: {f'{field}: ' if field else ''}{detail}"
        )


def path_text(where: Where) -> str:
    """`policies[1].keep` for ``("policies", 1, "keep")``."""
    text = ""
    for step in where:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def _find(node: yaml.Node, where: Where) -> yaml.Node:
    """The key of a mapping's value rather than the value itself: it is where people look."""
    shown = node
    for step in where:
        if isinstance(node, yaml.MappingNode):
            pair = next((pair for pair in node.value if pair[0].value == str(step)), None)
            if pair is None:
                break
            shown, node = pair
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            shown = node = node.value[step]
        else:
            break
    return shown


def _refuse_twice(root: yaml.Node, name: str) -> None:
    """YAML says that keys are unique; the parser lets the last one win."""
    todo, seen = [root], {id(root)}
    while todo:
        node = todo.pop()
        inside: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in keys and key.value != "<<":
                        raise ConfigError(f"{name}:{key.start_mark.line + 1}: {key.value}: is there twice")
                    keys.add(key.value)
                inside.append(value)
        elif isinstance(node, yaml.SequenceNode):
            inside = node.value
        for child in inside:
            if id(child) not in seen:
                seen.add(id(child))
                todo.append(child)
