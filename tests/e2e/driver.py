"""What the end-to-end tests say to a server, and what they check of its answers."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference.model import Answer, Context, Reference
from reference.rules import Edit, Served, apply_edits

from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.client import Client, Generation

TOLERANCE = 1e-3
"""Of log-probabilities, between the server and the fp32 reference (the issue's figure)."""

IDENTITY: Edit = (0, 0, ())
"""Go on with the base's view; edit nothing."""


_RUN_SEED = os.environ.get("LEYLINE_TEST_SEED", "0")
"""Another value runs the same tests with other prompts."""


def tokens(count: int, seed: object, *, low: int = 3, high: int = 256) -> list[int]:
    """Random token ids, the same for the same seed in every process. Tests use prompts of their own."""
    return random.Random(repr((_RUN_SEED, seed))).choices(range(low, high), k=count)


def envelope(base: str, *edits: Edit, **payload: Any) -> dict[str, Any]:
    """The directives of one request. ``payload``: further fields of each, such as ``mode``."""
    return {
        "protocol_version": "1",
        "message_id": "m",
        "actions": [
            {
                "action_id": f"a{index}",
                "action_type": "kv.splice",
                "action_version": "1",
                "payload": {
                    "base": base,
                    "start": start,
                    "end": end,
                    "replacement_ids": list(replacement),
                    **payload,
                },
            }
            for index, (start, end, replacement) in enumerate(edits)
        ],
    }


def edited(base: Sequence[int], *edits: Edit) -> list[int]:
    """A base's tokens after the edits."""
    return apply_edits(base, edits)[0]


def report(answer: Generation) -> dict[str, Any] | None:
    """What the plugin says about a request; None if it had nothing to do with it."""
    found = answer.meta.get("leyline")
    assert found is None or isinstance(found, dict)
    return found


def same_answer(ours: Generation, plain: Generation) -> None:
    """I1: identical tokens and log-probabilities, to the last bit."""
    assert ours.output_ids == plain.output_ids
    assert ours.output_logprobs == plain.output_logprobs
    assert ours.output_logprobs or not ours.output_ids


def refused(answer: Generation, reason: str) -> str:
    """The request was answered by prefilling, for this reason; returns the detail."""
    said = report(answer)
    assert said is not None, "the request carries no report"
    assert (said["outcome"], said.get("reason")) == ("fallback", reason), said
    assert said["spliced"] == said["moved"] == said["filled"] == 0
    return str(said["detail"])


def spliced(answer: Generation) -> dict[str, Any]:
    """The request was answered from edited KV; returns the report."""
    said = report(answer)
    assert said is not None, "the request carries no report"
    assert said["outcome"] == "spliced", said
    return said


def eventually(check: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Poll until ``check`` is true."""
    deadline = time.monotonic() + timeout_s
    while not check():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.02)


_TROUBLE = re.compile(r"Traceback|CRITICAL|panicked|leak detected|Scheduler hit an exception|AssertionError")


@contextmanager
def quiet_log(stack: Stack) -> Iterator[None]:
    """No traceback, panic or leak in SGLang's log while the block runs."""
    log = stack.logs["sglang"]
    start = log.stat().st_size
    yield
    text = written_since(log, start)
    found = _TROUBLE.search(text)
    assert found is None, text[max(0, found.start() - 500) : found.start() + 3000]


def written_since(log: Path, start: int) -> str:
    """What was appended to a log."""
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def whole_pool(client: Client) -> None:
    """I6: with nothing running, every slot is free or evictable, and the cache can be emptied."""
    usage = client.wait_idle()
    assert usage.used == 0, usage
    assert client.flush_cache()
    usage = client.pool()
    assert usage.used == 0, usage
    answer = client.generate([5, 6, 7], max_new_tokens=1)
    assert len(answer.output_ids) == 1


def post_and_hold(client: Client, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request and keep the connection; the answer is never read."""
    data = json.dumps(body).encode()
    url = client.http.base_url
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: leyline",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    )
    connection = socket.create_connection((url.host, url.port))
    connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
    return connection


@dataclass(frozen=True)
class Turn:
    """One answered request, on the server and in the reference.

    Attributes:
        answer: the server's.
        want: the reference's.
        served: how the rules say it is served; None for a request without edits.
    """

    answer: Generation
    want: Answer
    served: Served | None

    @property
    def id(self) -> str:
        return self.answer.id

    @property
    def context(self) -> Context:
        """What it left in the cache, according to the reference."""
        return self.want.context

    @property
    def tokens(self) -> list[int]:
        """The base's tokens: prompt and answer without its last token."""
        return self.context.tokens


class Twin:
    """A server and the reference, asked the same things.

    Args:
        ask: sends one request; by default `Client.generate`.
    """

    def __init__(
        self,
        client: Client | None,
        reference: Reference,
        *,
        page_size: int = 1,
        min_reuse: int = 16,
        ask: Callable[..., Generation] | None = None,
    ) -> None:
        assert client is not None or ask is not None
        self._ask = ask or client.generate  # type: ignore[union-attr]
        self.reference = reference
        self.page_size = page_size
        self.min_reuse = min_reuse

    def ask(self, prompt: Sequence[int], **options: Any) -> Generation:
        """Greedy, to a fixed length, with log-probabilities."""
        return self._ask(list(prompt), logprobs=True, sampling={"ignore_eos": True}, **options)

    def base(self, prompt: Sequence[int], count: int = 5, **options: Any) -> Turn:
        """A request without edits; checked against plain prefill."""
        answer = self.ask(prompt, max_new_tokens=count, **options)
        want = self.reference.reprefill(prompt, count)
        agree(answer, want)
        return Turn(answer, want, None)

    def edit(
        self,
        base: Turn,
        edits: Sequence[Edit],
        tail: Sequence[int] = (),
        count: int = 5,
        *,
        again: bool = False,
        **options: Any,
    ) -> Turn:
        """An edited request, ``tail`` being its new turn; the server must answer like the reference.

        ``again``: it was asked before, so its tail may be cached as well.
        """
        prompt = edited(base.tokens, *edits) + list(tail)
        return self.edit_prompt(base, edits, prompt, count, again=again, **options)

    def edit_prompt(
        self,
        base: Turn,
        edits: Sequence[Edit],
        prompt: Sequence[int],
        count: int = 5,
        *,
        again: bool = False,
        **options: Any,
    ) -> Turn:
        """As `edit`, with the whole prompt given."""
        want, served = self.reference.serve(
            base.context, edits, prompt, count, page_size=self.page_size, min_reuse=self.min_reuse
        )
        answer = self.ask(prompt, max_new_tokens=count, kv_hints=envelope(base.id, *edits), **options)
        said = spliced(answer)
        # The report counts from where the first edit ever was; the rules count from this turn's.
        counted = said["spliced"] == served.kept if base.served is None else said["spliced"] >= served.kept
        assert counted or again, (said, served)
        most = len(prompt) if again else served.cached
        assert served.target <= answer.cached_tokens <= most, (answer.cached_tokens, served)
        agree(answer, want)
        return Turn(answer, want, served)

    def differs_from_reprefill(self, turn: Turn, base: Turn) -> float:
        """How far the reference's edited answer is from a re-prefill's; the server agreed with the former.

        The test would prove nothing if the two were alike, so it must be well above the tolerance.
        """
        prompt = turn.tokens[: turn.answer.prompt_tokens]
        pairs = zip(prompt, base.tokens, strict=False)
        # What an unedited base computed needs no second computation here.
        same = next(i for i, (a, b) in enumerate(pairs) if a != b) if base.served is None else 0
        fresh = self.reference.answer(base.context.cut(0, same), prompt[same:], 1)
        gap = float((turn.want.first - fresh.first).abs().max())
        assert gap > 5 * TOLERANCE, f"re-prefill is only {gap:.1e} away: choose another prompt"
        return gap


def agree(answer: Generation, want: Answer, tolerance: float = TOLERANCE) -> None:
    """The server's ids are the reference's, and its log-probabilities to the tolerance."""
    assert list(answer.output_ids) == want.ids
    worst = max(abs(a - b) for a, b in zip(answer.output_logprobs, want.logprobs, strict=True))
    assert worst < tolerance, f"log-probabilities differ by {worst:.2e}"
