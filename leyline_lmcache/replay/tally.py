"""Sums over the requests of a replay, and what follows from two of them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from leyline_lmcache.replay.arms import Arm
from leyline_lmcache.replay.play import Play, Turn


@dataclass(frozen=True, slots=True)
class Tally:
    """Of one set, arm and concurrency. Counts are tokens, unless they say otherwise.

    Attributes:
        workload: name of the set.
        requests: how many.
        prompt: of all prompts.
        hit: whose KV was there.
        tiers: of `hit`, by the tier it lay in.
        filled: prefilled for replacements, part of `prefilled`.
        prefilled: computed.
        prefix, blocks, in_order, anywhere: the ceilings, see `ceiling`; the first is that of a prefix cache.
        edited: requests served from edited KV.
        edits: in them.
        outcomes: requests by what Leyline reports.
        fallbacks: requests by reason.
        not_found: of `blocks`, what the diff did not find, in requests with edits.
        not_served: what it found and the server did not have or use.
        not_seen: of `blocks`, what requests without edits missed.
        ttft_ms: median time to the first token; `ttft_ms_p95`: 95th percentile.
        seconds: for the whole replay.
    """

    workload: str
    arm: Arm
    concurrency: int
    requests: int
    prompt: int
    hit: int
    tiers: Mapping[str, int]
    filled: int
    prefilled: int
    prefix: int
    blocks: int
    in_order: int
    anywhere: int
    edited: int
    edits: int
    outcomes: Mapping[str, int]
    fallbacks: Mapping[str, int]
    not_found: int
    not_served: int
    not_seen: int
    ttft_ms: float
    ttft_ms_p95: float
    seconds: float

    @property
    def hit_rate(self) -> float:
        """Cached over prompt tokens, summed over requests (the paper's definition)."""
        return self.hit / self.prompt if self.prompt else 0.0

    @property
    def fraction_of_ceiling(self) -> float:
        """Hits over `blocks`."""
        return self.hit / self.blocks if self.blocks else 1.0

    @property
    def fraction_of_in_order(self) -> float:
        """Hits over `in_order`."""
        return self.hit / self.in_order if self.in_order else 1.0

    @property
    def fraction_of_anywhere(self) -> float:
        """Hits over `anywhere`."""
        return self.hit / self.anywhere if self.anywhere else 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        rates = {
            "hit_rate": round(self.hit_rate, 4),
            "fraction_of_ceiling": round(self.fraction_of_ceiling, 4),
            "fraction_of_in_order": round(self.fraction_of_in_order, 4),
            "fraction_of_anywhere": round(self.fraction_of_anywhere, 4),
        }
        return {**asdict(self), **rates, "arm": self.arm.value}


def tally(played: Play) -> Tally:
    """Add the requests up."""
    turns = played.turns
    served = [turn.served for turn in turns]
    times = [each.seconds * 1e3 for each in served] or [0.0]
    tiers: Counter[str] = Counter()
    for each in served:
        tiers.update(each.tiers)
    derived = [turn for turn in turns if turn.served.found is not None]
    return Tally(
        workload=played.workload,
        arm=played.arm,
        concurrency=played.concurrency,
        requests=len(turns),
        prompt=sum(each.prompt for each in served),
        hit=sum(each.hit for each in served),
        tiers=dict(tiers),
        filled=sum(each.filled for each in served),
        prefilled=sum(each.prefilled for each in served),
        prefix=sum(turn.ceiling.prefix for turn in turns),
        blocks=sum(turn.ceiling.blocks for turn in turns),
        in_order=sum(turn.ceiling.in_order for turn in turns),
        anywhere=sum(turn.ceiling.anywhere for turn in turns),
        edited=sum(each.outcome == "spliced" for each in served),
        edits=sum(each.edits for each in served),
        outcomes=dict(Counter(each.outcome for each in served if each.outcome)),
        fallbacks=dict(Counter(each.reason or "unnamed" for each in served if each.outcome == "fallback")),
        not_found=sum(turn.ceiling.blocks - _found(turn) for turn in derived),
        not_served=sum(_found(turn) - turn.served.hit for turn in derived),
        not_seen=sum(turn.ceiling.blocks - turn.served.hit for turn in turns if turn.served.found is None),
        ttft_ms=round(statistics.median(times), 2),
        ttft_ms_p95=round(sorted(times)[max(0, round(0.95 * len(times)) - 1)], 2),
        seconds=round(played.seconds, 2),
    )


def gain_points(tallies: Sequence[Tally], workload: str, concurrency: int) -> float | None:
    """Hit rate of Leyline less that of SGLang alone with the same prompts, in percentage points."""
    rates = {t.arm: t.hit_rate for t in tallies if (t.workload, t.concurrency) == (workload, concurrency)}
    if Arm.LEYLINE not in rates or Arm.RADIX not in rates:
        return None
    return 100 * (rates[Arm.LEYLINE] - rates[Arm.RADIX])


def summary(tallies: Sequence[Tally]) -> dict[str, float | int | str]:
    """The figures of each set; without a level of concurrency in its name, one is the worst of all levels."""
    made: dict[str, float | int | str] = {}
    for workload in dict.fromkeys(t.workload for t in tallies):
        of = [t for t in tallies if t.workload == workload]
        levels = sorted({t.concurrency for t in of})
        found = {level: gain_points(of, workload, level) for level in levels}
        gains = {level: round(gain, 2) for level, gain in found.items() if gain is not None}
        ours = [t for t in of if t.arm is Arm.LEYLINE]
        if gains:
            made[f"gain_points_{workload}"] = min(gains.values())
        if ours:
            made[f"fraction_of_ceiling_{workload}"] = round(min(t.fraction_of_ceiling for t in ours), 4)
            made[f"fraction_of_in_order_{workload}"] = round(min(t.fraction_of_in_order for t in ours), 4)
            made[f"fraction_of_anywhere_{workload}"] = round(min(t.fraction_of_anywhere for t in ours), 4)
            made[f"fallbacks_{workload}"] = sum(sum(t.fallbacks.values()) for t in ours)
        for level, gain in gains.items():
            made[f"gain_points_{workload}_c{level}"] = gain
        for t in ours:
            made[f"fraction_of_ceiling_{workload}_c{t.concurrency}"] = round(t.fraction_of_ceiling, 4)
        for t in of:
            made[f"hit_rate_{workload}_{t.arm}_c{t.concurrency}"] = round(t.hit_rate, 4)
    return made


def _found(turn: Turn) -> int:
    """What the diff found, without the last token, which is computed in any case."""
    return min(turn.served.found or 0, turn.served.prompt - 1)
