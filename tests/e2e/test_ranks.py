"""Two tensor-parallel ranks: they splice alike, and load from the stored tiers alike."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import httpx
import pytest
import redis as redis_py
from reference.model import Reference
from support.specs import STACKS

from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.client import Client
from leyline_lmcache.stack.device import detect

from .driver import Twin, agree, edited, envelope, eventually, quiet_log, report, spliced, tokens, whole_pool

pytestmark = [
    pytest.mark.stack,
    pytest.mark.slow,
    pytest.mark.skipif(detect() != "cpu", reason="one GPU cannot hold two ranks"),
]

CHUNK = 16


@pytest.fixture(scope="module", params=["gqa", "mla"])
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    spec = replace(
        STACKS["stack_mla"],
        model=request.param,
        lmcache=True,
        chunk_size=CHUNK,
        server_module=True,
        l2="leyline",
        threads=1,
        max_total_tokens=8192,
        sglang_args=("--tp-size", "2"),
        # SGLang binds each rank to cores of its own, and refuses to guess on machines without NUMA nodes.
        env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    )
    with Stack(spec) as running:
        yield running


@pytest.fixture
def twin(stack: Stack, client: Client, reference_of: Callable[[str], Reference]) -> Twin:
    return Twin(client, reference_of(stack.spec.model), page_size=1, min_reuse=16)


def test_edits_one_after_another_on_both_ranks(twin: Twin, client: Client) -> None:
    turn = twin.base(tokens(600, "ranks"))
    for number in range(3):
        start = 50 + 100 * number
        turn = twin.edit(turn, [(start, start + 30, tokens(4, ("ranks", number)))], tokens(10, number))
    whole_pool(client)


def test_what_left_both_gpus_is_loaded_by_both(stack: Stack, twin: Twin, client: Client) -> None:
    base = twin.base(tokens(600, "load"))
    edit = (100, 200, [7, 8, 9])
    prompt = edited(base.tokens, edit) + tokens(20, "load t")
    client.wait_idle()
    assert client.flush_cache()
    with quiet_log(stack):
        answer = twin.ask(prompt, max_new_tokens=5, kv_hints=envelope(base.id, edit))
    said = spliced(answer)
    assert said["reprefilled"] < CHUNK
    assert said["tiers"]["gpu"] == 0 and said["tiers"]["cpu"] > 400
    want, _ = twin.reference.serve(base.context, [edit], prompt, 5)
    assert list(answer.output_ids) == want.ids
    whole_pool(client)


def test_a_base_that_nobody_knows_is_refused_by_both(twin: Twin, client: Client) -> None:
    answer = twin.ask(tokens(100, "nobody"), max_new_tokens=2, kv_hints=envelope("elsewhere", (0, 5, [])))
    assert answer.meta["leyline"]["reason"] == "unknown_base"
    whole_pool(client)


def test_t9_a_hung_lmcache_server_is_left_and_joined_by_both(
    stack: Stack, twin: Twin, client: Client
) -> None:
    """Each rank notices for itself; a moment in which only one has noticed must not part them."""
    base = twin.base(tokens(600, "hung"))
    edit = (50, 80, tokens(4, "hung edit"))
    pid = stack.server("lmcache").pid
    os.kill(pid, signal.SIGSTOP)
    try:
        for number in range(3):
            twin.edit(base, [edit], tokens(10, number))
        twin.base(tokens(300, "while it hangs"))
    finally:
        os.kill(pid, signal.SIGCONT)

    def served_from_cpu() -> bool:
        new = twin.base(tokens(608, ("back", time.monotonic())))
        client.wait_idle()
        assert client.flush_cache()
        prompt = edited(new.tokens, edit) + tokens(10, "turn")
        said = report(twin.ask(prompt, max_new_tokens=5, kv_hints=envelope(new.id, edit)))
        return said is not None and said["outcome"] == "spliced" and said["tiers"]["cpu"] > 0

    eventually(served_from_cpu, "both ranks use the server again")
    whole_pool(client)


def test_2000_tokens_from_l1_from_redis_and_after_both_servers_restarted(
    stack: Stack, twin: Twin, client: Client
) -> None:
    if stack.spec.model != "gqa":
        pytest.skip("test_stored.py shows it for MLA")
    # Whole chunks with the answer, so that all of the base is stored.
    base = twin.base(tokens(1996, "long"))
    edit = (300, 500, [7, 8, 9, 10, 11])
    prompt = edited(base.tokens, edit) + tokens(20, "long t")
    want, served = twin.reference.serve(base.context, [edit], prompt, 5)
    with redis_py.Redis.from_url(stack.redis_url) as redis:
        eventually(
            lambda: len(list(redis.scan_iter("*:kv:*", count=10_000))) >= 2 * len(base.tokens) // CHUNK,
            "both ranks' stores reach Redis",
        )
    for place in ("cpu", "redis", "restart"):
        client.wait_idle()
        assert client.flush_cache()
        if place == "redis":
            httpx.post(f"{stack.lmcache_url}/cache/clear", timeout=30).raise_for_status()
        if place == "restart":
            stack.restart("lmcache")
            stack.restart("sglang")
        answer = twin.ask(prompt, max_new_tokens=5, kv_hints=envelope(base.id, edit))
        said = spliced(answer)
        assert answer.cached_tokens >= served.target and served.target > 0.85 * len(prompt)
        assert said["tiers"]["cpu" if place == "cpu" else "redis"] > 0.8 * len(prompt), (place, said)
        agree(answer, want)
    whole_pool(client)
