"""From the command line to a sub-command, and from its errors to an exit status."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from leyline_lmcache import __version__
from leyline_lmcache.cli.commands import COMMANDS, Entry
from leyline_lmcache.cli.errors import CliError, ExitCode

DEBUG_VARIABLE = "LEYLINE_DEBUG"

_HELP = """Edit the middle of an agent's context and keep the KV after it: Leyline for SGLang and LMCache.

Example: `leyline up --model tiny-mla --json`
"""
_EPILOG = (
    "Exit status: 0 done; 1 could not be done; 2 wrong option; 3 the answer is no (not running, contract "
    "not shown); 70 a fault of the program (LEYLINE_DEBUG=1 shows where); 130 interrupted."
)
_CONTEXT = {"help_option_names": ["-h", "--help"]}


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"leyline {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options that stand before the sub-command; `build` sets the help text."""


def _placeholder() -> None:
    """Stands in the list of commands for one that is not called."""


def _register(app: typer.Typer, name: str, entry: Entry, *, called: bool) -> None:
    if not called:
        app.command(name, help=entry.summary)(_placeholder)
        return
    module = importlib.import_module(entry.module)
    if hasattr(module, "app"):
        app.add_typer(module.app, name=name, short_help=entry.summary, epilog=_EPILOG)
        return
    app.command(name, short_help=entry.summary, epilog=_EPILOG, context_settings=_CONTEXT)(module.run)


def build(argv: Sequence[str]) -> typer.Typer:
    """The application, in which only the sub-command that `argv` calls has its options."""
    called = next((word for word in argv if not word.startswith("-")), None)
    app = typer.Typer(
        help=_HELP, epilog=_EPILOG, no_args_is_help=True, add_completion=False, context_settings=_CONTEXT
    )
    app.callback()(_root)
    for name, entry in COMMANDS.items():
        _register(app, name, entry, called=name == called)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``leyline`` and return its exit status; every error is one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        result = build(words)(args=words, prog_name="leyline", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", ExitCode.INTERRUPTED)
    except CliError as error:
        return _fail(str(error), error.code)
    except BrokenPipeError:
        # Whoever read our output has had enough of it; keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except Exception as error:
        return _translate(error)
    if result == ExitCode.INTERRUPTED:  # typer turns a Ctrl-C into this status
        return _fail("interrupted", ExitCode.INTERRUPTED)
    return result if isinstance(result, int) else ExitCode.OK


def _translate(error: Exception) -> int:
    """The exit status of an error that the command did not expect to be one."""
    # Errors of the option parser, told by what they can do: newer typers bring a click of their own.
    describe = getattr(error, "format_message", None)
    if describe is not None:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "leyline"
        # Asked for nothing at all, typer has shown the help and says so by an error without text.
        return _fail(f"{describe()} (see {path} --help)" if describe() else "", ExitCode.USAGE)
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", ExitCode.FAILED)
    if _is_ours(error):
        return _fail(str(error), ExitCode.FAILED)
    hint = f"{type(error).__name__}: {error} (a fault of leyline; {DEBUG_VARIABLE}=1 shows where)"
    return _fail(hint, ExitCode.INTERNAL)


def _is_ours(error: Exception) -> bool:
    """True for the errors that our packages raise on purpose, whose messages are meant for people."""
    return type(error).__module__.partition(".")[0] == __name__.partition(".")[0]


def _fail(message: str, code: ExitCode) -> ExitCode:
    if message:
        typer.echo(f"leyline: {message}", err=True)
    return code
