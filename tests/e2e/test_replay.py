"""Recorded conversations on the real servers: what the replay benchmark counts is what the servers did."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from leyline_lmcache.policies.config import build
from leyline_lmcache.policies.document import Document
from leyline_lmcache.replay.arms import Arm
from leyline_lmcache.replay.compare import Bounds, replay
from leyline_lmcache.replay.load import POLICY
from leyline_lmcache.replay.play import Play
from leyline_lmcache.replay.tally import gain_points, tally
from leyline_lmcache.replay.tokens import byte_tokenizer
from leyline_lmcache.replay.workload import Workload, read
from leyline_lmcache.stack import Stack

from .driver import quiet_log, whole_pool

MIN_REUSE = 16


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    """Two conversations of six tool outputs each, of which the two latest stay."""
    records = []
    for name in ("red", "blue"):
        messages = [{"role": "system", "content": f"You mend the {name} program. " * 6}]
        messages.append({"role": "user", "content": f"What is wrong in {name}?"})
        for number in range(6):
            output = " ".join(f"{name}{number}line{line}" for line in range(14))
            messages.append({"role": "assistant", "content": f"Look at file {number} of {name}."})
            messages.append({"role": "user", "content": f"File {number}: {output}"})
        records.append({"session": name, "messages": [*messages, {"role": "assistant", "content": "Done."}]})
    file = tmp_path / "made.jsonl"
    file.write_text("\n".join(json.dumps(record) for record in records))
    policy = build([Document.parse(POLICY, "policy").value])
    return read(file, byte_tokenizer(), policy, most_tokens=4000)


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_policy_costs_the_prefix_cache_its_hits_and_leyline_none(
    stack_mla: Stack, stack_plain_mla: Stack, workload: Workload, concurrency: int
) -> None:
    bounds, run = Bounds(MIN_REUSE), uuid.uuid4().hex
    plays: dict[Arm, Play] = {}
    for stack, arms in ((stack_plain_mla, (Arm.FULL, Arm.RADIX)), (stack_mla, (Arm.LEYLINE,))):
        with quiet_log(stack), stack.client(timeout_s=120.0) as client:
            for arm in arms:
                plays[arm] = replay(client, arm, workload, bounds, concurrency, run=f"{run}-{arm}")
                whole_pool(client)
    # The prefix cache does exactly what is computed without it.
    for arm in (Arm.FULL, Arm.RADIX):
        assert [t.served.hit for t in plays[arm].turns] == [t.ceiling.prefix for t in plays[arm].turns]
    tallies = {arm: tally(played) for arm, played in plays.items()}
    ours, radix = tallies[Arm.LEYLINE], tallies[Arm.RADIX]
    assert ours.requests == radix.requests == 14 and ours.prompt == radix.prompt < tallies[Arm.FULL].prompt
    assert not ours.fallbacks and ours.edited >= 8
    assert all(t.served.hit <= t.ceiling.in_order for t in plays[Arm.LEYLINE].turns)
    assert ours.fraction_of_ceiling >= 0.99
    assert (gain_points([ours, radix], "made", concurrency) or 0) > 10
    assert ours.prefilled < radix.prefilled
