"""``leyline down``."""

from __future__ import annotations

from typing import Annotated

import typer

from leyline_lmcache.cli.errors import CliError, ExitCode
from leyline_lmcache.cli.output import print_json, stderr, stdout
from leyline_lmcache.stack import StackError
from leyline_lmcache.stack.state import down, names


def run(
    name: Annotated[str, typer.Option(help="Name of the stack.")] = "default",
    everything: Annotated[bool, typer.Option("--all", help="Stop every stack.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was stopped as JSON.")] = False,
) -> None:
    """Stop the servers of a stack. Logs and journal stay where they are.

    Example: `leyline down --all`
    """
    stopped, failed = [], []
    for one in names() if everything else [name]:
        try:
            with stderr().status(f"stopping {one}"):
                stopped.append(down(one))
        except StackError as error:
            if not everything:
                raise CliError(str(error), ExitCode.FAILED) from error
            failed.append(str(error))
    if as_json:
        print_json([record.to_json() for record in stopped])
    else:
        for record in stopped:
            stdout().print(f"{record.name} is stopped; its logs: {record.endpoints['directory']}/logs")
        if not stopped and not failed:
            stdout().print("no stack was running")
    if failed:
        raise CliError("; ".join(failed), ExitCode.FAILED)
