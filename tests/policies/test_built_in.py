"""What each built-in policy does with its options."""

from __future__ import annotations

import json
from typing import Any

import pytest

from leyline_lmcache.policies import (
    ClearToolUses,
    KeepToolResults,
    OptionError,
    Pipeline,
    Policy,
    PolicyError,
    Redact,
    StripReasoning,
    StubFailedCalls,
    Threshold,
    Unit,
    apply,
    erased,
    turn_of,
)
from leyline_lmcache.policies.base import Messages

LONG = "output " * 20
KEPT, STUB, FAILED, CLEARED = (
    "kept",
    "[old tool output removed]",
    "[output of a failed call removed]",
    "cleared",
)


def call(name: str, tool: str = "bash", arguments: str = '{"command": "ls"}') -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": tool, "arguments": arguments}}


def agent(*outputs: Any, tools: str = "", done: bool = True) -> list[dict[str, Any]]:
    """A conversation with one call a turn."""
    made: list[dict[str, Any]] = [{"role": "user", "content": "task"}]
    for number, output in enumerate(outputs):
        tool = tools[number] if tools else "bash"
        made.append({"role": "assistant", "content": None, "tool_calls": [call(f"c{number}", tool)]})
        made.append({"role": "tool", "tool_call_id": f"c{number}", "content": output})
    return [*made, {"role": "assistant", "content": "done"}] if done else made


def outputs(messages: Messages) -> list[Any]:
    return [message["content"] for message in messages if message["role"] == "tool"]


def inputs(messages: Messages) -> list[str]:
    return [each["function"]["arguments"] for message in messages for each in message.get("tool_calls") or ()]


# -- keep_tool_results --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "stubs"), [(0, 4), (1, 3), (3, 1), (4, 0), (9, 0)])
def test_the_last_results_stay(keep: int, stubs: int) -> None:
    found = outputs(apply(KeepToolResults(keep), agent(*[LONG] * 4)))
    assert found == [STUB] * stubs + [LONG] * (4 - stubs)


def test_a_result_the_model_has_not_read_stays() -> None:
    assert outputs(apply(KeepToolResults(0), agent(LONG, LONG, done=False))) == [STUB, LONG]


def test_in_batches_fewer_turns_have_an_edit() -> None:
    policy = KeepToolResults(keep=1, batch=3)
    found = [outputs(apply(policy, agent(*[LONG] * turns))).count(STUB) for turns in range(1, 9)]
    assert found == [0, 0, 0, 3, 3, 3, 6, 6]


def test_excluded_tools_and_short_results_stay() -> None:
    messages = agent(LONG, "x" * 80, "x" * 81, LONG, tools="abaa")
    assert outputs(apply(KeepToolResults(0), messages)) == [STUB, "x" * 80, STUB, STUB]
    assert outputs(apply(KeepToolResults(1, exclude_tools=("b",)), messages)) == [STUB, "x" * 80, STUB, LONG]
    messages = agent(LONG, LONG, LONG, LONG, tools="abab")
    assert outputs(apply(KeepToolResults(1, exclude_tools=("b",)), messages)) == [STUB, LONG, LONG, LONG]


def test_a_stub_may_tell_what_was_there() -> None:
    policy = KeepToolResults(0, stub="[{chars} characters, {lines} lines {{gone}}]")
    assert outputs(apply(policy, agent("line\n" * 1000))) == ["[5,000 characters, 1,001 lines {gone}]"]


def test_parts_become_one_stub() -> None:
    parts = [{"type": "text", "text": "short"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    assert outputs(apply(KeepToolResults(0), agent(parts, [{"type": "text", "text": "short"}]))) == [
        STUB,
        [{"type": "text", "text": "short"}],
    ]


def test_observations_are_what_users_say_after_the_model() -> None:
    messages = [
        {"role": "system", "content": LONG},
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": "```ls```"},
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": "done"},
    ]
    assert apply(KeepToolResults(0), messages) == messages
    found = apply(KeepToolResults(0, observations=True), messages)
    assert [message["content"] for message in found] == [LONG, LONG, "```ls```", STUB, "done"]


def test_parallel_results_count_one_by_one() -> None:
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call("a"), call("b", "edit")]},
        {"role": "tool", "tool_call_id": "b", "content": LONG},
        {"role": "tool", "tool_call_id": "a", "content": LONG},
        {"role": "assistant", "content": "done"},
    ]
    assert outputs(apply(KeepToolResults(1), messages)) == [STUB, LONG]
    # By the id of the call, not by its position.
    assert outputs(apply(KeepToolResults(0, exclude_tools=("edit",)), messages)) == [LONG, STUB]


# -- stub_failed_calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Traceback (most recent call last):\n  File",
        "out\nTraceback (most recent call last):\n  File",
        "Error: it broke",
        "  fatal error: it broke",
        "x.py:3\nValueError: bad",
        "json.decoder.JSONDecodeError: Expecting value",
        "<returncode>1</returncode>\n<output></output>",
        "ran\nexit code: 2\n",
        "Process exited with code 127.",
        "bash: foo: command not found\n",
        "ls: cannot access 'x': No such file or directory",
        '{"isError": true, "text": ""}',
    ],
)
def test_failures_are_recognised(text: str) -> None:
    failed = text + " " * 81
    found = outputs(apply(StubFailedCalls(), agent(failed.rstrip() + "\n" * 81, LONG)))
    assert found == [FAILED, LONG]


@pytest.mark.parametrize(
    "text",
    [
        "<returncode>0</returncode>",
        "exit code: 0",
        "no errors found",
        "12 passed, 0 errors",
        "def handle(error):\n    raise ValueError",
        "see ErrorHandler in errors.py",
        '{"is_error": false}',
    ],
)
def test_what_only_speaks_of_failures_stays(text: str) -> None:
    text += "\n" * 81
    assert outputs(apply(StubFailedCalls(), agent(text, LONG))) == [text, LONG]


def test_the_last_result_stays_and_so_does_what_has_no_failure() -> None:
    bad = "Error: " + LONG
    assert outputs(apply(StubFailedCalls(), agent(bad, LONG, bad))) == [FAILED, LONG, bad]
    assert outputs(apply(StubFailedCalls(keep=3), agent(bad, LONG, bad))) == [bad, LONG, bad]


def test_arguments_of_failed_calls_go_only_when_asked() -> None:
    messages = agent("Error: " + LONG, LONG)
    assert inputs(apply(StubFailedCalls(), messages)) == ['{"command": "ls"}'] * 2
    assert inputs(apply(StubFailedCalls(clear_inputs=True), messages)) == ["{}", '{"command": "ls"}']


def test_a_message_that_says_it_failed_did() -> None:
    messages = agent(LONG, LONG)
    messages[2]["is_error"] = True
    assert outputs(apply(StubFailedCalls(), messages)) == [FAILED, LONG]


# -- strip_reasoning ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "stripped"),
    [
        ({"content": "so", "reasoning_content": "hm"}, {"content": "so"}),
        ({"content": "so", "reasoning": "hm"}, {"content": "so"}),
        ({"content": "<think>hm\n</think>\n\nso"}, {"content": "so"}),
        ({"content": "hm</think>so"}, {"content": "so"}),
        ({"content": "a <think>hm</think>so <think>hm</think>b"}, {"content": "a so b"}),
        ({"content": "<think>hm</think>"}, {"content": ""}),
        (
            {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "so"}]},
            {"content": [{"type": "text", "text": "so"}]},
        ),
        ({"content": [{"type": "thinking", "thinking": "hm"}]}, {"content": ""}),
        (
            {"content": [{"type": "text", "text": "<think>hm</think>so"}]},
            {"content": [{"type": "text", "text": "so"}]},
        ),
        ({"content": "<think>cut off"}, {"content": "<think>cut off"}),
        ({"content": "x < y </b>"}, {"content": "x < y </b>"}),
    ],
)
def test_reasoning_goes_wherever_it_is(answer: dict[str, Any], stripped: dict[str, Any]) -> None:
    found = apply(StripReasoning(keep=0), [{"role": "user", "content": "q"}, {"role": "assistant", **answer}])
    assert found[1] == {"role": "assistant", **stripped}


@pytest.mark.parametrize(
    "text",
    [
        "<think>" * 200_000,
        "</think>" * 200_000,
        "<think></think> " * 100_000,
        "<think>" * 100_000 + "</think>",
        "a." * 500_000,
        "a" * 1_000_000,
        " " * 1_000_000,
        ": Permission denied" + " " * 500_000 + "x",
        "exit code" + "." * 500_000,
        "Error\n" * 200_000,
    ],
)
def test_a_text_made_to_be_slow_is_not(text: str) -> None:
    """Quadratic work would outlast the test's time-out."""
    messages = [*agent(text, text), {"role": "assistant", "content": text}, {"role": "user", "content": "x"}]
    apply(Pipeline((StubFailedCalls(), StripReasoning(keep=0))), messages)


def test_the_last_answers_keep_their_reasoning() -> None:
    answer = {"role": "assistant", "content": "so", "reasoning_content": "hm"}
    user = {"role": "user", "content": "<think>mine</think>"}
    plain = {"role": "assistant", "content": "so"}
    messages = [user, answer, plain, user, answer, plain, answer, plain]
    assert apply(StripReasoning(), messages) == [user, plain, plain, user, plain, plain, answer, plain]
    assert apply(StripReasoning(keep=2), messages) == [user, plain, plain, user, answer, plain, answer, plain]
    assert apply(StripReasoning(keep=0, keep_since_user=True), messages) == [
        *[user, plain, plain],
        *messages[3:],
    ]


# -- clear_tool_uses ----------------------------------------------------------------------------------------


def by_tokens(value: int, **options: Any) -> ClearToolUses:
    return ClearToolUses(Threshold(Unit.INPUT_TOKENS, value), **options)


def by_uses(value: int, keep: int = 1, **options: Any) -> ClearToolUses:
    return ClearToolUses(Threshold(Unit.TOOL_USES, value), Threshold(Unit.TOOL_USES, keep), **options)


def cleared_by_turn(policy: Policy, turns: int) -> list[int]:
    """Results cleared in each turn."""
    return [
        outputs(apply(policy, agent(*[LONG] * turn, done=False))).count("[tool output cleared]")
        for turn in range(turns)
    ]


def test_nothing_is_cleared_until_there_is_too_much() -> None:
    assert cleared_by_turn(by_tokens(100_000), 10) == [0] * 10
    # 41 tokens a turn: more than 300 with the eighth. Five results become stubs of 6, and it grows again.
    assert cleared_by_turn(by_tokens(300), 16) == [0] * 8 + [5] * 3 + [8] * 2 + [10] * 2 + [12]


def test_it_clears_when_there_are_too_many_uses() -> None:
    assert cleared_by_turn(by_uses(3, 1), 10) == [0, 0, 0, 0, 3, 3, 3, 6, 6, 6]


def test_a_clearing_that_saves_too_little_is_put_off() -> None:
    at_least = Threshold(Unit.INPUT_TOKENS, 100)
    # 35 tokens become 6: four uses save more than 100.
    assert cleared_by_turn(by_uses(1, 1, clear_at_least=at_least), 10) == [0, 0, 0, 0, 0, 4, 4, 4, 4, 8]


def test_what_the_model_has_not_read_is_not_cleared() -> None:
    messages = agent(LONG, LONG, done=False)
    found = outputs(apply(by_uses(0, 0), messages))
    assert found == ["[tool output cleared]", LONG]


def test_excluded_tools_neither_go_nor_count() -> None:
    messages = agent(*[LONG] * 6, tools="ababab")
    found = outputs(apply(by_uses(2, 1, exclude_tools=("b",)), messages))
    assert found == ["[tool output cleared]", LONG] * 2 + [LONG, LONG]
    assert outputs(apply(by_uses(3, 1, exclude_tools=("b",)), messages)) == [LONG] * 6


def test_inputs_are_cleared_for_all_tools_or_some() -> None:
    messages = agent(LONG, LONG, LONG, tools="aba")
    kept, gone = '{"command": "ls"}', "{}"
    for wanted, expected in (
        (False, [kept, kept, kept]),
        (None, [kept, kept, kept]),
        (True, [gone, gone, kept]),
        (("b",), [kept, gone, kept]),
    ):
        policy = by_uses(0, 1, clear_tool_inputs=wanted)
        assert inputs(apply(policy, messages)) == expected


def test_tokens_may_be_counted_by_a_tokenizer() -> None:
    words = by_tokens(100).counting(lambda text: len(text.split()))
    assert cleared_by_turn(by_tokens(100), 6) == [0, 0, 0, 0, 1, 2]
    # 23 words a turn.
    assert cleared_by_turn(words, 6) == [0, 0, 0, 0, 0, 2]
    assert Pipeline((by_tokens(40),)).counting(len) == Pipeline((by_tokens(40).counting(len),))


# -- redact -------------------------------------------------------------------------------------------------

SECRET = "sk-12345678"


def test_a_secret_goes_from_every_text() -> None:
    policy = Redact((r"sk-\d{8}",))
    messages = [
        {"role": "user", "content": [{"type": "text", "text": f"key {SECRET}."}, {"type": "image_url"}]},
        {
            "role": "assistant",
            "content": SECRET,
            "reasoning_content": f"the {SECRET}",
            "tool_calls": [call("a", arguments=json.dumps({"env": [f'"{SECRET}"'], "é": 1}))],
        },
        {"role": "tool", "tool_call_id": "a", "content": f"{SECRET}{SECRET}"},
    ]
    found = apply(policy, messages)
    assert SECRET not in json.dumps(found)
    assert found[0]["content"] == [{"type": "text", "text": "key [redacted]."}, {"type": "image_url"}]
    assert json.loads(inputs(found)[0]) == {"env": ['"[redacted]"'], "é": 1}
    assert found[2]["content"] == "[redacted][redacted]"
    some = apply(Redact((r"sk-\d{8}",), roles=("tool",)), messages)
    assert some[:2] == messages[:2] and some[2] == found[2]


def test_what_the_model_said_itself_names_what_is_gone() -> None:
    """That it was in the context is in the KV of what followed; of a user's secret it never was."""
    policy = Redact((r"sk-\d{8}",))
    told = [{"role": "user", "content": SECRET}, {"role": "assistant", "content": "ok"}]
    said = [*told, {"role": "assistant", "content": f"it is {SECRET}"}]
    later = [*said, {"role": "user", "content": SECRET}, {"role": "assistant", "content": "yes"}]
    again = [*later, {"role": "assistant", "content": SECRET}]
    assert erased(policy, told) == "" == erased(KeepToolResults(), said)
    names = [erased(policy, messages) for messages in (said, later, again)]
    assert names[0] == names[1] != names[2] and all(names) and SECRET not in "".join(names)
    assert erased(Redact((r"sk-\d{8}",), roles=("tool",)), said) == ""
    assert erased(Pipeline((KeepToolResults(), policy)), said) == names[0]
    # Whichever secret it was.
    other = [*told, {"role": "assistant", "content": "it is sk-00000000"}]
    assert erased(policy, other) == names[0]


def test_arguments_stay_json_and_stay_as_they_are_without_a_match() -> None:
    policy = Redact((r'ls".*',), replacement='"')
    odd = [{"role": "assistant", "content": None, "tool_calls": [call("a", arguments='{"a":  "ls"}')]}]
    assert apply(policy, odd)[0] is odd[0]
    broken = [
        {"role": "assistant", "content": None, "tool_calls": [call("a", arguments='{"a": sk-12345678')]}
    ]
    assert inputs(apply(Redact((r"sk-\d{8}",)), broken)) == ['{"a": [redacted]']


# -- all of them --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: KeepToolResults(-1), ("keep",)),
        (lambda: KeepToolResults(batch=0), ("batch",)),
        (lambda: KeepToolResults(stub="{tokens}"), ("stub",)),
        (lambda: KeepToolResults(stub="{"), ("stub",)),
        (lambda: KeepToolResults(stub=" "), ("stub",)),
        (lambda: KeepToolResults(stub="x" * 81), ("stub",)),
        (lambda: KeepToolResults(stub="x", min_chars=-1), ("min_chars",)),
        (lambda: StubFailedCalls(-1), ("keep",)),
        (lambda: StubFailedCalls(patterns=()), ("patterns",)),
        (lambda: StubFailedCalls(patterns=("a", "(")), ("patterns", 1)),
        (lambda: StripReasoning(-1), ("keep",)),
        (lambda: StripReasoning(tags=("<think>",)), ("tags", 0)),
        (lambda: StripReasoning(fields=("content",)), ("fields", 0)),
        (lambda: by_tokens(-1), ("trigger", "value")),
        (lambda: ClearToolUses(keep=Threshold(Unit.INPUT_TOKENS, 1)), ("keep", "type")),
        (lambda: ClearToolUses(clear_at_least=Threshold(Unit.TOOL_USES, 1)), ("clear_at_least", "type")),
        (lambda: Redact(()), ("patterns",)),
        (lambda: Redact(("a*",)), ("patterns", 0)),
        (lambda: Redact(("x", "red")), ("patterns", 1)),
        (lambda: Redact(("[",)), ("patterns", 0)),
    ],
)
def test_a_wrong_option_is_named(make: Any, field: tuple[Any, ...]) -> None:
    with pytest.raises(OptionError) as caught:
        make()
    assert caught.value.field == field


def test_policies_are_applied_in_order() -> None:
    messages = agent("Error: " + LONG, LONG, SECRET + LONG)
    policy = Pipeline((StubFailedCalls(), KeepToolResults(1), Redact(("sk",))))
    assert outputs(apply(policy, messages)) == [FAILED, STUB, f"[redacted]-12345678{LONG}"]
    assert apply(Pipeline(), messages) is messages


class Dropping:
    """What a stranger's policy may get wrong."""

    def transform(self, messages: Messages, turn_idx: int) -> Messages:
        return [message for message in messages if message["role"] != "tool"]


def test_a_policy_that_tears_a_call_from_its_result_is_stopped() -> None:
    with pytest.raises(PolicyError, match=r"Dropping: messages\[1\].tool_calls: a call has no result"):
        apply(Dropping(), agent(LONG, LONG))
    with pytest.raises(PolicyError):
        apply(Pipeline((KeepToolResults(), Dropping())), agent(LONG, LONG))
    # Nothing is torn where nothing was whole.
    assert apply(Dropping(), [{"role": "tool", "content": "x"}]) == []


class Counts:
    """Says which turn it was told."""

    def transform(self, messages: Messages, turn_idx: int) -> Messages:
        return [*messages, {"role": "user", "content": str(turn_idx)}]


def test_the_turn_is_the_number_of_answers() -> None:
    messages = agent(LONG, LONG)
    assert turn_of(messages) == 3
    assert apply(Counts(), messages)[-1]["content"] == "3"
    assert apply(Pipeline((Counts(),)), messages, 7)[-1]["content"] == "7"
