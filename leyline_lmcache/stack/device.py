"""Which device the servers run on, and the environment they need for it."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

CPU_SHIM = Path(__file__).with_name("cpu_shim")

# Set for every server: no telemetry, and no look-up of models that are on disk anyway.
_QUIET = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "TRANSFORMERS_OFFLINE": "1",
    # A server must not import folders of whatever directory it was started in.
    "PYTHONSAFEPATH": "1",
    "PYTHONUNBUFFERED": "1",
}
# Idle OpenMP threads that spin take the few cores of a CPU machine from the other servers.
_CPU = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@functools.cache
def detect() -> str:
    """``"cuda"`` if the installed torch can use a GPU here, else ``"cpu"``.

    torch is asked in a process of its own: importing it takes seconds, and ours do without.
    """
    if not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg")):
        return "cpu"
    question = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    asked = subprocess.run([sys.executable, "-c", question], capture_output=True, check=False)
    return "cuda" if asked.returncode == 0 else "cpu"


def server_env(
    device: str, extra: Mapping[str, str], base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of a server process: `base` (default: ours), what `device` needs, then `extra`."""
    env = dict(os.environ if base is None else base) | _QUIET
    if device == "cpu":
        env |= {key: value for key, value in _CPU.items() if key not in env}
        before = env.get("PYTHONPATH")
        env["PYTHONPATH"] = os.pathsep.join([str(CPU_SHIM), *([before] if before else [])])
    return env | dict(extra)


def activate_shim() -> None:
    """Make this process able to import sglang, lmcache and transformers on a machine without CUDA.

    For tests, benchmarks and scripts; servers get the same through their environment.
    """
    if detect() != "cpu":
        return
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    if str(CPU_SHIM) not in sys.path:
        sys.path.insert(0, str(CPU_SHIM))
    importlib.import_module("leyline_cpu_shim").install()
