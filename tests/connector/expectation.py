"""What an edited request's KV has to be, worked out token by token from the contract (none of the plugin's
code)."""

from __future__ import annotations

from collections.abc import Sequence

from .engine import Sems, compute

Edit = tuple[int, int, Sequence[int]]


def exact(tokens: Sequence[int], known: int) -> Sems:
    """KV of a sequence that was never edited."""
    sems: Sems = []
    for token in tokens[:known]:
        sems.append(compute(sems, token))
    return sems


def spliced(
    base: Sems,
    base_tokens: Sequence[int],
    edits: Sequence[Edit],
    tokens: Sequence[int],
    prompt: int,
    page: int,
    least: int,
    reach: int | None = None,
) -> Sems:
    """KV after an applied edit: kept tokens keep what they had, everything else attends to the edited view.

    Kept is what the base had whole pages of, except in the pages of a replacement, up to where the prompt
    departs from the edited base, in whole pages, and never the prompt's last token. ``reach``: an earlier
    end, because KV was gone.
    """
    origin: list[int | None] = []
    edited: list[int] = []
    fills: list[list[int]] = []
    at = 0
    for start, end, replacement in sorted(edits, key=lambda e: (e[0], e[1])):
        origin += range(at, start)
        edited += base_tokens[at:start]
        if replacement:
            low, high = len(edited) // page * page, -(-(len(edited) + len(replacement)) // page) * page
            if fills and low - fills[-1][1] < least:
                fills[-1][1] = max(high, fills[-1][1])
            else:
                fills.append([low, high])
        origin += [None] * len(replacement)
        edited += replacement
        at = end
    tail_start = len(edited)
    origin += range(at, len(base_tokens))
    edited += base_tokens[at:]
    same = 0
    while same < min(len(edited), prompt) and edited[same] == tokens[same]:
        same += 1
    whole = max(tail_start, tail_start + len(base_tokens) // page * page - at)
    end = min(same, whole) // page * page
    while fills and fills[-1][1] + least > end:
        end = min(end, fills.pop()[0])
    end = min(end, (prompt - 1) // page * page)
    if reach is not None:
        assert reach <= end
        end = reach
    sems: Sems = []
    for i, token in enumerate(tokens):
        source = origin[i] if i < end else None
        if source is None or any(a <= i < b for a, b in fills):
            sems.append(compute(sems, token))
        else:
            sems.append(base[source])
    return sems
