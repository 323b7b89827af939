"""The paper's contract on the trained model: its cases, asked of a real server in three arms.

The model was trained so that what a question asks for was derived, after a span that an edit replaces, from
what only the span says. Its value then lives in the downstream tokens' KV, not in their text: with the
unedited context and after a splice the model can answer, after a prefill of the edited text it says
"unknown".
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from _nodes import empty_gpu, empty_l1, wait_stored
from tokenizers import Tokenizer

from leyline_lmcache.journal import JournalReader
from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.client import Client, Generation
from leyline_lmcache.stack.models import trained_dir

MIN_REUSE = 1
"""Setting of the plugin for these cases: many keep fewer tokens behind an edit than the default asks for."""

Answer = int | str
"""A token id where an endpoint gives ids, else text."""
Chat = tuple[Mapping[str, str], ...]
_OTHER_QUESTION: Chat = ({"role": "user", "content": "ok"},)


class Source(StrEnum):
    """Where the base's KV lies when the edit comes."""

    GPU = "gpu"
    L1 = "l1"
    """In LMCache's CPU tier; the GPU was emptied."""
    REDIS = "redis"
    """In Redis only."""
    OTHER_NODE = "other_node"
    """In Redis, and the edit comes to an engine that never saw the base."""

    @property
    def tier(self) -> str:
        """As reports call it."""
        return {Source.GPU: "gpu", Source.L1: "cpu"}.get(self, "redis")


class Form(StrEnum):
    """When the question is asked.

    After an edit it is computed on top of the kept KV and forgives keys that were not turned: most cases are
    answered rightly without any rotation. Cached before the edit, its own keys have to be turned, and the one
    new token has to find the way back through them; that form catches a rotation that is missing or wrong.
    """

    AFTER = "question_after_edit"
    BEFORE = "question_before_edit"


class Arm(StrEnum):
    """How the prompt came to its KV."""

    FULL = "full"
    """The unedited context."""
    REPREFILL = "reprefill"
    """The edited text, prefilled."""
    SPLICE = "splice"
    """The edited text, on the KV of the unedited context."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace the prompt's tokens ``[start, end)``."""

    start: int
    end: int
    replacement: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt in the two ways a client can send it."""

    ids: tuple[int, ...]
    messages: Chat


@dataclass(frozen=True, slots=True)
class Case:
    """One conversation.

    Attributes:
        prompt, edited: before and after the edits, without the question.
        edits: in order, in token positions of the prompt.
        question: the question, and its first answer token's role marker last.
        expected, expected_text: what full context answers.
        fact: token ranges of the prompt, behind the edits, that state what the question asks for in terms of
            what the span said; the chain the answer comes through.
    """

    id: int
    prompt: Prompt
    edited: Prompt
    edits: tuple[Edit, ...]
    question: Prompt
    expected: int
    expected_text: str
    fact: tuple[tuple[int, int], ...]

    def base(self, form: Form, *, chat: bool) -> Prompt:
        """The prompt whose KV the edit is applied to.

        The engine computes the last token of any prompt again, so a chat, which always ends with the marker
        of the answer's role, can be the base of the form in which only that token is new. SGLang makes a
        user's message of an assistant's that comes last, so in the other form one comes after it.
        """
        if form is Form.AFTER:
            return Prompt(self.prompt.ids, self.prompt.messages + _OTHER_QUESTION) if chat else self.prompt
        whole = self.asked(self.prompt)
        return whole if chat else Prompt(whole.ids[:-1], whole.messages)

    def asked(self, prompt: Prompt) -> Prompt:
        """A prompt with the question."""
        return Prompt(prompt.ids + self.question.ids, prompt.messages + self.question.messages)


def load_cases(count: int | None = None) -> list[Case]:
    """The cases that come with the trained model, or as many of them spread over all kinds."""
    folder = trained_dir()
    with gzip.open(folder / "cases.jsonl.gz", "rt") as lines:
        cases = [_case(json.loads(line)) for line in lines]
    if count is None or count >= len(cases):
        return cases
    return [cases[i * len(cases) // count] for i in range(count)]


def tokenizer() -> Tokenizer:
    """The trained model's."""
    return Tokenizer.from_file(str(trained_dir() / "model" / "tokenizer.json"))


def _case(raw: Mapping[str, Any]) -> Case:
    edits = tuple(Edit(*edit["span"], tuple(edit["stub"])) for edit in raw["edits"])
    messages = list(raw["messages"])
    edited = list(messages)
    for edit in reversed(raw["edits"]):
        first, last = edit["message_span"]
        edited[first:last] = [edit["stub_message"]]
    return Case(
        id=raw["id"],
        prompt=Prompt(tuple(raw["prompt"]), tuple(messages)),
        edited=Prompt(tuple(raw["edited_prompt"]), tuple(edited)),
        edits=edits,
        question=Prompt(tuple(raw["question"]), (raw["question_message"],)),
        expected=raw["expected"],
        expected_text=raw["expected_text"],
        fact=_chain(raw["prompt"], raw["question"][1], edits),
    )


def _chain(prompt: Sequence[int], asked: int, edits: Sequence[Edit]) -> tuple[tuple[int, int], ...]:
    """Where ``asked = x;`` stands, then ``x = y;``, until a statement that an edit takes away."""
    found: list[tuple[int, int]] = []
    equals, stop = _SYMBOLS
    name = asked
    while True:
        at = next(i for i in range(len(prompt) - 1) if prompt[i] == name and prompt[i + 1] == equals)
        if any(edit.start <= at < edit.end for edit in edits):
            return tuple(found)
        end = prompt.index(stop, at) + 1
        found.append((at, end))
        name = prompt[at + 2]


_SYMBOLS = (497, 34)
"""Token ids of `` =`` and ``;`` in the trained model's vocabulary."""


def envelope(base: str, edits: Iterable[Edit]) -> dict[str, Any]:
    """The directives of one request (DESIGN §5)."""
    return {
        "protocol_version": "1",
        "message_id": "contract",
        "actions": [
            {
                "action_id": f"edit-{number}",
                "action_type": "kv.splice",
                "action_version": "1",
                "payload": {
                    "base": base,
                    "start": edit.start,
                    "end": edit.end,
                    "replacement_ids": list(edit.replacement),
                },
            }
            for number, edit in enumerate(edits)
        ],
    }


# ---------------------------------------------------------------------------------------------- endpoints


@dataclass(frozen=True, slots=True)
class Reply:
    """What a client sees of one answer, and the plugin's report where the endpoint shows it."""

    id: str
    answer: Answer
    prompt_tokens: int
    cached_tokens: int
    report: Mapping[str, Any] | None


Ask = Callable[[Client, Prompt, Mapping[str, Any] | None, str], Reply]
"""Send a prompt with an envelope and a ``cache_salt``; one token is asked for."""


class Endpoint(StrEnum):
    """How a request reaches the server."""

    GENERATE = "generate"
    GENERATE_STREAM = "generate_stream"
    COMPLETIONS = "completions"
    CHAT = "chat"
    CHAT_STREAM = "chat_stream"

    @property
    def is_chat(self) -> bool:
        """Prompts are messages."""
        return self in (Endpoint.CHAT, Endpoint.CHAT_STREAM)

    def ask(self) -> Ask:
        """The function that sends a request there."""
        if self is Endpoint.COMPLETIONS:
            return partial(_completions, tokenizer())
        return {
            Endpoint.GENERATE: _generate,
            Endpoint.GENERATE_STREAM: _generate_stream,
            Endpoint.CHAT: _chat,
            Endpoint.CHAT_STREAM: _chat_stream,
        }[self]


def _generate(client: Client, prompt: Prompt, hints: Mapping[str, Any] | None, salt: str) -> Reply:
    return _native(client.generate(prompt.ids, max_new_tokens=1, kv_hints=hints, cache_salt=salt))


def _generate_stream(client: Client, prompt: Prompt, hints: Mapping[str, Any] | None, salt: str) -> Reply:
    *_, last = client.stream(prompt.ids, max_new_tokens=1, kv_hints=hints, cache_salt=salt)
    return _native(last)


def _native(answer: Generation) -> Reply:
    return Reply(
        answer.id,
        answer.output_ids[0],
        answer.prompt_tokens,
        answer.cached_tokens,
        answer.meta.get("leyline"),
    )


def _completions(
    words: Tokenizer, client: Client, prompt: Prompt, hints: Mapping[str, Any] | None, salt: str
) -> Reply:
    text = words.decode(list(prompt.ids), skip_special_tokens=False)
    answer = client.complete(text, max_tokens=1, cache_salt=salt, **_custom(hints))
    usage = answer["usage"]
    if usage["prompt_tokens"] != len(prompt.ids):
        raise ValueError(
            f"the text has {usage['prompt_tokens']} tokens for the server, not {len(prompt.ids)}"
        )
    return Reply(
        answer["id"], answer["choices"][0]["text"].strip(), usage["prompt_tokens"], _cached(usage), None
    )


def _chat(client: Client, prompt: Prompt, hints: Mapping[str, Any] | None, salt: str) -> Reply:
    answer = client.chat(
        prompt.messages, max_tokens=1, return_meta_info=True, cache_salt=salt, **_custom(hints)
    )
    choice, usage = answer["choices"][0], answer["usage"]
    return Reply(
        answer["id"],
        (choice["message"]["content"] or "").strip(),
        usage["prompt_tokens"],
        _cached(usage),
        choice["meta_info"].get("leyline"),
    )


def _chat_stream(client: Client, prompt: Prompt, hints: Mapping[str, Any] | None, salt: str) -> Reply:
    name, text, usage = "", "", {}
    stream = client.chat_stream(
        prompt.messages,
        max_tokens=1,
        stream_options={"include_usage": True},
        cache_salt=salt,
        **_custom(hints),
    )
    for chunk in stream:
        name = chunk["id"]
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
    return Reply(name, text.strip(), usage["prompt_tokens"], _cached(usage), None)


def _custom(hints: Mapping[str, Any] | None) -> dict[str, Any]:
    """Directives where the API has no field for them: as JSON text, its declared type allows no more."""
    return {} if hints is None else {"custom_params": {"kv_hints": json.dumps(hints)}}


def _cached(usage: Mapping[str, Any]) -> int:
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


# -------------------------------------------------------------------------------------------------- arms


@dataclass(frozen=True, slots=True)
class Outcome:
    """One case in one form, in all arms.

    Attributes:
        outcome, reason: of the spliced request, from its report or, where the endpoint shows none, the
            journal.
        fact_kept: some statement of the chain lies wholly in KV that was kept, so that the contract binds.
            Whole pages are prefilled for a replacement, and what shares one with it is computed again from
            the edited text.
        source: where the base's KV lay.
    """

    case: int
    form: Form
    replies: Mapping[Arm, Reply]
    expected: Answer
    outcome: str
    reason: str | None
    fact_kept: bool
    source: Source = Source.GPU

    def same(self, arm: Arm) -> bool:
        """The arm answers like full context."""
        return self.replies[arm].answer == self.replies[Arm.FULL].answer

    @property
    def is_right(self) -> bool:
        """The spliced answer is the true one."""
        return self.replies[Arm.SPLICE].answer == self.expected

    @property
    def is_from_source(self) -> bool:
        """Kept KV came from there, as the report says; where an endpoint shows none nothing is known.

        None of it lay nearer, but for chunks that one fill brought to L1 and the next needed too.
        """
        tiers = (self.replies[Arm.SPLICE].report or {}).get("tiers") or {}
        if not tiers or self.source is Source.GPU:
            return bool(tiers) and tiers["gpu"] == sum(tiers.values())
        return tiers["gpu"] == 0 and 2 * tiers[self.source.tier] > sum(tiers.values())

    @property
    def is_spliced(self) -> bool:
        """The edit was applied."""
        return self.outcome == "spliced"


def run_cases(
    stack: Stack,
    cases: Sequence[Case],
    forms: Sequence[Form],
    endpoint: Endpoint = Endpoint.GENERATE,
    *,
    isolated: bool = True,
    workers: int = 8,
    run: str = "contract",
    source: Source = Source.GPU,
    other: Stack | None = None,
) -> list[Outcome]:
    """Ask every case in every form, in all arms.

    Args:
        isolated: every arm of every case gets a ``cache_salt`` of its own. The forms share their prompts and
            the arms their beginnings: with one cache for all, an arm would be answered from KV that another
            one left there, and would not be what it is called. Without it, all share one cache, and the
            re-prefill arm comes after the splice of the same text: even so it may see none of its KV (I1).
            Only the forms stay apart, as one's re-prefill is the other's.
        run: part of the salts; of its own for each run against one server.
        source: where the bases' KV is driven before the first edit.
        other: the node that serves the edits for `Source.OTHER_NODE`.
    """
    ask = endpoint.ask()
    wanted = [(case, form) for form in forms for case in cases]
    serving = other if source is Source.OTHER_NODE and other is not None else stack
    with stack.client() as here, serving.client() as client, ThreadPoolExecutor(workers) as pool:

        def salt(case: Case, form: Form, arm: Arm) -> str:
            return f"{run}-{form}-{case.id}-{arm}" if isolated else f"{run}-{form}"

        def base(case: Case, form: Form) -> str:
            prompt = case.base(form, chat=endpoint.is_chat)
            return ask(here, prompt, None, salt(case, form, Arm.SPLICE)).id

        def arms(case: Case, form: Form, base_id: str) -> dict[Arm, Reply]:
            return _run_case(client, ask, case, base_id, lambda arm: salt(case, form, arm))

        if source is Source.GPU:
            # One after the other: a case's arms then run while its base is sure to be there.
            jobs = [pool.submit(lambda c, f: arms(c, f, base(c, f)), case, form) for case, form in wanted]
        else:
            bases = list(pool.map(lambda each: base(*each), wanted))
            _displace(stack, here, source)
            jobs = [
                pool.submit(arms, case, form, base_id)
                for (case, form), base_id in zip(wanted, bases, strict=True)
            ]
        answered = [(case, form, job.result()) for (case, form), job in zip(wanted, jobs, strict=True)]
    silent = any(replies[Arm.SPLICE].report is None for _, _, replies in answered)
    seen = _outcomes(serving) if silent else {}
    page = stack.spec.page_size
    return [_outcome(case, form, endpoint, replies, seen, page, source) for case, form, replies in answered]


def _displace(stack: Stack, client: Client, source: Source) -> None:
    """Drive all KV to where the source says, and nowhere nearer."""
    wait_stored(stack)
    empty_gpu(client)
    if source is not Source.L1:
        empty_l1(stack)


def _run_case(
    client: Client, ask: Ask, case: Case, base: str, salt: Callable[[Arm], str]
) -> dict[Arm, Reply]:
    edited, full = case.asked(case.edited), case.asked(case.prompt)
    splice = ask(client, edited, envelope(base, case.edits), salt(Arm.SPLICE))
    reprefill = ask(client, edited, None, salt(Arm.REPREFILL))
    return {
        Arm.SPLICE: splice,
        Arm.REPREFILL: reprefill,
        Arm.FULL: ask(client, full, None, salt(Arm.FULL)),
    }


def _outcomes(stack: Stack) -> dict[str, tuple[str, str | None]]:
    """Outcome and reason of each request in the journal."""
    found: dict[str, tuple[str, str | None]] = {}
    for record in JournalReader(stack.journal_dir).records():
        if record.reason is not None:
            found[record.request] = ("fallback", record.reason.value)
        else:
            found.setdefault(record.request, ("spliced", None))
    return found


def _outcome(
    case: Case,
    form: Form,
    endpoint: Endpoint,
    replies: Mapping[Arm, Reply],
    journal: Mapping[str, tuple[str, str | None]],
    page: int,
    source: Source,
) -> Outcome:
    splice = replies[Arm.SPLICE]
    if splice.report is not None:
        outcome, reason = splice.report["outcome"], splice.report.get("reason")
    else:
        outcome, reason = journal.get(splice.id, ("unknown", None))
    text = endpoint in (Endpoint.COMPLETIONS, Endpoint.CHAT, Endpoint.CHAT_STREAM)
    return Outcome(
        case.id,
        form,
        replies,
        case.expected_text if text else case.expected,
        outcome,
        reason,
        _is_fact_kept(case, page, splice.cached_tokens),
        source,
    )


def _is_fact_kept(case: Case, page: int, cached: int) -> bool:
    """Whether a statement of the chain is in no page that a replacement shares, and before the prefilled
    end."""
    computed: list[tuple[int, int]] = [(cached, len(case.edited.ids))]
    moved = 0
    places: list[tuple[int, int]] = []
    for edit in case.edits:
        start = edit.start + moved
        moved += len(edit.replacement) - (edit.end - edit.start)
        end = start + len(edit.replacement)
        places.append((edit.end, moved))
        if end > start:
            computed.append((start // page * page, -(-end // page) * page))
    for start, end in case.fact:
        shift = max(((place, moved) for place, moved in places if place <= start), default=(0, 0))[1]
        if not any(low < end + shift and start + shift < high for low, high in computed):
            return True
    return False
