"""The stored tiers under pressure: many requests at once, a CPU tier that is full, keys that expire."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
import redis as redis_py
from reference.model import Reference
from reference.rules import Edit
from support.specs import STACKS

from leyline_lmcache.journal import JournalReader
from leyline_lmcache.ops import OpKind, Tier
from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.client import Client, Generation

from .driver import Turn, Twin, agree, edited, envelope, eventually, quiet_log, report, tokens, whole_pool

pytestmark = [pytest.mark.stack, pytest.mark.slow]

CHUNK = 32
TOKENS = 900
BASES = 8


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    spec = replace(
        STACKS["stack_mla"],
        chunk_size=CHUNK,
        server_module=True,
        l2="leyline",
        max_total_tokens=16_384,
        # About 4,000 tokens: less than half of what the bases have.
        l1_size_gb=0.0045,
        leyline={"invalidate": "delete", "tier_running": 4, "tier_timeout": 5.0},
    )
    with Stack(spec) as running:
        yield running


@pytest.fixture
def twin(stack: Stack, client: Client, reference_of: Callable[[str], Reference]) -> Twin:
    return Twin(client, reference_of("mla"))


@pytest.fixture
def redis(stack: Stack) -> Iterator[Any]:
    with redis_py.Redis.from_url(stack.redis_url) as client:
        yield client


def l1(stack: Stack) -> dict[str, Any]:
    """State of LMCache's CPU tier."""
    status = httpx.get(f"{stack.lmcache_url}/status", timeout=30).json()
    found: dict[str, Any] = status.get("storage_manager", status)["l1_manager"]
    return found


def _clear_l1(stack: Stack) -> None:
    httpx.post(f"{stack.lmcache_url}/cache/clear", timeout=30).raise_for_status()


def stored(redis: Any) -> set[bytes]:
    """Keys of KV in Redis."""
    return {key for key in redis.scan_iter(count=10_000) if redis.type(key) == b"string" and b":kv:" in key}


def as_served(twin: Twin, base: Turn, edits: Sequence[Edit], prompt: list[int], answer: Generation) -> None:
    """Whatever could be kept of the view, the answer is that of just this context."""
    said = report(answer)
    assert said is not None
    if said["outcome"] != "spliced":
        assert said["reason"] in ("source_missing", "tier_timeout", "tier_error", "no_memory"), said
        agree(answer, twin.reference.reprefill(prompt, 5))
        return
    reach = said["reach"]
    _, served = twin.reference.serve(base.context, edits, prompt, 1)
    computed = [(start, min(end, reach)) for start, end in served.computed if start < reach]
    kept = twin.reference.edited(base.context, edits, computed, reach)
    agree(answer, twin.reference.answer(kept, prompt[reach:], 5))


def test_t2_t4_edits_at_once_when_the_cpu_tier_cannot_hold_what_they_need(
    stack: Stack, twin: Twin, client: Client, redis: Any
) -> None:
    """No deadlock and nothing foreign in anybody's context; who finds no room is prefilled."""
    bases = []
    for number in range(BASES):
        bases.append(twin.base(tokens(TOKENS + 50 * number, ("pressure", number))))
        # LMCache drops a store it has no room for, and makes room once a second.
        time.sleep(1.5)
    chunks = sum(len(base.tokens) // CHUNK for base in bases)
    assert len(stored(redis)) > chunks / 2
    client.wait_idle()
    assert client.flush_cache()
    edit: Edit = (100, 150, [7, 8, 9])
    tail = tokens(20, "pressure t")
    prompts = [edited(base.tokens, edit) + tail for base in bases]

    def ask(number: int) -> Generation:
        hints = envelope(bases[number].id, edit)
        return twin.ask(prompts[number], max_new_tokens=5, kv_hints=hints)

    with quiet_log(stack), ThreadPoolExecutor(BASES) as pool:
        answers = list(pool.map(ask, range(BASES)))
    for base, prompt, answer in zip(bases, prompts, answers, strict=True):
        as_served(twin, base, [edit], prompt, answer)
    assert any(report(answer)["outcome"] == "spliced" for answer in answers)  # type: ignore[index]
    whole_pool(client)
    eventually(
        lambda: l1(stack)["read_locked_count"] == l1(stack)["write_locked_count"] == 0, "locks go back"
    )


def test_t12_keys_that_expire_before_they_are_loaded(
    stack: Stack, twin: Twin, client: Client, redis: Any
) -> None:
    """Some of the chunks, then all: what is kept is cut, then nothing is."""
    base = twin.base(tokens(TOKENS, "expire"))
    eventually(lambda: len(stored(redis)) >= len(base.tokens) // CHUNK, "stores reach Redis")
    for lost in (0.3, 1.0):
        client.wait_idle()
        assert client.flush_cache()
        _clear_l1(stack)
        keys = sorted(stored(redis))
        redis.delete(*keys[: int(len(keys) * lost)])
        edit: Edit = (100, 150, [7, int(10 * lost)])
        prompt = edited(base.tokens, edit) + tokens(20, "expire t")
        answer = twin.ask(prompt, max_new_tokens=5, kv_hints=envelope(base.id, edit))
        as_served(twin, base, [edit], prompt, answer)
    assert report(answer)["reason"] == "source_missing"  # type: ignore[index]
    whole_pool(client)


def test_what_no_view_refers_to_is_deleted_from_both_tiers(
    stack: Stack, twin: Twin, client: Client, redis: Any
) -> None:
    redis.flushall()
    base = twin.base(tokens(TOKENS, "dead"))
    chunks = len(base.tokens) // CHUNK
    eventually(lambda: len(stored(redis)) == chunks, "stores reach Redis")
    before = stored(redis)
    turn = twin.edit(base, [(CHUNK + 1, 10 * CHUNK + 1, [])], tokens(20, "dead t"))
    # Chunks 2 to 9 are wholly in the span.
    eventually(lambda: len(before - stored(redis)) == 8, "the span's chunks are deleted")
    done = [op for op in JournalReader(stack.journal_dir).records() if op.op is OpKind.INVALIDATE]
    assert [(op.tier, op.blocks) for op in done if op.tier is not Tier.GPU][-1] == (Tier.REDIS, 8)
    # What is left is all of the view.
    client.wait_idle()
    assert client.flush_cache()
    again = twin.edit(turn, [(40, 45, [3])], tokens(20, "dead u"))
    assert report(again.answer)["reprefilled"] == 0  # type: ignore[index]
    whole_pool(client)
