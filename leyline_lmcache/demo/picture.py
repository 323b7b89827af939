"""The demo as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leyline_lmcache.demo.results import Arm, Conversation, Totals, TurnResult
from leyline_lmcache.demo.scenario import Place

# Chosen to stay apart for readers who see red and green alike, and in print.
_PARTS = (
    ("prefix", "found as a prefix", "#4477aa"),
    ("spliced", "spliced", "#66ccaa"),
    ("filled", "filled in the middle", "#ddaa33"),
    ("prefilled", "prefilled at the end", "#cc6677"),
)
_PLACES = {Place.GPU: "GPU", Place.CPU: "CPU", Place.REDIS: "Redis"}
_INK, _PALE = "#333333", "#999999"
_ARM_COLOURS = {Arm.FULL: "#4477aa", Arm.REPREFILL: "#cc6677", Arm.SPLICE: "#2a9d78"}
_WIDTH, _GAP = 0.26, 0.03


def is_available() -> bool:
    """True when matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def draw(conversation: Conversation, file: Path) -> None:
    """Write the picture: tokens of each arm by turn, answers above them, and the time of each.

    Raises:
        OSError: the file cannot be written.
        ValueError: for an ending that matplotlib does not know.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    turns = conversation.turns
    figure = Figure(figsize=(max(9.0, 0.85 * len(turns) + 2), 7.4), layout="constrained")
    FigureCanvasAgg(figure)
    tokens, times = figure.subplots(2, 1, sharex=True, height_ratios=(2.3, 1))
    _draw_tokens(tokens, turns)
    _draw_times(times, turns)
    splice, again = conversation.total(Arm.SPLICE), conversation.total(Arm.REPREFILL)
    figure.suptitle(
        "An agent drops a stale tool output every turn: "
        f"splice computes {_computed(splice):,} tokens, re-prefill {_computed(again):,}",
        color=_INK,
        fontsize=13,
        fontweight="bold",
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def _computed(total: Totals) -> int:
    return total.filled + total.prefilled


def _offset(arm: Arm) -> float:
    return (list(Arm).index(arm) - 1) * (_WIDTH + _GAP)


def _draw_tokens(axes: Any, turns: Sequence[TurnResult]) -> None:
    highest = max((turn.arms[arm].final.prompt for turn in turns for arm in Arm), default=1)
    for arm in Arm:
        places = [turn.number + _offset(arm) for turn in turns]
        bottoms = [0] * len(turns)
        for name, label, colour in _PARTS:
            sizes = [getattr(turn.arms[arm].final, name) for turn in turns]
            named = label if arm is Arm.FULL else None
            axes.bar(places, sizes, _WIDTH, bottoms, color=colour, label=named, linewidth=0)
            bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
        for turn, place, top in zip(turns, places, bottoms, strict=True):
            _mark(axes, turn, arm, place, top, highest)
    axes.set_ylim(0, highest * 1.34)
    axes.set_ylabel("tokens of the edited prompt")
    axes.legend(loc="upper left", ncols=4, frameon=False, fontsize=10)
    axes.set_title(
        "bars of a turn: full, re-prefill, splice; above them the answer, and whether it is full context's",
        fontsize=10,
        color=_PALE,
        loc="left",
    )
    _tidy(axes)


def _mark(axes: Any, turn: TurnResult, arm: Arm, place: float, top: int, highest: int) -> None:
    answer = turn.arms[arm].final.answer
    shown = answer if len(answer) <= 12 else f"{answer[:11]}…"
    if arm is Arm.FULL:
        text, colour = shown, _INK
    elif turn.follows(arm):
        text, colour = f"{shown} ✓", "#1b7a5a"
    else:
        text, colour = f"{shown} ✗", "#a33c50"
    axes.text(
        place, top + highest * 0.015, text, rotation=90, ha="center", va="bottom", fontsize=8.5, color=colour
    )


def _draw_times(axes: Any, turns: Sequence[TurnResult]) -> None:
    numbers = [turn.number for turn in turns]
    for arm in Arm:
        axes.plot(
            numbers,
            [turn.arms[arm].final.milliseconds for turn in turns],
            marker="o",
            markersize=4.5,
            linewidth=1.6,
            color=_ARM_COLOURS[arm],
            label=arm.value,
        )
    slowest = max((turn.arms[arm].final.milliseconds for turn in turns for arm in Arm), default=1.0)
    axes.set_ylim(0, slowest * 1.3)
    axes.set_ylabel("time of the request (ms)")
    axes.set_xlabel("turn, and where the KV lay when its edit came")
    axes.set_xticks(numbers, [f"{turn.number}\n{_PLACES[turn.place]}" for turn in turns])
    axes.legend(loc="upper left", ncols=3, frameon=False, fontsize=10)
    _tidy(axes)


def _tidy(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_PALE)
    axes.tick_params(colors=_INK, labelsize=9.5)
    axes.yaxis.label.set_color(_INK)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.grid(True, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
