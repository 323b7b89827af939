"""The contract of AMORTIZE on a trained model, on the real server: a splice answers like full context.

Every case is asked in two forms (the question after the edit; cached before it) and three arms (full context,
re-prefill of the edited text, splice). See _contract.py for what the cases are and why the second form is
there.

    python benchmarks/contract.py                    the plan below
    python benchmarks/contract.py --full             every dtype, page size and endpoint, all cases
    python benchmarks/contract.py --dtype bfloat16 --page-size 16 --endpoint chat --cases 40

Plan: all cases on ``/generate`` for each dtype and page size; on the other endpoints, and with all arms in
one cache, a fourth of them, spread over all kinds; and, as a control, all of them on a server that does not
turn the keys it moves (a plugin in control/ sees to that): the contract has to break there, or the benchmark
would notice nothing. Then all of them with the base's KV in LMCache's L1, in Redis, and on another node
(``--tiers``: only those, into ``contract_tiers.json``), in chunks of four tokens; ``from_source`` counts the
cases whose kept KV came from there. A base's last tokens that fill no chunk are not stored, and a fact in
them is lost.

``cached`` is the part of the prompt's tokens that SGLang found in its cache; ``filled`` the part among them
that the plugin had it prefill, just before, for the replacements. Arms that do not share a cache find
nothing there but their own base; what an ordinary prefix cache keeps of an edited prompt shows in the
one-cache setting.

With ``page_size`` above 1 whole pages are prefilled for a replacement, and only whole pages are found
again, so tokens beside an edit are computed again from the edited text. A fact that stands wholly in such
tokens is lost, as it should be; ``fact_kept`` counts the cases whose fact was kept, in which the contract
binds. Short prompts that keep no whole page fall back (``below_min_reuse``).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _common import Figure, finish, print_table
from _contract import MIN_REUSE, Arm, Case, Endpoint, Form, Outcome, Source, load_cases, run_cases
from _nodes import free_port, shared

from leyline_lmcache.stack import Stack, StackSpec
from leyline_lmcache.stack.device import CPU_SHIM, detect

DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
PAGE_SIZES = (1, 16, 64)
UNROTATED = "unrotated"
CONTROL = Path(__file__).resolve().parent / "control"
FEWER = 40
"""Cases asked where not all are."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the plan: what is asked of one server.

    Attributes:
        cases: how many; all of them are the default.
        isolated: as in `run_cases`.
        control: what the plugin in control/ spoils; a run in which the contract has to break.
        source: where the base's KV lies when the edit comes.
    """

    dtype: str
    page_size: int
    endpoint: Endpoint
    cases: int | None = None
    isolated: bool = True
    control: str | None = None
    source: Source = Source.GPU

    @property
    def name(self) -> str:
        """As in the summary's keys."""
        together = "" if self.isolated else "_one_cache"
        if self.source is not Source.GPU:
            together += f"_from_{self.source}"
        control = f"{self.control}_" if self.control else ""
        return f"{control}{DTYPES[self.dtype]}_page{self.page_size}_{self.endpoint}{together}"

    @property
    def server(self) -> tuple[str, int, str | None, bool, bool]:
        """Settings of a server are asked together: dtype, page size, control, tiers behind the GPU, and a
        second node."""
        stored = self.source is not Source.GPU
        return self.dtype, self.page_size, self.control, stored, self.source is Source.OTHER_NODE


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts over the cases of one setting and form; ``bound``: spliced, with the fact in kept KV."""

    setting: Setting
    form: Form
    cases: int
    spliced: int
    fact_kept: int
    splice_equals_full: int
    splice_equals_full_bound: int
    reprefill_equals_full: int
    splice_equals_expected: int
    full_equals_expected: int
    from_source: int
    cached_splice: float
    cached_reprefill: float
    filled_splice: float | None
    fallbacks: dict[str, int]

    @classmethod
    def of(cls, setting: Setting, form: Form, outcomes: Sequence[Outcome]) -> Tally:
        """Count."""
        bound = [each for each in outcomes if each.is_spliced and each.fact_kept]
        reasons = Counter(each.reason or each.outcome for each in outcomes if not each.is_spliced)
        return cls(
            setting,
            form,
            cases=len(outcomes),
            spliced=sum(each.is_spliced for each in outcomes),
            fact_kept=len(bound),
            splice_equals_full=sum(each.same(Arm.SPLICE) for each in outcomes),
            splice_equals_full_bound=sum(each.same(Arm.SPLICE) for each in bound),
            reprefill_equals_full=sum(each.same(Arm.REPREFILL) for each in outcomes),
            splice_equals_expected=sum(each.is_right for each in outcomes),
            full_equals_expected=sum(each.replies[Arm.FULL].answer == each.expected for each in outcomes),
            from_source=sum(each.is_from_source for each in outcomes),
            cached_splice=_cached(outcomes, Arm.SPLICE),
            cached_reprefill=_cached(outcomes, Arm.REPREFILL),
            filled_splice=_filled(outcomes),
            fallbacks=dict(reasons),
        )

    @property
    def holds(self) -> bool:
        """The contract: wherever it binds the splice follows full context, and a re-prefill never does.

        With pages of one token it binds everywhere, except that a base's last tokens are not stored when
        they fill no chunk. What was to come from a tier has to come from there. A control has to break it,
        where the question was cached before the edit.
        """
        if self.setting.control:
            return self.form is Form.AFTER or self.splice_equals_full < self.cases // 2
        if self.setting.source is Source.GPU:
            everywhere = self.setting.page_size > 1 or self.fact_kept == self.cases
        else:
            everywhere = self.from_source == self.spliced == self.cases
        follows = self.splice_equals_full_bound == self.fact_kept
        return everywhere and follows and not self.reprefill_equals_full


def _cached(outcomes: Sequence[Outcome], arm: Arm) -> float:
    replies = [each.replies[arm] for each in outcomes]
    return sum(each.cached_tokens for each in replies) / sum(each.prompt_tokens for each in replies)


def _filled(outcomes: Sequence[Outcome]) -> float | None:
    replies = [each.replies[Arm.SPLICE] for each in outcomes]
    if any(each.report is None for each in replies):
        return None
    return sum((each.report or {})["filled"] for each in replies) / sum(
        each.prompt_tokens for each in replies
    )


def default_plan() -> list[Setting]:
    """All cases where it matters most, fewer where only the way in or the rounding differs."""
    plan = [Setting(dtype, page_size, Endpoint.GENERATE) for dtype in DTYPES for page_size in PAGE_SIZES]
    others = [endpoint for endpoint in Endpoint if endpoint is not Endpoint.GENERATE]
    plan += [Setting("float32", 1, endpoint, FEWER) for endpoint in others]
    plan += [Setting("bfloat16", 16, endpoint, FEWER) for endpoint in (Endpoint.COMPLETIONS, Endpoint.CHAT)]
    plan.append(Setting("float32", 1, Endpoint.GENERATE, FEWER, isolated=False))
    plan.append(Setting("float32", 1, Endpoint.GENERATE, control=UNROTATED))
    plan += from_tiers()
    return plan


def from_tiers(cases: int | None = None) -> list[Setting]:
    """All cases once more, their KV in each tier behind the GPU."""
    behind = [source for source in Source if source is not Source.GPU]
    return [Setting("float32", 1, Endpoint.GENERATE, cases, source=source) for source in behind]


def chosen_plan(options: argparse.Namespace) -> list[Setting]:
    """The product of what the options name, or of everything."""
    return [
        Setting(
            dtype,
            page_size,
            Endpoint(endpoint),
            options.cases,
            control=UNROTATED if options.control else None,
        )
        for dtype in options.dtype or (DTYPES if options.full else ("float32",))
        for page_size in options.page_size or (PAGE_SIZES if options.full else (1,))
        for endpoint in options.endpoint or (list(Endpoint) if options.full else (Endpoint.GENERATE,))
    ]


def measure(plan: Sequence[Setting], options: argparse.Namespace) -> list[tuple[Tally, list[Outcome]]]:
    """Start one server per dtype and page size and ask it all that the plan has for it."""
    found = []
    for server in dict.fromkeys(each.server for each in plan):
        dtype, page_size, control, stored, two = server
        spec = StackSpec(
            model="tiny-mla",
            dtype=dtype,
            page_size=page_size,
            max_total_tokens=65_536,
            threads=options.threads,
            lmcache=not options.no_lmcache,
            leyline={"min_reuse": MIN_REUSE},
            env=_spoiled(control) if control else {},
        )
        with ExitStack() as running:
            other: Stack | None = None
            if stored:
                port = free_port()
                url = f"redis://127.0.0.1:{port}"
                # The prompts are short; with LMCache's usual chunks they would not be stored at all.
                spec = replace(
                    spec,
                    chunk_size=4,
                    # All bases and all arms, so that nothing leaves L1 by itself.
                    l1_size_gb=4.0,
                    server_module=True,
                    l2="leyline",
                    server_options=shared(url),
                )
                stack = running.enter_context(Stack(replace(spec, redis_port=port)))
                if two:
                    other = running.enter_context(Stack(replace(spec, redis_url=url)))
            else:
                stack = running.enter_context(Stack(spec))
            for setting in plan:
                if setting.server != server:
                    continue
                cases = load_cases(setting.cases)
                outcomes = run_cases(
                    stack,
                    cases,
                    list(Form),
                    setting.endpoint,
                    isolated=setting.isolated,
                    workers=options.workers,
                    run=setting.name,
                    source=setting.source,
                    other=other,
                )
                for form in Form:
                    part = [each for each in outcomes if each.form is form]
                    found.append((Tally.of(setting, form, part), part))
                print(f"{setting.name}: {len(outcomes)} comparisons", file=sys.stderr, flush=True)
    return found


def _spoiled(control: str) -> dict[str, str]:
    """Environment of a server whose rotation is spoilt."""
    path, plugins = [str(CONTROL)], ["leyline", "leyline_control"]
    if detect() == "cpu":
        path, plugins = [str(CPU_SHIM), *path], [*plugins, "leyline_cpu"]
    path += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "SGLANG_PLUGINS": ",".join(plugins),
        "LEYLINE_CONTROL": control,
    }


def summary(tallies: Sequence[Tally], cases: Sequence[Case]) -> dict[str, Figure]:
    """Flat figures. Counts are of cases; the first three are those of the worst setting that asked all
    cases with pages of one token, in the worst form.
    """
    product = [each for each in tallies if not each.setting.control]
    controls = [each for each in tallies if each.setting.control]
    behind = [each for each in product if each.setting.source is not Source.GPU]
    whole = [
        each
        for each in product
        if each.setting.page_size == 1 and each.cases == len(cases) and each.setting.source is Source.GPU
    ]
    figures: dict[str, Figure] = {
        "cases": len(cases) if whole else max(each.cases for each in tallies),
        "splice_equals_full": min((each.splice_equals_full for each in whole or product), default=None),
        "reprefill_equals_full": max((each.reprefill_equals_full for each in whole or product), default=None),
        "splice_equals_full_from_tiers": sum(each.splice_equals_full_bound for each in behind) or None,
        "fact_kept_from_tiers": sum(each.fact_kept for each in behind) or None,
        "comparisons": sum(each.cases for each in product),
        # Nothing asked, nothing shown: a control alone says nothing about the product.
        "contract_holds": all(each.holds for each in product) if product else None,
        "control_breaks": all(each.holds for each in controls) if controls else None,
    }
    for each in tallies:
        key = f"{each.setting.name}_{each.form}"
        figures |= {
            f"{key}_cases": each.cases,
            f"{key}_spliced": each.spliced,
            f"{key}_fact_kept": each.fact_kept,
            f"{key}_splice_equals_full": each.splice_equals_full,
            f"{key}_splice_equals_full_where_fact_kept": each.splice_equals_full_bound,
            f"{key}_reprefill_equals_full": each.reprefill_equals_full,
            f"{key}_splice_equals_expected": each.splice_equals_expected,
            f"{key}_full_equals_expected": each.full_equals_expected,
            f"{key}_from_source": each.from_source,
            f"{key}_cached_splice": round(each.cached_splice, 4),
            f"{key}_cached_reprefill": round(each.cached_reprefill, 4),
            f"{key}_filled_splice": None if each.filled_splice is None else round(each.filled_splice, 4),
        }
        figures |= {f"{key}_fallback_{reason}": count for reason, count in each.fallbacks.items()}
    return figures


def details(found: Sequence[tuple[Tally, Sequence[Outcome]]], options: argparse.Namespace) -> dict[str, Any]:
    """How it was measured, and every comparison in which the splice did not answer like full context."""
    return {
        "model": "tiny-mla",
        "min_reuse": MIN_REUSE,
        "lmcache": not options.no_lmcache,
        "differing": [
            {
                "setting": tally.setting.name,
                "form": each.form,
                "case": each.case,
                "outcome": each.outcome,
                "reason": each.reason,
                "fact_kept": each.fact_kept,
                "answers": {arm: reply.answer for arm, reply in each.replies.items()},
                "expected": each.expected,
            }
            for tally, outcomes in found
            for each in outcomes
            if not each.same(Arm.SPLICE) and not tally.setting.control
        ],
    }


def show(tallies: Sequence[Tally]) -> None:
    """The table."""
    columns = ("setting", "form", "cases", "spliced", "fact kept", "splice = full", "where kept")
    columns += ("re-prefill = full", "splice right", "from source", "cached", "filled", "re-prefill cached")
    columns += ("fallbacks",)
    print_table(
        "contract",
        columns,
        [
            (
                each.setting.name,
                each.form.removeprefix("question_"),
                each.cases,
                each.spliced,
                each.fact_kept,
                each.splice_equals_full,
                each.splice_equals_full_bound,
                each.reprefill_equals_full,
                each.splice_equals_expected,
                each.from_source,
                f"{each.cached_splice:.1%}",
                "" if each.filled_splice is None else f"{each.filled_splice:.1%}",
                f"{each.cached_reprefill:.1%}",
                ", ".join(f"{reason} {count}" for reason, count in each.fallbacks.items()),
            )
            for each in tallies
        ],
    )


def main() -> int:
    """The status is 1 if the contract was broken anywhere, or held in the control."""
    options = arguments()
    selected = (
        options.full
        or options.dtype
        or options.page_size
        or options.endpoint
        or options.cases
        or options.control
    )
    plan = chosen_plan(options) if selected else default_plan()
    if options.tiers:
        plan = from_tiers(options.cases)
    found = measure(plan, options)
    tallies = [tally for tally, _ in found]
    show(tallies)
    figures = summary(tallies, load_cases())
    # Either part may be measured again without the other.
    finish("contract_tiers" if options.tiers else "contract", figures, details(found, options))
    return 1 if False in (figures["contract_holds"], figures["control_breaks"]) else 0


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", action="append", choices=list(DTYPES), help="may be repeated")
    parser.add_argument("--page-size", action="append", type=int, choices=PAGE_SIZES, help="may be repeated")
    parser.add_argument("--endpoint", action="append", choices=list(Endpoint), help="may be repeated")
    parser.add_argument("--cases", type=at_least_one, metavar="N", help="ask only N, spread over all kinds")
    parser.add_argument("--full", action="store_true", help="all dtypes, page sizes and endpoints")
    parser.add_argument("--control", action="store_true", help="on servers that do not turn keys")
    parser.add_argument("--tiers", action="store_true", help="only from the tiers behind the GPU")
    parser.add_argument("--no-lmcache", action="store_true", help="SGLang alone, without lmcache and Redis")
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of SGLang (1)")
    parser.add_argument("--workers", type=int, default=8, help="requests in flight (8)")
    return parser.parse_args()


def at_least_one(text: str) -> int:
    """A count; of no case at all nothing can be said."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
