"""What a request may take: its size, its time, and its share of the gateway."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from starlette.requests import ClientDisconnect, Request

from leyline_lmcache.gateway.errors import ApiError, ClientGone
from leyline_lmcache.gateway.settings import Limits, Tenant


class Gate:
    """Counts the requests under way. For one event loop: nothing here waits."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._running: Counter[str] = Counter()

    @property
    def running(self) -> int:
        return self._running.total()

    @contextmanager
    def passing(self, tenant: Tenant) -> Iterator[Callable[[], None]]:
        """Count a request while it runs, or until what this gives is called. Raises :class:`ApiError` 429."""
        if self.running >= self._most:
            raise _busy("gateway_busy", "too many requests are under way; try again")
        if tenant.concurrent is not None and self._running[tenant.name] >= tenant.concurrent:
            raise _busy(
                "tenant_busy", f"{tenant.concurrent} requests of this key's tenant are under way; try again"
            )
        self._running[tenant.name] += 1
        with ExitStack() as stack:
            stack.callback(self._running.subtract, (tenant.name,))
            yield stack.close


def _busy(code: str, message: str) -> ApiError:
    return ApiError(429, code, message, headers={"retry-after": "1"})


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body of a request.

    Raises:
        ApiError: 413, it is larger than allowed, of which no more than that is read; 408, it takes too long.
        ClientGone: the client hung up.
    """
    most = limits.body_bytes
    too_large = ApiError(413, "request_too_large", f"the request has more than {most} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_s):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, "request_timeout", f"the request was not there in {limits.body_s:g} s") from None
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(parts)
