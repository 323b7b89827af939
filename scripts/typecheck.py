"""Run ``mypy --strict`` on the package as it is installed.

mypy knows nothing of setuptools' ``package-dir``. So the installed layout is rebuilt from symbolic links
below ``build/typecheck`` and checked there; paths in the messages are turned back into those of the tree.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FARM = ROOT / "build" / "typecheck"
MAPPED = ("connector", "kernels")


def lay_out() -> None:
    """Make ``FARM/leyline_lmcache`` a folder of links; links that are already right stay, others go."""
    package = FARM / "leyline_lmcache"
    package.mkdir(parents=True, exist_ok=True)
    wanted = {
        entry.name: entry for entry in (ROOT / "leyline_lmcache").iterdir() if entry.name != "__pycache__"
    }
    wanted |= {name: ROOT / name for name in MAPPED}
    for link in package.iterdir():
        if wanted.get(link.name) != link.readlink():
            link.unlink()
    for name, target in wanted.items():
        link = package / name
        if not link.is_symlink():
            link.symlink_to(target)


def main() -> int:
    """Check the package; the exit status is mypy's."""
    lay_out()
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(ROOT / "pyproject.toml"),
        "-p",
        "leyline_lmcache",
    ]
    cache = ["--cache-dir", str(ROOT / ".mypy_cache")]
    run = subprocess.run(
        [*command, *cache, *sys.argv[1:]], cwd=FARM, capture_output=True, text=True, check=False
    )
    text = re.sub(r"(?m)^leyline_lmcache/(?=(?:connector|kernels)/)", "", run.stdout)
    sys.stdout.write(text)
    sys.stderr.write(run.stderr)
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
