"""What planning an edit costs: the piece table, the planner, the codec and the journal. No GPU, no server.

Composing and planning look at pieces and edits and never at tokens, so the time must not grow with the
context and must grow at most linearly with the edits. Times are CPU time of the one thread at work: other
programs on the machine would else be measured too, and the longer arms more than the shorter ones. Arms are
timed in turns within one run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable

from _common import finish, print_table

from leyline_lmcache.codec import decode_plan, encode_plan
from leyline_lmcache.journal import JournalWriter, OpRecord
from leyline_lmcache.ops import OpKind, Plan, Tier
from leyline_lmcache.pieces import Edit, View
from leyline_lmcache.planner import compile_plan

TOKENS = 128 * 1024
EDITS = 32
NEW_TURN = 200
ROUNDS = 60
CONFIGS = ((Tier.GPU, 1), (Tier.GPU, 16), (Tier.GPU, 64), (Tier.CPU, 256), (Tier.REDIS, 256))


def edits_over(tokens: int, count: int) -> list[Edit]:
    """`count` edits spread over the context: replacements of either shift, and deletions."""
    step = tokens // count
    return [
        Edit(k * step + step // 3, k * step + step // 3 + step // 4, (0, step // 8, step // 3)[k % 3])
        for k in range(count)
    ]


def compose_and_plan(base: View, edits: list[Edit], tier: Tier, size: int) -> Plan:
    """What one turn costs: the directives on the base's view, the new turn, the plan."""
    return compile_plan(base, base.apply(edits).extend(NEW_TURN), size, tier)


def medians_ms(arms: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Median CPU milliseconds of each arm, timed in turns."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            start = time.thread_time()
            arm()
            taken[name].append(time.thread_time() - start)
    return {name: statistics.median(times) * 1e3 for name, times in taken.items()}


def an_arm(tokens: int, count: int, tier: Tier = Tier.GPU, size: int = 16) -> Callable[[], object]:
    base, edits = View.of_buffer("base", tokens), edits_over(tokens, count)
    return lambda: compose_and_plan(base, edits, tier, size)


def journal_write_us(records: int = 4000) -> float:
    """Median microseconds the caller spends on handing over a record."""
    record = OpRecord(0.0, "request", "ab" * 16, Tier.GPU, OpKind.COPY_ROTATE, 92, 1472, -195, 1 << 20, 130)
    taken = []
    with tempfile.TemporaryDirectory() as directory, JournalWriter(directory, queue_size=records) as writer:
        for _ in range(records):
            start = time.perf_counter()
            writer.write(record)
            taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e6


def main() -> None:
    configs = medians_ms({f"{t.value}, block {s}": an_arm(TOKENS, EDITS, t, s) for t, s in CONFIGS})
    print_table(
        f"compose and plan: {TOKENS:,} tokens, {EDITS} edits",
        ("tier", "CPU ms (median)"),
        list(configs.items()),
    )
    tokens = medians_ms({str(n * TOKENS): an_arm(n * TOKENS, EDITS) for n in (1, 4, 16)})
    print_table(f"the context grows, {EDITS} edits", ("tokens", "CPU ms (median)"), list(tokens.items()))
    edits = medians_ms({str(n * EDITS): an_arm(TOKENS, n * EDITS) for n in (1, 4, 16)})
    print_table(f"the edits grow, {TOKENS:,} tokens", ("edits", "CPU ms (median)"), list(edits.items()))

    base = View.of_buffer("base", TOKENS)
    script = edits_over(TOKENS, EDITS)
    new = base.apply(script).extend(NEW_TURN)
    plan = compile_plan(base, new, 16, Tier.GPU)
    data = encode_plan(plan)
    parts = medians_ms(
        {
            "apply": lambda: base.apply(script),
            "compile": lambda: compile_plan(base, new, 16, Tier.GPU),
            "fingerprint": new.fingerprint,
            "encode": lambda: encode_plan(plan),
            "decode": lambda: decode_plan(data),
            "expand to blocks": lambda: sum(1 for _ in plan.blocks()),
        }
    )
    print_table("parts", ("part", "CPU ms (median)"), list(parts.items()))

    first, last = str(TOKENS), str(16 * TOKENS)
    few, many = str(EDITS), str(16 * EDITS)
    finish(
        "core",
        {
            # The slowest tier and block size.
            "compose_plan_ms": round(max(configs.values()), 4),
            "growth_16x_tokens": round(tokens[last] / tokens[first], 3),
            "growth_16x_edits": round(edits[many] / edits[few], 3),
            "tokens": TOKENS,
            "edits": EDITS,
            "ops": len(plan.ops),
            "block_ops": sum(1 for _ in plan.blocks()),
            "plan_bytes": len(data),
            "encode_ms": round(parts["encode"], 4),
            "decode_ms": round(parts["decode"], 4),
            "journal_write_us": round(journal_write_us(), 3),
        },
        {"tiers_ms": configs, "tokens_ms": tokens, "edits_ms": edits, "parts_ms": parts, "rounds": ROUNDS},
    )


if __name__ == "__main__":
    main()
