"""``leyline demo`` on the real stack."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.processes import MARK, assert_gone, processes, wait_for

from leyline_lmcache.cli import demo, main
from leyline_lmcache.demo.servers import Running
from leyline_lmcache.stack import Stack


def start(mark: str, folder: Path, *words: str) -> subprocess.Popen[str]:
    env = dict(os.environ) | {MARK: mark, "XDG_STATE_HOME": str(folder / "state"), "NO_COLOR": "1"}
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "leyline_lmcache", "demo", *words],
        env=env,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def on_shared_servers(stack_tiny: Stack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The demo talks to the servers that the other tests use; everything else is its own."""

    @contextmanager
    def servers(*_: object) -> Iterator[Running]:
        yield Running(stack_tiny.sglang_url, stack_tiny.journal_dir)

    monkeypatch.setattr(demo, "servers", servers)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.stack
def test_the_contract_holds_and_everything_is_shown(
    on_shared_servers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--turns", "4", "--seed", "2", "--json", "figures.json", "--keep"]) == 0
    out = capsys.readouterr().out
    assert (on_shared_servers / "leyline-demo.png").read_bytes().startswith(b"\x89PNG")

    found = json.loads((on_shared_servers / "figures.json").read_text())
    assert found["verdict"] == "held"
    assert found["summary"]["turns_spliced"] == found["summary"]["splice_equals_full"] == 4
    assert found["summary"]["reprefill_equals_full"] < 4
    for turn in found["turns"]:
        for done in turn["arms"].values():
            for one in (done["draft"], done["final"]):
                parts = [one[name] for name in ("prefix", "spliced", "filled", "prefilled")]
                assert sum(parts) == one["prompt"]
                assert min(parts) >= 0
        splice, again = turn["arms"]["splice"]["final"], turn["arms"]["re-prefill"]["final"]
        assert splice["spliced"] > 100
        assert splice["filled"] + splice["prefilled"] < again["prefilled"]
        assert (again["spliced"], again["filled"]) == (0, 0)
    assert {op["op"] for op in found["last_plan"]} == {"fill", "copy_rotate", "invalidate"}
    assert "The contract held" in out

    base, edited, plain = (_run(line) for line in out.splitlines() if line.startswith("curl "))
    assert base["meta_info"]["id"] == "try-1"
    assert edited["meta_info"]["leyline"]["outcome"] == "spliced"
    assert "leyline" not in plain["meta_info"]
    assert edited["text"] == base["text"] != plain["text"]


def _run(command: str) -> Any:
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


@pytest.mark.stack
def test_an_edit_that_is_not_spliced_is_not_a_success(
    on_shared_servers: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Directives that the plugin takes for somebody else's: the prompt is prefilled.
    monkeypatch.setattr("leyline_lmcache.demo.arms.SPLICE", "kv.unknown")
    assert main(["demo", "--turns", "1"]) == 3
    assert "Not every edit was spliced" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.stack
def test_the_contract_holds_from_every_tier(mark: str, tmp_path: Path) -> None:
    demo = start(mark, tmp_path, "--turns", "6", "--seed", "2", "--json", "figures.json")
    out, err = demo.communicate(timeout=400)
    assert demo.returncode == 0, out + err
    found = json.loads((tmp_path / "figures.json").read_text())
    for turn in found["turns"]:
        final = turn["arms"]["splice"]["final"]
        nearer = {"gpu": [], "cpu": ["gpu"], "redis": ["gpu"]}[turn["place"]]
        assert final[turn["place"]] > 200, turn
        assert [final[tier] for tier in nearer] == [0 for _ in nearer], turn
        # A chunk that the fill has just brought is in L1 for the request behind it.
        assert final["cpu"] <= final["redis"] / 4 or turn["place"] == "cpu", turn
        assert final["redis"] == 0 or turn["place"] == "redis", turn
    assert {turn["place"] for turn in found["turns"]} == {"gpu", "cpu", "redis"}
    # What the fill brought is in L1 for the request behind it.
    assert {"gpu", "redis"} <= {op["tier"] for op in found["last_plan"]}
    assert_gone(mark)


@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_while_servers_start_it_leaves_nothing(
    mark: str, tmp_path: Path, how: signal.Signals, status: int
) -> None:
    demo = start(mark, tmp_path)
    wait_for(lambda: len(processes(mark)) > 4, "the servers were not started")
    demo.send_signal(how)
    _, err = demo.communicate(timeout=60)
    assert demo.returncode == status, err
    assert "stopping the servers" in err
    assert_gone(mark)
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.slow
@pytest.mark.stack
def test_interrupted_in_the_middle_it_leaves_nothing(mark: str, tmp_path: Path) -> None:
    demo = start(mark, tmp_path, "--turns", "16")
    assert demo.stdout is not None
    for line in demo.stdout:
        if re.match("turn 2 ", line):
            break
    demo.send_signal(signal.SIGINT)
    demo.send_signal(signal.SIGINT)  # an impatient one
    _, err = demo.communicate(timeout=60)
    assert demo.returncode == 130, err
    assert err.strip().splitlines()[-1] == "leyline: interrupted"
    assert_gone(mark)


@pytest.mark.parametrize(
    ("words", "status", "named"),
    [
        (["--turns", "0"], 2, "--turns"),
        (["--turns", "99"], 2, "--turns"),
        (["--page-size", "0"], 2, "--page-size"),
        (["--model", "/nonexistent"], 1, "model /nonexistent"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(
    mark: str, tmp_path: Path, words: list[str], status: int, named: str
) -> None:
    demo = start(mark, tmp_path, *words)
    out, err = demo.communicate(timeout=60)
    assert (demo.returncode, out) == (status, "")
    assert named in err
    assert_gone(mark)
