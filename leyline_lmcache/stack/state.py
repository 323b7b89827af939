"""Named stacks that outlive the command that started them.

A stack is a folder below `paths.state_dir` with its logs, its generated configuration and, while it runs, a
record of its endpoints and of the guards through which it is stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from leyline_lmcache.stack.errors import StackError
from leyline_lmcache.stack.paths import ensure_dir, state_dir
from leyline_lmcache.stack.process import ProcessRef
from leyline_lmcache.stack.spec import ROLES, StackSpec
from leyline_lmcache.stack.stack import Progress, Stack

_VERSION = 1
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
# The longest grace of a server and what its guard needs to clean up after it.
_STOP_TIMEOUT_S = 35.0


@dataclass(frozen=True, slots=True)
class Record:
    """A stack that was started by name.

    Attributes:
        name: its name.
        created: when it was ready, ISO 8601.
        endpoints: see `Stack.endpoints`.
        spec: the fields of its `StackSpec` that are not the defaults.
        guards: the guard of each server, in start order.
    """

    name: str
    created: str
    endpoints: Mapping[str, Any]
    spec: Mapping[str, Any]
    guards: Mapping[str, ProcessRef]

    def alive(self) -> dict[str, bool]:
        """Whether each server still runs."""
        return {role: guard.is_alive() for role, guard in self.guards.items()}

    @property
    def state(self) -> str:
        """``running``, ``partly running``, or ``stopped`` if nothing is left of it."""
        alive = self.alive().values()
        return "running" if all(alive) else "partly running" if any(alive) else "stopped"

    def to_json(self) -> dict[str, Any]:
        """Plain data, as the commands print it."""
        return {
            "name": self.name,
            "state": self.state,
            "servers": {role: "running" if up else "stopped" for role, up in self.alive().items()},
            "created": self.created,
            "spec": dict(self.spec),
            **self.endpoints,
        }


def check_name(name: str) -> str:
    """Return `name`.

    Raises:
        StackError: it cannot be the name of a stack.
    """
    if not _NAME.fullmatch(name):
        raise StackError(f"name: use letters a-z, digits, '.', '_' and '-', at most 64, is {name!r}")
    return name


def _folder(name: str) -> Path:
    return state_dir() / check_name(name)


def _record_file(name: str) -> Path:
    return _folder(name) / "stack.json"


@contextlib.contextmanager
def _exclusive(name: str) -> Iterator[Path]:
    """Hold the lock of a stack's folder; the kernel lets go of it when this process ends."""
    folder = ensure_dir(_folder(name), "XDG_STATE_HOME")
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackError(f"name: {name} is being started or stopped by another command") from None
        yield folder


def load(name: str) -> Record | None:
    """The record of a stack; None if none was started by that name, or it was stopped.

    Raises:
        StackError: its record cannot be read.
    """
    path = _record_file(name)
    try:
        data = json.loads(path.read_text())
        if data["version"] != _VERSION:
            raise ValueError(f"version {data['version']}, this program knows {_VERSION}")
        guards = {role: ProcessRef(int(pid), int(start)) for role, (pid, start) in data["guards"].items()}
        return Record(name, str(data["created"]), dict(data["endpoints"]), dict(data["spec"]), guards)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StackError(f"name: the record of {name} is unreadable ({error}); remove {path}") from error


def _save(record: Record) -> None:
    path = _record_file(record.name)
    data = {
        "version": _VERSION,
        "created": record.created,
        "endpoints": record.endpoints,
        "spec": record.spec,
        "guards": {role: [guard.pid, guard.start_time] for role, guard in record.guards.items()},
    }
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(json.dumps(data, indent=2) + "\n")
    scratch.replace(path)


def names() -> list[str]:
    """Names of the stacks there is a record of."""
    try:
        found = [path.parent.name for path in state_dir().glob("*/stack.json")]
    except OSError as error:
        raise StackError(f"cannot read {state_dir()}: {error.strerror}") from error
    return sorted(name for name in found if _NAME.fullmatch(name))


def up(name: str, spec: StackSpec, on_progress: Callable[[Progress], None] | None = None) -> Record:
    """Start a stack that runs on after this process.

    Until it is ready it is tied to this process: interrupted or killed, it leaves nothing running.

    Raises:
        StackError: it could not be started, or one of that name runs.
    """
    with _exclusive(name) as folder:
        before = load(name)
        if before is not None and before.state != "stopped":
            raise StackError(
                f"name: {name} is already {before.state} at {before.endpoints['sglang']['url']}; "
                f"stop it (leyline down --name {name}) or choose another --name"
            )
        _record_file(name).unlink(missing_ok=True)
        stack = Stack(spec, directory=folder, on_progress=on_progress).start()
        try:
            record = Record(
                name,
                datetime.now(UTC).isoformat(timespec="seconds"),
                stack.endpoints(),
                spec.to_json(),
                {role: stack.server(role).guard for role in spec.roles},
            )
            _save(record)
            stack.detach()
        finally:
            stack.stop()  # nothing to do once it is detached
        return record


def down(name: str) -> Record:
    """Stop a stack and return the record it had, whose servers have all ended.

    Raises:
        StackError: no stack of that name.
    """
    record = load(name)
    if record is None:
        known = ", ".join(names()) or "none"
        raise StackError(f"name: no stack {name} was started; there are: {known}")
    with _exclusive(name):
        # SGLang goes first: it must still find the others while it stops.
        for role in sorted(record.guards, key=ROLES.index, reverse=True):
            guard = record.guards[role]
            if guard.signal(signal.SIGTERM) and not guard.wait_gone(_STOP_TIMEOUT_S):
                guard.signal(signal.SIGKILL)  # the kernel then kills the server
                guard.wait_gone(_STOP_TIMEOUT_S)
        _record_file(name).unlink(missing_ok=True)
    return record
