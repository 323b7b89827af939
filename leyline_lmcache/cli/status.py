"""``leyline status``."""

from __future__ import annotations

from typing import Annotated

import typer

from leyline_lmcache.cli.errors import CliError, ExitCode
from leyline_lmcache.cli.output import print_json, stdout, table
from leyline_lmcache.stack.state import check_name, load, names


def run(
    name: Annotated[str | None, typer.Option(help="Only this stack.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the endpoints as JSON.")] = False,
) -> int:
    """Show the stacks that `up` started. With --name, the status is 3 unless all its servers run.

    Example: `leyline status --name try --json`
    """
    found = [load(one) for one in ([check_name(name)] if name is not None else names())]
    records = [record for record in found if record is not None]
    if name is not None and not records:
        raise CliError(f"name: no stack {name} was started", ExitCode.NOT_SO)
    if as_json:
        print_json([record.to_json() for record in records])
    elif records:
        rows = [
            (
                record.name,
                record.state,
                str(record.endpoints["sglang"]["model"]),
                str(record.endpoints["sglang"]["url"]),
                ", ".join(role for role, up in record.alive().items() if up) or "none",
            )
            for record in records
        ]
        stdout().print(table(("name", "state", "model", "SGLang", "servers that run"), rows))
    else:
        stdout().print("no stack was started; see leyline up --help")
    running = all(record.state == "running" for record in records)
    return ExitCode.OK if name is None or running else ExitCode.NOT_SO
