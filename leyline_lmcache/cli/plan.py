"""``leyline plan``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from leyline_lmcache.cli.edits import (
    BASE,
    parse_edit,
    read_envelope,
    read_tokens,
    read_view,
    view_json,
)
from leyline_lmcache.cli.errors import CliError, ExitCode
from leyline_lmcache.cli.output import print_json, stdout, table
from leyline_lmcache.cli.strip import Part, draw, legend, runs_after, runs_before
from leyline_lmcache.codec import op_to_map
from leyline_lmcache.directive import Directive, apply_directives, normalize
from leyline_lmcache.ops import (
    Copy,
    CopyRotate,
    Fill,
    Invalidate,
    Op,
    Plan,
    Rotate,
    Tier,
    blocks_touched,
    kind_of,
)
from leyline_lmcache.planner import compile_plan
from leyline_lmcache.reasons import Fallback
from leyline_lmcache.view import BufferId, View

_STRIP = 68
_COLUMNS = ("#", "op", "from", "to", "tokens", "shift", "blocks", "after")
_BASE_PANEL = "What is edited (one of)"
_EDIT_PANEL = "The edits"
_TIER_PANEL = "The tiers"


def run(
    length: Annotated[
        int | None, typer.Option(min=0, help="A base of so many tokens.", rich_help_panel=_BASE_PANEL)
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(help="A base whose token ids are in this file.", rich_help_panel=_BASE_PANEL),
    ] = None,
    view: Annotated[
        Path | None,
        typer.Option(
            help="A view that was edited before: what --json printed then.", rich_help_panel=_BASE_PANEL
        ),
    ] = None,
    edit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="START:END[:REPLACEMENT][:forget]",
            help="Replace tokens START to END by so many tokens (5), by these (7,8,9) or by those of a file "
            "(@FILE); by nothing if left out. Repeatable; all use the base's positions.",
            rich_help_panel=_EDIT_PANEL,
        ),
    ] = None,
    envelope: Annotated[
        Path | None,
        typer.Option(
            help="Directives as a request carries them; - reads stdin.", rich_help_panel=_EDIT_PANEL
        ),
    ] = None,
    append: Annotated[
        int, typer.Option(min=0, help="Tokens of a new turn after the edits.", rich_help_panel=_EDIT_PANEL)
    ] = 0,
    page_size: Annotated[
        int, typer.Option(min=1, help="Tokens of a GPU block.", rich_help_panel=_TIER_PANEL)
    ] = 1,
    chunk_size: Annotated[
        int, typer.Option(min=1, help="Tokens of a CPU or Redis block.", rich_help_panel=_TIER_PANEL)
    ] = 256,
    tier: Annotated[
        list[Tier] | None, typer.Option(help="Only this tier; repeatable.", rich_help_panel=_TIER_PANEL)
    ] = None,
    expand: Annotated[bool, typer.Option("--expand", help="Show the ops block by block.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plans and the new view as JSON.")
    ] = False,
) -> None:
    """Show what an edit makes each tier do: invalidate, copy, rotate, fill. No server is asked.

    What is planned is what the directives say. A server may fill more: it joins edits that keep fewer than
    `min_reuse` tokens between them, and computes the last token of a prompt itself.

    Example: `leyline plan --length 2000 --edit 300:500:5 --edit 700:720 --page-size 16`
    """
    old = _base(length, tokens, view)
    directives = _directives(edit or [], envelope, old)
    try:
        new = apply_directives(old, directives).extend(append)
    except Fallback as error:
        raise CliError(f"{error.reason.value}: {error.detail}", ExitCode.USAGE) from None
    sizes = {each: page_size if each is Tier.GPU else chunk_size for each in tier or Tier}
    plans = [compile_plan(old, new, size, each) for each, size in sizes.items()]
    if as_json:
        print_json(_json(old, new, directives, plans, expand))
        return
    out = stdout()
    for line in _summary(old, new, directives):
        out.print(line)
    names = _short_names(old)
    for plan in plans:
        out.print()
        out.print(_headline(plan))
        if plan.ops:
            ops = plan.blocks() if expand else iter(plan.ops)
            rows = table(_COLUMNS, (_row(op, plan.block_size, names) for op in ops))
            for column in (0, 4, 5, 6):
                rows.columns[column].justify = "right"
            out.print(rows)


def _base(length: int | None, tokens: Path | None, view: Path | None) -> View:
    given = [value is not None for value in (length, tokens, view)]
    if sum(given) != 1:
        raise CliError("expected one of --length, --tokens, --view", ExitCode.USAGE)
    if view is not None:
        return read_view(view)
    if tokens is not None:
        length = len(read_tokens(tokens, "--tokens"))
    assert length is not None
    return View.of_buffer(BASE, length)


def _directives(edits: Sequence[str], envelope: Path | None, old: View) -> tuple[Directive, ...]:
    if bool(edits) == (envelope is not None):
        raise CliError("expected edits: either --edit (repeatable) or --envelope", ExitCode.USAGE)
    given = (
        read_envelope(envelope)
        if envelope is not None
        else tuple(parse_edit(text, index) for index, text in enumerate(edits))
    )
    try:
        return normalize(given, old.length)
    except Fallback as error:
        raise CliError(f"{error.reason.value}: {error.detail}", ExitCode.USAGE) from None


# ---------------------------------------------------------------------------------------------- for people


def _summary(old: View, new: View, directives: Sequence[Directive]) -> Iterator[str | Text]:
    change = new.length - old.length
    yield f"[bold]{old.length:,} tokens become {new.length:,}[/bold] ({change:+,})"
    for directive in directives:
        what = _count(len(directive.replacement), "token") if directive.replacement else "nothing"
        yield (
            f"  [{directive.start:,}, {directive.end:,}) becomes {what}".replace("[", r"\[")
            + f"   {directive.mode.value}   shift {directive.shift:+,}"
        )
    before = runs_before(old, directives)
    after = runs_after(new, old.first_change(new))
    longest = max(old.length, new.length)
    yield ""
    yield Text("  before  ").append_text(draw(before, _STRIP, longest))
    yield Text("  after   ").append_text(draw(after, _STRIP, longest))
    gone = [run for run in before if run.part is Part.GONE]
    yield Text("          ").append_text(legend([*after, *gone]))


def _headline(plan: Plan) -> str:
    unit = "pages" if plan.tier is Tier.GPU else "chunks"
    facts = (
        f"share {_count(plan.shared_blocks, 'block')}",
        f"fill {plan.tokens_filled:,}",
        f"copy {plan.tokens_copied:,}",
        f"rotate {plan.tokens_rotated:,}",
        f"invalidate {_count(plan.blocks_invalidated, 'block')}",
    )
    when = (
        "\n  (copied and rotated when loaded to the GPU; nothing is moved here)" if plan.tier.deferred else ""
    )
    size = _count(plan.block_size, "token")
    return f"[bold]{plan.tier.value}[/bold], {unit} of {size}: {', '.join(facts)}{when}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _row(op: Op, size: int, names: dict[BufferId, str]) -> tuple[str, ...]:
    source = target = shift = ""
    tokens = 0
    match op:
        case Copy() | CopyRotate():
            start = op.src_block * size + op.src_offset
            source = f"{names[op.buffer]} {_span(start, start + op.length)}"
            target, tokens = _target(op, size)
        case Rotate():
            target, tokens = _target(op, size)
        case Fill():
            target, tokens = _span(op.start, op.end), op.length
        case Invalidate():
            owner = "old" if op.buffer is None else names[op.buffer]
            source = f"{owner} {_span(op.block * size, (op.block + op.count) * size)}"
    if isinstance(op, Rotate | CopyRotate):
        shift = f"{op.shift:+,}"
    after = _numbers(op.deps)
    return (
        str(op.id),
        kind_of(op).value.replace("_", "+"),
        source,
        target,
        f"{tokens:,}" if tokens else "",
        shift,
        f"{blocks_touched(op, size):,}",
        after,
    )


def _target(op: Copy | CopyRotate | Rotate, size: int) -> tuple[str, int]:
    start = op.dst_block * size + op.dst_offset
    return _span(start, start + op.length), op.length


def _span(start: int, end: int) -> str:
    return rf"\[{start:,}, {end:,})"


def _numbers(ids: Sequence[int]) -> str:
    """`0-3, 5` for 0, 1, 2, 3, 5."""
    runs: list[tuple[int, int]] = []
    for number in ids:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _short_names(view: View) -> dict[BufferId, str]:
    """Buffers under names that fit into a table."""
    return {buffer: buffer if len(buffer) <= 8 else buffer[:8] for buffer in view.buffers()}


# -------------------------------------------------------------------------------------------- for programs


def _json(
    old: View, new: View, directives: Sequence[Directive], plans: Sequence[Plan], expand: bool
) -> dict[str, Any]:
    return {
        "old_length": old.length,
        "new_length": new.length,
        "edits": [
            {
                "start": directive.start,
                "end": directive.end,
                "length": len(directive.replacement),
                "shift": directive.shift,
                "mode": directive.mode.value,
            }
            for directive in directives
        ],
        "tiers": {plan.tier.value: _plan_json(plan, expand) for plan in plans},
        # What the session sees once the engine has filled the holes: the next turn's --view.
        "view": view_json(new.filled(_fresh(old))),
    }


def _plan_json(plan: Plan, expand: bool) -> dict[str, Any]:
    return {
        "block_size": plan.block_size,
        "shared_blocks": plan.shared_blocks,
        "tokens_filled": plan.tokens_filled,
        "tokens_copied": plan.tokens_copied,
        "tokens_rotated": plan.tokens_rotated,
        "blocks_invalidated": plan.blocks_invalidated,
        "fills": [list(span) for span in plan.fills],
        "ops": [op_to_map(op) for op in (plan.blocks() if expand else plan.ops)],
    }


def _fresh(view: View) -> BufferId:
    """A name for what the engine computes next."""
    taken = view.buffers()
    return next(name for n in range(1, len(taken) + 2) if (name := f"turn-{n}") not in taken)
