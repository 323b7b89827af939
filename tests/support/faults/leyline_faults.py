"""An SGLang plugin for tests: makes Leyline's own code raise, in a real server, where a test asks for it.

A fault is armed while a file of its name lies in the folder ``faults`` of the server's working directory.
With ``LEYLINE_TEST_PAUSES`` in the environment, a call to ``lmcache server`` waits in the same way before it
is sent: while a file of its name (an operation of LMCache, or a method of our module) lies in ``pauses``,
beside which it leaves one with ``.reached`` added.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

_FOLDER = Path("faults").absolute()
_PAUSES = Path("pauses").absolute()
_LONGEST_PAUSE_S = 60.0

POINTS = {
    "plan": "gpu_tier:plan_request",
    "sources": "splicer:find_sources",
    "allocate": "slots:Slots.allocate",
    "move": "splicer:splice_rows",
    "reach": "gpu_tier:GpuTier.reach",
    "record": "gpu_tier:GpuTier._exact_record",
    "edited record": "gpu_tier:GpuTier._edited_record",
    "keys": "plans:RequestPlan.keys",
    "fills": "fills:FillRunner._elements",
    "fill": "hints:fill_envelope",
}
"""Where each fault strikes, in `leyline_lmcache.connector`."""


class InjectedFault(RuntimeError):
    """Raised on purpose."""


def _failing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (_FOLDER / name).exists():
            raise InjectedFault(name)
        return real(*args, **kwargs)

    return call


def _pausing(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def call(link: Any, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        armed = _PAUSES / (args[0].method if operation == "server_module_call" else operation)
        if armed.exists():
            armed.with_name(f"{armed.name}.reached").touch()
            until = time.monotonic() + _LONGEST_PAUSE_S
            while armed.exists() and time.monotonic() < until:
                time.sleep(0.002)
        return real(link, operation, args, kwargs)

    return call


def register() -> None:
    """Called by SGLang in each of its processes."""
    if os.environ.get("LEYLINE_TEST_PAUSES"):
        link: Any = import_module("leyline_lmcache.connector.link").Link
        link._call = _pausing(link._call)
    for name, where in POINTS.items():
        module, _, path = where.partition(":")
        owner: Any = import_module(f"leyline_lmcache.connector.{module}")
        *outer, attribute = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        setattr(owner, attribute, _failing(name, getattr(owner, attribute)))
