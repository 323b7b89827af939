"""The package list; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

_MAPPED = ("connector", "kernels")

setup(
    packages=[
        *find_packages(include=["leyline_lmcache", "leyline_lmcache.*"]),
        *(f"leyline_lmcache.{name}" for top in _MAPPED for name in find_packages(include=[top, f"{top}.*"])),
    ]
)
