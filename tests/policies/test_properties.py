"""What holds of every built-in policy, and of several in a row, on random conversations."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st
from policies.strategies import CLEAR, OTHERS, PIPELINES, POLICIES, Conversation, conversations

from leyline_lmcache.policies import ClearToolUses, Policy, Redact, StripReasoning, Unit, apply, problems


def wire(messages: Any) -> str:
    return json.dumps(list(messages), sort_keys=True)


@given(conversations(), POLICIES | PIPELINES)
def test_calls_keep_their_results_and_nothing_is_changed_in_place(
    messages: Conversation, policy: Policy
) -> None:
    assert problems(messages) == []
    before = copy.deepcopy(messages)
    made = policy.transform(messages, 3)
    assert messages == before
    assert problems(made) == []
    assert len(made) == len(messages)
    for old, new in zip(messages, made, strict=True):
        assert new["role"] == old["role"]
        assert new.get("tool_call_id") == old.get("tool_call_id")
        calls = zip(old.get("tool_calls", ()), new.get("tool_calls", ()), strict=True)
        for call, still in calls:
            assert (call["id"], call["function"]["name"]) == (still["id"], still["function"]["name"])
            assert isinstance(json.loads(still["function"]["arguments"]), dict)
    # The same every time, also for an equal conversation that is another object.
    assert wire(policy.transform(before, 3)) == wire(made)


@given(conversations(), POLICIES | PIPELINES)
def test_nothing_grows(messages: Conversation, policy: Policy) -> None:
    assume(not any(isinstance(each, Redact) for each in [policy, *getattr(policy, "policies", ())]))
    for old, new in zip(messages, apply(policy, messages), strict=True):
        assert len(wire([new])) <= len(wire([old]))


@given(conversations(), OTHERS | CLEAR)
def test_a_second_time_changes_nothing(messages: Conversation, policy: Policy) -> None:
    if isinstance(policy, ClearToolUses):
        # Put off again and again, clearings by number of uses come at other turns when uses were cleared.
        assume(policy.clear_at_least is None or policy.trigger.type is Unit.INPUT_TOKENS)
    once = apply(policy, messages)
    assert wire(apply(policy, json.loads(wire(once)))) == wire(once)


@given(conversations(), POLICIES | PIPELINES)
def test_what_was_changed_once_stays_as_it_is(messages: Conversation, policy: Policy) -> None:
    """Turn by turn a message is as it came, then changed when its time has come, and never changed back."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    forms: list[list[str]] = [[] for _ in messages]
    for end in [*turns, len(messages)]:
        for index, made in enumerate(apply(policy, messages[:end])):
            if forms[index][-1:] != [wire([made])]:
                forms[index].append(wire([made]))
    several = len(getattr(policy, "policies", (policy,)))
    for message, each in zip(messages, forms, strict=True):
        assert len(set(each)) == len(each), "back to an earlier form"
        # Each policy changes a message once, or each call in it once.
        assert len(each) <= 1 + several * max(1, len(message.get("tool_calls", ())))


@given(conversations(), POLICIES)
def test_what_the_model_has_not_read_stays(messages: Conversation, policy: Policy) -> None:
    assume(not isinstance(policy, Redact))
    read = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    made = apply(policy, messages)
    assert wire(made[read + 1 :]) == wire(messages[read + 1 :])
    if not isinstance(policy, StripReasoning):
        assert all(
            wire([old]) == wire([new])
            for old, new in zip(messages, made, strict=True)
            if old["role"] in ("system", "developer")
        )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
MALFORMED = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["assistant", "tool", "user", "function"]) | JSON},
        optional={
            "content": JSON | st.text(min_size=90, max_size=100),
            "tool_calls": JSON
            | st.lists(
                st.fixed_dictionaries(
                    {}, optional={"id": JSON, "function": JSON | st.fixed_dictionaries({"arguments": JSON})}
                ),
                max_size=2,
            ),
            "tool_call_id": JSON,
            "reasoning_content": JSON,
            "name": JSON,
        },
    ),
    max_size=5,
)


@given(MALFORMED, POLICIES | PIPELINES)
def test_what_is_no_conversation_is_no_fault_of_ours(messages: Any, policy: Policy) -> None:
    """The server refuses it in its own words."""
    apply(policy, messages)
