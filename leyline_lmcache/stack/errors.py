"""The one error that the local stack raises on purpose."""

from __future__ import annotations


class StackError(RuntimeError):
    """The stack could not be started, found or stopped; the message names what and the way out."""
