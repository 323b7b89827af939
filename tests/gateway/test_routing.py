"""Which server a session goes to, and what happens when it goes away."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.processes import wait_for

from leyline_lmcache.gateway.routing import Router
from leyline_lmcache.gateway.settings import Backend

from .conftest import Start
from .servers import Received, Server, answers, begin_stream, chunk, event, hangs_up, says_nothing, send_piece

HEALTH = "health: {interval_s: 3600}"


def backends(count: int) -> list[Backend]:
    return [Backend(f"b{number}", f"http://b{number}") for number in range(count)]


@given(st.integers(2, 8), st.data())
def test_a_server_that_goes_takes_only_its_own_sessions_with_it(count: int, data: st.DataObject) -> None:
    router = Router(backends(count))
    gone = data.draw(st.sampled_from(list(router.backends)))
    keys = [f"s{number}" for number in range(50)]
    before = {key: router.order(key)[0] for key in keys}
    router.failed(gone, "test", surely=True)
    after = {key: router.order(key)[0] for key in keys}
    assert all(after[key] is before[key] for key in keys if before[key] is not gone)
    assert gone not in after.values()
    router.healthy(gone)
    assert {key: router.order(key)[0] for key in keys} == before


def test_sessions_are_spread_and_order_of_configuration_does_not_matter() -> None:
    there = backends(4)
    ways = [Router(there), Router(there[::-1])]
    homes = [[router.order(f"s{number}")[0].name for number in range(400)] for router in ways]
    assert homes[0] == homes[1]
    assert all(50 < homes[0].count(backend.name) < 150 for backend in there)


def test_a_session_that_moved_stays_until_its_new_server_goes() -> None:
    router = Router(backends(3), max_moved=2)
    first, second, third = router.order("s")
    router.failed(first, "test", surely=True)
    router.served("s", second)
    router.healthy(first)
    assert router.order("s") == [second, first, third]
    router.failed(second, "test", surely=True)
    assert router.order("s") == [first, third, second]
    router.served("s", first)
    router.healthy(second)
    assert router.order("s") == [first, second, third]
    # Bounded: the one that was used least recently is forgotten.
    moved = {key: router.order(key) for key in ("x", "y", "z")}
    for key, ranked in moved.items():
        router.served(key, ranked[1])
    assert [router.order(key)[0] is ranked[1] for key, ranked in moved.items()] == [False, True, True]


def test_checks_may_fail_a_few_times() -> None:
    router = Router(backends(1), failures=3)
    (only,) = router.backends
    for _ in range(2):
        router.failed(only, "slow")
    router.healthy(only)
    for _ in range(2):
        router.failed(only, "slow")
    assert router.is_up(only)
    router.failed(only, "slow")
    assert not router.is_up(only) and not router.any_up


def homed(pair: tuple[Server, Server], ask: Any) -> tuple[Server, Server]:
    """The pair, the one that serves the session first."""
    before = len(pair[0].received)
    assert ask().status_code == 200
    return pair if len(pair[0].received) > before else (pair[1], pair[0])


def test_a_session_stays_on_its_server(start: Start, pair: tuple[Server, Server]) -> None:
    gateway = start(pair)
    for number in range(10):
        for _ in range(3):
            gateway.chat(headers={"x-leyline-session": f"s{number}"})
    names = [{each.body["session_id"] for each in server.received} for server in pair]
    assert names[0] and names[1] and not names[0] & names[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_killed_servers_session_goes_on_elsewhere_and_stays(
    start: Start, pair: tuple[Server, Server], stream: bool
) -> None:
    gateway = start(pair, HEALTH)
    home, other = homed(pair, gateway.chat)
    home.kill()
    for _ in range(3):
        answer = gateway.chat(stream=stream)
        assert answer.status_code == 200 and (not stream or "[DONE]" in answer.text)
    assert [each.body["session_id"] for each in other.received] == [home.received[0].body["session_id"]] * 3
    up = gateway.client.get("/ready").json()["up"]
    assert len(up) == 1
    assert sum(gateway.metric("failovers_total", backend=name) for name in "ab") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_dies_before_it_says_anything_is_replaced(
    start: Start, pair: tuple[Server, Server], stream: bool
) -> None:
    gateway = start(pair, HEALTH)
    home, other = homed(pair, gateway.chat)
    home.behaviour = hangs_up
    assert gateway.chat(stream=stream).status_code == 200
    assert len(other.received) == 1


def test_a_server_that_dies_in_the_middle_of_an_answer_is_replaced(
    start: Start, pair: tuple[Server, Server]
) -> None:
    async def half(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()

    gateway = start(pair, HEALTH)
    home, other = homed(pair, gateway.chat)
    home.behaviour = half
    assert gateway.chat().json()["choices"][0]["message"]["content"] == "fine"
    assert len(other.received) == 1


def test_a_stream_that_had_begun_is_not_asked_for_again(start: Start, pair: tuple[Server, Server]) -> None:
    async def half(received: Received, writer: asyncio.StreamWriter) -> None:
        begin_stream(writer)
        send_piece(writer, event(chunk("a")))
        await writer.drain()
        writer.close()

    gateway = start(pair, HEALTH)
    home, other = homed(pair, gateway.chat)
    home.behaviour = half
    answer = gateway.chat(stream=True)
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert json.loads(events[0])["choices"][0]["delta"] == {"content": "a"}
    # What the openai client takes for an error; and no [DONE] that would say that all is well.
    assert json.loads(events[-1])["error"]["code"] == "upstream_failed"
    assert len(events) == 2 and not other.received
    assert gateway.chat().status_code == 200


def test_a_connection_closed_between_two_requests_moves_no_session(start: Start, server: Server) -> None:
    async def once(received: Received, writer: asyncio.StreamWriter) -> None:
        # Only the first connection is bad, as one is that times out just when it is used again.
        if len(server.received) == 2:
            writer.transport.abort()
        else:
            await answers(received, writer)

    server.behaviour = once
    gateway = start([server], HEALTH)
    assert [gateway.chat().status_code for _ in range(3)] == [200] * 3
    assert gateway.router_is_up("a")


def test_no_server_at_all(start: Start, pair: tuple[Server, Server]) -> None:
    gateway = start(pair)
    for server in pair:
        server.kill()
    answer = gateway.chat()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_backend"
    assert gateway.client.get("/ready").status_code == 503
    pair[0].start()
    wait_for(lambda: gateway.client.get("/ready").status_code == 200, "a server that came back is not used")
    assert gateway.chat().status_code == 200


def test_a_client_that_hangs_up_stops_the_server(start: Start, server: Server) -> None:
    gateway = start([server])
    server.behaviour = says_nothing
    for stream in (False, True):
        body = {"messages": [], "stream": stream}
        with (
            pytest.raises(Exception, match="timed out"),
            gateway.client.stream("POST", "/v1/chat/completions", json=body, timeout=0.5),
        ):
            pass
    wait_for(lambda: server.hung_up == 2, "the server still works for nobody")
    wait_for(lambda: gateway.metric("running_requests") == 0, "the request is still counted")
    assert gateway.metric("errors_total", code="client_gone") == 2


def test_a_client_that_leaves_a_stream_stops_the_server(start: Start, server: Server) -> None:
    done = threading.Event()

    async def endless(received: Received, writer: asyncio.StreamWriter) -> None:
        begin_stream(writer)
        try:
            while True:
                send_piece(writer, event(chunk("a")))
                await writer.drain()
                await asyncio.sleep(0.01)
        finally:
            done.set()

    server.behaviour = endless
    gateway = start([server])
    with gateway.client.stream(
        "POST", "/v1/chat/completions", json={"messages": [], "stream": True}
    ) as answer:
        next(answer.iter_bytes())
    assert done.wait(20)
    wait_for(lambda: gateway.metric("running_requests") == 0, "the request is still counted")


def test_i6_no_connection_is_left(start: Start, pair: tuple[Server, Server]) -> None:
    """Answers, refusals, broken streams, and clients that hang up: afterwards nothing is open."""

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def half(received: Received, writer: asyncio.StreamWriter) -> None:
        begin_stream(writer)
        send_piece(writer, event(chunk("a")))
        await writer.drain()
        writer.close()

    gateway = start(pair, HEALTH)
    gateway.chat()
    before = open_files()
    for behaviour in (answers, half, hangs_up, says_nothing, answers):
        for server in pair:
            server.behaviour = behaviour
        for number in range(10):
            body = {"messages": [], "user": f"u{number}", "stream": bool(number % 2)}
            with suppress(httpx.TransportError):
                gateway.client.post("/v1/chat/completions", json=body, timeout=0.3)
    # Idle connections to the servers are kept for a while; each of them is open at both ends here.
    gateway.client.close()
    wait_for(lambda: gateway.metric("running_requests") == 0, "a request is still counted")
    wait_for(lambda: open_files() <= before + 2 * len(pair), f"of {before} files, {open_files()} are open")
