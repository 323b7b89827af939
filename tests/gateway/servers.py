"""Both ends of a gateway under test, on real sockets: servers that do what a test says, and the gateway."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from support.processes import wait_for

from leyline_lmcache.gateway.app import Gateway
from leyline_lmcache.gateway.server import DrainingServer
from leyline_lmcache.gateway.settings import GatewaySettings


@dataclass(frozen=True)
class Received:
    """One request as a server got it."""

    method: str
    path: str
    headers: dict[str, str]
    content: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.content)


Behaviour = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


def send_json(
    writer: asyncio.StreamWriter, value: Any, status: int = 200, headers: dict[str, str] | None = None
) -> None:
    content = json.dumps(value).encode()
    more = "".join(f"{name}: {text}\r\n" for name, text in (headers or {}).items())
    more += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n"
    head = f"HTTP/1.1 {status} X\r\n{more}\r\n"
    writer.write(head.encode() + content)


def begin_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")


def send_piece(writer: asyncio.StreamWriter, piece: bytes) -> None:
    writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")


def event(value: Any) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def chunk(text: str) -> dict[str, Any]:
    return {"id": "r1", "choices": [{"index": 0, "delta": {"content": text}}], "usage": None}


USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 3,
    "total_tokens": 103,
    "prompt_tokens_details": {"cached_tokens": 80},
}
REPORT = {"outcome": "spliced", "edits": 1, "prefix": 20, "spliced": 55, "filled": 5}


async def answers(received: Received, writer: asyncio.StreamWriter) -> None:
    """As SGLang does, as far as the gateway sees it."""
    if received.path == "/v1/models":
        send_json(writer, {"object": "list", "data": [{"id": "tiny"}]})
        return
    body = received.body
    if not body.get("stream"):
        choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", "content": "fine"}}
        if body.get("return_meta_info"):
            choice["meta_info"] = {"id": "r1", "leyline": REPORT}
        send_json(writer, {"id": "r1", "choices": [choice], "usage": USAGE})
        return
    begin_stream(writer)
    for text in ("a", "b", "c"):
        send_piece(writer, event(chunk(text)))
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        send_piece(writer, event({"id": "r1", "choices": [], "usage": USAGE}))
    send_piece(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")


async def hangs_up(received: Received, writer: asyncio.StreamWriter) -> None:
    """Dies before it has said anything."""
    writer.transport.abort()


async def says_nothing(received: Received, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


@dataclass
class Server:
    """A server that does what ``behaviour`` says, and remembers what it was asked."""

    behaviour: Behaviour = answers
    healthy: bool = True
    received: list[Received] = field(default_factory=list)
    hung_up: int = 0
    port: int = 0

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._writers: set[asyncio.StreamWriter] = set()
        self._listening: asyncio.Server | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, on the same port as before."""

        async def listen() -> None:
            self._listening = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
            self.port = self._listening.sockets[0].getsockname()[1]

        asyncio.run_coroutine_threadsafe(listen(), self._loop).result(10)

    def kill(self) -> None:
        """Nothing listens any more, and all connections are broken."""

        async def die() -> None:
            if self._listening is not None:
                self._listening.close()
            for writer in self._writers:
                writer.transport.abort()

        asyncio.run_coroutine_threadsafe(die(), self._loop).result(10)

    def close(self) -> None:
        self.kill()

        async def cancel() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, path, _ = head[0].split(" ")
                pairs = (line.split(": ", 1) for line in head[1:] if line)
                headers = {name.lower(): value for name, value in pairs}
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                if path == "/health":
                    send_json(writer, {}, 200 if self.healthy else 503)
                    continue
                received = Received(method, path, headers, content)
                self.received.append(received)
                doing = asyncio.ensure_future(self.behaviour(received, writer))
                # The client sends nothing more before it has an answer, unless it hangs up.
                watching = asyncio.ensure_future(reader.read(1))
                await asyncio.wait((doing, watching), return_when=asyncio.FIRST_COMPLETED)
                if not doing.done():
                    self.hung_up += 1
                    doing.cancel()
                    return
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


@contextmanager
def serving(settings: GatewaySettings) -> Iterator[Running]:
    """A gateway that listens, in a thread of its own."""
    gateway = Gateway(settings)
    server = DrainingServer(gateway)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started or not thread.is_alive(), "the gateway does not start")
    port = server.servers[0].sockets[0].getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client:
        yield Running(gateway, server, client, thread)
    server.should_exit = True
    thread.join(2)
    server.force_exit = True
    thread.join(10)
    assert not thread.is_alive()


@dataclass
class Running:
    """A gateway under test and a client of it."""

    gateway: Gateway
    server: DrainingServer
    client: httpx.Client
    thread: threading.Thread

    @property
    def url(self) -> str:
        return str(self.client.base_url).rstrip("/")

    def chat(self, messages: Sequence[Any] | None = None, **more: Any) -> httpx.Response:
        headers = more.pop("headers", {})
        body = {"model": "tiny", "messages": messages or [{"role": "user", "content": "hello"}], **more}
        return self.client.post("/v1/chat/completions", json=body, headers=headers)

    def metric(self, name: str, **labels: str) -> float:
        return self.gateway.metrics.registry.get_sample_value(f"leyline_gateway_{name}", labels) or 0.0

    def router_is_up(self, name: str) -> bool:
        return any(
            self.gateway.router.is_up(each) for each in self.gateway.router.backends if each.name == name
        )
