"""The gateway as a process: it listens, and on a SIGTERM it ends without dropping anyone."""

from __future__ import annotations

import asyncio
import logging
from types import FrameType

import uvicorn

from leyline_lmcache.gateway.app import Gateway, build_app

log = logging.getLogger(__name__)

_LONGEST_HEADERS = 64 * 1024
# Longer than clients and balancers keep theirs, so that none sends on a connection that just went.
_KEEP_IDLE_S = 75


class DrainingServer(uvicorn.Server):
    """A server that first says it is not ready, then stops listening, then waits for what is under way."""

    def __init__(self, gateway: Gateway) -> None:
        settings = gateway.settings
        self._gateway = gateway
        self._loop: asyncio.AbstractEventLoop | None = None
        super().__init__(
            uvicorn.Config(
                build_app(gateway),
                host=settings.host,
                port=settings.port,
                http="h11",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=_LONGEST_HEADERS,
                timeout_keep_alive=_KEEP_IDLE_S,
                timeout_graceful_shutdown=round(settings.drain_s),
            )
        )

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)  # type: ignore[arg-type]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins to drain, the next one ends at once."""
        if self._gateway.draining or self._loop is None:
            self.should_exit = self.force_exit = True
            return
        self._gateway.draining = True
        delay = self._gateway.settings.drain_delay_s
        self._loop.call_soon_threadsafe(self._loop.call_later, delay, self._stop)

    def _stop(self) -> None:
        log.info("draining")
        self.should_exit = True


def serve(gateway: Gateway) -> None:
    """Serve until told to end; what is under way then is answered first."""
    DrainingServer(gateway).run()
