"""Policies at work on requests."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from .conftest import Start
from .servers import Server

TIDY = "policies: {tidy: [keep_tool_results: {keep: 1}]}\npolicy: tidy\n"
CLEAR = {
    "edits": [
        {
            "type": "clear_tool_uses_20250919",
            "trigger": {"type": "tool_uses", "value": 1},
            "keep": {"type": "tool_uses", "value": 1},
        }
    ]
}


def conversation(calls: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "look around"}]
    for number in range(calls):
        call = {"id": f"c{number}", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": f"{number} " * 200})
    return messages


def stubbed(server: Server) -> list[bool]:
    """Which tool results the server did not get in full."""
    got = server.received[-1].body["messages"]
    return [len(each["content"]) < 300 for each in got if each["role"] == "tool"]


def test_a_configured_policy_edits_the_messages(start: Start, server: Server) -> None:
    gateway = start([server], TIDY)
    messages = conversation(3)
    gateway.chat(messages)
    assert stubbed(server) == [True, True, False]
    assert server.received[0].body["messages"][1] == messages[1]
    # The session is that of the conversation before it was edited.
    gateway.chat(messages[:1])
    assert server.received[0].body["session_id"] == server.received[1].body["session_id"]
    assert gateway.metric("policy_runs_total", policy="tidy", outcome="changed") == 1
    assert gateway.metric("policy_runs_total", policy="tidy", outcome="unchanged") == 1


def test_a_tenant_may_have_none(start: Start, server: Server) -> None:
    text = TIDY + "auth: {mode: check, keys_env: KEYS}\ntenants: {acme: {policy: none}}"
    gateway = start([server], text, KEYS="acme k")
    gateway.chat(conversation(3), headers={"authorization": "Bearer k"})
    assert stubbed(server) == [False] * 3


def test_a_request_may_bring_context_management(start: Start, server: Server) -> None:
    gateway = start([server])
    gateway.chat(conversation(3), context_management=CLEAR)
    assert stubbed(server) == [True, True, False]
    assert "context_management" not in server.received[0].body
    gateway.chat(conversation(3))
    assert stubbed(server) == [False] * 3


def test_context_management_does_not_replace_the_operators_policy(start: Start, server: Server) -> None:
    gateway = start([server], "policies: {hide: [redact: {patterns: ['secret-[0-9]+']}]}\npolicy: hide\n")
    messages = [*conversation(2), {"role": "user", "content": "secret-123"}]
    gateway.chat(messages, context_management=CLEAR)
    assert stubbed(server) == [True, False]
    assert "secret-123" not in server.received[0].content.decode()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("x", "context_management: expected an object"),
        ({"edits": 1}, "context_management.edits: expected a list"),
        ({"edits": [{"type": "other"}]}, r"context_management.edits\[0\].type"),
        ({"edits": [{"type": "clear_tool_uses_20250919", "keep": 3}]}, r"edits\[0\].keep"),
    ],
)
def test_context_management_that_makes_no_sense(start: Start, server: Server, value: Any, says: str) -> None:
    gateway = start([server])
    answer = gateway.chat(conversation(1), context_management=value)
    said = answer.json()["error"]
    assert (answer.status_code, said["param"]) == (400, "context_management")
    assert re.search(says, said["message"])
    assert not server.received


class Fails:
    def transform(self, messages: Sequence[Mapping[str, Any]], turn_idx: int) -> Any:
        raise RuntimeError(messages[0]["content"])


class MakesNoData:
    def transform(self, messages: Sequence[Mapping[str, Any]], turn_idx: int) -> Any:
        return [{"role": "user", "content": object()}]


class LosesCalls:
    def transform(self, messages: Sequence[Mapping[str, Any]], turn_idx: int) -> Any:
        return [message for message in messages if message["role"] != "tool"]


@pytest.mark.parametrize("policy", [Fails(), MakesNoData(), LosesCalls()])
def test_a_policy_that_fails_fails_no_request(
    start: Start, server: Server, policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = start([server], TIDY, policies={"tidy": policy})
    assert gateway.chat(conversation(2)).status_code == 200
    assert server.received[0].body["messages"] == conversation(2)
    assert gateway.metric("policy_runs_total", policy="tidy", outcome="failed") == 1
    assert "policy tidy failed" in caplog.text and "look around" not in caplog.text


def test_unless_it_must_not_be_left_out(start: Start, server: Server) -> None:
    gateway = start([server], TIDY + "on_policy_error: refuse\n", policies={"tidy": Fails()})
    answer = gateway.chat(conversation(2))
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "policy_failed")
    assert not server.received


def test_what_was_erased_of_the_models_own_words_is_kept_in_no_session(start: Start, server: Server) -> None:
    """KV that has read the secret must not be spliced: the session goes on as another one."""
    gateway = start([server], "policies: {safe: [redact: {patterns: ['hunter[0-9]']}]}\npolicy: safe\n")
    talk = [
        {"role": "user", "content": "my password is hunter2"},
        {"role": "assistant", "content": "noted"},
        {"role": "user", "content": "go on"},
    ]
    told = [{**talk[0]}, {"role": "assistant", "content": "noted: hunter2"}, talk[2]]
    names = []
    for messages in (talk, told, told, talk):
        gateway.chat(messages, headers={"x-leyline-session": "s"})
        body = server.received[-1].body
        names.append(body["session_id"])
        assert "hunter2" not in json.dumps(body)
    assert names[0] == names[3] != names[1] == names[2]
