"""``leyline policy``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from leyline_lmcache.cli.errors import CliError, ExitCode
from leyline_lmcache.cli.output import print_json, stderr, stdout, table
from leyline_lmcache.policies.base import Pipeline, PolicyError
from leyline_lmcache.policies.config import build, load
from leyline_lmcache.policies.conversations import Conversation, ConversationError, read_conversations
from leyline_lmcache.policies.document import ConfigError, Document
from leyline_lmcache.policies.registry import Offer, Option, available, options
from leyline_lmcache.policies.trial import Sums, Turn, sums, trial

_SUFFIXES = (".yaml", ".yml")
_TURNS = ("turn", "messages", "full", "sent", "saved", "edited", "prefix", "splice")
_SESSIONS = ("session", "turns", "full", "sent", "saved", "edits", "prefix", "splice")

_HELP = """Try policies on recorded conversations, or list them.

Example: `leyline policy try run.jsonl --policy keep_tool_results`
"""

app = typer.Typer(no_args_is_help=True, help=_HELP)


@app.command("try")
def try_policies(
    file: Annotated[
        Path, typer.Argument(help="Conversations: messages as JSON or JSONL, also compressed (.gz).")
    ],
    policy: Annotated[
        list[str],
        typer.Option(
            metavar="POLICY",
            help="A YAML file of policies, or a name, or 'NAME: {OPTION: VALUE}'; repeatable, in order.",
        ),
    ],
    session: Annotated[str | None, typer.Option(help="Show the turns of this conversation.")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A tokenizer.json, or a model's folder: count tokens instead of characters."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every turn as JSON.")] = False,
) -> int:
    """Show what each turn of recorded conversations would drop and save.

    `edited` are the messages of the turn before that are now sent otherwise.
    `prefix` is what prefix caching could reuse of a prompt, `splice` what
    Leyline could, both by whole messages. No server is asked. The status is 3
    if the policies change nothing.

    Example: `leyline policy try run.jsonl --policy 'strip_reasoning: {keep: 2}'`
    """
    chosen = _policies(policy)
    count, unit = _counter(tokenizer)
    if tokenizer is not None:
        chosen = chosen.counting(count)
    found = _conversations(file, session)
    try:
        turns = {each.name: trial(chosen, each.messages, count) for each in found}
    except PolicyError as error:
        raise CliError(str(error)) from None
    everything = sums([turn for each in turns.values() for turn in each])
    if as_json:
        print_json(
            {
                "unit": unit,
                "total": asdict(everything),
                "sessions": {
                    name: {"total": asdict(sums(each)), "turns": [asdict(turn) for turn in each]}
                    for name, each in turns.items()
                },
            }
        )
    elif len(turns) == 1:
        ((name, only),) = turns.items()
        _show_turns(name, only, unit)
    else:
        _show_sessions(turns, everything, unit)
    return ExitCode.OK if everything.edits or everything.sent != everything.full else ExitCode.NOT_SO


@app.command("list")
def list_policies(
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """List the policies there are, with their options and defaults.

    Installed packages add theirs by the entry point group `leyline.policies`.

    Example: `leyline policy list --json`
    """
    found = {offer.name: _described(offer) for offer in available().values()}
    if as_json:
        print_json(
            [
                {"name": name, "source": offer.source, "summary": summary, "error": error}
                | {"options": None if known is None else [_option_json(option) for option in known]}
                for name, (offer, summary, known, error) in found.items()
            ]
        )
        return
    out = stdout()
    for name, (offer, summary, known, error) in found.items():
        out.print(f"[bold]{escape(name)}[/bold]   [dim]{escape(offer.source)}[/dim]")
        out.print(f"  {escape(error or summary)}", style="red" if error else None)
        for option in known or ():
            out.print(escape(f"    {option.name}: {_default(option)}"))


# -------------------------------------------------------------------------------------------- what is given


def _policies(given: Sequence[str]) -> Pipeline:
    """Files and single policies, one after another."""
    entries: list[Any] = []
    try:
        for text in given:
            if _is_file(text):
                load(text)  # says which line is wrong
                entries += Document.read(Path(text)).value["policies"] or []
            else:
                entries.append(Document.parse(text, "--policy").value)
        return build(entries, at=("--policy",))
    except ConfigError as error:
        raise CliError(str(error), ExitCode.USAGE) from None


def _is_file(text: str) -> bool:
    return text.endswith(_SUFFIXES) or Path(text).is_file()


def _conversations(file: Path, session: str | None) -> Sequence[Conversation]:
    try:
        read = read_conversations(file)
    except ConversationError as error:
        raise CliError(str(error), ExitCode.USAGE) from None
    if read.flat:
        stderr().print(f"{escape(str(file))}: {read.flat} with prompts as plain text left out")
    if not read.found:
        raise CliError(f"{file}: no conversation in it has messages", ExitCode.USAGE)
    names = [each.name for each in read.found]
    if len(set(names)) < len(names):
        raise CliError(f"{file}: session: two conversations have the same name", ExitCode.USAGE)
    if session is None:
        return read.found
    chosen = [each for each in read.found if each.name == session]
    if not chosen:
        raise CliError(f"--session {session}: not in {file}, which has {', '.join(names)}", ExitCode.USAGE)
    return chosen


def _counter(tokenizer: Path | None) -> tuple[Callable[[str], int], str]:
    if tokenizer is None:
        return len, "characters"
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise CliError("--tokenizer: needs the package tokenizers, which is not installed") from None
    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if not path.is_file():
        raise CliError(f"--tokenizer {path}: no such file", ExitCode.USAGE)
    try:
        made = Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises nothing narrower.
        raise CliError(f"--tokenizer {path}: not a tokenizer: {error}", ExitCode.USAGE) from None
    return lambda text: len(made.encode(text, add_special_tokens=False).ids), "tokens"


# -------------------------------------------------------------------------------------------- for people


def _show_turns(name: str, turns: Sequence[Turn], unit: str) -> None:
    out = stdout()
    out.print(f"{escape(name)}: {_plural(len(turns), 'turn')}; sizes are {unit}\n")
    rows = [
        (
            str(number),
            f"{turn.messages:,}",
            f"{turn.full:,}",
            f"{turn.sent:,}",
            _share(turn.full - turn.sent, turn.full),
            _indices(turn.edited),
            _share(turn.prefix, turn.sent),
            _share(turn.kept, turn.sent),
        )
        for number, turn in enumerate(turns)
    ]
    out.print(table(_TURNS, rows))
    out.print(f"\n{_verdict(sums(turns), unit)}")


def _show_sessions(turns: dict[str, list[Turn]], everything: Sums, unit: str) -> None:
    out = stdout()
    out.print(f"{_plural(len(turns), 'conversation')}; sizes are {unit}, summed over turns\n")
    rows = [_sums_row(name, sums(each)) for name, each in turns.items()]
    out.print(table(_SESSIONS, [*rows, _sums_row("all", everything)]))
    out.print(f"\n{_verdict(everything, unit)}")


def _sums_row(name: str, found: Sums) -> tuple[str, ...]:
    return (
        escape(name if len(name) <= 24 else f"{name[:23]}…"),
        str(found.turns),
        f"{found.full:,}",
        f"{found.sent:,}",
        _share(found.full - found.sent, found.full),
        f"{found.edits:,}",
        _share(found.prefix, found.sent),
        _share(found.kept, found.sent),
    )


def _verdict(found: Sums, unit: str) -> str:
    if not found.edits and found.sent == found.full:
        return "The policy changes nothing here."
    saved = found.full - found.sent
    return (
        f"{saved:,} of {found.full:,} {unit} not sent ({_share(saved, found.full)}), by "
        f"{_plural(found.edits, 'edit')}.\nOf what is sent, prefix caching reuses "
        f"{_share(found.prefix, found.sent)}, a splice {_share(found.kept, found.sent)}."
    )


def _indices(indices: Sequence[int]) -> str:
    shown = " ".join(str(index) for index in indices[:4])
    return f"{shown} …" if len(indices) > 4 else shown


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _plural(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _described(offer: Offer) -> tuple[Offer, str, tuple[Option, ...] | None, str | None]:
    try:
        factory = offer.factory()
    except Exception as error:
        # Foreign code may raise anything; the list has to go on.
        return offer, "", None, f"cannot be loaded: {type(error).__name__}: {error}"
    summary = (factory.__doc__ or "").strip().splitlines() or [""]
    return offer, summary[0], options(factory), None


def _plain(value: Any) -> Any:
    """A default as it would stand in a configuration."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    names = getattr(value, "__slots__", None)
    if names and not isinstance(value, str):
        return {name: _plain(getattr(value, name)) for name in names}
    return value


def _default(option: Option) -> str:
    if option.required:
        return "required"
    value = _plain(option.default)
    if isinstance(value, list) and len(value) > 3:
        return f"{len(value)} by default"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {each}" for name, each in value.items()) + "}"
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None or value == [] else str(value)


def _option_json(option: Option) -> dict[str, Any]:
    return {"name": option.name, "required": option.required} | (
        {} if option.required else {"default": _plain(option.default)}
    )
