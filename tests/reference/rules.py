"""Which tokens of an edited request the engine computes, and which keep the KV they had.

Written from the documented rule (DESIGN §6: fills round up to a page; only whole pages are ever in the tree;
the engine computes at least one token of each prompt), not from the planner: the two check each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Edit = tuple[int, int, Sequence[int]]
"""``(start, end, replacement ids)`` in the base's positions."""


@dataclass(frozen=True)
class Served:
    """How an edited request is served.

    Attributes:
        computed: ranges, in edited positions, that are prefilled for the replacements before the request.
        target: where the request's own tail begins: before it, KV is kept or prefilled for a replacement.
        cached: most tokens of the prompt that may come from the cache: more than ``target`` if a replacement
            near the end was prefilled ahead of the request.
        prefix: tokens before the first edit.
        kept: of the tokens after the first edit, how many keep their KV.
    """

    computed: tuple[tuple[int, int], ...]
    target: int
    cached: int
    prefix: int
    kept: int


def apply_edits(base: Sequence[int], edits: Sequence[Edit]) -> tuple[list[int], list[int | None]]:
    """The edited tokens and, for each, its position in the base; None for a replacement's."""
    tokens: list[int] = []
    sources: list[int | None] = []
    at = 0
    for start, end, replacement in sorted(edits, key=lambda edit: (edit[0], edit[1])):
        tokens += [*base[at:start], *replacement]
        sources += [*range(at, start), *[None] * len(replacement)]
        at = end
    return tokens + list(base[at:]), sources + list(range(at, len(base)))


def serve(
    base: Sequence[int],
    edits: Sequence[Edit],
    prompt: Sequence[int],
    *,
    page_size: int = 1,
    min_reuse: int = 16,
) -> Served:
    """Apply the rules to one request that is spliced."""
    tokens, sources = apply_edits(base, edits)
    real = [edit for edit in sorted(edits, key=lambda e: (e[0], e[1])) if edit[0] != edit[1] or edit[2]]
    same = 0
    while same < min(len(tokens), len(prompt)) and tokens[same] == prompt[same]:
        same += 1

    # The base's last, partial page never entered the tree.
    cached = len(tokens) - len(base) % page_size
    reach = min(same, cached) // page_size * page_size

    computed: list[tuple[int, int]] = []
    moved = 0
    for start, end, replacement in real:
        begin = start + moved
        moved += len(replacement) - (end - start)
        if not replacement:
            continue
        low = begin - begin % page_size
        high = begin + len(replacement)
        high += -high % page_size
        if computed and low - computed[-1][1] < min_reuse:
            computed[-1] = (computed[-1][0], max(computed[-1][1], high))
        else:
            computed.append((low, high))
    # A replacement with nothing worth keeping after it belongs to the tail.
    ahead = 0
    while computed and computed[-1][1] + min_reuse > reach:
        low, high = computed.pop()
        reach = min(reach, low)
        if high + min_reuse <= len(prompt):
            ahead = max(ahead, high)
    # One token at least is computed by the request itself.
    reach = min(reach, (len(prompt) - 1) // page_size * page_size)

    first = real[0][0] if real else len(tokens)
    again = {position for start, end in computed for position in range(start, end)}
    kept = sum(1 for at in range(min(first, reach), reach) if sources[at] is not None and at not in again)
    return Served(tuple(computed), reach, max(reach, ahead), min(first, reach), kept)
