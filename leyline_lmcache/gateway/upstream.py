"""Requests to the servers: one after the other until one answers, and checks of their health."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

import httpx

from leyline_lmcache.gateway.errors import ApiError
from leyline_lmcache.gateway.routing import Router
from leyline_lmcache.gateway.settings import Backend, GatewaySettings, Limits

log = logging.getLogger(__name__)

# Servers of SGLang close an idle connection after 5 s; a little earlier, none is used that they just closed.
_KEEP_IDLE_S = 3.0


@dataclass(slots=True)
class Answer:
    """What a server answers.

    Attributes:
        body: all of it, or the first piece of a stream.
        stream: the rest of a stream; None: there is none.
    """

    backend: Backend
    status: int
    headers: Mapping[str, str]
    body: bytes
    stream: AsyncIterator[bytes] | None = None
    response: httpx.Response | None = field(default=None, repr=False)

    async def close(self) -> None:
        """Hang up; a server that still generates then stops."""
        if self.response is not None:
            await self.response.aclose()


class Upstream:
    """The servers, as a client of theirs."""

    def __init__(
        self,
        settings: GatewaySettings,
        router: Router,
        *,
        on_retry: Callable[[Backend], None] = lambda backend: None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._settings = settings
        self._limits: Limits = settings.limits
        self._router = router
        self._on_retry = on_retry
        # Servers are addressed as configured, whatever proxies the environment names.
        self._http = httpx.AsyncClient(
            transport=transport,
            trust_env=False,
            timeout=httpx.Timeout(None, connect=self._limits.connect_s),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEP_IDLE_S),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(
        self,
        key: str,
        method: str,
        path: str,
        *,
        content: bytes | None,
        headers: Mapping[str, str],
        authorization: str | None,
    ) -> Answer:
        """The answer of the first server that gives one, whatever its status.

        Nothing has been sent to the client meanwhile, so a request whose server dies is asked again of
        another. One that answers late is not: it may still be at work.

        Raises:
            ApiError: 502 or 503, none answers; 504, not in time.
        """
        tried: list[Backend] = []
        try:
            async with asyncio.timeout(self._limits.answer_s):
                for backend in self._router.order(key)[: self._settings.retries + 1]:
                    if tried:
                        self._on_retry(tried[-1])
                    tried.append(backend)
                    answer = await self._try(backend, method, path, content, headers, authorization)
                    if answer is not None:
                        self._router.served(key, backend)
                        return answer
        except TimeoutError:
            raise ApiError(504, "upstream_timeout", f"no answer within {self._limits.answer_s:g} s") from None
        if not self._router.any_up:
            raise ApiError(503, "no_backend", "no server is up; try again", headers={"retry-after": "5"})
        raise ApiError(502, "upstream_failed", f"{len(tried)} servers were asked and none answered")

    async def _try(
        self,
        backend: Backend,
        method: str,
        path: str,
        content: bytes | None,
        headers: Mapping[str, str],
        authorization: str | None,
    ) -> Answer | None:
        """One server; None if there is no answer to be had."""
        if backend.key is not None:
            authorization = f"Bearer {backend.key}"
        sent = {**headers, **({"authorization": authorization} if authorization is not None else {})}
        # A connection may be closed just when it is used again; the second one is new.
        for last in (False, True):
            request = self._http.build_request(method, backend.url + path, content=content, headers=sent)
            try:
                return await self._once(backend, request)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                self._router.failed(backend, _why(error), surely=True)
                return None
            except httpx.LocalProtocolError:
                # What we were given cannot be sent: no fault of the server's.
                raise ApiError(400, "invalid_header", "a header of the request cannot be sent on") from None
            except httpx.TransportError as error:
                log.info("%s: no answer: %s", backend.name, _why(error))
                if last:
                    self._router.failed(backend, _why(error))
        return None

    async def _once(self, backend: Backend, request: httpx.Request) -> Answer:
        response = await self._http.send(request, stream=True)
        try:
            kind = response.headers.get("content-type", "")
            if response.status_code == 200 and kind.startswith("text/event-stream"):
                pieces = response.aiter_bytes()
                first = await anext(pieces, b"")
                return Answer(
                    backend, 200, response.headers, first, self._rest(backend, pieces), response=response
                )
            body = await response.aread()
        except BaseException:
            await response.aclose()
            raise
        await response.aclose()
        return Answer(backend, response.status_code, response.headers, body)

    async def _rest(self, backend: Backend, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """What follows the first piece. Raises :class:`ApiError` 502 or 504 when it breaks off."""
        while True:
            try:
                async with asyncio.timeout(self._limits.idle_s):
                    piece = await anext(pieces, None)
            except TimeoutError:
                raise ApiError(
                    504, "upstream_timeout", f"the stream paused for {self._limits.idle_s:g} s"
                ) from None
            except httpx.TransportError as error:
                log.warning("%s: a stream broke off: %s", backend.name, _why(error))
                raise ApiError(502, "upstream_failed", "the server went away in the middle") from None
            if piece is None:
                return
            yield piece

    # -- health ----------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Check all servers again and again, until cancelled."""
        while True:
            await asyncio.gather(*(self.check(backend) for backend in self._router.backends))
            await asyncio.sleep(self._settings.health_interval_s)

    async def check(self, backend: Backend) -> None:
        """Ask one server how it is."""
        headers = {"authorization": f"Bearer {backend.key}"} if backend.key is not None else {}
        try:
            async with asyncio.timeout(self._settings.health_timeout_s):
                response = await self._http.get(backend.url + self._settings.health_path, headers=headers)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._router.failed(backend, _why(error), surely=True)
        except TimeoutError:
            self._router.failed(backend, f"no answer within {self._settings.health_timeout_s:g} s")
        except httpx.HTTPError as error:
            self._router.failed(backend, _why(error))
        except Exception:
            # The watch must outlive whatever a server may answer.
            log.exception("%s: its check failed", backend.name)
            self._router.failed(backend, "its check failed")
        else:
            if response.status_code == 200:
                self._router.healthy(backend)
            else:
                self._router.failed(backend, f"HTTP {response.status_code}")


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
