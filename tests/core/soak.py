"""A long random check of the core against the naive model.

    python -m tests.core.soak --examples 1000000 --jobs 2 --seed 1

Example `n` of a seed is always the same script, however the work is split; a failure prints the command that
repeats it alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack

from leyline_lmcache.ops import Tier

from .oracle import random_script, run_script

_BATCH = 500


def example(seed: int, number: int) -> None:
    """Run one example."""
    rng = random.Random(f"{seed}:{number}")
    # The naive provenance is quadratic; it need not be part of each.
    tiers = (Tier.GPU, Tier.CPU if number % 2 else Tier.REDIS)
    run_script(random_script(rng), tiers=tiers, influence=number % 8 == 0)


def _batch(work: tuple[int, int, int]) -> tuple[int, int | None, str]:
    """Examples `[first, last)`: how many ran, and the first that failed with its traceback."""
    seed, first, last = work
    for number in range(first, last):
        try:
            example(seed, number)
        except Exception:
            return number - first, number, traceback.format_exc()
    return last - first, None, ""


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 when every example held."""
    parser = argparse.ArgumentParser(prog="python -m tests.core.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first example")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    last = args.first + args.examples
    work = [(args.seed, n, min(n + _BATCH, last)) for n in range(args.first, last, _BATCH)]
    began = shown = time.monotonic()
    done = 0
    results: Iterator[tuple[int, int | None, str]]
    with ExitStack() as stack:
        if args.jobs > 1:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(args.jobs))
            results = pool.imap_unordered(_batch, work)
        else:
            results = map(_batch, work)
        for ran, failed, trace in results:
            done += ran
            if failed is not None:
                print(trace, file=sys.stderr)
                print(f"example {failed} of seed {args.seed} failed; alone:", file=sys.stderr)
                print(
                    f"  python -m tests.core.soak --seed {args.seed} --first {failed} --examples 1 --jobs 1",
                    file=sys.stderr,
                )
                return 1
            now = time.monotonic()
            if now - shown >= 5 or done == args.examples:
                shown = now
                print(
                    f"{done:,} of {args.examples:,} held, {done / (now - began):,.0f} per second", flush=True
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
