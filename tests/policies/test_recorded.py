"""Every built-in on conversations of real agents."""

from __future__ import annotations

import copy
import json

import pytest
from policies.recorded import conversations

from leyline_lmcache.policies import (
    ClearToolUses,
    KeepToolResults,
    Pipeline,
    Policy,
    Redact,
    StripReasoning,
    StubFailedCalls,
    Threshold,
    Unit,
    apply,
    problems,
)
from leyline_lmcache.policies.trial import sums, trial

POLICIES: dict[str, Policy] = {
    "keep": KeepToolResults(),
    "keep observations": KeepToolResults(keep=2, observations=True),
    "keep in batches": KeepToolResults(keep=1, batch=3, observations=True, stub="[{chars} characters]"),
    "failed": StubFailedCalls(observations=True, clear_inputs=True),
    "reasoning": StripReasoning(),
    "clear by tokens": ClearToolUses(
        trigger=Threshold(Unit.INPUT_TOKENS, 3000),
        clear_at_least=Threshold(Unit.INPUT_TOKENS, 200),
        clear_tool_inputs=True,
    ),
    "clear by uses": ClearToolUses(trigger=Threshold(Unit.TOOL_USES, 5), exclude_tools=("edit",)),
    "redact": Redact((r"(?i)\b[\w.+-]+@[\w-]+\.[\w.]+", r"/\w+/\w+")),
}
POLICIES["all"] = Pipeline(
    (
        POLICIES["clear by tokens"],
        POLICIES["failed"],
        POLICIES["keep observations"],
        POLICIES["reasoning"],
        POLICIES["redact"],
    )
)


@pytest.mark.parametrize("name", POLICIES)
def test_valid_deterministic_and_stable(name: str) -> None:
    policy = POLICIES[name]
    changed = 0
    for title, messages in conversations().items():
        # Two recordings lack the ids of their calls; that is not for a policy to mend.
        assert problems(messages) == [] or title in ("swe-14", "swe-16"), title
        before = copy.deepcopy(messages)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        forms: list[list[str]] = [[] for _ in messages]
        for turn, end in enumerate([*turns, len(messages)]):
            made = policy.transform(messages[:end], turn)
            assert problems(made) == problems(messages[:end]), title
            assert json.dumps(made) == json.dumps(policy.transform(before[:end], turn)), title
            for index, message in enumerate(made):
                form = json.dumps(message)
                if not forms[index] or forms[index][-1] != form:
                    forms[index].append(form)
        assert messages == before, title
        steps = len(policy.policies) if isinstance(policy, Pipeline) else 1
        # As it came, then as each policy leaves it (and each call in it): never more, never back.
        for message, each in zip(messages, forms, strict=True):
            assert len(set(each)) == len(each), title
            assert len(each) <= 1 + steps * max(1, len(message.get("tool_calls", ()))), title
        changed += sum(json.dumps(old) != json.dumps(new) for old, new in zip(messages, made, strict=True))
    assert changed > 10


def test_the_papers_policy_on_swe_agent() -> None:
    """Stub outputs older than two turns: a splice reuses ten points more than prefix caching."""
    policy = POLICIES["keep observations"]
    turns = [
        turn
        for name, messages in conversations().items()
        if name.startswith("swe") and not name.endswith("-tools")
        for turn in trial(policy, messages, len)
    ]
    found = sums(turns)
    assert found.full - found.sent > 0.2 * found.full
    assert found.kept - found.prefix > 0.1 * found.sent


def test_a_policy_that_works_on_text_and_on_calls_alike() -> None:
    for title, messages in conversations().items():
        made = apply(POLICIES["keep observations"], messages)
        stubs = [message for message in made if message["content"] == "[old tool output removed]"]
        assert all(message["role"] in ("tool", "user") for message in stubs), title
