"""Size, time, and numbers; and what hostile clients send."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.processes import wait_for

from .conftest import Start
from .servers import Received, Server, answers, begin_stream, chunk, event, says_nothing, send_piece

CHAT = "/v1/chat/completions"


def code(answer: httpx.Response) -> tuple[int, str]:
    said = answer.json()["error"]
    assert said["message"] and said["type"]
    return answer.status_code, said["code"]


def test_a_large_request_is_refused_whether_it_says_so_or_not(start: Start, server: Server) -> None:
    gateway = start([server], "limits: {body_bytes: 2048}")
    large = json.dumps({"messages": [{"role": "user", "content": "x" * 4096}]}).encode()
    assert code(gateway.client.post(CHAT, content=large)) == (413, "request_too_large")
    pieces = (large[at : at + 100] for at in range(0, len(large), 100))
    assert code(gateway.client.post(CHAT, content=pieces)) == (413, "request_too_large")
    assert not server.received
    assert gateway.chat().status_code == 200


def test_a_request_that_trickles_in_is_given_up(start: Start, server: Server) -> None:
    gateway = start([server], "limits: {body_s: 0.2}")
    url = gateway.client.base_url
    with socket.create_connection((url.host, url.port), timeout=20) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{".encode())
        assert b"408" in connection.recv(4096).splitlines()[0]
    assert not server.received


@pytest.fixture
def held(server: Server) -> threading.Event:
    """The server answers once this is set."""
    go_on = threading.Event()

    async def waits(received: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.to_thread(go_on.wait, 20)
        await answers(received, writer)

    server.behaviour = waits
    return go_on


def test_more_requests_than_allowed_are_told_to_come_back(
    start: Start, server: Server, held: threading.Event
) -> None:
    gateway = start([server], "limits: {concurrent: 2}")
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(gateway.chat) for _ in range(2)]
        wait_for(lambda: len(server.received) == 2, "the requests do not arrive")
        refused = gateway.chat()
        held.set()
        assert [each.result().status_code for each in running] == [200, 200]
    assert code(refused) == (429, "gateway_busy") and refused.headers["retry-after"]
    assert gateway.chat().status_code == 200


def test_a_tenant_cannot_take_anothers_share(start: Start, server: Server, held: threading.Event) -> None:
    text = """
auth: {mode: check, keys_env: KEYS}
salt_secret_env: SECRET
tenants:
  acme: {concurrent: 1}
  other: {}
"""
    gateway = start([server], text, KEYS="acme k1, other k2", SECRET="s")

    def ask(key: str) -> httpx.Response:
        return gateway.chat(headers={"authorization": f"Bearer {key}"})

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(ask, "k1")]
        wait_for(lambda: len(server.received) == 1, "the request does not arrive")
        assert code(ask("k1")) == (429, "tenant_busy")
        running.append(pool.submit(ask, "k2"))
        wait_for(lambda: len(server.received) == 2, "the other tenant's request does not arrive")
        held.set()
        assert [each.result().status_code for each in running] == [200, 200]


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_says_nothing_is_a_timeout(start: Start, pair: Any, stream: bool) -> None:
    for server in pair:
        server.behaviour = says_nothing
    gateway = start(pair, "limits: {answer_s: 0.2}")
    assert code(gateway.chat(stream=stream)) == (504, "upstream_timeout")
    # It may still be at work: nobody else was asked.
    assert len(pair[0].received) + len(pair[1].received) == 1


@pytest.mark.parametrize(
    ("limits", "said"), [("idle_s: 0.2", "upstream_timeout"), ("total_s: 0.3", "gateway_timeout")]
)
def test_a_stream_that_pauses_or_never_ends(start: Start, server: Server, limits: str, said: str) -> None:
    async def pauses(received: Received, writer: asyncio.StreamWriter) -> None:
        begin_stream(writer)
        send_piece(writer, event(chunk("a")))
        await writer.drain()
        await asyncio.sleep(3600)

    server.behaviour = pauses
    gateway = start([server], f"limits: {{{limits}}}")
    events = gateway.chat(stream=True).text.removesuffix("\n\n").split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == said
    wait_for(lambda: server.hung_up == 1, "the server still works for nobody")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=["empty", "open", "list", "null", "bytes", "nan", "number", "deep list", "deep object"],
)
def test_what_is_no_json_object_is_refused(start: Start, server: Server, content: bytes) -> None:
    gateway = start([server])
    assert code(gateway.client.post(CHAT, content=content)) == (400, "invalid_json")
    assert not server.received


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": 1},
        {"messages": [1, None, "x"]},
        {"messages": [{"role": ["user"], "content": {}}]},
        {"messages": [], "custom_params": "x", "user": [], "session_id": 1, "cache_salt": ["a"]},
        {"messages": [], "stream": True, "stream_options": "x"},
        {"messages": [], "n": "x", "stream": "yes"},
        {"messages": [{"role": "user", "content": "\ud800"}], "user": "\ud800\r\nx-evil: 1"},
    ],
)
def test_what_makes_no_sense_is_for_the_server_to_refuse(
    start: Start, server: Server, body: dict[str, Any]
) -> None:
    gateway = start([server], "policies: {tidy: [keep_tool_results]}\npolicy: tidy")
    answer = gateway.client.post(CHAT, content=json.dumps(body))
    assert answer.status_code == 200 and "x-evil" not in answer.headers
    sent = server.received[0].body
    for key in body.keys() - {"session_id"}:
        assert sent[key] == body[key], key


def test_headers_of_the_client_stay_here(start: Start, server: Server) -> None:
    gateway = start([server])
    gateway.chat(
        headers={
            "x-data-parallel-rank": "1",
            "x-forwarded-for": "1.2.3.4",
            "cookie": "a=b",
            "traceparent": "00-1-2-01",
        }
    )
    sent = server.received[0].headers
    assert sent["traceparent"] == "00-1-2-01"
    assert not sent.keys() & {"x-data-parallel-rank", "x-forwarded-for", "cookie"}


def test_endless_headers_are_cut_off(start: Start, server: Server) -> None:
    gateway = start([server])
    url = gateway.client.base_url
    with socket.create_connection((url.host, url.port), timeout=20) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\n")
        with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
            while True:
                connection.sendall(b"x-long: " + b"x" * 10_000 + b"\r\n")
    assert gateway.client.get("/v1/models").status_code == 200
