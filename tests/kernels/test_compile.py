"""The kernel compiles for a real GPU, reads and writes 16 bytes at a time, and spills nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton.backends.nvidia")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
    }
    script = Path(__file__).with_name("compile_kernel.py")
    run = subprocess.run(
        [sys.executable, "-P", str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "case",
    ["mla_bf16_moves", "mla_bf16_stays", "mla_fp8_moves", "gqa_bf16_moves", "gqa_fp8_stays", "mla_odd_moves"],
)
def test_a_hopper_kernel(report: dict[str, Any], case: str) -> None:
    got = report[case]
    assert got["spilled_bytes"] == 0
    assert got["stores"] > 0
    if case != "mla_odd_moves":  # rows of odd length cannot be read wide
        assert got["wide_stores"] == got["stores"]
        assert got["wide_loads"] >= got["wide_stores"]
