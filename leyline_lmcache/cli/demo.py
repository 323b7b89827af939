"""``leyline demo``."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from leyline_lmcache.cli.errors import CliError, ExitCode
from leyline_lmcache.cli.ops import HEADER, describe
from leyline_lmcache.cli.output import stderr, stdout
from leyline_lmcache.cli.up import show_progress
from leyline_lmcache.demo import picture as pictures
from leyline_lmcache.demo import screen
from leyline_lmcache.demo.arms import choose_version, converse
from leyline_lmcache.demo.curl import commands
from leyline_lmcache.demo.dialect import Dialect
from leyline_lmcache.demo.results import Arm, Conversation, TurnResult, Verdict, condensed
from leyline_lmcache.demo.scenario import MOST_TURNS, Scenario
from leyline_lmcache.demo.servers import Running, choose_model, servers, spec_of
from leyline_lmcache.stack import StackSpec, models

_PICTURE = Path("leyline-demo.png")
_TERMINATED = 128 + signal.SIGTERM


def run(
    turns: Annotated[int, typer.Option(min=1, max=MOST_TURNS, help="Turns of the conversation.")] = 12,
    seed: Annotated[int, typer.Option(help="Another seed, another conversation.")] = 1,
    model: Annotated[
        str | None,
        typer.Option(help="tiny-mla (trained; the default if it is there), mla, gqa (random), or a folder."),
    ] = None,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens per SGLang page.")] = 1,
    picture: Annotated[
        Path | None, typer.Option(help=f"Write the picture here instead of to {_PICTURE}.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the servers running, and show how to talk to them.")
    ] = False,
    name: Annotated[str, typer.Option(help="With --keep: the stack's name, for leyline down.")] = "demo",
) -> int:
    """Watch an agent edit its own history, served by the real stack in three arms.

    Redis, lmcache server and SGLang start here, on CPU if there is no GPU. The arms are full (nothing is
    dropped), re-prefill (edited, no directives) and splice (edited, with directives).
    The status is 0 only if every edit was spliced and every answer of the splice arm is that of full context;
    else 3.

    Example: `leyline demo --turns 12 --json figures.json --keep`
    """
    target = _picture_file(picture)
    spec = spec_of(model or choose_model(), page_size)
    dialect = Dialect.of_model(models.resolve(spec.model))
    out = stdout()
    with (
        _interruptible(),
        stderr().status(f"starting {', '.join(spec.roles)}") as status,
        servers(spec, show_progress(status.update), name if keep else None) as running,
    ):
        status.stop()
        conversation = _hold(out, running, spec, dialect, turns, seed)
        if not keep:
            status.update("stopping the servers")
            status.start()
    for line in screen.verdict_lines(conversation):
        out.print(line)
    if json_file is not None:
        json_file.write_text(json.dumps(conversation.to_json(), indent=2) + "\n")
        out.print(f"figures: {json_file}")
    if target is not None:
        pictures.draw(conversation, target)
        out.print(f"picture: {target}")
    if keep:
        _show_commands(out, running, dialect, name)
    return ExitCode.OK if conversation.verdict is Verdict.HELD else ExitCode.NOT_SO


def _hold(
    out: Console, running: Running, spec: StackSpec, dialect: Dialect, turns: int, seed: int
) -> Conversation:
    """Hold the conversation and show it as it goes."""
    out.print()
    for sentence in screen.EXPLANATION:
        out.print(sentence)
    out.print(screen.legend())
    done: list[TurnResult] = []
    # The prompts grow by about this much in a turn; the bars of all turns have one scale.
    longest = 0
    out.print(screen.column_heads())
    with running.client(spec.model) as client:
        version, scenario = choose_version(client, dialect, turns, seed)
        displace = partial(running.displace, client) if running.has_tiers else None
        for turn in converse(client, dialect, scenario, displace):
            longest = longest or _expected_length(turn, scenario)
            done.append(turn)
            for line in screen.turn_lines(turn, longest):
                out.print(line)
    ops = running.ops_of(done[-1].arms[Arm.SPLICE].final.lineage)
    conversation = Conversation(spec.model, dialect.trained, seed, version, done, ops)
    for line in screen.total_lines(conversation):
        out.print(line)
    out.print("\n[bold]what the last edit made the tiers do[/bold] (leyline ops shows the journal)")
    out.print(HEADER, style="dim")
    for record in condensed(ops):
        out.print(describe(record), markup=False)
    out.print()
    return conversation


def _expected_length(first: TurnResult, scenario: Scenario) -> int:
    """Tokens of the last turn's full prompt, as far as the first turn tells."""
    prompt = first.arms[Arm.FULL].final.prompt
    return round(prompt * len(scenario.rounds) / (scenario.before + 1))


def _picture_file(wanted: Path | None) -> Path | None:
    """Where the picture goes; None when nobody asked for one and it cannot be drawn."""
    if pictures.is_available():
        return wanted or _PICTURE
    if wanted is not None:
        raise CliError("--picture: needs matplotlib: pip install 'leyline-lmcache[plot]'", ExitCode.USAGE)
    stderr().print("no picture: matplotlib is not installed (pip install 'leyline-lmcache\\[plot]')")
    return None


def _show_commands(out: Console, running: Running, dialect: Dialect, name: str) -> None:
    out.print(f"\n[bold]The servers run on[/bold] at {running.url}. Try:")
    for what, command in commands(running.url, dialect):
        out.print(f"\n# {what}", markup=False)
        out.print(command, markup=False)
    out.print("\n# What the tiers did:")
    out.print(f"leyline ops --stack {name}")
    out.print("\n# Stop them:")
    out.print(f"leyline down --name {name}")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let the first Ctrl-C or TERM stop the servers in order, and no second one disturb that."""
    main = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, frame: FrameType | None) -> None:
        for each in main:
            signal.signal(each, signal.SIG_IGN)
        stderr().print("\nstopping the servers")
        if number == signal.SIGTERM:
            raise SystemExit(_TERMINATED)
        raise KeyboardInterrupt

    for number in main:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in main.items():
            signal.signal(number, handler)
