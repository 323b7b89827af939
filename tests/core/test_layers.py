"""The core stands alone: it imports neither the engine's packages nor the layers above it."""

from __future__ import annotations

import os
import subprocess
import sys

CORE = [
    "codec",
    "directive",
    "envelope",
    "history",
    "journal",
    "ops",
    "pieces",
    "planner",
    "provenance",
    "ranges",
    "reasons",
    "view",
]


COMPARING = ["diff", "sessions"]
"""Works on arrays of tokens."""

HEAVY = {"torch", "sglang", "lmcache", "transformers", "triton", "redis"}


def imported(names: list[str]) -> set[str]:
    program = "import sys\n" + "".join(f"import leyline_lmcache.{name}\n" for name in names)
    program += "print(*sorted(sys.modules))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_what_compares_tokens_imports_nothing_heavy_but_numpy() -> None:
    loaded = imported(COMPARING)
    assert not loaded & HEAVY
    assert {name for name in loaded if name.startswith("leyline_lmcache.")} <= {
        f"leyline_lmcache.{name}" for name in CORE + COMPARING
    }


def test_the_core_imports_nothing_heavy_and_nothing_above_it() -> None:
    loaded = imported(CORE)
    assert not loaded & {*HEAVY, "numpy"}
    ours = {name for name in loaded if name.startswith("leyline_lmcache.")}
    assert ours == {f"leyline_lmcache.{name}" for name in CORE}
