"""Sessions over real ``openai`` clients: what they put on the wire, and what they make of the answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI

from leyline_lmcache.client import AsyncSession, Report, Session
from leyline_lmcache.policies import KeepToolResults, PolicyError, Redact

LONG = "output " * 20
STUB = "[old tool output removed]"
USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 7,
    "total_tokens": 107,
    "prompt_tokens_details": {"cached_tokens": 60},
}


class Server:
    """Answers as SGLang does, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answer: dict[str, Any] = {}
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked.append({"path": self.path, **body})
                if body["model"] == "refused":
                    self.reply(400, "application/json", b'{"error": {"message": "no such model"}}')
                elif body.get("stream"):
                    chunks = server.chunks(include_usage=body["stream_options"]["include_usage"])
                    data = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
                    self.reply(200, "text/event-stream", data.encode())
                else:
                    self.reply(200, "application/json", json.dumps(server.whole()).encode())

            def reply(self, status: int, kind: str, data: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def whole(self) -> dict[str, Any]:
        choice = {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [
                    {"id": "c9", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
                ],
            },
        }
        made = {"id": "r1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return made | {"usage": USAGE} | self.answer | {"choices": [choice | self.answer.get("choice", {})]}

    def chunks(self, *, include_usage: bool) -> Iterator[dict[str, Any]]:
        made = {"id": "r1", "object": "chat.completion.chunk", "created": 0, "model": "m"}
        for text in ("a", "b"):
            delta = {"role": "assistant", "content": text}
            yield made | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        if include_usage:
            yield made | {"choices": [], "usage": USAGE}

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def openai(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url, api_key="-", max_retries=0) as made:
        yield made


def history(turns: int) -> list[Any]:
    made: list[Any] = [{"role": "user", "content": "task"}]
    for number in range(turns):
        calls = [{"id": f"c{number}", "type": "function", "function": {"name": "bash", "arguments": "{}"}}]
        made.append({"role": "assistant", "content": None, "tool_calls": calls})
        made.append({"role": "tool", "tool_call_id": f"c{number}", "content": LONG})
    return made


def test_a_session_names_itself_and_asks_for_splices(server: Server, openai: OpenAI) -> None:
    first, second = Session(openai), Session(openai)
    for session in (first, first, second):
        session.chat.completions.create(model="m", messages=history(0), temperature=0)
    ids = [asked["session_id"] for asked in server.asked]
    assert ids[0] == ids[1] == first.session_id != ids[2] == second.session_id
    assert server.asked[0] == {
        "path": "/v1/chat/completions",
        "model": "m",
        "messages": [{"role": "user", "content": "task"}],
        "temperature": 0,
        "session_id": first.session_id,
        "custom_params": {"leyline": {"mode": "amortize"}},
        "return_meta_info": True,
    }


def test_what_the_harness_sends_itself_stays(server: Server, openai: OpenAI) -> None:
    session = Session(openai, session_id="mine", mode="off")
    extra = {"cache_salt": "t", "session_id": "other", "custom_params": {"a": 1}}
    session.create(model="m", messages=history(0), extra_body=extra, n=2)
    asked = server.asked[0]
    assert (asked["cache_salt"], asked["session_id"]) == ("t", "other")
    assert asked["custom_params"] == {"a": 1, "leyline": {"mode": "off"}}
    assert "return_meta_info" not in asked
    assert extra == {"cache_salt": "t", "session_id": "other", "custom_params": {"a": 1}}
    with pytest.raises(ValueError, match="forget"):
        Session(openai, mode="forget")


def test_the_policy_is_applied_to_each_call_and_the_history_stays_whole(
    server: Server, openai: OpenAI, tmp_path: Path
) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("policies: [keep_tool_results: {keep: 1}]")
    for policy in (KeepToolResults(keep=1), file, str(file)):
        session = Session(openai, policy=policy)
        messages = history(3)
        session.chat.completions.create(model="m", messages=messages)
        sent = [message["content"] for message in server.asked[-1]["messages"] if message["role"] == "tool"]
        assert sent == [STUB, STUB, LONG]
        assert messages == history(3)
        assert session.last is not None
        assert (session.last.edited, session.last.removed) == (2, 2 * (len(LONG) - len(STUB)))


def test_after_the_models_own_words_were_redacted_a_new_session_begins(
    server: Server, openai: OpenAI
) -> None:
    """Otherwise KV that has read them would be spliced."""
    session = Session(openai, session_id="s", policy=Redact(("key-[0-9]",)))
    said = [*history(0), {"role": "assistant", "content": "key-1"}, {"role": "user", "content": "go on"}]
    for messages in ([{"role": "user", "content": "key-1"}], said, [*said, *said[1:]]):
        session.create(model="m", messages=messages)
    first, second, third = (asked["session_id"] for asked in server.asked)
    assert first == "s"
    assert second.startswith("s.") and third.startswith("s.") and second != third
    assert "key-1" not in json.dumps(server.asked)


def test_an_answer_may_be_appended_as_it_is(server: Server, openai: OpenAI) -> None:
    session = Session(openai, policy=KeepToolResults(keep=0))
    messages = history(1)
    answer = session.chat.completions.create(model="m", messages=messages)
    messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": "c9", "content": "x"}]
    session.chat.completions.create(model="m", messages=messages)
    assert server.asked[1]["messages"][2]["content"] == STUB
    assert server.asked[1]["messages"][3] == {
        "role": "assistant",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c9", "type": "function", "function": {"name": "bash", "arguments": "{}"}}],
    }
    with pytest.raises(TypeError, match="expected objects with a role, got str"):
        session.create(model="m", messages=["hi"])


def test_what_was_saved_is_added_up(server: Server, openai: OpenAI) -> None:
    session = Session(openai)
    server.answer = {
        "choice": {"meta_info": {"leyline": {"outcome": "spliced", "reason": None, "spliced": 40}}}
    }
    session.create(model="m", messages=history(0))
    assert session.last == Report(0, 0, 100, 60, 40, 7, "spliced")
    # As the gateway says it.
    details = {"cached_tokens": 60, "spliced_tokens": 20}
    server.answer = {
        "usage": USAGE | {"prompt_tokens_details": details},
        "leyline": {"outcome": "fallback", "reason": "unknown_base"},
    }
    session.create(model="m", messages=history(0))
    assert session.last == Report(0, 0, 100, 60, 20, 7, "fallback", "unknown_base")
    # A server that says nothing.
    server.answer = {"usage": None}
    session.create(model="m", messages=history(0))
    assert session.last == Report(0, 0)
    totals = session.totals
    assert (totals.calls, totals.prompt, totals.cached, totals.spliced) == (3, 200, 120, 60)
    assert (totals.completion, totals.hit_rate) == (14, 0.6)


@pytest.mark.parametrize("wanted", [None, {"include_usage": True}])
def test_a_stream_is_read_along(server: Server, openai: OpenAI, wanted: dict[str, bool] | None) -> None:
    session = Session(openai)
    fields = {"stream_options": wanted} if wanted else {}
    with session.chat.completions.create(model="m", messages=history(0), stream=True, **fields) as stream:
        assert stream.response.status_code == 200
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks if chunk.choices) == "ab"
    # The event with the usage is seen by who asked for it.
    assert sum(not chunk.choices for chunk in chunks) == (1 if wanted else 0)
    assert session.last == Report(0, 0, 100, 60, None, 7)
    assert "return_meta_info" not in server.asked[0]


def test_a_stream_that_is_left_is_closed_and_not_counted(openai: OpenAI) -> None:
    session = Session(openai)
    with session.create(model="m", messages=history(0), stream=True) as stream:
        next(stream)
    assert stream.response.is_closed
    assert session.totals.calls == 0


def test_an_asynchronous_client(server: Server) -> None:
    async def run() -> None:
        async with AsyncOpenAI(base_url=server.url, api_key="-", max_retries=0) as openai:
            session = AsyncSession(openai, policy=KeepToolResults(keep=1))
            answer = await session.chat.completions.create(model="m", messages=history(2))
            assert answer.choices[0].message.tool_calls[0].id == "c9"
            assert [message["content"] for message in server.asked[0]["messages"][2::2]] == [STUB, LONG]
            async with await session.create(model="m", messages=history(0), stream=True) as stream:
                texts = [chunk.choices[0].delta.content async for chunk in stream]
            assert texts == ["a", "b"]
            assert (session.totals.calls, session.totals.cached) == (2, 120)

    asyncio.run(run())


def test_an_error_of_the_server_is_the_clients_own(openai: OpenAI) -> None:
    session = Session(openai)
    with pytest.raises(BadRequestError):
        session.create(model="refused", messages=history(0))
    assert session.totals.calls == 0


class Dropping:
    def transform(self, messages: Any, turn_idx: int) -> Any:
        return [message for message in messages if message["role"] != "tool"]


def test_a_policy_that_breaks_the_messages_sends_nothing(server: Server, openai: OpenAI) -> None:
    with pytest.raises(PolicyError):
        Session(openai, policy=Dropping()).create(model="m", messages=history(2))
    assert server.asked == []


def test_nothing_goes_past_the_policy_unnoticed(openai: OpenAI) -> None:
    session = Session(openai)
    assert session.models is openai.models
    for name in ("with_raw_response", "stream", "parse"):
        with pytest.raises(AttributeError, match="a session has create"):
            getattr(session.chat.completions, name)
