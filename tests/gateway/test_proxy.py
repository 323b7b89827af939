"""Requests and answers on their way through."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from support.processes import wait_for

from .conftest import Start
from .servers import REPORT, USAGE, Received, Server, begin_stream, event, send_json, send_piece


def test_a_chat_request_reaches_the_server_as_a_session(start: Start, server: Server) -> None:
    gateway = start([server])
    tools = [{"type": "function", "function": {"name": "ls", "parameters": {}}}]
    answer = gateway.chat(tools=tools, temperature=0)
    assert answer.status_code == 200, answer.text
    sent = server.received[0].body
    assert sent["session_id"].startswith("ley-")
    assert sent["custom_params"] == {"leyline": {"mode": "amortize"}}
    assert sent["tools"] == tools and sent["temperature"] == 0
    assert sent["messages"] == [{"role": "user", "content": "hello"}]


def test_the_answer_tells_cached_and_spliced_tokens(start: Start, server: Server) -> None:
    gateway = start([server])
    answer = gateway.chat().json()
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 80, "spliced_tokens": 55}
    assert answer["leyline"] == REPORT
    # What only the gateway had asked for.
    assert "meta_info" not in answer["choices"][0]
    assert gateway.metric("tokens_total", tenant="default", kind="spliced") == 55
    asked = gateway.chat(return_meta_info=True).json()
    assert asked["choices"][0]["meta_info"]["leyline"] == REPORT


@pytest.mark.parametrize("wants_usage", [False, True])
def test_streams_pass_event_by_event(start: Start, server: Server, wants_usage: bool) -> None:
    gateway = start([server])
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if wants_usage else {}
    answer = gateway.chat(stream=True, **options)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(each) for each in events[:-1]]
    said = [choice["delta"]["content"] for each in chunks for choice in each["choices"]]
    assert said == ["a", "b", "c"]
    assert [each["usage"] for each in chunks if each["usage"]] == ([USAGE] if wants_usage else [])
    # Counted in any case.
    assert gateway.metric("tokens_total", tenant="default", kind="cached") == 80


def test_the_first_piece_comes_before_the_last_is_there(start: Start, server: Server) -> None:
    go_on = threading.Event()

    async def slowly(received: Received, writer: asyncio.StreamWriter) -> None:
        begin_stream(writer)
        send_piece(writer, event({"choices": [], "n": 1}))
        await writer.drain()
        await asyncio.to_thread(go_on.wait, 20)
        send_piece(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    server.behaviour = slowly
    gateway = start([server])
    body = {"messages": [], "stream": True}
    with gateway.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        pieces = answer.iter_text()
        assert json.loads(next(pieces).removeprefix("data: "))["n"] == 1
        go_on.set()
        assert "".join(pieces) == "data: [DONE]\n\n"


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
def test_errors_of_the_server_pass_unchanged(start: Start, server: Server, status: int) -> None:
    said = {"object": "error", "message": "no such thing", "type": "BadRequest", "code": status}

    async def refuses(received: Received, writer: Any) -> None:
        send_json(writer, said, status, {"retry-after": "7"})

    server.behaviour = refuses
    gateway = start([server])
    for stream in (False, True):
        answer = gateway.chat(stream=stream)
        assert (answer.status_code, answer.json(), answer.headers["retry-after"]) == (status, said, "7")
    # An answer is an answer: nobody else was asked.
    assert len(server.received) == 2


def test_completions_and_models(start: Start, server: Server) -> None:
    gateway = start([server])
    body = {"model": "tiny", "prompt": "once upon a time"}
    assert gateway.client.post("/v1/completions", json=body).status_code == 200
    sent = server.received[0].body
    # Nothing names a session, and nothing of chats is asked for.
    assert sent == body
    assert gateway.client.get("/v1/models").json()["data"] == [{"id": "tiny"}]


def test_what_a_client_says_itself_goes_first(start: Start, server: Server) -> None:
    gateway = start([server])
    hints = {"actions": []}
    gateway.chat(custom_params={"leyline": {"mode": "off"}, "kv_hints": hints})
    assert server.received[0].body["custom_params"] == {"leyline": {"mode": "off"}, "kv_hints": hints}


def test_health_readiness_and_metrics(start: Start, server: Server) -> None:
    gateway = start([server])
    assert gateway.client.get("/health").status_code == 200
    wait_for(lambda: gateway.client.get("/ready").status_code == 200, "a healthy server is not used")
    assert gateway.client.get("/ready").json() == {"ready": True, "draining": False, "up": ["a"]}
    server.healthy = False
    wait_for(lambda: gateway.client.get("/ready").status_code == 503, "a server that fails its checks is up")
    assert gateway.client.get("/health").status_code == 200
    server.healthy = True
    wait_for(lambda: gateway.client.get("/ready").status_code == 200, "a healed server stays down")
    gateway.chat()
    counted = {"endpoint": "/v1/chat/completions", "status": "200", "tenant": "default"}
    wait_for(lambda: gateway.metric("requests_total", **counted) == 1, "the request is not counted")
    text = gateway.client.get("/metrics").text
    line = 'leyline_gateway_requests_total{endpoint="/v1/chat/completions",status="200",tenant="default"} 1.0'
    assert line in text
    assert 'leyline_gateway_backend_up{backend="a"} 1.0' in text


def test_other_addresses_and_methods_are_refused_in_openais_words(start: Start, server: Server) -> None:
    gateway = start([server])
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/chat/completions", 405)):
        answer = gateway.client.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert not server.received
