"""``leyline bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leyline_lmcache.cli.errors import CliError, ExitCode
from leyline_lmcache.cli.output import print_json, stderr, stdout, table
from leyline_lmcache.policies.base import PolicyError
from leyline_lmcache.policies.config import build
from leyline_lmcache.policies.conversations import ConversationError
from leyline_lmcache.policies.document import ConfigError, Document
from leyline_lmcache.replay import screen
from leyline_lmcache.replay.arms import MODEL, POOL, Arm, Servers
from leyline_lmcache.replay.compare import CONCURRENCY, compare
from leyline_lmcache.replay.load import POLICY, Limits, load, sample
from leyline_lmcache.replay.tally import summary
from leyline_lmcache.replay.tokens import TokenizerError, byte_tokenizer, file_tokenizer

_HELP = """Measure on real servers, started for it.

Example: `leyline bench replay --conversations 2 --concurrency 1`
"""

app = typer.Typer(no_args_is_help=True, help=_HELP)


@app.callback()
def _root() -> None:
    """Makes `replay` a sub-command although it is the only one; `_HELP` is the help text."""


@app.command("replay")
def replay(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Conversations as JSONL (.gz); without any, the source tree's sample."),
    ] = None,
    arm: Annotated[list[Arm] | None, typer.Option(help="Only these arms; repeatable.")] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Sessions at a time; repeatable. Default: 1 and 8.")
    ] = None,
    conversations: Annotated[
        int | None, typer.Option(min=1, help="At most so many of each file, the first ones.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=64, help="A conversation ends before a longer prompt.")
    ] = 24_000,
    policy: Annotated[str, typer.Option(metavar="POLICY", help="For conversations of messages.")] = POLICY,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json, or its folder; without it, bytes are tokens.")
    ] = None,
    model: Annotated[str, typer.Option(help="mla, gqa (random), tiny-mla, or a folder.")] = MODEL,
    pool: Annotated[int, typer.Option(min=1024, help="Tokens of SGLang's KV pool.")] = POOL,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens per SGLang page.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="OpenMP threads of SGLang on CPU.")] = 1,
    min_reuse: Annotated[int, typer.Option(min=1, help="Shortest run kept; of the ceiling too.")] = 16,
    picture: Annotated[Path | None, typer.Option(help="Draw the figures into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
) -> None:
    """Replay recorded conversations in arms: no policy, policy, LMCache, Leyline.

    Each arm has servers of its own, one arm after another. `hit` is cached over prompt tokens; `ceiling`
    is hits over the tokens that the longest common runs with the best earlier prompt of the session have.

    Example: `leyline bench replay run.jsonl --concurrency 1 --concurrency 8 --picture replay.png`
    """
    try:
        words = byte_tokenizer() if tokenizer is None else file_tokenizer(tokenizer)
        chosen = build([Document.parse(policy, "--policy").value], at=("--policy",))
        workloads = load(files or sample(), words, chosen, Limits(max_tokens, conversations))
    except (ConfigError, ConversationError, PolicyError, TokenizerError) as error:
        raise CliError(str(error), ExitCode.USAGE) from None
    servers = Servers(
        model=model,
        pool=pool,
        most_tokens=max_tokens,
        vocabulary=words.vocabulary,
        page_size=page_size,
        threads=threads,
        min_reuse=min_reuse,
    )
    with stderr().status("starting") as status:
        tallies = compare(
            workloads,
            servers,
            arms=arm or tuple(Arm),
            concurrency=concurrency or CONCURRENCY,
            on_progress=status.update,
        )
    if picture is not None:
        from leyline_lmcache.replay.picture import draw

        draw(tallies, picture)
    if as_json:
        print_json(
            {"tokenizer": words.name, "summary": summary(tallies), "arms": [t.to_json() for t in tallies]}
        )
        return
    out = stdout()
    out.print(f"tokenizer: {words.name}; policy: {policy}", markup=False)
    out.print(table(screen.COLUMNS, screen.rows(tallies)))
    out.print()
    for line in screen.verdicts(tallies):
        out.print(line, markup=False)
