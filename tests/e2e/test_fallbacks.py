"""I3: whatever stands in the way of an edit has a name; the request answers like a server without Leyline.

Reasons that need a special server are in test_in_place.py (drift_limit, no_memory, eviction), test_runtime.py
(unsupported_rope) and test_faults.py (internal_error).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from reference.rules import Edit

from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.client import Client, Generation, RequestError

from .driver import edited, envelope, quiet_log, refused, report, same_answer, spliced, tokens

EDIT: Edit = (100, 200, (7, 8, 9))
OPTIONS: dict[str, Any] = {"max_new_tokens": 5, "logprobs": True, "sampling": {"ignore_eos": True}}


class Arms:
    """One base on our server and on a plain one."""

    def __init__(self, ours: Client, plain: Client, seed: object, length: int = 400, **options: Any) -> None:
        self.ours, self.plain = ours, plain
        self.tokens = tokens(length, seed)
        self.base = ours.generate(self.tokens, max_new_tokens=1, **options).id
        plain.generate(self.tokens, max_new_tokens=1, **options)
        self.prompt = edited(self.tokens, EDIT) + tokens(9, "tail")

    def falls_back(self, reason: str, kv_hints: Any, prompt: list[int] | None = None, **options: Any) -> str:
        """The edited request is refused for this reason and answers like the plain server; the detail."""
        prompt = self.prompt if prompt is None else prompt
        options = OPTIONS | options
        mine = self.ours.generate(prompt, kv_hints=kv_hints, **options)
        return self.like_plain(mine, reason, self.plain.generate(prompt, **options))

    @staticmethod
    def like_plain(mine: Generation, reason: str, theirs: Generation) -> str:
        detail = refused(mine, reason)
        assert mine.cached_tokens >= theirs.cached_tokens
        if mine.cached_tokens == theirs.cached_tokens:
            same_answer(mine, theirs)
            assert mine.input_logprobs == theirs.input_logprobs
        else:
            # A fill has prefilled the first part already: the same sums in another order.
            assert mine.cached_tokens <= EDIT[0] + 10
            assert mine.output_ids == theirs.output_ids
            assert mine.output_logprobs == pytest.approx(theirs.output_logprobs, abs=1e-4)
        assert "leyline" not in theirs.meta
        return detail

    def still_works(self) -> None:
        """The same base is spliced once the request is right."""
        spliced(self.ours.generate(self.prompt, kv_hints=envelope(self.base, EDIT), **OPTIONS))


@pytest.fixture
def clients(stack_gqa: Stack, stack_plain_gqa: Stack) -> Iterator[tuple[Client, Client]]:
    with quiet_log(stack_gqa), stack_gqa.client(120.0) as ours, stack_plain_gqa.client(120.0) as plain:
        yield ours, plain


@pytest.fixture
def arms(clients: tuple[Client, Client], request: pytest.FixtureRequest) -> Arms:
    return Arms(*clients, seed=request.node.name)


def _payload(**changes: Any) -> dict[str, Any]:
    found = envelope("BASE", EDIT)
    payload = found["actions"][0]["payload"]
    payload.update(changes)
    found["actions"][0]["payload"] = {k: v for k, v in payload.items() if v is not ...}
    return found


def _action(**changes: Any) -> dict[str, Any]:
    found = envelope("BASE", EDIT)
    found["actions"][0].update(changes)
    return found


INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "no base": (_payload(base=...), "payload.base"),
    "base of another type": (_payload(base=7), "payload.base"),
    "no start": (_payload(start=...), "payload.start"),
    "start as text": (_payload(start="100"), "payload.start"),
    "start true": (_payload(start=True), "payload.start"),
    "start negative": (_payload(start=-1), "payload.start"),
    "fractional end": (_payload(end=200.5), "payload.end"),
    "huge end": (_payload(end=2**40), "payload.end"),
    "end before start": (_payload(end=99), "payload.end"),
    "past the base": (_payload(end=401), "end"),
    "replacement as text": (_payload(replacement_ids="789"), "replacement_ids"),
    "replacement of texts": (_payload(replacement_ids=["7"]), "replacement_ids[0]"),
    "negative token": (_payload(replacement_ids=[7, -8, 9]), "replacement_ids[1]"),
    "token of 40 bits": (_payload(replacement_ids=[7, 8, 2**40]), "replacement_ids[2]"),
    "unknown mode": (_payload(mode="erase"), "payload.mode"),
    "unknown field": (_payload(starts=3), "unknown field"),
    "unknown action version": (_action(action_version="2"), "action_version"),
    "unknown protocol version": (envelope("BASE", EDIT) | {"protocol_version": "9"}, "protocol_version"),
    "payload missing": (_action(payload={}), "payload.base"),
}
"""Envelopes that SGLang lets through."""

INVALID_TEXT: dict[str, tuple[Any, str]] = {
    "not JSON": ("{", "envelope"),
    "not an object": ("[1]", "envelope"),
    "a number": (7, "envelope"),
    "a list": ([], "envelope"),
    "no version": ({"actions": []}, "protocol_version"),
    "actions of another type": ({"protocol_version": "1", "message_id": "m", "actions": {}}, "actions"),
    "action of another type": ({"protocol_version": "1", "message_id": "m", "actions": [3]}, "actions[0]"),
    "payload of another type": (_action(payload=[1]), "payload"),
    "not a number": ('{"protocol_version": "1", "message_id": "m", "actions": [NaN]}', "NaN"),
    "twice": ('{"protocol_version": "1", "protocol_version": "1", "message_id": "m"}', "twice"),
}
"""What only ``custom_params``, which SGLang does not look into, can carry."""


def _named(base: str, raw: Any) -> Any:
    return json.loads(json.dumps(raw).replace('"BASE"', json.dumps(base)))


class TestInvalidDirective:
    @pytest.mark.parametrize("kind", INVALID)
    def test_invalid_directive(self, arms: Arms, kind: str) -> None:
        raw, field = INVALID[kind]
        assert field in arms.falls_back("invalid_directive", _named(arms.base, raw))

    @pytest.mark.parametrize("kind", [*INVALID_TEXT, *list(INVALID)[:3]])
    @pytest.mark.parametrize("form", ["object", "text"])
    def test_invalid_directive_in_custom_params(self, arms: Arms, kind: str, form: str) -> None:
        raw, field = (INVALID | INVALID_TEXT)[kind]
        raw = raw if isinstance(raw, str) else _named(arms.base, raw)
        if form == "text" and not isinstance(raw, str):
            raw = json.dumps(raw)
        sampling = {"ignore_eos": True, "custom_params": {"kv_hints": raw}}
        assert field in arms.falls_back("invalid_directive", None, sampling=sampling)

    @pytest.mark.parametrize(
        "raw",
        [{"message_id": "m"}, {"protocol_version": "1", "message_id": "m", "actions": [{}]}, [1]],
        ids=["no version", "empty action", "list"],
    )
    def test_what_sglang_itself_refuses_is_a_clear_400(self, arms: Arms, raw: Any) -> None:
        with pytest.raises(RequestError) as refusal:
            arms.ours.generate(arms.prompt, kv_hints=raw, **OPTIONS)
        assert refusal.value.status == 400
        assert "kv_hints" in refusal.value.body
        arms.still_works()

    def test_several_bases(self, arms: Arms) -> None:
        hints = envelope(arms.base, EDIT, (300, 301, ()))
        hints["actions"][1]["payload"]["base"] = "another"
        assert "base" in arms.falls_back("invalid_directive", hints)

    def test_the_internal_action_cannot_be_sent(self, arms: Arms) -> None:
        hints = envelope(arms.base, EDIT)
        marker = {
            "action_id": "x",
            "action_type": "leyline.fill",
            "action_version": "1",
            "payload": {"start": 100, "end": 103},
        }
        hints["actions"].insert(0, marker)
        with pytest.raises(RequestError) as refusal:
            arms.ours.generate(arms.prompt, kv_hints=hints, **OPTIONS)
        assert refusal.value.status == 400
        with pytest.raises(RequestError) as refusal:
            arms.ours.generate(arms.prompt, max_new_tokens=5, sampling={"custom_params": {"kv_hints": hints}})
        assert refusal.value.status == 400
        # As text it is one of the actions that mean nothing to us.
        text = {"custom_params": {"kv_hints": json.dumps(hints)}}
        answer = arms.ours.generate(arms.prompt, max_new_tokens=5, sampling=text | {"ignore_eos": True})
        assert len(answer.output_ids) == 5
        spliced(answer)


class TestOtherReasons:
    @pytest.mark.parametrize(
        "second", [(150, 160, ()), (199, 201, (5,)), (150, 150, (5,)), (100, 200, ())], ids=str
    )
    def test_overlapping_edits(self, arms: Arms, second: Edit) -> None:
        arms.falls_back("overlapping_edits", envelope(arms.base, EDIT, second))

    def test_two_insertions_at_one_point(self, arms: Arms) -> None:
        hints = envelope(arms.base, (50, 50, (5,)), (50, 50, (6,)))
        arms.falls_back("overlapping_edits", hints, edited(arms.tokens, (50, 50, (5, 6))))

    def test_unknown_base(self, arms: Arms) -> None:
        assert "base" in arms.falls_back("unknown_base", envelope("never seen", EDIT))

    @pytest.mark.parametrize(
        ("theirs", "mine"),
        [
            ({"cache_salt": "a"}, {"cache_salt": "b"}),
            ({"cache_salt": "a"}, {}),
            ({}, {"cache_salt": "a"}),
            ({"extra_key": "a"}, {"extra_key": "b"}),
            ({"cache_salt": "a", "extra_key": "x"}, {"cache_salt": "a"}),
        ],
        ids=str,
    )
    def test_unknown_base_of_another_tenant_I7(
        self, clients: tuple[Client, Client], theirs: dict[str, str], mine: dict[str, str]
    ) -> None:
        """A base of another salt is as good as unknown, and its KV serves nobody else."""
        arms = Arms(*clients, seed=("tenant", str(theirs), str(mine)), **theirs)
        arms.falls_back("unknown_base", envelope(arms.base, EDIT), **mine)
        owner = arms.ours.generate(arms.prompt, kv_hints=envelope(arms.base, EDIT), **OPTIONS, **theirs)
        assert spliced(owner)["prefix"] == 100
        again = arms.ours.generate(arms.prompt, **OPTIONS, **mine)
        assert report(again) is None
        fresh = arms.plain.generate(arms.prompt, **OPTIONS, **mine)
        assert again.output_ids == fresh.output_ids
        assert again.output_logprobs == pytest.approx(fresh.output_logprobs, abs=1e-4)

    @pytest.mark.parametrize(
        "edit",
        [
            (101, 200, (7, 8, 9)),
            (100, 200, (7, 8, 10)),
            (390, 400, ()),
        ],
        ids=str,
    )
    def test_token_mismatch(self, arms: Arms, edit: Edit) -> None:
        """The prompt is not what the directive makes of the base."""
        arms.falls_back("token_mismatch", envelope(arms.base, edit))

    def test_token_mismatch_of_a_prompt_that_ends_inside_the_replacement(self, arms: Arms) -> None:
        arms.falls_back("token_mismatch", envelope(arms.base, EDIT), arms.prompt[:102])

    def test_source_missing_after_the_cache_was_emptied(self, arms: Arms) -> None:
        """C1: without other tiers there is nothing to take the KV from."""
        for client in (arms.ours, arms.plain):
            client.wait_idle()
            assert client.flush_cache()
        arms.falls_back("source_missing", envelope(arms.base, EDIT))

    @pytest.mark.parametrize("kept", [0, 1, 15])
    def test_below_min_reuse(self, arms: Arms, kept: int) -> None:
        edit: Edit = (100, 400 - kept, (7, 8, 9))
        prompt = edited(arms.tokens, edit) + tokens(9, "tail")
        assert "min_reuse" in arms.falls_back("below_min_reuse", envelope(arms.base, edit), prompt)

    def test_below_min_reuse_of_a_prompt_that_departs_right_after_the_edit(self, arms: Arms) -> None:
        """It is what the directive says, but nothing behind can be kept."""
        for edit in ((100, 200, (7, 8)), (100, 201, (7, 8, 9)), (0, 50, ()), (10, 50, ())):
            arms.falls_back("below_min_reuse", envelope(arms.base, edit))

    def test_exactly_min_reuse_is_spliced(self, arms: Arms) -> None:
        edit: Edit = (100, 384, (7, 8, 9))
        prompt = edited(arms.tokens, edit) + tokens(9, "tail")
        answer = arms.ours.generate(prompt, kv_hints=envelope(arms.base, edit), **OPTIONS)
        assert spliced(answer)["spliced"] == 16

    @pytest.mark.parametrize("start", [0, 150])
    def test_unsupported_runtime_logprobs_of_the_prompt(self, arms: Arms, start: int) -> None:
        """The engine must compute what log-probabilities are asked for, so nothing behind may be kept."""
        detail = arms.falls_back("unsupported_runtime", envelope(arms.base, EDIT), logprob_start=start)
        assert "logprob_start_len" in detail

    @pytest.mark.parametrize("how", ["mode", "action"])
    def test_unsupported_runtime_forget(self, arms: Arms, how: str) -> None:
        hints = envelope(arms.base, EDIT, mode="forget")
        if how == "action":
            hints["actions"][0]["action_type"] = "kv.forget"
        assert "forget" in arms.falls_back("unsupported_runtime", hints)

    def test_foreign_actions_are_left_alone(self, arms: Arms) -> None:
        hints = envelope(arms.base, EDIT)
        hints["actions"][0]["action_type"] = "kv.pin"
        mine = arms.ours.generate(arms.prompt, kv_hints=hints, **OPTIONS)
        assert report(mine) is None
        same_answer(mine, arms.plain.generate(arms.prompt, **OPTIONS))
