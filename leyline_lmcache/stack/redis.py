"""The Redis of a local stack."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

from leyline_lmcache.stack.errors import StackError
from leyline_lmcache.stack.process import Command

EXECUTABLE_VARIABLE = "LEYLINE_REDIS_SERVER"


def find_server() -> str:
    """Path of a ``redis-server``: the one ``LEYLINE_REDIS_SERVER`` names, else the first on PATH.

    Raises:
        StackError: there is none.
    """
    named = os.environ.get(EXECUTABLE_VARIABLE)
    found = shutil.which(named or "redis-server")
    if found is None:
        where = f"{EXECUTABLE_VARIABLE} names {named}, which is not a program" if named else "none on PATH"
        raise StackError(
            f"redis-server: {where}; install it (apt-get install redis-server), set {EXECUTABLE_VARIABLE}, "
            "or start the stack without Redis"
        )
    return found


def command(port: int, directory: Path, args: tuple[str, ...] = ()) -> Command:
    """A Redis that keeps everything in memory and listens on 127.0.0.1 only."""
    options = {
        "--port": str(port),
        "--bind": "127.0.0.1",
        "--dir": str(directory),
        "--save": "",
        "--appendonly": "no",
    }
    flat = [text for pair in options.items() for text in pair]
    return Command("redis", [find_server(), *flat, *args], dict(os.environ), grace_s=5.0)


def is_ready(port: int) -> bool:
    """True if the server answers a PING."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False
