"""Sessions whose client names no edits: its prompts say what was edited."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.client import Client, Generation, RequestError

from .driver import Twin, agree, report, spliced, tokens, whole_pool

AMORTIZE = {"leyline": {"mode": "amortize"}}


@pytest.fixture
def stack(stack_mla: Stack) -> Stack:
    return stack_mla


def ask(client: Client, session: str | None, prompt: Sequence[int], **extra: Any) -> Generation:
    custom = extra.pop("custom", AMORTIZE)
    return client.generate(
        list(prompt),
        max_new_tokens=5,
        logprobs=True,
        sampling={"ignore_eos": True, "custom_params": custom},
        **({"session_id": session} if session is not None else {}),
        **extra,
    )


def after(prompt: Sequence[int], answer: Generation) -> list[int]:
    """The base an answer leaves."""
    return [*prompt, *answer.output_ids[:-1]]


def test_a_session_edits_its_history_over_several_turns_E1(client: Client, twin: Twin) -> None:
    """Each turn stubs an old output and adds a turn; nothing is said about it."""
    prompt = tokens(500, "session")
    answer = ask(client, "s1", prompt)
    assert report(answer) is None
    want = twin.reference.reprefill(prompt, 5)
    agree(answer, want)
    context, known = want.context, after(prompt, answer)
    for turn in range(4):
        edit = (20 + 60 * turn, 60 + 60 * turn, tokens(3, ("stub", turn)))
        prompt = [*known[: edit[0]], *edit[2], *known[edit[1] :], *tokens(20, ("turn", turn))]
        answer = ask(client, "s1", prompt)
        said = spliced(answer)
        assert said["edits"] == 1 and said["session"]["changes"] == 1
        expected, _ = twin.reference.serve(context, [edit], prompt, 5)
        agree(answer, expected)
        context, known = expected.context, after(prompt, answer)
    # A turn that edits nothing goes on with the edited view.
    prompt = [*known, *tokens(20, "plain turn")]
    answer = ask(client, "s1", prompt)
    assert spliced(answer)["session"]["changes"] == 0
    expected, _ = twin.reference.serve(context, [(0, 0, ())], prompt, 5)
    agree(answer, expected)
    whole_pool(client)


def test_the_view_of_a_session_is_that_of_its_last_answer(client: Client, stack: Stack) -> None:
    prompt = tokens(200, "shown")
    known = after(prompt, ask(client, "shown", prompt))
    edited = [*known[:50], *known[90:], *tokens(20, "shown t")]
    last = ask(client, "shown", edited)
    words = [sys.executable, "-P", "-m", "leyline_lmcache", "view", "--url", stack.sglang_url, "--json"]
    found = subprocess.run([*words, "--session", "shown"], capture_output=True, text=True, check=True)
    view = json.loads(found.stdout)
    assert view["response"] == last.id
    assert [each["kind"] for each in view["stretches"]] == ["kept", "gone", "moved", "computed"]
    unknown = subprocess.run([*words, "--session", "nobody"], capture_output=True, text=True, check=False)
    assert unknown.returncode == 3 and "--session nobody: unknown_base" in unknown.stderr


def test_branches_and_a_rewind_find_their_own_base(client: Client, twin: Twin) -> None:
    prompt = tokens(400, "tree")
    first = ask(client, "tree", prompt)
    want = twin.reference.reprefill(prompt, 5)
    known = after(prompt, first)
    branches = [
        ([*known[:50], *known[90:], *tokens(20, ("branch", number))], (50, 90, ())) for number in range(3)
    ]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda branch: ask(client, "tree", branch[0]), branches))
    ids = {first.id, *(answer.id for answer in answers)}
    for (branch, edit), answer in zip(branches, answers, strict=True):
        # The turn they came from, or a sister that made the same edit and was faster.
        assert spliced(answer)["session"]["base"] in ids
        agree(answer, twin.reference.serve(want.context, [edit], branch, 5)[0])
    # Back to the first turn, and on from there without an edit: the ordinary cache has it.
    again = [*known, *tokens(20, "rewind")]
    answer = ask(client, "tree", again)
    assert report(answer) is None and answer.cached_tokens >= len(known)
    agree(answer, twin.reference.reprefill(again, 5))
    whole_pool(client)


def test_sessions_and_tenants_are_apart_i7(client: Client) -> None:
    prompt = tokens(300, "apart")
    known = after(prompt, ask(client, "mine", prompt, cache_salt="a"))
    edited = [*known[:50], *known[90:], *tokens(20, "apart t")]
    assert report(ask(client, "other", edited, cache_salt="a")) is None
    assert report(ask(client, "mine", edited, cache_salt="b")) is None
    assert report(ask(client, None, edited, cache_salt="a")) is None
    assert report(ask(client, "mine", edited, cache_salt="a", custom={"leyline": {"mode": "off"}})) is None
    assert spliced(ask(client, "mine", edited, cache_salt="a"))["edits"] == 1


def test_directives_of_the_client_come_first(client: Client) -> None:
    prompt = tokens(300, "own")
    base = ask(client, "own", prompt)
    known = after(prompt, base)
    edited = [*known[:50], *known[90:], *tokens(20, "own t")]
    envelope = {
        "protocol_version": "1",
        "message_id": "m",
        "actions": [
            {
                "action_id": "a",
                "action_type": "kv.splice",
                "action_version": "1",
                "payload": {"base": "nobody", "start": 50, "end": 90, "replacement_ids": []},
            }
        ],
    }
    answer = ask(client, "own", edited, kv_hints=envelope)
    said = report(answer)
    assert said is not None and said["reason"] == "unknown_base" and "session" not in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "forgetful"}, "custom_params.leyline.mode: expected one of off, amortize"),
        ({"mod": "off"}, "custom_params.leyline.mod: unknown key; known keys are mode"),
        ("amortize", "custom_params.leyline: expected an object"),
    ],
)
def test_i9_options_that_make_no_sense_are_named(client: Client, options: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says) as refused:
        ask(client, "wrong", [5, 6, 7], custom={"leyline": options})
    assert refused.value.status == 400


@pytest.mark.parametrize("streams", [False, True])
def test_chat_with_a_session(client: Client, streams: bool) -> None:
    """The OpenAI endpoint: messages edited in the middle, in a stream and at once."""
    session = f"chat{streams}"
    filler = " ".join(f"word{number}" for number in range(120))
    messages = [
        {"role": "user", "content": f"first {filler}"},
        {"role": "assistant", "content": f"output {filler}"},
        {"role": "user", "content": f"and then {filler}"},
    ]
    fields = {"session_id": session, "max_tokens": 5, "custom_params": AMORTIZE, "temperature": 0}

    def post(which: list[dict[str, str]]) -> int:
        if streams:
            usage = None
            options = {"include_usage": True}
            for event in client.chat_stream(which, stream_options=options, **fields):
                usage = event.get("usage") or usage
            assert usage is not None, json.dumps(event)
        else:
            usage = client.chat(which, **fields)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    post(messages)
    stubbed = [messages[0], {"role": "assistant", "content": "[dropped]"}, messages[2]]
    cached = post([*stubbed, {"role": "assistant", "content": "fine"}, {"role": "user", "content": "go on"}])
    # More than the first message: what came after the stub was kept too.
    alone = post([messages[0], {"role": "user", "content": "x"}])
    assert cached > 1.5 * alone
