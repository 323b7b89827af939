"""A replay as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leyline_lmcache.replay.arms import Arm
from leyline_lmcache.replay.tally import Tally

_INK = "#333333"
_NAMES = {
    Arm.FULL: "no policy, SGLang",
    Arm.RADIX: "policy, SGLang",
    Arm.LMCACHE: "policy, SGLang + LMCache",
    Arm.LEYLINE: "policy, Leyline",
}
_COLOURS = {Arm.FULL: "#bbbbbb", Arm.RADIX: "#cc6677", Arm.LMCACHE: "#ddaa33", Arm.LEYLINE: "#2a9d78"}
_WIDTH = 0.2


def draw(tallies: Sequence[Tally], file: Path) -> None:
    """Write the picture: hit rate of each arm by set and concurrency, and below it what was prefilled.

    Raises:
        OSError: the file cannot be written.
        ValueError: for an ending that matplotlib does not know.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    places = list(dict.fromkeys((t.workload, t.concurrency) for t in tallies))
    figure = Figure(figsize=(max(8.0, 1.7 * len(places) + 1), 6.6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.6, 1))
    for arm in Arm:
        of = [(places.index((t.workload, t.concurrency)), t) for t in tallies if t.arm is arm]
        offset = (list(Arm).index(arm) - 1.5) * _WIDTH
        at = [place + offset for place, _ in of]
        rates = [100 * t.hit_rate for _, t in of]
        above.bar(at, rates, _WIDTH * 0.92, color=_COLOURS[arm], label=_NAMES[arm])
        for x, rate in zip(at, rates, strict=True):
            above.text(
                x, rate - 1, f"{rate:.1f}", rotation=90, ha="center", va="top", fontsize=8, color="white"
            )
        thousands = [t.prefilled / 1e3 for _, t in of]
        below.bar(at, thousands, _WIDTH * 0.92, color=_COLOURS[arm])
        if arm is Arm.LEYLINE:
            for number, (place, t) in enumerate(of):
                most = 100 * t.blocks / t.prompt if t.prompt else 0.0
                ends = (place - 2 * _WIDTH, place + 2 * _WIDTH)
                label = "ceiling" if number == 0 else None
                above.plot(ends, (most, most), color=_INK, linewidth=1.4, label=label)
    above.set_ylabel("cached / prompt tokens (%)")
    above.set_ylim(0, 112)
    above.legend(ncols=3, fontsize=8.5, frameon=False, loc="upper left")
    below.set_ylabel("tokens prefilled (thousands)")
    below.set_xticks(range(len(places)), [f"{name}\n{level} at a time" for name, level in places])
    for axes in (above, below):
        _tidy(axes)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)


def _tidy(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.yaxis.grid(True, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
