"""Edits whose source left the GPU: loaded from LMCache's CPU tier, from Redis, and on another node.

Two engines, each with an ``lmcache server`` of its own, share one Redis.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import httpx
import pytest
from reference.model import Reference
from reference.rules import Edit
from support.specs import STACKS

from leyline_lmcache.cli.checks import Status, check_module
from leyline_lmcache.connector import wire
from leyline_lmcache.journal import JournalReader
from leyline_lmcache.ops import Tier
from leyline_lmcache.stack import Stack, StackSpec
from leyline_lmcache.stack.client import Client, Generation
from leyline_lmcache.stack.ports import PortLease

from .driver import TOLERANCE, Twin, edited, envelope, eventually, quiet_log, refused, spliced, tokens

pytestmark = [pytest.mark.stack, pytest.mark.slow]

CHUNK = 16
OPTIONS = {"max_new_tokens": 5, "logprobs": True, "sampling": {"ignore_eos": True}}
EDITS: tuple[Edit, ...] = ((100, 200, (7, 8, 9)), (300, 310, ()))


def _spec(**changes: object) -> StackSpec:
    return replace(
        STACKS["stack_mla"],
        chunk_size=CHUNK,
        server_module=True,
        l2="leyline",
        max_total_tokens=8192,
        **changes,
    )


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Stack, Stack]]:
    lease = PortLease()
    port = lease.take("redis")
    lease.release()
    url = f"redis://127.0.0.1:{port}"
    shared = {"redis": {"url": url}}
    with (
        Stack(_spec(redis_port=port, server_options=shared)) as here,
        Stack(_spec(redis_url=url, server_options=shared)) as there,
    ):
        yield here, there


def _flush(client: Client) -> None:
    client.wait_idle()
    assert client.flush_cache()


def _base(client: Client, seed: str) -> tuple[Generation, list[int]]:
    prompt = tokens(600, seed)
    answer = client.generate(prompt, **OPTIONS)
    return answer, prompt + list(answer.output_ids[:-1])


def _edit(client: Client, base: Generation, known: list[int], **more: object) -> Generation:
    prompt = edited(known, *EDITS) + tokens(20, "tail")
    return client.generate(prompt, kv_hints=envelope(base.id, *EDITS), **{**OPTIONS, **more})


def _same(loaded: Generation, kept: Generation) -> None:
    assert loaded.output_ids == kept.output_ids
    assert loaded.output_logprobs == pytest.approx(kept.output_logprobs, abs=TOLERANCE)


def test_loads_from_the_cpu_tier_and_answers_as_from_the_gpu(nodes: tuple[Stack, Stack]) -> None:
    here, _ = nodes
    with quiet_log(here), here.client(120.0) as client:
        base, known = _base(client, "l1")
        kept = _edit(client, base, known, cache_salt=None)
        assert spliced(kept)["reprefilled"] == 0
        _flush(client)
        loaded = _edit(client, base, known)
        said = spliced(loaded)
        # Only the base's last, incomplete chunk was never stored.
        assert said["moved"] > 0 and said["reprefilled"] < CHUNK
        assert loaded.cached_tokens >= kept.cached_tokens - CHUNK
        # A shorter reach prefills a few tokens in the edited view: the same answer, not the same bits.
        assert loaded.output_ids[0] == kept.output_ids[0]


def test_loads_from_redis_on_another_node_and_after_a_restart(
    nodes: tuple[Stack, Stack], reference_of: Callable[[str], Reference]
) -> None:
    here, there = nodes
    with quiet_log(here), quiet_log(there), here.client(120.0) as mine, there.client(120.0) as theirs:
        base, known = _base(mine, "other")
        _flush(mine)
        local = _edit(mine, base, known)
        reach = spliced(local)["reach"]
        # Stores reach Redis, and the record, a moment after the answer.
        eventually(lambda: spliced_or_none(_edit(theirs, base, known)) == reach, "the other node loads all")
        remote = _edit(theirs, base, known)
        _same(remote, local)
    here.restart("sglang")
    with here.client(120.0) as again:
        loaded = _edit(again, base, known)
        assert spliced(loaded)["reach"] == reach
        _same(loaded, local)


def spliced_or_none(answer: Generation) -> int | None:
    said = answer.meta["leyline"]
    return int(said["reach"]) if said["outcome"] == "spliced" else None


LONG = (300, 500, (7, 8, 9, 10, 11))


def _clear_l1(stack: Stack) -> None:
    httpx.post(f"{stack.lmcache_url}/cache/clear", timeout=30).raise_for_status()


def _origin(answer: Generation) -> dict[str, int]:
    """Tokens by tier, as the report and SGLang's own breakdown agree on them."""
    said = spliced(answer)
    tiers: dict[str, int] = said["tiers"]
    assert sum(tiers.values()) == said["prefix"] + said["spliced"]
    details = answer.cached_details
    assert (details["host"], details.get("storage", 0)) == (tiers["cpu"], tiers["redis"])
    assert sum(v for k, v in details.items() if k in ("device", "host", "storage")) == answer.cached_tokens
    return tiers


def test_every_token_says_where_it_came_from(
    nodes: tuple[Stack, Stack], reference_of: Callable[[str], Reference]
) -> None:
    here, there = nodes
    with quiet_log(here), quiet_log(there), here.client(120.0) as mine, there.client(120.0) as theirs:
        twin = Twin(mine, reference_of("mla"))
        base = twin.base(tokens(2000, "origin"))
        kept = 1800  # of the base, and what the answer added

        def ask(which: Twin, seed: str) -> Generation:
            return which.edit(base, [LONG], tokens(20, seed)).answer

        assert _origin(ask(twin, "gpu")) == {"gpu": kept + 4, "cpu": 0, "redis": 0}

        _flush(mine)
        tiers = _origin(ask(twin, "l1"))
        assert tiers["cpu"] >= kept - CHUNK and tiers["redis"] == 0

        # Part of it on the GPU: the exact prefix.
        _flush(mine)
        mine.generate(base.tokens[:200], **OPTIONS)
        tiers = _origin(ask(twin, "part"))
        assert tiers["gpu"] >= 200 and tiers["cpu"] >= kept - 200 - CHUNK

        _flush(mine)
        _clear_l1(here)
        tiers = _origin(ask(twin, "redis"))
        assert tiers["redis"] >= kept - CHUNK and tiers["cpu"] == 0

        tiers = _origin(ask(Twin(theirs, reference_of("mla")), "other node"))
        assert tiers["redis"] >= kept - CHUNK and tiers["cpu"] == 0

        by_tier = {op.tier for op in JournalReader(here.journal_dir).records() if op.op is not None}
        assert by_tier == {Tier.GPU, Tier.CPU, Tier.REDIS}


def test_i4_twenty_turns_with_an_edit_each_and_eviction_in_between(
    nodes: tuple[Stack, Stack], reference_of: Callable[[str], Reference]
) -> None:
    """Each turn answers like the reference, whose keys are turned once; tests/connector/test_drift.py
    compares the keys themselves with a chain of rotations."""
    here, _ = nodes
    with quiet_log(here), here.client(120.0) as client:
        twin = Twin(client, reference_of("mla"))
        turn = twin.base(tokens(604, "drift"))  # with its answer a whole number of chunks
        moved = 0
        for i in range(20):
            _flush(client)
            if i % 5 == 4:
                _clear_l1(here)
            start, stub = 5 + 20 * i + moved, tokens(1 + i * 5 % 13, f"stub {i}")
            turn = twin.edit(turn, [(start, start + 7, tuple(stub))], tokens(6, f"turn {i}"))
            moved += len(stub) - 7
            said = spliced(turn.answer)
            assert said["reprefilled"] == 0 and said["tiers"]["gpu"] == 0, said
        assert moved != 0


def test_a_view_is_shown_with_the_tiers_it_lies_in(nodes: tuple[Stack, Stack]) -> None:
    here, there = nodes
    with here.client(120.0) as mine:
        base, known = _base(mine, "view")
        turn = _edit(mine, base, known)

        def view(stack: Stack, *words: str) -> Any:
            done = subprocess.run(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "leyline_lmcache",
                    "view",
                    turn.id,
                    "--url",
                    stack.sglang_url,
                    *words,
                ],
                capture_output=True,
                text=True,
                check=False,
            )
            return json.loads(done.stdout) if done.returncode == 0 else done

        def held(stack: Stack, tier: str) -> int:
            stretches = view(stack, "--json")["stretches"]
            return sum(each["length"] for each in stretches if tier in each.get("tiers", ()))

        found = view(here, "--json")
        assert found["tiers"] == ["gpu", "cpu", "redis"]
        assert [each["kind"] for each in found["stretches"] if each["kind"] == "gone"] == ["gone", "gone"]
        assert held(here, "gpu") == found["length"]
        eventually(lambda: held(here, "redis") >= 490, "stores reach Redis")
        assert held(here, "cpu") >= 490
        _flush(mine)
        _clear_l1(here)
        assert (held(here, "gpu"), held(here, "cpu")) == (0, 0)
        # Asking has moved nothing, and the other node finds the same in Redis.
        redis = held(here, "redis")
        assert redis >= 490 and held(there, "redis") == redis
        assert (held(there, "gpu"), held(there, "cpu")) == (0, 0)
        refusal = view(there, "--cache-salt", "somebody")
        assert refusal.returncode == 3 and "unknown_base" in refusal.stderr


def test_t10_the_doctor_finds_module_pairing_and_adapter(nodes: tuple[Stack, Stack]) -> None:
    _, there = nodes
    found = {check.name: check for check in check_module(there.lmcache_url)}
    assert list(found) == ["module", "pairing", "bases", "l2 adapter"]
    assert {check.status for check in found.values()} == {Status.OK}, found
    hello = wire.Hello(instance=77, version="0.0.1")
    answer = _module_call(there, wire.HELLO, wire.encode(hello))
    assert not answer.success and "0.0.1" in answer.error
    check = next(check for check in check_module(there.lmcache_url) if check.name == "pairing")
    assert check.status is Status.FAIL
    assert "0.0.1" in check.seen and version("leyline-lmcache") in check.seen


def _module_call(stack: Stack, method: str, payload: bytes) -> Any:
    from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

    client = RequestClientFactory.create("{}:{}".format(*stack.lmcache_address))
    try:
        request = ServerModuleCallRequest(method=method, payload=payload)
        return client.server_module_call(request).result(30)
    finally:
        client.close()


def test_i7_a_base_of_another_tenant_is_unknown_on_every_node(nodes: tuple[Stack, Stack]) -> None:
    here, there = nodes
    with here.client(120.0) as mine, there.client(120.0) as theirs:
        prompt = tokens(600, "tenant")
        base = mine.generate(prompt, cache_salt="alpha", **OPTIONS)
        known = prompt + list(base.output_ids[:-1])
        for client in (mine, theirs):
            refused(_edit(client, base, known, cache_salt="beta"), "unknown_base")
            refused(_edit(client, base, known), "unknown_base")


def test_locks_and_slots_come_back(nodes: tuple[Stack, Stack]) -> None:
    """I6 on both tiers."""
    here, _ = nodes
    with quiet_log(here), here.client(120.0) as client:
        for i in range(8):
            base, known = _base(client, f"locks{i}")
            _flush(client)
            _edit(client, base, known)
        usage = client.wait_idle()
        assert usage.used == 0, usage

        def unlocked() -> bool:
            status = httpx.get(f"{here.lmcache_url}/status", timeout=30).json()
            tier = (
                status["storage_manager"]["l1_manager"]
                if "storage_manager" in status
                else status["l1_manager"]
            )
            return tier["read_locked_count"] == 0 and tier["write_locked_count"] == 0

        eventually(unlocked, "every lock in L1 is given back")
