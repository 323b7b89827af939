"""``leyline up``, ``down`` and ``status`` as commands, with a real SGLang where one is needed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.processes import MARK, assert_gone, processes, wait_for

from leyline_lmcache.cli.commands import COMMANDS

# The least that starts: SGLang alone.
ALONE = ("--no-plugin", "--no-lmcache", "--threads", "1")


class Leyline:
    """The command, with state and processes of its own."""

    def __init__(self, mark: str, folder: Path) -> None:
        self.state = folder / "state" / "leyline" / "stacks"
        self.env = dict(os.environ) | {MARK: mark, "XDG_STATE_HOME": str(folder / "state"), "NO_COLOR": "1"}

    def popen(self, *words: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "leyline_lmcache", *words],
            env=self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *words: str, **env: str) -> tuple[int, str, str]:
        process = self.popen(*words, **env)
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err

    def json(self, *words: str) -> Any:
        status, out, err = self(*words, "--json")
        assert status == 0, err
        return json.loads(out)


@pytest.fixture
def leyline(mark: str, tmp_path: Path) -> Leyline:
    return Leyline(mark, tmp_path)


def one_line(err: str) -> str:
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    return lines[0]


# -- help and errors, without servers ------------------------------------------------------


def test_help_imports_no_engine(leyline: Leyline) -> None:
    code = (
        "import sys\nfrom leyline_lmcache.cli import main\nmain(['--help'])\n"
        "heavy = {'torch', 'sglang', 'lmcache', 'httpx', 'yaml', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(leyline: Leyline, name: str) -> None:
    status, out, _ = leyline(name, "--help")
    assert status == 0
    assert "Example: leyline" in " ".join(out.split()).replace("`", "")
    assert "Exit status:" in out


@pytest.mark.parametrize(
    ("words", "status", "named"),
    [
        (["upp"], 2, "upp"),
        (["up", "--page-size", "x"], 2, "--page-size"),
        (["up", "--page-size", "0"], 1, "page_size"),
        (["up", "--set", "min_reuse"], 2, "--set"),
        (["up", "--env", "=x"], 2, "--env"),
        (["up", "--model", "/nonexistent"], 1, "model /nonexistent"),
        (["up", "--name", "Über/name"], 1, "name"),
        (["down", "--name", "never"], 1, "never"),
        (["status", "--name", "never"], 3, "never"),
    ],
)
def test_errors_are_one_line_that_names_the_field(
    leyline: Leyline, words: list[str], status: int, named: str
) -> None:
    got, out, err = leyline(*words)
    assert (got, out) == (status, "")
    assert named in one_line(err)


def test_nothing_to_show_or_stop_is_no_error(leyline: Leyline) -> None:
    assert leyline.json("status") == []
    assert leyline.json("down", "--all") == []


def test_a_taken_port_is_told_before_anything_starts(leyline: Leyline, mark: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        status, _, err = leyline("up", "--port", str(port))
    assert status == 1
    assert f"port {port} for sglang is in use" in one_line(err)
    assert processes(mark) == []


def test_a_folder_that_cannot_be_written_is_told(leyline: Leyline) -> None:
    status, _, err = leyline("up", XDG_STATE_HOME="/dev/null/state")
    assert status == 1
    assert "set XDG_STATE_HOME" in one_line(err)


def test_a_missing_redis_is_told(leyline: Leyline, tmp_path: Path) -> None:
    status, _, err = leyline("up", PATH=str(tmp_path))
    assert status == 1
    assert "apt-get install redis-server" in one_line(err)


def test_an_unreadable_record_is_told(leyline: Leyline) -> None:
    record = leyline.state / "broken" / "stack.json"
    record.parent.mkdir(parents=True)
    record.write_text('{"version": 1}')
    for words in (["status"], ["down", "--name", "broken"], ["up", "--name", "broken", *ALONE]):
        status, _, err = leyline(*words)
        assert status == 1
        assert str(record) in one_line(err)


# -- starting and not getting there ----------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_start_leaves_nothing(leyline: Leyline, mark: str, how: signal.Signals) -> None:
    starting = leyline.popen("up")
    wait_for(lambda: (leyline.state / "default" / "sglang.pid").exists(), "SGLang was not started")
    status, _, err = leyline("up")
    assert status == 1
    assert "default is being started" in one_line(err)
    starting.send_signal(how)
    _, err = starting.communicate(timeout=60)
    assert_gone(mark)
    if how == signal.SIGINT:
        assert starting.returncode == 130
        assert err.strip().splitlines()[-1] == "leyline: interrupted"
    assert leyline.json("status") == []


@pytest.mark.slow
def test_a_server_that_refuses_to_start_shows_why(leyline: Leyline, mark: str) -> None:
    status, out, err = leyline("up", *ALONE, "--sglang-arg=--no-such-flag")
    assert (status, out) == (1, "")
    assert "sglang ended with status" in err
    assert "--no-such-flag" in err
    assert processes(mark) == []


# -- a whole life ----------------------------------------------------------------------------


@pytest.mark.slow
def test_up_status_crash_down(leyline: Leyline, mark: str) -> None:
    record = leyline.json("up", "--name", "life", "--no-plugin", "--no-redis", "--threads", "1")
    assert record["servers"] == {"lmcache": "running", "sglang": "running"}
    url = record["sglang"]["url"]
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        assert json.load(answer)["data"][0]["id"] == "mla"
    assert leyline.json("status", "--name", "life") == [record]

    status, _, err = leyline("up", "--name", "life", *ALONE)
    assert status == 1
    assert f"life is already running at {url}" in one_line(err)

    os.kill(int((leyline.state / "life" / "lmcache.pid").read_text()), signal.SIGKILL)
    wait_for(
        lambda: leyline("status", "--name", "life", "--json")[0] == 3, "nobody noticed that lmcache died"
    )
    (now,) = leyline.json("status")
    assert now["state"] == "partly running"
    assert now["servers"] == {"lmcache": "stopped", "sglang": "running"}
    assert "life is already partly running" in leyline("up", "--name", "life", *ALONE)[2]

    (stopped,) = leyline.json("down", "--name", "life")
    assert stopped["servers"] == {"lmcache": "stopped", "sglang": "stopped"}
    assert processes(mark) == []
    assert Path(stopped["logs"]["sglang"]).is_file()
    assert leyline.json("status") == []
