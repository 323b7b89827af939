"""I6: whatever edited requests do and however they end, no slot is lost and the server serves on."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from reference.rules import Edit

from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.client import Client, Generation

from .driver import IDENTITY, Twin, edited, envelope, post_and_hold, report, tokens, whole_pool

CLIENTS = 8


class Storm:
    """Random edited requests from several clients, some of which leave or abort."""

    def __init__(self, client: Client, seed: int) -> None:
        self.client = client
        self.seed = seed
        self.seen: Counter[str] = Counter()
        self._bases: deque[tuple[str, list[int]]] = deque(maxlen=12)
        self._lock = threading.Lock()

    def run(self, number: int) -> None:
        rng = random.Random(repr((self.seed, number)))
        with self._lock:
            base = rng.choice(self._bases) if self._bases and rng.random() < 0.85 else None
        if base is None:
            prompt, hints = tokens(rng.randrange(60, 220), (self.seed, number)), None
        else:
            prompt, hints = self._edit(rng, number, *base)
        body = Client.request(
            prompt, max_new_tokens=rng.randrange(1, 9), kv_hints=hints, rid=f"storm-{self.seed}-{number}"
        )
        body["sampling_params"]["ignore_eos"] = True
        how = rng.choices(["answer", "abort", "leave", "stream", "leave stream", "pair"], [8, 3, 1, 3, 3, 1])[
            0
        ]
        self._count(how)
        getattr(self, "_" + how.replace(" ", "_"))(rng, body, prompt)

    def _edit(
        self, rng: random.Random, number: int, base: str, known: list[int]
    ) -> tuple[list[int], dict[str, Any]]:
        if rng.random() < 0.1:
            return known + tokens(5, number), envelope(base, IDENTITY)
        edits: list[Edit] = []
        at = 0
        for _ in range(rng.randrange(1, 4)):
            if at + 20 >= len(known):
                break
            start = rng.randrange(at, len(known) - 10)
            end = min(len(known), start + rng.choice([0, 1, 5, 20, 60]))
            new = rng.choice([0, 1, 5, 40, 90]) if end > start else rng.choice([1, 30])
            edits.append((start, end, tokens(new, (number, start))))
            at = end + 1
        prompt = edited(known, *edits)[:400] + tokens(rng.randrange(1, 30), (number, "t"))
        if rng.random() < 0.05:
            base = "nobody"
        return prompt, envelope(base, *edits)

    # ------------------------------------------------------------------ ways for a request to go

    def _answer(self, rng: random.Random, body: dict[str, Any], prompt: list[int]) -> None:
        self._done(Generation.of(self.client._post("/generate", body).json()), prompt)

    def _abort(self, rng: random.Random, body: dict[str, Any], prompt: list[int]) -> None:
        body["sampling_params"]["max_new_tokens"] = 60
        timer = threading.Timer(rng.random() * 0.5, self.client.abort, [body["rid"]])
        timer.start()
        try:
            self._done(Generation.of(self.client._post("/generate", body).json()), prompt)
        finally:
            timer.join()

    def _leave(self, rng: random.Random, body: dict[str, Any], prompt: list[int]) -> None:
        self._hang_up(rng, body)

    def _leave_stream(self, rng: random.Random, body: dict[str, Any], prompt: list[int]) -> None:
        self._hang_up(rng, body | {"stream": True})

    def _stream(self, rng: random.Random, body: dict[str, Any], prompt: list[int]) -> None:
        events = [Generation.of(event) for event in self.client._events("/generate", body | {"stream": True})]
        self._done(events[-1], prompt)

    def _pair(self, rng: random.Random, body: dict[str, Any], prompt: list[int]) -> None:
        body = body | {"input_ids": [prompt, prompt[:-1]], "rid": [body["rid"], body["rid"] + "b"]}
        for one in self.client._post("/generate", body).json():
            assert one["meta_info"]["finish_reason"]["type"] == "length"

    def _hang_up(self, rng: random.Random, body: dict[str, Any]) -> None:
        body["sampling_params"]["max_new_tokens"] = 60
        with post_and_hold(self.client, "/generate", body):
            time.sleep(rng.random() * 0.5)

    def _done(self, answer: Generation, prompt: list[int]) -> None:
        said = report(answer) or {}
        self._count(said.get("reason") or said.get("outcome") or "no directive")
        self._count(answer.finish_type)
        if answer.finish_type == "length":
            with self._lock:
                self._bases.append((answer.id, prompt + list(answer.output_ids[:-1])))

    def _count(self, what: str) -> None:
        with self._lock:
            self.seen[what] += 1


def whole_after_a_storm(client: Client, twin: Twin, requests: int) -> Counter[str]:
    """Run one; then nothing is lost, the server is well, and edits are still right."""
    assert client.wait_idle().used == 0
    storm = Storm(client, requests)
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(storm.run, range(requests)))
    whole_pool(client)
    assert client.http.get("/health_generate").status_code == 200
    base = twin.base(tokens(400, "after the storm"))
    twin.edit(base, [(100, 200, [7, 8])], tokens(9, "calm"))
    return storm.seen


class TestWithLmcache:
    @pytest.fixture
    def stack(self, stack_small_lmcache: Stack) -> Stack:
        return stack_small_lmcache

    def test_500_edited_requests_with_aborts_and_lost_clients_I6(self, client: Client, twin: Twin) -> None:
        """§7.3. The pool is small enough that bases are evicted between being answered and being edited."""
        seen = whole_after_a_storm(client, twin, 500)
        # It was the storm it was meant to be.
        assert seen["spliced"] >= 60, seen
        assert seen["abort"] >= 20, seen
        assert seen["leave stream"] + seen["leave"] >= 60, seen
        assert seen["source_missing"] >= 1, seen
        assert seen["unknown_base"] >= 1, seen
        assert not seen["internal_error"], seen


class TestEverySlotChecked:
    """SGLang itself compares every slot's owners after each step, and dies of a slot lost or freed twice."""

    @pytest.fixture
    def stack(self, stack_small: Stack) -> Stack:
        return stack_small

    def test_120_edited_requests_with_aborts_and_lost_clients_I6(self, client: Client, twin: Twin) -> None:
        seen = whole_after_a_storm(client, twin, 120)
        assert seen["spliced"] >= 10, seen
        assert not seen["internal_error"], seen
