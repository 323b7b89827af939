"""What names a session."""

from __future__ import annotations

from typing import Any

import pytest

from leyline_lmcache.gateway.errors import ApiError
from leyline_lmcache.gateway.sessions import identify, routing_key
from leyline_lmcache.gateway.settings import Source

ALL = tuple(Source)
SYSTEM = {"role": "system", "content": "be brief"}
FIRST = {"role": "user", "content": "fix the tests"}


def wire(body: dict[str, Any], header: str | None = None, caller: str = "acme", sources: Any = ALL) -> str:
    found = identify(body, header, caller, sources)
    assert found is not None
    return found.wire


def test_the_header_goes_before_the_user_and_that_before_the_head() -> None:
    body = {"messages": [FIRST], "user": "u", "model": "m"}
    by_header, by_user = wire(body, "h"), wire(body)
    by_head = wire({**body, "user": None})
    assert len({by_header, by_user, by_head}) == 3
    assert by_header == wire({"messages": []}, "h")
    assert by_user == wire({"user": "u", "messages": []})
    assert by_head == wire(body, sources=(Source.HEAD,))
    # SGLang's field is as good as the header.
    assert wire({**body, "session_id": "h"}) == by_header


def test_the_head_stays_while_everything_after_it_is_edited() -> None:
    first = {"model": "m", "messages": [SYSTEM, FIRST]}
    later = {"model": "m", "messages": [SYSTEM, FIRST, {"role": "assistant", "content": "x"}, FIRST]}
    assert wire(first) == wire(later)
    others = [
        {**first, "model": "other"},
        {**first, "messages": [FIRST]},
        {**first, "messages": [SYSTEM, {"role": "user", "content": "else"}]},
        {**first, "messages": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "else"}]}]},
    ]
    assert len({wire(first), *(wire(other) for other in others)}) == 5


def test_callers_do_not_share_sessions_i7() -> None:
    body = {"messages": [FIRST], "user": "u"}
    for header in ("h", None):
        assert wire(body, header, "acme") != wire(body, header, "other")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": "no list"},
        {"messages": [SYSTEM]},
        {"messages": [None, 1]},
        {"user": 5},
        {"prompt": "once"},
    ],
)
def test_nothing_names_a_session(body: dict[str, Any]) -> None:
    assert identify(body, None, "acme", ALL) is None
    assert routing_key(body, "acme", None)


def test_the_name_in_the_answer_leads_to_the_same_session() -> None:
    for body in ({"messages": [FIRST]}, {"user": "u"}):
        found = identify(body, None, "acme", ALL)
        assert found is not None
        assert wire({}, found.name) == found.wire


@pytest.mark.parametrize("header", ["", "x" * 257, "a\tb", "käse"])
def test_a_header_that_is_no_name_is_refused(header: str) -> None:
    with pytest.raises(ApiError, match="x-leyline-session: expected") as refused:
        identify({}, header, "acme", ALL)
    assert refused.value.status == 400


def test_requests_that_begin_alike_go_to_the_same_server() -> None:
    long = "once upon a time " * 100
    same = {routing_key({"prompt": long + end}, "acme", None) for end in ("", "a", "b")}
    assert len(same) == 1
    assert routing_key({"prompt": [1, 2, 3]}, "acme", None) != routing_key({"prompt": [4]}, "acme", None)
    assert routing_key({"prompt": long}, "other", None) not in same
