"""A replay as tables, for 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from leyline_lmcache.replay.tally import Tally, gain_points

COLUMNS = ("set", "arm", "at a time", "prompt", "prefilled", "hit", "ceiling", "edited", "ttft ms")


def rows(tallies: Sequence[Tally]) -> list[tuple[str, ...]]:
    """Of a table with `COLUMNS`. ``ceiling``: hits over what the best earlier prompt holds."""
    return [
        (
            t.workload,
            t.arm.value,
            str(t.concurrency),
            f"{t.prompt:,}",
            f"{t.prefilled:,}",
            f"{t.hit_rate:.1%}",
            f"{t.fraction_of_ceiling:.1%}",
            f"{t.edited}/{t.requests}",
            f"{t.ttft_ms:.0f}",
        )
        for t in sorted(tallies, key=lambda t: (t.workload, t.concurrency))
    ]


def verdicts(tallies: Sequence[Tally]) -> Iterator[str]:
    """A few lines for each set and concurrency that Leyline took part in."""
    for t in sorted(tallies, key=lambda t: (t.workload, t.concurrency)):
        if t.arm != "leyline":
            continue
        gain = gain_points(tallies, t.workload, t.concurrency)
        over = "" if gain is None else f"{gain:+.1f} points over SGLang alone, "
        yield (
            f"{t.workload}, {t.concurrency} at a time: {over}{t.fraction_of_ceiling:.1%} of the ceiling\n"
            f"  ({t.fraction_of_in_order:.1%} of the best alignment, {t.fraction_of_anywhere:.1%} of what is "
            f"anywhere); {t.edits:,} edits"
            f"{_counts('; fallbacks', t.fallbacks)}"
        )
        yield (
            f"  below the ceiling: {t.not_found:,} not found, {t.not_served:,} not served, "
            f"{t.not_seen:,} without edits{_counts('; from', t.tiers)}"
        )


def _counts(what: str, counts: Mapping[str, int]) -> str:
    shown = [f"{name} {count:,}" for name, count in counts.items() if count]
    return f"{what}: {', '.join(shown)}" if shown else ""
