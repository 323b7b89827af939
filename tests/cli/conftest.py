"""The command, called in this process: fast, and with everything it prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from leyline_lmcache.cli import main


@dataclass(frozen=True, slots=True)
class Done:
    """What a call of the command gave."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.status == 0, self.err
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line on stderr."""
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        return lines[0].removeprefix("leyline: ")


Leyline = Callable[..., Done]


@pytest.fixture
def leyline(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Leyline:
    """`leyline("plan", "--length", 10)`, far from the configuration and stacks of whoever runs the tests."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("LEYLINE_CONFIG", "LEYLINE_JOURNAL_DIR"):
        monkeypatch.delenv(name, raising=False)

    def call(*words: object) -> Done:
        status = main([str(word) for word in words])
        printed = capsys.readouterr()
        return Done(int(status), printed.out, printed.err)

    return call
