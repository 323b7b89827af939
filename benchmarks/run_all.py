"""Run every benchmark of this folder, or those named, each in a process of its own.

python benchmarks/run_all.py [NAME ...]
"""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def benchmarks() -> dict[str, Path]:
    """Modules of this folder that define ``main()``, by name."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        if path.name.startswith("_") or path == Path(__file__).resolve():
            continue
        tree = ast.parse(path.read_text(), str(path))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[path.stem] = path
    return found


def main() -> int:
    """Run them in order; the status is 1 if one failed, and the others run all the same."""
    known = benchmarks()
    wanted = sys.argv[1:] or list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        print(
            f"no such benchmark: {', '.join(unknown)}; there are: {', '.join(known) or 'none'}",
            file=sys.stderr,
        )
        return 2
    failed = []
    for name in wanted:
        print(f"== {name}", flush=True)
        start = time.monotonic()
        if subprocess.run([sys.executable, str(known[name])], check=False).returncode:
            failed.append(name)
        print(f"== {name}: {time.monotonic() - start:.0f} s\n", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
