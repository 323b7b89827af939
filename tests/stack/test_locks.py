"""The locks hold what is needed on every supported Python, not only on the one they were made with."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]

OURS = (
    "redis",
    "httpx",
    "msgpack",
    "msgspec",
    "numpy",
    "prometheus-client",
    "PyYAML",
    "rich",
    "typer",
    "pytest",
)
"""What this package and its tests import; the engines' own lists are cut down on purpose."""


def locked() -> set[str]:
    names = set()
    for lock in ("engine", "dev"):
        for line in (ROOT / "requirements" / f"{lock}.lock").read_text().splitlines():
            if line and not line.startswith("#"):
                names.add(canonicalize_name(re.split(r"[=<>!~;@ \[]", line, maxsplit=1)[0]))
    return names


@pytest.mark.parametrize("python", ["3.11.0", "3.11.2", "3.11.9", "3.12.0", "3.13.0"])
def test_what_our_dependencies_need_is_locked(python: str) -> None:
    """Debian 12 has Python 3.11.2, where redis needs a package that later ones do not."""
    environment = {"python_full_version": python, "python_version": python.rpartition(".")[0], "extra": ""}
    known, seen, missing = locked(), set(), []
    waiting = list(OURS)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        for text in metadata.requires(name) or ():
            needed = Requirement(text)
            if needed.marker is not None and not needed.marker.evaluate(environment):
                continue
            if canonicalize_name(needed.name) not in known:
                missing.append(f"{name} needs {text}")
            elif canonicalize_name(needed.name) not in seen:
                try:
                    metadata.distribution(needed.name)
                except metadata.PackageNotFoundError:
                    continue  # locked for another Python than this one
                waiting.append(needed.name)
    assert missing == []
