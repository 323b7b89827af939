"""What every benchmark shares: one format of results, one look of tables.

A benchmark is a module of this folder with a function ``main()``, and a command: ``python benchmarks/X.py``.
Timings depend on the machine, so a benchmark compares its arms in one run and reports ratios.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from leyline_lmcache.stack.device import activate_shim

RESULTS = Path(__file__).resolve().parent / "results"
_PACKAGES = ("leyline-lmcache", "sglang", "lmcache", "torch", "triton", "redis", "numpy")

Figure = int | float | str | bool | None

# Benchmarks import torch, transformers and SGLang like the servers do.
activate_shim()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _gpu() -> str | None:
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def _revision() -> str | None:
    try:
        asked = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def environment() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": _revision(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in _PACKAGES},
        "cpu": _cpu_model(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "gpu": _gpu(),
    }


def write_result(name: str, summary: Mapping[str, Figure], details: Any = None) -> Path:
    """Write ``results/NAME.json`` and return its path.

    Args:
        name: of the benchmark.
        summary: its figures, flat: names to plain values.
        details: anything JSON can hold, for whoever wants to look closer.

    Raises:
        TypeError: a figure is not a plain value.
    """
    for key, value in summary.items():
        if not isinstance(value, int | float | str | bool | None):
            raise TypeError(
                f"summary.{key}: must be a number, text, true, false or null, is {type(value).__name__}"
            )
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    result = {"name": name, "summary": dict(summary), "environment": environment(), "details": details}
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    scratch.replace(path)
    return path


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; floats with four significant digits."""
    table = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(table)


def finish(name: str, summary: Mapping[str, Figure], details: Any = None) -> None:
    """Write the result and print its summary."""
    path = write_result(name, summary, details)
    print_table(name, ("figure", "value"), list(summary.items()))
    print(f"written to {os.path.relpath(path)}")


def median_seconds(call: Callable[[], object], *, repeat: int = 5, warmup: int = 1) -> float:
    """Median duration of `call` in seconds."""
    for _ in range(warmup):
        call()
    taken = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
