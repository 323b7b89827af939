"""``leyline ops``."""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from leyline_lmcache.cli.errors import CliError, ExitCode
from leyline_lmcache.cli.output import print_json, stdout, table
from leyline_lmcache.journal import Filter, JournalReader, OpRecord
from leyline_lmcache.ops import OpKind, Tier
from leyline_lmcache.reasons import FallbackReason

HEADER = f"{'time':8} {'request':8} {'lineage':8} {'tier':5} {'op':11} " + " ".join(
    f"{name:>6}" for name in ("blocks", "tokens", "shift", "bytes", "µs")
)
_WIDTH = 8
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def run(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", help="Folder of the journal; by default what LEYLINE_CONFIG or a running stack names."
        ),
    ] = None,
    stack: Annotated[str | None, typer.Option(help="The journal of this stack (see leyline status).")] = None,
    tier: Annotated[Tier | None, typer.Option(help="Only ops of this tier.")] = None,
    op: Annotated[OpKind | None, typer.Option(help="Only ops of this kind.")] = None,
    request: Annotated[str | None, typer.Option(help="Only of requests whose id starts so.")] = None,
    lineage: Annotated[str | None, typer.Option(help="Only of edits whose lineage starts so.")] = None,
    reason: Annotated[
        FallbackReason | None, typer.Option(help="Only edits that were refused for this reason.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Only from then on: 90s, 10m, 2h, 1d ago, or an ISO 8601 time.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Show the newest so many; totals count all.")] = 50,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is executed from now on.")
    ] = False,
    totals: Annotated[bool, typer.Option("--totals", help="Show sums only.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per op (or the sums).")
    ] = False,
) -> None:
    """List the ops that a server executed, oldest first, from its journal.

    A refused edit is a line of its own with its reason. With --follow, end with Ctrl-C.

    Example: `leyline ops --since 10m --op copy_rotate --json`
    """
    reader = JournalReader(_directory(directory, stack))
    wanted = Filter(tier=tier, op=op, reason=reason, since=None if since is None else _since(since))
    accepts = _prefixes(request, lineage)
    if totals and follow:
        raise CliError("--totals: cannot be combined with --follow", ExitCode.USAGE)
    if totals:
        _show_totals(filter(accepts, reader.records(wanted)), as_json)
        return
    if not as_json:
        typer.echo(HEADER)
    newest = deque(filter(accepts, reader.records(wanted)), maxlen=limit)
    for record in newest:
        _show(record, as_json)
    if follow:
        sys.stdout.flush()
        for record in filter(accepts, _follow(reader, wanted, newest)):
            _show(record, as_json)
            sys.stdout.flush()
    if reader.corrupt:
        typer.echo(
            f"leyline: {reader.corrupt} lines of the journal are no records and were left out", err=True
        )


def _follow(reader: JournalReader, wanted: Filter, shown: Sequence[OpRecord]) -> Iterator[OpRecord]:
    """What comes after the records that were shown, those included that were written meanwhile."""
    if not shown:
        yield from reader.follow(wanted, from_start=True)
        return
    last = shown[-1].ts
    known = {record for record in shown if record.ts == last}
    for record in reader.follow(replace(wanted, since=last), from_start=True):
        if record not in known:
            yield record


def describe(record: OpRecord) -> str:
    """A record as a line below `HEADER`; a refused edit has its reason in place of the figures."""
    request = record.request.removeprefix("leyline-fill-")
    who = (
        f"{datetime.fromtimestamp(record.ts):%H:%M:%S} {request[:_WIDTH]:8} "
        f"{record.lineage[:_WIDTH]:8} {record.tier.value:5}"
    )
    if record.op is None:
        return f"{who} refused     {record.reason.value if record.reason else ''}"
    figures = (record.blocks, record.tokens)
    line = (
        f"{who} {record.op.value.replace('_', '+'):11} "
        + " ".join(f"{value:>6}" for value in figures)
        + f" {record.shift or '':>6} {human_bytes(record.bytes):>6} {record.micros:>6}"
    )
    return line if record.reason is None else f"{line} {record.reason.value}"


def human_bytes(count: int) -> str:
    """A size in at most six characters; nothing for 0."""
    if not count:
        return ""
    size = float(count)
    for unit in ("B", "K", "M", "G"):
        if size < 1000 or unit == "G":
            break
        size /= 1024
    return f"{size:.0f}{unit}" if unit == "B" or size >= 100 else f"{size:.1f}{unit}"


def _show(record: OpRecord, as_json: bool) -> None:
    typer.echo(record.to_json() if as_json else describe(record))


def _show_totals(records: Iterable[OpRecord], as_json: bool) -> None:
    ops: dict[tuple[str, str], list[int]] = {}
    refused: dict[str, int] = {}
    for record in records:
        if record.op is None:
            name = record.reason.value if record.reason else "unknown"
            refused[name] = refused.get(name, 0) + 1
            continue
        sums = ops.setdefault((record.tier.value, record.op.value), [0] * 5)
        for at, value in enumerate((1, record.blocks, record.tokens, record.bytes, record.micros)):
            sums[at] += value
    names = ("ops", "blocks", "tokens", "bytes", "micros")
    if as_json:
        found: list[dict[str, Any]] = [
            {"tier": tier, "op": op, **dict(zip(names, sums, strict=True))}
            for (tier, op), sums in sorted(ops.items())
        ]
        print_json({"ops": found, "refused": dict(sorted(refused.items()))})
        return
    rows = [
        (
            tier,
            op.replace("_", "+"),
            *(f"{value:,}" for value in sums[:3]),
            human_bytes(sums[3]),
            f"{sums[4]:,}",
        )
        for (tier, op), sums in sorted(ops.items())
    ]
    shown = table(("tier", "op", "ops", "blocks", "tokens", "bytes", "µs"), rows)
    for column in shown.columns[2:]:
        column.justify = "right"
    stdout().print(shown if rows else "no ops")
    for name, count in sorted(refused.items()):
        stdout().print(f"refused, {name}: {count}")


def _prefixes(request: str | None, lineage: str | None) -> Callable[[OpRecord], bool]:
    def accepts(record: OpRecord) -> bool:
        return record.request.startswith(request or "") and record.lineage.startswith(lineage or "")

    return accepts


# ----------------------------------------------------------------------------------------- where and since


def _directory(directory: Path | None, stack: str | None) -> Path:
    """The journal's folder: as asked for, else of the configuration in the environment, else of a stack."""
    if directory is not None and stack is not None:
        raise CliError("--dir, --stack: expected one of them", ExitCode.USAGE)
    if directory is None and stack is None:
        directory = _configured()
    if directory is None:
        directory = _of_stack(stack)
    if not directory.is_dir():
        raise CliError(f"journal: there is no folder {directory}; the first edit makes it", ExitCode.FAILED)
    return directory


def _configured() -> Path | None:
    from leyline_lmcache.connector.settings import Settings, SettingsError

    try:
        return Settings.load().journal_dir
    except SettingsError as error:
        raise CliError(str(error)) from None


def _of_stack(name: str | None) -> Path:
    from leyline_lmcache.stack.state import Record, check_name, load, names

    def found() -> Iterator[Record]:
        for each in [check_name(name)] if name is not None else names():
            record = load(each)
            if record is not None and "journal_dir" in record.endpoints:
                yield record

    records = list(found())
    if name is not None and not records:
        raise CliError(f"--stack: no stack {name} with a journal was started; see leyline status")
    running = [record for record in records if record.state != "stopped"] or records
    if len(running) > 1:
        known = ", ".join(record.name for record in running)
        raise CliError(f"--stack: several stacks have a journal ({known}): name one", ExitCode.USAGE)
    if not running:
        raise CliError(
            "--dir: no journal is known: name its folder, set LEYLINE_CONFIG to a file with journal_dir, "
            "or start a stack (leyline up)",
            ExitCode.USAGE,
        )
    return Path(running[0].endpoints["journal_dir"])


def _since(text: str) -> float:
    """Seconds since the epoch."""
    ago = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)([smhd])", text)
    if ago:
        return time.time() - timedelta(**{_UNITS[ago[2]]: float(ago[1])}).total_seconds()
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise CliError(
            f"--since: expected a time such as 10m or 2026-05-04T12:00:00, got {text!r}", ExitCode.USAGE
        ) from None
