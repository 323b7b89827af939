"""What an edited request costs, next to a prefix hit (the least possible) and to prefilling the edited text.

Five arms, with the same number of new tokens behind the context and the same length of answer:

* ``hit``: the unedited context, all of it in the cache;
* ``edited``: tokens [300, 500) replaced by five others; the replacement is filled, the rest spliced by copy;
* ``in_place``: the same on a server that takes the old slots over (``inplace: always``);
* ``empty``: [300, 500) removed: no fill;
* ``reprefill``: the edited text without directives; its first 300 tokens are cached, as by any prefix cache.

All arms of a round run in one shuffled sequence on the same fresh context, in place on its own server beside
it, so that whatever else the machine does falls on all alike; ratios are of medians over the rounds. Times
are a client's: request sent to answer read. Every edited request is checked to have been spliced just then,
and whole.

    python benchmarks/edit_latency.py [--models mla,gqa] [--tokens 2048,8192] [--repeat 5] [--lmcache]

``edited_over_hit_8k`` and its like are of the first model and of a whole request with an answer of 16 tokens;
``…_first_token`` of one that ends with its first token; other models have their name at the end. A fill is
one more pass through the model, however short; a hit takes one for its first token and one for each further.
So an edited request comes the nearer to a hit the longer the answer, and its first token stays behind.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from _common import Figure, finish, print_table

from leyline_lmcache.journal import JournalReader, OpRecord
from leyline_lmcache.ops import OpKind
from leyline_lmcache.stack import Stack, StackSpec
from leyline_lmcache.stack.client import Client, Generation

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "edit_latency.png"
SPAN = (300, 500)
REPLACEMENT = 5
TAIL = 16
ANSWERS: Mapping[int, str] = {16: "", 1: "_first_token"}
"""Tokens of the answer, and how figures of it are named."""
_SETTLE_S = 0.05


class Arm(StrEnum):
    """One way to serve a prompt; see the module's text."""

    HIT = "hit"
    EDITED = "edited"
    IN_PLACE = "in_place"
    EMPTY = "empty"
    REPREFILL = "reprefill"


EDITS = (Arm.EDITED, Arm.IN_PLACE, Arm.EMPTY)


@dataclass(slots=True)
class Sample:
    """One timed request; the microseconds are the journal's."""

    seconds: float
    request: str
    moved: int = 0
    splice_us: int = 0
    fill_us: int = 0
    extra: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is compared: a model, tokens of context, tokens of answer."""

    model: str
    tokens: int
    answer: int


Samples = dict[Setting, dict[Arm, list[Sample]]]


class Context:
    """A fresh context of random tokens, in the cache of one server."""

    def __init__(self, client: Client, tokens: int, dice: random.Random) -> None:
        self._client = client
        self._dice = dice
        self.ids = dice.choices(range(3, 256), k=tokens)
        base = client.generate(self.ids, max_new_tokens=1)
        self.base = base.id
        self._replacement = dice.choices(range(3, 256), k=REPLACEMENT)
        # A replacement that began like the span would be a shorter edit.
        self._replacement[0] = (self.ids[SPAN[0]] + 1) % 256

    def time(self, arm: Arm, answer: int) -> Sample:
        """One request of an arm; raises if it was served in any other way than the arm says."""
        start, end = SPAN
        replacement = [] if arm is Arm.EMPTY else self._replacement
        edited = self.ids[:start] + replacement + self.ids[end:]
        prompt = (self.ids if arm is Arm.HIT else edited) + self._dice.choices(range(3, 256), k=TAIL)
        hints = envelope(self.base, start, end, replacement) if arm in EDITS else None
        body = self._client.request(
            prompt, max_new_tokens=answer, sampling={"ignore_eos": True}, kv_hints=hints
        )
        content = json.dumps(body).encode()
        self._client.wait_idle()
        time.sleep(_SETTLE_S)
        began = time.perf_counter()
        response = self._client.http.post(
            "/generate", content=content, headers={"Content-Type": "application/json"}
        )
        seconds = time.perf_counter() - began
        response.raise_for_status()
        reply = Generation.of(response.json())
        self._check(arm, reply, len(prompt), answer)
        report = reply.meta.get("leyline") or {}
        return Sample(seconds, reply.id, moved=report.get("moved", 0))

    def _check(self, arm: Arm, reply: Generation, length: int, answer: int) -> None:
        report = dict(reply.meta.get("leyline") or {})
        cached = SPAN[0] if arm is Arm.REPREFILL else length - TAIL
        want: dict[str, Any] = {}
        if arm in EDITS:
            filled = 0 if arm is Arm.EMPTY else REPLACEMENT
            kept = len(self.ids) - SPAN[1]
            want = {"outcome": "spliced", "prefix": SPAN[0], "spliced": kept, "moved": kept, "filled": filled}
            want["in_place"] = arm is Arm.IN_PLACE
        got = {key: report.get(key) for key in want}
        if got != want or reply.cached_tokens != cached or len(reply.output_ids) != answer:
            raise RuntimeError(
                f"{arm}: expected {cached} cached tokens, {answer} new ones and {want}, "
                f"got {reply.cached_tokens}, {len(reply.output_ids)} and {report}"
            )


def envelope(base: str, start: int, end: int, replacement: Sequence[int]) -> dict[str, Any]:
    """One directive (DESIGN §5)."""
    payload = {"base": base, "start": start, "end": end, "replacement_ids": list(replacement)}
    action = {"action_id": "a", "action_type": "kv.splice", "action_version": "1", "payload": payload}
    return {"protocol_version": "1", "message_id": "edit-latency", "actions": [action]}


def measure_model(model: str, options: argparse.Namespace) -> Samples:
    """All rounds of one model, on two servers that differ in nothing but ``inplace``."""
    largest = max(options.tokens)
    common: dict[str, Any] = {
        "model": model,
        "dtype": options.dtype,
        "context_length": 2 * largest,
        "max_total_tokens": 6 * largest,
        "threads": options.threads,
        "lmcache": options.lmcache,
    }
    samples: Samples = {}
    dice = random.Random(0)
    with ExitStack() as running:
        copying = running.enter_context(Stack(StackSpec(**common, leyline={"inplace": "never"})))
        placing = running.enter_context(Stack(StackSpec(**common, leyline={"inplace": "always"})))
        here = running.enter_context(copying.client())
        there = running.enter_context(placing.client())
        # Round -1 warms up and is thrown away.
        for turn, tokens, answer in itertools.product(range(-1, options.repeat), options.tokens, ANSWERS):
            round_ = measure_round(here, there, tokens, answer, dice)
            if turn < 0:
                continue
            collected = samples.setdefault(Setting(model, tokens, answer), {arm: [] for arm in Arm})
            for arm, sample in round_.items():
                collected[arm].append(sample)
            print(f"{model}: round {turn + 1}, {tokens} tokens", end="\r", file=sys.stderr, flush=True)
        time.sleep(0.5)  # the journal is written beside the requests
        for stack in (copying, placing):
            add_journal(samples, JournalReader(stack.journal_dir).list())
    print(file=sys.stderr)
    return samples


def measure_round(
    here: Client, there: Client, tokens: int, answer: int, dice: random.Random
) -> dict[Arm, Sample]:
    """Every arm once, in random order."""
    for client in (here, there):
        client.wait_idle()
        if not client.flush_cache():
            raise RuntimeError("the cache could not be emptied")
    shared, own = Context(here, tokens, dice), Context(there, tokens, dice)
    arms = dice.sample(list(Arm), k=len(Arm))
    return {arm: (own if arm is Arm.IN_PLACE else shared).time(arm, answer) for arm in arms}


def add_journal(samples: Samples, records: Sequence[OpRecord]) -> None:
    """Add what the journal says of the timed requests."""
    by_request: dict[str, Sample] = {
        each.request: each for arms in samples.values() for group in arms.values() for each in group
    }
    for record in records:
        sample = by_request.get(record.request)
        if sample is not None and record.op not in (OpKind.FILL, OpKind.INVALIDATE, None):
            sample.splice_us += record.micros


# ------------------------------------------------------------------------------------------------ figures


def median_ms(group: Sequence[Sample]) -> float:
    """Milliseconds."""
    return statistics.median(each.seconds for each in group) * 1e3


def summary(samples: Samples) -> dict[str, Figure]:
    """Flat figures; see the module's text for their names."""
    figures: dict[str, Figure] = {}
    first = next(iter(samples)).model
    for setting, arms in samples.items():
        size = f"{round(setting.tokens / 1024)}k"
        end = ANSWERS[setting.answer] + ("" if setting.model == first else f"_{setting.model}")
        ms = {arm: median_ms(group) for arm, group in arms.items()}
        figures |= {
            f"edited_over_hit_{size}{end}": round(ms[Arm.EDITED] / ms[Arm.HIT], 3),
            f"edited_over_reprefill_{size}{end}": round(ms[Arm.EDITED] / ms[Arm.REPREFILL], 4),
            f"in_place_over_hit_{size}{end}": round(ms[Arm.IN_PLACE] / ms[Arm.HIT], 3),
            f"empty_over_hit_{size}{end}": round(ms[Arm.EMPTY] / ms[Arm.HIT], 3),
        }
        figures |= {f"{arm}_ms_{size}{end}": round(value, 2) for arm, value in ms.items()}
        figures |= {
            f"{arm}_splice_ms_{size}{end}": round(
                statistics.median(each.splice_us for each in arms[arm]) / 1e3, 2
            )
            for arm in EDITS
        }
        figures[f"tokens_moved_{size}{end}"] = arms[Arm.EDITED][0].moved
    return figures


def show(samples: Samples) -> None:
    """The table."""
    rows = []
    for setting, arms in samples.items():
        ms = {arm: median_ms(group) for arm, group in arms.items()}
        for arm, value in ms.items():
            spliced = statistics.median(each.splice_us for each in arms[arm]) / 1e3
            rows.append(
                (
                    setting.model,
                    setting.tokens,
                    setting.answer,
                    arm,
                    f"{value:.1f}",
                    f"{value / ms[Arm.HIT]:.2f}",
                    f"{value / ms[Arm.REPREFILL]:.3f}",
                    arms[arm][0].moved or "",
                    f"{spliced:.1f}" if arm in EDITS else "",
                )
            )
    columns = ("model", "context", "new", "arm", "ms", "over hit", "over re-prefill", "moved", "splice ms")
    print_table("edit_latency", columns, rows)


def draw(samples: Samples, path: Path) -> None:
    """Milliseconds to the first token over the context's length, one panel per model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullLocator

    looks: Mapping[Arm, tuple[str, str, str]] = {
        Arm.REPREFILL: ("edited, re-prefilled", "#c0392b", "o-"),
        Arm.EDITED: ("edited, spliced by copy", "#1f6fb2", "s-"),
        Arm.IN_PLACE: ("edited, spliced in place", "#5dade2", "^-"),
        Arm.EMPTY: ("span removed, spliced", "#7d3c98", "v-"),
        Arm.HIT: ("not edited, prefix hit", "#27ae60", "D--"),
    }
    models = list(dict.fromkeys(setting.model for setting in samples))
    figure, panels = pyplot.subplots(
        len(ANSWERS), len(models), figsize=(5 * len(models), 7.2), sharex=True, sharey=True, squeeze=False
    )
    for (row, answer), (column, model) in itertools.product(enumerate(ANSWERS), enumerate(models)):
        panel = panels[row][column]
        settings = sorted(
            (each for each in samples if (each.model, each.answer) == (model, answer)),
            key=lambda each: each.tokens,
        )
        sizes = [each.tokens for each in settings]
        for arm, (label, color, style) in looks.items():
            heights = [median_ms(samples[each][arm]) for each in settings]
            panel.plot(sizes, heights, style, color=color, label=label, markersize=5, linewidth=1.6)
        panel.set_title(f"{model}: " + ("first token" if answer == 1 else f"answer of {answer} tokens"))
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.grid(True, which="both", alpha=0.25)
        if row == len(ANSWERS) - 1:
            panel.set_xlabel("tokens of context")
        if column == 0:
            panel.set_ylabel("milliseconds")
    panels[0][0].legend(loc="upper left", fontsize=8, framealpha=0.9)
    figure.suptitle(
        "Replacing 200 tokens of a cached context by 5 (SGLang on CPU, tiny random models)", fontsize=11
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    """Measure, print, write and draw."""
    options = arguments()
    samples: Samples = {}
    for model in options.models:
        samples |= measure_model(model, options)
    show(samples)
    if not options.no_picture:
        draw(samples, PICTURE)
    finish("edit_latency", summary(samples), details(samples, options))


def details(samples: Samples, options: argparse.Namespace) -> dict[str, Any]:
    """How it was measured, and every sample."""
    return {
        "models": options.models,
        "dtype": options.dtype,
        "device": "cpu",
        "threads": options.threads,
        "lmcache": options.lmcache,
        "span": list(SPAN),
        "replacement_tokens": REPLACEMENT,
        "new_tokens": TAIL,
        "rounds": options.repeat,
        "samples": [
            {
                "model": setting.model,
                "tokens": setting.tokens,
                "answer_tokens": setting.answer,
                "arm": arm,
                "ms": [round(each.seconds * 1e3, 2) for each in group],
                "splice_us": [each.splice_us for each in group],
            }
            for setting, arms in samples.items()
            for arm, group in arms.items()
        ],
    }


def arguments() -> argparse.Namespace:
    """Of the command line."""

    def names(text: str) -> list[str]:
        return text.split(",")

    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", type=names, default=["mla", "gqa"], metavar="A,B")
    parser.add_argument("--tokens", type=sizes, default=[2048, 4096, 8192], metavar="N,M", help="of context")
    parser.add_argument("--repeat", type=int, default=5, help="rounds (5)")
    parser.add_argument("--dtype", default="float32", help="of weights and KV (float32)")
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of SGLang (1)")
    parser.add_argument("--lmcache", action="store_true", help="with lmcache server and Redis behind SGLang")
    parser.add_argument("--no-picture", action="store_true", help="leave docs/images alone")
    return parser.parse_args()


if __name__ == "__main__":
    main()
