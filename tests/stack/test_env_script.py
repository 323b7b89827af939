"""scripts/env.sh says in one line what it lacks; building an environment itself is what CI starts with."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "env.sh"


def run(*words: str, **env: str) -> tuple[int, str, str]:
    env = dict(os.environ) | env
    done = subprocess.run([str(SCRIPT), *words], env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "env", "status", "told"),
    [
        (["--bogus"], {}, 2, "unknown option --bogus"),
        ([], {"PYTHON": "/usr/bin/false"}, 1, "needs Python 3.11"),
        ([], {"LEYLINE_VENV": "/proc/nowhere"}, 1, "set LEYLINE_VENV or XDG_CACHE_HOME"),
    ],
)
def test_what_is_wrong_is_one_line(words: list[str], env: dict[str, str], status: int, told: str) -> None:
    got, out, err = run(*words, **env)
    assert (got, out) == (status, "")
    assert told in err
    assert len(err.strip().splitlines()) == 1


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    status, out, err = run(LEYLINE_VENV=str(tmp_path))
    assert (status, out) == (1, "")
    assert "was not made by this script" in err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_python_without_pip_is_told(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    for name in ("pip", "ensurepip"):
        (blocked / f"{name}.py").write_text("raise ImportError('not installed')\n")
    status, out, err = run(LEYLINE_VENV=str(tmp_path / "env"), PYTHONPATH=str(blocked))
    assert (status, out) == (1, "")
    assert "apt-get install python3-pip" in err
