"""What sessions look like to whoever derives their edits: the views their answers left behind.

A session is a conversation whose client sends all of it every time. Turns may branch, be retried, or go on
from an earlier one, so several views are kept and the one that explains most of a prompt is its base.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from leyline_lmcache.diff import Diff, diff

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SessionView:
    """What one answer left behind.

    Attributes:
        response: id of the answer; the base of edits.
        tokens: prompt and answer, as far as they have KV, int32 ``[n]``.
        edited: some of it was served from edited KV, so that only a directive finds it again.
    """

    response: str
    tokens: Tokens
    edited: bool


@dataclass(frozen=True, slots=True)
class Derived:
    """A prompt explained by an earlier view."""

    base: SessionView
    diff: Diff

    @property
    def needs_directives(self) -> bool:
        """Whether the ordinary cache would not find as much."""
        return bool(self.diff.changes) or (self.base.edited and self.diff.reach > 0)


class SessionStore:
    """Views by session, bounded; the session used longest ago goes first, and its oldest view.

    Not thread-safe: :meth:`candidates` copies what a comparison in another thread needs.

    Args:
        max_sessions: sessions kept.
        max_views: views kept of each.
        max_tokens: tokens over all of them, 4 bytes each.
    """

    def __init__(self, max_sessions: int, max_views: int, max_tokens: int) -> None:
        self._max_sessions = max_sessions
        self._max_views = max_views
        self._max_tokens = max_tokens
        self._sessions: OrderedDict[Hashable, OrderedDict[str, SessionView]] = OrderedDict()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def tokens(self) -> int:
        """Tokens over all views."""
        return self._tokens

    def add(self, session: Hashable, view: SessionView) -> None:
        """Remember an answer; one of the same id is replaced."""
        views = self._sessions.setdefault(session, OrderedDict())
        self._sessions.move_to_end(session)
        old = views.pop(view.response, None)
        self._tokens += len(view.tokens) - (len(old.tokens) if old is not None else 0)
        views[view.response] = view
        while len(views) > self._max_views:
            self._tokens -= len(views.popitem(last=False)[1].tokens)
        while len(self._sessions) > 1 and (
            len(self._sessions) > self._max_sessions or self._tokens > self._max_tokens
        ):
            self._drop(next(iter(self._sessions)))

    def candidates(self, session: Hashable) -> list[SessionView]:
        """Views of a session, the latest first."""
        views = self._sessions.get(session)
        if views is None:
            return []
        self._sessions.move_to_end(session)
        return list(reversed(views.values()))

    def forget(self, session: Hashable) -> None:
        """Drop a session."""
        if session in self._sessions:
            self._drop(session)

    def _drop(self, session: Hashable) -> None:
        self._tokens -= sum(len(view.tokens) for view in self._sessions.pop(session).values())


def derive(candidates: list[SessionView], prompt: object, *, min_reuse: int) -> Derived | None:
    """The view that explains most of a prompt, the latest of equals; None if none has anything of it.

    Args:
        candidates: as :meth:`SessionStore.candidates` gives them.
        prompt: token ids, ``[m]``.
    """
    new = np.asarray(prompt, dtype=np.int64)
    best: Derived | None = None
    for view in candidates:
        if best is not None and min(len(view.tokens), len(new)) <= best.diff.kept:
            continue
        found = diff(view.tokens, new, min_reuse=min_reuse)
        if found.kept > (best.diff.kept if best is not None else 0):
            best = Derived(view, found)
    return best
