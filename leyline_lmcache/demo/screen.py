"""The demo on a terminal: 80 columns, a block per turn as it happens, then the totals and the last plan."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from leyline_lmcache.demo.results import Arm, Conversation, Served, TurnResult, Verdict
from leyline_lmcache.demo.scenario import Place

PARTS = (
    ("prefix", "█", "blue"),
    ("spliced", "▓", "green"),
    ("filled", "▒", "yellow"),
    ("prefilled", "░", "red"),
)
"""What the tokens of a prompt can be: the field of `Served`, its cell, its colour."""

_BAR = 21
_ARM = 10
_WIDTHS = {"prompt": 6, "hit": 6, "splice": 7, "fill": 5, "new": 5}

_NAMES = {Place.GPU: "GPU", Place.CPU: "CPU", Place.REDIS: "Redis"}
_EVICTED = {
    Place.GPU: "",
    Place.CPU: "before the edit the GPU was emptied: all KV is in LMCache's L1",
    Place.REDIS: "before the edit GPU and L1 were emptied: all KV is in Redis",
}

EXPLANATION = (
    "Each turn the agent reads a tool's output, notes what follows from it, and is",
    "asked for a value. First it drops an old output: the one the value came from.",
    "In two turns of three the KV has left the GPU by then, for CPU memory or Redis.",
)


def legend() -> Text:
    """What the cells and columns mean."""
    text = Text("  ")
    words = ("prefix hit", "spliced", "filled in the middle", "prefilled at the end")
    for (_, cell, style), word in zip(PARTS, words, strict=True):
        text.append(cell * 2, style).append(f" {word}   ")
    return text


def column_heads() -> Text:
    """The line above the turns."""
    names = "".join(f"{name:>{width}}" for name, width in _WIDTHS.items())
    return Text(f"  {'':{_ARM}} {'':{_BAR}}{names}{'ms':>6}  answer", "dim")


def turn_lines(turn: TurnResult, longest: int) -> Iterator[Text]:
    """A turn: what was edited, then a line for each arm.

    Args:
        turn: the turn.
        longest: tokens of a full bar.
    """
    edits = ", ".join(f"[{edit.start}, {edit.end}) becomes {edit.length or 'nothing'}" for edit in turn.edits)
    yield Text(f"turn {turn.number}", "bold").append(f"  {edits}; asked: {turn.question}", "not bold")
    if _EVICTED[turn.place]:
        yield Text(f"  {_EVICTED[turn.place]}", "magenta")
    for arm, done in turn.arms.items():
        line = _figures(arm.value, done.final, longest)
        answer = done.final.answer if len(done.final.answer) <= 7 else f"{done.final.answer[:6]}…"
        if arm is Arm.FULL:
            line.append(f"  {answer}")
        else:
            follows = turn.follows(arm)
            line.append(f"  {answer} {'✓' if follows else '✗'}", "green" if follows else "red")
        yield line
        if arm is Arm.SPLICE and done.final.outcome:
            one = done.final
            lay = f"KV came from: GPU {one.gpu or '·'}  CPU {one.cpu or '·'}  Redis {one.redis or '·'}"
            yield Text(f"  {'':{_ARM}} {lay}", "dim")
        if done.final.reason:
            yield Text(f"  {'':{_ARM}} prefilled instead: {done.final.reason}", "red")


def total_lines(conversation: Conversation) -> Iterator[Text]:
    """All turns of each arm, and what that means."""
    turns = len(conversation.turns)
    longest = max((conversation.total(arm).prompt for arm in Arm), default=1)
    yield Text(f"all {turns} turns", "bold").append("  (tokens of the edited requests)", "dim")
    for arm in Arm:
        total = conversation.total(arm)
        summed = Served(
            total.prompt, total.prefix, total.spliced, total.filled, total.prefilled, total.milliseconds, ""
        )
        line = _figures(arm.value, summed, longest)
        yield line.append(f"  {total.follows}/{turns}")


def verdict_lines(conversation: Conversation) -> Iterator[Text]:
    """What was shown, in words."""
    turns = len(conversation.turns)
    full, again, splice = (conversation.total(arm) for arm in Arm)
    yield Text(
        f"answers like full context: splice {splice.follows} of {turns}, "
        f"re-prefill {again.follows} of {turns}"
    )
    yield Text(f"full context is right: {full.right} of {turns}")
    yield Text(
        f"tokens computed for the edited requests: splice {splice.filled + splice.prefilled:,}, "
        f"re-prefill {again.filled + again.prefilled:,}"
    )
    yield Text(
        f"tokens computed in all, drafts included: splice {splice.computed:,}, re-prefill {again.computed:,}"
    )
    if full.milliseconds and again.milliseconds:
        yield Text(
            f"time of an edited request: {splice.milliseconds / again.milliseconds:.2f} of re-prefill's, "
            f"{splice.milliseconds / full.milliseconds:.2f} of a prefix hit's"
        )
    came = ", ".join(f"{_NAMES[place]} {conversation.tokens_from(place):,}" for place in Place)
    yield Text(f"the splice arm's kept KV came from: {came}")
    style, words = _VERDICTS[conversation.verdict]
    yield Text(words, style)


_VERDICTS = {
    Verdict.HELD: (
        "bold green",
        "The contract held: every edit was spliced, every answer follows full context.",
    ),
    Verdict.NOT_SPLICED: (
        "bold red",
        "Not every edit was spliced; the reasons are above and in the journal.",
    ),
    Verdict.BROKEN: ("bold red", "The contract was broken: an answer of the splice arm left full context's."),
    Verdict.UNMEASURED: (
        "bold yellow",
        "Every edit was spliced. With random weights answers mean nothing, so whether\n"
        "they follow full context cannot be told: models/tiny_mla has a trained model.",
    ),
}


def _figures(name: str, served: Served, longest: int) -> Text:
    line = Text(f"  {name:{_ARM}} ")
    line.append_text(bar(served, longest))
    figures = (served.prompt, served.prefix, served.spliced, served.filled, served.prefilled)
    for value, width in zip(figures, _WIDTHS.values(), strict=True):
        line.append(f"{value or '·':>{width}}")
    return line.append(f"{served.milliseconds:>6.0f}")


def bar(served: Served, longest: int, width: int = _BAR) -> Text:
    """The parts of a prompt as cells; a part that is there has one at least."""
    text = Text()
    left = max(1, round(width * served.prompt / longest)) if longest else 0
    sizes = [getattr(served, name) for name, _, _ in PARTS]
    present = sum(1 for size in sizes if size)
    for (_, cell, style), size in zip(PARTS, sizes, strict=True):
        if not size:
            continue
        present -= 1
        # The ones to come keep a cell each.
        cells = left if not present else max(1, min(left - present, round(width * size / longest)))
        text.append(cell * cells, style)
        left -= cells
    return text.append(" " * max(0, width - len(text)))
