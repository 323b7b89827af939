"""Recorded conversations of agents, replayed against real servers in four arms.

Three sets (tests/data/conversations): ``swe_agent``, whose tool outputs older than the two latest are stubbed
by a policy, and ``miniswe`` and ``magagent``, whose prompts are sent as they were recorded, because their
harnesses rewrote history themselves. Arms: no policy (``full``), policy on SGLang alone (``radix``), policy
with LMCache (``lmcache``), policy with Leyline (``leyline``: requests name their session, no edits). One
stack after another; all in one run of this program. See docs/replay.md.

    python benchmarks/replay.py [FILE ...] [--tokenizer tokenizer.json] [--concurrency 1 8] [--model mla]

``hit_rate_…`` is cached over prompt tokens, summed over requests; what Leyline had prefilled for replacements
counts as computed. ``gain_points_SET`` is the hit rate of ``leyline`` less that of ``radix``, and
``fraction_of_ceiling_SET`` its hits over the longest common runs with the best earlier prompt of the session
(``fraction_of_in_order_SET``: over the best alignment with one; ``fraction_of_anywhere_SET``: over what any
earlier prompts hold at any place; see leyline_lmcache/replay/ceiling.py). Each is the worst of all levels of
concurrency, and ``…_cN`` is that of N sessions at a time.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from _common import finish, print_table

from leyline_lmcache.policies.config import build
from leyline_lmcache.policies.document import Document
from leyline_lmcache.replay import screen
from leyline_lmcache.replay.arms import MODEL, POOL, Arm, Servers
from leyline_lmcache.replay.compare import compare
from leyline_lmcache.replay.load import POLICY, Limits, load, sample
from leyline_lmcache.replay.picture import draw
from leyline_lmcache.replay.tally import summary
from leyline_lmcache.replay.tokens import byte_tokenizer, file_tokenizer

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "replay.png"


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", type=Path, nargs="*", help="conversations (the three sets)")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json, or its folder (bytes)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8], help="sessions at a time (1 8)")
    parser.add_argument("--arms", type=Arm, nargs="+", default=list(Arm), help="(all)")
    parser.add_argument("--conversations", type=int, help="at most so many of each file (all)")
    parser.add_argument("--max-tokens", type=int, default=24_000, help="of a prompt (24000)")
    parser.add_argument("--policy", default=POLICY, help="for conversations of messages")
    parser.add_argument("--model", default=MODEL, help="of the stacks (mla)")
    parser.add_argument("--pool", type=int, default=POOL, help="tokens of SGLang's KV pool")
    parser.add_argument("--page-size", type=int, default=1, help="of SGLang (1)")
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of SGLang (1)")
    parser.add_argument("--min-reuse", type=int, default=16, help="of the plugin and the ceiling (16)")
    parser.add_argument("--dry", action="store_true", help="neither a result nor a picture is written")
    return parser.parse_args()


def main() -> None:
    """Replay, print, draw, write."""
    options = arguments()
    words = byte_tokenizer() if options.tokenizer is None else file_tokenizer(options.tokenizer)
    policy = build([Document.parse(options.policy, "--policy").value], at=("--policy",))
    limits = Limits(options.max_tokens, options.conversations)
    workloads = load(options.files or sample(), words, policy, limits)
    servers = Servers(
        model=options.model,
        pool=options.pool,
        most_tokens=options.max_tokens,
        vocabulary=words.vocabulary,
        page_size=options.page_size,
        threads=options.threads,
        min_reuse=options.min_reuse,
    )
    tallies = compare(
        workloads,
        servers,
        arms=options.arms,
        concurrency=options.concurrency,
        on_progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print_table(f"replay; tokenizer: {words.name}", screen.COLUMNS, screen.rows(tallies))
    for line in screen.verdicts(tallies):
        print(line)
    if options.dry:
        return
    draw(tallies, PICTURE)
    figures = summary(tallies) | {
        "tokenizer": words.name,
        "model": options.model,
        "policy": options.policy,
        "concurrency": ",".join(map(str, options.concurrency)),
        "most_tokens": options.max_tokens,
        "pool_tokens": options.pool,
        "page_size": options.page_size,
        "min_reuse": options.min_reuse,
        "conversations": sum(len(each.sessions) for each in workloads),
        "calls_left_out": sum(each.left_out for each in workloads),
    }
    finish("replay", figures, [each.to_json() for each in tallies])


if __name__ == "__main__":
    main()
