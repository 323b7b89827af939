"""Watches one ``lmcache server``: whether it is there, answers, and for how long it has been silent.

A connection of its own tells at once when the process dies and when one listens again. A question that the
server answers from its main loop (``get_chunk_size``), so that no busy worker delays it, tells when it hangs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq as pyzmq
from zmq.utils.monitor import recv_monitor_message

log = logging.getLogger(__name__)
zmq: Any = pyzmq

PROBE_EVERY_S = 0.25
PROBE_TIMEOUT_S = 1.0
_ASK_AGAIN_S = 2.0
_POLL_S = 0.01
_IDLE_POLL_S = 0.05


class Watch:
    """Calls back from a thread of its own; an exception in a callback is logged and ends nothing.

    Args:
        url: ZMQ endpoint of the server.
        context: for the watching connection.
        connect: opens a client to ask with.
        lost: told why, and whether the process is gone (else: it is silent). Told again and again.
        answered: told the server's chunk size, whenever it answered.
    """

    def __init__(
        self,
        url: str,
        context: Any,
        connect: Callable[[], Any],
        lost: Callable[[str, bool], None],
        answered: Callable[[int], None],
    ) -> None:
        self._url = url
        self._context = context
        self._connect = connect
        self._lost = lost
        self._answered = answered
        self._client: Any = None
        self._future: Any = None
        self._sent = 0.0
        self._due = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leyline-lmcache-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and its connections."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            socket.connect(self._url)
            while not self._stop.is_set():
                try:
                    self._turn(monitor)
                except Exception:
                    log.exception("watching lmcache server at %s", self._url)
                    self._stop.wait(PROBE_EVERY_S)
        finally:
            self._drop()
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)

    def _turn(self, monitor: Any) -> None:
        busy = self._future is not None and time.monotonic() - self._sent < PROBE_TIMEOUT_S
        if monitor.poll((_POLL_S if busy else _IDLE_POLL_S) * 1000):
            event = recv_monitor_message(monitor)["event"]
            self._drop()
            if event == zmq.EVENT_DISCONNECTED:
                self._lost("its connection closed", True)
            else:
                self._client = self._connect()
        self._probe()

    def _probe(self) -> None:
        now = time.monotonic()
        if self._client is None:
            return
        if self._future is None:
            if now >= self._due:
                self._future, self._sent = self._client.get_chunk_size(), now
        elif self._future.query():
            future, self._future, self._due = self._future, None, now + PROBE_EVERY_S
            self._answered(int(future.result(0)))
        elif now - self._sent > PROBE_TIMEOUT_S:
            self._lost(f"no answer for {PROBE_TIMEOUT_S:g} s", False)
            if now - self._sent > _ASK_AGAIN_S:
                # The question may be lost with a connection that nobody closed.
                self._drop()
                self._client = self._connect()

    def _drop(self) -> None:
        client, self._client, self._future, self._due = self._client, None, None, 0.0
        if client is not None:
            client.close()
