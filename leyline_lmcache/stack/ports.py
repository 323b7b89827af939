"""Choice of TCP ports that do not collide between stacks started at the same time."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Mapping
from types import TracebackType

from leyline_lmcache.stack.errors import StackError

# Below the range from which Linux takes ports of outgoing connections, any of which could grab one
# between our choice and the server's bind.
_LOW, _HIGH = 20_000, 32_000
_ATTEMPTS = 200


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """True if a server could listen on `port` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _claim(port: int) -> socket.socket | None:
    """Mark `port` as taken by us; the mark goes with the process, however it ends."""
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        mark.bind(f"\0leyline-port-{port}")  # an abstract name: no file to clean up
    except OSError as error:
        mark.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return mark


class PortLease:
    """Ports by purpose, kept from other Leyline processes until released.

    Servers bind their ports seconds after they were chosen. The lease closes that window between our own
    processes; it is released once the servers listen.
    """

    def __init__(self) -> None:
        self._marks: list[socket.socket] = []
        self._ports: dict[str, int] = {}

    @property
    def ports(self) -> Mapping[str, int]:
        """Port by purpose."""
        return self._ports

    def take(self, purpose: str, wanted: int = 0) -> int:
        """Reserve `wanted`, or any free port if it is 0.

        Raises:
            StackError: the wanted port is in use, or none is free.
        """
        if wanted:
            mark = _claim(wanted) if is_free(wanted) else None
            if mark is None:
                raise StackError(
                    f"port {wanted} for {purpose} is in use: choose another, or 0 for any free one"
                )
            return self._keep(purpose, wanted, mark)
        for _ in range(_ATTEMPTS):
            port = random.randrange(_LOW, _HIGH)
            if port in self._ports.values() or not is_free(port):
                continue
            mark = _claim(port)
            if mark is not None:
                return self._keep(purpose, port, mark)
        raise StackError(f"no free port between {_LOW} and {_HIGH} for {purpose}")

    def _keep(self, purpose: str, port: int, mark: socket.socket) -> int:
        self._marks.append(mark)
        self._ports[purpose] = port
        return port

    def release(self) -> None:
        """Let other processes choose these ports again; what listens on them keeps them anyway."""
        while self._marks:
            self._marks.pop().close()

    def __enter__(self) -> PortLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
