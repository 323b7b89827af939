"""Where the stack keeps its files: nothing is ever written into the source tree."""

from __future__ import annotations

import os
from pathlib import Path

from leyline_lmcache.stack.errors import StackError


def _base(variable: str, fallback: str) -> Path:
    given = os.environ.get(variable, "")
    # The XDG specification has relative values ignored.
    return Path(given) if given.startswith("/") else Path.home() / fallback


def state_dir() -> Path:
    """Folder of named stacks: their endpoints, logs and generated configuration."""
    return _base("XDG_STATE_HOME", ".local/state") / "leyline" / "stacks"


def cache_dir() -> Path:
    """Folder of what can be made again, such as generated models."""
    return _base("XDG_CACHE_HOME", ".cache") / "leyline"


def ensure_dir(path: Path, variable: str) -> Path:
    """Create `path` and return it.

    Raises:
        StackError: it cannot be created or written; `variable` is named as the way to choose another place.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StackError(
            f"cannot create {path}: {error.strerror}; set {variable} to a folder you may write to"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise StackError(f"cannot write to {path}: set {variable} to a folder you may write to")
    return path
