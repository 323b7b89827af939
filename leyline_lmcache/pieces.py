"""The KV piece table: buffers, how they were computed, and what each session sees of them (DESIGN §4).

This module is the front door; views are in `view`, provenance in `provenance`, versions in `history`.
"""

from __future__ import annotations

from collections import OrderedDict

from leyline_lmcache.history import History, NoSuchView, Version
from leyline_lmcache.provenance import Buffer, BufferRange, Provenance
from leyline_lmcache.view import BufferId, Edit, Piece, View, buffer_id, order_edits

__all__ = [
    "Buffer",
    "BufferId",
    "BufferRange",
    "Edit",
    "History",
    "NoSuchView",
    "Piece",
    "PieceTable",
    "Provenance",
    "Version",
    "View",
    "buffer_id",
    "order_edits",
]


class PieceTable:
    """Buffers with their provenance, and sessions with their histories; bounded. Not thread-safe.

    Sessions hold views, views name buffers; nothing here holds KV. When a session is dropped its buffers'
    provenance
    stays: their KV may still be cached, and FORGET must find it.

    Args:
        max_sessions: most sessions kept; the least recently used goes first.
        max_views: most views kept of one session.
        max_buffers: most buffers whose provenance is kept.
    """

    def __init__(self, *, max_sessions: int = 1024, max_views: int = 32, max_buffers: int = 65536) -> None:
        if max_sessions < 1:
            raise ValueError(f"max_sessions: expected at least 1, got {max_sessions}")
        if max_views < 1:
            raise ValueError(f"max_views: expected at least 1, got {max_views}")
        self._max_sessions = max_sessions
        self._max_views = max_views
        self._sessions: OrderedDict[str, History] = OrderedDict()
        self.provenance = Provenance(max_buffers=max_buffers)

    # ------------------------------------------------------------------ buffers

    def register(self, buffer: BufferId, context: View) -> Buffer:
        """Remember how a buffer was computed; see `Provenance.record`. Doing it again is harmless."""
        return self.provenance.record(buffer, context)

    def buffer(self, buffer: BufferId) -> Buffer | None:
        """The buffer, or None when it is not known."""
        return self.provenance.get(buffer)

    def influenced_by(self, buffer: BufferId, start: int, end: int) -> frozenset[BufferRange]:
        """Every range computed while these tokens were in context; see `Provenance.influenced_by`."""
        return self.provenance.influenced_by(buffer, start, end)

    # ------------------------------------------------------------------ sessions

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: str) -> bool:
        return session in self._sessions

    def push(self, session: str, view: View) -> Version:
        """Make `view` the session's current one; starts the session when it is new."""
        history = self._sessions.get(session)
        if history is None:
            history = self._sessions[session] = History(view, max_versions=self._max_views)
            version = history.current
            while len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)
        else:
            self._sessions.move_to_end(session)
            version = history.push(view)
        self.provenance.touch(view.buffers())
        return version

    def current(self, session: str) -> View | None:
        """What the session sees now; None when the session is not known."""
        history = self._sessions.get(session)
        return None if history is None else history.current.view

    def history(self, session: str) -> History:
        """The session's versions, to list, undo, redo or go to one. Raises NoSuchView."""
        history = self._sessions.get(session)
        if history is None:
            raise NoSuchView(f"session: {session!r} is not known")
        self._sessions.move_to_end(session)
        return history

    def undo(self, session: str) -> View:
        """Go back to the view the current one was made from. Raises NoSuchView."""
        return self.history(session).undo().view

    def redo(self, session: str) -> View:
        """Go forward to the newest view made from the current one. Raises NoSuchView."""
        return self.history(session).redo().view

    def goto(self, session: str, number: int) -> View:
        """Return to any version still kept. Raises NoSuchView."""
        return self.history(session).goto(number).view

    def close(self, session: str) -> None:
        """Drop a session and its views; the provenance of its buffers stays. Unknown sessions are ignored."""
        self._sessions.pop(session, None)
