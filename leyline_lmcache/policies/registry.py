"""Which policies there are: the built-in ones, and those that installed packages bring.

A package offers a policy as an entry point of the group ``leyline.policies``. Its name is the policy's, its
object is called with the options and returns the policy; where it is a dataclass, options are checked by its
annotations and ``leyline policy list`` shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from leyline_lmcache.policies.base import Policy
from leyline_lmcache.policies.clear_tool_uses import ClearToolUses
from leyline_lmcache.policies.keep_tool_results import KeepToolResults
from leyline_lmcache.policies.redact import Redact
from leyline_lmcache.policies.strip_reasoning import StripReasoning
from leyline_lmcache.policies.stub_failed_calls import StubFailedCalls

GROUP = "leyline.policies"

Factory = Callable[..., Policy]

BUILT_IN: Mapping[str, Factory] = MappingProxyType(
    {
        "keep_tool_results": KeepToolResults,
        "stub_failed_calls": StubFailedCalls,
        "strip_reasoning": StripReasoning,
        "clear_tool_uses": ClearToolUses,
        "redact": Redact,
    }
)

_NOT_AN_OPTION = frozenset({"count"})


@dataclass(frozen=True, slots=True)
class Offer:
    """A policy that may be named in a configuration.

    Attributes:
        name: how.
        source: the package that brings it.
        entry: where it is loaded from; None: built in.
    """

    name: str
    source: str
    entry: EntryPoint | None = None

    def factory(self) -> Factory:
        """What makes the policy of its options. May raise whatever importing the package raises."""
        if self.entry is None:
            return BUILT_IN[self.name]
        found: Factory = self.entry.load()
        return found


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a policy.

    Attributes:
        name: its name.
        required: whether it has no default.
        default: what it is if not given.
    """

    name: str
    required: bool
    default: Any = None


def available() -> dict[str, Offer]:
    """All policies by name; a built-in one goes before a stranger of its name."""
    found = {
        entry.name: Offer(entry.name, entry.dist.name if entry.dist else "?", entry)
        for entry in entry_points(group=GROUP)
    }
    return {name: Offer(name, "built in") for name in BUILT_IN} | {
        name: offer for name, offer in sorted(found.items()) if name not in BUILT_IN
    }


def options(factory: Any) -> tuple[Option, ...] | None:
    """The options of a policy; None if it does not tell."""
    if not is_dataclass(factory):
        return None
    return tuple(
        Option(
            field.name,
            field.default is MISSING and field.default_factory is MISSING,
            field.default if field.default is not MISSING else None,
        )
        for field in fields(factory)
        if field.init and field.name not in _NOT_AN_OPTION
    )
