"""Policies from a configuration.

A list, in the order in which they are applied; each by its name alone, or with options below it::

    policies:
      - clear_tool_uses:
          trigger: {type: input_tokens, value: 30000}
      - strip_reasoning
      - redact:
          patterns: ['sk-[A-Za-z0-9]{20,}']
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from leyline_lmcache.policies.base import OptionError, Pipeline, Policy
from leyline_lmcache.policies.clear_tool_uses import ClearToolUses
from leyline_lmcache.policies.document import ConfigError, Document, Where, path_text
from leyline_lmcache.policies.registry import Factory, available, options

if TYPE_CHECKING:
    from pydantic import TypeAdapter

KEY = "policies"
ANTHROPIC_CLEAR_TOOL_USES = "clear_tool_uses_20250919"

_UNKNOWN = "unexpected_keyword_argument"
_MESSAGES = {"missing": "is missing, and has no default", _UNKNOWN: "unknown option"}


def load(path: str | Path) -> Pipeline:
    """The policies of a YAML file whose only key is ``policies``.

    Raises:
        ConfigError: naming file, line and field.
    """
    document = Document.read(Path(path))
    if not isinstance(document.value, Mapping):
        raise document.error((), f"expected a mapping with the key {KEY}")
    for key in document.value:
        if key != KEY:
            raise document.error((str(key),), f"unknown key; the only one is {KEY}")
    if KEY not in document.value:
        raise document.error((), f"expected the key {KEY}")
    return build(document.value[KEY], document=document, at=(KEY,))


def build(config: Any, *, document: Document | None = None, at: Where = (KEY,)) -> Pipeline:
    """The policies of a list, as it stands in a configuration.

    Args:
        config: names, or mappings of one name to its options; None or an empty list: no policy.
        document: the file it is from, so that errors name a line.
        at: where in the file it is.

    Raises:
        ConfigError: naming the field, and file and line if there is a document.
    """
    source = document or Document("", None)
    if config is None:
        return Pipeline()
    if isinstance(config, str | Mapping) or not isinstance(config, Sequence):
        raise _error(source, at, f"expected a list of policies, got {type(config).__name__}")
    made: list[Policy] = []
    for number, entry in enumerate(config):
        policy = _entry(entry, source, (*at, number))
        if made and isinstance(policy, ClearToolUses):
            # It goes through earlier turns again, and has to find in them what it found then.
            raise _error(source, (*at, number), "clear_tool_uses has to be the first policy, and there once")
        made.append(policy)
    return Pipeline(tuple(made))


def from_context_management(value: Any, *, at: Where = ("context_management",)) -> Pipeline:
    """The policy that a request asks for in Anthropic's ``context_management``.

    Args:
        value: ``{"edits": [{"type": "clear_tool_uses_20250919", ...}]}``.
        at: where in the request it is.

    Raises:
        ConfigError: naming the field.
    """
    source = Document("", None)
    if not isinstance(value, Mapping):
        raise _error(source, at, f"expected an object, got {type(value).__name__}")
    for key in value:
        if key != "edits":
            raise _error(source, (*at, str(key)), "unknown field; the only one is edits")
    edits = value.get("edits") or []
    if isinstance(edits, str) or not isinstance(edits, Sequence):
        raise _error(source, (*at, "edits"), "expected a list")
    if len(edits) > 1:
        raise _error(source, (*at, "edits"), f"expected one edit at most, got {len(edits)}")
    made: list[Policy] = []
    for number, edit in enumerate(edits):
        where = (*at, "edits", number)
        if not isinstance(edit, Mapping):
            raise _error(source, where, f"expected an object, got {type(edit).__name__}")
        if edit.get("type") != ANTHROPIC_CLEAR_TOOL_USES:
            raise _error(source, (*where, "type"), f"expected {ANTHROPIC_CLEAR_TOOL_USES}")
        given = {key: each for key, each in edit.items() if key != "type"}
        for key in given:
            if key not in ("trigger", "keep", "clear_at_least", "exclude_tools", "clear_tool_inputs"):
                raise _error(source, (*where, str(key)), "unknown field")
        made.append(_make(ClearToolUses, given, source, where))
    return Pipeline(tuple(made))


def _entry(entry: Any, source: Document, where: Where) -> Policy:
    name: Any = entry
    given: Any = None
    if isinstance(entry, Mapping):
        if len(entry) != 1:
            raise _error(source, where, f"expected one name with its options below it, got {len(entry)} keys")
        ((name, given),) = entry.items()
        where = (*where, str(name))
    if not isinstance(name, str):
        raise _error(source, where, f"expected a policy's name, got {type(name).__name__}")
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise _error(source, where, f"expected options (name: value), got {type(given).__name__}")
    offers = available()
    if name not in offers:
        raise _error(source, where, f"unknown policy {name!r}; there are {', '.join(offers)}")
    try:
        factory = offers[name].factory()
    except Exception as error:
        # Foreign code: whatever it raises is the installation's fault, and named as such.
        detail = f"{type(error).__name__}: {error}"
        raise _error(source, where, f"package {offers[name].source} cannot be loaded: {detail}") from error
    return _make(factory, given, source, where)


def _make(factory: Factory, given: Mapping[Any, Any], source: Document, where: Where) -> Policy:
    """Check options and make the policy."""
    known = options(factory)
    if known is not None:
        names = [option.name for option in known]
        for key in given:
            if key not in names:
                raise _error(source, (*where, str(key)), f"unknown option; there are {', '.join(names)}")
    try:
        policy = _validated(factory, given, source, where) if is_dataclass(factory) else factory(**given)
    except OptionError as error:
        raise _error(source, (*where, *error.field), str(error)) from None
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _error(source, where, str(error)) from None
    if not callable(getattr(policy, "transform", None)):
        raise _error(source, where, "makes no policy: what it returns has no transform()")
    return policy


def _validated(factory: Factory, given: Mapping[Any, Any], source: Document, where: Where) -> Policy:
    try:
        from pydantic import ValidationError
    except ImportError:
        raise ConfigError(
            "policies from a configuration need pydantic: pip install 'leyline-lmcache[policies]'"
        ) from None
    try:
        # As JSON, where lists may be tuples and strings may be enums, and yet nothing is coerced.
        return _adapter(factory).validate_json(json.dumps(given, default=str), strict=True)
    except ValidationError as error:
        # A misspelt key is why another one is missing, not the other way round.
        first = min(error.errors(include_url=False), key=lambda each: each["type"] != _UNKNOWN)
        inside: Where = tuple(first["loc"])
        cause = (first.get("ctx") or {}).get("error")
        if isinstance(cause, OptionError):
            raise _error(source, (*where, *inside, *cause.field), str(cause)) from None
        detail = _MESSAGES.get(first["type"]) or first["msg"][:1].lower() + first["msg"][1:]
        raise _error(source, (*where, *_in_data(inside, given)), detail) from None


@lru_cache(maxsize=64)
def _adapter(factory: Factory) -> TypeAdapter[Policy]:
    """What checks the options of a policy; making it takes longer than using it."""
    from pydantic import TypeAdapter

    return TypeAdapter(cast(Any, factory))


def _in_data(inside: Where, given: Any) -> Where:
    """A location without pydantic's names for the branches of a union."""
    found: list[str | int] = []
    for number, step in enumerate(inside):
        is_there = isinstance(given, Mapping) and step in given
        is_there |= isinstance(given, list | tuple) and isinstance(step, int) and step < len(given)
        if is_there:
            given = given[step]
        elif number < len(inside) - 1 or not isinstance(given, Mapping):
            continue
        found.append(step)
    return tuple(found)


def _error(source: Document, where: Where, detail: str) -> ConfigError:
    if source.name:
        return source.error(where, detail)
    return ConfigError(f"{path_text(where)}: {detail}")
