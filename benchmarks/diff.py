"""What finding a session's edits costs: the diff of a base and the prompt that came after it. No server.

CPU time of the one thread at work, arms in turns within one run. The worst cases are text on which anchors
fail or mislead; they must not cost more than ordinary edits by much.

    python benchmarks/diff.py
"""

from __future__ import annotations

import random
import statistics
import time

import numpy as np
from _common import Figure, finish, print_table

from leyline_lmcache.diff import Diff, Tokens, diff

TOKENS = 128 * 1024
EDITS = 50
WORDS = 100_000
ROUNDS = 15


def text(length: int, seed: int, words: int = WORDS) -> Tokens:
    """Token ids as frequent as words are: few of them often, most of them hardly ever."""
    ranks = np.random.default_rng(seed).zipf(1.2, size=length)
    return np.minimum(ranks, words).astype(np.int64)


def edited(base: Tokens, count: int) -> Tokens:
    """``count`` spans of a base replaced by stubs, and a new turn."""
    step = len(base) // count
    parts: list[Tokens] = []
    for number in range(count):
        part = base[number * step : (number + 1) * step]
        parts += [part[: step // 3], text(5, 1000 + number), part[step // 3 + step // 4 :]]
    return np.concatenate([*parts, base[count * step :], text(500, 7)])


def blocks(base: Tokens, size: int) -> Tokens:
    """A base's blocks in another order."""
    order = random.Random(8).sample(range(len(base) // size), len(base) // size)
    return np.concatenate([base[each * size : (each + 1) * size] for each in order])


def pairs() -> dict[str, tuple[Tokens, Tokens]]:
    """Base and prompt of each arm."""
    base = text(TOKENS, 1)
    small = base[: TOKENS // 16]
    return {
        "50 edits": (base, edited(base, EDITS)),
        "a sixteenth of the tokens": (small, edited(small, EDITS)),
        "no edit, a new turn": (base, np.concatenate([base, text(500, 7)])),
        "nothing in common": (base, text(TOKENS, 2)),
        "one token": (np.full(TOKENS, 7), np.full(TOKENS - 9, 7)),
        "a short period": (np.arange(TOKENS) % 64, (np.arange(TOKENS) + 9) % 64),
        "reversed": (base, base[::-1].copy()),
        "blocks in another order": (base, blocks(base, 100)),
        "every 20th token changed": (base, np.where(np.arange(TOKENS) % 20 == 0, WORDS + 1, base)),
    }


def main() -> int:
    """Time all arms in turns."""
    arms = pairs()
    taken: dict[str, list[float]] = {name: [] for name in arms}
    found: dict[str, Diff] = {}
    for _ in range(ROUNDS):
        for name, (base, prompt) in arms.items():
            start = time.thread_time()
            found[name] = diff(base, prompt)
            taken[name].append((time.thread_time() - start) * 1e3)
    medians = {name: statistics.median(each) for name, each in taken.items()}
    rows = [
        (
            name,
            len(prompt),
            f"{medians[name]:.1f}",
            len(found[name].changes),
            f"{found[name].kept / len(prompt):.1%}",
        )
        for name, (_, prompt) in arms.items()
    ]
    print_table("diff", ("arm", "tokens", "ms", "changes", "kept"), rows)
    worst = [
        name for name in arms if name not in ("50 edits", "a sixteenth of the tokens", "no edit, a new turn")
    ]
    figures: dict[str, Figure] = {
        "ms_128k_50_edits": round(medians["50 edits"], 2),
        "kept_128k_50_edits": round(found["50 edits"].kept / len(arms["50 edits"][1]), 4),
        "changes_128k_50_edits": len(found["50 edits"].changes),
        "growth_16x_tokens": round(medians["50 edits"] / medians["a sixteenth of the tokens"] / 16, 3),
        "ms_128k_no_edit": round(medians["no edit, a new turn"], 2),
        "ms_128k_worst_case": round(max(medians[name] for name in worst), 2),
        "worst_case": max(worst, key=medians.__getitem__),
    }
    finish("diff", figures, {"rounds": ROUNDS, "ms": taken})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
