"""Envelopes: what is read, what is ignored, and what is refused by name."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_lmcache.directive import Directive, Mode
from leyline_lmcache.envelope import MAX_ENVELOPE_BYTES, Envelope, parse_envelope
from leyline_lmcache.reasons import Fallback, FallbackReason

from .strategies import SOME

GOOD: dict[str, Any] = {
    "protocol_version": "1",
    "message_id": "m1",
    "actions": [
        {
            "action_id": "a1",
            "action_type": "kv.splice",
            "action_version": "1",
            "payload": {
                "base": "r1",
                "start": 300,
                "end": 500,
                "replacement_ids": [7, 8, 9],
                "mode": "amortize",
            },
        }
    ],
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """GOOD with one field set (or removed, for `...`). Path steps are separated by dots."""
    out: Any = copy.deepcopy(GOOD)
    at = out
    *steps, last = [int(s) if s.isdigit() else s for s in path.split(".")]
    for step in steps:
        at = at[step]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    assert isinstance(out, dict)
    return out


def refusal(raw: Any, **limits: int) -> str:
    with pytest.raises(Fallback) as refused:
        parse_envelope(raw, **limits)
    assert refused.value.reason is FallbackReason.INVALID_DIRECTIVE
    assert len(refused.value.detail) < 300
    return refused.value.detail


@pytest.mark.parametrize("form", [lambda e: e, json.dumps, lambda e: json.dumps(e).encode()])
def test_a_good_envelope(form: Any) -> None:
    expected = Directive("r1", 300, 500, (7, 8, 9), Mode.AMORTIZE, "a1")
    assert parse_envelope(form(GOOD)) == Envelope("m1", (expected,), (), 0)


def test_defaults() -> None:
    raw = changed("actions.0.payload", {"base": "r1", "start": 3, "end": 3})
    assert parse_envelope(raw).directives == (Directive("r1", 3, 3, (), Mode.AMORTIZE, "a1"),)
    assert parse_envelope({"protocol_version": "1", "message_id": "m"}) == Envelope("m", (), (), 0)


def test_the_two_ways_to_forget_are_one() -> None:
    splice = changed("actions.0.payload.mode", "forget")
    forget = changed("actions.0.action_type", "kv.forget")
    del forget["actions"][0]["payload"]["mode"]
    assert parse_envelope(splice) == parse_envelope(forget)
    assert parse_envelope(forget).forgets == (Directive("r1", 300, 500, (7, 8, 9), Mode.FORGET, "a1"),)
    assert parse_envelope(forget).directives == ()
    forget["actions"][0]["payload"]["mode"] = "amortize"
    assert refusal(forget).startswith("actions[0].payload.mode: expected 'forget'")


def test_actions_of_others_are_counted_and_left_alone() -> None:
    raw = copy.deepcopy(GOOD)
    raw["actions"].insert(0, {"action_id": "x", "action_type": "kv.pin", "action_version": "9", "payload": 3})
    raw["actions"].append({"action_type": "other"})
    read = parse_envelope(raw)
    assert read.foreign == 2
    assert len(read.directives) == 1


def test_order_sent_is_kept() -> None:
    raw = copy.deepcopy(GOOD)
    raw["actions"] += [copy.deepcopy(GOOD["actions"][0]) for _ in range(3)]
    for i, action in enumerate(raw["actions"]):
        action["payload"]["start"] = 100 - i
    assert [x.start for x in parse_envelope(raw).directives] == [100, 99, 98, 97]


@pytest.mark.parametrize(
    ("path", "value", "detail"),
    [
        ("protocol_version", "2", "protocol_version: expected '1', got '2'"),
        ("protocol_version", 1, "protocol_version: expected text, got 1"),
        ("protocol_version", ..., "protocol_version: missing"),
        ("message_id", ..., "message_id: missing"),
        ("message_id", 5, "message_id: expected text, got 5"),
        ("message_id", "a\nb", "message_id: expected printable characters only"),
        ("actions.0.payload.base", "\ud800", "actions[0].payload.base: expected printable characters only"),
        ("actions", {"0": 1}, "actions: expected a list, got dict"),
        ("actions", "abc", "actions: expected a list, got 'abc'"),
        ("actions.0", 3, "actions[0]: expected an object, got 3"),
        ("actions.0.action_type", ..., "actions[0].action_type: missing"),
        ("actions.0.action_type", None, "actions[0].action_type: expected text, got None"),
        ("actions.0.action_version", "2", "actions[0].action_version: expected '1' for kv.splice, got '2'"),
        ("actions.0.action_version", ..., "actions[0].action_version: missing"),
        ("actions.0.action_id", ..., "actions[0].action_id: missing"),
        ("actions.0.action_id", "x" * 600, "actions[0].action_id: expected at most 512 characters, got 600"),
        ("actions.0.payload", ..., "actions[0].payload: expected an object, got None"),
        ("actions.0.payload", [1], "actions[0].payload: expected an object, got list"),
        ("actions.0.payload.base", ..., "actions[0].payload.base: missing"),
        ("actions.0.payload.base", "", "actions[0].payload.base: expected the id of a response, got ''"),
        (
            "actions.0.payload.start",
            "x",
            "actions[0].payload.start: expected a non-negative integer, got 'x'",
        ),
        ("actions.0.payload.start", -1, "actions[0].payload.start: expected a non-negative integer, got -1"),
        (
            "actions.0.payload.start",
            True,
            "actions[0].payload.start: expected a non-negative integer, got True",
        ),
        (
            "actions.0.payload.start",
            3.0,
            "actions[0].payload.start: expected a non-negative integer, got 3.0",
        ),
        ("actions.0.payload.start", ..., "actions[0].payload.start: missing"),
        ("actions.0.payload.end", 299, "actions[0].payload.end: expected at least start (300), got 299"),
        ("actions.0.payload.end", None, "actions[0].payload.end: expected a non-negative integer, got None"),
        (
            "actions.0.payload.end",
            2**31,
            "actions[0].payload.end: expected less than 2147483648, got 2147483648",
        ),
        (
            "actions.0.payload.replacement_ids",
            "the secret",
            "actions[0].payload.replacement_ids: expected a list of token ids, got str",
        ),
        (
            "actions.0.payload.replacement_ids",
            None,
            "actions[0].payload.replacement_ids: expected a list of token ids, got NoneType",
        ),
        (
            "actions.0.payload.replacement_ids",
            [1, "the secret"],
            "actions[0].payload.replacement_ids[1]: expected a token id, got str",
        ),
        (
            "actions.0.payload.replacement_ids",
            [-5],
            "actions[0].payload.replacement_ids[0]: expected a token id, got one out of range",
        ),
        (
            "actions.0.payload.replacement_ids",
            [False],
            "actions[0].payload.replacement_ids[0]: expected a token id, got bool",
        ),
        (
            "actions.0.payload.mode",
            "erase",
            "actions[0].payload.mode: expected 'amortize' or 'forget', got 'erase'",
        ),
        (
            "actions.0.payload.mode",
            None,
            "actions[0].payload.mode: expected 'amortize' or 'forget', got None",
        ),
        (
            "actions.0.payload.mode",
            ["forget"],
            "actions[0].payload.mode: expected 'amortize' or 'forget', got list",
        ),
        (
            "actions.0.payload.replacement",
            [1],
            "actions[0].payload: unknown field 'replacement'; "
            "expected base, start, end, replacement_ids, mode",
        ),
    ],
)
def test_a_bad_field_is_named(path: str, value: Any, detail: str) -> None:
    assert refusal(changed(path, value)) == detail


def test_long_text_never_reaches_a_message() -> None:
    secret = "the patient's name is " + "N" * 40
    for path in ("protocol_version", "message_id", "actions", "actions.0", "actions.0.action_version"):
        if path != "message_id":
            assert "patient" not in refusal(changed(path, secret))
    for name in ("start", "end", "replacement_ids", "mode"):
        assert "patient" not in refusal(changed(f"actions.0.payload.{name}", secret))
    assert "patient" not in refusal(changed(f"actions.0.payload.{secret}", 1))


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        '"text"',
        b"\xff\xfe",
        "[" * 100_000,
        '{"a": ' * 50_000,
        '{"protocol_version": "1", "protocol_version": "1", "message_id": "m"}',
        '{"protocol_version": "1", "message_id": "m", "actions": [NaN]}',
        "1" * 10_000,
        "\ufeff{}",
        3,
        None,
        [],
        object(),
    ],
)
def test_what_is_no_envelope_at_all(raw: Any) -> None:
    assert refusal(raw).startswith(("envelope", "protocol_version"))


def test_limits() -> None:
    raw = copy.deepcopy(GOOD)
    raw["actions"] *= 3
    assert refusal(raw, max_actions=2) == "actions: expected at most 2, got 3"
    assert "replacement_ids: expected at most 2 token ids, got 3" in refusal(GOOD, max_replacement=2)
    assert refusal(" " * (MAX_ENVELOPE_BYTES + 1)).startswith("envelope: expected at most")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@SOME
@given(st.data())
def test_any_value_anywhere_is_read_or_refused_by_name(data: st.DataObject) -> None:
    paths = ["protocol_version", "message_id", "actions", "actions.0"]
    paths += [f"actions.0.{n}" for n in ("action_id", "action_type", "action_version", "payload")]
    paths += [f"actions.0.payload.{n}" for n in ("base", "start", "end", "replacement_ids", "mode", "other")]
    raw = changed(data.draw(st.sampled_from(paths)), data.draw(json_values))
    try:
        read = parse_envelope(raw)
    except Fallback as refused:
        assert refused.reason is FallbackReason.INVALID_DIRECTIVE
        assert ":" in refused.detail
    else:
        assert len(read.directives) + len(read.forgets) + read.foreign == len(raw["actions"])


@SOME
@given(st.one_of(st.binary(max_size=60), st.text(max_size=60), json_values))
def test_any_input_at_all_is_read_or_refused(raw: Any) -> None:
    try:
        parse_envelope(raw)
    except Fallback as refused:
        assert refused.reason is FallbackReason.INVALID_DIRECTIVE
