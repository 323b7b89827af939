"""One request's plan: the edited view, what must be filled, and how far the tree has to reach.

Pure arithmetic over a base record and the prompt; no engine object is touched.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from leyline_lmcache.diff import common_prefix
from leyline_lmcache.directive import Directive, Mode, normalize
from leyline_lmcache.ranges import Range
from leyline_lmcache.reasons import Fallback, FallbackReason
from leyline_lmcache.view import View

from .lineage import (
    EXACT,
    TAG_SHIFT,
    Lineage,
    LineageTable,
    Roundings,
    Tokens,
    as_tokens,
    key_array,
    tag_at,
    tagged,
)
from .records import BaseRecord


class Kind(StrEnum):
    """What a planned request is for."""

    MAIN = "main"
    """The client's request."""
    FILL = "fill"
    """An internal request that prefills one replacement."""


@dataclass(slots=True)
class RequestPlan:
    """How one request is served from edited KV.

    Attributes:
        kind: the client's request or one of its fills.
        record: the base.
        lineage: of the edited tokens.
        tail: of the tokens this request computes after them, from ``tail_start`` on. Its own, because how far
            the view was kept decides what they attend to.
        first_change: first position whose key carries the lineage's tag; before it the base's own keys.
        view: the edited view as far as it is spliced or filled (``target`` tokens).
        whole: all of the edited base.
        fills: view ranges the engine prefills in internal requests, block-aligned.
        goal: view positions ``[0, goal)`` that must be in the tree before this request is prefilled.
        edits: number of directives that change something.
        exact: leading tokens that no edit ever touched.
    """

    kind: Kind
    record: BaseRecord
    lineage: Lineage
    tail: Lineage
    tail_start: int
    first_change: int
    view: View
    whole: View
    fills: tuple[Range, ...]
    goal: int
    edits: int
    exact: int

    @property
    def target(self) -> int:
        return self.view.length

    def keys(self, token_ids: array[int]) -> array[int]:
        """Tagged keys of a token sequence that starts with this plan's prompt (or is a prefix of it)."""
        tokens = as_tokens(token_ids)
        shared = min(self.first_change, len(tokens))
        out = tagged(tokens, self.lineage.tag)
        out[:shared] = self.record.keys[:shared]
        out[self.tail_start :] = tagged(tokens[self.tail_start :], self.tail.tag)
        return key_array(out)

    def cut(self, length: int, lineages: LineageTable) -> None:
        """Keep only the view's first ``length`` tokens; the rest is prefilled."""
        self.view, self.goal = self.view.truncate(length), length
        self.tail, self.tail_start = lineages.after(self.lineage, length), length

    def kept(self, start: int, end: int) -> int:
        """Tokens of ``[start, end)`` whose KV was computed before this edit."""
        return sum(piece.length for _, piece in self.view.between(start, end) if piece.buffer is not None)

    def roundings(self) -> Roundings:
        """Of the whole view."""
        out = Roundings()
        for start, end, count in self.record.roundings.between(0, self.first_change):
            out.write(start, end, count)
        for start, end, count in self.lineage.roundings.between(self.first_change, self.target):
            out.write(start, end, count)
        return out


def fill_ranges(directives: Sequence[Directive], page_size: int, min_reuse: int) -> tuple[Range, ...]:
    """View ranges that have to be prefilled for the replacements, in order.

    Each replacement is widened to whole pages, as the engine prefills from a page's start and only whole
    pages enter the tree. Two that leave fewer than ``min_reuse`` kept tokens between them become one.
    ``directives``: sorted.
    """
    out: list[Range] = []
    moved = 0
    for directive in directives:
        start = directive.start + moved
        end = start + len(directive.replacement)
        moved += directive.shift
        if start == end:
            continue
        start, end = start // page_size * page_size, -(-end // page_size) * page_size
        if out and start - out[-1][1] < min_reuse:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return tuple(out)


def plan_request(
    record: BaseRecord,
    directives: Sequence[Directive],
    prompt: Tokens,
    lineages: LineageTable,
    *,
    page_size: int,
    min_reuse: int,
    fill: Range | None = None,
) -> RequestPlan | None:
    """Plan a request against its base.

    Args:
        record: the base that every directive names.
        directives: one turn's directives, in any order.
        prompt: the request's token ids, int64 ``[n]``.
        fill: for an internal request, the range it fills; its prompt ends with that range.

    Returns:
        The plan, or None when the directives leave an exact continuation: the ordinary path is right then.

    Raises:
        Fallback: invalid_directive, overlapping_edits, token_mismatch, below_min_reuse,
            unsupported_runtime (FORGET).
    """
    ordered = normalize(directives, record.length)
    if any(directive.mode is Mode.FORGET for directive in ordered):
        raise Fallback(
            FallbackReason.UNSUPPORTED_RUNTIME,
            "mode: forget does not erase in this release; the edited text is prefilled, the old KV stays",
        )
    edits = [directive for directive in ordered if not directive.is_identity]
    edited = _edited_tokens(record.tokens, edits)
    same = common_prefix(edited, prompt)
    if not edits:
        return _continuation(record, same, page_size=page_size, min_reuse=min_reuse)

    moved = sum(edit.shift for edit in edits)
    touched = edits[-1].end + moved
    if fill is not None:
        if fill not in fill_ranges(edits, page_size, min_reuse) or same < min(len(prompt), len(edited)):
            raise Fallback(
                FallbackReason.TOKEN_MISMATCH, f"fill [{fill[0]}, {fill[1]}) does not belong to the edit"
            )
    elif same < touched:
        raise Fallback(
            FallbackReason.TOKEN_MISMATCH,
            f"the prompt departs from the edited base at {same}, before the last edit ends at {touched}",
        )

    raw = record.view.apply([edit.edit for edit in edits])
    # Only whole pages of the base can be in the tree.
    resident = max(record.length // page_size * page_size + moved, touched)
    target = min(same, resident) // page_size * page_size
    fills = list(fill_ranges(edits, page_size, min_reuse))
    if fill is not None:
        fills = [each for each in fills if each[1] <= fill[1]]
        target, goal = fill[1], fill[0]
    else:
        # A replacement with nothing worth keeping after it belongs to the request's own tail.
        while fills and fills[-1][1] + min_reuse > target:
            target = min(target, fills.pop()[0])
        goal = target
    view = raw.extend(max(0, target - raw.length)).truncate(target)
    for start, end in fills:
        view = view.punch(start, min(end, view.length))
    lineage = lineages.of(raw.fingerprint())
    plan = RequestPlan(
        kind=Kind.MAIN if fill is None else Kind.FILL,
        record=record,
        lineage=lineage,
        # A fill is part of the view; a request goes on after it.
        tail=lineage if fill is not None else lineages.after(lineage, target),
        tail_start=target,
        first_change=edits[0].start,
        view=view,
        whole=raw,
        fills=tuple(fills),
        goal=goal,
        edits=len(edits),
        exact=_exact_prefix(record, edits[0].start),
    )
    if fill is None:
        kept = plan.kept(plan.first_change, target) if target > plan.first_change else 0
        if kept < min_reuse:
            raise Fallback(
                FallbackReason.BELOW_MIN_REUSE,
                f"{kept} tokens after the edit could be kept, min_reuse is {min_reuse}",
            )
    return plan


def _continuation(record: BaseRecord, same: int, *, page_size: int, min_reuse: int) -> RequestPlan | None:
    """The base's view goes on with no edit: its keys, then the tag that its last kept token has."""
    tag = tag_at(record.keys, same - 1) if same else EXACT
    if tag == EXACT:
        return None
    target = min(same, record.length) // page_size * page_size
    view = record.view.truncate(target)
    if target < min_reuse:
        raise Fallback(
            FallbackReason.BELOW_MIN_REUSE,
            f"{target} tokens of the base could be kept, min_reuse is {min_reuse}",
        )
    fingerprint = next((name for start, name in reversed(record.spans) if start < same), view.fingerprint())
    lineage = Lineage(tag, fingerprint, record.roundings)
    return RequestPlan(
        kind=Kind.MAIN,
        record=record,
        lineage=lineage,
        tail=lineage,
        tail_start=same,
        first_change=same,
        view=view,
        whole=view,
        fills=(),
        goal=target,
        edits=0,
        exact=_exact_prefix(record, target),
    )


def _exact_prefix(record: BaseRecord, end: int) -> int:
    """Leading tokens of ``[0, end)`` whose keys carry no tag."""
    edited = np.flatnonzero(record.keys[:end] >> TAG_SHIFT)
    return int(edited[0]) if len(edited) else end


def _edited_tokens(base: Tokens, edits: Sequence[Directive]) -> Tokens:
    parts: list[Tokens] = []
    at = 0
    for edit in edits:
        parts += [base[at : edit.start], np.array(edit.replacement, dtype=np.int64)]
        at = edit.end
    return np.concatenate([*parts, base[at:]])
