"""The gateway as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from leyline_lmcache.gateway import fields, sessions, usage
from leyline_lmcache.gateway.editing import Editor
from leyline_lmcache.gateway.errors import ApiError, ClientGone
from leyline_lmcache.gateway.limits import Gate, read_body
from leyline_lmcache.gateway.metrics import CONTENT_TYPE, Metrics
from leyline_lmcache.gateway.routing import Router
from leyline_lmcache.gateway.settings import GatewaySettings, Mode
from leyline_lmcache.gateway.tenants import Caller, Tenants
from leyline_lmcache.gateway.upstream import Answer, Upstream

log = logging.getLogger(__name__)

_CHAT = "/v1/chat/completions"
_SENT_ON = ("accept", "traceparent", "tracestate", "x-request-id")
_PASSED_BACK = ("content-type", "retry-after", "x-request-id")
_UNKNOWN = "unknown"


@dataclass(slots=True)
class _Exchange:
    """One request and what became of it.

    Attributes:
        status: sent to the client; None: nothing yet.
        leave: gives up its share of the gateway.
    """

    request: Request
    send: Send
    endpoint: str
    begun: float
    status: int | None = None
    tenant: str = _UNKNOWN
    session: sessions.Session | None = None
    leave: Callable[[], None] | None = None

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})

    async def piece(self, content: bytes, *, last: bool = False) -> None:
        # Before the client can know that it is done, and come back.
        if last and self.leave is not None:
            self.leave()
        await self.send({"type": "http.response.body", "body": content, "more_body": not last})

    async def whole(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        await self.start(status, {**headers, "content-length": str(len(content))})
        await self.piece(content, last=True)


class Gateway:
    """Everything between a client and the servers."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.router = Router(
            settings.backends, failures=settings.health_failures, max_moved=settings.max_moved
        )
        self.upstream = Upstream(
            settings, self.router, on_retry=lambda backend: self.metrics.retries.labels(backend.name).inc()
        )
        self.draining = False
        self._tenants = Tenants(settings)
        self._editor = Editor(settings.policies, settings.on_policy_error, self.metrics)
        self._gate = Gate(settings.limits.concurrent)
        self.metrics.running.set_function(lambda: self._gate.running)
        for backend in settings.backends:
            self.metrics.up.labels(backend.name).set_function(partial(self.router.is_up, backend))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watch the servers meanwhile, and hang up in the end."""
        watch = asyncio.create_task(self.upstream.watch())
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await self.upstream.close()

    async def serve(self, scope: Scope, receive: Receive, send: Send, endpoint: str) -> None:
        """Answer one request of the API."""
        request = Request(scope, receive)
        exchange = _Exchange(request, send, endpoint, time.monotonic())
        code = ""
        try:
            await self._within_limits(exchange, receive)
        except ApiError as error:
            code = error.code
            self.metrics.errors.labels(code).inc()
            await self._refuse(exchange, error)
        except ClientGone:
            code = "client_gone"
            self.metrics.errors.labels(code).inc()
        finally:
            self._note(exchange, code)

    def _note(self, exchange: _Exchange, code: str) -> None:
        """Count and log a request that is done with."""
        endpoint = exchange.endpoint
        seconds = time.monotonic() - exchange.begun
        status = "none" if exchange.status is None else str(exchange.status)
        self.metrics.requests.labels(endpoint, exchange.tenant, status).inc()
        self.metrics.seconds.labels(endpoint).observe(seconds)
        session = exchange.session.wire if exchange.session is not None else "-"
        log.info("%s %s tenant=%s session=%s %.3f s%s", endpoint, status, exchange.tenant, session, seconds,
                 f" {code}" if code else "")  # fmt: skip

    async def _within_limits(self, exchange: _Exchange, receive: Receive) -> None:
        limits = self.settings.limits
        request = exchange.request
        caller = self._tenants.caller(request.headers.get("authorization"))
        exchange.tenant = caller.tenant.name
        with self._gate.passing(caller.tenant) as exchange.leave:
            content = await read_body(request, limits)
            try:
                async with asyncio.timeout(limits.total_s):
                    await _unless_gone(self._answer(exchange, caller, content), receive)
            except TimeoutError:
                raise ApiError(504, "gateway_timeout", f"not done within {limits.total_s:g} s") from None

    async def _refuse(self, exchange: _Exchange, error: ApiError) -> None:
        if exchange.status is None:
            headers = {"content-type": "application/json", "connection": "close", **error.headers}
            await exchange.whole(error.status, error.body(), headers)
        else:
            # Clients take an event with an error for one; it has no [DONE] after it.
            await exchange.piece(error.event(), last=True)

    async def _answer(self, exchange: _Exchange, caller: Caller, content: bytes) -> None:
        request = exchange.request
        asked = usage.Request()
        key = caller.identity
        body = None
        if request.method == "POST":
            body = _parse(content)
            asked = await self._prepare(exchange, caller, body)
            key = sessions.routing_key(body, caller.identity, exchange.session)
        answer = await self.upstream.ask(
            key,
            request.method,
            exchange.endpoint,
            content=None if body is None else json.dumps(body).encode(),
            headers={
                "content-type": "application/json",
                **{name: request.headers[name] for name in _SENT_ON if name in request.headers},
            },
            authorization=caller.authorization,
        )
        self.metrics.first_byte.labels(exchange.endpoint).observe(time.monotonic() - exchange.begun)
        try:
            await self._relay(exchange, answer, asked)
        finally:
            await answer.close()

    async def _prepare(self, exchange: _Exchange, caller: Caller, body: dict[str, Any]) -> usage.Request:
        """What the servers get instead of what the client sent."""
        chat = exchange.endpoint == _CHAT
        tenant = caller.tenant
        fields.refuse(body, self.settings.refused_fields)
        header = exchange.request.headers.get(sessions.HEADER)
        session = sessions.identify(body, header, caller.identity, self.settings.sources)
        gone = await self._editor.edit(body, tenant.policy) if chat else ""
        exchange.session = session
        if session is not None:
            # Routed as before, and known to the server as another one if something was erased.
            body["session_id"] = sessions.renamed(session, gone).wire
            custom = body.get("custom_params")
            if custom is None or isinstance(custom, dict):
                # What a client says itself goes first.
                body["custom_params"] = {"leyline": {"mode": str(tenant.mode)}, **(custom or {})}
        asked_salt = body.get("cache_salt")
        salt = self._tenants.salt(caller, asked_salt if isinstance(asked_salt, str) else None)
        if salt is not None:
            body["cache_salt"] = salt
        return usage.request_usage(body, chat=chat and tenant.mode is not Mode.OFF)

    async def _relay(self, exchange: _Exchange, answer: Answer, asked: usage.Request) -> None:
        headers = {name: answer.headers[name] for name in _PASSED_BACK if name in answer.headers}
        if exchange.session is not None and sessions.is_header(exchange.session.name):
            headers[sessions.HEADER] = exchange.session.name
        if answer.stream is None:
            content = answer.body
            if answer.status == 200 and exchange.request.method == "POST":
                content, tokens = usage.settle_answer(content, asked)
                self.metrics.count_tokens(exchange.tenant, tokens)
            await exchange.whole(answer.status, content, headers)
            return
        reader = usage.StreamUsage(asked)
        await exchange.start(answer.status, {**headers, "cache-control": "no-cache"})
        try:
            await exchange.piece(reader.pass_on(answer.body))
            async for piece in answer.stream:
                await exchange.piece(reader.pass_on(piece))
            rest = reader.end()
        finally:
            self.metrics.count_tokens(exchange.tenant, reader.tokens)
        await exchange.piece(rest, last=True)


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """One path of the API."""

    gateway: Gateway
    path: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.gateway.serve(scope, receive, send, self.path)


def build_app(gateway: Gateway) -> Starlette:
    """The application that serves a gateway."""

    async def health(request: Request) -> Response:
        return Response("ok\n")

    async def ready(request: Request) -> Response:
        up = [backend.name for backend in gateway.router.ready]
        ready = bool(up) and not gateway.draining
        said = {"ready": ready, "draining": gateway.draining, "up": up}
        return Response(json.dumps(said), 200 if ready else 503, media_type="application/json")

    async def metrics(request: Request) -> Response:
        return Response(gateway.metrics.text(), headers={"content-type": CONTENT_TYPE})

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with gateway.running():
            yield

    posts = (_CHAT, "/v1/completions")
    return Starlette(
        routes=[
            *(Route(path, _Endpoint(gateway, path), methods=["POST"]) for path in posts),
            Route("/v1/models", _Endpoint(gateway, "/v1/models"), methods=["GET"]),
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", metrics),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _internal_error},
        lifespan=lifespan,
    )


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    code, says = {
        404: ("unknown_url", "this gateway has /v1/chat/completions, /v1/completions and /v1/models"),
        405: ("method_not_allowed", "this address takes another method"),
    }.get(status, ("bad_request", "this is not understood"))
    return _response(ApiError(status, code, says))


async def _internal_error(request: Request, error: Exception) -> Response:
    return _response(ApiError(500, "internal_error", "a fault of the gateway; its log has more"))


def _response(error: ApiError) -> Response:
    return Response(error.body(), error.status, media_type="application/json")


def _parse(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise ApiError(400, "invalid_json", "the request's body is not valid JSON") from None
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_json", "the request's body is not a JSON object")
    return body


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


async def _unless_gone(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Do the work, unless the client hangs up first. Raises :class:`ClientGone`."""

    async def hung_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    doing, watching = asyncio.create_task(work), asyncio.create_task(hung_up())
    try:
        await asyncio.wait((doing, watching), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientGone
    finally:
        for task in (doing, watching):
            task.cancel()
        await asyncio.gather(doing, watching, return_exceptions=True)
    doing.result()
