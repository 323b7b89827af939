"""What an installation from a wheel holds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAPPED = {
    "leyline_lmcache": "leyline_lmcache",
    "connector": "leyline_lmcache/connector",
    "kernels": "leyline_lmcache/kernels",
}


def test_the_wheel_holds_every_file_of_every_package(tmp_path: Path) -> None:
    source = tmp_path / "source"
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in MAPPED:
        shutil.copytree(ROOT / folder, source / folder, ignore=skip)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    # The build backend itself: the project's environment has no pip.
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], check=True, capture_output=True, cwd=source)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        (listed,) = [name for name in held if re.fullmatch(r"leyline_lmcache-[^/]*/entry_points.txt", name)]
        entry_points = archive.read(listed).decode()

    expected = {
        f"{installed}/{path.relative_to(source / folder)}"
        for folder, installed in MAPPED.items()
        for path in (source / folder).rglob("*")
        if path.is_file()
    }
    assert expected - held == set()
    assert not any(name.startswith(("kernels/", "connector/", "tests/")) for name in held)
    assert "leyline = leyline_lmcache.connector.plugin:register" in entry_points
    assert "leyline = leyline_lmcache.cli:main" in entry_points
