"""`leyline gateway`: the process, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from support.processes import MARK, wait_for

from leyline_lmcache.stack.ports import PortLease

from .servers import Received, Server, answers, begin_stream, chunk, event, send_piece

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(mark: str) -> Command:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "leyline_lmcache", "gateway", *words],
            env={**os.environ, MARK: mark, "COLUMNS": "80"},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


class Process:
    """A gateway in front of one server."""

    def __init__(self, server: Server, folder: Path, mark: str, drain: str) -> None:
        with PortLease() as lease:
            port = lease.take("gateway")
        config = folder / "gateway.yaml"
        config.write_text(
            f"listen: {{port: {port}}}\nbackends: [{{name: a, url: '{server.url}'}}]\ndrain: {drain}\n"
        )
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "leyline_lmcache", "gateway", "--config", str(config)],
            env={**os.environ, MARK: mark},
            stderr=self.log,
        )
        self.url = f"http://127.0.0.1:{port}"
        wait_for(lambda: self.status("/ready") == 200, "the gateway does not start", 60)

    def status(self, path: str) -> int:
        try:
            return httpx.get(self.url + path, timeout=5, trust_env=False).status_code
        except httpx.TransportError:
            return 0


Start = Callable[..., Process]


@pytest.fixture
def start(server: Server, tmp_path: Path, mark: str) -> Iterator[Start]:
    made: list[Process] = []

    def run(drain: str) -> Process:
        made.append(Process(server, tmp_path, mark, drain))
        return made[-1]

    yield run
    for each in made:
        each.process.kill()
        each.process.wait()
        each.log.close()


def test_a_sigterm_drops_nobody(start: Start, server: Server) -> None:
    go_on = threading.Event()

    async def slowly(received: Received, writer: asyncio.StreamWriter) -> None:
        begin_stream(writer)
        send_piece(writer, event(chunk("first")))
        await writer.drain()
        await asyncio.to_thread(go_on.wait, 30)
        send_piece(writer, event(chunk("last")))
        send_piece(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    server.behaviour = slowly
    gateway = start("{delay_s: 1, timeout_s: 30}")
    body = {"messages": [], "stream": True}
    with httpx.stream(
        "POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=30, trust_env=False
    ) as answer:
        pieces = answer.iter_text()
        assert "first" in next(pieces)
        server.behaviour = answers
        gateway.process.send_signal(signal.SIGTERM)
        # Balancers see it at once, and whoever comes before they did is still served.
        wait_for(lambda: gateway.status("/ready") == 503, "a gateway that ends says that it is ready")
        assert gateway.status("/v1/models") == 200
        wait_for(lambda: gateway.status("/health") == 0, "it still listens")
        assert gateway.process.poll() is None
        go_on.set()
        rest = "".join(pieces)
    assert "last" in rest and rest.endswith("data: [DONE]\n\n")
    assert gateway.process.wait(30) == 0


def test_draining_has_an_end(start: Start, server: Server) -> None:
    async def never(received: Received, writer: asyncio.StreamWriter) -> None:
        begin_stream(writer)
        send_piece(writer, event(chunk("first")))
        await writer.drain()
        await asyncio.sleep(3600)

    server.behaviour = never
    gateway = start("{timeout_s: 1}")
    body = {"messages": [], "stream": True}
    with httpx.stream(
        "POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=30, trust_env=False
    ) as answer:
        next(answer.iter_bytes())
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(30) == 0
    wait_for(lambda: server.hung_up == 1, "the server still works for nobody")


def test_a_second_signal_ends_it_at_once(start: Start, server: Server) -> None:
    gateway = start("{delay_s: 3000}")
    gateway.process.send_signal(signal.SIGTERM)
    wait_for(lambda: gateway.status("/ready") == 503, "a gateway that ends says that it is ready")
    gateway.process.send_signal(signal.SIGTERM)
    assert gateway.process.wait(30) == 0


def test_check_prints_what_was_read(command: Command) -> None:
    done = command("--backend", "http://127.0.0.1:1", "--check", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["backends"] == {"127.0.0.1:1": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "expected either --config or --backend"),
        (("--backend", "nowhere"), "--backend: backends[0].url: expected http"),
        (("--config", "/nowhere.yaml"), "/nowhere.yaml"),
        (("--backend", "http://a", "--log-level", "loud"), "--log-level: expected one of"),
    ],
)
def test_mistakes_are_one_line(command: Command, words: tuple[str, ...], says: str) -> None:
    done = command(*words)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr and len(done.stderr.splitlines()) == 1


def test_help_has_an_example(command: Command) -> None:
    done = command("--help")
    assert done.returncode == 0 and "Example:" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
