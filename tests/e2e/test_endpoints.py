"""Every way into the server: native and OpenAI, text, ids and messages, streams, batches, samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from reference.model import Reference
from reference.rules import Edit, Served, serve

from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.cases import Case, load_cases
from leyline_lmcache.stack.client import Client, Generation

from .driver import (
    IDENTITY,
    TOLERANCE,
    Twin,
    agree,
    edited,
    envelope,
    refused,
    report,
    spliced,
    tokens,
)

EDIT: Edit = (100, 200, (70, 71, 72))
GREEDY = {"ignore_eos": True}


def usage(answer: dict[str, Any]) -> tuple[int, int]:
    """Prompt and cached tokens, as the OpenAI endpoints report them."""
    found = answer["usage"]
    return found["prompt_tokens"], (found.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def custom(base: str, *edits: Edit, form: str = "text") -> dict[str, Any]:
    """``custom_params`` with directives, in the form a client chose."""
    hints = envelope(base, *edits)
    return {"custom_params": {"kv_hints": json.dumps(hints) if form == "text" else hints}}


class TestNative:
    """``/generate``."""

    @pytest.fixture
    def stack(self, stack_gqa: Stack) -> Stack:
        return stack_gqa

    @pytest.mark.parametrize("form", ["text", "object"])
    def test_custom_params_work_there_too(self, twin: Twin, form: str) -> None:
        base = twin.base(tokens(400, "native custom"))
        prompt = edited(base.tokens, EDIT) + tokens(9, "t")
        sampling = GREEDY | custom(base.id, EDIT, form=form)
        answer = twin._ask(prompt, max_new_tokens=5, logprobs=True, sampling=sampling)
        spliced(answer)
        agree(answer, twin.reference.serve(base.context, [EDIT], prompt, 5)[0])

    def test_stream(self, client: Client, twin: Twin) -> None:
        """The first event already says what became of the edit; later ones do not repeat it differently."""
        base = twin.base(tokens(400, "native stream"))
        prompt = edited(base.tokens, EDIT) + tokens(9, "t")
        hints = envelope(base.id, EDIT)
        events = list(client.stream(prompt, max_new_tokens=6, logprobs=True, sampling=GREEDY, kv_hints=hints))
        assert len(events) > 1
        said = spliced(events[0])
        assert all(report(event) in (None, said) for event in events)
        assert spliced(events[-1]) == said
        agree(events[-1], twin.reference.serve(base.context, [EDIT], prompt, 6)[0])

    def test_text(self, client: Client, twin: Twin) -> None:
        ids = Tokens(twin.reference)
        text = "".join(chr(97 + token % 26) for token in tokens(400, "native text"))
        base = client.generate(text, max_new_tokens=1)
        changed = text[:100] + "EDIT" + text[200:] + " and then"
        edit: Edit = (100, 200, ids("EDIT"))
        answer = client.generate(
            changed, max_new_tokens=5, logprobs=True, sampling=GREEDY, kv_hints=envelope(base.id, edit)
        )
        assert (spliced(answer)["filled"], answer.cached_tokens) == (4, 304)
        want, _ = twin.reference.serve(twin.reference.prefill(ids(text)), [edit], ids(changed), 5)
        agree(answer, want)

    def test_the_clients_own_id_is_the_base(self, client: Client, twin: Twin) -> None:
        base = twin.base(tokens(400, "own id"), rid="my own id/1")
        assert base.id == "my own id/1"
        turn = twin.edit(base, [EDIT], tokens(9, "t"), rid="my own id/2")
        assert turn.id == "my own id/2"
        twin.edit(turn, [IDENTITY], tokens(9, "u"))

    def test_several_samples_C4(self, client: Client, twin: Twin) -> None:
        """Each sees the same edited prefix."""
        base = twin.base(tokens(400, "samples"))
        prompt = edited(base.tokens, EDIT) + tokens(9, "t")
        answers = client.generate_all(
            prompt,
            max_new_tokens=5,
            logprobs=True,
            sampling=GREEDY | {"n": 3},
            kv_hints=envelope(base.id, EDIT),
        )
        want, served = twin.reference.serve(base.context, [EDIT], prompt, 5)
        assert len(answers) == 3
        for answer in answers:
            spliced(answer)
            agree(answer, want)
            assert answer.cached_tokens >= served.cached

    def test_batch_with_one_envelope_C4(self, client: Client, twin: Twin) -> None:
        """SGLang gives the envelope to each prompt; each that follows the edited base is spliced."""
        base = twin.base(tokens(400, "one envelope"))
        prompts = [edited(base.tokens, EDIT) + tokens(9, ("t", number)) for number in range(3)]
        prompts.append(tokens(150, "stranger"))
        answers = client.generate_all(
            prompts, max_new_tokens=5, logprobs=True, sampling=GREEDY, kv_hints=envelope(base.id, EDIT)
        )
        for answer, prompt in zip(answers[:3], prompts, strict=False):
            spliced(answer)
            agree(answer, twin.reference.serve(base.context, [EDIT], prompt, 5)[0])
        refused(answers[3], "token_mismatch")
        agree(answers[3], twin.reference.reprefill(prompts[3], 5))

    def test_batch_with_an_envelope_each(self, client: Client, twin: Twin) -> None:
        """Neighbours without one carry no report."""
        bases = [twin.base(tokens(300, ("each", number))) for number in range(2)]
        other = tokens(120, "each other")
        edits: list[Edit] = [EDIT, (50, 60, ())]
        prompts = [
            edited(bases[0].tokens, edits[0]) + tokens(9, "t"),
            other,
            edited(bases[1].tokens, edits[1]) + tokens(9, "t"),
            bases[0].tokens + tokens(9, "u"),
        ]
        answers = client.generate_all(
            prompts,
            max_new_tokens=5,
            logprobs=True,
            sampling=GREEDY,
            kv_hints=[envelope(bases[0].id, edits[0]), None, envelope(bases[1].id, edits[1]), None],
        )
        for index, which in ((0, 0), (2, 1)):
            spliced(answers[index])
            want, _ = twin.reference.serve(bases[which].context, [edits[which]], prompts[index], 5)
            agree(answers[index], want)
        for index in (1, 3):
            assert "leyline" not in answers[index].meta
            agree(answers[index], twin.reference.reprefill(prompts[index], 5))

    def test_batch_with_sampling_params_each(self, client: Client, twin: Twin) -> None:
        """``custom_params`` of each prompt."""
        base = twin.base(tokens(300, "params each"))
        prompts = [edited(base.tokens, EDIT) + tokens(9, "t"), tokens(80, "params other")]
        body = Client.request(prompts, logprobs=True)
        plain = {"max_new_tokens": 5, "temperature": 0} | GREEDY
        body["sampling_params"] = [plain | custom(base.id, EDIT), plain]
        first, second = map(Generation.of, client._post("/generate", body).json())
        spliced(first)
        agree(first, twin.reference.serve(base.context, [EDIT], prompts[0], 5)[0])
        assert "leyline" not in second.meta

    def test_neighbours_in_a_running_batch_carry_no_report(self, client: Client, twin: Twin) -> None:
        base = twin.base(tokens(300, "running batch"))
        prompt = edited(base.tokens, EDIT) + tokens(9, "t")

        def ask(number: int) -> Generation:
            if number % 2:
                return twin.ask(tokens(60, ("neighbour", number)), max_new_tokens=30)
            return twin.ask(prompt, max_new_tokens=30, kv_hints=envelope(base.id, EDIT))

        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(ask, range(6)))
        for number, answer in enumerate(answers):
            if number % 2:
                assert "leyline" not in answer.meta
            else:
                spliced(answer)


class Tokens:
    """Text to the ids the server makes of it."""

    def __init__(self, reference: Reference) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(reference.config._name_or_path)

    def __call__(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])


class TestCompletions:
    """``/v1/completions``, whose report is in the counters and in the cached tokens."""

    @pytest.fixture
    def stack(self, stack_gqa: Stack) -> Stack:
        return stack_gqa

    @pytest.fixture
    def ids(self, reference_of: Callable[[str], Reference]) -> Tokens:
        return Tokens(reference_of("gqa"))

    @staticmethod
    def text(seed: object) -> str:
        return "".join(chr(97 + token % 26) for token in tokens(400, seed))

    @staticmethod
    def logprobs(answer: dict[str, Any]) -> list[float]:
        return list(answer["choices"][0]["logprobs"]["token_logprobs"])

    def want(
        self, twin: Twin, prompt: Sequence[int], changed: Sequence[int], edit: Edit, count: int = 5
    ) -> list[float]:
        base = twin.reference.prefill(prompt)
        return twin.reference.serve(base, [edit], changed, count)[0].logprobs

    @pytest.mark.parametrize("form", ["text", "object"])
    @pytest.mark.parametrize("kind", ["text", "ids"])
    def test_answer(self, client: Client, twin: Twin, ids: Tokens, kind: str, form: str) -> None:
        text = self.text(("completion", kind, form))
        changed = text[:100] + "EDIT" + text[200:] + " and then"
        as_sent: Callable[[str], Any] = (lambda t: t) if kind == "text" else ids
        base = client.complete(as_sent(text), max_tokens=1)
        edit: Edit = (100, 200, ids("EDIT"))
        answer = client.complete(
            as_sent(changed), max_tokens=5, logprobs=1, **GREEDY, **custom(base["id"], edit, form=form)
        )
        assert usage(answer) == (len(ids(changed)), 304)
        want = self.want(twin, ids(text), ids(changed), edit)
        assert self.logprobs(answer) == pytest.approx(want, abs=TOLERANCE)
        # And the answer's id is a base in its turn.
        shorter = changed[:10] + changed[20:] + "!"
        more = client.complete(as_sent(shorter), max_tokens=1, **GREEDY, **custom(answer["id"], (10, 20, ())))
        assert usage(more)[1] == len(changed) - 10

    @pytest.mark.parametrize("kind", ["text", "ids"])
    def test_stream(self, client: Client, twin: Twin, ids: Tokens, kind: str) -> None:
        text = self.text(("completion stream", kind))
        changed = text[:100] + text[200:] + " and then"
        as_sent: Callable[[str], Any] = (lambda t: t) if kind == "text" else ids
        base = client.complete(as_sent(text), max_tokens=1)
        edit: Edit = (100, 200, ())
        body = {
            "model": client.model,
            "prompt": as_sent(changed),
            "temperature": 0,
            "max_tokens": 5,
            "logprobs": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
            **GREEDY,
            **custom(base["id"], edit),
        }
        events = list(client._events("/v1/completions", body))
        logprobs = [
            value
            for event in events
            for choice in event["choices"]
            for value in (choice.get("logprobs") or {}).get("token_logprobs", [])
        ]
        assert logprobs == pytest.approx(self.want(twin, ids(text), ids(changed), edit), abs=TOLERANCE)
        assert usage(events[-1])[1] == 300

    def test_several_samples_and_prompts_C4(self, client: Client, ids: Tokens) -> None:
        text = self.text("completion n")
        changed = text[:100] + "EDIT" + text[200:] + " and then"
        base = client.complete(text, max_tokens=1)
        edit: Edit = (100, 200, ids("EDIT"))
        answer = client.complete(
            [changed, changed + "?"], n=2, max_tokens=3, **GREEDY, **custom(base["id"], edit)
        )
        texts = [choice["text"] for choice in answer["choices"]]
        assert len(texts) == 4
        assert texts[0] == texts[1] and texts[2] == texts[3]
        _, cached = usage(answer)
        # Every sample of every prompt found the edited prefix.
        assert cached >= 2 * 304


def _spans(case: Case) -> list[Edit]:
    return [(*edit.span, list(edit.stub)) for edit in case.edits]


def _edited_messages(case: Case) -> list[Any]:
    out: list[Any] = []
    at = 0
    for edit in case.edits:
        out += [*case.messages[at : edit.message_span[0]], edit.stub_message]
        at = edit.message_span[1]
    return [*out, *case.messages[at:]]


def _served(case: Case, stack: Stack) -> Served:
    """How an edited conversation is served; its base ends with the answer's opening."""
    base = [*case.prompt, case.question[-1]]
    prompt = [*case.edited_prompt, *case.question]
    return serve(base, _spans(case), prompt, min_reuse=stack.spec.leyline.get("min_reuse", 16))


SOME_CASES = 12
"""Of the 160; the benchmark `contract` runs them all."""


class TestChat:
    """``/v1/chat/completions`` with the trained model: what an edited conversation still knows.

    The derived values were never written. Full context knows them; re-prefill of the edited text cannot.
    """

    @pytest.fixture
    def stack(self, stack_tiny: Stack) -> Stack:
        return stack_tiny

    @pytest.fixture(scope="class")
    def cases(self) -> list[Case]:
        # SGLang writes a last message of the assistant's in a way of its own, unlike the same further up.
        found = [case for case in load_cases() if case.messages[-1]["role"] != "assistant"]
        return [case for case in found if case.size != "long"][:SOME_CASES]

    @staticmethod
    def content(answer: dict[str, Any]) -> str:
        return str(answer["choices"][0]["message"]["content"]).strip()

    def test_edited_conversations_answer_like_full_context(
        self, stack: Stack, client: Client, cases: list[Case]
    ) -> None:
        for case in cases:
            base = client.chat(case.messages, max_tokens=1)
            full = client.chat([*case.messages, case.question_message], max_tokens=1)
            messages = [*_edited_messages(case), case.question_message]
            answer = client.chat(messages, max_tokens=1, **custom(base["id"], *_spans(case)))
            fresh = client.chat(messages, max_tokens=1)
            assert self.content(answer) == self.content(full) != self.content(fresh), case.id
            prompt, cached = usage(answer)
            assert prompt == len(case.edited_prompt) + len(case.question)
            served = _served(case, stack)
            assert served.target <= cached <= served.cached

    def test_stream(self, stack: Stack, client: Client, cases: list[Case]) -> None:
        for case in cases[:4]:
            base = client.chat(case.messages, max_tokens=1)
            full = client.chat([*case.messages, case.question_message], max_tokens=1)
            events = list(
                client.chat_stream(
                    [*_edited_messages(case), case.question_message],
                    max_tokens=1,
                    stream_options={"include_usage": True},
                    **custom(base["id"], *_spans(case), form="object"),
                )
            )
            said = "".join(
                choice["delta"].get("content") or "" for event in events for choice in event["choices"]
            )
            assert said.strip() == self.content(full), case.id
            assert usage(events[-1])[1] >= _served(case, stack).target

    def test_several_samples_C4(self, client: Client, cases: list[Case]) -> None:
        case = cases[0]
        base = client.chat(case.messages, max_tokens=1)
        full = client.chat([*case.messages, case.question_message], max_tokens=1)
        messages = [*_edited_messages(case), case.question_message]
        answer = client.chat(messages, n=2, max_tokens=1, **custom(base["id"], *_spans(case)))
        assert [str(c["message"]["content"]).strip() for c in answer["choices"]] == [self.content(full)] * 2

    def test_a_chat_is_the_base_of_a_native_request_and_back(
        self, client: Client, twin: Twin, cases: list[Case]
    ) -> None:
        case = cases[1]
        base = client.chat(case.messages, max_tokens=1)
        prompt = [*case.edited_prompt, *case.question]
        native = twin.ask(prompt, max_new_tokens=1, kv_hints=envelope(base["id"], *_spans(case)))
        spliced(native)
        assert native.output_ids == (case.expected,)
        messages = [*_edited_messages(case), case.question_message]
        again = client.chat(messages, max_tokens=1, **custom(native.id, IDENTITY))
        assert self.content(again) == native.text.strip()
        assert usage(again)[1] == len(prompt) - 1

    def test_a_question_cached_before_the_edit(self, twin: Twin, cases: list[Case]) -> None:
        """R6: moved keys that carry the question's own position; a missing or wrong rotation shows here."""
        for case in cases[:3]:
            base = twin.base([*case.prompt, *case.question[:-1]], 1)
            turn = twin.edit(base, _spans(case), case.question[-1:], 2)
            assert turn.answer.output_ids[0] == case.expected, case.id
