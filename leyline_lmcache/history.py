"""A session's views over its turns, with a way back to each."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from leyline_lmcache.view import View


class NoSuchView(LookupError):
    """The view asked for was never there, or a bound has dropped it."""


@dataclass(frozen=True, slots=True)
class Version:
    """One view of a session.

    Attributes:
        number: counts up from 0; never used twice in a session.
        view: what the session saw.
        parent: the version it was made from; None for the first.
    """

    number: int
    view: View
    parent: int | None


class History:
    """The versions of one session and which is current. Going back and editing there starts a branch; nothing
    is lost.

    Args:
        first: the first view.
        max_versions: most versions kept; the oldest that is not current goes first.
    """

    def __init__(self, first: View, *, max_versions: int = 64) -> None:
        if max_versions < 1:
            raise ValueError(f"max_versions: expected at least 1, got {max_versions}")
        self._max = max_versions
        self._versions: OrderedDict[int, Version] = OrderedDict()
        self._next = 0
        self._current = Version(0, first, None)
        self._add(first, None)

    @property
    def current(self) -> Version:
        """The version the session sees now."""
        return self._current

    @property
    def versions(self) -> tuple[Version, ...]:
        """All versions kept, oldest first."""
        return tuple(self._versions.values())

    def push(self, view: View) -> Version:
        """Make `view` current, as a child of the version that was."""
        return self._add(view, self._current.number)

    def goto(self, number: int) -> Version:
        """Make a kept version current. Raises NoSuchView."""
        version = self._versions.get(number)
        if version is None:
            raise NoSuchView(f"number: version {number} is not kept; kept are {sorted(self._versions)}")
        self._current = version
        return version

    def undo(self) -> Version:
        """Make the current version's parent current. Raises NoSuchView when there is none kept."""
        if self._current.parent is None:
            raise NoSuchView(f"version {self._current.number} is the first; there is nothing to undo")
        return self.goto(self._current.parent)

    def redo(self) -> Version:
        """Make the newest child of the current version current. Raises NoSuchView when there is none."""
        for version in reversed(self._versions.values()):
            if version.parent == self._current.number:
                return self.goto(version.number)
        raise NoSuchView(f"nothing was made from version {self._current.number}; there is nothing to redo")

    def _add(self, view: View, parent: int | None) -> Version:
        version = Version(self._next, view, parent)
        self._next += 1
        self._versions[version.number] = version
        self._current = version
        if len(self._versions) > self._max:
            self._versions.popitem(last=False)
        return version
