"""Exit codes and the error that carries one."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the exit status of every command means."""

    OK = 0
    FAILED = 1
    """The command could not do what it was asked to."""
    USAGE = 2
    """An option or argument is wrong."""
    NOT_SO = 3
    """The command worked, and its answer is no: a stack does not run, the contract was not shown."""
    INTERNAL = 70
    """A fault of the program; ``LEYLINE_DEBUG=1`` shows where."""
    INTERRUPTED = 130


class CliError(RuntimeError):
    """Ends a command with one line on stderr.

    Attributes:
        code: the exit status.
    """

    def __init__(self, message: str, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.code = code
