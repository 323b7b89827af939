"""What commands print: tables for people on a terminal, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table


def stdout() -> Console:
    """Where results go."""
    return Console(soft_wrap=True, highlight=False)


def stderr() -> Console:
    """Where progress goes."""
    return Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """Print plain data as indented JSON."""
    typer.echo(json.dumps(value, indent=2))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A plain table."""
    made = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        made.add_row(*row)
    return made
