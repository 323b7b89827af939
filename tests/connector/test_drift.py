"""I4: many edits cost one rotation. Twenty turns with an edit each, the GPU emptied in between."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from leyline_lmcache.connector.lineage import key_array
from leyline_lmcache.connector.records import Namespace
from leyline_lmcache.connector.settings import Settings
from leyline_lmcache.kernels.layout import KVLayout
from leyline_lmcache.kernels.splice import splice_rows

from .daemon import Daemon
from .engine import LAYERS, LORA_RANK, ROPE, ROPE_DIM, Engine, Served, row_of
from .test_cache import edited, tokens

TURNS = 20
BASE = 512
FROM = 300
"""Of the base, tokens from here on are behind every edit."""


def turned(rows: list[torch.Tensor], shifts: list[int]) -> list[torch.Tensor]:
    """Rows turned by one shift after another, each time stored in the pool's type."""
    count = rows[0].shape[0]
    buffers = [row.clone().reshape(count, 1, -1) for row in rows]
    layout = KVLayout.mla(buffers, ROPE, ROPE_DIM, kv_lora_rank=LORA_RANK)
    slots = torch.arange(count)
    for shift in shifts:
        splice_rows(layout, slots, slots, shift, backend="torch")
    return [buffer[:, 0] for buffer in buffers]


def as_computed(served: Served) -> list[torch.Tensor]:
    """Rows of the base's tokens from ``FROM`` on, at the positions they were computed at."""
    span = range(FROM, BASE)
    return [
        torch.from_numpy(np.array([row_of(served.sems[i], i, layer) for i in span], dtype=np.float32))
        for layer in range(LAYERS)
    ]


def worst(rows: list[torch.Tensor], served: Served, shift: int) -> float:
    """Largest distance from keys that were computed at the new position, in double precision."""
    span = range(FROM, BASE)
    return max(
        float(np.abs(rows[layer].double().numpy() - want).max())
        for layer in range(LAYERS)
        for want in [np.array([row_of(served.sems[i], i + shift, layer) for i in span])]
    )


def slots_of(engine: Engine, served: Served) -> torch.Tensor:
    """Where the KV of a finished request lies now."""
    everybody = Namespace(None, None, None)
    record, splicer = engine.tier._records.get(served.rid, everybody), engine.tier._splicer
    assert record is not None and splicer is not None
    return splicer._slots.indices(splicer.match(key_array(record.keys), everybody), everybody)


@pytest.mark.parametrize("evicted", [True, False], ids=["evicted in between", "on the GPU all along"])
def test_i4_keys_after_twenty_edits_are_one_rotation_from_the_first_copy(evicted: bool) -> None:
    engine = Engine(1, 8192, Settings(min_reuse=1), Daemon(16))
    base = turn = engine.serve(tokens(BASE))
    shifts: list[int] = []
    for i in range(TURNS):
        if evicted:
            engine.forget_pool()
        # Seven tokens become one to thirteen: shifts of either sign, none of them undone by another.
        start, replacement = 5 + 11 * i, tokens(1 + i * 5 % 13, seed=i)
        assert start + 7 < FROM + sum(shifts)
        turn = edited(engine, turn, (start, start + 7, replacement), tail=tokens(4, seed=100 + i))
        assert turn.report is not None and turn.report["outcome"] == "spliced", turn.report
        # At most the last tokens of the unedited base, which filled no chunk.
        assert turn.report["reprefilled"] < 16
        if evicted:
            assert turn.report["tiers"]["cpu"] >= BASE - FROM
        shifts.append(len(replacement) - 7)
    total = sum(shifts)
    assert len(set(shifts)) > 5 and total != 0
    slots = slots_of(engine, turn)[FROM + total : BASE + total]
    got = [engine.pool.kv_buffer[layer][slots, 0] for layer in range(LAYERS)]
    once, chained = turned(as_computed(base), [total]), turned(as_computed(base), shifts)
    for layer in range(LAYERS):
        assert torch.equal(got[layer], once[layer])
    drift = worst(chained, base, total)
    print(f"one rotation is {worst(got, base, total):.2e} off, {TURNS} in a chain {drift:.2e}")
    assert worst(got, base, total) < drift / 2
