"""What is read from answers on their way, whatever their pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_lmcache.gateway.usage import Request, StreamUsage, request_usage, settle_answer

from .servers import USAGE, chunk, event

STREAM = [
    event(chunk("a")),
    b"event: other\ndata: {}\n\n",
    b": a comment\r\n\r\n",
    event(chunk('"usage":{')),
    event({"choices": [], "usage": USAGE}),
    b"data: [DONE]\n\n",
]


@given(st.lists(st.integers(0, sum(map(len, STREAM)))), st.booleans())
def test_any_cut_of_a_stream_gives_the_same(cuts: list[int], strip: bool) -> None:
    whole = b"".join(STREAM)
    edges = sorted({0, len(whole), *cuts})
    reader = StreamUsage(Request(usage=strip))
    got = b"".join(reader.pass_on(whole[a:b]) for a, b in pairwise(edges)) + reader.end()
    assert got == b"".join(each for each in STREAM if not (strip and b"total_tokens" in each))
    assert (reader.tokens.prompt, reader.tokens.cached, reader.tokens.completion) == (100, 80, 3)


@given(st.binary(max_size=200))
def test_a_stream_that_is_none_passes(content: bytes) -> None:
    reader = StreamUsage(Request(usage=True))
    assert reader.pass_on(content) + reader.end() == content


def test_a_stream_without_ends_is_not_hoarded() -> None:
    reader = StreamUsage(Request())
    assert reader.pass_on(b"x" * (5 * 1024 * 1024))


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"choices": 1, "usage": []}', b"[" * 10**5])
def test_an_answer_that_is_none_passes(content: bytes) -> None:
    assert settle_answer(content, Request(meta=True))[0] == content


def test_what_a_client_asked_for_is_left_alone() -> None:
    for body in ({"stream": True, "stream_options": {"include_usage": True}}, {"return_meta_info": True}):
        asked: dict[str, Any] = dict(body)
        assert request_usage(asked, chat=True) == Request() and asked == body
    body = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert request_usage(body, chat=True) == Request(usage=True)
    assert body["stream_options"] == {"continuous_usage_stats": True, "include_usage": True}


def test_a_fallback_is_told_with_its_reason() -> None:
    report = {"outcome": "fallback", "reason": "no_memory", "spliced": 0}
    answer = {"choices": [{"meta_info": {"leyline": report}}], "usage": USAGE}
    content, tokens = settle_answer(json.dumps(answer).encode(), Request(meta=True))
    said = json.loads(content)
    assert said["leyline"] == report and tokens.spliced == 0
    assert said["usage"]["prompt_tokens_details"]["spliced_tokens"] == 0
